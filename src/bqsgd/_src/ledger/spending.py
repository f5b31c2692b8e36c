"""How a client uses its ledger: it reserves rounds in blocks, and asks what its messages so far guarantee."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from bqsgd._src.errors import BudgetExhausted, InvalidParameter
from bqsgd._src.ledger._budget import PrivacyBudget, compose_all, guarantee_of
from bqsgd._src.ledger.ledger import Ledger
from bqsgd._src.params import check_int
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.release import Release


@dataclass(frozen=True, kw_only=True)
class Charge:
    """What the ledger counts for one message.

    Attributes:
        release: what the message reveals.
        round: the round of the message.
        last_round: the last round that may be reserved ahead together with this one.
        within: a budget for this run alone, besides the ledger's; None if the run has none.
    """

    release: Release
    round: int
    last_round: int
    within: PrivacyBudget | None = None


class Spending:
    """Records every round in the ledger before its message is sent, `ahead` rounds in one durable write.

    After a crash the ledger may count up to `ahead` rounds that were never sent; it never counts too few. A client
    needs a ledger unless its noise is seeded or its messages have no noise: those have no privacy claim.
    """

    def __init__(self, ledger: Ledger | None, *, run: str, seeded: bool, ahead: int = 1, resume: bool = False) -> None:
        self.ledger, self.run, self.seeded, self.resume = ledger, run, seeded, resume
        self.ahead = check_int("ahead", ahead, 1, 2**20)
        self._reserved: tuple[Release, int] | None = None
        """(release, one past the last round) of the block that was reserved last."""
        self.sent: Counter[Release] = Counter()
        """How often each release counts as made. This includes earlier processes, but not rounds that this process has
        reserved and not sent."""
        self._recorded: dict[int, tuple[Release, bool]] = {}
        if ledger is not None:
            self.sent = ledger.released
            self._recorded = ledger.recorded(run)

    @property
    def recorded(self) -> int:
        """How many rounds of this run earlier processes have recorded."""
        return len(self._recorded)

    def repeats(self, round: int) -> bool:
        """Whether an earlier process has recorded this round under the run's name."""
        return round in self._recorded

    def has_room(self, charge: Charge) -> bool:
        """Whether the ledger's budget has room for the message; that of the run may still have none."""
        return self.ledger is not None and self.ledger.headroom(charge.release) > 0

    def spend(self, charge: Charge) -> None:
        """Count one message. When this returns, the entry is durable and the message may be sent.

        Raises:
            BudgetExhausted: the message would exceed the budget; nothing was recorded.
        """
        release, round = charge.release, charge.round
        if self.ledger is None:
            if not self.seeded and release.mechanism.trials:
                raise InvalidParameter(
                    "a client with unseeded noise needs a ledger, because it claims privacy: give its path, or a "
                    "run its folder"
                )
        else:
            self.reserve(charge)
            self.ledger.spend(
                release, run=self.run, round=round, seeded=self.seeded, resume=self.resume, within=charge.within
            )
        # With the same seed a repeated round has the same bytes, which reveal nothing new.
        if not (self.seeded and self._recorded.get(round) == (release, True)):
            self.sent[release] += 1

    def reserve(self, charge: Charge) -> None:
        """Record the round together with up to `ahead` - 1 coming ones, unless it is recorded already.

        Raises:
            BudgetExhausted: the round alone would exceed the budget; nothing was recorded.
        """
        if self.ledger is None or (
            self._reserved is not None and self._reserved[0] == charge.release and charge.round < self._reserved[1]
        ):
            return
        ledger, release = self.ledger, charge.release
        wanted = max(1, min(self.ahead, charge.last_round + 1 - charge.round))
        while True:
            try:
                ledger.reserve(
                    release,
                    run=self.run,
                    first_round=charge.round,
                    rounds=wanted,
                    seeded=self.seeded,
                    resume=self.resume,
                    within=charge.within,
                )
                self._reserved = (release, charge.round + wanted)
                return
            except BudgetExhausted:
                if wanted == 1:
                    raise
                # Near its end the budget has room for a shorter block. Always fewer than before, so that this ends
                # even if another process spends in between.
                wanted = max(1, min(wanted - 1, ledger.headroom(release, run=self.run, within=charge.within)))

    @property
    def tally(self) -> Accountant:
        """The accountant of all messages so far."""
        return compose_all(Accountant(), self.sent)

    def guarantee(self, *, delta: float) -> Guarantee | None:
        """What the messages so far guarantee; None if nothing was sent."""
        # While the ledger is open it is authoritative: another process may have spent from it.
        if self.ledger is not None and not self.ledger.closed:
            self.sent = self.ledger.released
        return guarantee_of(self.tally, delta, self.seeded)
