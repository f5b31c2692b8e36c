"""Public random subsets: a message that carries one in N coordinates of the rotated gradient.

The noise of a private message is much larger than its signal, so most of its coordinates are not worth their bits. The
gradient is rotated, which spreads it evenly; of every N neighbouring coordinates one is kept; the clip bounds the kept
part of every sample. The server multiplies what it decodes by N and rotates it back: the estimate is unbiased.

Nothing here is secret. Rotation and subset follow from the round and the client's number, by SHA-256 and AES, and the
guarantee holds for every subset, because the clip acts on what is kept (claim 14 of docs/accounting.md). Clips that
bound single coordinates need no rotation.

The rotation R of a row of n numbers, with b = min(256, the largest power of two up to n): multiply by random signs;
then a Walsh-Hadamard transform of every whole block of b numbers from the start; then, if n is no multiple of b, one
more of the last b numbers. Each step is orthogonal. A row is a row of a weight matrix (a tensor flattened from its
second dimension on); a tensor of one dimension is one row.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from llvmlite import ir  # type: ignore[import-untyped]

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import MOST_ONE_IN, Kept, check_int
from bqsgd._src.runtime.compiling import njit
from bqsgd._src.runtime.vectors import LANES, WHOLE, WORD, Emit, tile

BLOCK = 256
"""Numbers that are mixed with each other at most. More would cost time and spread the gradient hardly more evenly."""
_COMMON = 2**64 - 1
"""In the place of a client's number, for a subset that all clients share."""

Floats = npt.NDArray[np.floating[Any]]
Indices = npt.NDArray[np.int64]


@tile
def _stages(emit: Emit, x: Any, at: Any, size: Any, factor: Any) -> None:
    """`_transform` of 16 to 256 numbers, all stages in registers: between vectors first, then within each."""
    builder, kind, own = emit.builder, ir.VectorType(x.type.pointee, LANES), emit.at(x, at)
    for whole in (16, 32, 64, 128, BLOCK):
        with builder.if_then(builder.icmp_signed("==", size, ir.Constant(WORD, whole))):
            vectors, apart = [emit.load(own, first, kind) for first in range(0, whole, LANES)], whole // LANES // 2
            while apart:
                for n in (n for n in range(len(vectors)) if not n & apart):
                    left, right = vectors[n], vectors[n + apart]
                    vectors[n], vectors[n + apart] = builder.fadd(left, right), builder.fsub(left, right)
                apart //= 2
            for apart in (8, 4, 2, 1):  # each lane is added to its partner, or subtracted from it
                partners = ir.Constant(WHOLE, [lane ^ apart for lane in range(LANES)])
                signs = ir.Constant(kind, [-1.0 if lane & apart else 1.0 for lane in range(LANES)])
                vectors = [emit.fma(one, signs, builder.shuffle_vector(one, one, partners)) for one in vectors]
            for n, vector in enumerate(vectors):
                emit.store(builder.fmul(vector, emit.broadcast(factor)), own, LANES * n)


@njit(nogil=True, cache=True)
def _transform(x: Any, at: int, size: int) -> None:
    """The orthonormal Walsh-Hadamard transform of x[at : at + size], in place; size is a power of two.

    From numbers far apart to neighbours: the order of the stages decides the last bits of a message.
    """
    factor, apart = x.dtype.type(1 / math.sqrt(size)), size // 2
    if size >= LANES:
        _stages(x, at, size, factor)
        return
    while apart:
        for i in range(size):
            if not i & apart:
                left, right = x[at + i], x[at + i + apart]
                x[at + i], x[at + i + apart] = left + right, left - right
        apart //= 2
    for i in range(at, at + size):
        x[i] *= factor


@njit(nogil=True, cache=True)
def _block(columns: int) -> int:
    block = 1
    while block < BLOCK and 2 * block <= columns:
        block *= 2
    return block


@njit(nogil=True, cache=True)
def transform_row(row: Any) -> None:
    """A rotation without its signs: what follows when a row has been multiplied by them, in place."""
    block = _block(row.size)
    for at in range(0, row.size - block + 1, block):
        _transform(row, at, block)
    if row.size % block:
        _transform(row, row.size - block, block)


@njit(nogil=True, cache=True)
def rotate_rows(rows: Any, signs: Any, start: int, stop: int) -> None:
    """Rotate the rows start..stop of a matrix, in place; a row's result depends on that row and the signs alone."""
    for n in range(start, stop):
        row = rows[n]
        for i in range(row.size):
            row[i] *= signs[i]
        transform_row(row)


@njit(nogil=True, cache=True)
def _rotate_back(rows: Any, signs: Any) -> None:
    columns = rows.shape[1]
    block = _block(columns)
    for n in range(rows.shape[0]):
        row = rows[n]
        if columns % block:
            _transform(row, columns - block, block)
        for at in range(0, columns - block + 1, block):
            _transform(row, at, block)
        for i in range(columns):
            row[i] *= signs[i]


def _stream(name: bytes, round: int, client: int, count: int) -> bytes:
    """`count` bytes of the AES-128-CTR keystream whose key is named by round and client."""
    key = hashlib.sha256(b"bqsgd.subset.v1 " + name + struct.pack("<QQ", round, client)).digest()[:16]
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return encryptor.update(bytes(count))


@dataclass(frozen=True, kw_only=True)
class Subsets:
    """Which coordinates the messages of a run carry.

    shapes: of the parameters that are trained, in the order of the flat vector.
    one_in: N; a message carries one in N coordinates.
    rotated: whether the gradient is rotated first.
    """

    shapes: tuple[tuple[int, ...], ...]
    one_in: int
    rotated: bool

    @classmethod
    def of(cls, parameters: Iterable[Any], *, one_in: int, rotated: bool) -> Subsets | None:
        """Subsets of the coordinates of these tensors; None if messages carry all of them."""
        if one_in == 1:
            return None
        return cls(shapes=tuple(tuple(each.shape) for each in parameters), one_in=one_in, rotated=rotated)

    def __post_init__(self) -> None:
        check_int("one_in", self.one_in, 1, MOST_ONE_IN)
        if self.dimension < 1:
            raise InvalidParameter("a model without trained parameters has no subsets of coordinates")

    @cached_property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each tensor."""
        sizes = [math.prod(shape) for shape in self.shapes]
        rows = [shape[0] if len(shape) > 1 else 1 for shape in self.shapes]
        return tuple((count, size // count) if size else (0, 1) for count, size in zip(rows, sizes, strict=True))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each tensor starts in the flat vector, and after them the dimension."""
        return tuple(np.cumsum([0, *(rows * columns for rows, columns in self.matrices)]).tolist())

    @property
    def dimension(self) -> int:
        """Coordinates of the model."""
        return self.starts[-1]

    @property
    def kept(self) -> int:
        """Coordinates of a message."""
        return -(-self.dimension // self.one_in)

    @property
    def header(self) -> Kept:
        """What a frame says of them."""
        return Kept(one_in=self.one_in, rotated=self.rotated, model_dimension=self.dimension)

    def drawn(self, *, round: int, client: int | None) -> Subset:
        """The subset of a client's message in `round`; of all clients if no client is named."""
        return _drawn(self, round, _COMMON if client is None else client)

    def rotated_back(self, vector: npt.NDArray[np.float64], *, round: int) -> npt.NDArray[np.float64]:
        """A flat vector of rotated coordinates as coordinates of the model."""
        if not self.rotated:
            return vector
        result = vector.copy()
        for number, (rows, columns) in enumerate(self.matrices):
            part = result[self.starts[number] : self.starts[number + 1]].reshape(rows, columns)
            _rotate_back(part, _signs(self, round)[number].astype(np.float64))
        return result


@lru_cache(maxsize=8)
def _signs(subsets: Subsets, round: int) -> tuple[npt.NDArray[np.float32], ...]:
    """For each tensor, one sign per column in `round`; the same for all clients, so that their sums can be rotated."""
    columns = [count for _, count in subsets.matrices]
    # Each tensor begins with a new byte; the lowest bit of a byte is the first.
    lengths = [-(-count // 8) for count in columns]
    stream = np.frombuffer(_stream(b"signs", round, _COMMON, sum(lengths)), np.uint8)
    ends = np.cumsum(lengths)
    bits = [
        np.unpackbits(stream[end - length : end], bitorder="little", count=count)
        for end, length, count in zip(ends, lengths, columns, strict=True)
    ]
    return tuple(1 - 2 * each.astype(np.float32) for each in bits)


@lru_cache(maxsize=8)
def _drawn(subsets: Subsets, round: int, client: int) -> Subset:
    words = np.frombuffer(_stream(b"places", round, client, 4 * subsets.kept), "<u4").astype(np.uint64)
    first = np.arange(subsets.kept, dtype=np.int64) * subsets.one_in
    sizes = np.minimum(subsets.one_in, subsets.dimension - first)
    # A 32-bit word times the size, without its lowest 32 bits: even to within 2^-16 of a place's chance.
    places = first + ((words * sizes.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
    places.setflags(write=False)
    return Subset(subsets=subsets, round=round, places=places, sizes=sizes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Subset:
    """The coordinates of one message.

    places: in the flat rotated vector, ascending. sizes: out of how many neighbours each was drawn.
    """

    subsets: Subsets
    round: int
    places: Indices
    sizes: Indices

    @property
    def signs(self) -> Sequence[npt.NDArray[np.float32]]:
        """For each tensor, one sign per column; all of them 1 in a run without rotation."""
        return _signs(self.subsets, self.round)

    def span(self, first: int, stop: int) -> slice:
        """Which entries of a message belong to the tensors first..stop."""
        starts = self.subsets.starts
        low, high = np.searchsorted(self.places, [starts[first], starts[stop]])
        return slice(int(low), int(high))

    @cached_property
    def counts(self) -> list[int]:
        """How many coordinates of each tensor are kept."""
        return [int(count) for count in np.diff(np.searchsorted(self.places, self.subsets.starts))]

    def keep(self, vector: Floats) -> Floats:
        """The kept coordinates of one flat vector."""
        result = vector.copy()
        if self.subsets.rotated:
            starts = self.subsets.starts
            for number, (rows, columns) in enumerate(self.subsets.matrices):
                part = result[starts[number] : starts[number + 1]].reshape(rows, columns)
                rotate_rows(part, self.signs[number], 0, rows)
        return result[self.places]

    def spread(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """An unbiased estimate of the rotated vector from its kept coordinates: each stands for its neighbours too."""
        result = np.zeros(self.subsets.dimension)
        result[self.places] = values * self.sizes
        return result

    def estimate(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """An unbiased estimate of the vector whose kept coordinates are `values`."""
        return self.subsets.rotated_back(self.spread(values), round=self.round)
