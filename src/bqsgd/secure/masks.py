"""Keys from secrets, and masks from keys: HKDF-SHA-256, X25519 and AES-128-CTR, all of `cryptography`.

A mask is one uniform lane of 8, 16 or 32 bits per coordinate; sums of masks and codes are taken in the lane and cut to
w bits at the end, which gives the same as arithmetic modulo 2^w throughout. Keys of masks have 128 bits, as strong as
X25519 and as the seeds that are shared.
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

from bqsgd.errors import ForeignClient
from bqsgd.params import check_int

MAX_WIDTH = 21
"""Most bits of a coordinate of the sum."""
KEY_BYTES = 16
Lanes = npt.NDArray[np.unsignedinteger[Any]]
_ZEROS = memoryview(bytes(1 << 18))
_START = modes.CTR(bytes(16))


def lane_type(width: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The unsigned integers in which sums modulo 2^width are taken, little-endian."""
    check_int("width", width, 2, MAX_WIDTH)
    return np.dtype("<u1" if width <= 8 else "<u2" if width <= 16 else "<u4")


def derive(secret: bytes, purpose: str, session: bytes, *context: int | bytes) -> bytes:
    """32 bytes from a secret, for one purpose in one session; integers of the context are of 64 bits."""
    info = f"bqsgd.secure.{purpose}.v2".encode() + b"\x00"
    info += b"".join(each if isinstance(each, bytes) else struct.pack("<Q", each) for each in context)
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=session, info=info).derive(secret)


def agree(own: X25519PrivateKey, other: bytes) -> bytes:
    """The secret that two key pairs share.

    Raises:
        ForeignClient: the other key is one of the few that give the same secret to everybody.
    """
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise ForeignClient("a public key of low order gives no secret") from error


def keystream(key: bytes, size: int) -> bytes:
    """The first `size` bytes of AES-128-CTR from counter 0."""
    return Cipher(algorithms.AES128(key), _START).encryptor().update(bytes(size))


def pair_keys(secret: bytes, session: bytes, *, lower: bytes, higher: bytes, rounds: int) -> bytes:
    """The keys of the masks that two clients share, one after the other for the rounds of a batch.

    secret: of their X25519 keys. lower, higher: digests of their Keys messages, so that every batch has its own.
    """
    return keystream(derive(secret, "pair-masks", session, lower, higher)[:KEY_BYTES], KEY_BYTES * rounds)


def wrap_stream(mask_seed: bytes, count: int) -> tuple[bytes, bytes]:
    """(check, pads): what a mask seed opens with. Pads hide `count` pair keys from all who have not the seed."""
    stream = keystream(mask_seed, KEY_BYTES * (1 + count))
    return stream[:KEY_BYTES], stream[KEY_BYTES:]


def xor(one: bytes, other: bytes) -> bytes:
    """Exclusive or of two equally long strings."""
    return (np.frombuffer(one, np.uint8) ^ np.frombuffer(other, np.uint8)).tobytes()


def self_key(seed: bytes, session: bytes, *, client: int, round: int) -> bytes:
    """The key of the mask that a client adds for itself."""
    return derive(seed, "self-mask", session, client, round)[:KEY_BYTES]


def add_mask(total: Lanes, key: bytes, *, scratch: Lanes, subtract: bool = False) -> None:
    """Add (or subtract) the mask of `key` to every lane of `total`, in place; `scratch` is as long as you like.

    One key masks one vector: the keystream starts at block 0.
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
    """Room for `add_mask` that stays in the second-level cache."""
    return np.empty(min(total.size, (1 << 17) // total.itemsize), total.dtype)
