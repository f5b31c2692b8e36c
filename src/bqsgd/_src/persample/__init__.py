"""Per-sample clipped gradients of ordinary PyTorch modules, and the sensitivity each clip gives.

The clips alone need no torch; `clipped_gradients` imports it on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bqsgd._src.persample.clips import L2, BatchMean, Clamp, Clip, Dual, Normalize, PerLayer, Scale

if TYPE_CHECKING:
    from bqsgd._src.persample.gradients import ClippedGradients, SlowGradientsWarning, clipped_gradients

__all__ = [
    "L2",
    "BatchMean",
    "Clamp",
    "Clip",
    "ClippedGradients",
    "Dual",
    "Normalize",
    "PerLayer",
    "Scale",
    "SlowGradientsWarning",
    "clipped_gradients",
]


def __getattr__(name: str) -> Any:
    if name in ("ClippedGradients", "SlowGradientsWarning", "clipped_gradients"):
        from bqsgd._src.persample import gradients

        return getattr(gradients, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
