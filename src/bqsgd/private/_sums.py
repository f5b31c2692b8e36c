"""Secure sums between the ranks of a private loop: rank 0 carries the steps, and no rank sees another's message.

Ranks do not come and go, so nobody may be missing: a rank that sends nothing ends the step for all of them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bqsgd.errors import InvalidParameter, SecureSumError, TooFewClients
from bqsgd.planner.sums import SumPlan
from bqsgd.private._ranks import Peers
from bqsgd.secure.agreement import Agreement
from bqsgd.secure.client import SumClient
from bqsgd.secure.messages import is_sum_message, most_bytes
from bqsgd.secure.roster import read_identity, read_roster
from bqsgd.training.sums import SumRounds

_KEY_ROUNDS = 10
_NO_END = 2**40
_STEP, _MEAN, _LOST, _NOTHING = 1, 2, 3, 4
_MOST_WORDS = 4096
_SERVES = 0


@dataclass(frozen=True, kw_only=True)
class SecureRanks:
    """What a rank needs for secure sums with the others.

    roster: file of all ranks' identity keys. identity: file of this rank's own; `{client}` in it stands for its number.
    colluders: most ranks that may tell rank 0 all they know.
    """

    roster: str | Path
    identity: str | Path
    colluders: int = 0


@dataclass(frozen=True, kw_only=True)
class _Answer:
    client: int
    frame: bytes | bytearray | None
    reason: str | None = "it sent nothing"
    declined: bool = True


class RankSums:
    """One rank's side of the sums; rank 0 has the server's side as well.

    Args:
        peers: the ranks.
        plan: of the sums, the same on every rank.
        dimension: coordinates of a message.
        secure: roster and identity.
        seed: makes everything reproducible, and voids every claim.
    """

    def __init__(self, peers: Peers, *, plan: SumPlan, dimension: int, secure: SecureRanks, seed: int | None) -> None:
        roster = read_roster(secure.roster)
        if roster.clients != tuple(range(peers.size)):
            raise InvalidParameter(f"{secure.roster} must name ranks 0 to {peers.size - 1}, one each")
        # Every rank adds to the name of the run: one that was restarted is in no sum of before.
        own = (
            secrets.token_hex(16) if seed is None else hashlib.sha256(f"{seed}-{peers.rank}".encode()).hexdigest()[:32]
        )
        tokens = [str(note["token"])[:32] for note in peers.tell({"token": own})]
        run = "private-" + hashlib.sha256("-".join(tokens).encode()).hexdigest()
        agreement = Agreement(
            roster=roster, run=run, rule=plan.rule, dimension=dimension, width=plan.width, trials=plan.trials
        )
        identity = read_identity(str(secure.identity).replace("{client}", str(peers.rank)))
        self._peers, self._plan, self._dimension = peers, plan, dimension
        self._client = SumClient(agreement, identity=identity, number=peers.rank, seed=seed)
        self._rounds = SumRounds(agreement, rounds=_NO_END, key_rounds=_KEY_ROUNDS) if peers.rank == _SERVES else None
        self._longest = most_bytes(plan.rule, rounds=_KEY_ROUNDS) + 4 * dimension + _MOST_WORDS

    def mask(self, round: int, codes: npt.NDArray[np.unsignedinteger]) -> bytearray:
        """This rank's masked vector."""
        return self._client.mask(round, codes)

    def mean(self, masked: Callable[[], bytearray | None], *, round: int) -> npt.NDArray[np.float32]:
        """The mean of all ranks' values in ranges; `masked` is called once, when this rank's vector is due.

        Raises:
            TooFewClients: a rank sent nothing, or refused a step: no rank has a mean.
        """

        def answer(message: bytes) -> bytes | bytearray | None:
            if not is_sum_message(message):
                return masked() if self._client.ready(round) else None
            try:
                return self._client.answer(message)
            except SecureSumError:
                return None

        return self._served(answer, round) if self._rounds is not None else self._followed(answer)

    def _served(self, answer: Callable[[bytes], bytes | bytearray | None], round: int) -> npt.NDArray[np.float32]:
        assert self._rounds is not None
        peers = self._peers

        def carry(messages: Mapping[int, bytes]) -> Iterator[_Answer]:
            others = [rank for rank in sorted(messages) if rank != _SERVES]
            for rank in others:
                peers.send(rank, _STEP, messages[rank])
            if _SERVES in messages:
                yield _Answer(client=_SERVES, frame=answer(messages[_SERVES]))
            for rank in others:
                kind, content = peers.receive(rank, most=self._longest)
                yield _Answer(client=rank, frame=content if kind == _STEP else None)

        found = self._rounds.round(dict.fromkeys(range(peers.size), b"step"), round=round, carry=carry)
        if found.total is None:
            words = f"{found.lost}; " + "; ".join(f"rank {rank}: {why}" for rank, (_, why) in found.trouble.items())
            result, kind = words.encode()[:_MOST_WORDS], _LOST
        else:
            mean = self._plan.mean(found.total.lanes, survivors=len(found.total.survivors)).astype("<f4")
            result, kind = mean.tobytes(), _MEAN
        for rank in range(1, peers.size):
            peers.send(rank, kind, result)
        return self._result(kind, result)

    def _followed(self, answer: Callable[[bytes], bytes | bytearray | None]) -> npt.NDArray[np.float32]:
        while True:
            kind, message = self._peers.receive(_SERVES, most=self._longest)
            if kind != _STEP:
                return self._result(kind, message)
            said = answer(message)
            self._peers.send(_SERVES, _NOTHING if said is None else _STEP, said or b"")

    def _result(self, kind: int, content: bytes) -> npt.NDArray[np.float32]:
        if kind == _LOST:
            raise TooFewClients(f"the sum of this step is lost: {content.decode(errors='replace')}")
        if kind != _MEAN or len(content) != 4 * self._dimension:
            raise InvalidParameter("rank 0 sent something that is not the mean of a step")
        mean = np.frombuffer(content, "<f4").astype(np.float32)
        if not bool(np.isfinite(mean).all()):
            raise InvalidParameter("rank 0 sent a mean that is not finite")
        return mean
