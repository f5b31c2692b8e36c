"""The search for the mechanism of least error whose proven total epsilon is within the budget.

For a given s the error grows with m and epsilon falls with it, so only the smallest m that meets the budget matters.
It is found between an m that fails and one that holds, so the answer always lies on the private side. Along these
(s, m) the error falls as s grows, apart from integer effects. So the search starts at the largest s whose m still fits
the bits and goes down through those that could still win. Its first guess is what a Gaussian would be allowed in the
limit of many rounds (Bu et al. 2020); the accountant decides.

With few bits 2s + m + 1 <= 2^b leaves so few trials that the ends of the binomial weigh far more than delta. But
whatever is computed from noised codes costs no privacy (docs/accounting.md). So privacy is planned with 8 bits or more,
and the window of the coarsening is chosen for the error alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from scipy.special import ndtr

from bqsgd.errors import Infeasible
from bqsgd.mechanism.coarsening import noise_to_signal
from bqsgd.mechanism.properties import noise_variance
from bqsgd.params import Coarsening, Mechanism
from bqsgd.planner.plan import MAX_BITS, Budget, ClientSetting, Plan
from bqsgd.planner.time_limit import check_time
from bqsgd.privacy.accountant import Accountant
from bqsgd.privacy.guarantee import as_given, rounded_up
from bqsgd.release import Release

_LEAST_FINE_BITS = 8
"""A mechanism that will be coarsened is planned with at least this many bits; more gain next to nothing."""
_TRIED = 32
"""How many widths are tried across the remaining range, until every one in it can be tried."""


def _fine_bits(needed: int) -> int:
    """Bits of the mechanism before coarsening: the first of 8, 10, 12, ... that is enough."""
    return max(_LEAST_FINE_BITS, needed + needed % 2)


def largest_reach(bits: int) -> float:
    """The largest |value| in units of C that a code may stand for under a budget of `bits`, coarsened or not.

    At one level, b bits reach (2^b - 1) / 2. A coarsened mechanism reaches no further than 8 bits would.
    """
    return ((1 << max(bits, _LEAST_FINE_BITS)) - 1) / 2


def coarsened(fine: Mechanism, *, bits: int) -> Mechanism:
    """`fine` with 2^bits points over the window of least `noise_to_signal`; `fine` itself if its codes fit already.

    >>> coarsened(Mechanism(levels=10, trials=189), bits=4).coarsening
    Coarsening(points=16, width=45)
    """
    points = 2**bits
    if fine.code_count <= points:
        return fine

    def at(width: int) -> Mechanism:
        coarsening = Coarsening(points=points, width=width)
        return Mechanism(levels=fine.levels, trials=fine.trials, coarsening=coarsening)

    low, high = 1, min(fine.code_count - 1, int(2 * largest_reach(bits) * fine.levels))
    while True:  # as the width grows the noise falls, then rises, apart from integer effects
        stride = max(1, (high - low) // _TRIED)
        best = min(range(low, high + 1, stride), key=lambda width: noise_to_signal(at(width)))
        if stride == 1:
            return at(best)
        low, high = max(low, best - 2 * stride), min(high, best + 2 * stride)


_MakeRelease = Callable[[Mechanism], Release]
_MARGIN = 0.999
"""Fewer levels need at least as many trials per level squared as more do; this share allows for what is not proven."""


class TooFewBits(Infeasible):
    """No mechanism fits the bits without coarsening; `needed` bits would do (None: more than MAX_BITS)."""

    def __init__(self, message: str, needed: int | None) -> None:
        super().__init__(message)
        self.needed = needed


def make_plan(budget: Budget, setting: ClientSetting, *, rounds: int) -> Plan:
    """Plan `rounds` rounds of one client; budget.epsilon and budget.delta are totals over all of them.

    Raises:
        Infeasible: no mechanism meets the budget; the message names the nearest that one can.
    """
    mechanism = least_error_mechanism(budget, setting.release, rounds=rounds)
    release = setting.release(mechanism)
    return Plan(
        budget=budget,
        release=release,
        rounds=rounds,
        variance=noise_variance(mechanism),
        guarantee=Accountant().compose(release, rounds).guarantee(delta=budget.delta),
    )


def least_error_mechanism(
    budget: Budget, make_release: _MakeRelease, *, rounds: int, spent: Accountant | None = None
) -> Mechanism:
    """The mechanism of least error whose proven epsilon of (`spent`, then `rounds` of the release) is within budget.

    From 8 bits on it is the one of smallest V with 2s + m + 1 <= 2^b. With fewer bits, or where none fits, one that
    takes more bits is coarsened to 2^b points: with its many levels it has less noise to signal than the few levels
    that would fit, if any do.

    Raises:
        Infeasible: even MAX_BITS bits do not reach the epsilon, so there is nothing to coarsen either.
    """

    def fine(bits: int) -> Mechanism:
        return least_error_uncoarsened(replace(budget, bits=bits), make_release, rounds=rounds, spent=spent)

    try:
        found = fine(max(budget.bits, _LEAST_FINE_BITS))
    except TooFewBits as error:
        if error.needed is None:
            raise
        found = fine(_fine_bits(error.needed))
    return coarsened(found, bits=budget.bits)


def total_shift(budget: Budget) -> float:
    """mu: two unit Gaussians this far apart have delta = budget.delta at budget.epsilon. A first guess only."""
    from scipy.optimize import brentq  # here: a client's process rarely needs it, and it is slow to import

    def delta_of(mu: float) -> float:
        eps = budget.epsilon
        return float(ndtr(mu / 2 - eps / mu) - math.exp(min(eps, 700)) * ndtr(-mu / 2 - eps / mu))

    return float(brentq(lambda mu: delta_of(mu) - budget.delta, 1e-6, 200.0))


def shift_per_round(budget: Budget, *, rate: float, rounds: int) -> float:
    """The shift in deviations that one of T rounds may make: sqrt(log(1 + mu^2 / (q^2 T))), q the sampling rate."""
    return math.sqrt(math.log1p(total_shift(budget) ** 2 / (rate**2 * rounds)))


def least_error_uncoarsened(
    budget: Budget, make_release: _MakeRelease, *, rounds: int, spent: Accountant | None = None
) -> Mechanism:
    """Smallest V with 2s + m + 1 <= 2^b and proven epsilon of (`spent`, then `rounds` of the release) <= budget.

    Raises:
        Infeasible: naming what the bits can reach and how many bits the epsilon needs.
    """
    base = spent or Accountant()
    top = 2**budget.bits - 1

    def after(levels: int, trials: int) -> Accountant:
        check_time()
        return base.compose(make_release(Mechanism(levels=levels, trials=trials)), rounds)

    def proven(levels: int, trials: int) -> float:
        return after(levels, trials).epsilon(budget.delta)

    def attained(levels: int, trials: int) -> float:
        return after(levels, trials).attained_epsilon(budget.delta)

    def least_trials(levels: int, guess: float, cap: int) -> int | None:
        """The lower bound (quick without an L2 bound) rules out what surely fails; the proven figure decides."""
        failing, guess = 0, min(guess, cap)
        if probe.sensitivity.l2 is None and attained(levels, max(1, round(guess))) > 0:
            quick = _least_trials(attained, levels, guess, budget.epsilon, cap=cap)
            if quick is None:
                return None
            failing, guess = quick - 1, quick
        return _least_trials(proven, levels, guess, budget.epsilon, cap=cap, failing=failing)

    probe = make_release(Mechanism(levels=1, trials=1))
    ratio = max(1.0, 4 * probe.shift_l2**2 / shift_per_round(budget, rate=probe.sampling.rate, rounds=rounds) ** 2)
    found: dict[int, int] = {}
    levels = _largest_levels(ratio, top)
    for _ in range(2):  # trials per level squared, first guessed, then measured
        trials = least_trials(levels, ratio * levels**2, 1 << MAX_BITS)
        if trials is None:
            raise _too_few_bits(proven, budget, None)
        if 2 * levels + trials <= top:
            found[levels] = trials
        ratio = trials / levels**2
        levels = _largest_levels(ratio, top)

    def try_levels(s: int) -> bool:
        trials = found.get(s) or least_trials(s, min(ratio * s**2, top - 2 * s), top - 2 * s)
        if trials is not None:
            found[s] = trials
        return trials is not None

    above = max(levels, *found, 1)
    while 2 * above < top and try_levels(above):  # whatever s + 1 levels can reach, s levels can
        above += 1
    for s in range(above - 1, 0, -1):
        if not found or _could_win(s, found):
            try_levels(s)
    if not found:
        raise _too_few_bits(proven, budget, least_trials(1, ratio, 1 << MAX_BITS))
    best = min(found, key=lambda s: noise_variance(Mechanism(levels=s, trials=found[s])))
    return Mechanism(levels=best, trials=found[best])


def _largest_levels(ratio: float, top: int) -> int:
    """The largest s with ratio s^2 + 2 s <= 2^b - 1."""
    return max(1, min(math.floor((math.sqrt(1 + ratio * top) - 1) / ratio), (top - 1) // 2))


def _could_win(levels: int, found: dict[int, int]) -> bool:
    """Whether `levels` with the fewest trials they can need would beat the best mechanism found."""
    best = min(noise_variance(Mechanism(levels=s, trials=m)) for s, m in found.items())
    larger = [(m - 1) / s**2 for s, m in found.items() if s >= levels]
    if not larger:
        return True
    fewest = max(larger) * _MARGIN
    return noise_variance(Mechanism(levels=levels, trials=max(1, math.ceil(fewest * levels**2)))) < best


def _least_trials(
    epsilon: Callable[[int, int], float], levels: int, guess: float, target: float, *, cap: int, failing: int = 0
) -> int | None:
    """The smallest m in (failing, cap] with epsilon(levels, m) <= target, from a guess; None if even `cap` fails.

    Keeps `low` failing and `high` holding, and steps by the local power law epsilon ~ m^-k to need few calls.
    """
    low, high = failing, cap + 1  # cap + 1 stands for "not known to hold"
    m = min(max(low + 1, round(guess)), cap)
    power, last = 0.6, None
    while high - low > 1:
        figure = epsilon(levels, m)
        if figure <= target:
            high = m
        else:
            low = m
        if last and 0 < figure < math.inf and 0 < last[1] < math.inf and figure != last[1] and m != last[0]:
            power = min(3.0, max(0.01, -math.log(figure / last[1]) / math.log(m / last[0])))
        last = (m, figure)
        wanted = 2.0 * m if figure == math.inf else m * min(8.0, (figure / target) ** (1 / power))
        m = min(max(math.ceil(min(wanted, 2.0**40)), low + 1), high - 1)
    return high if high <= cap else None


def _too_few_bits(epsilon: Callable[[int, int], float], budget: Budget, trials: int | None) -> TooFewBits:
    """The error that says what the bits can reach and what the epsilon needs: `trials` at one level, or too many."""
    bits = budget.bits if trials is not None else MAX_BITS
    least = epsilon(1, 2**bits - 3)
    reach = f"epsilon >= {rounded_up(least, 3)}" if math.isfinite(least) else "no finite epsilon"
    needed = None if trials is None else (trials + 2).bit_length()
    needs = f"more than {MAX_BITS} bits before coarsening" if needed is None else f"{needed} bits"
    return TooFewBits(
        f"{bits} bits reach {reach}; epsilon {as_given(budget.epsilon)} needs {needs} "
        f"(proven total at delta {budget.delta:g}); use a larger batch, fewer rounds or a wider range",
        needed,
    )
