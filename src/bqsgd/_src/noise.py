"""The one binomial law and the one source of noise.

The accountant, the sampler and the entropy coder all read Bin(m, 1/2) from here, so they cannot disagree about it.
`binomial_pmf` is the law that the sampler really has: the textbook binomial, cut where both tails together weigh less
than 2^-64 (never for m <= 64) and rounded to 104 bits of fixed point, so that one table serves m up to 2^20. The
accountant therefore owes nothing for the sampler ("The mechanism and its law" in docs/accounting.md). How far the law
is from the textbook one is at most `CUT_LAW`.

Randomness is an AES-256-CTR keystream. Its key comes from the operating system (`privacy_rng`), or from a seed for
tests and reproductions (`seeded_rng`); what is made with a seed is marked "seeded" and carries no privacy claim.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import MAX_TRIALS, check_int

TAIL_BITS = 64
"""Both tails that the law leaves out weigh less than 2^-64 together."""
CUT_LAW = 1.001 * 2.0**-TAIL_BITS
"""More than the total variation distance between the sampler's law, cut and rounded, and Bin(m, 1/2)."""
_EXACT_TRIALS = 1024
"""Up to here weights are binomial coefficients; beyond, these would have thousands of digits."""
_WEIGHT_BITS = 320
"""Bits of the middle weight beyond that: the least weight kept still has some 250, so floors hardly matter."""
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
class BinomialPmf:
    """Bin(m, 1/2) on {first, ..., first + len(pmf) - 1}; the tails left out weigh less than 2^-64."""

    first: int
    pmf: npt.NDArray[np.float64]


def _weights(trials: int) -> tuple[int, list[int]]:
    """The first outcome kept, and integer weights: C(m, k) up to m = 1024, beyond it proportional to within 2^-220."""
    centre = trials // 2
    right = [math.comb(trials, centre) if trials <= _EXACT_TRIALS else 1 << _WEIGHT_BITS]
    # w_{k+1} = w_k (m - k) / (k + 1). The ratio r = a/b falls with k, so the tail beyond k weighs at most
    # w r / (1 - r) = w a / (b - a). Two bits more than TAIL_BITS pay for the second tail and for the floors.
    k = centre
    while k < trials:
        following = right[-1] * (trials - k) // (k + 1)
        k += 1
        right.append(following)
        a, b = trials - k, k + 1
        if trials > TAIL_BITS and a < b and (following * a // (b - a)) << (TAIL_BITS + 2) < right[0]:
            break
    lowest = trials - k  # symmetric window
    left = [right[j - centre] for j in range(trials - lowest, centre, -1) if trials - j < centre]
    return lowest, left + right


@lru_cache(maxsize=64)
def _law(trials: int) -> tuple[int, int, list[int]]:
    """The first outcome kept, the index bits of the alias table, and the law: integers that sum to exactly 2^104."""
    check_int("trials", trials, 0, MAX_TRIALS)
    first, weights = _weights(trials)
    total, whole = sum(weights), 1 << (NOISE_BITS + REFINE_BITS)
    law = [w * whole // total for w in weights]
    # Floors lose less than one unit per outcome. The middle outcome, the heaviest, takes all of it: relative to its
    # weight the change is least there, and the law stays log-concave. For odd m it is no longer symmetric; the
    # accountant charges that (`mirror_distance`).
    law[trials // 2 - first] += whole - sum(law)
    return first, max(1, (len(law) - 1).bit_length()), law


@lru_cache(maxsize=256)
def binomial_pmf(trials: int) -> BinomialPmf:
    """The sampler's law on its support, each probability correctly rounded to float64.

    Up to m = 64 that is Bin(m, 1/2) itself; beyond, it differs from it by at most `CUT_LAW`.

    >>> binomial_pmf(2).pmf.tolist()
    [0.25, 0.5, 0.25]
    """
    first, _, law = _law(trials)
    pmf = np.array([mass / (1 << (NOISE_BITS + REFINE_BITS)) for mass in law])
    pmf.setflags(write=False)
    return BinomialPmf(first=first, pmf=pmf)


@lru_cache(maxsize=256)
def mirror_distance(trials: int) -> float:
    """How far the sampler's law is from symmetric: the largest |p_k - p_(m-k)| / p_k, at most 2^-78.

    For odd m >= 71 the remainder of the rounding sits on the lower of the two middle outcomes.

    >>> mirror_distance(70), 0 < mirror_distance(71) < 2**-78
    (0.0, True)
    """
    _, _, law = _law(trials)
    ratios = (abs(one - other) / min(one, other) for one, other in zip(law, reversed(law), strict=True) if one != other)
    return max(ratios, default=0.0)


@dataclass(frozen=True, kw_only=True)
class AliasTable:
    """Walker's alias table of Bin(m, 1/2) in fixed point, with 2^index_bits entries.

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
def alias_table(trials: int) -> AliasTable:
    """The sampler's table for m trials: Walker's method in exact integers, so that the table has exactly the law."""
    first, index_bits, law = _law(trials)
    entries = 1 << index_bits
    unit = 1 << (NOISE_BITS - index_bits + REFINE_BITS)  # capacity of one entry
    masses = law + [0] * (entries - len(law))
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
    return AliasTable(first=first, index_bits=index_bits, threshold=threshold, refine=refine, alias=alias_of)


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
