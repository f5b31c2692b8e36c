"""The integer parameters of the BQ mechanism, and the digest that binds a frame to them.

The `check_*` functions are the library's gate for numbers from outside (options, files, peers): each returns the value
in the type it promises, or raises InvalidParameter with the name, the value and what is allowed.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import InvalidParameter, NonFiniteInput
from bqsgd._src.laws import MAX_TRIALS, Binomial, NoiseLaw, law_from

MAX_LEVELS = 1 << 20
"""With both at most 2^20 a code has at most 22 bits."""
MOST_ONE_IN = 1 << 16
"""Most coordinates out of which a message may carry one."""
DIGEST_BYTES = 16

Range = float | npt.NDArray[np.float64]
"""The encoder's range: one R for every coordinate, or one R_j per coordinate (1-D, positive, finite)."""
Codes = npt.NDArray[np.unsignedinteger]
"""Codes of one vector, in the dtype of `code_dtype`."""


def check_int(name: str, value: object, low: int, high: int) -> int:
    """Return `value` as an int in [low, high]; bools, floats and strings are refused."""
    # A bool is an int in Python: `trials=True` would pass for one trial.
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidParameter(f"{name} must be an integer from {low} to {high}, got {short_repr(value)}")
    if not low <= value <= high:
        raise InvalidParameter(f"{name} must be from {low} to {high}, got {short_repr(value)}")
    return int(value)


def short_repr(value: object) -> str:
    """`repr` of a value that a peer may have chosen, cut to a length that fits into an error message."""
    if isinstance(value, int) and abs(value) > 10**30:
        return "an integer of more than 30 digits"  # repr raises ValueError for one of more than 4,300 digits
    text = repr(value)
    return text if len(text) <= 200 else text[:199] + "…"


def check_positive(name: str, value: object) -> float:
    """Return `value` as a finite float above 0."""
    number = math.nan
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer larger than any float
            number = float(value)
    if not 0 < number < math.inf:  # written so that NaN, which compares false, is refused
        raise InvalidParameter(f"{name} must be a positive finite number, got {short_repr(value)}")
    return number


def check_delta(name: str, value: object) -> float:
    """Return `value` as a float strictly between 0 and 1."""
    delta = check_positive(name, value)
    if delta >= 1:
        raise InvalidParameter(f"{name} must be above 0 and below 1, got {short_repr(value)}")
    return delta


def check_choice(name: str, value: str, choices: Iterable[str]) -> str:
    """Return `value` if it is one of these words."""
    words = tuple(choices)
    if value not in words:
        raise InvalidParameter(f"{name} must be one of {', '.join(words)}, got {short_repr(value)}")
    return value


def check_finite(values: npt.NDArray[np.floating], otherwise: str) -> None:
    """Raise NonFiniteInput, which says `otherwise`, if there is a NaN or an infinity among the values."""
    if not bool(np.isfinite(values).all()):
        raise NonFiniteInput(otherwise)


@dataclass(frozen=True, kw_only=True)
class Coarsening:
    """Send fewer distinct codes: after the noise, round each to one of `points` K points spread over `width` W codes.

    The window of W codes is centred on the middle code s + m/2. A code is first cut to the window, then rounded at
    random and without bias to one of its two neighbouring points, which are W / (K - 1) codes apart.
    """

    points: int
    width: int

    def __post_init__(self) -> None:
        most = 2 * MAX_LEVELS + MAX_TRIALS
        check_int("points", self.points, 2, most)
        check_int("width", self.width, 1, most)


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Levels s and trials m of one BQ encoder: codes lie in {0, ..., 2s + m}, or in {0, ..., K - 1} when coarsened.

    A coordinate x in [-R, R] becomes the code s + round(x s / R) + Bin(m, 1/2), with stochastic rounding
    (paper Eqs. 8 to 12, shifted by s so that codes start at 0). trials = 0 is plain QSGD: no noise, no privacy.
    With a coarsening, this is the fine code, and the index of its point is the code that is sent. Privacy rests on s
    and m alone: what is computed from the noised code reveals no more than that code does (claim 7).

    Noise of another law is `Mechanism.of(levels=..., noise=...)`. `trials` is then the largest value of the noise, so
    that codes lie in {0, ..., 2s + trials} and are centred at s + trials / 2 for every law.

    >>> Mechanism(levels=2, trials=251).code_count
    256
    >>> Mechanism(levels=2, trials=251, coarsening=Coarsening(points=16, width=45)).bits_per_coordinate
    4.0
    """

    levels: int
    trials: int
    coarsening: Coarsening | None = None
    noise: NoiseLaw | None = None

    def __post_init__(self) -> None:
        check_int("levels", self.levels, 1, MAX_LEVELS)
        check_int("trials", self.trials, 0, MAX_TRIALS)
        if self.noise is not None and (isinstance(self.noise, Binomial) or self.trials != self.noise.span):
            raise InvalidParameter(f"trials must be the span of {self.noise}; make it with Mechanism.of")
        if self.coarsening is not None:
            last = self.fine_code_count - 1
            if not (self.coarsening.points <= last and self.coarsening.width <= last):
                raise InvalidParameter(
                    f"points and width must be at most 2 levels + trials = {last}, got {self.coarsening}"
                )

    def __repr__(self) -> str:
        # As dataclasses do it, but without a law that is the usual one.
        noise = "" if self.noise is None else f", noise={self.noise!r}"
        return f"Mechanism(levels={self.levels}, trials={self.trials}, coarsening={self.coarsening!r}{noise})"

    @classmethod
    def of(cls, *, levels: int, noise: NoiseLaw) -> Mechanism:
        """The mechanism whose noise has this law.

        >>> from bqsgd._src.laws import DiscreteGaussian
        >>> Mechanism.of(levels=2, noise=DiscreteGaussian(3.0)).code_count
        61
        """
        return cls(levels=levels, trials=noise.span, noise=None if isinstance(noise, Binomial) else noise)

    @property
    def law(self) -> NoiseLaw:
        """The law of the noise: Bin(trials, 1/2) unless `noise` says another."""
        return Binomial(self.trials) if self.noise is None else self.noise

    @property
    def fine(self) -> Mechanism:
        """This mechanism without its coarsening; the accountant uses only this part."""
        return self if self.coarsening is None else replace(self, coarsening=None)

    @property
    def fine_code_count(self) -> int:
        """Number of values a code can take before coarsening, 2s + m + 1."""
        return 2 * self.levels + self.trials + 1

    @property
    def code_count(self) -> int:
        """Number of values a code can take on the wire: 2s + m + 1, or K when coarsened."""
        return self.fine_code_count if self.coarsening is None else self.coarsening.points

    @property
    def step(self) -> float:
        """Distance between neighbouring codes in units of R/s: 1, or W / (K - 1) when coarsened."""
        return 1.0 if self.coarsening is None else self.coarsening.width / (self.coarsening.points - 1)

    @property
    def centre(self) -> float:
        """The mean code of the value 0: s + m/2, or (K - 1)/2 when coarsened."""
        return (self.code_count - 1) / 2

    @property
    def reach(self) -> float:
        """Largest |value| that a code can decode to, in units of R."""
        return self.step * self.centre / self.levels

    @property
    def bits_per_coordinate(self) -> float:
        """log2 of the code count: bits as the paper's communication constraint counts them, not rounded up."""
        return math.log2(self.code_count)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, read back by `from_dict`."""
        # The key is left out, not None: files written before coarsening existed have none, and compare equal.
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        return fields if self.noise is None else fields | {"noise": self.noise.to_dict()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Mechanism:
        """Rebuild and re-check a mechanism; unknown or missing fields raise TypeError."""
        coarsening = fields.get("coarsening")
        noise = law_from(fields["noise"]) if "noise" in fields else None
        return cls(**{**fields, "coarsening": None if coarsening is None else Coarsening(**coarsening), "noise": noise})


def code_dtype(code_count: int) -> np.dtype[np.unsignedinteger]:
    """The smallest unsigned type that holds the codes 0 to code_count - 1: uint8, uint16 or uint32."""
    return np.dtype(np.uint8 if code_count <= 1 << 8 else np.uint16 if code_count <= 1 << 16 else np.uint32)


def check_range(range: Range, dimension: int | None = None) -> Range:
    """Return `range` as a positive finite float or a 1-D float64 array (of length `dimension` if given)."""
    if not isinstance(range, np.ndarray):
        return check_positive("range", range)
    vector = np.ascontiguousarray(range, dtype=np.float64)
    if vector.ndim != 1 or (dimension is not None and vector.size != dimension):
        raise InvalidParameter(
            f"a vector of ranges must be 1-D with one entry per coordinate ({dimension}), got {range.shape}"
        )
    # min and max allocate no array, unlike (vector > 0).all(), and a NaN fails both comparisons.
    if vector.size and not (vector.min() > 0 and vector.max() < np.inf):
        raise InvalidParameter("every entry of a vector of ranges must be positive and finite")
    return vector


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Which part of a model a message carries: one in `one_in` of its `model_dimension` coordinates.

    rotated: whether they are coordinates of the rotated model (`bqsgd._src.subset`).
    """

    one_in: int
    rotated: bool
    model_dimension: int

    def __post_init__(self) -> None:
        check_int("one_in", self.one_in, 2, MOST_ONE_IN)
        check_int("model_dimension", self.model_dimension, 1, 2**63 - 1)

    @property
    def dimension(self) -> int:
        """Coordinates of the message."""
        return -(-self.model_dimension // self.one_in)


def parameters_digest(mechanism: Mechanism, *, range: Range, dimension: int, kept: Kept | None = None) -> bytes:
    """First 16 bytes of SHA-256 over (levels, trials, dimension, range, coarsening, kept, law): docs/wire.md."""
    range = check_range(range, dimension)
    state = hashlib.sha256(b"bqsgd.parameters.v1")
    check_int("dimension", dimension, 1, 2**63 - 1)
    state.update(struct.pack("<IIQ", mechanism.levels, mechanism.trials, dimension))
    if isinstance(range, float):
        state.update(b"\x00" + struct.pack("<d", range))
    else:
        state.update(b"\x01")
        state.update(range.astype("<f8", copy=False).data)
    # Only where there is one: digests of plain mechanisms are those of frames written before coarsening existed.
    if mechanism.coarsening is not None:
        state.update(struct.pack("<II", mechanism.coarsening.points, mechanism.coarsening.width))
    if kept is not None:
        state.update(b"kept" + struct.pack("<IIQ", kept.one_in, kept.rotated, kept.model_dimension))
    if mechanism.noise is not None:
        state.update(b"law" + mechanism.noise.to_bytes())
    return state.digest()[:DIGEST_BYTES]
