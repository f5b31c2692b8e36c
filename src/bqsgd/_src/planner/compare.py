"""Laws of noise side by side: for each, the mechanism of least noise that keeps a budget within so many bits.

Every law gets the same room as `planner.search` gives the binomial: at least 8 bits, at most 12, and what is more than
the bits asked for is coarsened after the noise. In a sum over clients each client adds its part of the noise, the
bits are those of a modulus that never wraps, and nothing can be coarsened.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import binom

from bqsgd._src.errors import AccountingError, InvalidParameter
from bqsgd._src.laws import Binomial, DiscreteGaussian, Geometric, NoiseLaw, Skellam
from bqsgd._src.ledger import PrivacyBudget
from bqsgd._src.mechanism.coarsening import noise_to_signal, position_law
from bqsgd._src.params import MAX_LEVELS, Mechanism, check_int
from bqsgd._src.planner.search import LEAST_FINE_BITS, check_time, coarsened, shift_per_round
from bqsgd._src.privacy import by_value, published
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.privacy.by_value import PoissonBinomial, RandomizedQuantization
from bqsgd._src.privacy.guarantee import Guarantee, rounded_up
from bqsgd._src.release import Relation, Release, Scheme, Terms

_MOST_FINE_BITS = 12
_CLOSE = 1e-3
"""The search for the noise ends when epsilon is this close below the budget, relatively, or after _TRIES questions."""
_TRIES = 12


def _geometric(variance: float) -> Geometric:
    # 2 alpha / (1 - alpha)^2 = v
    return Geometric(1 + (1 - math.sqrt(1 + 2 * variance)) / variance)


LAWS: dict[str, Callable[[float], NoiseLaw]] = {
    "binomial": lambda variance: Binomial(math.ceil(4 * variance)),
    "discrete gaussian": lambda variance: DiscreteGaussian(math.sqrt(variance)),
    "skellam": Skellam,
    "geometric": _geometric,
}
"""Name -> the law with so large a variance."""


def parameter_text(law: NoiseLaw) -> str:
    """The parameter of a law as people should read it: whoever copies it must not add less noise than is proven."""
    values = {name: value for name, value in law.to_dict().items() if name != "kind"}
    return ", ".join(f"{name} {x if isinstance(x, int) else rounded_up(x, 6)}" for name, x in values.items())


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What one law comes to within a budget.

    law: that of a client's noise. mechanism: what is accounted; of a sum, its whole noise. error: the standard
    deviation of a coordinate (of the sum), rounding included, in units of what one sample moves the vector. entropy:
    bits of a coordinate for an ideal coder, at a value of 0; of a sum, of what a server adds up. published: the epsilon
    by the papers of the law.
    """

    name: str
    law: NoiseLaw
    mechanism: Mechanism
    guarantee: Guarantee
    error: float
    entropy: float
    published: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "name": self.name,
            "law": self.law.to_dict(),
            "mechanism": self.mechanism.to_dict(),
            "guarantee": self.guarantee.to_dict(),
            "error": self.error,
            "entropy": self.entropy,
            "published": self.published,
        }


def compare(
    budget: PrivacyBudget, terms: Terms, *, rounds: int, bits: int, clients: int = 1
) -> list[tuple[str, Compared | None]]:
    """Each law within this budget, None for one that the bits have no room for.

    clients: 1 if each message is seen; otherwise the number of clients in a sum that alone is seen.
    """
    check_int("bits", bits, 2, 16)
    check_int("clients", clients, 1, 1 << 20)
    return [(name, _fitted(name, budget, terms, rounds=rounds, bits=bits, clients=clients)) for name in LAWS]


def _fitted(name: str, budget: PrivacyBudget, terms: Terms, *, rounds: int, bits: int, clients: int) -> Compared | None:
    fine = min(max(bits, LEAST_FINE_BITS), _MOST_FINE_BITS)
    # With more room there is more to coarsen, which only laws with long tails need.
    for room in [bits] if clients > 1 else sorted({fine, _MOST_FINE_BITS}):
        found = _within(1 << room, name, budget, terms, rounds=rounds, bits=bits, clients=clients)
        if found is not None:
            return found
    return None


def _within(
    room: int, name: str, budget: PrivacyBudget, terms: Terms, *, rounds: int, bits: int, clients: int
) -> Compared | None:
    shift = shift_per_round(budget, rate=terms.sampling.rate, rounds=rounds)
    ratio = (terms.shift_l2(1) / shift) ** 2  # a first guess of variance / levels^2, corrected by the first search
    for _ in range(6):
        levels = _most_levels(name, ratio, room=room, clients=clients)
        if levels == 0:
            return None
        found = least_noise(name, budget, terms, ratio * levels**2, rounds=rounds, levels=levels, clients=clients)
        if found is None:
            return None
        law, release = found
        ratio = release.mechanism.law.variance / levels**2
        if _codes(release.mechanism, clients) <= room:
            return _compared(name, law, release, budget, rounds=rounds, bits=bits, clients=clients)
        ratio *= 1.01
    return None


def _codes(mechanism: Mechanism, clients: int) -> int:
    return 2 * clients * mechanism.levels + mechanism.trials + 1


def _law(name: str, variance: float, clients: int) -> tuple[NoiseLaw, NoiseLaw]:
    """A client's part of noise with this variance, and the whole."""
    if name == "binomial":  # the parts of a sum need not be equal (`secure.noise_shares`)
        return Binomial(math.ceil(4 * variance / clients)), Binomial(math.ceil(4 * variance))
    part = LAWS[name](variance / clients)
    return part, part.summed(clients) if clients > 1 else part


def _most_levels(name: str, ratio: float, *, room: int, clients: int) -> int:
    """The most levels with which codes have room if the noise has the variance ratio levels^2; 0 if one has none."""

    def fits(levels: int) -> bool:
        try:
            _, whole = _law(name, ratio * levels**2, clients)
        except (InvalidParameter, ValueError, ZeroDivisionError):
            # Too little noise for the law is no obstacle to more levels; too much is.
            return ratio * levels**2 < 1
        return _codes(Mechanism.of(levels=levels, noise=whole), clients) <= room

    low, high = 0, min(MAX_LEVELS, room // (2 * clients)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def least_noise(
    name: str, budget: PrivacyBudget, terms: Terms, variance: float, *, rounds: int, levels: int = 1, clients: int = 1
) -> tuple[NoiseLaw, Release] | None:
    """The least noise of a law whose proven total is within the budget: its law and release. None if none was found.

    variance: where to begin. Of binomial noise it is the fewest trials, of others within a thousandth in epsilon.
    """
    best, low, high, power = None, 0.0, math.inf, 0.6
    for _ in range(_TRIES):
        check_time()
        try:
            part, whole = _law(name, variance, clients)
        except (InvalidParameter, ValueError, ZeroDivisionError):
            break
        release = Release(mechanism=Mechanism.of(levels=levels, noise=whole), terms=terms)
        epsilon = math.inf
        with suppress(AccountingError):
            epsilon = Accountant().compose(release, rounds).epsilon(budget.delta)
        if epsilon <= budget.epsilon:
            best, high = (part, release), variance
            if epsilon >= budget.epsilon * (1 - _CLOSE) or (name == "binomial" and 4 * (high - low) <= 1):
                break
        else:
            low = variance
        # Epsilon falls like a power of the variance; half of _CLOSE below the budget, to end on the private side.
        step = (epsilon / budget.epsilon / (1 - _CLOSE / 2)) ** (1 / power) if epsilon < math.inf else 2.0
        variance = variance * min(4.0, max(0.25, step))
        if not low < variance < high:
            variance = math.sqrt(low * high) if low and high < math.inf else (2 * low or high / 2)
    return best


def _compared(
    name: str, law: NoiseLaw, release: Release, budget: PrivacyBudget, *, rounds: int, bits: int, clients: int
) -> Compared:
    mechanism, moved = release.mechanism, release.terms.shift_l2(1)
    if clients == 1:
        sent = coarsened(mechanism, bits=bits)
        error, entropy = math.sqrt(noise_to_signal(sent)) / moved, _entropy(position_law(sent, 0))
    else:
        sent = mechanism
        # Each client's rounding adds up to a quarter of a squared step.
        variance = (mechanism.law.variance + clients / 4) / mechanism.levels**2
        error, entropy = math.sqrt(variance) / moved, mechanism.law.entropy
    return Compared(
        name=name,
        law=law,
        mechanism=sent,
        guarantee=Accountant().compose(release, rounds).guarantee(delta=budget.delta),
        error=error,
        entropy=entropy,
        published=published.epsilon(release, rounds, budget.delta),
    )


def _entropy(law: np.ndarray) -> float:
    seen = law[law > 0]
    return float(-(seen @ np.log2(seen)))


BY_VALUE = ("poisson binomial", "randomised quantisation")
"""Mechanisms whose law depends on the value (Claim 15)."""
_KEEPS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""The chances of a level to be kept that are tried; for each the least margin is sought."""
_MOST_QUANTISED_BITS = 4
"""Randomised quantisation is accounted by all pairs of its levels, so more levels would take too long."""
_MOST_COINS = 1 << 14
_LARGEST_PART = 4.0
"""Largest range over margin of randomised quantisation."""
_BISECTIONS = 14


@dataclass(frozen=True, kw_only=True)
class ComparedByValue:
    """What a mechanism whose law depends on the value comes to within a budget; `error`, `entropy` as in `Compared`.

    published: the epsilon of the Renyi divergence of the worst values, composed as the papers do.
    """

    name: str
    mechanism: PoissonBinomial | RandomizedQuantization
    guarantee: Guarantee
    error: float
    entropy: float
    published: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "name": self.name,
            "mechanism": asdict(self.mechanism),
            "guarantee": self.guarantee.to_dict(),
            "error": self.error,
            "entropy": self.entropy,
            "published": self.published,
        }


def refused_by_value(terms: Terms) -> str | None:
    """Why nothing is proven for mechanisms whose law depends on the value under these terms; None if it is."""
    moved = terms.sensitivity
    if terms.sampling.scheme is not Scheme.NONE:
        return "refused: sampling is not accounted for laws that depend on the value"
    if moved.relation is not Relation.REPLACE or moved.linf != 2 or moved.l2 is not None:
        return "refused: only values that may move across their whole range are accounted (replace one, linf 2, no l2)"
    return None


def compare_by_value(
    budget: PrivacyBudget, terms: Terms, *, rounds: int, bits: int, clients: int = 1
) -> list[tuple[str, ComparedByValue | None]]:
    """Poisson binomial and randomised quantisation within this budget, None for one that has no room.

    Raises:
        InvalidParameter: nothing is proven for them under these terms.
    """
    check_int("bits", bits, 2, 16)
    check_int("clients", clients, 1, 1 << 14)
    if (reason := refused_by_value(terms)) is not None:
        raise InvalidParameter(reason)

    def found(name: str, mechanism: Any) -> ComparedByValue | None:
        if mechanism is None:
            return None
        law = mechanism.law(0.0) if name == BY_VALUE[1] else binom.pmf(*_all_coins(mechanism), 0.5)
        return ComparedByValue(
            name=name,
            mechanism=mechanism,
            guarantee=by_value.guarantee(mechanism, dimension=terms.dimension, rounds=rounds, delta=budget.delta),
            error=mechanism.error / (2 * math.sqrt(terms.dimension)),
            entropy=_entropy(np.asarray(law)),
            published=published.by_value_epsilon(mechanism.worst_laws(), terms.dimension * rounds, budget.delta),
        )

    def largest(make: Callable[[float], Any], high: float) -> Any:
        """The mechanism of the largest parameter within the budget; privacy falls as the parameter grows."""

        def within(x: float) -> bool:
            check_time()
            with suppress(AccountingError, InvalidParameter):  # a parameter out of range does not meet the budget
                law = by_value.composed(make(x), dimension=terms.dimension, rounds=rounds)
                return float(law.get_epsilon_for_delta(budget.delta)) <= budget.epsilon
            return False

        if within(high):
            return make(high)
        low = 0.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if within(middle) else (low, middle)
        return make(low) if low else None

    coins = min((2**bits - 1) // clients, _MOST_COINS)
    tossed = [largest(partial(_coins, trials, clients), 0.25) for trials in sorted({1, coins} if coins else set())]
    rows = [(BY_VALUE[0], found(BY_VALUE[0], _least(tossed)))]
    if clients > 1:  # sums of it are not accounted as sums (Claim 15, step 5)
        return [*rows, (BY_VALUE[1], None)]
    levels = 2 ** min(bits, _MOST_QUANTISED_BITS)
    made = [largest(partial(_quantised, levels, keep), _LARGEST_PART) for keep in _KEEPS]
    return [*rows, (BY_VALUE[1], found(BY_VALUE[1], _least(made)))]


def _least(mechanisms: list[Any]) -> Any:
    """The mechanism with the least error, or None if no mechanism meets the budget."""
    return min((one for one in mechanisms if one is not None), key=lambda one: one.error, default=None)


def _coins(trials: int, clients: int, theta: float) -> PoissonBinomial:
    return PoissonBinomial(trials=trials, theta=theta, clients=clients)


def _quantised(levels: int, keep: float, part: float) -> RandomizedQuantization:
    """Randomised quantisation whose margin is the range divided by `part`."""
    return RandomizedQuantization(levels=levels, margin=1 / part, keep=keep)


def _all_coins(mechanism: PoissonBinomial) -> tuple[np.ndarray, int]:
    coins = mechanism.trials * mechanism.clients
    return np.arange(coins + 1), coins
