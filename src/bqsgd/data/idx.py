"""Reading the IDX format of MNIST, trusting nothing in the bytes.

Layout: two zero bytes, type 0x08 (unsigned byte), number of dimensions, one big-endian u32 a dimension, then the data.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import numpy.typing as npt

from bqsgd.errors import InvalidParameter

_UNSIGNED_BYTE = 8
MAX_DIMENSIONS = 4


def parse_idx(raw: bytes, *, dimensions: int) -> npt.NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes with `dimensions` axes.

    The header's sizes are multiplied as Python integers and compared with the length in hand before anything is
    allocated, so a hostile header costs nothing.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 7]), dimensions=1).tolist()
    [5, 7]
    """
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise InvalidParameter(f"dimensions must be from 1 to {MAX_DIMENSIONS}, got {dimensions}")
    header = 4 + 4 * dimensions
    if len(raw) < header:
        raise InvalidParameter(f"not an IDX file: {len(raw)} bytes, a header alone takes {header}")
    if raw[:2] != b"\x00\x00" or raw[2] != _UNSIGNED_BYTE or raw[3] != dimensions:
        raise InvalidParameter(f"not an IDX file of unsigned bytes with {dimensions} axes: it begins {raw[:4].hex()}")
    shape = struct.unpack_from(f">{dimensions}I", raw, 4)
    if math.prod(shape) != len(raw) - header:
        raise InvalidParameter(f"IDX header says {shape}, but {len(raw) - header} bytes of data follow")
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape)
