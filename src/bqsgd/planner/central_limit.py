"""What a Gaussian would be allowed, in the limit of many rounds (Bu et al. 2020): first guesses, never a guarantee.

Key: mu is the shift in deviations between two Gaussians that are as hard to tell apart as the whole run; q the sampling
rate, T the rounds. A round may shift its Gaussian by sqrt(log(1 + mu^2 / (q^2 T))) deviations.
"""

from __future__ import annotations

import math

from scipy.special import ndtr

from bqsgd.planner.plan import Budget


def total_shift(budget: Budget) -> float:
    """mu: the shift whose delta at budget.epsilon is budget.delta."""
    from scipy.optimize import brentq  # here: a client's process rarely needs it, and it is slow to import

    def delta_of(mu: float) -> float:
        eps = budget.epsilon
        return float(ndtr(mu / 2 - eps / mu) - math.exp(min(eps, 700)) * ndtr(-mu / 2 - eps / mu))

    return float(brentq(lambda mu: delta_of(mu) - budget.delta, 1e-6, 200.0))


def shift_a_round(budget: Budget, *, rate: float, rounds: int) -> float:
    """The shift, in deviations, that one round may make."""
    return math.sqrt(math.log1p(total_shift(budget) ** 2 / (rate**2 * rounds)))
