"""Where every random draw of a run comes from: the operating system, or one seed by (purpose, client, round).

A seeded draw depends on nothing but its own key, never on what was drawn before it, so that a resumed run and another
engine draw the same. Seeded noise carries no privacy claim; the initial model and the shares of data are public or
decide nothing private, so their seed may be known.

Batches are drawn here too, from the cryptographic generator: amplification by sampling needs a draw that the server
cannot predict. So does what a model or a data set draws while a message is made (dropout masks, augmentation): which
draw a sample meets depends on the samples before it, so whoever knows the draws sees one sample move all the others.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch

from bqsgd._src.noise import NoiseSource, privacy_rng, seeded_rng
from bqsgd._src.params import check_int
from bqsgd._src.release import Scheme
from bqsgd._src.runtime.generators import accelerator_generators, alone, generators_kept


class Purpose(StrEnum):
    """What a draw is for; different purposes never share a keystream."""

    MODEL = "model"
    SHARES = "shares"
    BATCH = "batch"
    NOISE = "noise"
    READ = "read"
    FORWARD = "forward"
    COHORT = "cohort"


def seed_for(seed: int, purpose: Purpose, *, client: int = 0, round: int = 0) -> int:
    """A 63-bit seed from SHA-256 over (seed, purpose, client, round)."""
    check_int("seed", seed, 0, 2**63 - 1)
    key = b"bqsgd.training.v1\x00" + str(purpose).encode() + struct.pack("<QQQ", seed, client, round)
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1


class Sources:
    """The random sources of one client: `at(purpose, round)`.

    Without a seed all draws come from one generator keyed by the operating system when the client was made.
    """

    def __init__(self, *, seed: int | None, client: int) -> None:
        self.seed = None if seed is None else check_int("seed", seed, 0, 2**63 - 1)
        self.client = client
        self._private = privacy_rng() if seed is None else None

    @property
    def seeded(self) -> bool:
        """True when anyone who knows the seed can remove the noise."""
        return self.seed is not None

    def at(self, purpose: Purpose, round: int) -> NoiseSource:
        """The source for one purpose in one round."""
        if self._private is not None:
            return self._private
        assert self.seed is not None
        return seeded_rng(seed=seed_for(self.seed, purpose, client=self.client, round=round))

    def lent(self, purpose: Purpose, round: int, *, shared: bool = False) -> AbstractContextManager[None]:
        """`lent` from the source for one purpose in one round."""
        return lent(self.at(purpose, round), shared=shared)


class GivenSources(Sources):
    """The sources of a client whose noise comes from a generator that the caller holds (the DDP hook).

    Everything else is drawn from a generator of its own, keyed by the operating system. With seeded noise nothing is
    lent: there is no claim to protect, and the program's own seeds then decide what model and data draw.
    """

    def __init__(self, noise: NoiseSource) -> None:
        super().__init__(seed=None, client=0)
        self._noise = noise

    @property
    def seeded(self) -> bool:
        """True when anyone who knows the seed can remove the noise."""
        return self._noise.seeded

    def at(self, purpose: Purpose, round: int) -> NoiseSource:
        """The caller's generator for the noise, else this client's own."""
        return self._noise if purpose is Purpose.NOISE else super().at(purpose, round)

    def lent(self, purpose: Purpose, round: int, *, shared: bool = False) -> AbstractContextManager[None]:
        """As `Sources.lent`; nothing with seeded noise."""
        return nullcontext() if self.seeded else super().lent(purpose, round, shared=shared)


@contextmanager
def lent(rng: NoiseSource, *, shared: bool = False) -> Iterator[None]:
    """Meanwhile the generators of torch (on every device in use), NumPy and Python draw from `rng`, whatever seeds a
    program has given them; afterwards they go on as if nothing had been drawn.

    shared: other threads may draw at the same time. What is drawn is then unknown to all, but not the same every time.
    """
    with nullcontext() if shared else alone, generators_kept():
        with alone:
            torch.set_rng_state(torch_generator(rng).get_state())
            np.random.seed(_halves(rng.words(_KEY_WORDS)))  # noqa: NPY002
            random.seed(rng.words(_KEY_WORDS).tobytes())
            for generator in accelerator_generators():
                generator.manual_seed(int(rng.words(1)[0]))  # counter based: its whole key are these 64 bits
        yield


def torch_generator(rng: NoiseSource) -> torch.Generator:
    """One of torch's generators in a state of `rng`'s: of a seed, torch would use 32 bits."""
    generator = torch.Generator()
    state = generator.get_state()
    state[_TORCH_WORDS] = torch.from_numpy(_halves(rng.words(_MERSENNE // 2)).astype("<u8").view(np.uint8))
    return generator.set_state(state)


_KEY_WORDS = 4
_MERSENNE = 624
"""32-bit words in the state of a Mersenne twister."""
_TORCH_WORDS = slice(24, 24 + 8 * _MERSENNE)
"""Where torch keeps them, eight bytes for each."""


def _halves(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    return words.view(np.uint32)


Rows = npt.NDArray[np.int64]


def draw_batch(
    scheme: Scheme, *, batch_size: int, dataset_size: int, rng: NoiseSource, rate: float | None = None
) -> Rows:
    """Rows of this round's samples, ascending.

    Poisson: each sample independently with probability floor(2^64 q) / 2^64, q the rate, or L / D where none is given:
    at most the rate that is accounted. The batch may be empty or larger than L. Fixed size: L of D without replacement,
    every subset equally likely (the L smallest of D random words, drawn again in the one case in 2^38 that two words
    are equal and D is 10,000). No sampling: all.
    """
    check_int("dataset_size", dataset_size, 1, 2**40)
    if rate is None:
        check_int("batch_size", batch_size, 1, dataset_size)
    chance = Fraction(batch_size, dataset_size) if rate is None else Fraction(rate)
    if scheme is Scheme.NONE or (scheme is Scheme.POISSON and chance == 1):
        return np.arange(dataset_size)
    if scheme is Scheme.POISSON:
        return np.flatnonzero(rng.words(dataset_size) < np.uint64((chance.numerator << 64) // chance.denominator))
    while True:
        words = rng.words(dataset_size)
        if len(np.unique(words)) == dataset_size:  # ties would favour the earlier rows
            return np.sort(np.argpartition(words, batch_size - 1)[:batch_size])
