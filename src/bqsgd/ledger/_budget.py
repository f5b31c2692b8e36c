"""A client's privacy budget, and how many rounds still fit into it.

The number is found by bisection on the accountant and remembered. For fixed other content, "the release is made n times
in all" only gets worse with n: making it less often is a post-processing of making it more often. So one figure proves
a whole range: if n rounds are within the budget, fewer are too. The accountant is asked a handful of times over a whole
training, not once per round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar

from bqsgd.errors import AccountingError, InvalidParameter
from bqsgd.params import check_positive
from bqsgd.release import Release

MAX_PROBED_ROUNDS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PrivacyBudget:
    """The most a client may spend: epsilon at delta, over the whole life of its ledger."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check_positive("epsilon", self.epsilon))
        object.__setattr__(self, "delta", check_positive("delta", self.delta))
        if self.delta >= 1:
            raise InvalidParameter(f"delta must be below 1, got {self.delta}")


class Composable(Protocol):
    """What is needed of an accountant: immutable composition and an upper bound on epsilon."""

    def compose(self, release: Release, rounds: int = 1) -> Self:
        """This composed with `rounds` more of `release`."""

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at delta."""


A = TypeVar("A", bound=Composable)


def compose_all(empty: A, content: Mapping[Release, int]) -> A:
    """The accountant of everything in `content` (release -> number of rounds)."""
    for release, rounds in content.items():
        empty = empty.compose(release, rounds)
    return empty


@dataclass
class _Bracket:
    """Totals up to `fits` are proven within the budget, from `passes` on they are not."""

    fits: int = 0
    passes: int = MAX_PROBED_ROUNDS + 1


@dataclass
class Headroom:
    """The remembered answers of one ledger."""

    empty: Composable
    _brackets: dict[tuple[object, ...], _Bracket] = field(default_factory=dict)

    def _bracket(self, content: Mapping[Release, int], release: Release, budget: PrivacyBudget) -> _Bracket:
        others = frozenset((other, rounds) for other, rounds in content.items() if other != release)
        return self._brackets.setdefault((others, release, budget), _Bracket())

    def known(
        self, content: Mapping[Release, int], release: Release, rounds: int, budget: PrivacyBudget
    ) -> bool | None:
        """Whether `rounds` more of `release` fit, if that follows from earlier answers; never asks the accountant."""
        total, found = content.get(release, 0) + rounds, self._bracket(content, release, budget)
        return True if total <= found.fits else False if total >= found.passes else None

    def fits(self, content: Mapping[Release, int], release: Release, rounds: int, budget: PrivacyBudget) -> bool:
        """Whether `rounds` more of `release` stay within the budget."""
        total, found = content.get(release, 0) + rounds, self._bracket(content, release, budget)
        if found.fits < total < found.passes:
            # Ask further ahead first: a yes there answers for the coming rounds too. Powers of two, so that clients
            # and processes with the same release ask the same questions, which the accountant remembers.
            ahead = min(1 << total.bit_length(), (total + found.passes) // 2)
            if ahead > total and self._within(content, release, ahead, budget, probe=True):
                found.fits = ahead
            else:
                found.passes = min(found.passes, max(ahead, total + 1))
                if self._within(content, release, total, budget):
                    found.fits = total
                else:
                    found.passes = total
        return total <= found.fits

    def most(self, content: Mapping[Release, int], release: Release, budget: PrivacyBudget) -> int:
        """How many more rounds of `release` fit (at least that many when the answer is MAX_PROBED_ROUNDS in all)."""
        spent, found = content.get(release, 0), self._bracket(content, release, budget)
        if spent >= found.passes or (spent > found.fits and not self.fits(content, release, 0, budget)):
            return 0
        found.fits = max(found.fits, spent)
        while found.passes - found.fits > 1:
            self.fits(content, release, min((found.fits + found.passes) // 2, 2 * found.fits + 1) - spent, budget)
        return found.fits - spent

    def _within(
        self, content: Mapping[Release, int], release: Release, total: int, budget: PrivacyBudget, probe: bool = False
    ) -> bool:
        try:
            return compose_all(self.empty, {**content, release: total}).epsilon(budget.delta) <= budget.epsilon
        except AccountingError:
            if probe:  # too far ahead to be proven; the rounds asked for may still be
                return False
            raise
