"""What the papers of the laws of noise prove for them: bounds to compare with, never used for a guarantee.

Each function gives the epsilon that its paper's theorem states for one message of integers whose change has the norms
(l1, l2, linf), or the Renyi divergence from which it follows; `epsilon` samples and composes these as their authors do.
The papers need integers: `rounded_norms` is what stochastic rounding does to the norms of a real change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln, logsumexp

from bqsgd._src.laws import Binomial, DiscreteGaussian, Geometric, NoiseLaw, Skellam, Sum
from bqsgd._src.release import Release

_BIAS = math.exp(-0.5)
"""beta: with this probability a rounded vector is within the longer norm; the paper's clients round until it is."""
_ORDERS = np.unique(np.concatenate([np.arange(2, 65), np.geomspace(65, 512, 24).round().astype(int)]))
SOURCES = {
    Binomial.kind: "cpSGD (Agarwal et al. 2018, Theorem 1), amplified, then Kairouz, Oh and Viswanath 2015",
    DiscreteGaussian.kind: "Canonne, Kamath and Steinke 2020 and Kairouz, Liu and Steinke 2021, sampled by Zhu and "
    "Wang 2019, Theorem 5",
    Skellam.kind: "Agarwal, Kairouz and Liu 2021, Theorem 3.5, sampled by Zhu and Wang 2019, Theorem 5",
    Geometric.kind: "Ghosh, Roughgarden and Sundararajan 2009, amplified, then Kairouz, Oh and Viswanath 2015",
}


@dataclass(frozen=True)
class IntegerNorms:
    """How far one record moves a message of so many integers."""

    l1: float
    l2: float
    linf: float
    dimension: int = 1


def rounded_norms(release: Release) -> IntegerNorms:
    """The norms after stochastic rounding (Kairouz, Liu and Steinke 2021, Section 4; exact if all moves are whole).

    The squared norm is at most min(D2^2 + d/4 + sqrt(2 log(1/beta)) (D2 + sqrt(d)/2), (D2 + sqrt d)^2). l1 is at most
    sqrt(d) l2, and for integers at most l2^2.
    """
    length, largest, d = release.shift_l2, release.shift, release.terms.dimension
    if d == 1 and largest == round(largest):
        return IntegerNorms(largest, largest, largest)
    root = math.sqrt(d)
    square = length**2 + d / 4 + math.sqrt(2 * math.log(1 / _BIAS)) * (length + root / 2)
    square = min(square, (length + root) ** 2)
    return IntegerNorms(min(math.sqrt(d * square), square), math.sqrt(square), math.floor(largest) + 1, d)


def binomial_epsilon(trials: int, norms: IntegerNorms, delta: float) -> float:
    """cpSGD, Theorem 1 with p = 1/2 and unit scale; infinite if its condition on the trials fails."""
    variance = trials / 4
    # With p = 1/2: b_p = 1/3, c_p = sqrt(2) (3/8 + 3/8 + 1), d_p = 2/3.
    b, c, d = 1 / 3, math.sqrt(2) * 1.75, 2 / 3
    if variance < max(23 * math.log(10 * norms.dimension / delta), 2 * norms.linf):
        return math.inf
    first = norms.l2 * math.sqrt(2 * math.log(1.25 / delta)) / math.sqrt(variance)
    second = (norms.l2 * c * math.sqrt(math.log(10 / delta)) + norms.l1 * b) / (variance * (1 - delta / 10))
    third = norms.linf * math.log(1.25 / delta) * 2 / 3
    third += norms.linf * d * math.log(20 * norms.dimension / delta) * math.log(10 / delta)
    return first + second + third / variance


def renyi(law: NoiseLaw, norms: IntegerNorms, orders: np.ndarray) -> np.ndarray:
    """The papers' Renyi divergence of one message, for discrete Gaussian and Skellam noise and sums of them."""
    one, parties = (law.law, law.parties) if isinstance(law, Sum) else (law, 1)
    if isinstance(one, Skellam):  # a sum of Skellam variables is one
        mu = one.mu * parties
        extra = np.minimum(
            ((2 * orders - 1) * norms.l2**2 + 6 * norms.l1) / (4 * mu**2), 3 * norms.l1 / (2 * mu) + 0 * orders
        )
        return np.asarray(orders * norms.l2**2 / (2 * mu) + extra)
    assert isinstance(one, DiscreteGaussian)
    gaussian = orders * norms.l2**2 / (2 * one.sigma**2 * parties)
    if parties == 1:
        return np.asarray(gaussian)
    # A sum of discrete Gaussians is near one (Kairouz, Liu and Steinke 2021, Proposition 14), tau per coordinate.
    k = np.arange(1, parties)
    tau = 10 * float(np.sum(np.exp(-2 * math.pi**2 * one.sigma**2 * k / (k + 1))))
    square = norms.l2**2 / (one.sigma**2 * parties)
    root = math.sqrt(square) + tau * math.sqrt(norms.dimension)
    return np.asarray(orders / 2 * min(square + tau * norms.dimension / 2, root**2))


def _sampled(divergence: np.ndarray, rate: float) -> np.ndarray:
    """Zhu and Wang 2019, Theorem 5: a Poisson-sampled message at _ORDERS, from the divergence at 2, 3, ... ."""
    if rate == 1:
        return np.asarray(divergence[_ORDERS - 2])
    result = np.empty(_ORDERS.size)
    for row, order in enumerate(_ORDERS.tolist()):
        k = np.arange(2, order + 1)
        logs = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        logs = logs + (order - k) * math.log1p(-rate) + k * math.log(rate) + (k - 1) * divergence[k - 2]
        logs[1:] += math.log(3)
        start = (order - 1) * math.log1p(-rate) + math.log(order * rate - rate + 1)
        result[row] = logsumexp(np.append(logs, start)) / (order - 1)
    return result


def _from_renyi(divergence: np.ndarray, delta: float) -> float:
    """Canonne, Kamath and Steinke 2020, Proposition 12."""
    figures = divergence + np.log1p(-1 / _ORDERS) - (math.log(delta) + np.log(_ORDERS)) / (_ORDERS - 1)
    return max(0.0, float(np.min(figures)))


def _composed(epsilon: float, rounds: int, slack: float) -> float:
    """Kairouz, Oh and Viswanath 2015, Theorem 3.4: epsilon of so many messages, at `slack` more delta."""
    if not math.isfinite(epsilon) or epsilon > 500:
        return math.inf
    mean = rounds * epsilon * math.tanh(epsilon / 2)
    spread = epsilon * math.sqrt(2 * rounds)
    return min(
        rounds * epsilon,
        mean + spread * math.sqrt(math.log(math.e + epsilon * math.sqrt(rounds) / slack)),
        mean + spread * math.sqrt(math.log(1 / slack)),
    )


def _amplified(epsilon: float, rate: float) -> float:
    return math.log1p(rate * math.expm1(epsilon)) if epsilon < 700 else math.inf


def epsilon(release: Release, rounds: int, delta: float) -> float:
    """The epsilon at `delta` by the papers of this noise; infinite where their conditions fail."""
    law, norms, rate = release.mechanism.law, rounded_norms(release), release.terms.sampling.rate
    one = law.law if isinstance(law, Sum) else law
    if isinstance(one, (DiscreteGaussian, Skellam)):
        every = np.arange(2, int(_ORDERS[-1]) + 1, dtype=np.float64)
        return _from_renyi(rounds * _sampled(renyi(law, norms, every), rate), delta)
    if isinstance(one, Geometric):
        # Pure, by the sum of absolute changes; of a sum over clients the noise of one client counts.
        return _composed(_amplified(-math.log(one.alpha) * norms.l1, rate), rounds, delta)
    assert isinstance(one, Binomial)
    return binomial_total(one.trials, norms, rate=rate, rounds=rounds, delta=delta)


def binomial_total(trials: int, norms: IntegerNorms, *, rate: float, rounds: int, delta: float) -> float:
    """cpSGD's bound for so many rounds; infinite where its condition fails."""
    if rounds == 1:
        return _amplified(binomial_epsilon(trials, norms, min(delta / rate, 0.5)), rate)
    # Half of delta for the messages, half for their composition.
    message = binomial_epsilon(trials, norms, min(delta / (2 * rounds * rate), 0.5))
    return _composed(_amplified(message, rate), rounds, delta / 2)


def by_value_epsilon(pairs: list[tuple[np.ndarray, np.ndarray]], coordinates: int, delta: float) -> float:
    """The epsilon of so many coordinates by the largest Renyi divergence of these pairs of laws of one (PBM, RQM).

    The papers compare their mechanisms by this divergence at the ends of the range; a constant of PBM's theorem is not
    stated in numbers.
    """
    divergence = np.zeros(_ORDERS.size)
    with np.errstate(divide="ignore"):
        for p, q in pairs:
            logs = _ORDERS[:, None] * np.log(p)[None, :] - (_ORDERS[:, None] - 1) * np.log(q)[None, :]
            divergence = np.maximum(divergence, logsumexp(logs, axis=1) / (_ORDERS - 1))
    return _from_renyi(coordinates * divergence, delta)
