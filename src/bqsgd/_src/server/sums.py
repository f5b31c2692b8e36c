"""The server's side of secure sums in a run, over any engine.

The client's side is `client.client.Client`, which answers the messages of a sum as it answers a model. Engines carry
the messages of both sides without reading them.

Keys and secret shares are exchanged for a batch of rounds at once, or, with cohorts, for every round. A round then has
three exchanges: model and masked vector, survivors and signature, certificate and unmasking. A fourth one asks for
shares of the survivors that did not answer the third, if there are any. A client that does not answer an exchange is
missing from there on. If a round ends without a sum it is lost, but the clients that masked a vector have counted it in
their ledgers; the next round begins with new keys.

With groups each group has such sums of its own, and the messages of all groups travel together (`together`). A group
that loses its sum loses no other group's.

A client that reveals a wrong share, or that gave false corrections of other clients' shares, is named in the log. That
is evidence against it, but weak: two liars together can make it look as if a third had lied. So only a client that lied
about more others than may lie themselves (t, at least one), or about its own seed, is left out of the next key batches.
Disputes count in the same way: two clients of which one refused the other's tag, or sent it none. A list with both
would not be signed, so keys are exchanged again without one of them before any round is counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bqsgd._src.errors import SecureSumError
from bqsgd._src.secure import messages
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.masks import NO_MODEL
from bqsgd._src.secure.messages import Bytes
from bqsgd._src.secure.opening import Total
from bqsgd._src.secure.server import SumServer
from bqsgd._src.server.widths import Widths
from bqsgd._src.wire.reply import Reply

Carry = Callable[[Mapping[int, bytes]], Iterable[Reply]]
"""An engine's exchange within one round: client -> message, to the replies."""
_Take = Callable[[Bytes], object]
Exchange = tuple[Mapping[int, bytes], Callable[[Reply], None]]
"""The messages of one exchange, client -> message, and what takes each reply."""
Exchanges = Generator[Exchange, None, "SumOutcome"]
_log = logging.getLogger("bqsgd.sums")
LOST_SUMS = 3
"""A run stops when this many sums in a row were lost after clients had counted them. The first may be chance, and after
the second the liars that could be named are gone; another loss has a cause that the next round would have too."""


@dataclass(kw_only=True)
class SumOutcome:
    """The result of a round with a secure sum.

    total: the sum; None if the round is lost, and then `lost` says why. trouble: client -> why it is not in the sum
    (its reply without bytes, or why the server refused its bytes). masked: client -> bytes of its masked vector.
    """

    total: Total | None = None
    lost: str | None = None
    trouble: dict[int, Reply] = field(default_factory=dict)
    masked: dict[int, int] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    """Time for everything but the exchange of model and masked vector, in which clients train."""


class SumRounds:
    """The server's side of a run's secure sums.

    Args:
        agreement: what all parties agree on.
        rounds: how many rounds the run has.
        key_rounds: for how many rounds keys are exchanged at once.
        last_epoch: remembers the number of the last key batch across restarts. Without an argument it returns the
            number, with one it stores it.
        widths: chooses the width of every key batch; None for the widest that was agreed on.
    """

    def __init__(
        self,
        agreement: Agreement,
        *,
        rounds: int,
        key_rounds: int,
        last_epoch: Callable[..., int] | None = None,
        widths: Widths | None = None,
    ) -> None:
        self.agreement, self.rounds, self.key_rounds = agreement, rounds, key_rounds
        self._server = SumServer(agreement)
        self._last_epoch = last_epoch
        self._epoch = -1 if last_epoch is None else last_epoch()
        self.widths = widths
        self._ready: tuple[int, ...] = ()
        """The clients that have keys for this key batch; empty if new keys are needed."""
        self._evidence: dict[int, set[int]] = {}
        """Client -> the clients about whose secrets it has revealed something wrong, or with which it has disputes. If
        a client is honest, all of these have lied."""
        self.lost_in_a_row = 0
        """The last sums that were lost although clients had counted them."""

    @property
    def excluded(self) -> frozenset[int]:
        """The clients that are not asked for keys any more."""
        most = self.agreement.rule.liars
        return frozenset(client for client, about in self._evidence.items() if client in about or len(about) > most)

    def round(self, messages: Mapping[int, bytes], *, round: int, carry: Carry, model: bytes = NO_MODEL) -> SumOutcome:
        """Run one round: send `messages` to every client that has keys, and add up what they reply.

        model: digest of the model in the messages.
        """
        return _driven([self.exchanges(messages, round=round, model=model)], carry)[0]

    def exchanges(self, messages: Mapping[int, bytes], *, round: int, model: bytes) -> Exchanges:
        """The exchanges of one round, one by one, and then its outcome; whoever iterates carries the messages."""
        outcome, started, waited = SumOutcome(), time.perf_counter(), 0.0
        try:
            named = self.agreement.rule.clients < len(self.agreement.roster.keys)
            if named or not self._ready or round > self._last_round:
                yield from self._begin_keys(outcome, round, cohort=messages if named else None)
            server = self._server
            server.open(round, model=model)
            before = time.perf_counter()
            models = {client: messages[client] for client in self._ready}
            yield self._exchange(outcome, models, self._take_masked(outcome))
            waited = time.perf_counter() - before
            lists = server.survivor_lists()
            yield self._exchange(outcome, lists, server.take_signature, [] if server.sparse else None)
            yield self._exchange(outcome, server.certificates(), server.take_unmasking)
            if silent := server.recoveries():
                yield self._exchange(outcome, silent, server.take_recovery)
            outcome.total = server.total()
            if self.widths is not None:
                self.widths.observe(outcome.total, round=round)
            outcome.trouble = {client: reply for client, reply in outcome.trouble.items() if client not in lists}
        except SecureSumError as error:
            outcome.lost = str(error)
            self._ready = ()  # clients may have stopped at different exchanges; new keys start them all again
        # Only a sum ends the row: a liar must not end it by a round that is lost before anybody counts it.
        self.lost_in_a_row = 0 if outcome.lost is None else self.lost_in_a_row + bool(outcome.masked)
        self._blame(round)
        outcome.seconds = time.perf_counter() - started - waited
        return outcome

    @property
    def given_up(self) -> bool:
        """Whether so many sums in a row were lost that no more are tried."""
        return self.lost_in_a_row >= LOST_SUMS

    @property
    def _last_round(self) -> int:
        """The last round for which the key batch can be used."""
        last = self._server.last_round
        return last if self.widths is None else min(last, self.widths.last_round)

    def _blame(self, round: int) -> None:
        """Log what clients lied about in a round. Those that lied too often have no keys from now on."""
        for client, about in self._server.blamed.items():
            if client in about:
                _log.warning("round %d: client %d lied about its own seed", round, client)
            if others := ", ".join(str(other) for other in sorted(about) if other != client):
                _log.warning("round %d: client %d lied about secrets it shares with client %s", round, client, others)
        self._add_evidence(round, self._server.blamed)

    def _add_evidence(self, round: int, evidence: Mapping[int, frozenset[int]]) -> None:
        before = self.excluded
        for client, about in evidence.items():
            self._evidence.setdefault(client, set()).update(about)
        for client in sorted(self.excluded - before):
            _log.warning("round %d: client %d is left out from now on", round, client)
            self._ready = ()

    def _begin_keys(
        self, outcome: SumOutcome, round: int, *, cohort: Iterable[int] | None
    ) -> Generator[Exchange, None, None]:
        """Exchange keys and secret shares for the rounds from this one on, again and again until no dispute is left.

        Every time a client more is left out, and the server gives up if these are more than may be missing.

        cohort: the clients that take part, for this round only; None for all clients and a whole key batch.
        """
        self._ready, left_out = (), self.excluded
        while True:
            ready = yield from self._exchange_keys(outcome, round, cohort=cohort, without=left_out)
            if not (liars := self._server.to_leave_out()):
                break
            disputes = self._server.disputes
            for client in sorted(liars):
                reason = f"it and client {', '.join(map(str, sorted(disputes[client])))} could not agree on keys"
                _log.warning("round %d: client %d is left out of the key batch: %s", round, client, reason)
                outcome.trouble.setdefault(client, Reply(client=client, reason=reason))
            self._add_evidence(round, disputes)
            left_out |= liars | self.excluded
        self._ready = ready

    def _exchange_keys(
        self,
        outcome: SumOutcome,
        round: int,
        *,
        cohort: Iterable[int] | None,
        without: frozenset[int],
    ) -> Generator[Exchange, None, tuple[int, ...]]:
        """Exchange keys and secret shares under an epoch that was never used; returns the clients that have both."""
        self._epoch += 1
        # Stored before any message with it is sent: after a crash the number must not be used again.
        if self._last_epoch is not None:
            self._last_epoch(self._epoch)
        server = self._server
        most = min(self.key_rounds, messages.most_rounds(self.agreement))
        rounds, width = min(most, self.rounds - round) if cohort is None else 1, None
        if self.widths is not None:
            width, rounds = self.widths.batch(round, most=rounds)
        server.begin(
            epoch=self._epoch,
            first_round=round,
            rounds=rounds,
            cohort=cohort,
            width=width,
            without=without,
        )
        yield self._exchange(outcome, server.requests(), server.take_keys)
        yield self._exchange(outcome, server.key_bundles(), server.take_shares)
        ready: list[int] = []
        yield self._exchange(outcome, server.share_bundles(), server.take_partners, None if server.sparse else ready)
        # After a dispute keys are exchanged again, so it does not matter who is ready.
        if server.sparse and not server.disputes:
            yield self._exchange(outcome, server.partner_bundles(), None, ready)
        return tuple(ready)

    def _take_masked(self, outcome: SumOutcome) -> _Take:
        def take(message: Bytes) -> int:
            client = self._server.take_masked(message)
            outcome.masked[client] = len(message)
            return client

        return take

    def _exchange(
        self,
        outcome: SumOutcome,
        messages: Mapping[int, bytes],
        take: _Take | None,
        acknowledged: list[int] | None = None,
    ) -> Exchange:
        """An exchange that sends these messages and takes the replies. A client whose reply is refused is missing.

        take: reads a reply's bytes; None if only empty replies are expected. acknowledged: collects the clients that
        sent an empty reply; None if an empty reply is not allowed.
        """
        outcome.bytes_down += sum(map(len, messages.values()))

        def receive(reply: Reply) -> None:
            client = reply.client
            if reply.frame is None:
                outcome.trouble.setdefault(client, reply)
                return
            content = memoryview(reply.frame)  # type: ignore[arg-type]
            outcome.bytes_up += len(content)
            if acknowledged is not None and len(content) == 0 and client in messages:
                acknowledged.append(client)
                return
            if take is None:
                return
            try:
                self._server.check_sender(content, client)
                take(content)
            except SecureSumError as error:
                reason = f"{type(error).__name__}: {error}"
                outcome.trouble.setdefault(client, Reply(client=client, reason=reason))

        return messages, receive


def together(
    groups: Sequence[SumRounds],
    messages: Mapping[int, bytes],
    *,
    round: int,
    carry: Carry,
    model: bytes = NO_MODEL,
) -> list[SumOutcome]:
    """Run one round of the sums of all groups at once; returns the outcome of each.

    A group that has lost LOST_SUMS sums in a row is not asked again: its clients would pay for more of them.
    """
    asked = [group for group in groups if not group.given_up]
    exchanges = [group.exchanges(messages, round=round, model=model) for group in asked]
    outcomes = dict(zip(asked, _driven(exchanges, carry), strict=True))
    reason = f"the last {LOST_SUMS} sums of this group were lost, and it is not asked any more"
    return [outcomes.get(group) or SumOutcome(lost=reason) for group in groups]


def _driven(all_exchanges: Sequence[Exchanges], carry: Carry) -> list[SumOutcome]:
    """Carry the next exchanges of all sums together, until all are done. Replies go to the sum of their client."""
    outcomes: dict[int, SumOutcome] = {}
    while len(outcomes) < len(all_exchanges):
        messages: dict[int, bytes] = {}
        receivers: dict[int, Callable[[Reply], None]] = {}
        for number, exchanges in enumerate(all_exchanges):
            if number in outcomes:
                continue
            try:
                sent, receive = next(exchanges)
            except StopIteration as end:
                outcomes[number] = end.value
                continue
            messages.update(sent)
            receivers.update(dict.fromkeys(sent, receive))
        for reply in carry(messages) if messages else ():
            # A client that was not asked is refused by whichever sum gets its reply.
            receivers.get(reply.client, receive)(reply)
    return [outcomes[number] for number in range(len(all_exchanges))]
