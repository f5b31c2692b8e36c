"""A guarantee: an epsilon with everything that must be stated beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from enum import StrEnum
from typing import Any

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_delta, check_int
from bqsgd._src.release import Relation, Trust, Unit
from bqsgd._src.text import one_line

_LARGEST = 10**300
_OFTEN_EMPTY = ("assumption", "colluders", "group")
_MAX_TEXT = 4096
_MAX_JSON = 1 << 16
MEANINGLESS_EPSILON = 1000.0
"""A larger epsilon is not computed precisely; it is shown as "no meaningful guarantee"."""
_PLAIN = (Decimal("1e-4"), Decimal("1e9"))
"""Values from the first to below the second are shown without a power of ten."""

_EARLIER_METHODS = {
    "exact: privacy loss distribution, L-infinity": "proven upper bound (loss distribution, L-infinity)",
    "exact: Renyi moments, L2 and L-infinity": "proven upper bound (Renyi moments, L2 and L-infinity)",
}
"""The names of methods in older files -> today's."""


def method_name(stored: str) -> str:
    """Today's name of a method that an older file may call otherwise; any other text is returned as it is."""
    return _EARLIER_METHODS.get(stored, stored)


def rounded_up(value: float, digits: int = 4) -> str:
    """An upper bound in a few significant digits: rounded up, never to the nearest, so that it stays an upper bound.

    Every proven epsilon that people read goes through here; JSON keeps all digits.

    >>> rounded_up(0.331749), rounded_up(0.18181637, 6), rounded_up(2.0000001e-6)
    ('0.3318', '0.181817', '2.001e-6')
    """
    return _in_digits(value, digits, ROUND_CEILING)


def rounded_down(value: float, digits: int = 4) -> str:
    """A lower bound, such as an audit's, in a few significant digits: rounded down, so that it stays a lower bound.

    >>> rounded_down(0.331749)
    '0.3317'
    """
    return _in_digits(value, digits, ROUND_FLOOR)


def as_given(value: float) -> str:
    """A number that the user has given, such as a budget, with all its digits.

    >>> as_given(3.0), as_given(1.00000049)
    ('3', '1.00000049')
    """
    return repr(float(value)).removesuffix(".0")


def _in_digits(value: float, digits: int, rounding: str) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    # From repr, the decimal that the number is known by: 0.1 must not be rounded up to 0.1001.
    rounded = Context(prec=digits, rounding=rounding).create_decimal(repr(float(value)))
    return f"{rounded:f}" if _PLAIN[0] <= abs(rounded) < _PLAIN[1] else f"{rounded:e}"


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """(epsilon, delta)-differential privacy of everything that one client has sent, in the worst case over data.

    `epsilon` is an upper bound, infinite if nothing finite is proven; `delta_floor` is the least delta at which the
    method can give a finite epsilon; `seeded` marks noise that anyone who knows the seed can remove; `assumption` is
    what the guarantee rests on besides its proof, empty if nothing; `colluders` is how many clients may tell the server
    all they know, if it sees only sums; `group` is the number of clients in the smallest group whose sum it sees, 0 if
    all are in one sum.

    >>> guarantee = Guarantee(
    ...     epsilon=0.33175, delta=1e-5, relation=Relation.ADD_REMOVE, unit=Unit.SAMPLE, trust=Trust.EACH_CLIENT,
    ...     sampling="poisson, rate 0.01", method="proven upper bound", delta_floor=0.0)
    >>> guarantee.epsilon_text, guarantee.neighbours
    ('0.3318', 'add/remove one sample (a null record in its place)')
    """

    epsilon: float
    delta: float
    relation: Relation
    unit: Unit
    trust: Trust
    sampling: str
    method: str
    delta_floor: float
    seeded: bool = False
    assumption: str = ""
    colluders: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        if math.isnan(self.epsilon) or self.epsilon < 0:
            raise InvalidParameter(f"epsilon must be at least 0 (or infinite), got {self.epsilon}")
        check_delta("delta", self.delta)
        if not 0 <= self.delta_floor <= 1:
            raise InvalidParameter(f"delta_floor must be from 0 to 1, got {self.delta_floor}")

    def assuming(self, *assumptions: str) -> Guarantee:
        """The same guarantee, which rests on these assumptions too; empty ones, and those it states, add nothing."""
        parts = [part for text in (self.assumption, *assumptions) for part in text.split("; ") if part]
        return replace(self, assumption="; ".join(dict.fromkeys(parts)))

    @property
    def epsilon_text(self) -> str:
        """Epsilon as people should read it."""
        if self.epsilon > MEANINGLESS_EPSILON:
            return f"> {MEANINGLESS_EPSILON:.0f}: no meaningful guarantee"
        return rounded_up(self.epsilon)

    @property
    def trust_text(self) -> str:
        """What the adversary sees; if it sees only sums, also how many clients may collude with it."""
        if self.trust is not Trust.SUMS_ONLY:
            return str(self.trust)
        if not self.group:
            helpers = f"at most {self.colluders} clients collude" if self.colluders else "no client colludes"
            return f"{self.trust}; {helpers} with it"
        helpers = (
            f"at most {self.colluders} clients, perhaps all of one group, collude"
            if self.colluders
            else "no client colludes"
        )
        return f"server sees sums over groups of {self.group}; {helpers} with it"

    @property
    def neighbours(self) -> str:
        """Which data sets are neighbours. The number of records is public, so a null record replaces a removed one."""
        null_record = " (a null record in its place)" if self.relation is Relation.ADD_REMOVE else ""
        return f"{self.relation} {self.unit}{null_record}"

    def __str__(self) -> str:
        text = (
            f"epsilon {self.epsilon_text} at delta {self.delta:g} ({self.neighbours}; {self.trust_text}; "
            f"{self.sampling}; {self.method})"
        )
        if self.assumption:
            text += f", assuming that {self.assumption}"
        return f"{text} [seeded noise: no privacy claim]" if self.seeded else text

    def to_dict(self) -> dict[str, Any]:
        """The guarantee in plain JSON types; an infinite epsilon becomes the string "inf"."""
        fields = {name: str(value) if isinstance(value, StrEnum) else value for name, value in asdict(self).items()}
        if math.isinf(self.epsilon):
            fields["epsilon"] = "inf"
        # Left out if empty, so that files from before these fields existed compare equal.
        return {name: value for name, value in fields.items() if value or name not in _OFTEN_EMPTY}

    def to_json(self) -> str:
        """The guarantee as JSON text, with everything that must be stated beside epsilon; read it with `from_json`."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Guarantee:
        """Read what `to_json` wrote; the text may be anybody's. It is a claim of its writer: nothing here proves it.

        Raises:
            InvalidParameter: the text is too long, or not a guarantee.

        >>> Guarantee.from_json('{"epsilon": 1}')
        Traceback (most recent call last):
        ...
        bqsgd._src.errors.InvalidParameter: not a guarantee: 'delta' is missing
        """
        if not isinstance(text, (str, bytes)) or len(text) > _MAX_JSON:
            raise InvalidParameter(f"not a guarantee: it must be JSON text of at most {_MAX_JSON} characters")
        try:
            fields = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(f"not a guarantee: {str(error)[:200]}") from error
        return cls.from_dict(fields)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Guarantee:
        """Read what `to_dict` wrote. The file may be hostile, so the type, range and length of every field are checked.

        Raises:
            InvalidParameter: a field is missing, unknown or not valid.
        """
        if not isinstance(fields, Mapping):
            raise InvalidParameter("not a guarantee: it must be a JSON object")
        unknown = sorted(str(name)[:40] for name in fields if name not in cls.__dataclass_fields__)
        if unknown:
            raise InvalidParameter(f"not a guarantee: the field {unknown[0]!r} is unknown")
        try:
            return cls(
                epsilon=_figure("epsilon", fields["epsilon"]),
                delta=_figure("delta", fields["delta"]),
                relation=Relation(fields["relation"]),
                unit=Unit(fields["unit"]),
                trust=Trust(fields["trust"]),
                sampling=_words("sampling", fields["sampling"]),
                method=method_name(_words("method", fields["method"])),
                delta_floor=_figure("delta_floor", fields["delta_floor"]),
                seeded=_flag("seeded", fields.get("seeded", False)),
                assumption=_words("assumption", fields.get("assumption", "")),
                colluders=check_int("colluders", fields.get("colluders", 0), 0, 2**53),
                group=check_int("group", fields.get("group", 0), 0, 2**53),
            )
        except KeyError as error:
            raise InvalidParameter(f"not a guarantee: {error} is missing") from error
        except ValueError as error:  # Cut short: an enumeration's message quotes the value, which may be very long.
            raise InvalidParameter(f"not a guarantee: {str(error)[:200]}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object, if no name is in it twice: readers would differ about which value counts."""
    if len(dict(pairs)) != len(pairs):
        raise InvalidParameter("not a guarantee: a name is stated twice")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise InvalidParameter(f"not a guarantee: {name} is not JSON")


def _figure(name: str, value: object) -> float:
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > _LARGEST:
        raise InvalidParameter(f"{name} must be a number or 'inf'")
    return float(value)


def _words(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise InvalidParameter(f"{name} must be text of at most {_MAX_TEXT} characters")
    return one_line(value, limit=None)  # shown in the terminal and on pages, and a client states it of itself


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidParameter(f"{name} must be true or false")
    return value
