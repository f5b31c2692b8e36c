"""Secure sums between the ranks of a private loop: rank 0 carries the messages, and no rank sees another's values.

Every sum needs all ranks: a rank that sends nothing ends the step for all of them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bqsgd._src.client.sums import answer_step, identity_of, roster_of
from bqsgd._src.engines.torch_distributed.ranks import SERVER, MessageKind
from bqsgd._src.errors import InvalidParameter, TooFewClients
from bqsgd._src.planner.sums import SumPlan
from bqsgd._src.private._ranks import Peers
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.messages import is_sum_message, most_bytes
from bqsgd._src.server.sums import SumRounds
from bqsgd._src.server.widths import Widths
from bqsgd._src.text import one_line
from bqsgd._src.wire.frame import Buffer
from bqsgd._src.wire.reply import Reply

_KEY_ROUNDS = 10
_NO_END = 2**40
_MOST_WORDS = 4096


@dataclass(frozen=True, kw_only=True)
class SecureRanks:
    """Keys of a rank for secure sums with the others.

    roster: file of all ranks' public keys. identity: file of this rank's own key; `{client}` in it stands for the
    rank's number. colluders: most ranks that may tell rank 0 all they know.

    >>> SecureRanks(roster="roster.toml", identity="keys/{client}.pem").colluders
    0
    """

    roster: str | Path
    identity: str | Path
    colluders: int = 0


class RankSums:
    """One rank's side of the sums; rank 0 has the server's side as well.

    Args:
        peers: the ranks.
        plan: of the sums, the same on every rank.
        dimension: coordinates of a message.
        secure: roster and identity.
        seed: makes everything reproducible, and voids every claim.
        told: digest of the model that rank 0 shared, and later also of all means that rank 0 has sent. Masks depend on
            it, so a rank 0 that gives every rank a model of its own gets noise.
    """

    def __init__(
        self, peers: Peers, *, plan: SumPlan, dimension: int, secure: SecureRanks, seed: int | None, told: bytes
    ) -> None:
        roster = roster_of(secure.roster, peers.size)
        # Every rank adds a token to the name of the run, so a rank that restarts can never join a sum from before.
        token = (
            secrets.token_hex(16) if seed is None else hashlib.sha256(f"{seed}-{peers.rank}".encode()).hexdigest()[:32]
        )
        tokens = [str(note["token"])[:32] for note in peers.tell({"token": token})]
        run = "private-" + hashlib.sha256("-".join(tokens).encode()).hexdigest()
        agreement = plan.agreement(roster, run=run, dimension=dimension, seeded=seed is not None)
        identity = identity_of(secure.identity, peers.rank)
        self._peers, self._plan, self._dimension = peers, plan, dimension
        self.client = SumClient(agreement, identity=identity, number=peers.rank, seed=seed)
        self._rounds = None
        if peers.rank == SERVER:
            widths = Widths(plan, dimension=dimension)
            self._rounds = SumRounds(agreement, rounds=_NO_END, key_rounds=_KEY_ROUNDS, widths=widths)
        self.told = told
        self._longest = most_bytes(plan.rule, rounds=_KEY_ROUNDS) + 4 * dimension + _MOST_WORDS

    def mean(self, masked: Callable[[], bytearray | None], *, round: int) -> npt.NDArray[np.float32]:
        """The mean of all ranks' values, in units of the range. `masked` is called once, when the sum needs the vector.

        Raises:
            TooFewClients: a rank sent nothing or refused a step, so no rank has a mean.
        """

        def answer(message: bytes) -> Reply:
            if is_sum_message(message):
                return answer_step(self.client, message)
            return _reply(self._peers.rank, masked() if self.client.ready(round) else None)

        return self._served(answer, round) if self._rounds is not None else self._followed(answer)

    def _served(self, answer: Callable[[bytes], Reply], round: int) -> npt.NDArray[np.float32]:
        assert self._rounds is not None
        channels = {rank: self._peers.channel(rank) for rank in range(self._peers.size) if rank != SERVER}

        def carry(messages: Mapping[int, bytes]) -> Iterator[Reply]:
            others = [channels[rank] for rank in sorted(messages) if rank != SERVER]
            for channel in others:
                channel.send(MessageKind.MODEL, messages[channel.peer])
            # After all messages are out, so that the ranks compute at the same time.
            if SERVER in messages:
                yield answer(messages[SERVER])
            for channel in others:
                kind, content = channel.receive(most_bytes=self._longest)
                yield _reply(channel.peer, content if kind is MessageKind.FRAME else None)

        messages = dict.fromkeys(range(self._peers.size), b"step")
        outcome = self._rounds.round(messages, round=round, carry=carry, model=self.told)
        if outcome.total is None:
            silent = "; ".join(f"rank {reply.client}: {reply.reason}" for reply in outcome.trouble.values())
            reason = f"{outcome.lost}; {silent}"
            result, kind = reason.encode()[:_MOST_WORDS], MessageKind.NO_SUM
        else:
            total = outcome.total
            mean = self._plan.mean(total.lanes, survivors=len(total.survivors), width=total.width)
            result, kind = mean.astype("<f4").tobytes(), MessageKind.SUM
        for channel in channels.values():
            channel.send(kind, result)
        return self._result(kind, result)

    def _followed(self, answer: Callable[[bytes], Reply]) -> npt.NDArray[np.float32]:
        channel = self._peers.channel(SERVER)
        while True:
            kind, message = channel.receive(most_bytes=self._longest)
            if kind is not MessageKind.MODEL:
                return self._result(kind, bytes(message))
            reply = answer(bytes(message))
            if reply.frame is None:
                channel.send(MessageKind.DECLINED)
            else:
                channel.send(MessageKind.FRAME, reply.frame)

    def _result(self, kind: MessageKind, content: bytes) -> npt.NDArray[np.float32]:
        if kind is MessageKind.NO_SUM:
            raise TooFewClients(
                f"the sum of this step is lost: {one_line(content[:_MOST_WORDS].decode(errors='replace'))}"
            )
        if kind is not MessageKind.SUM or len(content) != 4 * self._dimension:
            raise InvalidParameter("rank 0 sent a message that is not the mean of a step")
        self.told = hashlib.sha256(self.told + content).digest()
        mean = np.frombuffer(content, "<f4").astype(np.float32)
        # Rank 0 is not trusted, and NaN would destroy the model of this rank.
        if not bool(np.isfinite(mean).all()):
            raise InvalidParameter("rank 0 sent a mean that is not finite")
        return mean


def _reply(rank: int, content: Buffer | None) -> Reply:
    return Reply(client=rank, frame=content) if content is not None else Reply.decline(rank, "it sent nothing")
