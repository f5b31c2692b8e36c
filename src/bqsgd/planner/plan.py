"""Budget, client setting and plan: what is asked, what a message depends on, and what will be run.

Nothing else pairs a mechanism with an epsilon.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bqsgd.errors import InvalidParameter
from bqsgd.params import Mechanism, check_delta, check_int, check_positive
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.release import Assumption, Relation, Release, Sampling, Scheme, Sensitivity, Trust, Unit

MAX_BITS = 20


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one client may spend: bits per coordinate, epsilon and delta (b-bar, epsilon-bar, delta-bar in Algorithm 1).

    For `make_plan` epsilon and delta are proven totals over all rounds. For the paper's own planner (`bqsgd.paper`)
    they are nominal figures of one round.
    """

    bits: int
    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_int("bits", self.bits, 2, MAX_BITS)
        check_positive("epsilon", self.epsilon)
        check_delta("delta", self.delta)


@dataclass(frozen=True, kw_only=True)
class ClientSetting:
    """What one message depends on besides the mechanism, for a client that clips and divides by a public batch size.

    linf and l2 say how far one sample moves the vector, as fractions of the encoder's range C. Without them the client
    clips every sample at C per coordinate: linf is 1/batch_size under add/remove and 2/batch_size under replace-one.
    Without a relation the sampling decides: replace-one for fixed-size batches, add/remove otherwise.

    rate: of Poisson batches, where it is common to clients of all sizes; batch_size is then only what they divide by.
    Without it, batch_size / dataset_size.
    """

    dimension: int
    batch_size: int
    dataset_size: int
    rate: float | None = None
    scheme: Scheme | str = Scheme.POISSON
    relation: Relation | str | None = None
    linf: float | None = None
    l2: float | None = None
    unit: Unit = Unit.SAMPLE
    trust: Trust = Trust.EACH_CLIENT
    assumption: Assumption | None = None
    colluders: int = 0
    failure: float = 0.0

    def release(self, mechanism: Mechanism) -> Release:
        """What one message made by `mechanism` reveals.

        >>> setting = ClientSetting(dimension=10, batch_size=4, dataset_size=40)
        >>> release = setting.release(Mechanism(levels=2, trials=9))
        >>> release.sampling.rate, release.shift
        (0.1, 0.5)
        """
        if self.rate is None:
            sampling = Sampling.of_batch(self.scheme, batch_size=self.batch_size, dataset_size=self.dataset_size)
        else:
            sampling = Sampling(scheme=Scheme(self.scheme), rate=self.rate)
        relation, linf = self.relation, self.linf
        if relation is None:
            relation = Relation.REPLACE if sampling.scheme is Scheme.FIXED_SIZE else Relation.ADD_REMOVE
        if linf is None:
            linf = (2 if relation == Relation.REPLACE else 1) / self.batch_size
        return Release(
            mechanism=mechanism,
            dimension=self.dimension,
            sensitivity=Sensitivity(linf=linf, l2=self.l2, relation=Relation(relation)),
            sampling=sampling,
            unit=self.unit,
            trust=self.trust,
            assumption=self.assumption,
            colluders=self.colluders,
            failure=self.failure,
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one client runs for `rounds` rounds, what that guarantees and how large its error is.

    variance is V of Eq. 14: the expected squared error of a round is dimension * C^2 * variance. A budget that changes
    between rounds needs a new plan.
    """

    budget: Budget
    release: Release
    rounds: int
    variance: float
    guarantee: Guarantee

    def __post_init__(self) -> None:
        check_int("rounds", self.rounds, 1, 2**53)
        check_positive("variance", self.variance)

    @property
    def mechanism(self) -> Mechanism:
        """The planned mechanism."""
        return self.release.mechanism

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, the inverse of `from_dict`."""
        return {
            "budget": asdict(self.budget),
            "release": self.release.to_dict(),
            "rounds": self.rounds,
            "variance": self.variance,
            "guarantee": self.guarantee.to_dict(),
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Plan:
        """Rebuild a plan and check its fields. The guarantee is read, not proven again."""
        try:
            return cls(
                budget=Budget(**fields["budget"]),
                release=Release.from_dict(fields["release"]),
                rounds=fields["rounds"],
                variance=fields["variance"],
                guarantee=Guarantee.from_dict(fields["guarantee"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidParameter(f"not a plan: {error}") from error
