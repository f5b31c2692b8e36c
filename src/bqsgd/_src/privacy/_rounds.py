"""Rounds: sample each message, then compose the messages (Claim 3 in docs/accounting.md).

A record takes part in a whole message or not at all, so sampling acts on the pair of the message. Sampling coordinate
by coordinate and composing afterwards would report too small an epsilon. With rate g, "remove" compares (1 - g) Q + g P
with Q, and "add" is the reverse. The curves of both grow with the curve of (P, Q), so a dominating pair stays
dominating. Convolution and the conversion to epsilon are done by dp-accounting.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from bqsgd._src.errors import AccountingError
from bqsgd._src.noise import ROUNDING_SLACK_STEPS
from bqsgd._src.privacy import _events
from bqsgd._src.privacy._message import NOTHING_HIDDEN, coordinate_atoms, message_pair, shortened, through_the_ends
from bqsgd._src.privacy._pairs import FLOAT_CHARGE, MASS_TOLERANCE, Atoms, Floats, Pair
from bqsgd._src.privacy._shapes import shaped_pair
from bqsgd._src.privacy.guarantee import MEANINGLESS_EPSILON
from bqsgd._src.release import Release, Scheme, Spent

SPARE = 1e-13
"""Mass of one law only that is so small that it comes from the charge for float error, not from the mechanism."""
TRIM = 1e-16
"""Mass of the far tails that becomes infinite loss, so that the grid need not reach them."""


def _trimmed(loss: Floats, major: Floats, p_only: float, q_only: float) -> Atoms:
    """The atoms of a sampled message under "remove"; `major` as in `Pair`.

    Empty grid points are dropped, and the far tails become infinite loss (P-mass above 0, Q-mass below).
    """
    beyond = np.cumsum(major[::-1])[::-1]
    before = np.cumsum(major)
    high, low = (beyond <= TRIM) & (loss > 0), (before <= TRIM) & (loss < 0)
    p_only, q_only = p_only + float(major[high].sum()), q_only + float(major[low].sum())
    kept = ~high & ~low & (major > 0)
    loss, major = loss[kept], major[kept]
    p, q = major * np.exp(np.minimum(loss, 0)), major * np.exp(-np.maximum(loss, 0))
    return Atoms(loss=loss, p=p, q=q, p_only=p_only, q_only=q_only)


def poisson(pair: Pair, rate: float) -> Atoms:
    """(1 - g) Q + g P against Q: a loss l becomes log(1 + g (e^l - 1)), and the Q-masses stay."""
    loss, q = pair.loss, pair.q
    if rate == 1.0:
        return _trimmed(loss, pair.major, pair.p_only, pair.q_only)
    mild = np.minimum(loss, 30.0)  # expm1 would overflow beyond 700; from 30 on the other form is as exact
    sampled = np.where(loss > 30.0, np.logaddexp(np.log1p(-rate), loss + np.log(rate)), np.log1p(rate * np.expm1(mild)))
    major = np.where(loss < 0, pair.major, (1.0 - rate) * q + rate * pair.major)
    # Outcomes that only Q has get loss log(1 - g), because the record may be absent. If their mass is mere float error
    # and that loss lies far below all others, a grid that reaches it would be coarse: count the mass as infinite loss
    # in both directions instead.
    if pair.q_only <= SPARE and sampled.size and np.log1p(-rate) < 2 * sampled[0] - sampled[-1]:
        return _trimmed(sampled, major, rate * pair.p_only + (1.0 - rate) * pair.q_only, pair.q_only)
    loss = np.concatenate([[np.log1p(-rate)], sampled])
    major = np.concatenate([[pair.q_only], major])
    return _trimmed(loss, major, rate * pair.p_only, 0.0)


def fixed_size(pair: Pair, rate: float) -> Atoms:
    """Batches without replacement under replace-one: H at 1 + g (e^e - 1) is at most g H_e for e >= 0, symmetric below.

    The curve above loss 0 is that of `poisson`, below 0 its mirror image, and loss 0 takes the remaining mass.
    """
    half = poisson(pair, rate)
    above = half.loss > 0
    loss, p, q = half.loss[above], half.p[above], half.q[above]
    middle = [max(0.0, 1.0 - float(p.sum()) - half.p_only - float(q.sum()))]
    return Atoms(
        loss=np.concatenate([-loss[::-1], [0.0], loss]),
        p=np.concatenate([q[::-1], middle, p]),
        q=np.concatenate([p[::-1], middle, q]),
        p_only=half.p_only,
        q_only=half.p_only,
    )


Law: TypeAlias = Any  # pld_pmf.DensePLDPmf, which carries no types
GRID_FRACTION = 0.01
"""Largest grid step, in standard deviations of the loss of one round."""
FINE_POINTS, MOST_POINTS = 1 << 17, 1 << 20
"""Fewest points of the grid over the losses that matter, and most. Above MOST_POINTS (from some 10^6 rounds on) the
grid is made coarser, which raises epsilon but bounds time and memory."""
MANY_ROUNDS = 1 << 16
"""With more rounds than this, the window that dp-accounting would allocate is checked first."""
TAIL = 1e-15
"""Mass that a composition may cut off at the ends; dp-accounting turns it into infinite loss."""
L2_BINDS = 0.99
"""An L2 bound above this fraction of sqrt(d) times the L-infinity bound gains less than its route costs."""


def l2_binds(release: Release) -> bool:
    """Whether the L2 bound is small enough, beside the L-infinity bound, to be worth using (Claim 10)."""
    return release.shift_l2 < L2_BINDS * math.sqrt(release.terms.dimension) * release.shift


def homogeneous(release: Release, spread: int = 1) -> tuple[float, int]:
    """(shift, coordinates) of data that the bounds allow: equal shifts on `spread` times the fewest coordinates.

    The shifts use up the whole L2 norm. Without an L2 bound every coordinate moves by the largest shift.
    """
    if release.shift_l2 == math.sqrt(release.terms.dimension) * release.shift:
        return release.shift, release.terms.dimension
    fewest = math.ceil((release.shift_l2 / release.shift) ** 2 * (1 - 1e-12))
    copies = min(release.terms.dimension, spread * max(1, fewest))
    return min(release.shift, release.shift_l2 / math.sqrt(copies)), copies


@lru_cache(maxsize=32)
def sampled_message(release: Release, *, attained: int = 0) -> Atoms:
    """The pair of one sampled message of a release, in the order "remove". It dominates whatever the data are.

    With `attained` it is instead the pair of the data that `homogeneous` describes with that spread: what is accounted
    from it is a lower bound on the truth.
    """
    noise, dimension = release.mechanism.law, release.terms.dimension
    largest = release.shift + ROUNDING_SLACK_STEPS
    if attained:
        shift, copies = homogeneous(release, attained)
        pair = message_pair(noise, shortened(noise, shift, copies), copies, attained=True)
    elif l2_binds(release):
        length = release.shift_l2 + math.sqrt(dimension) * ROUNDING_SLACK_STEPS
        pair = shaped_pair(noise, largest, length, dimension)
    else:
        pair = message_pair(noise, largest, dimension)
    # The symmetric curve of fixed-size batches is an upper bound; data attain one half of it at a time. So the lower
    # bound composes "remove" and "add" as for Poisson sampling.
    if release.terms.sampling.scheme is Scheme.FIXED_SIZE and not attained:
        return fixed_size(pair, release.terms.sampling.rate)
    return poisson(pair, release.terms.sampling.rate)


def beyond_meaning(release: Release, rounds: int = 1, delta: float = 0.0) -> bool:
    """Whether a quick estimate shows that epsilon at `delta` exceeds MEANINGLESS_EPSILON; it is then not computed.

    If the record moves n coordinates, the loss has mean n KL and variance n Var, and epsilon exceeds
    mean - 10 deviations + log rate, unless the record is drawn too rarely to matter at `delta`. If outcomes that only
    one neighbour can produce are likelier than delta, epsilon is infinite.
    """
    if release.event is not None:  # which is bounded by itself (`events`)
        return False
    if release.mechanism.trials == 0:
        return True
    shift, copies = homogeneous(release)
    atoms = coordinate_atoms(release.mechanism.law, shift + ROUNDING_SLACK_STEPS)
    if atoms.loss.size == 0:
        return True
    drawn = -math.expm1(rounds * math.log1p(-release.terms.sampling.rate)) if release.terms.sampling.rate < 1 else 1.0
    if drawn <= 2 * delta:
        return False
    mean = copies * float(atoms.p @ atoms.loss)
    deviation = math.sqrt(copies) * atoms.loss_deviation
    if mean - 10 * deviation + math.log(release.terms.sampling.rate) > MEANINGLESS_EPSILON:
        return True
    if release.terms.sampling.rate == 1 and rounds * mean - 10 * math.sqrt(rounds) * deviation > MEANINGLESS_EPSILON:
        return True
    revealed = -math.expm1(copies * math.log1p(-min(atoms.p_only, 0.5)))
    if release.terms.sampling.rate == 1 and revealed > 1 - NOTHING_HIDDEN:
        return True
    return delta > 0 and drawn * revealed > 2 * delta


def _composed(parts: Sequence[tuple[Pair, int]]) -> Any:
    from dp_accounting.pld import common, pld_pmf  # imported here: it takes a second, and most processes never need it

    total: Any = None
    try:
        for pair, rounds in parts:
            one = pld_pmf.DensePLDPmf(pair.step, pair.first, pair.p, min(1.0, pair.p_only + FLOAT_CHARGE), True)
            if rounds > MANY_ROUNDS:
                # dp-accounting allocates a window that grows with the rounds, not with their square root. The rounds
                # come from the settings of a run, which must not exhaust a client's memory.
                low, high = common.compute_self_convolve_bounds(pair.p, rounds, TAIL)
                if high - low > 4 * MOST_POINTS:
                    raise AccountingError(f"{rounds} rounds are too many to compose as privacy loss distributions")
            many = one if rounds == 1 else one.self_compose(rounds, TAIL)
            total = many if total is None else total.compose(many, TAIL)
    except (ArithmeticError, IndexError, ValueError) as error:  # hardly any finite loss is left, or an overflow
        raise AccountingError(f"the privacy loss distributions could not be composed: {error}") from error
    if total is None:
        raise AccountingError("nothing to compose")
    # dp-accounting does not check this. Lost mass would be lost delta.
    mass = float(np.sum(total._probs)) + total._infinity_mass
    if not abs(mass - 1.0) <= MASS_TOLERANCE * max(1, sum(rounds for _, rounds in parts)):
        raise AccountingError(f"the composed privacy loss distribution weighs {mass!r}, not 1")
    return total


def _laws_of(events: tuple[Atoms, Atoms], step: float) -> tuple[Law, Law]:
    """Outside events on a grid with this step: "remove" and "add"."""
    from dp_accounting.pld import pld_pmf  # imported here, as in `_composed`

    remove, add = (
        pld_pmf.DensePLDPmf(step, pair.first, pair.p, min(1.0, pair.p_only + FLOAT_CHARGE), True)
        for pair in (one.on_grid(step) for one in events)
    )
    return remove, add


@lru_cache(maxsize=16)
def composed(spent: Spent, *, attained: int = 0) -> tuple[Law, Law]:
    """The privacy loss distributions of everything spent: "remove" and "add", which are equal for fixed-size batches.

    Raises:
        AccountingError: neighbours have no message in common, or the composition failed or would take too much memory.
    """
    own = tuple((release, rounds) for release, rounds in spent if release.event is None)
    if not own:
        events = _events.atoms(spent)
        return _laws_of(events, (float(events[0].loss[-1] - events[0].loss[0]) or 1.0) / FINE_POINTS)
    messages = [(sampled_message(release, attained=attained), rounds) for release, rounds in own]
    if any(message.loss.size == 0 for message, _ in messages):
        raise AccountingError("neighbours have no message in common")
    count = sum(rounds for _, rounds in messages)
    variance = sum(rounds * message.loss_deviation**2 for message, rounds in messages)
    reach = sum(rounds * max(-float(x.loss[0]), float(x.loss[-1])) for x, rounds in messages)
    # How far losses spread decides only how fine the grid is: twelve standard deviations on either side if there are
    # many rounds, and the largest loss of a message if there are few.
    spread = min(2 * reach, 24 * math.sqrt(variance) + 2 * max(float(x.loss[-1]) for x, _ in messages))
    # Fine beside the loss of one round, and beside all losses that matter; then not finer than memory allows.
    step = min(GRID_FRACTION * math.sqrt(variance / count), spread / FINE_POINTS)
    extent = max(float(x.loss[-1] - x.loss[0]) for x, _ in messages)
    step = max(step, (24 * math.sqrt(variance) + extent) / MOST_POINTS) or 1.0  # 0: all losses are 0, any step will do
    outside = _events.atoms(spent) if len(own) < len(spent) else None
    if outside is not None:
        step = max(step, max(float(one.loss[-1] - one.loss[0]) for one in outside) / MOST_POINTS)
    elif len(messages) == 1 and own[0][0].terms.dimension == 1:
        step = through_the_ends(step, messages[0][0])
    grids = [(message.on_grid(step), rounds) for message, rounds in messages]
    # dp-accounting tries orders that overflow, and skips them.
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        remove = add = _composed(grids)
        if attained or any(release.terms.sampling.scheme is not Scheme.FIXED_SIZE for release, _ in own):
            add = _composed([(pair.reversed(), rounds) for pair, rounds in grids])
        if outside is None:
            return remove, add
        events = _laws_of(outside, step)
        return remove.compose(events[0], 0), add.compose(events[1], 0)
