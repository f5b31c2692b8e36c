"""The search for the mechanism of least error whose proven total epsilon is within the budget.

For a given s the error grows with m and epsilon falls with it, so only the smallest m that meets the budget matters.
It is found between an m that fails and one that holds, so the answer always lies on the private side. Along these
(s, m) the error falls as s grows, apart from integer effects. So the search finds the largest s whose m still fits the
bits, and then tries those fewer levels for which m / s^2 may come out smaller. Its first guess is what a Gaussian would
be allowed in the limit of many rounds (Bu et al. 2020); the accountant decides.

An answer of the accountant takes from a tenth of a second to some seconds, so the search asks for few of them. Where
only the L-infinity bound is known, what data attain is a quick lower bound on epsilon: it finds the levels, and the
proven figure settles their trials.

With few bits 2s + m + 1 <= 2^b leaves so few trials that the ends of the binomial weigh far more than delta. But
whatever is computed from noised codes costs no privacy (docs/accounting.md). So privacy is planned with 8 bits or more,
and the window of the coarsening is chosen for the error alone.

The server sets a run, and a client plans it: `cpu_seconds` bounds the time that the client gives to it. The search
looks at the clock before each question to the accountant, whose own time and memory are bounded (docs/accounting.md,
Claim 6). So it ends at most one answer late.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import cache

from scipy.special import ndtr

from bqsgd.errors import AccountingError, BqsgdError, Infeasible
from bqsgd.mechanism.coarsening import noise_to_signal
from bqsgd.mechanism.properties import noise_variance
from bqsgd.params import Coarsening, Mechanism
from bqsgd.planner.plan import MAX_BITS, Budget, ClientSetting, Plan
from bqsgd.privacy.accountant import Accountant
from bqsgd.privacy.guarantee import as_given, rounded_up
from bqsgd.release import Release

LEAST_FINE_BITS = 8
"""A mechanism that will be coarsened is planned with at least this many bits; more gain next to nothing."""
_TRIED = 32
"""How many widths are tried across the remaining range, until every one in it can be tried."""
_limit: ContextVar[tuple[float, float] | None] = ContextVar("_limit", default=None)
"""(the process's CPU time at which planning must end, the seconds that were allowed)."""


class PlanningTooLong(BqsgdError, RuntimeError):
    """Planning took more CPU seconds than it was allowed; nothing was recorded."""


@contextmanager
def cpu_seconds(allowed: float | None) -> Iterator[None]:
    """Planning inside the block raises PlanningTooLong after so many CPU seconds; None allows any number."""
    token = _limit.set(None if allowed is None else (time.process_time() + allowed, allowed))
    try:
        yield
    finally:
        _limit.reset(token)


def check_time() -> None:
    """Raise where the time allowed is used up."""
    found = _limit.get()
    if found is not None and time.process_time() > found[0]:
        raise PlanningTooLong(f"planning takes more than the {found[1]:g} CPU seconds that this client allows")


def _fine_bits(needed: int) -> int:
    """Bits of the mechanism before coarsening: the first of 8, 10, 12, ... that is enough."""
    return max(LEAST_FINE_BITS, needed + needed % 2)


def largest_reach(bits: int) -> float:
    """The largest |value| in units of C that a code may stand for under a budget of `bits`, coarsened or not.

    At one level, b bits reach (2^b - 1) / 2. A coarsened mechanism reaches no further than 8 bits would.
    """
    return ((1 << max(bits, LEAST_FINE_BITS)) - 1) / 2


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
_Figure = Callable[[int, int], float]
"""(levels, trials) -> total epsilon."""
_ENOUGH_BITS = 12
"""Planning takes no more bits than these unless it must: 2,047 levels and 1,000 trials are within a thousandth of the
least error that any number of bits can have."""
_SHIFTS = 1e-9, 1e3
_WORTH_TRYING = 0.999
"""Other levels are tried where they may have less than this share of the error."""
_OTHER_LEVELS = 8
"""How many other levels are tried, the most promising first."""
_SETTLED = 3
"""How many levels below the quick search's own are tried where the proven figure is too large for it."""
_LAWFUL_CALLS = 12
"""How many steps a power law may take to the least trials; three to five are usual."""


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

    From 8 bits on it is the one of smallest V with 2s + m + 1 <= 2^b, to a few thousandths (see _ENOUGH_BITS). With
    fewer bits, or where none fits, one that takes more bits is coarsened to 2^b points: with its many levels it has
    less noise to signal than the few levels that would fit, if any do.

    Raises:
        Infeasible: even MAX_BITS bits do not reach the epsilon, so there is nothing to coarsen either.
    """

    def fine(bits: int) -> Mechanism:
        return least_error_uncoarsened(replace(budget, bits=bits), make_release, rounds=rounds, spent=spent)

    try:
        found = fine(min(max(budget.bits, LEAST_FINE_BITS), _ENOUGH_BITS))
    except TooFewBits as error:
        if error.needed is None:
            raise
        found = fine(_fine_bits(error.needed))
    return coarsened(found, bits=budget.bits)


def total_shift(budget: Budget) -> float:
    """mu: two unit Gaussians this far apart have delta = budget.delta at budget.epsilon. A first guess only."""
    from scipy.optimize import brentq  # here: a client's process rarely needs it, and it is slow to import

    def missing(mu: float) -> float:
        eps = budget.epsilon
        return float(ndtr(mu / 2 - eps / mu) - math.exp(min(eps, 700)) * ndtr(-mu / 2 - eps / mu)) - budget.delta

    least, most = _SHIFTS
    if missing(least) >= 0 or missing(most) <= 0:  # a budget beyond all use, on one side or the other
        return least if missing(least) >= 0 else most
    return float(brentq(missing, least, most))


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
    top, cap = 2**budget.bits - 1, 2**MAX_BITS - 3

    def after(levels: int, trials: int) -> Accountant:
        check_time()
        return base.compose(make_release(Mechanism(levels=levels, trials=trials)), rounds)

    @cache
    def proven(levels: int, trials: int) -> float:
        with suppress(AccountingError):  # no route applies: nothing is proven
            return after(levels, trials).epsilon(budget.delta)
        return math.inf

    @cache
    def attained(levels: int, trials: int) -> float:
        return after(levels, trials).attained_epsilon(budget.delta)

    probe = make_release(Mechanism(levels=1, trials=1))
    ratio = 4 * probe.shift_l2**2 / shift_per_round(budget, rate=probe.sampling.rate, rounds=rounds) ** 2
    quick = probe.sensitivity.l2 is None and attained(1, min(cap, max(1, round(ratio)))) > 0
    found = _least_error(attained if quick else proven, budget.epsilon, ratio=max(ratio, 1e-9), top=top)
    if quick and found is not None:
        found = _settled(proven, budget.epsilon, found, top=top)
    if found is None:
        raise _too_few_bits(proven, budget, least_trials(proven, 1, ratio, budget.epsilon, cap=cap))
    return found


def _least_error(figure: _Figure, target: float, *, ratio: float, top: int) -> Mechanism | None:
    """The mechanism of smallest V with 2s + m <= top and figure <= target; `ratio` is a guess of m / s^2."""
    most = _most_levels(lambda s: figure(s, top - 2 * s) <= target, _largest_levels(ratio, top), cap=(top - 1) // 2)
    if most == 0:
        return None
    trials = least_trials(figure, most, ratio * most**2, target, cap=top - 2 * most)
    assert trials is not None  # top - 2 most trials hold
    best = Mechanism(levels=most, trials=trials)
    # Fewer levels need at least as many trials per level squared: where the whole number of trials may fit better.
    exact = _between(figure, most, trials, target) / most**2

    def hoped(s: int) -> float:
        return noise_variance(Mechanism(levels=s, trials=max(1, math.ceil(exact * s**2))))

    for s in sorted(range(1, most), key=hoped)[:_OTHER_LEVELS]:
        if hoped(s) >= _WORTH_TRYING * noise_variance(best):
            break
        trials = least_trials(figure, s, exact * s**2, target, cap=top - 2 * s)
        if trials is not None:
            best = min(best, Mechanism(levels=s, trials=trials), key=noise_variance)
    return best


def _settled(proven: _Figure, target: float, found: Mechanism, *, top: int) -> Mechanism | None:
    """What a lower bound on epsilon `found`, with as many trials as the proven figure needs; else with fewer levels."""
    for s in range(found.levels, max(0, found.levels - _SETTLED), -1):
        guess = found.trials * (s / found.levels) ** 2
        trials = least_trials(proven, s, guess, target, cap=top - 2 * s)
        if trials is not None:
            return Mechanism(levels=s, trials=trials)
    return _least_error(proven, target, ratio=found.trials / found.levels**2, top=top)


def _most_levels(holds: Callable[[int], bool], guess: int, *, cap: int) -> int:
    """The largest s in 1 .. cap that holds, 0 if none does. Whatever s + 1 levels can reach, s levels can."""
    low, high = 0, cap + 1
    s, stride = guess, 1
    while high - low > 1:
        if holds(s):
            low = s
            s += stride
        else:
            high = s
            s -= stride
        if low and high <= cap:
            stride, s = 1, (low + high) // 2
        else:
            stride *= 2
            s = min(max(s, 1), cap)
    return low


def _between(figure: _Figure, levels: int, trials: int, target: float) -> float:
    """Where between trials - 1 and trials the figure meets the target, on a straight line in logarithms."""
    if trials == 1:
        return 1.0
    above, below = figure(levels, trials - 1), figure(levels, trials)
    if not 0 < below < above < math.inf:
        return float(trials - 1)
    return trials - 1 + math.log(above / target) / math.log(above / below)


def _largest_levels(ratio: float, top: int) -> int:
    """The largest s with ratio s^2 + 2 s <= 2^b - 1."""
    return max(1, min(math.floor((math.sqrt(1 + ratio * top) - 1) / ratio), (top - 1) // 2))


def least_trials(figure: _Figure, levels: int, guess: float, target: float, *, cap: int) -> int | None:
    """The smallest m in 1 .. cap with figure(levels, m) <= target, from a guess; None if even `cap` fails.

    Above 2,000 trials it may be a two-thousandth too many. It keeps `low` failing and `high` holding, and steps by the
    local power law epsilon ~ m^-k to need few calls. Where that law does not lead there, it halves what is left.
    """
    low, high = 0, cap + 1  # cap + 1 stands for "not known to hold"
    m = min(max(low + 1, round(guess)), cap)
    power, last, calls = 0.6, None, 0
    while high - low > (1 if high > cap else max(1, high // 2000)):
        epsilon = figure(levels, m)
        calls += 1
        if epsilon <= target:
            high = m
        else:
            low = m
        if last and 0 < epsilon < math.inf and 0 < last[1] < math.inf and epsilon != last[1] and m != last[0]:
            power = min(3.0, max(0.01, -math.log(epsilon / last[1]) / math.log(m / last[0])))
        last = (m, epsilon)
        if calls >= _LAWFUL_CALLS:
            wanted = (low + high) / 2
        else:
            wanted = 2.0 * m if epsilon == math.inf else m * min(8.0, (epsilon / target) ** (1 / power))
        m = min(max(math.ceil(min(wanted, 2.0**40)), low + 1), high - 1)
    return high if high <= cap else None


def _too_few_bits(proven: _Figure, budget: Budget, trials: int | None) -> TooFewBits:
    """The error that says what the bits can reach and what the epsilon needs: `trials` at one level, or too many."""
    needed = None if trials is None else (trials + 2).bit_length()
    bits = MAX_BITS if needed is None else budget.bits
    least = proven(1, 2**bits - 3)
    reach = f"no less than epsilon {rounded_up(least, 3)}" if math.isfinite(least) else "no finite epsilon"
    needs = "" if needed is None else f"; epsilon {as_given(budget.epsilon)} needs {needed} bits"
    return TooFewBits(
        f"{bits} bits reach {reach}{needs} (proven total at delta {budget.delta:g}; epsilon "
        f"{as_given(budget.epsilon)} was asked for): use a larger batch, fewer rounds or a wider range",
        needed,
    )
