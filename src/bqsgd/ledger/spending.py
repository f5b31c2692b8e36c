"""A client's side of its ledger: rounds reserved in blocks ahead, and what the messages so far add up to."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from bqsgd.errors import BudgetExhausted, InvalidParameter
from bqsgd.ledger._budget import PrivacyBudget, compose_all
from bqsgd.ledger.ledger import Ledger
from bqsgd.params import check_int
from bqsgd.privacy.accountant import Accountant
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.release import Release


class Spending:
    """Records every round in the ledger before its message leaves, reserving `ahead` rounds in one durable write.

    A crash leaves the reserved rounds counted though they were not sent: an over-count, never an
    under-count. Without a ledger nothing is durable, which is allowed only for seeded noise and for messages without
    noise: neither has a privacy claim.
    """

    def __init__(self, ledger: Ledger | None, *, run: str, seeded: bool, ahead: int = 1, resume: bool = False) -> None:
        self.ledger, self.run, self.seeded, self.resume = ledger, run, seeded, resume
        self.ahead = check_int("ahead", ahead, 1, 2**20)
        self._reserved: tuple[Release, int] | None = None
        self.sent: Counter[Release] = Counter()
        """How often each release counts as made, rounds of earlier processes included, unsent reservations not."""
        self._recorded: dict[int, tuple[Release, bool]] = {}
        if ledger is not None:
            self.sent = ledger.released
            self._recorded = ledger.recorded(run)

    @property
    def recorded(self) -> int:
        """Rounds of this run that earlier processes have recorded."""
        return len(self._recorded)

    def spend(self, release: Release, *, round: int, last_round: int, within: PrivacyBudget | None = None) -> None:
        """Count one round of `release`; when this returns its message may leave.

        within: what the run asks for, which its own messages may not pass either.

        Raises:
            BudgetExhausted: the round would pass the budget; nothing was recorded.
        """
        if self.ledger is None:
            if not self.seeded and release.mechanism.trials:
                raise InvalidParameter("unseeded noise makes a privacy claim and needs a ledger; give the client one")
        else:
            self.reserve(release, round=round, last_round=last_round, within=within)
            self.ledger.spend(release, run=self.run, round=round, seeded=self.seeded, resume=self.resume, within=within)
        if not (
            self.seeded and self._recorded.get(round) == (release, True)
        ):  # the same bytes again reveal nothing new
            self.sent[release] += 1

    def reserve(self, release: Release, *, round: int, last_round: int, within: PrivacyBudget | None = None) -> None:
        """Record the round and those reserved with it, unless that was done before; `spend` then only ticks it off.

        Raises:
            BudgetExhausted: the round would pass the budget; nothing was recorded.
        """
        if self.ledger is None or (
            self._reserved is not None and self._reserved[0] == release and round < self._reserved[1]
        ):
            return
        self._reserve(self.ledger, release, round, last_round, within)

    def _reserve(
        self, ledger: Ledger, release: Release, round: int, last_round: int, within: PrivacyBudget | None
    ) -> None:
        wanted = max(1, min(self.ahead, last_round + 1 - round))
        while True:
            try:
                ledger.reserve(
                    release,
                    run=self.run,
                    first_round=round,
                    rounds=wanted,
                    seeded=self.seeded,
                    resume=self.resume,
                    within=within,
                )
                self._reserved = (release, round + wanted)
                return
            except BudgetExhausted:
                if wanted == 1:
                    raise
                wanted = max(1, min(wanted - 1, ledger.headroom(release, run=self.run, within=within)))

    def guarantee(self, *, delta: float) -> Guarantee | None:
        """What the messages so far guarantee; None when nothing was sent. While the ledger is open, it has the word:
        another process may have spent from it meanwhile."""
        if self.ledger is not None and not self.ledger.closed:
            self.sent = self.ledger.released
        return guarantee_of(tuple(sorted_releases(self.sent)), delta, self.seeded)


def sorted_releases(sent: Counter[Release]) -> list[tuple[Release, int]]:
    """In a fixed order, so that clients with the same history share one computation."""
    return sorted(((release, count) for release, count in sent.items() if count), key=lambda pair: repr(pair[0]))


@lru_cache(maxsize=4096)
def guarantee_of(spent: tuple[tuple[Release, int], ...], delta: float, seeded: bool) -> Guarantee | None:
    """The proven guarantee of a history."""
    return compose_all(Accountant(), dict(spent)).guarantee(delta=delta, seeded=seeded) if spent else None
