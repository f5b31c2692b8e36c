"""The search for the integers (levels, trials) of least error whose proven total epsilon is within the budget.

For a given s the error grows with m and epsilon falls with it, so only the smallest m that meets the budget matters; it
is found between an m that fails and one that holds, so the answer always lies on the private side. Along these pairs
the error falls as s grows but for whole-number effects, so the search starts at the largest s whose m still fits the
bits and goes down through those that could still win.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from bqsgd.errors import Infeasible
from bqsgd.mechanism.properties import noise_variance
from bqsgd.params import Mechanism
from bqsgd.planner.central_limit import shift_a_round
from bqsgd.planner.plan import MAX_BITS, Budget
from bqsgd.privacy.accountant import Accountant
from bqsgd.privacy.guarantee import rounded_up
from bqsgd.release import Release

MakeRelease = Callable[[Mechanism], Release]
_MARGIN = 0.999
"""Smaller s need at least as many trials a level squared as larger ones; this share allows for what is not proven."""


class TooFewBits(Infeasible):
    """No pair fits the bits; `needed` bits would do (None: more than MAX_BITS)."""

    def __init__(self, message: str, needed: int | None) -> None:
        super().__init__(message)
        self.needed = needed


def least_error_pair(
    budget: Budget, make_release: MakeRelease, *, rounds: int, spent: Accountant | None = None
) -> Mechanism:
    """Smallest V with 2s + m + 1 <= 2^b and exact epsilon of (`spent`, then `rounds` of the release) <= budget.

    Raises:
        Infeasible: naming what the bits can reach and how many bits the epsilon needs.
    """
    base = spent or Accountant()
    top = 2**budget.bits - 1

    def after(levels: int, trials: int) -> Accountant:
        return base.compose(make_release(Mechanism(levels=levels, trials=trials)), rounds)

    def exact(levels: int, trials: int) -> float:
        return after(levels, trials).epsilon(budget.delta)

    def attained(levels: int, trials: int) -> float:
        return after(levels, trials).attained_epsilon(budget.delta)

    def least_trials(levels: int, guess: float, cap: int) -> int | None:
        """The quick lower bound rules out what surely fails; the exact figure decides the rest."""
        failing, guess = 0, min(guess, cap)
        if attained(levels, max(1, round(guess))) > 0:
            quick = _least_trials(attained, levels, guess, budget.epsilon, cap=cap)
            if quick is None:
                return None
            failing, guess = quick - 1, quick
        return _least_trials(exact, levels, guess, budget.epsilon, cap=cap, failing=failing)

    probe = make_release(Mechanism(levels=1, trials=1))
    ratio = max(1.0, 4 * probe.shift_l2**2 / shift_a_round(budget, rate=probe.sampling.rate, rounds=rounds) ** 2)
    found: dict[int, int] = {}
    levels = _largest_levels(ratio, top)
    for _ in range(2):  # trials a level squared, first guessed, then measured
        trials = least_trials(levels, ratio * levels**2, 1 << MAX_BITS)
        if trials is None:
            raise _too_few_bits(exact, budget, None)
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
    while 2 * above < top and try_levels(above):  # what s + 1 can do, s can
        above += 1
    for s in range(above - 1, 0, -1):
        if not found or _could_win(s, found):
            try_levels(s)
    if not found:
        raise _too_few_bits(exact, budget, least_trials(1, ratio, 1 << MAX_BITS))
    best = min(found, key=lambda s: noise_variance(Mechanism(levels=s, trials=found[s])))
    return Mechanism(levels=best, trials=found[best])


def _largest_levels(ratio: float, top: int) -> int:
    """The largest s with ratio s^2 + 2 s <= 2^b - 1."""
    return max(1, min(math.floor((math.sqrt(1 + ratio * top) - 1) / ratio), (top - 1) // 2))


def _could_win(levels: int, found: dict[int, int]) -> bool:
    """Whether so many levels could beat the best pair found, with the fewest trials they can need."""
    best = min(noise_variance(Mechanism(levels=s, trials=m)) for s, m in found.items())
    larger = [(m - 1) / s**2 for s, m in found.items() if s >= levels]
    if not larger:
        return True
    fewest = max(larger) * _MARGIN
    return noise_variance(Mechanism(levels=levels, trials=max(1, math.ceil(fewest * levels**2)))) < best


def _least_trials(
    epsilon: Callable[[int, int], float], levels: int, guess: float, target: float, *, cap: int, failing: int = 0
) -> int | None:
    """The smallest m in (failing, cap] with epsilon(levels, m) <= target, from a guess; None when even `cap` fails.

    Keeps `low` failing and `high` holding, and steps by the local power law epsilon ~ m^-k, so few calls are needed.
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
    """What the bits can reach, and what the epsilon needs: so many trials at one level, or more than there are."""
    bits = budget.bits if trials is not None else MAX_BITS
    least = epsilon(1, 2**bits - 3)
    reach = f"epsilon >= {rounded_up(least, 3)}" if math.isfinite(least) else "no finite epsilon"
    needed = None if trials is None else (trials + 2).bit_length()
    needs = f"more than {MAX_BITS} bits before coarsening" if needed is None else f"{needed} bits"
    return TooFewBits(
        f"{bits} bits reach {reach}; epsilon {budget.epsilon:g} needs {needs} "
        f"(exact total at delta {budget.delta:g}); take a larger batch, fewer rounds or a wider range",
        needed,
    )
