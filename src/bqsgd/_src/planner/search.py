"""The search for the mechanism of least error whose proven total epsilon is within the budget.

With s levels the error grows with the trials m and epsilon falls, so only the smallest m that meets the budget matters.
The search brackets it between an m that fails and one that holds and returns the latter, so it ends on the private
side. Along these (s, m) the error falls as s grows, apart from integer effects. So the search finds the largest s whose
m still fits the bits, and then tries those fewer levels for which m / s^2 may come out smaller. Its first guess is what
a Gaussian would be allowed in the limit of many rounds (Bu et al. 2020); only the accountant decides.

An answer of the accountant takes from a tenth of a second to some seconds, so the search asks few questions. If only
the L-infinity sensitivity is known, the epsilon that some data attain is a lower bound that is quick to compute. It
finds the levels, and then the proven epsilon decides how many trials they need.

With few bits, 2s + m + 1 <= 2^b leaves so few trials that the ends of the binomial weigh far more than delta. But
whatever is computed from noised codes costs no privacy (docs/accounting.md). So privacy is planned with 8 bits or more,
and the window of the coarsening is chosen for the error alone.

The server chooses the settings of a run, and a client has to plan for them: `cpu_seconds` limits the time that the
client spends on it. The search looks at the clock before each question to the accountant, whose own time and memory are
bounded (docs/accounting.md, Claim 6). So it exceeds the limit by at most one answer.
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

from bqsgd._src.errors import AccountingError, BqsgdError, Infeasible
from bqsgd._src.ledger import PrivacyBudget
from bqsgd._src.mechanism.coarsening import noise_to_signal
from bqsgd._src.mechanism.properties import noise_variance
from bqsgd._src.params import Coarsening, Mechanism
from bqsgd._src.planner.plan import MAX_BITS, Budget, Plan
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.privacy.guarantee import as_given, rounded_up
from bqsgd._src.release import Release, Terms

LEAST_FINE_BITS = 8
"""A mechanism that will be coarsened is planned with at least this many bits; more bits gain next to nothing."""
_TRIED = 32
"""How many widths are tried across the remaining range in each pass, until the pass can try every one."""
_limit: ContextVar[tuple[float, float] | None] = ContextVar("_limit", default=None)
"""(the CPU time of the process at which planning must end, the seconds that were allowed)."""


class PlanningTooLong(BqsgdError, RuntimeError):
    """Planning took more CPU seconds than it was allowed; nothing was recorded."""


@contextmanager
def cpu_seconds(allowed: float | None) -> Iterator[None]:
    """Let planning in the block take this many CPU seconds, then raise PlanningTooLong; None sets no limit."""
    # CPU time, not the clock: on a busy machine a client must not refuse a plan that it accepts on an idle one. The
    # limit is a context variable, so it holds in this thread only.
    token = _limit.set(None if allowed is None else (time.process_time() + allowed, allowed))
    try:
        yield
    finally:
        _limit.reset(token)


def check_time() -> None:
    """Raise PlanningTooLong if the time of the enclosing `cpu_seconds` is used up."""
    limit = _limit.get()
    if limit is not None and time.process_time() > limit[0]:
        raise PlanningTooLong(f"planning takes more than the {limit[1]:g} CPU seconds that this client allows")


def _fine_bits(needed: int) -> int:
    """The bits of the mechanism before coarsening: the first of 8, 10, 12, ... that is enough."""
    return max(LEAST_FINE_BITS, needed + needed % 2)


def largest_reach(bits: int) -> float:
    """The largest |value|, in units of the range, that a code may stand for under a budget of `bits`, coarsened or not.

    With one level, b bits reach (2^b - 1) / 2. A coarsened mechanism reaches no further than 8 bits would.
    """
    return ((1 << max(bits, LEAST_FINE_BITS)) - 1) / 2


def coarsened(fine: Mechanism, *, bits: int) -> Mechanism:
    """`fine` coarsened to 2^bits points over the window of least `noise_to_signal`; `fine` itself if its codes fit.

    >>> coarsened(Mechanism(levels=10, trials=189), bits=4).coarsening
    Coarsening(points=16, width=45)
    """
    points = 2**bits
    if fine.code_count <= points:
        return fine

    def at(width: int) -> Mechanism:
        coarsening = Coarsening(points=points, width=width)
        return replace(fine, coarsening=coarsening)

    # The server refuses frames whose codes reach further than `largest_reach`, so no wider window is tried.
    low, high = 1, min(fine.code_count - 1, int(2 * largest_reach(bits) * fine.levels))
    while True:  # As the width grows the noise falls, then rises, apart from integer effects: zoom in on the least.
        stride = max(1, (high - low) // _TRIED)
        best = min(range(low, high + 1, stride), key=lambda width: noise_to_signal(at(width)))
        if stride == 1:
            return at(best)
        low, high = max(low, best - 2 * stride), min(high, best + 2 * stride)


EpsilonFigure = Callable[[int, int], float]
"""(levels, trials) -> total epsilon."""
_ENOUGH_BITS = 12
"""Planning uses no more bits than these unless it must: 2,047 levels and 1,000 trials are within a thousandth of the
least error that any number of bits can have."""
_SHIFTS = 1e-9, 1e3
"""The least and the largest shift that `total_shift` returns."""
_WORTH_TRYING = 0.999
"""Other levels are tried only if they may have less than this fraction of the error."""
_OTHER_LEVELS = 8
"""How many other levels are tried, the most promising first."""
_PROVEN_LEVELS = 3
"""How many numbers of levels are tried with the proven epsilon, from that of the quick search downwards."""
_POWER_LAW_CALLS = 12
"""How many calls `least_trials` makes by the power law before it bisects; three to five are usual."""


LEAST_L2_TRIALS = 64
"""Fewest planned trials under an L2 bound: with fewer the proof is looser (docs/accounting.md)."""


class TooFewBits(Infeasible):
    """No mechanism fits the bits without coarsening. `needed` bits would do; None if more than MAX_BITS."""

    def __init__(self, message: str, needed: int | None) -> None:
        super().__init__(message)
        self.needed = needed


def make_plan(budget: Budget, terms: Terms, *, rounds: int) -> Plan:
    """Plan `rounds` rounds of one client; budget.epsilon and budget.delta are totals over all of them.

    Raises:
        Infeasible: no mechanism meets the budget; the message names the nearest epsilon that one can.
    """
    mechanism = least_error_mechanism(budget, terms, rounds=rounds)
    release = Release(mechanism=mechanism, terms=terms)
    return Plan(
        budget=budget,
        release=release,
        rounds=rounds,
        variance=noise_variance(mechanism),
        guarantee=Accountant().compose(release, rounds).guarantee(delta=budget.delta),
    )


def least_error_mechanism(budget: Budget, terms: Terms, *, rounds: int, spent: Accountant | None = None) -> Mechanism:
    """The mechanism of least error with which `rounds` more messages, after `spent`, stay within the budget, proven.

    From 8 bits on it is the one of smallest V with 2s + m + 1 <= 2^b, to a few thousandths (see _ENOUGH_BITS). With
    fewer bits, or if none fits, a mechanism with more bits is coarsened to 2^b points: with its many levels it has less
    noise to signal than the few levels that would fit, if any do. Under an L2 bound there are at least
    LEAST_L2_TRIALS; where these would hold the levels down, a mechanism with more of both is planned and coarsened.

    Raises:
        Infeasible: even MAX_BITS bits do not reach the epsilon, so there is nothing to coarsen either.
    """

    def fine(bits: int) -> Mechanism:
        return least_error_uncoarsened(replace(budget, bits=bits), terms, rounds=rounds, spent=spent)

    # More bits than _ENOUGH_BITS would only make the search longer.
    bits = min(max(budget.bits, LEAST_FINE_BITS), _ENOUGH_BITS)
    if terms.sensitivity.l2 is not None:
        most = (2**bits - LEAST_L2_TRIALS) / 2  # the levels that leave room for so many trials
        if trials_per_square(budget, terms, rounds=rounds) * most**2 < LEAST_L2_TRIALS:
            bits = _ENOUGH_BITS
    try:
        mechanism = fine(bits)
    except TooFewBits as error:
        if error.needed is None:
            raise
        mechanism = fine(_fine_bits(error.needed))
    return coarsened(mechanism, bits=budget.bits)


def total_shift(budget: Budget | PrivacyBudget) -> float:
    """mu: two unit Gaussians this far apart have delta = budget.delta at budget.epsilon. A first guess only."""
    from scipy.optimize import brentq  # imported here: clients rarely need it, and it is slow to import

    def excess(mu: float) -> float:
        """How much larger than budget.delta the delta of shift mu is."""
        eps = budget.epsilon
        return float(ndtr(mu / 2 - eps / mu) - math.exp(min(eps, 700)) * ndtr(-mu / 2 - eps / mu)) - budget.delta

    least, most = _SHIFTS
    if excess(least) >= 0 or excess(most) <= 0:  # A budget too small or too large for any use: brentq needs two signs.
        return least if excess(least) >= 0 else most
    return float(brentq(excess, least, most))


def shift_per_round(budget: Budget | PrivacyBudget, *, rate: float, rounds: int, spent: float = 0.0) -> float:
    """The shift in standard deviations that each of T rounds may make: sqrt(log(1 + mu^2 / (q^2 T))), q the rate.

    spent: epsilon, at the budget's delta, of earlier messages; their mu^2 is taken off. 0 if nothing is left.
    """
    square = total_shift(budget) ** 2
    if spent > 0:
        square -= total_shift(PrivacyBudget(epsilon=spent, delta=budget.delta)) ** 2
    return math.sqrt(math.log1p(max(0.0, square) / (rate**2 * rounds)))


def trials_per_square(budget: Budget | PrivacyBudget, terms: Terms, *, rounds: int) -> float:
    """A first guess of m / s^2: what Gaussian noise would need. Only the accountant decides."""
    return 4 * terms.shift_l2(1) ** 2 / shift_per_round(budget, rate=terms.sampling.rate, rounds=rounds) ** 2


def epsilon_figures(
    delta: float, terms: Terms, *, rounds: int, spent: Accountant | None = None
) -> tuple[EpsilonFigure, EpsilonFigure]:
    """Two functions of (levels, trials): the proven total epsilon of these messages, and the one that data attain.

    Under an L2 bound the first is infinite for fewer than LEAST_L2_TRIALS, so that no plan has them.
    """

    def tally(levels: int, trials: int) -> Accountant:
        check_time()
        release = Release(mechanism=Mechanism(levels=levels, trials=trials), terms=terms)
        return (spent or Accountant()).compose(release, rounds)

    @cache
    def proven(levels: int, trials: int) -> float:
        if terms.sensitivity.l2 is not None and trials < LEAST_L2_TRIALS:
            return math.inf
        with suppress(AccountingError):  # No method of the accountant applies, so nothing is proven.
            return tally(levels, trials).epsilon(delta)
        return math.inf

    @cache
    def attained(levels: int, trials: int) -> float:
        return tally(levels, trials).attained_epsilon(delta)

    return proven, attained


def least_error_uncoarsened(budget: Budget, terms: Terms, *, rounds: int, spent: Accountant | None = None) -> Mechanism:
    """The mechanism of smallest V with 2s + m + 1 <= 2^b that stays within the budget as in `least_error_mechanism`.

    Raises:
        TooFewBits: the message names the epsilon that the bits can reach, and how many bits the budget's needs.
    """
    top, cap = 2**budget.bits - 1, 2**MAX_BITS - 3
    proven, attained = epsilon_figures(budget.delta, terms, rounds=rounds, spent=spent)
    ratio = trials_per_square(budget, terms, rounds=rounds)
    # Without an L2 sensitivity the lower bound is much quicker than the proof. It is 0 where it says nothing.
    quick = terms.sensitivity.l2 is None and attained(1, min(cap, max(1, round(ratio)))) > 0
    mechanism = _least_error(attained if quick else proven, budget.epsilon, ratio=max(ratio, 1e-9), top=top)
    if quick and mechanism is not None:
        mechanism = _proven_near(proven, budget.epsilon, mechanism, top=top)
    if mechanism is None:
        raise _too_few_bits(proven, budget, least_trials(proven, 1, ratio, budget.epsilon, cap=cap))
    return mechanism


def _least_error(figure: EpsilonFigure, target: float, *, ratio: float, top: int) -> Mechanism | None:
    """The mechanism of smallest V with 2s + m <= top and figure <= target; `ratio` is a guess of m / s^2."""
    most = most_levels(lambda s: figure(s, top - 2 * s) <= target, _largest_levels(ratio, top), cap=(top - 1) // 2)
    if most == 0:
        return None
    trials = least_trials(figure, most, ratio * most**2, target, cap=top - 2 * most)
    assert trials is not None  # most_levels has found that top - 2 * most trials are enough
    best = Mechanism(levels=most, trials=trials)
    # Without rounding, fewer levels would need at least this m / s^2. But m is a whole number, and for some smaller s
    # it is rounded up by less.
    exact = _between(figure, most, trials, target) / most**2

    def least_variance(s: int) -> float:
        return noise_variance(Mechanism(levels=s, trials=max(1, math.ceil(exact * s**2))))

    for s in sorted(range(1, most), key=least_variance)[:_OTHER_LEVELS]:
        if least_variance(s) >= _WORTH_TRYING * noise_variance(best):
            break
        trials = least_trials(figure, s, exact * s**2, target, cap=top - 2 * s)
        if trials is not None:
            best = min(best, Mechanism(levels=s, trials=trials), key=noise_variance)
    return best


def _proven_near(proven: EpsilonFigure, target: float, quick: Mechanism, *, top: int) -> Mechanism | None:
    """The mechanism that a lower bound on epsilon has found, with as many trials as the proven epsilon needs.

    If they do not fit the bits, it has fewer levels. None if nothing fits.
    """
    for s in range(quick.levels, max(0, quick.levels - _PROVEN_LEVELS), -1):
        guess = quick.trials * (s / quick.levels) ** 2
        trials = least_trials(proven, s, guess, target, cap=top - 2 * s)
        if trials is not None:
            return Mechanism(levels=s, trials=trials)
    return _least_error(proven, target, ratio=quick.trials / quick.levels**2, top=top)


def most_levels(holds: Callable[[int], bool], guess: int, *, cap: int) -> int:
    """The largest s in 1 .. cap that holds, 0 if none does. If s + 1 levels hold, s levels do too."""
    low, high = 0, cap + 1
    s, stride = guess, 1
    while high - low > 1:
        if holds(s):
            low = s
            s += stride
        else:
            high = s
            s -= stride
        if low and high <= cap:  # Both ends are known: bisect. Until then, double the stride away from the guess.
            stride, s = 1, (low + high) // 2
        else:
            stride *= 2
            s = min(max(s, 1), cap)
    return low


def _between(figure: EpsilonFigure, levels: int, trials: int, target: float) -> float:
    """Where between trials - 1 and trials the figure would meet the target, if its logarithm were linear there."""
    if trials == 1:
        return 1.0
    above, below = figure(levels, trials - 1), figure(levels, trials)
    if not 0 < below < above < math.inf:
        return float(trials - 1)
    return trials - 1 + math.log(above / target) / math.log(above / below)


def _largest_levels(ratio: float, top: int) -> int:
    """The largest s with ratio s^2 + 2 s <= 2^b - 1."""
    return max(1, min(math.floor((math.sqrt(1 + ratio * top) - 1) / ratio), (top - 1) // 2))


def least_trials(figure: EpsilonFigure, levels: int, guess: float, target: float, *, cap: int) -> int | None:
    """The smallest m in 1 .. cap with figure(levels, m) <= target, starting from a guess; None if even `cap` fails.

    Above 2,000 trials the result may be up to a two-thousandth too large, never too small: it always holds. To need few
    calls, the search steps by the local power law epsilon ~ m^-k; if that does not get there, it bisects.
    """
    low, high = 0, cap + 1  # `low` fails and `high` holds; cap + 1 stands for "none is known to hold"
    m = min(max(low + 1, round(guess)), cap)
    power, last, calls = 0.6, None, 0
    while high - low > (1 if high > cap else max(1, high // 2000)):
        epsilon = figure(levels, m)
        calls += 1
        # NaN and infinity fail: the search ends on a number of trials for which the accountant has proven the target.
        if epsilon <= target:
            high = m
        else:
            low = m
        if last and 0 < epsilon < math.inf and 0 < last[1] < math.inf and epsilon != last[1] and m != last[0]:
            # Within limits, because two figures that are nearly equal give an exponent of any size.
            power = min(3.0, max(0.01, -math.log(epsilon / last[1]) / math.log(m / last[0])))
        last = (m, epsilon)
        if calls >= _POWER_LAW_CALLS:
            wanted = (low + high) / 2
        else:
            wanted = 2.0 * m if epsilon == math.inf else m * min(8.0, (epsilon / target) ** (1 / power))
        m = min(max(math.ceil(min(wanted, 2.0**40)), low + 1), high - 1)
    return high if high <= cap else None


def _too_few_bits(proven: EpsilonFigure, budget: Budget, trials: int | None) -> TooFewBits:
    """The error for a budget that needs `trials` at one level (None: more than MAX_BITS allow)."""
    needed = None if trials is None else (trials + 2).bit_length()
    bits = MAX_BITS if needed is None else budget.bits
    least = proven(1, 2**bits - 3)  # one level leaves room for the most trials, so the least epsilon
    return TooFewBits(shortfall(f"{bits} bits reach", budget, least=least, needed=needed or math.inf), needed)


def shortfall(what_reaches: str, budget: Budget | PrivacyBudget, *, least: float, needed: float) -> str:
    """Why a budget cannot be met: the least epsilon that can be reached, and how many bits the budget needs.

    If `least` is infinite, nothing is proven. If `needed` is infinite, no number of bits is enough.
    """
    asked = as_given(budget.epsilon)
    reach = f"no less than epsilon {rounded_up(least, 3)}" if math.isfinite(least) else "no finite epsilon"
    needs = f"; epsilon {asked} needs {needed:.0f} bits" if math.isfinite(needed) else ""
    return (
        f"{what_reaches} {reach}{needs} (proven total at delta {budget.delta:g}; epsilon {asked} was asked for): use a "
        "larger batch, fewer rounds or a wider range"
    )
