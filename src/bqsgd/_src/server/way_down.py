"""The way down: the server sends each client the whole model, or the changes since the model that the client holds.

With changes, the server moves its own model by exactly what it sends, so that server and clients hold the same bits. A
change is rounded; what the rounding leaves out stays in `wanted`, the model in float64, at which the next change aims.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from bqsgd._src.wire.model_change import (
    CHANGE_HEADER_BYTES,
    MOST_CHANGES,
    Change,
    change_bytes,
    make_change,
    write_changes,
)
from bqsgd._src.wire.model_message import MODEL_HEADER_BYTES, write_model

_Model = npt.NDArray[np.float32]


class WayDown:
    """Decides which message each client is sent.

    Args:
        model: the run's first model.
        bits: per coordinate of a change; None to send only whole models.
    """

    def __init__(self, model: _Model, *, bits: int | None) -> None:
        self.bits = bits
        self.wanted = None if bits is None else model.astype(np.float64)
        """The model before rounding; None if only whole models are sent."""
        most_kept = 0
        if bits is not None:
            # Only as many changes as are together smaller than a whole model.
            spare = MODEL_HEADER_BYTES + 4 * model.size - CHANGE_HEADER_BYTES
            most_kept = min(MOST_CHANGES, max(0, spare - 1) // change_bytes(model.size, bits=bits))
        self._changes: deque[Change] = deque(maxlen=most_kept)
        self._holds: dict[int, int] = {}
        """Client -> the round of the model that it holds."""
        self._written: dict[int, bytes] = {}
        """Number of changes -> the open round's message with so many; 0 is the whole model."""

    def move(self, model: _Model, step: npt.NDArray[np.float64] | None) -> _Model:
        """The next round's model: `model` minus `step` (None: unchanged). The caller must check that it is finite."""
        self._written = {}
        if self.bits is None or self.wanted is None:
            return model if step is None else (model - step).astype(np.float32)
        wanted = self.wanted if step is None else self.wanted - step
        # A round without a step has a change too, of zero: `message` counts one change for every round.
        change, after = make_change(model, model.astype(np.float64) if step is None else wanted, bits=self.bits)
        self._changes.append(change)
        self.wanted = wanted
        return after

    def message(self, client: int, *, model: _Model, round: int, whole: bool = False) -> bytes:
        """The shortest message that takes the client to `model` in `round`.

        whole: send the whole model, because the client has said that it does not hold the model that it should.
        """
        behind = 0 if whole else round - self._holds.get(client, round)
        count = behind if 0 < behind <= len(self._changes) else 0
        if count not in self._written:
            changes = list(self._changes)[len(self._changes) - count :]
            message = write_changes(changes, model=model, round=round) if count else write_model(model, round=round)
            self._written[count] = message
        return self._written[count]

    def received(self, client: int, *, round: int) -> None:
        """Note that the client has replied, so it holds the model of `round`."""
        if self.bits is not None:
            self._holds[client] = round

    def restore(self, wanted: npt.NDArray[np.float64] | None) -> None:
        """Continue from a checkpoint. It does not say what the clients hold, so they are sent whole models first."""
        self.wanted = wanted
        self._changes.clear()
        self._holds.clear()
        self._written = {}
