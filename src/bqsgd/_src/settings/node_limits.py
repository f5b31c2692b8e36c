"""What a client agrees to, whoever runs the server: its operator's limits on everything that changes what it reveals.

The keys are the same in `flower-supernode --node-config` and in the TOML file of `bqsgd train --node-limits`:

    epsilon = 3.0
    units = "sample, client"

A run outside the limits is declined before any data are read and before anything is spent, and the reason depends on
the run's settings and the limits alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_delta, check_int, check_positive, short_repr
from bqsgd._src.privacy.guarantee import as_given
from bqsgd._src.release import SAMPLINGS, Unit
from bqsgd._src.settings.config import CLIPS, Config
from bqsgd._src.storage import read_toml

_MAX_DIMENSION = 2**53


def _limit(default: Any, meaning: str, *, words: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"meaning": meaning, "words": words})


@dataclass(frozen=True, kw_only=True)
class NodeLimits:
    """The limits of one client. Without any it is as strict as a client of strangers should be.

    epsilon and delta are None where the ledger is the run's own and the run's budget is all there is (`unlimited`).
    """

    epsilon: float | None = _limit(
        10.0, "budget of its ledger, the total of all runs; a run that asks for more is declined"
    )
    delta: float | None = _limit(1e-5, "delta of that budget, and the most a run may ask for")
    units: tuple[str, ...] = _limit(("sample",), "units of privacy: sample, client", words=tuple(Unit))
    samplings: tuple[str, ...] = _limit(
        ("poisson",),
        "how batches are drawn: poisson, fixed, none; the relation follows from this and from the unit",
        words=tuple(SAMPLINGS),
    )
    clips: tuple[str, ...] = _limit(
        ("dual", "clamp", "l2", "scale"),
        "rules that bound a sample: dual, clamp, l2, scale, batch-mean (which bounds none)",
        words=CLIPS,
    )
    least_clip: float = _limit(1e-6, "least clip bound, clip norm and range of the encoder")
    largest_clip: float = _limit(1e3, "largest of the same")
    allow_no_privacy: bool = _limit(False, "`true` to take part in runs with seeded noise or none")
    allow_private_metrics: bool = _limit(
        False, "`true` to write figures outside the guarantee (training loss, batch sizes) beside its ledger"
    )
    allow_packed_rows: bool = _limit(
        False, "`true` to take part in runs with `packed_rows`, whose guarantee rests on an assumption"
    )
    largest_dimension: int = _limit(10_000_000, "most trainable parameters of the model")
    largest_parameter: float = _limit(
        1e4, "largest magnitude of a parameter in the models it is sent, finite in any case"
    )
    planning_seconds: float = _limit(
        60.0, "CPU seconds for planning; it ends at most one answer of the accountant late"
    )
    fewest_in_sum: int = _limit(3, "fewest clients in a secure sum: a run's clients less the dropouts that it bears")
    colluders: int = _limit(
        0, "clients that may tell the server all they know: runs whose secure sums withstand fewer are declined"
    )
    ledger_folder: Path | None = _limit(  # noqa: RUF009 (it makes a field)
        None, "where its ledger lies, on its own disk; the ledger continues from run to run"
    )

    def __post_init__(self) -> None:
        if (self.epsilon is None) != (self.delta is None):
            raise InvalidParameter("a client limits both epsilon and delta, or neither")
        if self.epsilon is not None:
            check_positive("epsilon", self.epsilon)
            check_delta("delta", self.delta)
        for name in ("least_clip", "largest_clip", "largest_parameter", "planning_seconds"):
            check_positive(key_of(name), getattr(self, name))
        check_int("largest-dimension", self.largest_dimension, 1, _MAX_DIMENSION)
        check_int("fewest-in-sum", self.fewest_in_sum, 1, 2**40)
        check_int("colluders", self.colluders, 0, 2**40)
        for limit in fields(self):
            value = getattr(self, limit.name)
            if limit.type == "bool" and not isinstance(value, bool):
                raise InvalidParameter(f"{key_of(limit.name)} must be true or false, got {short_repr(value)}")
            if limit.metadata["words"]:
                object.__setattr__(self, limit.name, _words(limit, value))

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> NodeLimits:
        """The limits among the keys of a node's configuration; other keys are its owner's.

        Raises:
            InvalidParameter: a limit that is none, or a key that is nearly the name of one: a limit must not be lost to
                a slip of the pen.
        """
        known = {key_of(limit.name): limit.name for limit in fields(cls)}
        for key in node_config:
            near = [] if key in known else get_close_matches(str(key), known, n=1, cutoff=0.85)
            if near:
                raise InvalidParameter(f"{short_repr(key)} is no limit of a node; {near[0]!r} is")
        values = {name: node_config[key] for key, name in known.items() if key in node_config}
        if "ledger_folder" in values:
            values["ledger_folder"] = Path(str(values["ledger_folder"])).expanduser()
        return cls(**values)

    @classmethod
    def read(cls, path: str | Path) -> NodeLimits:
        """The limits in a TOML file; an unknown key is refused."""
        limits, known = read_toml(path), [key_of(limit.name) for limit in fields(cls)]
        for key in limits:
            if key not in known:
                raise InvalidParameter(f"{path}: {short_repr(key)} is no limit of a node; known: {', '.join(known)}")
        return cls.of(limits)

    @classmethod
    def unlimited(cls) -> NodeLimits:
        """For a client whose operator chose the run's settings: any settings, but bounded models and planning."""
        return cls(
            epsilon=None,
            delta=None,
            units=tuple(Unit),
            samplings=tuple(SAMPLINGS),
            clips=CLIPS,
            least_clip=5e-324,
            largest_clip=1.7e308,
            allow_no_privacy=True,
            allow_private_metrics=True,
            allow_packed_rows=True,
            largest_dimension=_MAX_DIMENSION,
            fewest_in_sum=1,
        )

    def refusal(self, config: Config, *, client: int) -> str | None:
        """Why client `client` does not take part in the run, from its settings alone; None when it does."""
        return next(self._refusals(config, client), None)

    def _refusals(self, config: Config, client: int) -> Iterator[str]:
        privacy, clip = config.privacy, config.clip
        if not self.allow_no_privacy and (privacy.noiseless or privacy.seed is not None):
            what = "has no noise" if privacy.noiseless else "has seeded noise, which the seed removes"
            yield f"the run {what}; this node takes part in it only with allow-no-privacy=true"
        if config.clients.packed_rows and not self.allow_packed_rows:
            yield (
                "the run packs rows, which rests on an assumption about kernels; allow it with allow-packed-rows=true"
            )
        if privacy.private_metrics and not self.allow_private_metrics:
            yield "the run asks for private metrics; allow them with allow-private-metrics=true"
        if client >= config.clients.count:
            yield f"the run has clients 0 to {config.clients.count - 1}, this is client {client}"
        for name, asked in (("units", privacy.unit), ("samplings", privacy.sampling), ("clips", clip.rule)):
            allowed = getattr(self, name)
            if asked not in allowed:
                yield (
                    f"the run asks for {name.removesuffix('s')} {asked}, this node allows {name}={','.join(allowed)!r}"
                )
        for name, value in (("clip_bound", clip.bound), ("clip_norm", clip.norm), ("range", config.range)):
            if not self.least_clip <= value <= self.largest_clip:
                yield (
                    f"the run asks for {name} {value:g}, this node allows {self.least_clip:g} to {self.largest_clip:g} "
                    "(least-clip, largest-clip)"
                )
        starts = {0, *(change.from_round for change in privacy.budgets if change.client == client)}
        budgets = [privacy.budget(client=client, round=start) for start in sorted(starts)]
        for name, most in (("epsilon", self.epsilon), ("delta", self.delta)):
            largest = max(getattr(budget, name) for budget in budgets)
            if most is not None and largest > most:
                yield f"the run asks for {name} {as_given(largest)}, this node allows {as_given(most)}"
        if not config.secure.on:
            return
        fewest, withstood = config.secure.rule(config.asked).fewest, config.secure.colluders
        if fewest < self.fewest_in_sum:
            yield (
                f"the run's secure sums are over as few as {fewest} clients, this node allows {self.fewest_in_sum} "
                "(fewest-in-sum)"
            )
        if withstood < self.colluders:
            yield (
                f"the run's secure sums withstand {withstood} colluding clients, this node asks for {self.colluders} "
                "(colluders)"
            )

    def model_refusal(self, dimension: int) -> str | None:
        """Why a model of this dimension is not taken; None when it is."""
        if dimension <= self.largest_dimension:
            return None
        return f"the model has {dimension} parameters, this node allows {self.largest_dimension} (largest-dimension)"

    def parameters_refusal(self, model: npt.NDArray[np.float32]) -> str | None:
        """Why these parameters are not taken; None when they are. Depends on the model alone."""
        largest = float(np.abs(model).max(initial=0.0))
        if largest <= self.largest_parameter:  # NaN is not
            return None
        return (
            f"the model holds a parameter that is not finite or beyond {self.largest_parameter:g}, the most this node "
            "allows (largest-parameter)"
        )


def key_of(name: str) -> str:
    """The key of a limit in a node's configuration.

    >>> key_of("largest_clip")
    'largest-clip'
    """
    return name.replace("_", "-")


def _words(limit: Field[Any], value: Any) -> tuple[str, ...]:
    """Words separated by commas, as one text: Flower's configuration has no lists."""
    words = [word.strip() for word in value.split(",")] if isinstance(value, str) else value
    known = limit.metadata["words"]
    if not isinstance(words, (list, tuple)) or not words or any(word not in known for word in words):
        raise InvalidParameter(f"{key_of(limit.name)} must be some of {', '.join(known)}, got {short_repr(value)}")
    return tuple(str(word) for word in words)
