"""What one client message reveals, as the accountant sees it: mechanism, dimension, sensitivity, sampling.

`Release` is the value that the planner plans, the ledger stores, the accountant reads and the audit tests.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from bqsgd.errors import InvalidParameter
from bqsgd.params import Mechanism, check_int, check_positive


class Relation(StrEnum):
    """Which data sets are neighbours. How many records there are is public under either.

    Add/remove: a null record, which adds nothing to any sum, stands in one's place. Replace: any other record does.
    """

    ADD_REMOVE = "add/remove one"
    REPLACE = "replace one"


class Unit(StrEnum):
    """Whose presence is hidden."""

    SAMPLE = "sample"
    CLIENT = "client"


class Trust(StrEnum):
    """What the adversary sees."""

    EACH_CLIENT = "server sees each client's messages"
    SUMS_ONLY = "server sees only sums over clients"
    TRAINER = "the training process is trusted with the data; what it releases is protected"


class Assumption(StrEnum):
    """What a guarantee rests on besides its proof; stated wherever the guarantee is."""

    PACKED_ROWS = "kernels give a sample the same result in every row of a batch of one shape"


class Scheme(StrEnum):
    """How a round's batch is drawn."""

    POISSON = "poisson"
    FIXED_SIZE = "fixed-size without replacement"
    NONE = "no sampling"


SAMPLINGS = {"poisson": Scheme.POISSON, "fixed": Scheme.FIXED_SIZE, "none": Scheme.NONE}
RELATIONS = {"add-remove": Relation.ADD_REMOVE, "replace": Relation.REPLACE}
"""The short names that settings, options and keywords use."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The batch scheme and the rate at which one record takes part in a round.

    Poisson sampling is accounted under add/remove, fixed-size batches under replace-one, no sampling under either.
    """

    scheme: Scheme
    rate: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scheme", Scheme(self.scheme))
        if check_positive("rate", self.rate) > 1:
            raise InvalidParameter(f"rate must be at most 1, got {self.rate}")
        if self.scheme is Scheme.NONE and self.rate != 1:
            raise InvalidParameter(f"no sampling means rate 1, got {self.rate}")

    @classmethod
    def of_batch(cls, scheme: Scheme | str, *, batch_size: int, dataset_size: int) -> Sampling:
        """Rate = batch_size / dataset_size (1 for no sampling)."""
        scheme = Scheme(scheme)
        check_int("dataset_size", dataset_size, 1, 2**53)
        check_int("batch_size", batch_size, 1, dataset_size)
        return cls(scheme=scheme, rate=1.0 if scheme is Scheme.NONE else batch_size / dataset_size)


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """How far one record moves the encoder's input, as a fraction of the encoder's range C.

    linf: max over coordinates of |change_j| / C_j. l2: the Euclidean norm of (change_j / C_j), or None when only the
    L-infinity bound is known. Times `levels` they are shifts in quantiser steps.
    Per-sample clamp at C and a mean over a public L: linf = 1/L for add/remove, 2/L for replace-one.
    """

    linf: float
    l2: float | None = None
    relation: Relation = Relation.ADD_REMOVE

    def __post_init__(self) -> None:
        object.__setattr__(self, "relation", Relation(self.relation))
        check_positive("linf", self.linf)
        if self.l2 is not None:
            check_positive("l2", self.l2)


@dataclass(frozen=True, kw_only=True)
class Release:
    """One message of one client: everything an epsilon depends on, and nothing else.

    colluders: where only sums are seen, how many clients may tell the server all they know. failure: probability,
    whatever the data are, that the round shows more than its sum; it is added to delta.
    """

    mechanism: Mechanism
    dimension: int
    sensitivity: Sensitivity
    sampling: Sampling
    unit: Unit = Unit.SAMPLE
    trust: Trust = Trust.EACH_CLIENT
    assumption: Assumption | None = None
    colluders: int = 0
    failure: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit", Unit(self.unit))
        object.__setattr__(self, "trust", Trust(self.trust))
        if self.assumption is not None:
            object.__setattr__(self, "assumption", Assumption(self.assumption))
        check_int("dimension", self.dimension, 1, 2**53)
        if check_int("colluders", self.colluders, 0, 2**53) and self.trust is not Trust.SUMS_ONLY:
            raise InvalidParameter(f"colluders are those of a sum over clients, not where the {self.trust}")
        if self.failure != 0 and (check_positive("failure", self.failure) >= 1 or self.trust is not Trust.SUMS_ONLY):
            raise InvalidParameter(f"failure is the chance that a sum over clients fails, got {self.failure}")
        scheme, relation = self.sampling.scheme, self.sensitivity.relation
        if scheme is Scheme.POISSON and relation is not Relation.ADD_REMOVE:
            raise InvalidParameter("Poisson sampling is accounted under add/remove; give the add/remove sensitivity")
        if scheme is Scheme.FIXED_SIZE and relation is not Relation.REPLACE:
            raise InvalidParameter("fixed-size batches are accounted under replace-one; give its sensitivity")
        if self.trust is Trust.SUMS_ONLY and self.mechanism.coarsening is not None:
            raise InvalidParameter(
                "a coarsened mechanism cannot be accounted as a sum over clients: the sum of coarse codes is not a "
                "function of the sum of fine ones; leave the coarsening out"
            )

    @property
    def shift(self) -> float:
        """Largest move of one coordinate in quantiser steps, Delta_inf = s * linf."""
        return self.mechanism.levels * self.sensitivity.linf

    @property
    def shift_l2(self) -> float:
        """Largest Euclidean move in quantiser steps: s * l2 where known, never above sqrt(d) * shift."""
        bound = math.sqrt(self.dimension) * self.shift
        return bound if self.sensitivity.l2 is None else min(bound, self.mechanism.levels * self.sensitivity.l2)

    def summed(self, honest_clients: int, *, colluders: int = 0) -> Release:
        """What the sum over n honest clients reveals of one of them, when secure aggregation hides the summands.

        Their noises add up to Bin(n m, 1/2) and the others' values are a constant, so the pair is the same with n m
        trials. Count only clients that surely take part and do not tell the server their noise. Refused for a coarsened
        mechanism: the sum of the coarse codes does not follow from the sum of the fine ones.
        """
        check_int("honest_clients", honest_clients, 1, 2**53)
        trials = self.mechanism.trials * honest_clients
        mechanism = replace(self.mechanism, trials=trials)
        return replace(self, mechanism=mechanism, trust=Trust.SUMS_ONLY, colluders=colluders)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, the inverse of `from_dict`. What is not assumed and cannot happen has no field."""
        fields = {**asdict(self), "mechanism": self.mechanism.to_dict()}
        for name in ("assumption", "colluders", "failure"):
            if not fields[name]:
                del fields[name]
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Release:
        """Rebuild and re-check a release; unknown or missing fields raise InvalidParameter."""
        try:
            return cls(
                **{
                    **fields,
                    "mechanism": Mechanism.from_dict(fields["mechanism"]),
                    "sensitivity": Sensitivity(**fields["sensitivity"]),
                    "sampling": Sampling(**fields["sampling"]),
                }
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidParameter(f"not a release: {error}") from error


Spent = tuple[tuple[Release, int], ...]
"""Releases and how many rounds of each, in a fixed order."""
