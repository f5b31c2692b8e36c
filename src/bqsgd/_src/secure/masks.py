"""Keys from secrets, and masks from keys: HKDF-SHA-256, X25519 and AES-128-CTR, all from the package `cryptography`.

A mask has a uniform integer of 8, 16 or 32 bits, a lane, for each coordinate. Masks and codes are added in lanes, which
wrap around, and cut to w bits at the end; that equals arithmetic modulo 2^w, because 2^w divides the size of a lane.
Keys of masks have 128 bits, which is as strong as X25519 and as the seeds that are shared.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from bqsgd._src.errors import ForeignClient
from bqsgd._src.params import check_int

MAX_WIDTH = 21
"""Most bits of one coordinate of a sum."""
KEY_BYTES = 16
Lanes = npt.NDArray[np.unsignedinteger[Any]]
_ZEROS = memoryview(bytes(1 << 18))
_START = modes.CTR(bytes(16))


def lane_type(width: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The unsigned little-endian integers in which sums modulo 2^width are computed."""
    check_int("width", width, 2, MAX_WIDTH)
    return np.dtype("<u1" if width <= 8 else "<u2" if width <= 16 else "<u4")


def derive(secret: bytes, purpose: str, session: bytes, *context: int | bytes) -> bytes:
    """Derive 32 bytes from a secret, for one purpose in one session; integers in the context take 64 bits."""
    info = f"bqsgd.secure.{purpose}.v2".encode() + b"\x00"
    info += b"".join(item if isinstance(item, bytes) else struct.pack("<Q", item) for item in context)
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=session, info=info).derive(secret)


def agree(own: X25519PrivateKey, other: bytes) -> bytes:
    """The secret of two key pairs.

    Raises:
        ForeignClient: the other key is one of the few (of low order) with which everybody gets the same secret.
    """
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise ForeignClient("a public key of low order gives no secret; the client must send another") from error


def keystream(key: bytes, size: int) -> bytes:
    """The first `size` bytes of AES-128-CTR, from counter 0. Use a key for one purpose only."""
    return Cipher(algorithms.AES128(key), _START).encryptor().update(bytes(size))


def pair_keys(secret: bytes, session: bytes, *, lower: bytes, higher: bytes, rounds: int) -> bytes:
    """The keys of the masks that two clients share, concatenated, for the rounds of a batch.

    secret: that of their X25519 keys. lower, higher: the digests of their Keys messages, which hold fresh nonces, so
    that every batch has its own keys.
    """
    return keystream(derive(secret, "pair-masks", session, lower, higher)[:KEY_BYTES], KEY_BYTES * rounds)


def wrap_stream(mask_seed: bytes, count: int) -> tuple[bytes, bytes]:
    """(check, pads): the pads hide `count` pair keys from everybody without the seed; the check identifies the seed."""
    stream = keystream(mask_seed, KEY_BYTES * (1 + count))
    return stream[:KEY_BYTES], stream[KEY_BYTES:]


def xor(one: bytes, other: bytes) -> bytes:
    """Exclusive or of two strings of the same length."""
    return (np.frombuffer(one, np.uint8) ^ np.frombuffer(other, np.uint8)).tobytes()


def self_key(seed: bytes, session: bytes, *, client: int, round: int) -> bytes:
    """The key of the mask that a client adds for itself."""
    return derive(seed, "self-mask", session, client, round)[:KEY_BYTES]


def add_mask(total: Lanes, key: bytes, *, scratch: Lanes, subtract: bool = False) -> None:
    """Add the mask of `key` to every lane of `total` (or subtract it), in place. `scratch` may have any length.

    Use a key for one vector only: its keystream always starts at block 0.
    """
    encryptor = Cipher(algorithms.AES128(key), _START).encryptor()
    room = scratch.view(np.uint8).data
    for start in range(0, total.size, scratch.size):
        part = total[start : start + scratch.size]
        for at in range(0, part.nbytes, len(_ZEROS)):
            piece = room[at : min(at + len(_ZEROS), part.nbytes)]
            encryptor.update_into(_ZEROS[: len(piece)], piece)
        (np.subtract if subtract else np.add)(part, scratch[: part.size], out=part)


def scratch_for(total: Lanes) -> Lanes:
    """Scratch memory for `add_mask` that fits into the second-level cache."""
    return np.empty(min(total.size, (1 << 17) // total.itemsize), total.dtype)
