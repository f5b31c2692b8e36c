"""The settings of a run, in groups, each with its default, its help text and the rule for its values.

`group` says what a setting is. `config` has all groups together, and what they must fulfil among each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bqsgd._src.errors import Infeasible, InvalidParameter
from bqsgd._src.params import MOST_ONE_IN, Mechanism, check_int
from bqsgd._src.persample.clips import L2, BatchMean, Clamp, Clip, Dual, Normalize, PerLayer, Scale
from bqsgd._src.planner.plan import Budget
from bqsgd._src.planner.recipe import BATCH_SIZE, CLIENTS, CLIP_BOUND, CLIP_NORM, LEARNING_RATE, ROUNDS
from bqsgd._src.release import SAMPLINGS, Scheme, Unit
from bqsgd._src.secure.graph import Thresholds, thresholds
from bqsgd._src.settings.group import Group, file_setting, setting
from bqsgd._src.wire.model_change import FEWEST_BITS, MOST_BITS

CENTRED, LEAST_SQUARES = "centred", "least-squares"
SCHEDULES = ("constant", "linear", "cosine")
RULES = ("mean", "median", "trimmed-mean", "krum", "multi-krum")
"""The server's aggregation rules. Only the mean can be computed from a running sum."""


@dataclass(frozen=True, kw_only=True)
class BudgetChange:
    """The budget of client `client` from round `from_round` on. A field that is None keeps the run's value."""

    client: int
    from_round: int = 0
    bits: int | None = None
    epsilon: float | None = None
    delta: float | None = None

    def __post_init__(self) -> None:
        # Here, because `Privacy.budget` sorts and compares them; `Config` knows how many clients and rounds there are.
        check_int("budgets.client", self.client, 0, 2**40)
        check_int("budgets.from_round", self.from_round, 0, 2**40)


@dataclass(frozen=True, kw_only=True)
class Privacy(Group):
    """The budget, a proven total of each client over all rounds, and what the proof depends on."""

    title = "Privacy"
    epsilon: float = setting(3.0, "Most epsilon that each client may spend in total.", positive=True)
    delta: float = setting(1e-5, "Delta at which that epsilon is proven.", positive=True)
    bits: int = setting(8, "Most bits per coordinate of a message.")
    unit: str = setting("sample", "Whom the guarantee hides: sample or client.", choices=tuple(Unit))
    sampling: str = file_setting(
        "poisson", "How a batch is drawn: poisson, fixed (size) or none (all data).", choices=tuple(SAMPLINGS)
    )
    batch_size: int = setting(
        BATCH_SIZE,
        "Public batch size: a client divides its sum by it. Default: fitted to the data.",
        between=(1, 2**40),
    )
    rate: float | None = file_setting(
        None, "Chance of a sample to be in a round's batch. Default: L over the samples of a client.", positive=True
    )
    levels: int | None = setting(
        None, "Use these quantisation levels instead of planned ones; needs --trials.", between=(1, 2**20)
    )
    trials: int | None = setting(
        None, "Use this many binomial trials instead of planned ones; needs --levels.", between=(0, 2**20)
    )
    seed: int | None = setting(
        None, "Seed for reproducible noise and batches. It voids the privacy claim.", between=(0, 2**63 - 1)
    )
    private_metrics: bool = file_setting(
        False, "Keep training loss and batch sizes on the clients: outside the guarantee."
    )
    budgets: tuple[BudgetChange, ...] = file_setting((), "Budgets that differ by client or round.")

    def __post_init__(self) -> None:
        # The class is frozen, but the tables of a file must become objects before anything compares them.
        object.__setattr__(self, "budgets", _budget_changes(self.budgets))
        super().__post_init__()
        if (self.levels is None) != (self.trials is None):
            raise InvalidParameter("give both levels and trials, or neither (then they are planned for the budget)")
        if self.levels is not None and self.budgets:
            raise InvalidParameter("budgets that differ by client need planning: leave out levels and trials")
        if self.rate is not None and (self.rate > 1 or self.scheme is not Scheme.POISSON):
            raise InvalidParameter(f"rate is a chance, at most 1, and for Poisson batches only, got {self.rate!r}")
        self.budget(client=0, round=0)  # raises for bits and delta that no budget may have

    @property
    def mechanism(self) -> Mechanism | None:
        """The fixed mechanism, or None when it is planned."""
        if self.levels is None or self.trials is None:
            return None
        return Mechanism(levels=self.levels, trials=self.trials)

    @property
    def noiseless(self) -> bool:
        """Whether the messages carry no noise. Then there is no privacy, and the ledger has nothing to count."""
        return self.trials == 0

    @property
    def scheme(self) -> Scheme:
        """How a round's batch is drawn."""
        return SAMPLINGS[self.sampling]

    def budget(self, *, client: int, round: int) -> Budget:
        """What `client` may spend in total, as of `round`: the latest change that is in force."""
        # In order of rounds, whatever the order in the file: a later change overrides an earlier one field by field.
        values: dict[str, Any] = {"bits": self.bits, "epsilon": self.epsilon, "delta": self.delta}
        for change in sorted(self.budgets, key=lambda change: change.from_round):
            if change.client == client and change.from_round <= round:
                values |= {name: value for name in values if (value := getattr(change, name)) is not None}
        return Budget(**values)

    def budget_starts(self, client: int) -> list[int]:
        """The rounds from which `client` has another budget than before, in order; the first is round 0."""
        return sorted({0, *(change.from_round for change in self.budgets if change.client == client)})


def _budget_changes(changes: Any) -> tuple[BudgetChange, ...]:
    try:
        return tuple(c if isinstance(c, BudgetChange) else BudgetChange(**c) for c in changes)
    except TypeError as error:
        raise InvalidParameter(
            f"budgets must be tables with client, from_round, bits, epsilon and delta; one has the wrong type: {error}"
        ) from error


_CLIPS: dict[str, Callable[[ClipSettings], Clip]] = {
    "dual": lambda clip: Dual(norm=clip.norm, bound=clip.bound),
    "clamp": lambda clip: Clamp(clip.bound),
    "l2": lambda clip: L2(clip.norm),
    "normalize": lambda clip: Normalize(clip.norm),
    "per-layer": lambda clip: PerLayer(L2(clip.norm)),
    "scale": lambda clip: Scale(clip.bound),
    "batch-mean": lambda clip: BatchMean(clip.bound),
}
CLIPS = tuple(_CLIPS)
_LARGEST_RANGE = 1e100
"""The variance of the noise holds the square of the range, and must not overflow."""


@dataclass(frozen=True, kw_only=True)
class ClipSettings(Group):
    """The rule that bounds one sample's gradient (or one client's update), and the range of the encoder.

    If the range is left out, it is the clip's bound. If the clip has a norm C2 and samples are averaged, it is at most
    4 C2 / L, about twice the noise that a client then adds. In secure sums it is what the clip leaves of a coordinate.
    """

    title = "Clipping"
    rule: str = setting(
        "dual",
        "How gradients are clipped: dual, clamp, l2, normalize, per-layer, scale; batch-mean guarantees no sample.",
        name="clip",
        choices=CLIPS,
    )
    bound: float = setting(
        CLIP_BOUND, "Largest size of one coordinate of a sample's gradient.", name="clip_bound", positive=True
    )
    norm: float = setting(
        CLIP_NORM,
        "Largest Euclidean norm of a sample's gradient (dual, l2, normalize, per-layer).",
        name="clip_norm",
        positive=True,
    )
    range: float | None = setting(
        None,
        "A client clamps its mean to this before encoding. Default: fitted to the noise; in secure sums the clip's.",
        positive=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.make()  # raises for a bound and a norm that the clip cannot have together
        if self.range is not None and not 1 / _LARGEST_RANGE <= self.range <= _LARGEST_RANGE:
            raise InvalidParameter(f"range must be from {1 / _LARGEST_RANGE} to {_LARGEST_RANGE}, got {self.range!r}")

    @property
    def scales(self) -> bool:
        """Whether the clip scales a gradient down to a Euclidean norm, so that the noise depends on that norm."""
        return self.make().euclidean is not None

    def make(self) -> Clip:
        """The clip itself."""
        return _CLIPS[self.rule](self)


@dataclass(frozen=True, kw_only=True)
class ClientSettings(Group):
    """The clients and what each of them does in a round."""

    title = "Clients"
    count: int = setting(CLIENTS, "Number of clients.", name="clients", between=(1, 100_000))
    cohort: int | None = setting(
        None, "Number of clients whose frames a round needs. Default: every client is asked.", between=(1, 100_000)
    )
    ask: int | None = file_setting(
        None, "Clients asked in a round, more than the cohort to make up for stragglers.", between=(1, 100_000)
    )
    turns: int | None = file_setting(
        None, "Most rounds that one client is asked in; its noise is planned for this many.", between=(1, 2**40)
    )
    local_steps: int = setting(
        1, "Steps that a client takes in a round; more than 1 needs --unit client.", between=(1, 2**20)
    )
    local_learning_rate: float = file_setting(0.1, "Learning rate of the local steps.", positive=True)
    one_in: int = setting(
        1,
        "Send one in this many coordinates, a random subset in every round. Default: fitted to the noise.",
        between=(1, MOST_ONE_IN),
    )
    coding: str = file_setting(
        "fixed", "fixed (frames of equal size) or entropy (shorter frames).", choices=("fixed", "entropy")
    )
    reserve_rounds: int = file_setting(20, "Rounds that the ledger records ahead in one write.", between=(1, 2**20))
    packed_rows: bool = file_setting(
        False, "Faster gradients; the guarantee then assumes that kernels treat all rows of a batch alike."
    )
    workers: int = setting(2, "Clients that work at the same time in one process.", between=(1, 1024))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cohort is None and (self.ask is not None or self.turns is not None):
            raise InvalidParameter("ask and turns describe a cohort: set cohort as well, or leave them out")
        cohort = self.cohort or self.count
        ask = self.ask or cohort
        if not cohort <= ask <= self.count:
            raise InvalidParameter(
                f"a cohort of {cohort}, {ask} asked and {self.count} clients in all: each may be at most the next"
            )


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Group):
    """How the server aggregates and steps."""

    title = "Server"
    optimizer: str = setting("sgd", "The server's optimizer: sgd or adam.", key="optimiser", choices=("sgd", "adam"))
    learning_rate: float = setting(LEARNING_RATE, "Learning rate. Default: fitted to the noise.", positive=True)
    momentum: float = setting(0.9, "Momentum of sgd.")
    subtract_noise: bool = file_setting(False, "adam: subtract the known noise from its second moment.")
    schedule: str = file_setting("linear", "Learning rate over time: constant, linear or cosine.", choices=SCHEDULES)
    average: float = file_setting(0.0, "Decay of the model's exponential average; 0 for none.")
    aggregation: str = file_setting("mean", "mean, median, trimmed-mean, krum or multi-krum.", choices=RULES)
    weights: str | None = file_setting(
        None, "Weights in the mean: equal or size. Default: size in one process, else equal.", choices=("equal", "size")
    )
    sizes: str | None = file_setting(
        None, "TOML file of the clients' sizes, written by the server's operator; clients not in it are refused."
    )
    byzantine: int = file_setting(0, "Adversarial clients that a robust rule must withstand.", between=(0, 2**20))
    quorum: int = file_setting(1, "Fewest frames for a round to count.", between=(1, 2**20))
    deadline_seconds: float | None = file_setting(None, "Frames that arrive later are refused.", positive=True)
    down_bits: int | None = file_setting(
        None,
        "Send the model's changes in this many bits per coordinate, 2 to 7. Default: exact models.",
        between=(FEWEST_BITS, MOST_BITS),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("momentum", "average"):
            if not 0 <= getattr(self, name) < 1:
                raise InvalidParameter(f"{name} must lie in [0, 1), got {getattr(self, name)!r}; 0 switches it off")
        if self.subtract_noise and self.optimizer != "adam":
            raise InvalidParameter("subtract_noise is for adam: set optimizer = 'adam' or leave it out")
        if self.byzantine and self.aggregation == "mean":
            raise InvalidParameter(
                f"the mean withstands no adversary, got byzantine={self.byzantine}; choose a robust rule or 0"
            )

    @property
    def fewest_updates(self) -> int:
        """Updates that the aggregation rule needs to withstand the adversarial clients."""
        f = self.byzantine
        return {"mean": 1, "median": 2 * f + 1, "trimmed-mean": 2 * f + 1}.get(self.aggregation, 2 * f + 3)

    @property
    def fewest_frames(self) -> int:
        """Frames that a round needs to count."""
        return max(self.quorum, self.fewest_updates)


@dataclass(frozen=True, kw_only=True)
class SecureSettings(Group):
    """Secure sums: the server learns the sum over the clients and no single message, and they share one noise."""

    title = "Secure sums"
    on: bool = setting(
        False,
        "Use secure sums: the server sees only sums over clients, and the clients share one noise.",
        name="secure",
    )
    dropouts: int | None = setting(
        None, "Most clients that may be missing from a sum. Default: a tenth of them.", between=(0, 100_000)
    )
    colluders: int = setting(0, "Most clients that may tell the server all they know.", between=(0, 100_000))
    groups: int = setting(
        1,
        "Sums of a round, each over a group of the clients and with noise of its own; a robust rule acts on them.",
        between=(1, 50_000),
    )
    key_rounds: int = file_setting(10, "Most rounds whose keys travel together.", between=(1, 4096))
    window: float | None = file_setting(
        None,
        "Fraction of the range that the sum always has room for. Default: as much as the released sums need.",
        positive=True,
    )
    roster: str | None = file_setting(None, "TOML file of the clients' identity keys; not for one process.")
    identity: str | None = file_setting(
        None, "This client's identity key file (bqsgd secure keygen); {client} stands for its number."
    )
    roster_digest: str | None = file_setting(None, "Digest of the roster that the run began with.")

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen = [name for name in ("dropouts", "window", "roster", "identity") if getattr(self, name) is not None]
        chosen += ["colluders"] * (self.colluders > 0) + ["groups"] * (self.groups > 1)
        if not self.on and chosen:
            raise InvalidParameter(f"{chosen[0]} is a setting of secure sums: set secure as well")

    def group_of(self, client: int) -> int:
        """The group of a client. It follows from its number, so the server chooses nobody's group."""
        return client % self.groups

    def members(self, clients: int, group: int) -> range:
        """The clients of one group; their numbers differ by one at most from group to group."""
        return range(group, clients, self.groups)

    def rule(self, clients: int, group: int = 0) -> Thresholds:
        """The thresholds that every client insists on in the sum over a group; the first group has most clients.

        Raises:
            Infeasible: a sum over this many clients cannot bear the dropouts and colluders.
        """
        smallest = clients // self.groups
        dropouts = smallest // 10 if self.dropouts is None else self.dropouts
        if self.groups == 1:
            return thresholds(clients=clients, dropouts=dropouts, colluders=self.colluders)
        try:
            if smallest < 2:
                raise Infeasible(f"a group needs 2 clients or more; at most {clients // 2} groups are possible")
            of_group = len(self.members(clients, group))
            return thresholds(clients=of_group, dropouts=dropouts, colluders=self.colluders)
        except (Infeasible, InvalidParameter) as error:
            raise Infeasible(f"{self.groups} groups of {clients} clients: {error}") from error

    def rules(self, clients: int) -> tuple[Thresholds, ...]:
        """The thresholds of the largest and, if there are several groups, of the smallest group."""
        return tuple(self.rule(clients, group) for group in sorted({0, self.groups - 1}))


@dataclass(frozen=True, kw_only=True)
class RunSettings(Group):
    """The length of a run, and when it evaluates and writes."""

    title = "Run"
    method: str = setting(
        "sgd",
        "sgd: rounds of gradients. centred: the first round measures the mean of a linear model's features. "
        "least-squares: one message per client, and the server solves for a linear model.",
        choices=("sgd", CENTRED, LEAST_SQUARES),
    )
    rounds: int = setting(
        ROUNDS, "Rounds to train. Default: 300; 60 for fewer than 10,000 samples.", between=(1, 2**40)
    )
    evaluate_every: int = setting(10, "Rounds between evaluations on the test data.", between=(1, 2**40))
    checkpoint_every: int = file_setting(20, "Rounds between checkpoints.", between=(1, 2**40))
    patience: int | None = file_setting(
        None,
        "Stop after this many evaluations on the public test data without a better one, and keep the best model.",
        between=(1, 2**40),
    )
    name: str | None = file_setting(None, "The run's name in the ledgers.", name="run")

    def evaluated_after(self, rounds_done: int) -> bool:
        """Whether accuracy and epsilon are computed after this many rounds."""
        return rounds_done % self.evaluate_every == 0 or rounds_done == self.rounds
