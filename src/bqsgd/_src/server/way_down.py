"""The way down: the server sends each client the whole model, or what leads on from the model that the client holds.

With `down_bits`, these are the changes of the model. The server moves its own model by exactly what it sends, so that
server and clients hold the same bits. A change is rounded; what the rounding leaves out stays in `wanted`, the model in
float64, at which the next change aims.

Where clients can repeat the server's steps (`descent.descent`), these are the aggregates of the rounds, and nothing is
rounded. A whole model then comes with what the optimizer remembers.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from bqsgd._src.descent.descent import Descent, moved
from bqsgd._src.descent.optimizers import State
from bqsgd._src.wire.model_change import CHANGE_HEADER_BYTES, MOST_CHANGES, Change, make_change, write_changes
from bqsgd._src.wire.model_message import model_bytes, write_model
from bqsgd._src.wire.model_steps import MOST_STEPS, STEPS_HEADER_BYTES, Aggregate, write_steps

_Model = npt.NDArray[np.float32]


class WayDown:
    """Decides which message each client is sent.

    Args:
        model: the run's first model.
        bits: per coordinate of a change; None to send no changes.
        descent: the steps that clients repeat; None if they are sent models or changes.
    """

    def __init__(self, model: _Model, *, bits: int | None, descent: Descent | None = None) -> None:
        self.bits, self.descent = bits, descent
        self.wanted = None if bits is None else model.astype(np.float64)
        """The model before rounding; None if no changes are sent."""
        self._changes: deque[Change] = deque()
        self._steps: deque[bytes] = deque()
        self._whole_bytes = model_bytes(model.size, memory=0 if descent is None else descent.memory_size)
        self._holds: dict[int, int] = {}
        """Client -> the round of the model that it holds."""
        self._written: dict[int, bytes] = {}
        """Number of changes or steps -> the open round's message with so many; 0 is the whole model."""

    def move(self, model: _Model, step: npt.NDArray[np.float64] | None, aggregate: Aggregate | None = None) -> _Model:
        """The next round's model: `model` minus `step` (None: unchanged). The caller must check that it is finite.

        aggregate: what the step was made from, for clients that repeat it.
        """
        self._written = {}
        # A round without a step has a change or an aggregate too, of zero: `message` counts one for every round.
        if self.descent is not None:
            self._steps.append((Aggregate(messages=0) if aggregate is None else aggregate).part())
            self._forget_steps()
        if self.bits is None or self.wanted is None:
            return model if step is None else moved(model, step)
        wanted = self.wanted if step is None else self.wanted - step
        change, after = make_change(model, model.astype(np.float64) if step is None else wanted, bits=self.bits)
        self._changes.append(change)
        self._forget_changes()
        self.wanted = wanted
        return after

    def _forget_changes(self) -> None:
        """Keep only as many changes as are together smaller than a whole model."""
        room = self._whole_bytes - CHANGE_HEADER_BYTES
        while len(self._changes) > MOST_CHANGES or sum(change.nbytes for change in self._changes) >= room:
            self._changes.popleft()

    def _forget_steps(self) -> None:
        room = self._whole_bytes - STEPS_HEADER_BYTES
        while len(self._steps) > MOST_STEPS or sum(map(len, self._steps)) >= room:
            self._steps.popleft()

    def message(self, client: int, *, model: _Model, state: State, round: int, whole: bool = False) -> bytes:
        """The shortest message that takes the client to `model` in `round`.

        state: what the optimizer remembers. whole: send the whole model, because the client has said that it does not
        hold the model that it should.
        """
        behind = 0 if whole else round - self._holds.get(client, round)
        count = behind if 0 < behind <= len(self._changes or self._steps) else 0
        if count not in self._written:
            self._written[count] = self._write(count, model, state, round)
        return self._written[count]

    def _write(self, count: int, model: _Model, state: State, round: int) -> bytes:
        if self.descent is None:
            changes = list(self._changes)[len(self._changes) - count :]
            return write_changes(changes, model=model, round=round) if count else write_model(model, round=round)
        memory, steps = self.descent.memory(state), list(self._steps)[len(self._steps) - count :]
        if not count:
            # Before the first step every optimizer remembers the same, which clients know.
            return write_model(model, round=round, memory=memory if round else None)
        one_in = self.descent.config.clients.one_in
        return write_steps(steps, kind=self.descent.kind, one_in=one_in, model=model, memory=memory, round=round)

    def received(self, client: int, *, round: int) -> None:
        """Note that the client has replied, so it holds the model of `round`."""
        if self.bits is not None or self.descent is not None:
            self._holds[client] = round

    def restore(self, wanted: npt.NDArray[np.float64] | None) -> None:
        """Continue from a checkpoint. It does not say what the clients hold, so they are sent whole models first."""
        self.wanted = wanted
        self._changes.clear()
        self._steps.clear()
        self._holds.clear()
        self._written = {}
