"""What one client message reveals, as the accountant sees it: its terms and the mechanism that makes it.

A planner holds the `Terms` and looks for a mechanism; the two together are a `Release`. The ledger stores releases, the
accountant reads them and the audit tests them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.events import OutsideEvent
from bqsgd._src.laws import Binomial, Sum
from bqsgd._src.params import Mechanism, check_int, check_positive


class Relation(StrEnum):
    """Which data sets are neighbours. The number of records is public under either relation.

    Add/remove: a null record, which adds nothing to any sum, takes the place of one record. Replace: any other record
    takes its place.
    """

    ADD_REMOVE = "add/remove one"
    REPLACE = "replace one"


class Unit(StrEnum):
    """Whom a guarantee hides."""

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
    OUTSIDE = "outside events hide the same record and are what was stated of them; dp_accounting bounds their loss"


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
        # Files hold the text of the scheme. An unknown text raises here, before anything is accounted.
        object.__setattr__(self, "scheme", Scheme(self.scheme))
        if check_positive("rate", self.rate) > 1:
            raise InvalidParameter(f"rate must be at most 1, got {self.rate}")
        if self.scheme is Scheme.NONE and self.rate != 1:
            raise InvalidParameter(f"no sampling means rate 1, got {self.rate}")

    @classmethod
    def of_batch(cls, scheme: Scheme | str, *, batch_size: int, dataset_size: int) -> Sampling:
        """Rate = batch_size / dataset_size (1 for no sampling)."""
        scheme = Scheme(scheme)
        # Up to 2^53 integers are exact in float64, so the rate is the true quotient, rounded once.
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
class Terms:
    """What an epsilon depends on besides the mechanism: the same for every mechanism that a planner tries.

    >>> terms = Terms.of_batch(dimension=10, batch_size=4, dataset_size=40)
    >>> terms.sampling.rate, terms.sensitivity.linf
    (0.1, 0.25)

    colluders: if the server sees only sums, how many clients may tell it all they know. failure: the probability that a
    round shows more than its sum. It does not depend on the data, and is added to delta. group: the number of clients
    in the smallest of the groups whose sums the server sees; 0 if all clients are in one sum.
    """

    dimension: int
    sensitivity: Sensitivity
    sampling: Sampling
    unit: Unit = Unit.SAMPLE
    trust: Trust = Trust.EACH_CLIENT
    assumption: Assumption | None = None
    colluders: int = 0
    failure: float = 0.0
    group: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit", Unit(self.unit))
        object.__setattr__(self, "trust", Trust(self.trust))
        if self.assumption is not None:
            object.__setattr__(self, "assumption", Assumption(self.assumption))
        check_int("dimension", self.dimension, 1, 2**53)
        if check_int("colluders", self.colluders, 0, 2**53) and self.trust is not Trust.SUMS_ONLY:
            raise InvalidParameter(f"colluders need secure sums, but here the {self.trust}; leave colluders out")
        if self.failure != 0 and (check_positive("failure", self.failure) >= 1 or self.trust is not Trust.SUMS_ONLY):
            raise InvalidParameter(f"failure is the chance, below 1, that a secure sum fails, got {self.failure}")
        if check_int("group", self.group, 0, 2**53) and (self.group < 2 or self.trust is not Trust.SUMS_ONLY):
            raise InvalidParameter(f"a group is of 2 or more clients, whose sum alone is seen; got {self.group}")
        scheme, relation = self.sampling.scheme, self.sensitivity.relation
        # Amplification by sampling is proven for these two combinations only (Claim 3).
        if scheme is Scheme.POISSON and relation is not Relation.ADD_REMOVE:
            raise InvalidParameter("Poisson sampling is accounted under add/remove; give the add/remove sensitivity")
        if scheme is Scheme.FIXED_SIZE and relation is not Relation.REPLACE:
            raise InvalidParameter("fixed-size batches are accounted under replace-one; give its sensitivity")

    @classmethod
    def of_batch(
        cls,
        *,
        dimension: int,
        batch_size: int,
        dataset_size: int,
        scheme: Scheme | str = Scheme.POISSON,
        relation: Relation | str | None = None,
        linf: float | None = None,
        l2: float | None = None,
    ) -> Terms:
        """The terms of a client that clips every sample and divides their sum by a public batch size.

        linf and l2 say how far one sample moves the mean, as fractions of the encoder's range C. Without them every
        sample is clipped at C per coordinate: linf is 1/batch_size under add/remove and 2/batch_size under replace-one.
        Without a relation the sampling decides: replace-one for fixed-size batches, add/remove otherwise.
        """
        sampling = Sampling.of_batch(scheme, batch_size=batch_size, dataset_size=dataset_size)
        if relation is None:
            relation = Relation.REPLACE if sampling.scheme is Scheme.FIXED_SIZE else Relation.ADD_REMOVE
        if linf is None:
            linf = (2 if relation == Relation.REPLACE else 1) / batch_size
        sensitivity = Sensitivity(linf=linf, l2=l2, relation=Relation(relation))
        return cls(dimension=dimension, sensitivity=sensitivity, sampling=sampling)

    def shift(self, levels: int) -> float:
        """Largest move of one coordinate in quantiser steps, Delta_inf = s * linf."""
        return levels * self.sensitivity.linf

    def shift_l2(self, levels: int) -> float:
        """Largest Euclidean move in quantiser steps: s * l2 where known, never above sqrt(d) * shift."""
        bound = math.sqrt(self.dimension) * self.shift(levels)
        return bound if self.sensitivity.l2 is None else min(bound, levels * self.sensitivity.l2)


_NO_NOISE = Mechanism(levels=1, trials=0)


def _outside_terms(relation: Relation, unit: Unit) -> Terms:
    """The terms of a release made elsewhere; everything but relation and unit is a placeholder."""
    if Unit(unit) is Unit.CLIENT and Relation(relation) is Relation.ADD_REMOVE:
        raise InvalidParameter("an outside event for whole clients must be under replace-one")
    return Terms(
        dimension=1,
        sensitivity=Sensitivity(linf=1.0, relation=relation),
        sampling=Sampling(scheme=Scheme.NONE),
        unit=unit,
        assumption=Assumption.OUTSIDE,
    )


@dataclass(frozen=True, kw_only=True)
class Release:
    """One message of one client: everything an epsilon depends on, and nothing else.

    >>> terms = Terms.of_batch(dimension=10, batch_size=4, dataset_size=40)
    >>> Release(mechanism=Mechanism(levels=2, trials=9), terms=terms).shift
    0.5
    """

    mechanism: Mechanism
    terms: Terms
    event: OutsideEvent | None = None
    """If it was made elsewhere: what it was. The mechanism is then one without noise, which must not be sent."""

    def __post_init__(self) -> None:
        if self.event is not None:
            terms = _outside_terms(self.terms.sensitivity.relation, self.terms.unit)
            if (self.mechanism, self.terms) != (_NO_NOISE, terms):
                raise InvalidParameter("an outside event has no other terms than its relation and unit")
        if self.terms.trust is Trust.SUMS_ONLY and self.mechanism.coarsening is not None:
            raise InvalidParameter(
                "a coarsened mechanism cannot be accounted as a sum over clients: the sum of coarse codes is not a "
                "function of the sum of fine ones; leave the coarsening out"
            )
        if self.terms.trust is Trust.SUMS_ONLY and not isinstance(self.mechanism.law, (Binomial, Sum)):
            raise InvalidParameter(f"the noise of a sum is a sum of draws: use Sum({self.mechanism.law}, parties)")

    @classmethod
    def outside(cls, event: OutsideEvent, *, relation: Relation, unit: Unit) -> Release:
        """A release that was made elsewhere, to be counted together with messages.

        relation, unit: which data sets the event's own guarantee calls neighbours.
        """
        return cls(mechanism=_NO_NOISE, terms=_outside_terms(relation, unit), event=event)

    @property
    def shift(self) -> float:
        """Largest move of one coordinate in quantiser steps."""
        return self.terms.shift(self.mechanism.levels)

    @property
    def shift_l2(self) -> float:
        """Largest Euclidean move in quantiser steps."""
        return self.terms.shift_l2(self.mechanism.levels)

    def summed(self, honest_clients: int, *, colluders: int = 0) -> Release:
        """What the sum over n honest clients reveals of one of them, when secure aggregation hides the summands.

        Their noises add up to Bin(n m, 1/2) (or to the `Sum` of another law) and the others' values are a constant, so
        the pair is the same with that noise. Count only clients that certainly take part and do not tell the server
        their noise. A coarsened mechanism is refused: the sum of the coarse codes does not follow from the sum of the
        fine ones.
        """
        check_int("honest_clients", honest_clients, 1, 2**53)
        noise = Mechanism.of(levels=self.mechanism.levels, noise=self.mechanism.law.summed(honest_clients))
        mechanism = replace(noise, coarsening=self.mechanism.coarsening)  # which the release refuses
        return Release(mechanism=mechanism, terms=replace(self.terms, trust=Trust.SUMS_ONLY, colluders=colluders))

    def to_dict(self) -> dict[str, Any]:
        """One flat table of plain JSON types, the inverse of `from_dict`.

        Ledgers and plans store this, so its names and their order never change. The fields `assumption`, `colluders`,
        `failure` and `group` are left out if they are empty or 0.
        """
        fields = {"mechanism": self.mechanism.to_dict(), **asdict(self.terms)}
        if self.event is not None:
            fields["event"] = self.event.fields
        # Older files do not have these names, and an older version refuses a file that has them without need.
        for name in ("assumption", "colluders", "failure", "group"):
            if not fields[name]:
                del fields[name]
        return fields

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Release:
        """Rebuild and re-check a release; unknown or missing fields raise InvalidParameter."""
        try:
            terms = {name: value for name, value in fields.items() if name not in ("mechanism", "event")}
            event = OutsideEvent.of(fields["event"]) if "event" in fields else None
            terms["sensitivity"] = Sensitivity(**fields["sensitivity"])
            terms["sampling"] = Sampling(**fields["sampling"])
            return cls(mechanism=Mechanism.from_dict(fields["mechanism"]), terms=Terms(**terms), event=event)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidParameter(f"not a release: {error}") from error


Spent = tuple[tuple[Release, int], ...]
"""Releases and how many rounds of each, in a fixed order."""
