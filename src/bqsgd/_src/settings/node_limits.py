"""A client's own limits on everything that changes what it reveals, whoever runs the server.

The operator of the client sets them. The keys are the same in `flower-supernode --node-config` and in the TOML file of
`bqsgd train --node-limits`:

    epsilon = 3.0
    units = "sample, client"

The client declines a run outside its limits before it reads any data and before it spends anything. The reason that it
gives depends on the run's settings and the limits alone, not on the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_delta, short_repr
from bqsgd._src.privacy.guarantee import as_given
from bqsgd._src.release import SAMPLINGS, Unit
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.group import check_setting, setting
from bqsgd._src.settings.groups import CLIPS
from bqsgd._src.storage import read_toml

_MAX_DIMENSION = 2**53


@dataclass(frozen=True, kw_only=True)
class NodeLimits:
    """The limits of one client. The defaults are for a client that does not know who runs the server.

    epsilon and delta are both None if the ledger belongs to the run and only the run's budget counts (`unlimited`).
    """

    epsilon: float | None = setting(
        10.0, "budget of its ledger, the total of all runs; a run that asks for more is declined", positive=True
    )
    delta: float | None = setting(1e-5, "delta of that budget, and the most a run may ask for", positive=True)
    units: tuple[str, ...] = setting(("sample",), "units of privacy: sample, client", choices=tuple(Unit))
    samplings: tuple[str, ...] = setting(
        ("poisson",),
        "how batches are drawn: poisson, fixed, none; the relation follows from this and from the unit",
        choices=tuple(SAMPLINGS),
    )
    clips: tuple[str, ...] = setting(
        ("dual", "clamp", "l2", "normalize", "per-layer", "scale"),
        "rules that bound a sample: dual, clamp, l2, normalize, per-layer, scale; batch-mean bounds none",
        choices=CLIPS,
    )
    least_clip: float = setting(1e-6, "least clip bound, clip norm and range of the encoder", positive=True)
    largest_clip: float = setting(1e3, "largest of the same", positive=True)
    allow_no_privacy: bool = setting(False, "`true` to take part in runs with seeded noise or none")
    allow_private_metrics: bool = setting(
        False, "`true` to write figures outside the guarantee (training loss, batch sizes) beside its ledger"
    )
    allow_packed_rows: bool = setting(
        False, "`true` to take part in runs with `packed_rows`, whose guarantee rests on an assumption"
    )
    largest_dimension: int = setting(10_000_000, "most trainable parameters of the model", between=(1, _MAX_DIMENSION))
    largest_parameter: float = setting(
        1e4, "largest magnitude of a parameter in the models it is sent, finite in any case", positive=True
    )
    planning_seconds: float = setting(
        60.0, "CPU seconds for planning; it ends at most one answer of the accountant late", positive=True
    )
    fewest_in_sum: int = setting(
        3,
        "fewest clients in a secure sum: those of a run, or of a group, less the dropouts that it bears",
        between=(1, 2**40),
    )
    colluders: int = setting(
        0,
        "clients that may tell the server all they know: runs whose secure sums withstand fewer are declined",
        between=(0, 2**40),
    )
    ledger_folder: Path | None = setting(  # noqa: RUF009 (it makes a field)
        None, "where its ledger lies, on its own disk; the ledger continues from run to run"
    )

    def __post_init__(self) -> None:
        if (self.epsilon is None) != (self.delta is None):
            raise InvalidParameter("a client limits both epsilon and delta, or neither")
        for limit in fields(self):
            if isinstance(limit.default, tuple):
                object.__setattr__(self, limit.name, _words(getattr(self, limit.name)))
            check_setting(limit, key_of(limit.name), getattr(self, limit.name))
        if self.delta is not None:
            check_delta("delta", self.delta)

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> NodeLimits:
        """The limits among the keys of a node's configuration; the operator may use other keys for other things.

        Raises:
            InvalidParameter: an invalid limit, or an unknown key that looks like a misspelt limit, which would
                otherwise be lost.
        """
        known = {key_of(limit.name): limit.name for limit in fields(cls)}
        for key in node_config:
            # 0.85 catches a missing, doubled or swapped letter; others, such as `client`, are further away.
            near = [] if key in known else get_close_matches(str(key), known, n=1, cutoff=0.85)
            if near:
                raise InvalidParameter(f"{short_repr(key)} is not a limit of a node; did you mean {near[0]!r}?")
        values = {name: node_config[key] for key, name in known.items() if key in node_config}
        if "ledger_folder" in values:
            folder = str(values["ledger_folder"])
            try:
                values["ledger_folder"] = Path(folder).expanduser()
            except RuntimeError as error:  # ~somebody who is not known here
                raise InvalidParameter(f"ledger-folder={short_repr(folder)} names no folder: {error}") from error
            if "\0" in folder:
                raise InvalidParameter(f"ledger-folder={short_repr(folder)} has a null byte, which no path may have")
        return cls(**values)

    @classmethod
    def read(cls, path: str | Path) -> NodeLimits:
        """The limits in a TOML file. An unknown key is refused."""
        limits, known = read_toml(path), [key_of(limit.name) for limit in fields(cls)]
        for key in limits:
            if key not in known:
                raise InvalidParameter(f"{path}: {short_repr(key)} is not a limit of a node; known: {', '.join(known)}")
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
            least_clip=5e-324,  # the smallest and nearly the largest float
            largest_clip=1.7e308,
            allow_no_privacy=True,
            allow_private_metrics=True,
            allow_packed_rows=True,
            largest_dimension=_MAX_DIMENSION,
            fewest_in_sum=1,
        )

    def refusal(self, config: Config, *, client: int) -> str | None:
        """Why client `client` declines the run, from the run's settings alone; None if it takes part."""
        return next(self._refusals(config, client), None)

    def _refusals(self, config: Config, client: int) -> Iterator[str]:
        privacy, clip = config.privacy, config.clip
        if not self.allow_no_privacy and (privacy.noiseless or privacy.seed is not None):
            what = "has no noise" if privacy.noiseless else "has seeded noise, which the seed removes"
            yield f"the run {what}; this node takes part in it only with allow-no-privacy=true"
        if config.clients.packed_rows and not self.allow_packed_rows:
            yield "the guarantee of packed rows rests on an assumption; allow it with allow-packed-rows=true"
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
        # Every budget that the run will ever have for this client counts, not only the first one.
        budgets = [privacy.budget(client=client, round=start) for start in privacy.budget_starts(client)]
        for name, most in (("epsilon", self.epsilon), ("delta", self.delta)):
            largest = max(getattr(budget, name) for budget in budgets)
            if most is not None and largest > most:
                yield f"the run asks for {name} {as_given(largest)}, this node allows {as_given(most)}"
        if not config.secure.on:
            return
        # A server could set so many dropouts that a sum over this client alone would count.
        fewest, withstood = min(rule.fewest for rule in config.secure.rules(config.asked)), config.secure.colluders
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
        """Why the client declines a model of this dimension; None if it takes it."""
        if dimension <= self.largest_dimension:
            return None
        return f"the model has {dimension} parameters, this node allows {self.largest_dimension} (largest-dimension)"

    def parameters_refusal(self, model: npt.NDArray[np.float32]) -> str | None:
        """Why the client declines these parameters; None if it takes them. Depends on the model alone."""
        # `max` passes NaN on, unlike a comparison with each entry.
        largest = float(np.abs(model).max(initial=0.0))
        if largest <= self.largest_parameter:  # false for NaN, so NaN is declined
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


def _words(value: Any) -> Any:
    """Several words as a tuple. Flower's configuration has no lists, so they may come as one text with commas."""
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(","))
    return tuple(value) if isinstance(value, list) else value
