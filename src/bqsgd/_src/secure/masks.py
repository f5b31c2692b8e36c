"""Keys from secrets, and masks from keys: HKDF-SHA-256, X25519 and AES-128-CTR, all from the package `cryptography`.

The keys of the masks in a round are hashed from the secrets of pairs together with the digest of the round's model. So
masks cancel only between clients that were sent the same model.

A mask has a uniform integer of 8, 16 or 32 bits, a lane, for each coordinate. Masks and codes are added in lanes, which
wrap around, and the result is cut to w bits. That equals arithmetic modulo 2^w, because 2^w divides the number of
values of a lane. Keys of masks have 128 bits, which is as strong as X25519 and as the seeds that are shared.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
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
"""The most bits of one coordinate of a sum."""
KEY_BYTES = 16
NO_MODEL = bytes(32)
"""In the place of a model's digest where the server sends no model."""
Lanes = npt.NDArray[np.unsignedinteger[Any]]
_ZEROS = memoryview(bytes(1 << 18))
_START = modes.CTR(bytes(16))


def lane_type(width: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The unsigned little-endian integers in which sums modulo 2^width are computed."""
    check_int("width", width, 2, MAX_WIDTH)
    return np.dtype("<u1" if width <= 8 else "<u2" if width <= 16 else "<u4")


def derive(secret: bytes, purpose: str, session: bytes, *context: int | bytes) -> bytes:
    """Derive 32 bytes from a secret, for one purpose in one session; integers in the context take 64 bits."""
    # The zero byte ends the purpose: no purpose with its context can equal another one with a different context.
    info = f"bqsgd.secure.{purpose}.v3".encode() + b"\x00"
    info += b"".join(item if isinstance(item, bytes) else struct.pack("<Q", item) for item in context)
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=session, info=info).derive(secret)


def agree(private: X25519PrivateKey, public: bytes) -> bytes:
    """The secret that our private key and another client's public key have in common.

    Raises:
        ForeignClient: the other key has low order, so that everybody gets the same secret with it.
    """
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise ForeignClient("a public key of low order gives no secret; the client must send another") from error


def keystream(key: bytes, size: int) -> bytes:
    """The first `size` bytes of AES-128-CTR, from counter 0. Use a key for one purpose only."""
    return Cipher(algorithms.AES128(key), _START).encryptor().update(bytes(size))


def xor(one: bytes, other: bytes) -> bytes:
    """Exclusive or of two byte strings of the same length."""
    return (np.frombuffer(one, np.uint8) ^ np.frombuffer(other, np.uint8)).tobytes()


def self_key(seed: bytes, session: bytes, *, client: int, round: int) -> bytes:
    """The key of the mask that a client adds for itself."""
    return derive(seed, "self-mask", session, client, round)[:KEY_BYTES]


def model_digest(model: npt.NDArray[np.float32], settings: str) -> bytes:
    """What the masks of a round depend on: SHA-256 of the model's float32 values, and of the settings as text that
    decide what a client makes of it (`Config.summed`)."""
    values = np.ascontiguousarray(model, dtype="<f4").tobytes()
    return hashlib.sha256(hashlib.sha256(settings.encode()).digest() + values).digest()


def pair_keys(secrets: Sequence[bytes], session: bytes, *, round: int, model: bytes) -> list[bytes]:
    """The keys of the masks that one client shares with others in a round, from the secrets of the pairs.

    A hash, because on a full graph the secrets of one client's pairs are known to lie on a polynomial (`client`).
    """
    about = hashlib.sha256(b"bqsgd.secure.masks.v3\x00" + session + struct.pack("<Q", round) + model)
    keys = []
    for secret in secrets:
        state = about.copy()  # one hash for each of many neighbours: several times as fast as HKDF
        state.update(secret)
        keys.append(state.digest()[:KEY_BYTES])
    return keys


def add_mask(total: Lanes, key: bytes, *, scratch: Lanes, subtract: bool = False) -> None:
    """Add the mask of `key` to every lane of `total` (or subtract it), in place. `scratch` may have any length.

    Use a key for one vector only: its keystream always starts at block 0.
    """
    encryptor = Cipher(algorithms.AES128(key), _START).encryptor()
    stream = scratch.view(np.uint8).data
    for start in range(0, total.size, scratch.size):
        part = total[start : start + scratch.size]
        # Encrypting zeros into existing memory gives the keystream without an allocation.
        for at in range(0, part.nbytes, len(_ZEROS)):
            piece = stream[at : min(at + len(_ZEROS), part.nbytes)]
            encryptor.update_into(_ZEROS[: len(piece)], piece)
        (np.subtract if subtract else np.add)(part, scratch[: part.size], out=part)


def scratch_for(total: Lanes) -> Lanes:
    """Scratch memory for `add_mask` that fits into the second-level cache."""
    return np.empty(min(total.size, (1 << 17) // total.itemsize), total.dtype)
