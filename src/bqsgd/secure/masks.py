"""Keys from seeds, and masks from keys: HKDF-SHA-256, X25519 and AES-256-CTR, all of `cryptography`.

A mask is one uniform lane of 8, 16 or 32 bits per coordinate; sums of masks and codes are taken in the lane and cut to
w bits at the end, which gives the same as arithmetic modulo 2^w throughout.
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
Lanes = npt.NDArray[np.unsignedinteger[Any]]
_ZEROS = memoryview(bytes(1 << 18))


def lane_type(width: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The unsigned integers in which sums modulo 2^width are taken, little-endian."""
    check_int("width", width, 2, MAX_WIDTH)
    return np.dtype("<u1" if width <= 8 else "<u2" if width <= 16 else "<u4")


def derive(secret: bytes, purpose: str, session: bytes, *context: int | bytes) -> bytes:
    """32 bytes from a secret, for one purpose in one session; integers of the context are of 64 bits."""
    info = f"bqsgd.secure.{purpose}.v1".encode() + b"\x00"
    info += b"".join(each if isinstance(each, bytes) else struct.pack("<Q", each) for each in context)
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=session, info=info).derive(secret)


def mask_key(seed: bytes, session: bytes, *, client: int, round: int) -> X25519PrivateKey:
    """The key with which `client` agrees on masks in `round`; whoever has the seed has the key."""
    return X25519PrivateKey.from_private_bytes(derive(seed, "mask-key", session, client, round))


def agree(own: X25519PrivateKey, other: bytes) -> bytes:
    """The secret that two key pairs share.

    Raises:
        ForeignClient: the other key is one of the few that give the same secret to everybody.
    """
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise ForeignClient("a public key of low order gives no secret") from error


def pair_key(own: X25519PrivateKey, other: bytes, session: bytes, *, lower: int, higher: int, round: int) -> bytes:
    """The key of the mask that two clients share in `round`; the client of the lower number adds it."""
    return derive(agree(own, other), "pair-mask", session, lower, higher, round)


def self_key(seed: bytes, session: bytes, *, client: int, round: int) -> bytes:
    """The key of the mask that a client adds for itself."""
    return derive(seed, "self-mask", session, client, round)


def add_mask(total: Lanes, key: bytes, *, scratch: Lanes, subtract: bool = False) -> None:
    """Add (or subtract) the mask of `key` to every lane of `total`, in place; `scratch` is as long as you like.

    One key masks one vector: the keystream starts at block 0.
    """
    encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
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
