"""Rounds: messages sampled, composed one after another, and the two queries. Convolution is dp-accounting's.

The record is sampled for a whole message's pair, never coordinate by coordinate: that under-reports. With rate g it
takes part with probability g. "Remove" compares (1 - g) Q + g P with Q, "add" is its reverse; both depend on (P, Q)
only through its hockey-stick curve, monotonely, so a dominating pair stays dominating (docs/accounting.md, Claim 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from bqsgd.errors import AccountingError
from bqsgd.noise import ROUNDING_SLACK_STEPS
from bqsgd.privacy._message import NOTHING_HIDDEN, coordinate_atoms, message_pair, shortened
from bqsgd.privacy._pairs import FLOAT_CHARGE, MASS_TOLERANCE, Floats, Pair, on_grid
from bqsgd.privacy._shapes import shaped_pair
from bqsgd.privacy.guarantee import MEANINGLESS_EPSILON
from bqsgd.release import Release, Scheme, Spent

SPARE = 1e-13
"""Mass that only one law has, so small that it is the charge for float error and not a property of the mechanism."""
TRIM = 1e-16
"""P-mass of the far upper tail that becomes infinite loss rather than stretching the grid."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Atoms of a sampled message under "remove": losses ascending, `major` as in Pair."""

    loss: Floats
    major: Floats
    p_only: float
    q_only: float

    @property
    def loss_deviation(self) -> float:
        """Standard deviation of the finite loss under P."""
        p = self.major * np.exp(np.minimum(self.loss, 0))
        mean = float(p @ self.loss)
        return float(np.sqrt(max(0.0, float(p @ (self.loss - mean) ** 2))))

    def on_grid(self, step: float) -> Pair:
        """Connect the dots at the given step."""
        return on_grid(self.loss, self.major, step=step, p_only=self.p_only, q_only=self.q_only)


def _trimmed(loss: Floats, major: Floats, p_only: float, q_only: float) -> Sampled:
    """Drop empty grid points, and turn the far tails into infinite loss: above 0 P-mass, below 0 Q-mass."""
    beyond = np.cumsum(major[::-1])[::-1]
    before = np.cumsum(major)
    high, low = (beyond <= TRIM) & (loss > 0), (before <= TRIM) & (loss < 0)
    p_only, q_only = p_only + float(major[high].sum()), q_only + float(major[low].sum())
    kept = ~high & ~low & (major > 0)
    return Sampled(loss=loss[kept], major=major[kept], p_only=p_only, q_only=q_only)


def poisson(pair: Pair, rate: float) -> Sampled:
    """(1 - g) Q + g P against Q: a loss l becomes log(1 + g (e^l - 1)), the Q-mass stays."""
    loss, q = pair.loss, pair.q
    if rate == 1.0:
        return _trimmed(loss, pair.major, pair.p_only, pair.q_only)
    mild = np.minimum(loss, 30.0)
    sampled = np.where(loss > 30.0, loss + np.log(rate), np.log1p(rate * np.expm1(mild)))
    sampled = np.where(loss > 30.0, np.logaddexp(np.log1p(-rate), loss + np.log(rate)), sampled)
    major = np.where(loss < 0, pair.major, (1.0 - rate) * q + rate * pair.major)
    # What only Q has is seen with loss log(1 - g) once the record may be absent. Where that is float error far below
    # every other loss, taking its mass as infinite loss on either side costs less than a grid that reaches it.
    if pair.q_only <= SPARE and sampled.size and np.log1p(-rate) < 2 * sampled[0] - sampled[-1]:
        return _trimmed(sampled, major, rate * pair.p_only + (1.0 - rate) * pair.q_only, pair.q_only)
    loss = np.concatenate([[np.log1p(-rate)], sampled])
    major = np.concatenate([[pair.q_only], major])
    return _trimmed(loss, major, rate * pair.p_only, 0.0)


def fixed_size(pair: Pair, rate: float) -> Sampled:
    """Batches without replacement under replace-one: H at 1 + g (e^e - 1) is at most g H_e for e >= 0, symmetric below.

    The curve above 0 is that of `poisson`; below 0 it is its mirror image; loss 0 takes the remaining mass.
    """
    half = poisson(pair, rate)
    above = half.loss > 0
    loss, major = half.loss[above], half.major[above]
    rest = 1.0 - float(major.sum()) - half.p_only - float((major * np.exp(-loss)).sum())
    return Sampled(
        loss=np.concatenate([-loss[::-1], [0.0], loss]),
        major=np.concatenate([major[::-1], [max(0.0, rest)], major]),
        p_only=half.p_only,
        q_only=half.p_only,
    )


Law: TypeAlias = Any  # pld_pmf.DensePLDPmf, which carries no types
GRID_FRACTION = 0.01
FINE_POINTS, MOST_POINTS = 1 << 17, 1 << 20
"""The grid has at least FINE_POINTS over the losses that matter; above MOST_POINTS it is made coarser, which is
pessimistic but keeps time and memory bounded (from some 10^6 rounds on)."""
MANY_ROUNDS = 1 << 16
TAIL = 1e-15
L2_BINDS = 0.99
"""Share of sqrt(d) times the L-infinity bound above which an L2 bound gains less than its route costs."""


def l2_binds(release: Release) -> bool:
    """True where the L2 bound is short enough to be worth a route of its own."""
    return release.shift_l2 < L2_BINDS * math.sqrt(release.dimension) * release.shift


def homogeneous(release: Release, spread: int = 1) -> tuple[float, int]:
    """(shift, coordinates) of allowed data: the whole norm on `spread` times the fewest coordinates, all alike.

    Without an L2 bound every coordinate moves by the largest shift.
    """
    if release.shift_l2 == math.sqrt(release.dimension) * release.shift:
        return release.shift, release.dimension
    fewest = math.ceil((release.shift_l2 / release.shift) ** 2 * (1 - 1e-12))
    copies = min(release.dimension, spread * max(1, fewest))
    return min(release.shift, release.shift_l2 / math.sqrt(copies)), copies


@lru_cache(maxsize=32)
def sampled_message(release: Release, *, attained: int = 0) -> Sampled:
    """The pair of one sampled message of a release, "remove" order.

    It dominates whatever the data are. With `attained` it is that of data whose norm is spread over so many times the
    fewest coordinates, all alike: what is accounted from it is a lower bound on the truth.
    """
    trials, dimension = release.mechanism.trials, release.dimension
    largest = release.shift + ROUNDING_SLACK_STEPS
    if attained:
        shift, copies = homogeneous(release, attained)
        pair = message_pair(trials, shortened(trials, shift, copies), copies, attained=True)
    elif l2_binds(release):
        length = release.shift_l2 + math.sqrt(dimension) * ROUNDING_SLACK_STEPS
        pair = shaped_pair(trials, largest, length, dimension)
    else:
        pair = message_pair(trials, largest, dimension)
    # The symmetric curve of fixed-size batches is a bound; data attain its "remove" and "add" halves one at a time.
    if release.sampling.scheme is Scheme.FIXED_SIZE and not attained:
        return fixed_size(pair, release.sampling.rate)
    return poisson(pair, release.sampling.rate)


def beyond_meaning(release: Release, rounds: int = 1, delta: float = 0.0) -> bool:
    """True when a cheap look shows that epsilon at `delta` is above MEANINGLESS_EPSILON: no effort is spent then.

    A message in which the record moves n coordinates has a loss of mean n KL and variance n Var; unless being drawn is
    too rare to matter at `delta`, epsilon exceeds (mean - 10 deviations + log rate), and is infinite when outcomes that
    only one of two neighbours can produce are likelier than delta.
    """
    if release.mechanism.trials == 0:
        return True
    shift, copies = homogeneous(release)
    atoms = coordinate_atoms(release.mechanism.trials, shift + ROUNDING_SLACK_STEPS)
    if atoms.loss.size == 0:
        return True
    drawn = -math.expm1(rounds * math.log1p(-release.sampling.rate)) if release.sampling.rate < 1 else 1.0
    if drawn <= 2 * delta:
        return False
    mean = copies * float(atoms.p @ atoms.loss)
    deviation = math.sqrt(copies) * atoms.loss_deviation
    if mean - 10 * deviation + math.log(release.sampling.rate) > MEANINGLESS_EPSILON:
        return True
    if release.sampling.rate == 1 and rounds * mean - 10 * math.sqrt(rounds) * deviation > MEANINGLESS_EPSILON:
        return True
    revealed = -math.expm1(copies * math.log1p(-min(atoms.p_only, 0.5)))
    if release.sampling.rate == 1 and revealed > 1 - NOTHING_HIDDEN:
        return True
    return delta > 0 and drawn * revealed > 2 * delta


def _dense(pair: Pair) -> Any:
    from dp_accounting.pld import pld_pmf  # here: it takes a second to import, which most processes never need

    return pld_pmf.DensePLDPmf(pair.step, pair.first, pair.p, min(1.0, pair.p_only + FLOAT_CHARGE), True)


def _check_window(mass: Floats, rounds: int) -> None:
    """Refuse what dp-accounting would need too large a window for; it widens with the rounds, not with their root."""
    from dp_accounting.pld import common

    if rounds > MANY_ROUNDS:
        low, high = common.compute_self_convolve_bounds(mass, rounds, TAIL)
        if high - low > 4 * MOST_POINTS:
            raise AccountingError(f"{rounds} rounds are too many to compose as privacy loss distributions")


def _composed(parts: Sequence[tuple[Pair, int]]) -> Any:
    total: Any = None
    try:
        for pair, rounds in parts:
            one = _dense(pair)
            _check_window(pair.p, rounds)
            many = one if rounds == 1 else one.self_compose(rounds, TAIL)
            total = many if total is None else total.compose(many, TAIL)
    except (ArithmeticError, IndexError, ValueError) as error:  # a law with hardly any finite loss left, an overflow
        raise AccountingError(f"the privacy loss distributions could not be composed: {error}") from error
    if total is None:
        raise AccountingError("nothing to compose")
    mass = float(np.sum(total._probs)) + total._infinity_mass
    if not abs(mass - 1.0) <= MASS_TOLERANCE * max(1, sum(rounds for _, rounds in parts)):
        raise AccountingError(f"the composed privacy loss distribution weighs {mass!r}, not 1")
    return total


@lru_cache(maxsize=16)
def composed(spent: Spent, *, attained: int = 0) -> tuple[Law, Law]:
    """The privacy loss distributions of everything spent: "remove" and "add" (one and the same under replace-one)."""
    messages = [(sampled_message(release, attained=attained), rounds) for release, rounds in spent]
    if any(message.loss.size == 0 for message, _ in messages):
        raise AccountingError("neighbours have no message in common")
    count = sum(rounds for _, rounds in messages)
    variance = sum(rounds * message.loss_deviation**2 for message, rounds in messages)
    reach = sum(rounds * max(-float(x.loss[0]), float(x.loss[-1])) for x, rounds in messages)
    spread = min(2 * reach, 24 * math.sqrt(variance) + 2 * max(float(x.loss[-1]) for x, _ in messages))
    step = min(GRID_FRACTION * math.sqrt(variance / count), spread / FINE_POINTS)
    extent = max(float(x.loss[-1] - x.loss[0]) for x, _ in messages)
    step = max(step, (24 * math.sqrt(variance) + extent) / MOST_POINTS) or 1.0  # 0: every loss is 0, on any grid
    grids = [(message.on_grid(step), rounds) for message, rounds in messages]
    remove = _composed(grids)
    if not attained and all(release.sampling.scheme is Scheme.FIXED_SIZE for release, _ in spent):
        return remove, remove
    return remove, _composed([(pair.reversed(), rounds) for pair, rounds in grids])
