"""A client's privacy budget, and how many more rounds fit into it.

`Headroom` finds the number by bisection on the accountant and remembers every answer. With everything else in the
ledger fixed, epsilon grows with the number of times n that a release is made: making it less often is a post-processing
of making it more often. So one answer settles a whole range: if n rounds are within the budget, fewer are too. Over a
whole training the accountant is asked a handful of times, not once per round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from bqsgd._src.errors import AccountingError
from bqsgd._src.params import check_delta, check_positive
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.privacy.guarantee import Guarantee, as_given
from bqsgd._src.release import Release

MAX_PROBED_ROUNDS = 1 << 20
"""`Headroom` never asks about more rounds of one release than this."""


@dataclass(frozen=True, kw_only=True)
class PrivacyBudget:
    """The most that a client may spend: epsilon at delta, over the whole life of its ledger."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check_positive("epsilon", self.epsilon))
        object.__setattr__(self, "delta", check_delta("delta", self.delta))

    def __str__(self) -> str:
        return f"epsilon {as_given(self.epsilon)} at delta {as_given(self.delta)}"


def compose_all(accountant: Accountant, content: Mapping[Release, int]) -> Accountant:
    """`accountant` composed with everything in `content` (release -> number of rounds)."""
    for release, rounds in content.items():
        accountant = accountant.compose(release, rounds)
    return accountant


@lru_cache(maxsize=4096)
def guarantee_of(accountant: Accountant, delta: float, seeded: bool) -> Guarantee | None:
    """What everything in `accountant` guarantees; None if nothing was sent.

    Cached, because thousands of clients may have the same history, and equal histories are equal accountants.
    """
    return accountant.guarantee(delta=delta, seeded=seeded) if accountant.spent else None


@dataclass
class _Bracket:
    """What is known of one question: up to `fits` rounds in all are within the budget, `exceeds` or more are not."""

    fits: int = 0
    exceeds: int = MAX_PROBED_ROUNDS + 1


@dataclass
class Headroom:
    """How many more rounds fit into a budget. Ledgers with the same history can share one, and so its answers."""

    empty: Accountant = field(default_factory=Accountant)
    _brackets: dict[tuple[object, ...], _Bracket] = field(default_factory=dict)

    def _bracket(self, content: Mapping[Release, int], release: Release, budget: PrivacyBudget) -> _Bracket:
        others = frozenset((other, rounds) for other, rounds in content.items() if other != release)
        return self._brackets.setdefault((others, release, budget), _Bracket())

    def known_to_fit(
        self, content: Mapping[Release, int], release: Release, rounds: int, budget: PrivacyBudget
    ) -> bool:
        """Whether earlier answers prove that `rounds` more of `release` fit; never asks the accountant."""
        return content.get(release, 0) + rounds <= self._bracket(content, release, budget).fits

    def fits(self, content: Mapping[Release, int], release: Release, rounds: int, budget: PrivacyBudget) -> bool:
        """Whether `rounds` more of `release` stay within the budget; asks the accountant if that is not known yet.

        Raises:
            AccountingError: nothing can be proven about this number of rounds.
        """
        total, bracket = content.get(release, 0) + rounds, self._bracket(content, release, budget)
        if bracket.fits < total < bracket.exceeds:
            # Ask further ahead first: a yes there answers for the coming rounds too. Powers of two, so that clients
            # and processes with the same release ask the same questions, which the accountant remembers.
            ahead = min(1 << total.bit_length(), (total + bracket.exceeds) // 2)
            if ahead > total and self._within(content, release, ahead, budget, probe=True):
                bracket.fits = ahead
            else:
                bracket.exceeds = min(bracket.exceeds, max(ahead, total + 1))
                if self._within(content, release, total, budget):
                    bracket.fits = total
                else:
                    bracket.exceeds = total
        return total <= bracket.fits

    def most(self, content: Mapping[Release, int], release: Release, budget: PrivacyBudget) -> int:
        """How many more rounds of `release` fit. If that makes MAX_PROBED_ROUNDS in all, more may fit."""
        spent, bracket = content.get(release, 0), self._bracket(content, release, budget)
        if spent >= bracket.exceeds or (spent > bracket.fits and not self.fits(content, release, 0, budget)):
            return 0
        bracket.fits = max(bracket.fits, spent)
        while bracket.exceeds - bracket.fits > 1:
            # Double before bisecting: most budgets allow far fewer rounds than MAX_PROBED_ROUNDS.
            total = min((bracket.fits + bracket.exceeds) // 2, 2 * bracket.fits + 1)
            self.fits(content, release, total - spent, budget)
        return bracket.fits - spent

    def _within(
        self, content: Mapping[Release, int], release: Release, total: int, budget: PrivacyBudget, probe: bool = False
    ) -> bool:
        try:
            return compose_all(self.empty, {**content, release: total}).epsilon(budget.delta) <= budget.epsilon
        except AccountingError:
            if probe:  # Nothing is proven so far ahead; the rounds that the caller asked about may still be.
                return False
            raise
