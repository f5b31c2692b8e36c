"""Binomial quantisation: values in [-C, C] become unsigned integer codes, and codes become unbiased values.

Vectors are flat NumPy arrays or CPU tensors, never copied. Two ways lead into |x_j| <= C_j: scaling (paper Eq. 6) and
the element-wise clamp. Both are exact in the vector's own dtype: where C has no float32 of its own, the bound is the
float32 just below it.

Each coordinate takes one 64-bit keystream word: its low 24 bits decide the stochastic rounding, its high 40 bits pick
the binomial value. The word of coordinate j has a fixed position in the call's keystream, so the codes depend neither
on the chunks nor on the number of threads. Where codes are coarsened (`coarsening`), 32 more bits per coordinate
follow. `quantise` is the rounding alone (plain QSGD): compression without noise, and without privacy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd.errors import InvalidParameter, NonFiniteInput, OutOfRange
from bqsgd.mechanism import _kernels, coarsening
from bqsgd.noise import NoiseSource, alias_table
from bqsgd.params import Codes, Mechanism, Range, check_int, check_range, code_dtype

_Vector = npt.NDArray[Any]
"""A flat float32 or float64 array (`_as_vector` checks that it is one of the two)."""


def _as_vector(values: Any, name: str = "values") -> _Vector:
    """A read-only view of a flat float32 or float64 array or CPU tensor; anything that would need a copy is refused.

    Tensors are read through DLPack, so that no tensor library is imported here.

    Raises:
        InvalidParameter: another type, dtype, number of dimensions, memory layout or device, or no coordinate at all.
    """
    if isinstance(values, np.ma.MaskedArray):
        raise InvalidParameter(f"{name} must not be a masked array: its mask would be lost; fill it first")
    array = values if isinstance(values, np.ndarray) else _from_tensor(values, name)
    if array.dtype not in (np.float32, np.float64) or not array.dtype.isnative:
        raise InvalidParameter(f"{name} must be float32 or float64 in native byte order, got {array.dtype}")
    if array.ndim != 1 or array.size == 0:
        raise InvalidParameter(f"{name} must be 1-D with at least one coordinate, got shape {array.shape}; flatten it")
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise InvalidParameter(f"{name} must be contiguous and aligned, got strides {array.strides}; copy it first")
    view = array.view(np.ndarray)
    view.flags.writeable = False  # one kernel signature, whether or not the caller's array is writeable
    return view


def _from_tensor(values: Any, name: str) -> npt.NDArray[Any]:
    if not hasattr(values, "__dlpack__"):
        raise InvalidParameter(f"{name} must be a NumPy array or a CPU tensor, got {type(values).__name__}")
    if hasattr(values, "is_neg") and values.is_neg():
        raise InvalidParameter(f"{name} is a lazily negated tensor: its memory holds other signs; resolve_neg() it")
    try:
        return np.from_dlpack(values.detach() if hasattr(values, "detach") else values)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise InvalidParameter(f"{name} cannot be read in place ({error}); move it to the CPU as float32") from error


def _check_finite(vector: _Vector, name: str = "values") -> None:
    """Raise NonFiniteInput naming the first NaN or infinity."""
    finite = np.isfinite(vector)
    if not finite.all():
        j = int(np.argmin(finite))
        raise NonFiniteInput(f"{name}[{j}] is {vector[j]}: NaN and infinity are refused, drop or repair them first")


def scale(values: Any, range: Range) -> _Vector:
    """Shrink the whole vector until its largest |x_j| / C_j is 1 (paper Eq. 6): x / max(1, max_j |x_j| / C_j).

    Raises:
        NonFiniteInput: a coordinate is NaN or infinite.
        InvalidParameter: the range is so small that |x_j| / C_j overflows.

    >>> scale(np.array([3.0, -1.0]), 1.5).tolist()
    [1.5, -0.5]
    """
    vector = _as_vector(values)
    _check_finite(vector)
    range = check_range(range, vector.size)
    with np.errstate(over="ignore"):
        excess = float(np.max(np.abs(vector.astype(np.float64)) / range))
    if not excess > 1:
        return vector.copy()
    if not math.isfinite(excess):
        raise InvalidParameter("the largest |x_j| / C_j overflows: the range is too small for these values")
    shrunk = (vector / np.float64(excess)).astype(vector.dtype)
    return _project(shrunk, range)


def clamp(values: Any, range: Range) -> _Vector:
    """Project every coordinate on its own onto [-C_j, C_j].

    Raises:
        NonFiniteInput: a coordinate is NaN or infinite.

    >>> clamp(np.array([3.0, -1.0]), 1.5).tolist()
    [1.5, -1.0]
    """
    vector = _as_vector(values)
    _check_finite(vector)
    return _project(vector, check_range(range, vector.size))


def _project(vector: _Vector, range: Range) -> _Vector:
    exact = np.asarray(range, dtype=np.float64)
    nearest = exact.astype(vector.dtype)
    # Compared in float64: beside a float32 array NumPy would round a Python float to float32 first.
    above = nearest.astype(np.float64) > exact
    bound = np.where(above, np.nextafter(nearest, np.zeros_like(nearest)), nearest)
    return np.clip(vector, -bound, bound)


CHUNK = 1 << 14
"""Coordinates per kernel call: values, keystream and codes of one chunk stay in the second-level cache."""
_MAX_THREADS = 256


@lru_cache(maxsize=64)
def _packed_table(trials: int) -> npt.NDArray[np.uint64]:
    table = alias_table(trials)
    return (table.threshold << np.uint64(_kernels.ALIAS_BITS)) | table.alias.astype(np.uint64)


class Encoding:
    """One vector being encoded: its checked parameters and its own part of the keystream.

    Any slice can be written on its own, by any thread, in any order. Write each slice once and drop the object: the
    same slice written again after its values changed would use its noise twice.
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
        # A float32 that is C rounded up counts as C (the kernel cuts it to C): clamping in float32 is then enough.
        self._slack = 1.0 + 2.0**-24 if self.values.dtype == np.float32 else 1.0
        self._least_limit = sys.float_info.max if clamp else 0.0
        self._rng = rng
        words = (self.dimension + 1) // 2  # two words per block, then one refinement block per coordinate
        coarse = coarsening.draw_blocks(self.dimension) if mechanism.coarsening is not None else 0
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
            if isinstance(self.range, float):
                rounding = _kernels.round_scalar
                bound: Any = self.range
            else:
                rounding, bound = _kernels.round_vector, self.range[a:b]
            if rounding(self.values[a:b], bound, levels, self._slack, self._least_limit, words, codes):
                codes[:] = sent[:] = 0  # rounded, but without noise yet: leave none of it behind
                self._refuse(a, b)
            if _kernels.add_noise(words, packed, index_bits, first, codes):
                _kernels.resolve_ties(words, table, codes, refinement=partial(self._refinement, a))
            if rounding_to_points is not None:
                rounding_to_points.write(codes, sent)

    def codes(self, *, threads: int = 1, out: Codes | None = None) -> Codes:
        """All codes, in `out` if given; the values are read once and the noise is used once."""
        codes = np.empty(self.dimension, dtype=self.dtype) if out is None else out
        if codes.shape != (self.dimension,) or codes.dtype != self.dtype:
            raise InvalidParameter(
                f"out must be {self.dimension} codes of {self.dtype}, got shape {codes.shape} of {codes.dtype}"
            )
        if not (codes.flags.c_contiguous and codes.flags.aligned and codes.flags.writeable):
            raise InvalidParameter("out must be contiguous, aligned and writeable")
        for_slices(self.dimension, CHUNK, threads, lambda a, b: self.write(a, b, codes[a:b]))
        return codes

    def _rounding_to_points(self, start: int) -> coarsening.PointRounding | None:
        if self.mechanism.coarsening is None:
            return None
        return coarsening.PointRounding(self.mechanism, self._rng, first_block=self._first_draw, start=start)

    def _refinement(self, start: int, offset: int) -> int:
        word = np.empty(1, dtype=np.uint64)
        self._rng.fill(word, block=self._first_refinement + start + offset)
        return int(word[0])

    def _refuse(self, a: int, b: int) -> None:
        _check_finite(self.values[:b])  # whole prefix, so that the message names the coordinate of the vector
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
    threads: int = 1,
    out: Codes | None = None,
) -> Codes:
    """Codes s + sigma*rho + o in {0, ..., 2s + m} (paper Eqs. 8 to 12, shifted by s so that they start at 0).

    sigma*rho is x s / C rounded up or down at random without bias, o ~ Bin(m, 1/2); extra memory does not grow with
    the dimension. With a coarsening each code is then rounded to one of its points, and the index of the point is sent.
    Codes made with a seeded `rng` carry no privacy claim: keep `rng.seeded` beside them (frames do).

    Args:
        values: flat contiguous float32 or float64 NumPy array or CPU tensor; read in place.
        range: C, or one C_j per coordinate.
        clamp: cut values beyond +-C to +-C instead of refusing them.
        threads: how many cores to use; the codes do not depend on it.
        out: array to write the codes into, of the dtype `code_dtype(mechanism.code_count)`.

    Raises:
        NonFiniteInput: a value is NaN or infinite, clamp or not.
        OutOfRange: a value lies beyond +-C and `clamp` is not set.
        InvalidParameter: any other argument that does not fit.
    """
    return Encoding(values, mechanism, range=range, rng=rng, clamp=clamp).codes(threads=threads, out=out)


def decode(
    codes: npt.NDArray[np.integer], mechanism: Mechanism, *, range: Range, count: int = 1
) -> npt.NDArray[np.float64]:
    """Values (C/s) (code - s - m/2) (paper Eq. 12), or their sum from `count` summed codes.

    Coarse codes stand for (C/s) step (code - centre). Unbiased, except near the window's edges
    where codes are coarsened (`coarsening.saturation_bias`).

    >>> decode(np.array([4, 5, 6], dtype=np.uint8), Mechanism(levels=2, trials=6), range=1.0).tolist()
    [-0.5, 0.0, 0.5]

    Raises:
        InvalidParameter: not a flat integer array, or a code (sum) outside {0, ..., count (code_count - 1)}.
    """
    check_int("count", count, 1, 2**31)
    if codes.ndim != 1 or codes.dtype.kind not in "iu":
        raise InvalidParameter(f"codes must be 1-D integers, got {codes.ndim}-D of {codes.dtype}")
    range = check_range(range, codes.size)
    if codes.size and not (codes.min() >= 0 and codes.max() <= count * (mechanism.code_count - 1)):
        raise InvalidParameter(f"codes must be from 0 to {count * (mechanism.code_count - 1)}")
    values, centre = np.empty(codes.size), count * mechanism.centre
    if isinstance(range, float):
        _kernels.decode_scalar(codes, range / mechanism.levels * mechanism.step, centre, values)
    else:
        _kernels.decode_vector(codes, range, 1 / mechanism.levels * mechanism.step, centre, values)
    return values


def add_decoded(
    total: npt.NDArray[np.float64], codes: Codes, mechanism: Mechanism, *, range: Range, weight: float
) -> None:
    """Add weight times the decoded values to `total`, in place and without an array of them.

    The caller has checked the codes (`codec` does); there is one per coordinate of `total`.
    """
    range = check_range(range, total.size)
    if isinstance(range, float):
        _kernels.accumulate_scalar(codes, weight * range / mechanism.levels * mechanism.step, mechanism.centre, total)
    else:
        _kernels.accumulate_vector(codes, range, weight / mechanism.levels * mechanism.step, mechanism.centre, total)


def for_slices(dimension: int, step: int, threads: int, work: Callable[[int, int], None]) -> None:
    """Call work(start, stop) so that [0, dimension) is covered once: one slice per thread, cut at multiples of `step`.

    The first error, in the order of the slices, is raised after all slices have ended.
    """
    check_int("threads", threads, 1, _MAX_THREADS)
    share = -(-dimension // (threads * step)) * step
    starts = range(0, dimension, share)
    if len(starts) == 1:
        work(0, dimension)
        return
    with ThreadPoolExecutor(max_workers=len(starts)) as pool:
        pending = [pool.submit(work, start, min(start + share, dimension)) for start in starts]
    for slice_done in pending:
        slice_done.result()


def levels_of_bits(bits: int) -> int:
    """Levels of the b-bit form, s = 2^(b-1) - 1: one bit of sign, b - 1 of magnitude.

    >>> levels_of_bits(8)
    127
    """
    return (1 << (check_int("bits", bits, 2, 21) - 1)) - 1


def quantise(
    values: Any, levels: int, *, range: Range, rng: NoiseSource, clamp: bool = False, threads: int = 1
) -> npt.NDArray[np.int32]:
    """The signed integers sigma*rho in {-s, ..., s} of paper Eqs. 8 and 9: x s / C, rounded at random without bias.

    This is the BQ encoder with no trials, minus its shift by s; see `encode` for arguments and errors.
    """
    codes = encode(values, Mechanism(levels=levels, trials=0), range=range, rng=rng, clamp=clamp, threads=threads)
    signed = codes.astype(np.int32)
    signed -= levels
    return signed


def dequantise(integers: npt.NDArray[np.integer], levels: int, *, range: Range) -> npt.NDArray[np.float64]:
    """The quantised values (C/s) sigma*rho of paper Eq. 10.

    >>> dequantise(np.array([-4, 0, 1]), 4, range=2.0).tolist()
    [-2.0, 0.0, 0.5]
    """
    return decode(integers + levels, Mechanism(levels=levels, trials=0), range=range)
