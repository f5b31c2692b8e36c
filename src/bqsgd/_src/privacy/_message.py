"""One message of d coordinates under an L-infinity bound: the pair that dominates it whatever the data, unsampled.

One coordinate (Claim 1 in docs/accounting.md). A value x, in quantiser steps, becomes
floor(x) + Bernoulli(frac x) + Bin(m, 1/2), with law P(x) = (1 - f) B_l + f B_{l+1}. For all x, y with
|x - y| <= Delta, the hockey-stick divergence of (P(x), P(y)) is at most the larger of those of A = (P(Delta), P(0)) and
of its reverse B = (P(0), P(Delta)).

All coordinates (Claim 2). The worst message is A^k B^(d-k) for some k in 0..d. Computing d + 1 curves would take too
long, so 0..d is cut into blocks: for k in [k1, k2] the product is dominated by A^k1 B^(d-k2) E^(k2-k1), where E is the
envelope of A and B. The result is the envelope of the blocks. Only d / BLOCKS coordinates pay for E; with d < BLOCKS
each k is a block of its own and nothing is paid.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache, reduce

import numpy as np
import numpy.typing as npt
from scipy import fft

from bqsgd._src.errors import AccountingError
from bqsgd._src.laws import NoiseLaw, mirror_distance
from bqsgd._src.privacy._pairs import Atoms, Floats, Pair, charged, envelope


def shifted_laws(law: Floats, whole: int, part: float) -> tuple[Floats, Floats]:
    """P(whole + part) and P(0) on one support: P(0) is the law on the first entries, P is split between two shifts."""
    still = np.concatenate([law, np.zeros(whole + 1)])
    moved = np.zeros_like(still)
    moved[whole : whole + law.size] += (1.0 - part) * law
    moved[whole + 1 :] += part * law
    return moved, still


def coordinate_atoms(noise: NoiseLaw, shift: float) -> Atoms:
    """The pair A = (P(shift), P(0)) of one coordinate, atom by atom, for any shift > 0."""
    law = noise.pmf
    if shift >= law.size:
        return Atoms(loss=np.empty(0), p=np.empty(0), q=np.empty(0), p_only=1.0, q_only=1.0)
    whole, part = int(shift), shift - int(shift)
    p, q = shifted_laws(law, whole, part)
    both = (p > 0) & (q > 0)
    if whole == 0:  # as log(1 + f (b_{k-1}/b_k - 1)) the loss keeps its digits for the small shifts of large batches
        ratio = np.concatenate([[0.0], law[:-1] / law[1:]])
        loss = np.log1p(part * (ratio - 1.0))
        both = both[: law.size] & np.isfinite(loss)
    else:
        loss = np.log(np.divide(p, q, out=np.ones_like(p), where=both))
    # The law is log-concave, so the loss ascends with the outcome and need not be sorted.
    return Atoms(
        loss=loss[both],
        p=p[: both.size][both],
        q=q[: both.size][both],
        p_only=float(p[q == 0].sum()),
        q_only=float(q[p == 0].sum()),
    )


BLOCKS = 32
GRID_FRACTION = 0.07
"""Grid step divided by the standard deviation of the loss of one coordinate. Splitting atoms then adds at most 1e-3 to
the variance, relatively, and half of that to epsilon. The step grows slowly beyond 10^6 coordinates, where memory would
otherwise grow with sqrt(d)."""
FINE_POINTS, MOST_POINTS = 1 << 16, 1 << 23
"""Fewest and most points of the window. The latter bounds memory; a coarser grid only makes epsilon larger."""
TAIL = 1e-18
"""Probability that the loss of a message leaves the window; what it leaves is charged as infinite loss."""
NEGLIGIBLE_EXPONENT = -60.0
"""A frequency whose d-th power is below e^-60 contributes nothing at double precision."""
NOTHING_HIDDEN = 1e-12
"""If one neighbour alone can send the message except with this probability, no privacy is claimed at all."""
Complexes = npt.NDArray[np.complex128]


def _log_moment(atoms: Atoms, order: float) -> float:
    """log of sum p exp(order * loss) over the finite atoms; the larger value of A and B."""
    top = order * atoms.loss
    of_a = np.log(np.sum(atoms.p * np.exp(top - top.max()))) + top.max()
    of_b = np.log(np.sum(atoms.q * np.exp(-top - (-top).max()))) + (-top).max()
    return float(max(of_a, of_b))


def _largest_loss(atoms: Atoms, dimension: int) -> float:
    """A loss that the sum over d coordinates exceeds with probability below TAIL (Chernoff's bound)."""
    width = max(-float(atoms.loss[0]), float(atoms.loss[-1]))
    deviation = atoms.loss_deviation * np.sqrt(dimension)
    orders = np.concatenate([np.geomspace(0.05, 50, 40) / deviation, np.geomspace(0.5, 200, 24)])
    bounds = [(dimension * _log_moment(atoms, t) - float(np.log(TAIL))) / float(t) for t in orders]
    # The margin is for the envelope and the grid, which spread the loss a little more. It need not be enough: `charged`
    # turns whatever lies beyond the window into infinite loss.
    return 1.15 * min(*bounds, dimension * width)


def _step(atoms: Atoms, largest_loss: float, dimension: int) -> float:
    """The grid step for a window from -largest_loss to largest_loss."""
    fraction, width = GRID_FRACTION * max(1.0, dimension / 1e6) ** 0.25, 2 * largest_loss
    # One coordinate needs no transform, so a finer grid costs little.
    fine = FINE_POINTS if dimension > 1 else 4 * FINE_POINTS
    step = float(max(min(fraction * atoms.loss_deviation, width / fine), width / MOST_POINTS))
    return through_the_ends(step, atoms) if dimension == 1 else step


def through_the_ends(step: float, atoms: Atoms) -> float:
    """The step, shortened so that the largest loss is a grid point: epsilon at a small delta is then next to exact.

    Laws with a largest loss that is likely, such as the geometric, have all they can lose there.
    """
    top = max(-float(atoms.loss[0]), float(atoms.loss[-1]))
    # A little above the top: rounding must not put the largest loss beyond the grid point meant for it.
    return top * (1 + 1e-15) / math.ceil(top / step) if 0 < step < top else step


def _coordinate_pairs(noise: NoiseLaw, shift: float, dimension: int) -> tuple[tuple[Pair, Pair, Pair], int]:
    """The grid pairs A, B and E of one coordinate, and the half h of the window -h .. h of points for d coordinates."""
    atoms = coordinate_atoms(noise, shift)
    if atoms.loss.size == 0 or atoms.loss_deviation == 0:
        raise AccountingError(f"with {noise}, neighbours {shift} steps apart have no outcome in common")
    largest_loss = _largest_loss(atoms, dimension)
    step = _step(atoms, largest_loss, dimension)
    a = atoms.on_grid(step)
    b = a.reversed()
    return (a, b, envelope(a, b)), int(np.ceil(largest_loss / step)) + 2


def _log_transform(pair: Pair, points: int, dimension: int) -> Complexes:
    """log of the characteristic function of the P-law at the frequencies 2 pi k / points.

    A transform has an error of 1e-16, which the d-th power with d = 10^8 turns into 1e-8. So the few low frequencies
    that survive that power are summed again as sum p (e^(i w l) - 1), which is exact relative to its own small size.
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
    small = modulus < 0.5  # there the log1p above cancels: a modulus of 1e-9 would be off by 1e-8
    size[small] = np.log(np.maximum(modulus[small], 1e-300))
    result: Complexes = np.maximum(size, -700.0) + 1j * np.angle(1.0 + less_one)
    return result


def _blocks(dimension: int) -> list[tuple[int, int]]:
    """Blocks (k1, k2) that cover 0..d, symmetric under k -> d - k: the mirror image of a block is a block."""
    if dimension < BLOCKS:
        return [(k, k) for k in range(dimension + 1)]
    cuts = [round(dimension * j / BLOCKS) for j in range(BLOCKS // 2 + 1)]
    cuts += [dimension - c for c in reversed(cuts[:-1])]
    return list(itertools.pairwise(cuts))


def shortened(noise: NoiseLaw, shift: float, dimension: int) -> float:
    """The shift, reduced by what the grid adds to the standard deviation of the loss; used for lower bounds.

    Splitting an atom adds at most a quarter of the squared step to the variance of the loss, and the variance grows as
    the square of the shift.
    """
    atoms = coordinate_atoms(noise, shift)
    if atoms.loss.size == 0 or atoms.loss_deviation == 0:
        return shift
    step = _step(atoms, _largest_loss(atoms, dimension), dimension)
    return shift * (1 - min((step / atoms.loss_deviation) ** 2 / 8, 0.5))


@lru_cache(maxsize=16)
def message_pair(noise: NoiseLaw, shift: float, dimension: int, *, attained: bool = False) -> Pair:
    """The pair that dominates one message of `dimension` coordinates, each moved by at most `shift` steps (Claim 2).

    With `attained` it is A^d, the pair of particular data: what is accounted from it is a lower bound on the truth, as
    far as the grid resolves (see `shortened`). It is also quick.
    """
    edge = coordinate_atoms(noise, shift).p_only
    if edge == 1 or dimension * np.log1p(-edge) < np.log(NOTHING_HIDDEN):
        return Pair(step=1.0, first=0, major=np.zeros(1), p_only=1.0, q_only=1.0)
    pairs, half = _coordinate_pairs(noise, shift, dimension)
    # The claims are proven for a symmetric law, and the sampler's is not quite ("The mechanism and its law").
    uneven = 4 * dimension * mirror_distance(noise)
    if dimension == 1:
        one, other = (charged(pair, uneven) for pair in pairs[:2])
        return one if attained else envelope(one, other)
    points = fft.next_fast_len(2 * half, real=True)
    logs = [_log_transform(pair, points, dimension) for pair in pairs]

    def upper_half(k1: int, k2: int) -> Floats:
        """P-mass at losses 0, step, 2 step, ... of A^k1 B^(d-k2) E^(k2-k1)."""
        power = k1 * logs[0] + (dimension - k2) * logs[1] + (k2 - k1) * logs[2]
        mass: Floats = fft.irfft(np.conj(np.exp(power)), points)[:half]
        return np.maximum(mass, 0.0)  # the transform leaves -1e-17 where there is nothing; FLOAT_CHARGE pays for it

    halves: dict[tuple[int, int], Floats] = {}

    def block_pair(k1: int, k2: int) -> Pair:
        """P-masses at losses >= 0 and Q-masses below; the latter are the P-masses of the mirrored block."""
        for block in ((k1, k2), (dimension - k2, dimension - k1)):
            if block not in halves:
                halves[block] = upper_half(*block)
        above, below = halves[k1, k2], halves[dimension - k2, dimension - k1]
        counts = (k1, dimension - k2, k2 - k1)
        p_only = -np.expm1(sum(n * np.log1p(-pair.p_only) for n, pair in zip(counts, pairs, strict=True)))
        q_only = -np.expm1(sum(n * np.log1p(-pair.q_only) for n, pair in zip(counts, pairs, strict=True)))
        major = np.concatenate([below[:0:-1], above])
        return charged(Pair(step=pairs[0].step, first=1 - half, major=major, p_only=p_only, q_only=q_only), uneven)

    if attained:
        return block_pair(dimension, dimension)
    return reduce(envelope, (block_pair(k1, k2) for k1, k2 in _blocks(dimension)))
