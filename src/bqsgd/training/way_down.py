"""The way down: each client is sent the whole model, or what has changed since the model that it holds.

With changes the server moves its model by exactly what it sends, so that server and clients hold the same bits. What
the rounding of a change leaves out stays in `wanted`, the model in doubles, at which the next change aims.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from bqsgd.wire.model_change import CHANGE_HEADER_BYTES, MOST_CHANGES, Change, change_bytes, make_change, write_changes
from bqsgd.wire.model_message import MODEL_HEADER_BYTES, write_model

WHOLE_MODEL_NEEDED = "it does not hold the model that was changed: send the whole one"
"""A client's reason for declining changes; it is then sent the whole model in the same round."""
_Model = npt.NDArray[np.float32]


class WayDown:
    """What goes down to which client.

    Args:
        model: where the run begins.
        bits: per coordinate of a change; None to send whole models only.
    """

    def __init__(self, model: _Model, *, bits: int | None) -> None:
        self.bits = bits
        self.wanted = None if bits is None else model.astype(np.float64)
        """The model before rounding; None where models are sent whole."""
        kept = 0
        if bits is not None:
            spare = MODEL_HEADER_BYTES + 4 * model.size - CHANGE_HEADER_BYTES
            kept = min(MOST_CHANGES, max(0, spare - 1) // change_bytes(model.size, bits=bits))
        self._changes: deque[Change] = deque(maxlen=kept)
        self._holds: dict[int, int] = {}
        self._written: dict[int, bytes] = {}
        """Messages of the round that is open, by the number of changes in them; 0 is the whole model."""

    def move(self, model: _Model, step: npt.NDArray[np.float64] | None) -> _Model:
        """The next round's model: `step` is subtracted, or nothing. What is not finite is for the caller to refuse."""
        self._written = {}
        if self.bits is None or self.wanted is None:
            return model if step is None else (model - step).astype(np.float32)
        wanted = self.wanted if step is None else self.wanted - step
        change, after = make_change(model, model.astype(np.float64) if step is None else wanted, bits=self.bits)
        self._changes.append(change)
        self.wanted = wanted
        return after

    def message(self, client: int, *, model: _Model, round: int, whole: bool = False) -> bytes:
        """What the client is sent in `round`: as few bytes as take it to `model`.

        whole: it has said that it does not hold the model it was thought to.
        """
        behind = 0 if whole else round - self._holds.get(client, round)
        count = behind if 0 < behind <= len(self._changes) else 0
        if count not in self._written:
            changes = list(self._changes)[len(self._changes) - count :]
            message = write_changes(changes, model=model, round=round) if count else write_model(model, round=round)
            self._written[count] = message
        return self._written[count]

    def received(self, client: int, *, round: int) -> None:
        """The client has answered, so it holds the model of `round`."""
        if self.bits is not None:
            self._holds[client] = round

    def restore(self, wanted: npt.NDArray[np.float64] | None) -> None:
        """Go on from a checkpoint; what the clients hold is no longer known, so they are sent whole models first."""
        self.wanted = wanted
        self._changes.clear()
        self._holds.clear()
        self._written = {}
