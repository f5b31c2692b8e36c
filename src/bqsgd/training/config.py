"""Every knob of a run as one checked value, and its TOML form."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bqsgd.data.features import FEATURES
from bqsgd.errors import InvalidParameter
from bqsgd.params import Mechanism, check_int, check_positive
from bqsgd.persample.clips import L2, BatchMean, Clamp, Clip, Dual, Scale
from bqsgd.planner.plan import Budget
from bqsgd.release import Scheme, Unit
from bqsgd.training.aggregation import smallest_quorum
from bqsgd.training.optimisers import Adam, Sgd, optimiser, schedule

CLIPS = ("dual", "clamp", "l2", "scale", "batch-mean")
SAMPLINGS = {"poisson": Scheme.POISSON, "fixed": Scheme.FIXED_SIZE, "full": Scheme.FULL}
CODINGS = ("fixed", "entropy")
_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class BudgetChange:
    """From `from_round` on, client `client` has this budget instead of the run's; what is left out stays the run's."""

    client: int
    from_round: int = 0
    bits: int | None = None
    epsilon: float | None = None
    delta: float | None = None


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run. The privacy budget (epsilon, delta) is the proven total of each client over all rounds.

    front_end: a fixed transform of the inputs, "scattering" or "none"; it costs no privacy.
    levels and trials: give both to fix the mechanism instead of planning it for the budget.
    range: what one coordinate of the mean is clamped to before encoding. Left out it is the clip's bound, or, when the
    clip has a norm C2 and samples are averaged, 4 C2 / L if that is less: about twice the noise a client then adds.
    seed: makes noise and batches reproducible and voids the privacy claim. init_seed: of the initial model and of who
    holds which data; both are public.
    average: decay of the exponential average of the model, 0 for none. run: its name in the ledgers.
    """

    dataset: str = "mnist"
    data_folder: str | None = None
    front_end: str = "none"
    model: str | None = None
    activation: str = "tanh"
    clients: int = 4
    concentration: float | None = None
    rounds: int = 1000
    batch_size: int = 512
    sampling: str = "poisson"
    clip: str = "dual"
    clip_bound: float = 0.1
    clip_norm: float = 0.5
    range: float | None = None
    bits: int = 8
    epsilon: float = 3.0
    delta: float = 1e-5
    levels: int | None = None
    trials: int | None = None
    budgets: tuple[BudgetChange, ...] = ()
    coding: str = "fixed"
    optimiser: str = "sgd"
    learning_rate: float = 0.5
    momentum: float = 0.9
    subtract_noise: bool = False
    schedule: str = "linear"
    average: float = 0.0
    aggregation: str = "mean"
    byzantine: int = 0
    quorum: int = 1
    deadline_seconds: float | None = None
    unit: str = "sample"
    local_steps: int = 1
    local_learning_rate: float = 0.1
    seed: int | None = None
    init_seed: int = 0
    evaluate_every: int = 10
    checkpoint_every: int = 20
    reserve_rounds: int = 20
    private_metrics: bool = False
    workers: int = 2
    run: str | None = None

    def __post_init__(self) -> None:
        for name, low, high in _INTEGERS:
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low, high)
        for name in ("concentration", "range", "learning_rate", "local_learning_rate", "deadline_seconds"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        _choice("clip", self.clip, CLIPS)
        _choice("sampling", self.sampling, tuple(SAMPLINGS))
        _choice("coding", self.coding, CODINGS)
        _choice("front_end", self.front_end, FEATURES)
        _choice("unit", self.unit, tuple(Unit))
        schedule(self.schedule, round=0, rounds=self.rounds)
        self.make_optimiser()
        if not (isinstance(self.average, (int, float)) and 0 <= self.average < 1):
            raise InvalidParameter(f"average must lie in [0, 1), got {self.average!r}; 0 switches it off")
        if max(self.quorum, smallest_quorum(self.aggregation, byzantine=self.byzantine)) > self.clients:
            needed = smallest_quorum(self.aggregation, byzantine=self.byzantine)
            raise InvalidParameter(
                f"{self.clients} clients can never meet quorum={self.quorum} and the {needed} updates that "
                f"{self.aggregation} needs with byzantine={self.byzantine}"
            )
        if (self.levels is None) != (self.trials is None):
            raise InvalidParameter("give both levels and trials, or neither (then they are planned for the budget)")
        self._check_unit()
        object.__setattr__(self, "budgets", tuple(self.budgets))
        for change in self.budgets:
            check_int("budgets.client", change.client, 0, self.clients - 1)
            check_int("budgets.from_round", change.from_round, 0, self.rounds - 1)
            if self.levels is not None:
                raise InvalidParameter("budgets that differ by client need planning; leave out levels and trials")
        self.budget(client=0, round=0)
        self.make_clip()

    def _check_unit(self) -> None:
        if self.unit == Unit.SAMPLE and self.local_steps > 1:
            raise InvalidParameter(
                f"local_steps={self.local_steps} clips the client's whole update, so no claim about one sample can be "
                "made: set unit = 'client' (a guarantee for the whole client), or local_steps = 1"
            )
        if self.unit == Unit.CLIENT and self.clip == "batch-mean":
            raise InvalidParameter("with unit = 'client' the whole update is clipped: clip is clamp, scale, l2 or dual")

    @property
    def mechanism(self) -> Mechanism | None:
        """The fixed mechanism, or None when it is planned."""
        if self.levels is None or self.trials is None:
            return None
        return Mechanism(levels=self.levels, trials=self.trials)

    @property
    def encoder_range(self) -> float:
        """R: coordinates are clamped to [-R, R] and encoded there."""
        if self.range is not None:
            return self.range
        bound = self.clip_norm if self.clip == "l2" else self.clip_bound
        averaged = self.clip in ("l2", "dual") and self.unit == Unit.SAMPLE
        return min(bound, 4 * self.clip_norm / self.batch_size) if averaged else bound

    def make_clip(self) -> Clip:
        """The clip of one sample's gradient (or of the client's whole update)."""
        made: dict[str, Callable[[], Clip]] = {
            "dual": lambda: Dual(norm=self.clip_norm, bound=self.clip_bound),
            "clamp": lambda: Clamp(self.clip_bound),
            "l2": lambda: L2(self.clip_norm),
            "scale": lambda: Scale(self.clip_bound),
            "batch-mean": lambda: BatchMean(self.clip_bound),
        }
        return made[self.clip]()

    def make_optimiser(self) -> Sgd | Adam:
        """The server's optimiser."""
        momentum = self.momentum if self.optimiser == "sgd" else 0.0
        return optimiser(self.optimiser, momentum=momentum, subtract_noise=self.subtract_noise)

    def budget(self, *, client: int, round: int) -> Budget:
        """What `client` may spend in all, as it stands in `round`: the latest change that has come into force."""
        values: dict[str, Any] = {"bits": self.bits, "epsilon": self.epsilon, "delta": self.delta}
        for change in sorted(self.budgets, key=lambda change: change.from_round):
            if change.client == client and change.from_round <= round:
                values |= {name: value for name in values if (value := getattr(change, name)) is not None}
        return Budget(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what is None is left out, as TOML has no null."""
        plain = {name: value for name, value in asdict(self).items() if value is not None}
        plain["budgets"] = [{k: v for k, v in asdict(c).items() if v is not None} for c in self.budgets]
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build from plain values; an unknown name is refused, never ignored."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise InvalidParameter(f"unknown setting {unknown[0]!r}; `bqsgd train --help` lists them all")
        given = dict(values)
        try:
            given["budgets"] = tuple(BudgetChange(**change) for change in given.get("budgets", ()))
            return cls(**given)
        except TypeError as error:
            raise InvalidParameter(f"a setting has the wrong type: {error}") from error

    @classmethod
    def from_toml(cls, path: str | Path, **overrides: Any) -> Config:
        """Read a TOML file of at most 1 MiB; `overrides` win over it."""
        return cls.from_dict({**read_settings(path), **overrides})


def read_settings(path: str | Path) -> dict[str, Any]:
    """The plain values of a TOML file of at most 1 MiB, not yet checked."""
    try:
        with open(path, "rb") as stream:
            raw = stream.read(_MAX_CONFIG_BYTES + 1)
        if len(raw) > _MAX_CONFIG_BYTES:
            raise InvalidParameter(f"{path} is larger than {_MAX_CONFIG_BYTES} bytes: not a configuration")
        return tomllib.loads(raw.decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidParameter(f"{path} is not a readable TOML file: {error}") from error


_INTEGERS = (
    ("clients", 1, 2**20),
    ("rounds", 1, 2**40),
    ("batch_size", 1, 2**40),
    ("levels", 1, 2**20),
    ("trials", 0, 2**20),
    ("quorum", 1, 2**20),
    ("local_steps", 1, 2**20),
    ("seed", 0, 2**63 - 1),
    ("init_seed", 0, 2**63 - 1),
    ("evaluate_every", 1, 2**40),
    ("checkpoint_every", 1, 2**40),
    ("reserve_rounds", 1, 2**20),
    ("workers", 1, 1024),
)


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidParameter(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
