"""One message of d coordinates: the pair that dominates it, whatever the data (no sampling yet).

One coordinate: a value x (in quantiser steps) becomes floor(x) + Bernoulli(frac x) + Bin(m, 1/2), with law
P(x) = (1 - f) B_l + f B_{l+1}. For every x, y with |x - y| <= Delta the hockey-stick divergence of (P(x), P(y)) is at
most that of A = (P(Delta), P(0)) or of B = (P(0), P(Delta)): docs/accounting.md, Claim 1. B is A reversed.

All coordinates: with the others fixed, the divergence is convex in one coordinate's pair, so the worst message is
A^k B^(d-k) for some k (docs/accounting.md, Claim 2). Cut 0..d into blocks: for k in [k1, k2] the product is dominated
by A^k1 B^(d-k2) E^(k2-k1), E the envelope of A and B, so only d / BLOCKS coordinates pay for the envelope; then take
the envelope of the blocks. For d < BLOCKS the blocks are single k and nothing is paid.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np
import numpy.typing as npt
from scipy import fft

from bqsgd.errors import AccountingError
from bqsgd.noise import binomial_pmf, mirror_distance
from bqsgd.privacy._pairs import Floats, Pair, charged, envelope, on_grid


@dataclass(frozen=True, kw_only=True)
class Atoms:
    """A pair as exact atoms: losses ascending, P- and Q-mass of each, and the masses only one law has."""

    loss: Floats
    p: Floats
    q: Floats
    p_only: float
    q_only: float

    @property
    def loss_deviation(self) -> float:
        """Standard deviation of the finite loss under P."""
        mean = float(self.p @ self.loss)
        return math.sqrt(max(0.0, float(self.p @ (self.loss - mean) ** 2)))


def coordinate_atoms(trials: int, shift: float) -> Atoms:
    """The pair A = (P(shift), P(0)) of one coordinate, atom by atom, for any shift > 0."""
    law = binomial_pmf(trials).pmf
    if shift >= law.size:
        return Atoms(loss=np.empty(0), p=np.empty(0), q=np.empty(0), p_only=1.0, q_only=1.0)
    whole, part = int(shift), shift - int(shift)
    # Both laws on one support: Q = law on the first entries, P moved up by `whole` and split over one entry more.
    q = np.concatenate([law, np.zeros(whole + 1)])
    p = np.zeros_like(q)
    p[whole : whole + law.size] += (1.0 - part) * law
    p[whole + 1 : whole + 1 + law.size] += part * law
    both = (p > 0) & (q > 0)
    if whole == 0:  # log(P/Q) = log(1 + f (b_{k-1}/b_k - 1)) keeps its digits for the small shifts of large batches
        ratio = np.concatenate([[0.0], law[:-1] / law[1:]])
        loss = np.log1p(part * (ratio - 1.0))
        both = both[: law.size] & np.isfinite(loss)
        p_head, q_head = p[: law.size], q[: law.size]
    else:
        p_head, q_head = p, q
        loss = np.log(np.divide(p, q, out=np.ones_like(p), where=both))
    p_kept, q_kept, loss = p_head[both], q_head[both], loss[both]
    # Log-concavity makes the loss ascend with the outcome, so no sorting is needed.
    return Atoms(
        loss=loss,
        p=p_kept,
        q=q_kept,
        p_only=float(p[q == 0].sum()),
        q_only=float(q[p == 0].sum()),
    )


BLOCKS = 32
GRID_FRACTION = 0.07
"""Grid step over the loss deviation of one coordinate: splitting atoms adds a share of at most 1e-3 to the variance
(half of that to epsilon); it grows slowly beyond 10^6 coordinates, where memory would otherwise grow with sqrt(d)."""
FINE_POINTS, MOST_POINTS = 1 << 16, 1 << 23
TAIL = 1e-18
NEGLIGIBLE_EXPONENT = -60.0
NOTHING_HIDDEN = 1e-12
"""A message that only one neighbour can send, but for so small a probability, counts as one that always tells."""
Complexes = npt.NDArray[np.complex128]


@dataclass(frozen=True, kw_only=True)
class _CoordinatePairs:
    """Grid pairs A, B, E of one coordinate, and the window of grid points -half .. half for d of them."""

    pairs: tuple[Pair, Pair, Pair]
    half: int
    dimension: int


def _log_moment(atoms: Atoms, order: float) -> float:
    """log of sum p exp(order * loss) over the finite atoms, both orders A and B, whichever is larger."""
    top = order * atoms.loss
    of_a = np.log(np.sum(atoms.p * np.exp(top - top.max()))) + top.max()
    of_b = np.log(np.sum(atoms.q * np.exp(-top - (-top).max()))) + (-top).max()
    return float(max(of_a, of_b))


def _reach(atoms: Atoms, dimension: int) -> float:
    """A loss that a sum of d coordinates exceeds with probability below TAIL (Chernoff)."""
    width = max(-float(atoms.loss[0]), float(atoms.loss[-1]))
    deviation = atoms.loss_deviation * np.sqrt(dimension)
    orders = np.concatenate([np.geomspace(0.05, 50, 40) / deviation, np.geomspace(0.5, 200, 24)])
    bounds = [(dimension * _log_moment(atoms, t) - float(np.log(TAIL))) / float(t) for t in orders]
    # The margin is for the envelope and the grid, which spread a little more; what is missed all the same is charged.
    return 1.15 * min(*bounds, dimension * width)


def _step(atoms: Atoms, reach: float, dimension: int) -> float:
    """The grid step of the loss of one coordinate, for a window of -reach .. reach."""
    fraction = GRID_FRACTION * max(1.0, dimension / 1e6) ** 0.25
    return float(max(min(fraction * atoms.loss_deviation, 2 * reach / FINE_POINTS), 2 * reach / MOST_POINTS))


def _coordinate_pairs(trials: int, shift: float, dimension: int) -> _CoordinatePairs:
    atoms = coordinate_atoms(trials, shift)
    if atoms.loss.size == 0 or atoms.loss_deviation == 0:
        raise AccountingError(f"shift {shift} leaves nothing in common between neighbours with {trials} trials")
    reach = _reach(atoms, dimension)
    step = _step(atoms, reach, dimension)
    a = on_grid(
        atoms.loss,
        np.where(atoms.loss < 0, atoms.q, atoms.p),
        step=step,
        p_only=atoms.p_only,
        q_only=atoms.q_only,
    )
    b = a.reversed()
    return _CoordinatePairs(pairs=(a, b, envelope(a, b)), half=int(np.ceil(reach / step)) + 2, dimension=dimension)


def _log_transform(pair: Pair, points: int, dimension: int) -> Complexes:
    """log of the characteristic function of the P-law at the frequencies 2 pi k / points.

    The transform errs by 1e-16 per coordinate, which d = 10^8 coordinates turn into 1e-8: the few low frequencies that
    survive the d-th power are summed again as sum p (e^(i w l) - 1), which is exact relative to its own small size.
    """
    used = np.flatnonzero(pair.major)
    index, mass = pair.first + used, pair.p[used]
    dense = np.zeros(points)
    np.add.at(dense, index % points, mass)
    less_one: Complexes = np.conj(fft.rfft(dense)) - 1.0
    with np.errstate(divide="ignore"):
        size = 0.5 * np.log1p(np.maximum(2 * less_one.real + np.abs(less_one) ** 2, -1.0))
    low = np.flatnonzero(dimension * size > NEGLIGIBLE_EXPONENT)
    if dimension > 64 and low.size * mass.size <= 2e8:
        for part in np.array_split(low, max(1, low.size * mass.size // 4_000_000)):
            angle = (2 * np.pi / points) * np.outer(part, index)
            less_one[part] = (-2 * np.sin(angle / 2) ** 2) @ mass - pair.p_only + 1j * (np.sin(angle) @ mass)
    with np.errstate(divide="ignore", invalid="ignore"):
        size = 0.5 * np.log1p(np.maximum(2 * less_one.real + np.abs(less_one) ** 2, -1.0))
    modulus = np.abs(1.0 + less_one)
    small = modulus < 0.5  # there the sum above cancels: a modulus of 1e-9 would be off by 1e-8
    size[small] = np.log(np.maximum(modulus[small], 1e-300))
    result: Complexes = np.maximum(size, -700.0) + 1j * np.angle(1.0 + less_one)
    return result


def _blocks(dimension: int) -> list[tuple[int, int]]:
    """(k1, k2) covering 0..d; symmetric under k -> d - k, so each block's mirror image is a block."""
    if dimension < BLOCKS:
        return [(k, k) for k in range(dimension + 1)]
    cuts = [round(dimension * j / BLOCKS) for j in range(BLOCKS // 2 + 1)]
    cuts += [dimension - c for c in reversed(cuts[:-1])]
    return list(itertools.pairwise(cuts))


def shortened(trials: int, shift: float, dimension: int) -> float:
    """A shift so much shorter as the grid widens the loss, for lower bounds.

    Splitting an atom adds at most a quarter of the step squared to the variance of the loss, which grows as the square
    of the shift.
    """
    atoms = coordinate_atoms(trials, shift)
    if atoms.loss.size == 0 or atoms.loss_deviation == 0:
        return shift
    share = (_step(atoms, _reach(atoms, dimension), dimension) / atoms.loss_deviation) ** 2 / 8
    return shift * (1 - min(share, 0.5))


@lru_cache(maxsize=16)
def message_pair(trials: int, shift: float, dimension: int, *, attained: bool = False) -> Pair:
    """The pair that dominates one message of `dimension` coordinates, each moved by at most `shift` steps.

    With `attained` it is A^d alone, which real data attain: what is accounted from it is a lower bound on the truth
    (up to the grid: see `shortened`), and quick.
    """
    edge = coordinate_atoms(trials, shift).p_only
    if edge == 1 or dimension * np.log1p(-edge) < np.log(NOTHING_HIDDEN):
        return Pair(step=1.0, first=0, major=np.zeros(1), p_only=1.0, q_only=1.0)
    coordinate = _coordinate_pairs(trials, shift, dimension)
    points = fft.next_fast_len(2 * coordinate.half, real=True)
    logs = [_log_transform(pair, points, dimension) for pair in coordinate.pairs]

    def upper_half(k1: int, k2: int) -> Floats:
        """P-mass at losses 0, step, 2 step, ... of A^k1 B^(d-k2) E^(k2-k1)."""
        power = k1 * logs[0] + (dimension - k2) * logs[1] + (k2 - k1) * logs[2]
        mass: Floats = fft.irfft(np.conj(np.exp(power)), points)[: coordinate.half]
        return np.maximum(mass, 0.0)

    halves: dict[tuple[int, int], Floats] = {}
    uneven = 4 * dimension * mirror_distance(trials)  # the law is not quite symmetric: claim 1

    def block_pair(k1: int, k2: int) -> Pair:
        """P-mass at losses >= 0; below, the Q-mass, which is the P-mass of the block's mirror image."""
        for block in ((k1, k2), (dimension - k2, dimension - k1)):
            if block not in halves:
                halves[block] = upper_half(*block)
        above, below = halves[k1, k2], halves[dimension - k2, dimension - k1]
        counts = (k1, dimension - k2, k2 - k1)
        p_only = -np.expm1(sum(n * np.log1p(-x.p_only) for n, x in zip(counts, coordinate.pairs, strict=True)))
        q_only = -np.expm1(sum(n * np.log1p(-x.q_only) for n, x in zip(counts, coordinate.pairs, strict=True)))
        major = np.concatenate([below[:0:-1], above])
        pair = Pair(step=coordinate.pairs[0].step, first=1 - coordinate.half, major=major, p_only=p_only, q_only=q_only)
        return charged(pair, uneven)

    if attained:
        return block_pair(dimension, dimension)
    return reduce(envelope, (block_pair(k1, k2) for k1, k2 in _blocks(dimension)))
