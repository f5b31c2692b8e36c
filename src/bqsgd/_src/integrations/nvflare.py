"""A privacy budget for NVFlare jobs: a filter that each site sets in its own policy, and the server's filter.

In the site's `privacy.json`, which no job can change:

    {"scopes": [{"name": "private", "task_result_filters": [{
        "path": "bqsgd.integrations.nvflare.PrivateUpdatesFilter",
        "args": {"ledger": "/var/lib/bqsgd/site.ledger", "study": "trial-7", "rounds": 20, "epsilon": 3, "delta": 1e-5,
                 "clip_norm": 1.0}}]}],
     "default_scope": "private"}

On the server `OpenUpdatesFilter` is a task result filter of the job. The job's clients send differences of weights
(`params_transfer_type="DIFF"`). Anything else is refused: NVFlare then reports a filter error for that site.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply

from bqsgd._src.errors import BqsgdError, FrameError, InvalidParameter
from bqsgd._src.params import check_positive
from bqsgd._src.private.gate import UpdateGate, open_update, thin_update
from bqsgd._src.settings.study import safe_name

_FRAME, _RANGES, _ARRAYS = "bqsgd.frame", "bqsgd.ranges", "bqsgd.arrays"
_MOST_ARRAYS, _MOST_DIMENSION = 100_000, 2**40
_Arrays = dict[str, npt.NDArray[Any]]


class _Outgoing(DXOFilter):  # type: ignore[misc]
    """What leaves a site is one frame and the form of the model. NVFlare's own class lets other results pass."""

    def __init__(self) -> None:
        super().__init__(supported_data_kinds=[DataKind.WEIGHT_DIFF], data_kinds_to_filter=None)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """A new result: nothing of the old one leaves but the frame."""
        if shareable.get_return_code() != ReturnCode.OK:
            # Without what the job may have put beside its failure.
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        dxo = from_shareable(shareable)
        if dxo.data_kind != DataKind.WEIGHT_DIFF:
            raise InvalidParameter(
                f"the privacy gate takes differences of weights, got {dxo.data_kind}: set params_transfer_type to DIFF"
            )
        filtered = self.process_dxo(dxo, shareable, fl_ctx)
        filtered.add_filter_history(type(self).__name__)
        return filtered.to_shareable()

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        """The frame of one update."""
        arrays = {str(name): np.asarray(values) for name, values in dxo.data.items()}
        floating = {name: values for name, values in arrays.items() if np.issubdtype(values.dtype, np.floating)}
        frame, ranges = self.encoded(floating, site=str(fl_ctx.get_identity_name(default="site")))
        forms = [[name, list(values.shape)] for name, values in floating.items()]
        data = {_FRAME: np.frombuffer(frame, np.uint8)}
        # Every site weighs the same: how much data it has is part of what is protected.
        meta = {_RANGES: ranges, _ARRAYS: forms, "NUM_STEPS_CURRENT_ROUND": 1}
        return DXO(DataKind.WEIGHT_DIFF, data=data, meta=meta)

    def encoded(self, arrays: _Arrays, *, site: str) -> tuple[bytes, list[float]]:
        """A frame and its ranges."""
        raise NotImplementedError


class PrivateUpdatesFilter(_Outgoing):
    """A site's filter: clips its update, adds the noise of the study's plan, and counts it before it leaves.

    The unit is the whole site. When the budget is spent, or anything is not as planned, it raises, and NVFlare sends a
    filter error in the place of a result.

    Args: as `bqsgd.UpdateGate`. In the path of the ledger, {site} stands for the name of the site.
    """

    def __init__(
        self, ledger: str, study: str, rounds: int, epsilon: float, delta: float, clip_norm: float, bits: int = 8
    ) -> None:
        super().__init__()
        # NVFlare writes a job's filters to a file, each argument from the attribute of its name.
        self.ledger, self.study, self.rounds, self.bits = ledger, study, rounds, bits
        self.epsilon, self.delta, self.clip_norm = epsilon, delta, clip_norm

    def encoded(self, arrays: _Arrays, *, site: str) -> tuple[bytes, list[float]]:
        """The next frame of the study."""
        flat = np.concatenate([np.zeros(0), *(values.astype(np.float64).ravel() for values in arrays.values())])
        path = Path(self.ledger.replace("{site}", safe_name("site", site))).expanduser()
        with UpdateGate(
            path, study=self.study, rounds=self.rounds, epsilon=self.epsilon, delta=self.delta,
            clip_norm=self.clip_norm, bits=self.bits,
        ) as gate:  # fmt: skip
            frame = gate.send(lambda: flat, dimension=flat.size)
            self.logger.info(f"update {gate.sent} of {self.rounds}; {gate.guarantee()}")
            return frame, [gate.range]


class ThinUpdatesFilter(_Outgoing):
    """A filter for jobs that train with `make_private`: the update leaves in 2 to 8 bits per coordinate."""

    def __init__(self, bits: int = 8) -> None:
        super().__init__()
        thin_update([np.zeros(1)], bits=bits)  # an invalid number of bits is refused now
        self.bits = bits

    def encoded(self, arrays: _Arrays, *, site: str) -> tuple[bytes, list[float]]:
        """A frame with a range for each array."""
        return thin_update(list(arrays.values()), bits=self.bits)


class OpenUpdatesFilter(DXOFilter):  # type: ignore[misc]
    """The server's filter: what a site sent becomes a difference of weights again, for any aggregator.

    largest_range: an update with a larger range is refused.
    """

    def __init__(self, largest_range: float) -> None:
        super().__init__(supported_data_kinds=[DataKind.WEIGHT_DIFF], data_kinds_to_filter=None)
        self.largest_range = check_positive("largest_range", largest_range)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        """Open one update. The site may be hostile."""
        try:
            arrays = _opened(dxo, largest=self.largest_range)
        except (KeyError, TypeError, ValueError, OverflowError, BqsgdError) as error:
            raise FrameError(f"the site sent no valid update: {error}") from error
        return DXO(DataKind.WEIGHT_DIFF, data=arrays, meta={"NUM_STEPS_CURRENT_ROUND": 1})


def _opened(dxo: DXO, *, largest: float) -> _Arrays:
    frame, forms = dxo.data[_FRAME], dxo.meta[_ARRAYS]
    if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.ndim != 1:
        raise FrameError("the frame is not an array of bytes")
    if not isinstance(forms, list) or not 0 < len(forms) <= _MOST_ARRAYS:
        raise FrameError(f"an update has 1 to {_MOST_ARRAYS} arrays")
    sizes = [math.prod(_size(length) for length in shape) for _, shape in forms]
    if sum(sizes) > _MOST_DIMENSION:
        raise FrameError(f"the update claims {sum(sizes)} coordinates")
    update = open_update(frame.tobytes(), ranges=dxo.meta[_RANGES], sizes=sizes, largest_range=largest)
    parts = np.split(update.astype(np.float32), np.cumsum(sizes)[:-1])
    return {str(name): part.reshape(shape) for (name, shape), part in zip(forms, parts, strict=True)}


def _size(length: object) -> int:
    if type(length) is not int or not 0 <= length <= _MOST_DIMENSION:
        raise FrameError(f"not a length of an array: {length!r:.40}")
    return length
