"""The sampler's table of a law of noise, and the one source of randomness.

The laws are in `laws`; the accountant, the sampler and the entropy coder all read them there, so they cannot disagree.
The binomial law is that of the textbook, cut where both tails together weigh less than 2^-64 (never for m <= 64) and
rounded to 104 bits of fixed point, so that one table serves m up to 2^20. The accountant therefore owes nothing for the
sampler ("The mechanism and its law" in docs/accounting.md). The cut law is within `CUT_LAW` of the textbook's.

Randomness is an AES-256-CTR keystream. Its key comes from the operating system (`privacy_rng`), or from a seed for
tests and reproductions (`seeded_rng`); what is made with a seed is marked "seeded" and carries no privacy claim.
"""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.laws import TAIL_BITS, NoiseLaw
from bqsgd._src.params import check_int

CUT_LAW = 1.001 * 2.0**-TAIL_BITS
"""More than the total variation distance between the sampler's law, cut and rounded, and Bin(m, 1/2)."""
ROUND_BITS = 24
"""Low bits of a coordinate's 64-bit word: the stochastic rounding draw. The high 40 bits choose the binomial value."""
ROUNDING_SLACK_STEPS = 2.0**-ROUND_BITS * (1 + 2.0**-6)
"""What the accountant adds to the shift: two inputs that are Delta steps apart are encoded as if Delta + this apart.

The encoder first rounds an input, without randomness, to the grid of 2^-24 steps on which the rounding probability
lies: at most half a grid step for each of the two inputs. Its float64 arithmetic adds less than 2^-6 grid steps, for
levels up to 2^20.
"""
NOISE_BITS = 64 - ROUND_BITS
REFINE_BITS = 64
"""Extra bits of an alias threshold, looked at only when the first NOISE_BITS tie with it."""


@dataclass(frozen=True, kw_only=True)
class AliasTable:
    """Walker's alias table of a law in fixed point, with 2^index_bits entries.

    The first index_bits of a draw choose entry i. If the other NOISE_BITS - index_bits bits are below `threshold[i]`,
    the outcome is `first` + i; if above, `first` + `alias[i]`. On a tie (once in 2^(NOISE_BITS - index_bits) draws)
    REFINE_BITS fresh bits are compared with `refine[i]` in the same way.
    """

    first: int
    index_bits: int
    threshold: npt.NDArray[np.uint64]
    refine: npt.NDArray[np.uint64]
    alias: npt.NDArray[np.uint32]


@lru_cache(maxsize=64)
def alias_table(law: NoiseLaw) -> AliasTable:
    """The sampler's table of a law: Walker's method in exact integers, so that the table has exactly the law."""
    index_bits = max(1, (len(law.masses) - 1).bit_length())
    entries = 1 << index_bits
    unit = 1 << (NOISE_BITS - index_bits + REFINE_BITS)  # capacity of one entry
    masses = [*law.masses, *[0] * (entries - len(law.masses))]
    keep, alias = [unit] * entries, list(range(entries))
    small = [i for i, mass in enumerate(masses) if mass < unit]
    large = [i for i, mass in enumerate(masses) if mass >= unit]
    # Capacities and masses have the same sum, so while an entry lies below its capacity another lies above.
    while small:
        i, j = small.pop(), large[-1]
        keep[i], alias[i] = masses[i], j
        masses[j] -= unit - masses[i]
        if masses[j] < unit:
            small.append(large.pop())
    threshold = np.array([k >> REFINE_BITS for k in keep], dtype=np.uint64)
    refine = np.array([k & ((1 << REFINE_BITS) - 1) for k in keep], dtype=np.uint64)
    alias_of = np.array(alias, dtype=np.uint32)
    for column in (threshold, refine, alias_of):
        column.setflags(write=False)  # the table is cached: a caller that wrote to it would change everybody's noise
    return AliasTable(first=law.first, index_bits=index_bits, threshold=threshold, refine=refine, alias=alias_of)


_ZEROS = memoryview(bytes(1 << 18))
"""What is encrypted to get the keystream, a piece at a time."""
_BEFORE_FORK = "this noise was reserved before a fork and belongs to the process that reserved it; encode again"


_forks = 0
"""How many calls of `os.fork` lie between the first process and this one."""


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def _process() -> tuple[int, int]:
    """What identifies this process: its id, and how many forks led to it."""
    # The id is asked for each time, because a fork in C code runs no Python hook. The count is needed as well: the
    # operating system may give a process the id of an ancestor that has ended.
    return os.getpid(), _forks


class Keystream:
    """The keystream of a source from one block on, read in order. Made by `NoiseSource.keystream`."""

    def __init__(self, key: bytes, block: int) -> None:
        self._encryptor = Cipher(algorithms.AES256(key), modes.CTR(block.to_bytes(16, "big"))).encryptor()
        self._process = _process()

    def fill(self, words: npt.NDArray[np.uint64]) -> None:
        """Write the next `words.nbytes` bytes into `words`.

        Raises:
            InvalidParameter: this is a child of the process that made the keystream; both would read the same noise.
        """
        if self._process != _process():
            raise InvalidParameter(_BEFORE_FORK)
        room = words.view(np.uint8).data
        for start in range(0, len(room), len(_ZEROS)):
            part = room[start : start + len(_ZEROS)]
            self._encryptor.update_into(_ZEROS[: len(part)], part)


class _Blocks:
    """The blocks that one process takes from a source: from `first` on, under a key of its own."""

    def __init__(self, key: bytes, first: int) -> None:
        self.key, self.first, self.next = key, first, first
        # A new lock for each process: a thread that the fork did not copy may hold the parent's lock for ever.
        self.lock = threading.Lock()


class NoiseSource:
    """An AES-256-CTR keystream with a position; make one with `privacy_rng()` or `seeded_rng(seed=...)`.

    No part of a keystream is ever used twice, because the difference of two messages with the same noise has none:

    - Threads may share a source. `reserve` gives every caller blocks that nobody else gets.
    - A forked process gets a fresh key (privacy) or an error (seeded), however it was forked. Blocks reserved before
      the fork belong to the parent, and the child may not read them.
    - A source cannot be copied or pickled.
    """

    def __init__(self, key: bytes, *, seeded: bool) -> None:
        self._by_process = {_process(): _Blocks(key, 0)}
        self.seeded = seeded

    def _blocks(self) -> _Blocks:
        """The blocks of this process. After a fork they begin where those of the parent ended.

        Raises:
            InvalidParameter: the source is seeded and this process was forked after it was made.
        """
        process = _process()
        blocks = self._by_process.get(process)
        if blocks is None:
            if self.seeded:
                raise InvalidParameter("a seeded noise source does not survive a fork; make one in each process")
            # No lock is taken here (it might be the parent's, see `_Blocks`), so each step must be safe when several
            # threads are here at once: setdefault is atomic, and all of them get the object of the first.
            first = max(inherited.next for inherited in list(self._by_process.values()))
            fresh = _Blocks(os.urandom(32), first)
            blocks = self._by_process.setdefault(process, fresh)
            # Only after ours are in: `max` above must not find the dictionary empty in another thread.
            for other in [known for known in list(self._by_process) if known != process]:
                self._by_process.pop(other, None)
        return blocks

    def reserve(self, blocks: int) -> int:
        """Take the next `blocks` blocks of 16 bytes for the caller alone; returns the number of the first.

        Raises:
            InvalidParameter: the source is seeded and this process was forked after it was made.
        """
        check_int("blocks", blocks, 0, 2**63)
        ours = self._blocks()
        with ours.lock:
            start, ours.next = ours.next, ours.next + blocks
        return start

    def keystream(self, block: int) -> Keystream:
        """The keystream from `block` on. Read only blocks that you reserved, in the process that reserved them.

        Raises:
            InvalidParameter: the block was reserved before a fork, or the source is seeded and was forked.
        """
        ours = self._blocks()
        if block < ours.first:
            raise InvalidParameter(_BEFORE_FORK)
        return Keystream(ours.key, block)

    def fill(self, words: npt.NDArray[np.uint64], *, block: int) -> None:
        """Write the keystream from `block` on into `words`. Thread-safe."""
        self.keystream(block).fill(words)

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """`count` uniform 64-bit words that no other caller gets. Thread-safe."""
        fresh = np.empty(check_int("count", count, 0, 2**40), dtype=np.uint64)
        self.fill(fresh, block=self.reserve((count + 1) // 2))
        return fresh

    def __reduce__(self) -> str:
        raise TypeError("a noise source cannot be copied or pickled: its keystream must not be used twice")


def privacy_rng() -> NoiseSource:
    """A noise source whose key comes from the operating system: the only kind that carries a privacy claim.

    >>> privacy_rng().seeded
    False
    """
    return NoiseSource(os.urandom(32), seeded=False)


def seeded_rng(*, seed: int) -> NoiseSource:
    """A reproducible noise source, for tests. Whoever knows the seed can subtract the noise: no privacy claim.

    >>> seeded_rng(seed=1).seeded
    True
    """
    check_int("seed", seed, 0, 2**63 - 1)
    return NoiseSource(hashlib.sha256(b"bqsgd.seeded.v1" + seed.to_bytes(8, "little")).digest(), seeded=True)
