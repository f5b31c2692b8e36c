"""Budget and plan: what is asked for, and what will be run.

`Plan` is the only type that pairs a mechanism with an epsilon.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import PrivacyBudget
from bqsgd._src.params import Mechanism, check_delta, check_int, check_positive
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.release import Release

MAX_BITS = 20


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a plan must keep to: bits per coordinate, and a privacy budget (b-bar, epsilon-bar, delta-bar in the paper).

    Epsilon and delta are proven totals over all rounds. A ledger does not count bits, so it takes `privacy`.

    >>> Budget(bits=8, epsilon=3.0, delta=1e-5).privacy
    PrivacyBudget(epsilon=3.0, delta=1e-05)
    """

    bits: int
    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        check_int("bits", self.bits, 2, MAX_BITS)
        check_positive("epsilon", self.epsilon)
        check_delta("delta", self.delta)

    @property
    def privacy(self) -> PrivacyBudget:
        """Epsilon and delta alone."""
        return PrivacyBudget(epsilon=self.epsilon, delta=self.delta)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one client runs for `rounds` rounds, what that guarantees and how large its error is.

    variance is V of Eq. 14: the expected squared error of a round is dimension * R^2 * variance, R the range. A new
    budget needs a new plan.
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
        """The plan in plain JSON types, for `from_dict`."""
        return {
            "budget": asdict(self.budget),
            "release": self.release.to_dict(),
            "rounds": self.rounds,
            "variance": self.variance,
            "guarantee": self.guarantee.to_dict(),
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Plan:
        """Read a plan and check its fields. The guarantee is only read, not proven again."""
        try:
            return cls(
                budget=Budget(**fields["budget"]),
                release=Release.from_dict(fields["release"]),
                rounds=fields["rounds"],
                variance=fields["variance"],
                guarantee=Guarantee.from_dict(fields["guarantee"]),
            )
        except (KeyError, TypeError, ValueError) as error:  # TypeError: a budget with unknown or missing fields
            raise InvalidParameter(f"not a plan: {error}") from error
