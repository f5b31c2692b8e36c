"""Slow, obviously right: pairs of laws as explicit lists of outcomes, composed by listing every combination."""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy.stats import binom


def value_law(trials: int, x: float, support: range) -> np.ndarray:
    """The law of floor(x) + Bernoulli(frac x) + Bin(trials, 1/2) on `support`, from scipy's binomial."""
    low, part = math.floor(x), x - math.floor(x)
    k = np.array(support)
    return (1 - part) * binom.pmf(k - low, trials, 0.5) + part * binom.pmf(k - low - 1, trials, 0.5)


def orders(trials: int, shift: float) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """A = (P(shift), P(0)) and B = (P(0), P(shift))."""
    support = range(trials + math.ceil(shift) + 2)
    moved, still = value_law(trials, shift, support), value_law(trials, 0.0, support)
    return (moved, still), (still, moved)


def product(*pairs: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Joint laws of independent parts, every combination of outcomes listed."""
    p, q = np.ones(1), np.ones(1)
    for one, other in pairs:
        p, q = np.outer(p, one).ravel(), np.outer(q, other).ravel()
    return p, q


def subsampled(pair: tuple[np.ndarray, np.ndarray], rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Record in with probability `rate`, against record out."""
    p, q = pair
    return (1 - rate) * q + rate * p, q


def hockey_stick(pair: tuple[np.ndarray, np.ndarray], epsilon: float) -> float:
    """sum (p - e^epsilon q)_+ ."""
    return float(np.maximum(pair[0] - math.exp(epsilon) * pair[1], 0).sum())


def worst_message(trials: int, shift: float, dimension: int, rate: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """All messages A^k B^(d-k), sampled: the vertices of the worst-case claim."""
    a, b = orders(trials, shift)
    return [subsampled(product(*([a] * k + [b] * (dimension - k))), rate) for k in range(dimension + 1)]


def worst_delta(
    trials: int, shift: float, dimension: int, rate: float, rounds: int, epsilon: float, *, add: bool = False
) -> float:
    """The largest divergence over every fixed choice of k in every round."""
    messages = worst_message(trials, shift, dimension, rate)
    if add:
        messages = [(q, p) for p, q in messages]
    combined = itertools.combinations_with_replacement(range(dimension + 1), rounds)
    return max(hockey_stick(product(*(messages[k] for k in ks)), epsilon) for ks in combined)
