"""The one binomial law and the one source of noise.

The accountant, the sampler and the entropy coder all read Bin(m, 1/2) from `binomial_pmf`. Randomness is an AES-256-CTR
keystream: keyed by the operating system (`privacy_rng`), or by a seed for tests and reproductions (`seeded_rng`), in
which case everything made from it carries the mark "seeded" and no privacy claim.

The law is cut where both tails together weigh less than 2^-64 (never for m <= 64) and rounded to a fixed point of about
100 bits, so that one table serves m up to 2^20. `binomial_pmf` is the law the sampler really has, cut and rounding
included, so an accountant that reads it owes nothing for the sampler; the distance from the textbook binomial is
`sampler_tv_distance`.
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

from bqsgd.errors import InvalidParameter
from bqsgd.params import MAX_TRIALS, check_int

TAIL_BITS = 64
_EXACT_TRIALS = 1024
_WEIGHT_BITS = 320
ROUND_BITS = 24
"""Low bits of a coordinate's 64-bit word: the stochastic rounding draw. The rest choose the binomial value."""
ROUNDING_SLACK_STEPS = 2.0**-ROUND_BITS * (1 + 2.0**-6)
"""Inputs Delta quantiser steps apart are encoded as inputs at most Delta + this apart: accountants add it to the shift.

Before the draw, an input is rounded to the 2^-24 grid of the rounding probability without randomness: half a grid step
for each of two inputs. The float64 arithmetic before it adds less than 2^-6 of one (levels to 2^20).
"""
NOISE_BITS = 64 - ROUND_BITS
REFINE_BITS = 64
"""Extra bits of an alias threshold, looked at only when the first NOISE_BITS tie with it."""


@dataclass(frozen=True, kw_only=True)
class BinomialPmf:
    """Bin(m, 1/2) on {first, ..., first + len(pmf) - 1}; `cut` bounds the mass left out."""

    trials: int
    first: int
    pmf: npt.NDArray[np.float64]
    cut: float


def _weights(trials: int) -> tuple[int, list[int]]:
    """First kept outcome and integer weights: C(m, k) to m = 1024, beyond it proportional, to a relative 2^-220."""
    centre = trials // 2
    right = [math.comb(trials, centre) if trials <= _EXACT_TRIALS else 1 << _WEIGHT_BITS]
    # w_{k+1} = w_k (m - k) / (k + 1); the ratio falls with k, so what lies beyond k weighs at most w r / (1 - r).
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
def _shares(trials: int) -> tuple[int, int, list[int]]:
    """First kept outcome, index bits of the alias table, and the law itself: integers that sum to 2^104."""
    check_int("trials", trials, 0, MAX_TRIALS)
    first, weights = _weights(trials)
    total, whole = sum(weights), 1 << (NOISE_BITS + REFINE_BITS)
    shares = [w * whole // total for w in weights]
    shares[trials // 2 - first] += whole - sum(shares)  # floors lose less than one unit per outcome
    return first, max(1, (len(shares) - 1).bit_length()), shares


@lru_cache(maxsize=256)
def binomial_pmf(trials: int) -> BinomialPmf:
    """The law of the sampler on its effective support, each probability correctly rounded to float64.

    To m = 64 that is Bin(m, 1/2) itself, beyond it Bin(m, 1/2) to within `sampler_tv_distance`.

    >>> binomial_pmf(2).pmf.tolist()
    [0.25, 0.5, 0.25]
    """
    first, _, shares = _shares(trials)
    pmf = np.array([share / (1 << (NOISE_BITS + REFINE_BITS)) for share in shares])
    pmf.setflags(write=False)
    return BinomialPmf(trials=trials, first=first, pmf=pmf, cut=0.0 if first == 0 else 2.0**-TAIL_BITS)


@lru_cache(maxsize=256)
def mirror_distance(trials: int) -> float:
    """How far the sampler's law is from symmetric: the largest |p_k - p_(m-k)| / p_k, at most 2^-78.

    Odd m has two middle outcomes, and what rounding to fixed point leaves over (m >= 71) sits on the lower one.

    >>> mirror_distance(70), 0 < mirror_distance(71) < 2**-78
    (0.0, True)
    """
    _, _, shares = _shares(trials)
    ratios = (
        abs(one - other) / min(one, other) for one, other in zip(shares, reversed(shares), strict=True) if one != other
    )
    return max(ratios, default=0.0)


@dataclass(frozen=True, kw_only=True)
class AliasTable:
    """Walker's alias table of Bin(m, 1/2) in fixed point, for a 2^index_bits-entry look-up.

    Entry i is kept when the draw's remaining NOISE_BITS - index_bits bits are below `threshold[i]`, replaced by
    `alias[i]` when above; on a tie (once in 2^(NOISE_BITS - index_bits) draws) REFINE_BITS fresh bits are compared with
    `refine[i]`. Outcomes are `first` + entry.
    """

    first: int
    index_bits: int
    threshold: npt.NDArray[np.uint64]
    refine: npt.NDArray[np.uint64]
    alias: npt.NDArray[np.uint32]
    tv_distance: float


@lru_cache(maxsize=64)
def alias_table(trials: int) -> AliasTable:
    """Build the sampler's table from the exact integer weights (Walker's method in exact integers)."""
    first, index_bits, shares = _shares(trials)
    entries = 1 << index_bits
    unit = 1 << (NOISE_BITS - index_bits + REFINE_BITS)  # capacity of one entry
    share = shares + [0] * (entries - len(shares))
    keep, alias = [unit] * entries, list(range(entries))
    small = [i for i, mass in enumerate(share) if mass < unit]
    large = [i for i, mass in enumerate(share) if mass >= unit]
    while small:
        i, j = small.pop(), large[-1]
        keep[i], alias[i] = share[i], j
        share[j] -= unit - share[i]
        if share[j] < unit:
            small.append(large.pop())
    # Floors lose less than one unit per outcome; one unit more covers the weights' own error.
    rounding = (len(shares) + 1) / (entries * unit)
    threshold = np.array([k >> REFINE_BITS for k in keep], dtype=np.uint64)
    refine = np.array([k & ((1 << REFINE_BITS) - 1) for k in keep], dtype=np.uint64)
    alias_of = np.array(alias, dtype=np.uint32)
    for column in (threshold, refine, alias_of):
        column.setflags(write=False)  # the table is cached and shared
    return AliasTable(
        first=first,
        index_bits=index_bits,
        threshold=threshold,
        refine=refine,
        alias=alias_of,
        tv_distance=rounding + (0.0 if first == 0 else 2.0**-TAIL_BITS),
    )


def sampler_tv_distance(trials: int) -> float:
    """Upper bound on the total variation distance between the sampler's law and Bin(m, 1/2)."""
    return alias_table(trials).tv_distance


_ZEROS = memoryview(bytes(1 << 18))
_SEEDED_FORK = "a seeded noise source does not survive a fork; make one in each process"
_BEFORE_FORK = "this noise was reserved before a fork and belongs to the process that reserved it; encode again"


_forks = 0
"""How many `os.fork` lie between the first process and this one."""


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def _process() -> tuple[int, int]:
    """This process. A fork in C code runs no hook of Python's, so the process id is asked for each time; the count of
    forks tells a process from an ancestor whose id it was given again."""
    return os.getpid(), _forks


class Keystream:
    """The keystream of one source from one block on, read in order; see `NoiseSource.keystream`."""

    def __init__(self, key: bytes, block: int) -> None:
        self._encryptor = Cipher(algorithms.AES256(key), modes.CTR(block.to_bytes(16, "big"))).encryptor()
        self._process = _process()

    def fill(self, words: npt.NDArray[np.uint64]) -> None:
        """Write the next `words.nbytes` bytes into `words`."""
        if self._process != _process():
            raise InvalidParameter(_BEFORE_FORK)
        room = words.view(np.uint8).data
        for start in range(0, len(room), len(_ZEROS)):
            part = room[start : start + len(_ZEROS)]
            self._encryptor.update_into(_ZEROS[: len(part)], part)


class _Blocks:
    """The blocks that one process takes from a source: `first` on, under a key of its own."""

    def __init__(self, key: bytes | None, first: int) -> None:
        self.key, self.first, self.next = key, first, first
        self.lock = threading.Lock()  # not inherited: the parent's may be held by a thread that does not exist here


class NoiseSource:
    """An AES-256-CTR keystream with a position; use `privacy_rng()` or `seeded_rng(seed=...)`.

    Threads may share a source: `reserve` hands every caller blocks of its own. A forked process, however it was forked,
    gets a fresh key (privacy) or an error (seeded), so that no keystream is ever used twice; blocks reserved before the
    fork belong to the process that reserved them, and reading them in another is refused. The source cannot be copied
    or pickled, for the same reason.
    """

    def __init__(self, key: bytes, *, seeded: bool) -> None:
        self._by_process = {_process(): _Blocks(key, 0)}
        self.seeded = seeded

    def _blocks(self) -> _Blocks:
        """Those of this process, which begin after the ones that its parent had reserved."""
        process = _process()
        found = self._by_process.get(process)
        if found is None:
            first = max(blocks.next for blocks in list(self._by_process.values()))
            fresh = _Blocks(None if self.seeded else os.urandom(32), first)
            found = self._by_process.setdefault(process, fresh)  # one thread's wins
            for other in [known for known in list(self._by_process) if known != process]:
                self._by_process.pop(other, None)
        return found

    def reserve(self, blocks: int) -> int:
        """Take the next `blocks` 16-byte blocks of the keystream for the caller; returns the first one's number."""
        check_int("blocks", blocks, 0, 2**63)
        own = self._blocks()
        if own.key is None:
            raise InvalidParameter(_SEEDED_FORK)
        with own.lock:
            start, own.next = own.next, own.next + blocks
        return start

    def keystream(self, block: int) -> Keystream:
        """The keystream from `block` on. Read only blocks you reserved, in the process that reserved them."""
        own = self._blocks()
        if own.key is None:
            raise InvalidParameter(_SEEDED_FORK)
        if block < own.first:
            raise InvalidParameter(_BEFORE_FORK)
        return Keystream(own.key, block)

    def fill(self, words: npt.NDArray[np.uint64], *, block: int) -> None:
        """Write the keystream from `block` on into `words`. Thread-safe."""
        self.keystream(block).fill(words)

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """`count` fresh uniform 64-bit words, never handed out before."""
        fresh = np.empty(check_int("count", count, 0, 2**40), dtype=np.uint64)
        self.fill(fresh, block=self.reserve((count + 1) // 2))
        return fresh

    def __reduce__(self) -> str:
        raise TypeError("a noise source cannot be copied or pickled: its keystream must not be used twice")


def privacy_rng() -> NoiseSource:
    """A noise source keyed by the operating system: the only kind that supports a privacy claim.

    >>> privacy_rng().seeded
    False
    """
    return NoiseSource(os.urandom(32), seeded=False)


def seeded_rng(*, seed: int) -> NoiseSource:
    """A reproducible noise source. Anyone who knows the seed can remove the noise: no privacy claim."""
    check_int("seed", seed, 0, 2**63 - 1)
    return NoiseSource(hashlib.sha256(b"bqsgd.seeded.v1" + seed.to_bytes(8, "little")).digest(), seeded=True)
