"""The laws of integer noise as values: each gives its exact law, in integers with a common denominator.

Sampler, accountant and coder read the same integers, so they cannot disagree. A law other than the binomial is cut
where a single outcome weighs less than 2^-66, rounded down to multiples of 2^-104, and what the rounding leaves over
goes to the middle outcome. That it is symmetric and log-concave, which is all that Claims 1 to 3 and 10 of
docs/accounting.md ask of it, is then checked in exact integers. The accountant reads the law as it came out, so it owes
nothing for the cut or the rounding. Every step is integer arithmetic (or correctly rounded decimals), so all machines
have the same law.
"""

from __future__ import annotations

import math
import struct
from dataclasses import asdict, dataclass
from dataclasses import fields as fields_of
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import InvalidParameter

MAX_TRIALS = 1 << 20
TAIL_BITS = 64
"""Both tails that the binomial law leaves out weigh less than 2^-64 together."""
WHOLE_BITS = 104
"""The common denominator is 2^104: what one draw of the sampler resolves."""
LEAST_BITS = 66
"""Outcomes of the other laws that weigh less than 2^-66 are cut."""
MOST_SPAN = (1 << 16) - 2
"""The largest minus the smallest noise value, except for the binomial: the sampler's table has 2^16 entries."""
_EXACT_TRIALS = 1024
"""Up to here weights are binomial coefficients; beyond, these would have thousands of digits."""
_WEIGHT_BITS = 320
"""Bits of the middle weight beyond that: the least weight kept still has some 250, so floors hardly matter."""
_DIGITS = Context(prec=130, Emin=-(10**6), Emax=10**6)
_LONG = Context(prec=MAX_PREC, Emin=MIN_EMIN, Emax=MAX_EMAX)
_GEOMETRIC_BEND = 36
"""The geometric law is bent by e^(-k^2 2^-36): without, rounding to 2^-104 would make its straight logarithm convex."""
_SUM_BITS, _SUM_LEAST = 192, 100
"""Bits of a sum of laws while it is computed, and the weight 2^-100 below which its outcomes are cut meanwhile."""
PACKED = struct.Struct("<B7xd")
"""A law in a frame: its number, seven zero bytes, its parameter."""
_KINDS: dict[str, type[NoiseLaw]] = {}
"""Kind -> class; a class enters itself."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class NoiseLaw:
    """A law of integer noise. Its values are `first`, ..., `first` + len(pmf) - 1, within 0 .. `span`.

    The noise is centred by its reader: the code of a value is decoded as if span / 2 had been added.
    """

    kind: ClassVar[str]
    number: ClassVar[int] = 0
    """How frames name the law; 0 if none can carry it."""

    def __init_subclass__(cls) -> None:
        _KINDS[cls.kind] = cls

    @property
    def masses(self) -> tuple[int, ...]:
        """The probability of each value, in units of 2^-104; the sum is exactly 2^104."""
        return exact(self)[1]

    @property
    def first(self) -> int:
        """The smallest value that is kept."""
        return exact(self)[0]

    @property
    def pmf(self) -> _Floats:
        """The probability of each value, correctly rounded."""
        return _pmf(self)

    @property
    def span(self) -> int:
        """The largest value; the smallest is 0."""
        return len(self.masses) - 1

    @property
    def variance(self) -> float:
        """The variance of a draw."""
        k = np.arange(self.pmf.size) - (self.pmf.size - 1) / 2
        return float(self.pmf @ k**2)

    @property
    def entropy(self) -> float:
        """Bits that a draw costs an ideal coder."""
        seen = self.pmf[self.pmf > 0]
        return float(-(seen @ np.log2(seen)))

    @property
    def distance(self) -> float:
        """At least the total variation distance between this law and the law of the noise that is really added."""
        return 0.0

    def summed(self, parties: int) -> NoiseLaw:
        """The law of the sum of so many independent draws."""
        return Sum(law=self, parties=parties)

    def to_bytes(self) -> bytes:
        """The law in PACKED bytes of a frame, read back by `law_of_bytes`.

        Raises:
            InvalidParameter: no frame can carry this law (docs/wire.md).
        """
        if not self.number:
            raise InvalidParameter(f"a frame cannot carry noise of the law {self}")
        (parameter,) = asdict(self).values()
        return PACKED.pack(self.number, parameter)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, the inverse of `law_from`."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class Binomial(NoiseLaw):
    """Bin(trials, 1/2).

    >>> Binomial(2).pmf.tolist()
    [0.25, 0.5, 0.25]
    """

    trials: int
    kind = "binomial"

    def __post_init__(self) -> None:
        if isinstance(self.trials, bool) or not isinstance(self.trials, (int, np.integer)):
            raise InvalidParameter(f"trials must be an integer from 0 to {MAX_TRIALS}")
        if not 0 <= self.trials <= MAX_TRIALS:
            raise InvalidParameter(f"trials must be from 0 to {MAX_TRIALS}")
        object.__setattr__(self, "trials", int(self.trials))

    @property
    def span(self) -> int:
        """The largest value, also where the sampler's law is cut before it."""
        return self.trials

    @property
    def variance(self) -> float:
        """A quarter of the trials."""
        return self.trials / 4

    def summed(self, parties: int) -> NoiseLaw:
        """As many times the trials."""
        return Binomial(self.trials * parties)


@dataclass(frozen=True)
class DiscreteGaussian(NoiseLaw):
    """P(k) in proportion to exp(-k^2 / (2 sigma^2)) (Canonne, Kamath and Steinke 2020).

    >>> round(DiscreteGaussian(3.0).variance, 6)
    9.0
    """

    sigma: float
    kind = "discrete gaussian"
    number = 1

    def __post_init__(self) -> None:
        _check_parameter(self, "sigma", 0.2, 3000.0)


@dataclass(frozen=True)
class Skellam(NoiseLaw):
    """The difference of two Poisson variables of mean mu / 2 each; mu is the variance (Agarwal, Kairouz, Liu 2021).

    >>> round(Skellam(9.0).variance, 6)
    9.0
    """

    mu: float
    kind = "skellam"
    number = 2

    def __post_init__(self) -> None:
        _check_parameter(self, "mu", 0.01, 9.0e6)


@dataclass(frozen=True)
class Geometric(NoiseLaw):
    """P(k) in proportion to alpha^|k|, the discrete Laplace law (Ghosh, Roughgarden and Sundararajan 2009).

    >>> round(Geometric(0.5).variance, 6)  # 2 alpha / (1 - alpha)^2
    4.0
    """

    alpha: float
    kind = "geometric"
    number = 3

    def __post_init__(self) -> None:
        _check_parameter(self, "alpha", 1e-9, 0.9985)


@dataclass(frozen=True)
class Sum(NoiseLaw):
    """The sum of independent draws of one law, one from each party: the noise of a sum over clients.

    A convolution of symmetric, log-concave laws is one itself. It is rounded while it is computed; `distance` says how
    far that takes it from the exact sum, and the accountant charges it.

    >>> round(Sum(Geometric(0.5), 3).variance, 6)
    12.0
    """

    law: NoiseLaw
    parties: int
    kind = "sum"

    def __post_init__(self) -> None:
        if not isinstance(self.law, (DiscreteGaussian, Skellam, Geometric)):
            raise InvalidParameter("the law of a sum must be one of discrete gaussian, skellam and geometric")
        if isinstance(self.parties, bool) or not isinstance(self.parties, int) or not 1 <= self.parties <= 1 << 20:
            raise InvalidParameter("parties must be an integer from 1 to 2^20")
        # Before the sum is computed, which would take long: a law spans fourteen standard deviations and more.
        if 14 * math.sqrt(self.law.variance * self.parties) > MOST_SPAN:
            raise InvalidParameter(f"{self} takes more values than the sampler's table holds")
        _check_span(self)

    @property
    def distance(self) -> float:
        """The mass that rounding and cutting moved, rounded up."""
        return math.nextafter(_sum(self)[1] / (1 << WHOLE_BITS), math.inf)

    def summed(self, parties: int) -> NoiseLaw:
        """A sum of sums is a sum over all their parties."""
        return Sum(self.law, self.parties * parties)

    def to_dict(self) -> dict[str, Any]:
        """The law of a party, and how many they are."""
        return {"kind": self.kind, "law": self.law.to_dict(), "parties": self.parties}


def law_of_bytes(packed: bytes | memoryview) -> NoiseLaw:
    """The law that `NoiseLaw.to_bytes` wrote.

    Raises:
        InvalidParameter: these bytes are not a law.
    """
    number, parameter = PACKED.unpack(packed)
    kinds = [cls for cls in _KINDS.values() if number and cls.number == number]
    if not kinds or any(packed[1:8]):
        raise InvalidParameter(f"the law of the noise must be 1, 2 or 3, got {number}")
    cls: Any = kinds[0]
    law: NoiseLaw = cls(parameter)
    return law


def law_from(fields: object) -> NoiseLaw:
    """The law that `NoiseLaw.to_dict` wrote. The fields may be hostile: what is unknown or out of range is refused.

    Raises:
        InvalidParameter: these are not the fields of a law.
    """
    if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str) or fields["kind"] not in _KINDS:
        raise InvalidParameter(f"not a law of noise; known kinds are {', '.join(_KINDS)}")
    cls = _KINDS[fields["kind"]]
    parameters = {name: value for name, value in fields.items() if name != "kind"}
    names = [field.name for field in fields_of(cls)]
    if set(parameters) != set(names):
        raise InvalidParameter(f"a law of kind {cls.kind} has the fields {', '.join(names)}")
    if cls is Sum:
        inner = parameters["law"]
        if not isinstance(inner, dict) or inner.get("kind") == Sum.kind:
            raise InvalidParameter("the law of a sum must be one of discrete gaussian, skellam and geometric")
        parameters["law"] = law_from(inner)
    return cls(**parameters)


def _check_parameter(law: NoiseLaw, name: str, low: float, high: float) -> None:
    value = getattr(law, name)
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise InvalidParameter(f"{name} must be a number from {low} to {high}")
    if not low <= value <= high:
        raise InvalidParameter(f"{name} must be from {low} to {high}, got {float(max(-1e300, min(value, 1e300)))}")
    object.__setattr__(law, name, float(value))
    _check_span(law)


def _check_span(law: NoiseLaw) -> None:
    """Refuse a law that the sampler's table cannot hold, or that adds no noise."""
    if not 2 <= law.span <= MOST_SPAN:
        raise InvalidParameter(f"{law} takes {law.span + 1} values; the sampler allows 3 to {MOST_SPAN + 1}")


@lru_cache(maxsize=32)  # a wide law takes more than a megabyte, and peers may name some
def exact(law: NoiseLaw) -> tuple[int, tuple[int, ...]]:
    """The smallest value kept, and the probability of each value in units of 2^-104.

    Raises:
        InvalidParameter: the rounded law is not log-concave, or not symmetric; no such parameter is known.
    """
    if isinstance(law, Binomial):
        first, masses = _binomial(law.trials)
    elif isinstance(law, Sum):
        first, masses = 0, _sum(law)[0]
    else:
        first, masses = 0, _normalised(_half_weights(law))
    if not isinstance(law, Binomial) and masses != masses[::-1]:
        raise InvalidParameter(f"{law}, rounded, is not symmetric")
    if sum(masses) != 1 << WHOLE_BITS or any(
        masses[k] ** 2 < masses[k - 1] * masses[k + 1] for k in range(1, len(masses) - 1)
    ):
        raise InvalidParameter(f"{law}, rounded, is not log-concave")
    return first, tuple(masses)


@lru_cache(maxsize=32)
def _pmf(law: NoiseLaw) -> _Floats:
    pmf = np.array([mass / (1 << WHOLE_BITS) for mass in law.masses])
    pmf.setflags(write=False)
    return pmf


@lru_cache(maxsize=256)
def mirror_distance(law: NoiseLaw) -> float:
    """How far the sampler's law is from symmetric: the largest |p_k - p_(m-k)| / p_k, at most 2^-78.

    For odd m >= 71 the remainder of the rounding of the binomial sits on the lower of the two middle outcomes. The
    other laws are symmetric.

    >>> mirror_distance(Binomial(70)), 0 < mirror_distance(Binomial(71)) < 2**-78
    (0.0, True)
    """
    masses = law.masses
    ratios = (
        abs(one - other) / min(one, other) for one, other in zip(masses, reversed(masses), strict=True) if one != other
    )
    return max(ratios, default=0.0)


def _binomial_weights(trials: int) -> tuple[int, list[int]]:
    """The first outcome kept, and integer weights: C(m, k) up to m = 1024, beyond it proportional to within 2^-220."""
    centre = trials // 2
    right = [math.comb(trials, centre) if trials <= _EXACT_TRIALS else 1 << _WEIGHT_BITS]
    # w_{k+1} = w_k (m - k) / (k + 1). The ratio r = a/b falls with k, so the tail beyond k weighs at most
    # w r / (1 - r) = w a / (b - a). Two bits more than TAIL_BITS pay for the second tail and for the floors.
    k = centre
    while k < trials:
        following = right[-1] * (trials - k) // (k + 1)
        k += 1
        right.append(following)
        a, b = trials - k, k + 1
        if trials > TAIL_BITS and a < b and (following * a // (b - a)) << (TAIL_BITS + 2) < right[0]:
            break
    lowest = trials - k  # symmetric window
    left = [right[j - centre] for j in range(trials - lowest, centre, -1) if trials - j < centre]
    return lowest, left + right


def _binomial(trials: int) -> tuple[int, list[int]]:
    first, weights = _binomial_weights(trials)
    total, whole = sum(weights), 1 << WHOLE_BITS
    masses = [w * whole // total for w in weights]
    # Floors lose less than one unit per outcome. The middle outcome, the heaviest, takes all of it: relative to its
    # weight the change is least there, and the law stays log-concave. For odd m it is no longer symmetric; the
    # accountant charges that (`mirror_distance`).
    masses[trials // 2 - first] += whole - sum(masses)
    return first, masses


def _fixed(value: Decimal) -> int:
    """The value in units of 2^-320, rounded down."""
    return int(_DIGITS.multiply(value, Decimal(1 << _WEIGHT_BITS)))


def _decimal(value: Fraction) -> Decimal:
    return _DIGITS.divide(Decimal(value.numerator), Decimal(value.denominator))


def _half_weights(law: NoiseLaw) -> list[int]:
    """Weights of the values 0, 1, 2, ... from the middle, to far beyond where they are cut."""
    if isinstance(law, Skellam):
        # Bessel functions by Miller's backward recurrence I_(k-1) = I_(k+1) + (2 k / mu) I_k. It is stable downwards:
        # what is wrong at the far start dies out before the weights matter.
        mu = Fraction(law.mu)
        weights = [0, 1 << 64]
        for k in range(math.ceil(30 * math.sqrt(law.mu)) + 60, 0, -1):
            weights.append(weights[-2] + 2 * k * mu.denominator * weights[-1] // mu.numerator)
        weights.reverse()
    else:
        # w_(k+1) = w_k r_k and r_(k+1) = r_k q, in fixed point.
        if isinstance(law, DiscreteGaussian):
            square = Fraction(law.sigma) ** 2
            ratio, bend = -1 / (2 * square), -1 / square
            r = _fixed(_DIGITS.exp(_decimal(ratio)))
        else:
            assert isinstance(law, Geometric)
            ratio, bend = Fraction(-1, 1 << _GEOMETRIC_BEND), Fraction(-2, 1 << _GEOMETRIC_BEND)
            r = _fixed(_DIGITS.multiply(_decimal(Fraction(law.alpha)), _DIGITS.exp(_decimal(ratio))))
        q = _fixed(_DIGITS.exp(_decimal(bend)))
        weights = [1 << _WEIGHT_BITS]
        while weights[-1] >> (_WEIGHT_BITS - LEAST_BITS - 20) and len(weights) <= MOST_SPAN:
            weights.append(weights[-1] * r >> _WEIGHT_BITS)
            r = r * q >> _WEIGHT_BITS
    return weights


def _normalised(half: list[int]) -> list[int]:
    """Masses in units of 2^-104 from the weights of 0, 1, 2, ...: outcomes below 2^-66 cut, the middle takes the rest.

    What is over after the floors is a few units of a mass of 2^88 or more.
    """
    total = 2 * sum(half) - half[0]
    kept = [weight for weight in half if weight << LEAST_BITS >= total]
    total = 2 * sum(kept) - kept[0]
    right = [(weight << WHOLE_BITS) // total for weight in kept]
    masses = right[:0:-1] + right
    masses[len(right) - 1] += (1 << WHOLE_BITS) - sum(masses)
    return masses


def _convolved(one: list[int], other: list[int]) -> list[int]:
    """The convolution of two symmetric laws in units of 2^-192, rounded down and cut where it is below 2^-100."""
    # Kronecker's trick: two numbers with the masses as digits; the digits of their product are the convolution. In
    # decimals, because Python multiplies long decimals by fast transforms, and long integers not.
    room = len(str(1 << (2 * _SUM_BITS))) + len(str(len(one) + len(other)))
    product = _LONG.multiply(*(Decimal("".join(str(m).zfill(room) for m in law)) for law in (one, other)))
    size = len(one) + len(other) - 1
    digits = f"{product:f}".zfill(size * room)
    masses = [int(digits[i * room : (i + 1) * room]) >> _SUM_BITS for i in range(size)]
    while len(masses) > 1 and masses[0] >> (_SUM_BITS - _SUM_LEAST) == 0:
        masses = masses[1:-1]
    return masses


@lru_cache(maxsize=64)
def _sum(law: Sum) -> tuple[list[int], int]:
    """The masses of a sum in units of 2^-104, and how many units rounding and cutting have moved."""
    power = [mass << (_SUM_BITS - WHOLE_BITS) for mass in law.law.masses]
    total, parties = [1 << _SUM_BITS], law.parties
    while True:
        if parties & 1:
            total = _convolved(total, power)
        parties >>= 1
        if not parties:
            break
        power = _convolved(power, power)
    middle = (len(total) - 1) // 2
    right = [mass >> (_SUM_BITS - WHOLE_BITS) for mass in total[middle:] if mass >> (_SUM_BITS - LEAST_BITS)]
    masses = right[:0:-1] + right
    # Every step has rounded down, so nothing but what is missing from 1 was moved.
    moved = (1 << WHOLE_BITS) - sum(masses)
    masses[len(right) - 1] += moved
    return masses, moved
