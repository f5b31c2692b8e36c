"""Binomial quantisation: values in [-R, R] become unsigned integer codes, and codes become unbiased values.

Vectors are flat NumPy arrays or CPU tensors, which are read in place.

Each coordinate takes one 64-bit word of the keystream: the low 24 bits decide the stochastic rounding, the high 40 bits
choose the binomial value. A coarsened code (`coarsening`) takes 32 bits more. The word of coordinate j has a fixed
place in the keystream of the call, so the codes do not depend on chunks. Without trials the encoder only rounds (plain
QSGD): it compresses, but adds no noise and gives no privacy.
"""

from __future__ import annotations

import sys
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import InvalidParameter, NonFiniteInput, OutOfRange
from bqsgd._src.laws import NoiseLaw
from bqsgd._src.mechanism import _kernels, coarsening
from bqsgd._src.noise import NoiseSource, alias_table
from bqsgd._src.params import Codes, Mechanism, Range, check_range, code_dtype

_Vector = npt.NDArray[Any]
"""A flat float32 or float64 array (`_as_vector` checks that it is one of the two)."""


def _as_vector(values: Any) -> _Vector:
    """A read-only view of a flat float32 or float64 array or CPU tensor. Nothing is copied.

    Tensors are read through DLPack, so that this module imports no tensor library.

    Raises:
        InvalidParameter: the type, dtype, shape, memory layout or device would need a copy, or the vector is empty.
    """
    if isinstance(values, np.ma.MaskedArray):
        raise InvalidParameter("values must not be a masked array: its mask would be lost; fill it first")
    array = values if isinstance(values, np.ndarray) else _from_tensor(values)
    if array.dtype not in (np.float32, np.float64) or not array.dtype.isnative:
        raise InvalidParameter(f"values must be float32 or float64 in native byte order, got {array.dtype}")
    if array.ndim != 1 or array.size == 0:
        raise InvalidParameter(f"values must be 1-D with at least one coordinate, got shape {array.shape}; flatten it")
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise InvalidParameter(f"values must be contiguous and aligned, got strides {array.strides}; copy it first")
    view = array.view(np.ndarray)
    view.flags.writeable = False  # numba would compile the kernels again for arrays that are writeable
    return view


def _from_tensor(values: Any) -> npt.NDArray[Any]:
    if not hasattr(values, "__dlpack__"):
        raise InvalidParameter(f"values must be a NumPy array or a CPU tensor, got {type(values).__name__}")
    if hasattr(values, "is_neg") and values.is_neg():
        raise InvalidParameter("values is a lazily negated tensor: its memory holds other signs; resolve_neg() it")
    try:
        return np.from_dlpack(values.detach() if hasattr(values, "detach") else values)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise InvalidParameter(f"values cannot be read in place ({error}); move it to the CPU as float32") from error


def _check_finite(vector: _Vector) -> None:
    """Raise NonFiniteInput naming the first NaN or infinity."""
    finite = np.isfinite(vector)
    if not finite.all():
        j = int(np.argmin(finite))
        raise NonFiniteInput(f"values[{j}] is {vector[j]}: NaN and infinity are refused, drop or repair them first")


CHUNK = 1 << 14
"""Coordinates per call of a kernel: values, keystream and codes of a chunk stay in the second-level cache."""


@lru_cache(maxsize=64)
def _packed_table(noise: NoiseLaw) -> npt.NDArray[np.uint64]:
    table = alias_table(noise)
    return (table.threshold << np.uint64(_kernels.ALIAS_BITS)) | table.alias.astype(np.uint64)


class Encoding:
    """A vector about to be encoded: checked parameters, and a part of the keystream that belongs to it alone.

    Slices may be written in any order. Write each slice once and drop the object: a slice that is written again after
    its values changed would use the same noise twice.
    """

    def __init__(
        self, values: Any, mechanism: Mechanism, *, range: Range, rng: NoiseSource, clamp: bool = False
    ) -> None:
        self.values: _Vector = _as_vector(values)
        self.mechanism = mechanism
        self.dimension = self.values.size
        self.dtype = code_dtype(mechanism.code_count)
        self.range = check_range(range, self.dimension)
        if not 2.0**-900 < np.min(self.range) <= np.max(self.range) < 2.0**900:
            raise InvalidParameter("range must lie between 2^-900 and 2^900, for the steps to be representable")
        # R rounded up to float32 counts as R, and the kernel cuts it to R, so that a clamp done in float32 is enough.
        self._slack = 1.0 + 2.0**-24 if self.values.dtype == np.float32 else 1.0
        self._least_limit = sys.float_info.max if clamp else 0.0
        self._rng = rng
        # All noise of the call is reserved at once, so that each coordinate knows its place: two words per block, then
        # one block per coordinate for ties, then the draws of the coarsening.
        words = (self.dimension + 1) // 2
        coarse = coarsening.draw_blocks(self.dimension) if mechanism.coarsening is not None else 0
        self._first_word = rng.reserve(words + self.dimension + coarse)
        self._first_refinement = self._first_word + words
        self._first_draw = self._first_refinement + self.dimension

    def write(self, start: int, stop: int, out: Codes) -> None:
        """Write the codes of coordinates [start, stop) into `out`; `start` must be even.

        Raises:
            NonFiniteInput, OutOfRange: see `encode`; `out` then holds no code without noise.
        """
        if start % 2 or not 0 <= start <= stop <= self.dimension:
            raise InvalidParameter(
                f"a slice must start at an even coordinate within 0 to {self.dimension}, got {start}:{stop}"
            )
        table, packed = alias_table(self.mechanism.law), _packed_table(self.mechanism.law)
        index_bits, first = np.uint64(table.index_bits), np.uint64(table.first)
        levels = float(self.mechanism.levels)
        ranges: Any = self.range
        per_coordinate = isinstance(ranges, np.ndarray)
        rounding = _kernels.round_vector if per_coordinate else _kernels.round_scalar
        keystream = self._rng.keystream(self._first_word + start // 2)
        scratch = np.empty(min(CHUNK, stop - start), dtype=np.uint64)
        rounding_to_points = None
        if self.mechanism.coarsening is not None:
            rounding_to_points = coarsening.PointRounding(
                self.mechanism, self._rng, first_block=self._first_draw, start=start
            )
        for a in range(start, stop, CHUNK):
            b = min(a + CHUNK, stop)
            words, sent = scratch[: b - a], out[a - start : b - start]
            codes = sent if rounding_to_points is None else rounding_to_points.room(b - a)
            keystream.fill(words)
            bound = ranges[a:b] if per_coordinate else ranges
            if rounding(self.values[a:b], bound, levels, self._slack, self._least_limit, words, codes):
                # These codes are rounded but have no noise yet. The caller's array must not keep them after the error.
                codes[:] = sent[:] = 0
                self._refuse(a, b)
            if _kernels.add_noise(words, packed, index_bits, first, codes):
                _kernels.resolve_ties(words, table, codes, refinement=partial(self._refinement, a))
            if rounding_to_points is not None:
                rounding_to_points.write(codes, sent)

    def codes(self) -> Codes:
        """All codes. Call it once (see the class)."""
        codes = np.empty(self.dimension, dtype=self.dtype)
        self.write(0, self.dimension, codes)
        return codes

    def _refinement(self, start: int, offset: int) -> int:
        word = np.empty(1, dtype=np.uint64)
        self._rng.fill(word, block=self._first_refinement + start + offset)
        return int(word[0])

    def _refuse(self, a: int, b: int) -> None:
        """Raise the error that names the first value in [a, b) that cannot be encoded."""
        _check_finite(self.values[:b])  # from 0 on, so that the message counts coordinates from the vector's start
        bound = np.broadcast_to(self.range, self.dimension)[a:b]
        j = a + int(np.argmax(np.abs(self.values[a:b].astype(np.float64)) > bound * self._slack))
        limit = self.range if isinstance(self.range, float) else self.range[j]
        raise OutOfRange(f"values[{j}] is {self.values[j]}, beyond the range {limit}: clip first, or pass clamp=True")


def encode(
    values: Any,
    mechanism: Mechanism,
    *,
    range: Range,
    rng: NoiseSource,
    clamp: bool = False,
) -> Codes:
    """Codes s + sigma*rho + o in {0, ..., 2s + m} (paper Eqs. 8 to 12, shifted by s so that they start at 0).

    sigma*rho is x s / R rounded at random without bias, and o ~ Bin(m, 1/2). With a coarsening each code is then
    rounded to one of its points, and the code is the index of the point. Extra memory does not grow with the dimension.
    Codes made with a seeded `rng` carry no privacy claim: keep `rng.seeded` with them, as frames do.

    Args:
        values: flat contiguous float32 or float64 NumPy array or CPU tensor; read in place.
        range: R, or one R_j per coordinate.
        clamp: cut values beyond +-R to +-R instead of refusing them.

    Raises:
        NonFiniteInput: a value is NaN or infinite, with or without `clamp`.
        OutOfRange: a value lies beyond +-R and `clamp` is false.
        InvalidParameter: another argument is invalid.
    """
    return Encoding(values, mechanism, range=range, rng=rng, clamp=clamp).codes()


def decode(codes: npt.NDArray[np.integer], mechanism: Mechanism, *, range: Range) -> npt.NDArray[np.float64]:
    """The values (R/s) (code - s - m/2) of codes (paper Eq. 12).

    A coarse code decodes to (R/s) step (code - centre). The result is unbiased, but for coarse codes whose noise leaves
    the window (`coarsening.saturation_bias`).

    >>> decode(np.array([4, 5, 6], dtype=np.uint8), Mechanism(levels=2, trials=6), range=1.0).tolist()
    [-0.5, 0.0, 0.5]

    Raises:
        InvalidParameter: `codes` is not a flat integer array, or an entry is not in {0, ..., code_count - 1}.
    """
    if codes.ndim != 1 or codes.dtype.kind not in "iu":
        raise InvalidParameter(f"codes must be 1-D integers, got {codes.ndim}-D of {codes.dtype}")
    range = check_range(range, codes.size)
    if codes.size and not (codes.min() >= 0 and codes.max() < mechanism.code_count):
        raise InvalidParameter(f"codes must be from 0 to {mechanism.code_count - 1}")
    values = np.zeros(codes.size)
    add_decoded(values, codes, mechanism, range=range)
    return values


def add_decoded(
    total: npt.NDArray[np.float64],
    codes: npt.NDArray[np.integer],
    mechanism: Mechanism,
    *,
    range: Range,
    weight: float = 1.0,
) -> None:
    """Add `weight` times the decoded values to `total`, in place, without an array of decoded values.

    The caller checks the codes: one per coordinate of `total`, each in the limits that `decode` states.
    """
    range, centre = check_range(range, total.size), mechanism.centre
    if isinstance(range, float):
        _kernels.accumulate_scalar(codes, weight * range / mechanism.levels * mechanism.step, centre, total)
    else:
        _kernels.accumulate_vector(codes, range, weight / mechanism.levels * mechanism.step, centre, total)
