"""Clips of one sample's gradient, and the clipped mean that a client encodes.

>>> Clamp(0.0015).sensitivity(batch_size=32).linf
0.03125
"""

from bqsgd._src.persample import L2, BatchMean, Clamp, Dual, Normalize, PerLayer, Scale, clipped_gradients

__all__ = ["L2", "BatchMean", "Clamp", "Dual", "Normalize", "PerLayer", "Scale", "clipped_gradients"]
