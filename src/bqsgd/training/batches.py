"""Which samples take part in a round, drawn from the cryptographic generator: amplification by sampling needs a draw
that the server cannot predict."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bqsgd.noise import NoiseSource
from bqsgd.params import check_int
from bqsgd.release import Scheme

Rows = npt.NDArray[np.int64]


def draw_batch(scheme: Scheme, *, batch_size: int, dataset_size: int, rng: NoiseSource) -> Rows:
    """Rows of this round's samples, ascending.

    Poisson: each sample independently with probability floor(2^64 L / D) / 2^64, which is at most the L / D that is
    accounted; the batch may be empty or larger than L. Fixed size: L of D without replacement, every subset equally
    likely (the L smallest of D random words, drawn again in the one case in 2^38 that two words are equal and D is
    10,000). No sampling: all.
    """
    check_int("dataset_size", dataset_size, 1, 2**40)
    check_int("batch_size", batch_size, 1, dataset_size)
    if scheme is Scheme.NONE or (scheme is Scheme.POISSON and batch_size == dataset_size):
        return np.arange(dataset_size)
    if scheme is Scheme.POISSON:
        return np.flatnonzero(rng.words(dataset_size) < np.uint64((batch_size << 64) // dataset_size))
    while True:
        words = rng.words(dataset_size)
        if len(np.unique(words)) == dataset_size:  # ties would favour the earlier rows
            return np.sort(np.argpartition(words, batch_size - 1)[:batch_size])
