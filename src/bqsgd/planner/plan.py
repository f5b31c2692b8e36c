"""Budget and Plan: what is asked of one client, and what will be run. Nobody else pairs a mechanism with an epsilon."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from bqsgd.errors import InvalidParameter
from bqsgd.params import Mechanism, check_int, check_positive
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.privacy.nominal import NominalPrivacy, NominalSetting, check_delta
from bqsgd.release import Relation, Release, Sampling, Scheme, Sensitivity

MAX_BITS = 20


class Method(StrEnum):
    """How a plan's (levels, trials) were chosen."""

    PAPER = "paper"
    EXACT = "exact"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one client may spend: bits a coordinate, epsilon and delta (b-bar, epsilon-bar, delta-bar of Algorithm 1).

    Method "exact" reads epsilon and delta as the proven totals over all rounds; method "paper" reads them as the
    nominal figures of one round, as the paper does.
    """

    bits: int
    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_int("bits", self.bits, 2, MAX_BITS)
        check_positive("epsilon", self.epsilon)
        check_delta("delta", self.delta)


def release_of(
    mechanism: Mechanism,
    *,
    dimension: int,
    batch_size: int,
    dataset_size: int,
    scheme: Scheme | str = Scheme.POISSON,
    relation: Relation | str | None = None,
    linf: float | None = None,
    l2: float | None = None,
) -> Release:
    """The release of one round of a client that clips every sample and divides by the public batch size.

    linf and l2 are fractions of the clip range C. Left out, linf is that of a per-sample clip at C: 1/batch_size under
    add/remove, 2/batch_size under replace-one. The relation follows the scheme: add/remove for Poisson and for no
    sampling, replace-one for fixed-size batches.
    """
    sampling = Sampling.of_batch(scheme, batch_size=batch_size, dataset_size=dataset_size)
    if relation is None:
        relation = Relation.REPLACE if sampling.scheme is Scheme.FIXED_SIZE else Relation.ADD_REMOVE
    if linf is None:
        linf = (2 if relation == Relation.REPLACE else 1) / batch_size
    return Release(
        mechanism=mechanism,
        dimension=dimension,
        sensitivity=Sensitivity(linf=linf, l2=l2, relation=Relation(relation)),
        sampling=sampling,
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one client runs for `rounds` rounds, and what is known about its privacy and its error.

    variance is V of Eq. 14: the expected squared error is dimension * C^2 * variance a round. `nominal` holds the
    paper's figures (as published; not a guarantee); `guarantee` the proven one, or None where the plan was made without
    it. A budget that changes between rounds means a new Plan.
    """

    method: Method
    budget: Budget
    release: Release
    rounds: int
    variance: float
    nominal: NominalPrivacy
    guarantee: Guarantee | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", Method(self.method))
        check_int("rounds", self.rounds, 1, 2**53)
        check_positive("variance", self.variance)
        if self.nominal.rounds != self.rounds:
            raise InvalidParameter(f"nominal figures are for {self.nominal.rounds} rounds, the plan for {self.rounds}")

    @property
    def mechanism(self) -> Mechanism:
        """The planned levels and trials."""
        return self.release.mechanism

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, the inverse of `from_dict`."""
        return {
            "method": str(self.method),
            "budget": asdict(self.budget),
            "release": self.release.to_dict(),
            "rounds": self.rounds,
            "variance": self.variance,
            "nominal": self.nominal.to_dict(),
            "guarantee": None if self.guarantee is None else self.guarantee.to_dict(),
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Plan:
        """Rebuild and re-check a plan; the nominal figures are computed anew, not believed."""
        try:
            release = Release.from_dict(fields["release"])
            setting = NominalSetting(**fields["nominal"]["setting"])
            guarantee = fields["guarantee"]
            return cls(
                method=Method(fields["method"]),
                budget=Budget(**fields["budget"]),
                release=release,
                rounds=fields["rounds"],
                variance=fields["variance"],
                nominal=NominalPrivacy.of(release.mechanism, setting, rounds=fields["rounds"]),
                guarantee=None if guarantee is None else Guarantee.from_dict(guarantee),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidParameter(f"not a plan: {error}") from error
