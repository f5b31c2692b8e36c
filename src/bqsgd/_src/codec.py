"""From a vector to a frame and back: `encode_frame` for a client, `decode_frame` and `Accumulator` for a server.

The mechanism makes codes and the wire format makes bytes; neither knows the other. This module joins them.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.mechanism.encoder import Encoding, add_decoded, decode
from bqsgd._src.noise import NoiseSource
from bqsgd._src.params import Codes, Kept, Mechanism, Range, check_int, check_positive, check_range, parameters_digest
from bqsgd._src.subset import Subset
from bqsgd._src.wire import entropy
from bqsgd._src.wire._bits import readonly
from bqsgd._src.wire.fixed import FixedWidth, Payload
from bqsgd._src.wire.frame import Buffer, Coding, Expected, Frame, FrameWriter, Header, read_frame

_PIECE = 1 << 16
"""Codes that are encoded into scratch memory before they are packed, if a code is not a whole number of bytes."""


def encode_frame(
    values: Any,
    mechanism: Mechanism,
    *,
    range: Range,
    rng: NoiseSource,
    client: int,
    round: int,
    coding: str = "fixed",
    clamp: bool = False,
    kept: Kept | None = None,
) -> bytearray:
    """Encode a vector with noise and return the frame to send; the frame says whether the noise was seeded.

    coding="fixed" takes log2(code_count) bits per coordinate whatever the values are, and writes straight into the
    frame, so that extra memory does not grow with the dimension. coding="entropy" is shorter, but the length of the
    frame then depends on the codes, so only a server that may see the codes should see it.

    kept: says which part of a model the values are; None if they are all of it.

    >>> from bqsgd._src.noise import privacy_rng
    >>> mechanism = Mechanism(levels=2, trials=251)
    >>> frame = encode_frame(np.zeros(1000), mechanism, range=0.1, rng=privacy_rng(), client=0, round=0)
    >>> len(frame) < 1000 + 200  # a byte per coordinate, and the header
    True

    Raises:
        NonFiniteInput, OutOfRange, InvalidParameter: as `mechanism.encoder.encode`.
    """
    if coding not in ("fixed", "entropy"):
        raise InvalidParameter(f'coding must be "fixed" or "entropy", got {coding!r}')
    encoding = Encoding(values, mechanism, range=range, rng=rng, clamp=clamp)
    header = Header(
        coding=Coding[coding.upper()],
        seeded=rng.seeded,
        digest=parameters_digest(mechanism, range=range, dimension=encoding.dimension, kept=kept),
        client=client,
        round=round,
        dimension=encoding.dimension,
        mechanism=mechanism,
        kept=kept,
    )
    if header.coding is Coding.ENTROPY:
        return FrameWriter(header, entropy.compress(encoding.codes(), mechanism)).seal()
    writer = FrameWriter(header)
    _write_fixed(encoding, writer.payload)
    return writer.seal()


def _write_fixed(encoding: Encoding, payload: Payload) -> None:
    coder = FixedWidth(encoding.mechanism.code_count)
    if coder.direct and sys.byteorder == "little":
        encoding.write(0, encoding.dimension, payload.view(coder.dtype))
        return
    # A piece must start on a whole byte of the payload, and on an even coordinate, because a keystream block holds the
    # words of two.
    unit = math.lcm(coder.block_codes, 2)
    piece = unit * max(1, _PIECE // unit)
    scratch = np.empty(min(piece, encoding.dimension), dtype=coder.dtype)
    for a in range(0, encoding.dimension, piece):
        b = min(a + piece, encoding.dimension)
        encoding.write(a, b, scratch[: b - a])
        coder.pack(scratch[: b - a], payload[coder.payload_bytes(a) : coder.payload_bytes(b)])


def _checked(frame: Buffer | Frame, **expected: Unpack[Expected]) -> Frame:
    return frame.expect(**expected) if isinstance(frame, Frame) else read_frame(frame, **expected)


def codes_of(frame: Frame) -> Codes:
    """All codes of a checked frame as a read-only array; each is below the code count.

    Raises:
        FrameError: the payload holds other codes, or is not what its coding writes.
    """
    header = frame.header
    if header.coding is Coding.FIXED:
        codes = FixedWidth(header.mechanism.code_count).unpack(frame.payload, header.dimension)
    else:
        codes = entropy.decompress(frame.payload, header.mechanism, header.dimension)
    # Codes of whole bytes are a view of the caller's read-only bytes, others a fresh array. Numba compiles a kernel for
    # each of the two kinds; making all of them read-only means one.
    return readonly(codes)


def decode_frame(
    frame: Buffer | Frame,
    *,
    range: Range,
    dimension: int | None = None,
    mechanism: Mechanism | None = None,
    kept: Kept | None = None,
    client: int | None = None,
    round: int | None = None,
) -> npt.NDArray[np.float64]:
    """Check a frame against everything that is stated here and return its values (paper Eq. 12).

    Bytes are checked in full. A `Frame` that `read_frame` returned is only compared with what is stated here.

    >>> from bqsgd._src.noise import privacy_rng
    >>> mechanism = Mechanism(levels=4, trials=0)  # without noise only the rounding is left: at most a level, 0.25
    >>> frame = encode_frame(np.array([0.5, -1.0]), mechanism, range=1.0, rng=privacy_rng(), client=0, round=7)
    >>> decode_frame(frame, range=1.0, dimension=2, mechanism=mechanism, client=0, round=7).tolist()
    [0.5, -1.0]

    Raises:
        FrameError: the frame is damaged, hostile, or not the one expected; the subclass names the reason.
    """
    checked = _checked(
        frame, dimension=dimension, mechanism=mechanism, range=range, kept=kept, client=client, round=round
    )
    return decode(codes_of(checked), checked.header.mechanism, range=range)


class Accumulator:
    """A running weighted sum of decoded frames; its memory does not grow with the number of clients.

    A frame is checked in full before any of it is added, so a refused frame leaves the sum unchanged.

    >>> from bqsgd import Mechanism, privacy_rng
    >>> server, mechanism = Accumulator(dimension=3), Mechanism(levels=2, trials=251)
    >>> for client in range(4):
    ...     frame = encode_frame(np.zeros(3), mechanism, range=1.0, rng=privacy_rng(), client=client, round=0)
    ...     _ = server.add(frame, range=1.0, client=client, round=0)
    >>> server.frames, server.mean().shape
    (4, (3,))
    """

    def __init__(self, dimension: int) -> None:
        self.total: npt.NDArray[np.float64] = np.zeros(check_int("dimension", dimension, 1, 2**53))
        """Sum over the frames of weight (R/s) step (code - centre), with step and centre of `Mechanism`."""
        self.weight = 0.0
        """Sum of the weights."""
        self.frames = 0
        self.seeded = False
        """True as soon as one frame's noise was seeded: the sum then carries no privacy claim."""

    def add(
        self,
        frame: Buffer | Frame,
        *,
        range: Range,
        weight: float = 1.0,
        mechanism: Mechanism | None = None,
        subset: Subset | None = None,
        kept: Kept | None = None,
        client: int | None = None,
        round: int | None = None,
    ) -> Header:
        """Check a frame as `decode_frame` does and add `weight` times its values; returns its header.

        subset: which coordinates of the (rotated) vector the frame carries; None for all. What it carries is added as
        an unbiased estimate of the vector. kept: what the frame says of a subset, if it is added as it is.

        Raises:
            FrameError: the frame was refused and nothing was added.
            InvalidParameter: weight is not positive and finite.
        """
        kept = kept if subset is None else subset.subsets.header
        dimension = self.total.size if kept is None else kept.dimension
        weight, range = check_positive("weight", weight), check_range(range, dimension)
        checked = _checked(
            frame, dimension=dimension, mechanism=mechanism, range=range, kept=kept, client=client, round=round
        )
        # `codes_of` checks every code before the first is added, so a refused frame leaves the sum unchanged.
        target = self.total if subset is None else np.zeros(dimension)
        add_decoded(target, codes_of(checked), checked.header.mechanism, range=range, weight=weight)
        # `places` are all different, so that `+=` adds each of them; with repeats NumPy would add only one.
        if subset is not None:
            self.total[subset.places] += target * subset.sizes
        self.weight += weight
        self.frames += 1
        self.seeded |= checked.header.seeded
        return checked.header

    def mean(self) -> npt.NDArray[np.float64]:
        """The weighted mean of the frames added so far."""
        if not self.frames:
            raise InvalidParameter("no frame has been added, so there is no mean")
        return self.total / self.weight
