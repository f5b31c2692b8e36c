"""Binomial quantisation: values in [-C, C] become unsigned integer codes, and codes become unbiased values.

One 64-bit keystream word a coordinate: its low 24 bits decide the stochastic rounding, its high 40 bits pick the
binomial value. The word of coordinate j lies at a fixed place of the call's keystream, so the codes depend neither on
the chunks nor on the number of threads. Where codes are coarsened (`coarsen`), 32 bits more a coordinate follow.
"""

from __future__ import annotations

import sys
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd.errors import InvalidParameter, OutOfRange
from bqsgd.mechanism import coarsen, kernels
from bqsgd.mechanism.slices import for_slices
from bqsgd.mechanism.ties import resolve_ties
from bqsgd.mechanism.vector import Vector, as_vector, check_finite
from bqsgd.noise import NoiseSource, alias_table
from bqsgd.params import Clip, Mechanism, check_clip, check_int, code_dtype

CHUNK = 1 << 14
"""Coordinates a kernel call works on: values, keystream and codes of one chunk stay in the second-level cache."""

Codes = npt.NDArray[np.unsignedinteger]


@lru_cache(maxsize=64)
def _packed_table(trials: int) -> npt.NDArray[np.uint64]:
    table = alias_table(trials)
    return (table.threshold << np.uint64(kernels.ALIAS_BITS)) | table.alias.astype(np.uint64)


class Encoding:
    """One vector on its way to codes: its parameters, checked, and its own part of the keystream.

    Any slice can be written on its own, by any thread, in any order. Meant to be written once and dropped: the same
    slice written again after its values changed would use its noise twice.
    """

    def __init__(self, values: Any, mechanism: Mechanism, *, clip: Clip, rng: NoiseSource, clamp: bool = False) -> None:
        self.values: Vector = as_vector(values)
        self.mechanism = mechanism
        self.dimension = self.values.size
        self.dtype = code_dtype(mechanism.code_count)
        self.clip = check_clip(clip, self.dimension)
        if not 2.0**-900 < np.min(self.clip) <= np.max(self.clip) < 2.0**900:
            raise InvalidParameter("clip must lie between 2^-900 and 2^900, for the steps to be representable")
        # A float32 that is C rounded up counts as C (the kernel cuts it to C): clamping in float32 is then enough.
        self._slack = 1.0 + 2.0**-24 if self.values.dtype == np.float32 else 1.0
        self._least_limit = sys.float_info.max if clamp else 0.0
        self._rng = rng
        words = (self.dimension + 1) // 2  # two words a block, then one refinement block a coordinate
        coarse = coarsen.draw_blocks(self.dimension) if mechanism.coarsening is not None else 0
        self._first_word = rng.reserve(words + self.dimension + coarse)
        self._first_refinement = self._first_word + words
        self._first_draw = self._first_refinement + self.dimension

    def write(self, start: int, stop: int, out: Codes) -> None:
        """Write the codes of coordinates [start, stop) into `out`; `start` is even.

        Raises:
            NonFiniteInput, OutOfRange: see `encode`; `out` then holds no code that lacks its noise.
        """
        if start % 2 or not 0 <= start <= stop <= self.dimension:
            raise InvalidParameter(
                f"a slice must start at an even coordinate within 0 to {self.dimension}, got {start}:{stop}"
            )
        table, packed = alias_table(self.mechanism.trials), _packed_table(self.mechanism.trials)
        index_bits, first = np.uint64(table.index_bits), np.uint64(table.first)
        levels = float(self.mechanism.levels)
        keystream = self._rng.keystream(self._first_word + start // 2)
        scratch = np.empty(min(CHUNK, stop - start), dtype=np.uint64)
        rounding_to_points = self._rounding_to_points(start)
        for a in range(start, stop, CHUNK):
            b = min(a + CHUNK, stop)
            words, sent = scratch[: b - a], out[a - start : b - start]
            codes = sent if rounding_to_points is None else rounding_to_points.room(b - a)
            keystream.fill(words)
            if isinstance(self.clip, float):
                rounding = kernels.round_scalar
                clip: Any = self.clip
            else:
                rounding, clip = kernels.round_vector, self.clip[a:b]
            if rounding(self.values[a:b], clip, levels, self._slack, self._least_limit, words, codes):
                codes[:] = sent[:] = 0  # rounded but not noised yet: leave nothing of it behind
                self._refuse(a, b)
            if kernels.add_noise(words, packed, index_bits, first, codes):
                resolve_ties(words, table, codes, refinement=partial(self._refinement, a))
            if rounding_to_points is not None:
                rounding_to_points.write(codes, sent)

    def codes(self, *, threads: int = 1, out: Codes | None = None) -> Codes:
        """All codes, in `out` if given (the values are read and the noise is used once)."""
        codes = np.empty(self.dimension, dtype=self.dtype) if out is None else out
        if codes.shape != (self.dimension,) or codes.dtype != self.dtype:
            raise InvalidParameter(
                f"out must be {self.dimension} codes of {self.dtype}, got shape {codes.shape} of {codes.dtype}"
            )
        if not (codes.flags.c_contiguous and codes.flags.aligned and codes.flags.writeable):
            raise InvalidParameter("out must be contiguous, aligned and writeable")
        for_slices(self.dimension, CHUNK, threads, lambda a, b: self.write(a, b, codes[a:b]))
        return codes

    def _rounding_to_points(self, start: int) -> coarsen.Rounding | None:
        if self.mechanism.coarsening is None:
            return None
        return coarsen.Rounding(self.mechanism, self._rng, first_block=self._first_draw, start=start)

    def _refinement(self, start: int, offset: int) -> int:
        word = np.empty(1, dtype=np.uint64)
        self._rng.fill(word, block=self._first_refinement + start + offset)
        return int(word[0])

    def _refuse(self, a: int, b: int) -> None:
        check_finite(self.values[:b])  # whole prefix, so that the message names the coordinate of the vector
        clip = np.broadcast_to(self.clip, self.dimension)[a:b]
        j = a + int(np.argmax(np.abs(self.values[a:b].astype(np.float64)) > clip * self._slack))
        limit = self.clip if isinstance(self.clip, float) else self.clip[j]
        raise OutOfRange(f"values[{j}] is {self.values[j]}, beyond the clip {limit}: clip first, or pass clamp=True")


def encode(
    values: Any,
    mechanism: Mechanism,
    *,
    clip: Clip,
    rng: NoiseSource,
    clamp: bool = False,
    threads: int = 1,
    out: Codes | None = None,
    q: float = 0.5,
) -> Codes:
    """Codes s + sigma*rho + o in {0, ..., 2s + m} (paper Eqs. 8 to 12, shifted by s so that they start at 0).

    sigma*rho is x s / C rounded up or down at random without bias, o ~ Bin(m, 1/2); extra memory does not grow with
    the dimension. With a coarsening each code is then rounded to one of its points, whose number is sent. Codes made
    with a seeded `rng` carry no privacy claim: keep `rng.seeded` beside them (frames do).

    Args:
        values: flat contiguous float32 or float64 NumPy array or CPU tensor; read in place.
        clip: C, or one C_j a coordinate.
        clamp: cut values beyond +-C to +-C instead of refusing them.
        threads: how many cores to use; the codes do not depend on it.
        out: array to write the codes into, of the dtype `code_dtype(mechanism.code_count)`.
        q: success probability of the binomial; only 1/2 is offered.

    Raises:
        NonFiniteInput: a value is NaN or infinite, clamp or not.
        OutOfRange: a value lies beyond +-C and `clamp` is not set.
        InvalidParameter: anything else that does not fit, q other than 1/2 included.
    """
    if q != 0.5:
        raise InvalidParameter(f"q must be 1/2, got {q}: it is the choice that minimises P_max (paper Remark 1)")
    return Encoding(values, mechanism, clip=clip, rng=rng, clamp=clamp).codes(threads=threads, out=out)


def decode(
    codes: npt.NDArray[np.integer], mechanism: Mechanism, *, clip: Clip, count: int = 1
) -> npt.NDArray[np.float64]:
    """Values (C/s) (code - s - m/2) (paper Eq. 12), or their sum from `count` summed codes.

    Coarse codes stand for (C/s) step (code - centre). Unbiased, but for the window's edges where codes are coarsened
    (`coarse_error.saturation_bias`).

    >>> decode(np.array([4, 5, 6], dtype=np.uint8), Mechanism(levels=2, trials=6), clip=1.0).tolist()
    [-0.5, 0.0, 0.5]

    Raises:
        InvalidParameter: not a flat integer array, or a code (sum) outside {0, ..., count (code_count - 1)}.
    """
    check_int("count", count, 1, 2**31)
    if codes.ndim != 1 or codes.dtype.kind not in "iu":
        raise InvalidParameter(f"codes must be 1-D integers, got {codes.ndim}-D of {codes.dtype}")
    clip = check_clip(clip, codes.size)
    if codes.size and not (codes.min() >= 0 and codes.max() <= count * (mechanism.code_count - 1)):
        raise InvalidParameter(f"codes must be from 0 to {count * (mechanism.code_count - 1)}")
    values, centre = np.empty(codes.size), count * mechanism.centre
    if isinstance(clip, float):
        kernels.decode_scalar(codes, clip / mechanism.levels * mechanism.step, centre, values)
    else:
        kernels.decode_vector(codes, clip, 1 / mechanism.levels * mechanism.step, centre, values)
    return values
