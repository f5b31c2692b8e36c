"""Shamir's secret sharing over GF(2^8), for many secrets at once: byte b of a share belongs to byte b of the secret.

A polynomial of `threshold` coefficients is fixed by its values at any `threshold` points: `extend` gives its values at
the others. Shares that both ends can derive need not be sent, so a client lets the polynomial go through those and
sends only the corrections of the rest (`client`). `good_shares` opens a secret although some holders lie.

Why not a library: pycryptodome's `Shamir` draws its coefficients from its own source, so it cannot go through given
shares, and it works bit by bit in Python (`benchmarks/secure.py` measures both). Here the eight bytes of a 64-bit word
are multiplied at a time, and all secrets of a key batch are handled in one call.

A secret is a seed of 16 bytes, from which keys are derived (`masks`); that is as strong as the X25519 keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import BadShares, InvalidParameter
from bqsgd._src.runtime.compiling import njit
from bqsgd._src.secure.masks import xor

SECRET_BYTES = 16
SHARE_BYTES = 16
MAX_POINT = 255
"""Holders have the points 1 to 255; at point 0 the polynomial takes the value of the secret."""
_MOST_TRIES = 5000
"""Choices of shares that `good_shares` tries where more holders lie than can be located: enough for 20 clients."""
_LOW, _ONES = np.uint64(0x7F7F7F7F7F7F7F7F), np.uint64(0x0101010101010101)
_REDUCTION = np.uint64(0x1B)
_ONE, _SEVEN = np.uint64(1), np.uint64(7)
_Words = npt.NDArray[np.uint64]
_Octets = npt.NDArray[np.uint8]


def extend(shares: Mapping[int, bytes], points: Sequence[int]) -> list[bytes]:
    """The values at `points` of the polynomial that goes through all of `shares`, with as many coefficients.

    >>> line = {0: bytes(8), 1: bytes([5] * 8)}
    >>> extend(line, [1, 2])[0] == line[1], extend({2: extend(line, [2])[0], 1: line[1]}, [0])[0] == line[0]
    (True, True)

    Raises:
        InvalidParameter: a point is out of range or given twice, or the shares have different or unusable lengths.
    """
    known = sorted(shares)
    for given in (known, points):
        if not given or len(set(given)) < len(given) or not set(given) <= set(range(MAX_POINT + 1)):
            raise InvalidParameter(f"points must be different numbers from 0 to {MAX_POINT}, got {list(given)}")
    size = len(shares[known[0]])
    if not size or size % 8 or any(len(share) != size for share in shares.values()):
        raise InvalidParameter("all shares must have the same length, a multiple of 8 bytes")
    values = np.frombuffer(b"".join(shares[point] for point in known), dtype="<u8").reshape(len(known), -1)
    return [value.tobytes() for value in _lagrange(_points(known), values, _points(points))]


class Row(NamedTuple):
    """A polynomial through derived shares.

    secret: its value at 0. base: its values at the points of `base_points`. differ: point -> what the derived share at
    any other point differs by from the polynomial.
    """

    secret: bytes
    base: list[bytes]
    differ: dict[int, bytes]


def base_points(points: Iterable[int], threshold: int, *, with_secret: bool) -> list[int]:
    """The points of given values: the lowest ones of derived shares, and 0 if the secret is given too."""
    ordered = sorted(points)
    return [0, *ordered[: threshold - 1]] if with_secret else ordered[:threshold]


def row_through(derived: Mapping[int, bytes], *, threshold: int, secret: bytes | None = None) -> Row:
    """The polynomial of `threshold` coefficients through derived shares, and through the secret if there is one.

    >>> shares = {point: bytes([point] * 8) for point in (1, 2, 5)}
    >>> row = row_through(shares, threshold=2)
    >>> true = shares | {point: xor(shares[point], differ) for point, differ in row.differ.items()}
    >>> sorted(row.differ), extend({1: true[1], 5: true[5]}, [0]) == [row.secret]
    ([5], True)
    """
    given = derived if secret is None else {0: secret, **derived}
    base = base_points(derived, threshold, with_secret=secret is not None)
    others = sorted(set(derived) - set(base))
    values = extend({point: given[point] for point in base}, [0, *others])
    differ = {point: xor(value, derived[point]) for point, value in zip(others, values[1:], strict=True)}
    return Row(values[0], [given[point] for point in base], differ)


def check_of(values: Iterable[bytes], *, about: bytes) -> bytes:
    """A digest of a polynomial, by its values at points that the reader knows.

    Of the whole polynomial: two liars together could move all its values but that of the secret. about: which secret it
    is (`messages.KeyBatch.about`). Checks are public; without it one guess could be compared with those of all secrets.
    """
    return hashlib.sha256(about + b"".join(values)).digest()[:SECRET_BYTES]


def good_shares(
    shares: Mapping[int, bytes], *, threshold: int, points: Sequence[int], check: bytes, about: bytes
) -> dict[int, bytes]:
    """`threshold` shares of the polynomial whose values at `points` have this check, however other holders lie.

    Of r shares, up to (r - threshold) / 2 wrong ones are located exactly (Berlekamp and Welch). With more of them, the
    choices of `threshold` shares are tried one by one, up to a limit.

    Raises:
        BadShares: too few shares, or no choice fits.
    """
    held = sorted(shares)
    if len(held) < threshold:
        raise BadShares(f"the secret needs {threshold} shares, got {len(held)}")

    def choices() -> Iterator[Sequence[int]]:
        yield held[:threshold]
        columns = np.frombuffer(b"".join(shares[point] for point in held), np.uint8).reshape(len(held), -1)
        wrong = frozenset[int]().union(*(_wrong_at(held, column, threshold) for column in columns.T))
        if len(held) - len(wrong) >= threshold:
            yield [point for point in held if point not in wrong][:threshold]
        yield from islice(combinations(held, threshold), _MOST_TRIES)

    for choice in choices():
        chosen = {point: shares[point] for point in choice}
        if check_of(extend(chosen, points), about=about) == check:
            return chosen
    raise BadShares(f"no {threshold} of the {len(held)} shares that came fit the secret that was agreed on")


def _points(points: Sequence[int]) -> _Words:
    return np.array(points, dtype=np.uint64)


def _wrong_at(points: Sequence[int], values: _Octets, threshold: int) -> frozenset[int]:
    """The points at which one byte of the shares is wrong, if these are at most half of those beyond the threshold.

    With e wrong values there are polynomials E of degree e, zero at the wrong points, and Q = p E with
    Q(x) = value(x) E(x) at every point: linear equations for their coefficients. Where E is not zero the values are
    those of p, so `threshold` of them give p, and p shows which values are wrong.
    """
    product, e = _products(), (len(points) - threshold) // 2
    if e == 0:
        return frozenset()
    x = np.array(points, dtype=np.uint8)
    powers = np.ones((len(points), threshold + e), dtype=np.uint8)
    for degree in range(1, threshold + e):
        powers[:, degree] = product[powers[:, degree - 1], x]
    # Unknown: the coefficients of Q, then those of E below the leading one, which is 1.
    table = np.hstack([powers, product[powers[:, :e], values[:, None]], product[powers[:, e], values][:, None]])
    located = product[powers[:, :e], _solution(table)[threshold + e :][None, :]]
    here = np.flatnonzero(np.bitwise_xor.reduce(located, axis=1) ^ powers[:, e])[:threshold]
    if here.size < threshold:
        return frozenset()
    base = {points[row]: bytes([values[row]] * 8) for row in here}
    return frozenset(
        point for point, value, true in zip(points, values, extend(base, points), strict=True) if int(value) != true[0]
    )


def _solution(table: _Octets) -> _Octets:
    """A solution of linear equations over GF(2^8), the right-hand side in the last column; free unknowns are 0."""
    table, product = table.copy(), _products()
    rows, unknowns = table.shape[0], table.shape[1] - 1
    pivots: list[int] = []
    for column in range(unknowns):
        at = len(pivots)
        below = np.flatnonzero(table[at:, column])
        if below.size == 0:
            continue
        table[[at, at + below[0]]] = table[[at + below[0], at]]
        inverse = int(np.flatnonzero(product[table[at, column]] == 1)[0])
        table[at] = product[inverse, table[at]]
        others = np.flatnonzero(np.arange(rows) != at)
        table[others] ^= product[table[others, column][:, None], table[at][None, :]]
        pivots.append(column)
        if len(pivots) == rows:
            break
    solution = np.zeros(unknowns, dtype=np.uint8)
    solution[pivots] = table[: len(pivots), -1]
    return solution


@lru_cache(maxsize=1)
def _products() -> _Octets:
    """The product of every two elements of the field."""
    words = np.arange(256, dtype=np.uint8).view(np.uint64)
    return np.array([[_times(word, np.uint64(factor)) for word in words] for factor in range(256)], np.uint64).view(
        np.uint8
    )


@njit(cache=True, nogil=True, inline="always")
def _times(word: np.uint64, factor: np.uint64) -> np.uint64:
    """factor * word in GF(2^8), modulo x^8 + x^4 + x^3 + x + 1, for each of the eight bytes of a word.

    It always takes eight steps, with products instead of branches: the time does not depend on the secret, and the
    compiler can handle several words at once.
    """
    total = np.uint64(0)
    for bit in range(8):
        total ^= word * ((factor >> np.uint64(bit)) & _ONE)
        # Times x: shift every byte, and reduce those that had the highest bit set.
        word = ((word & _LOW) << _ONE) ^ (((word >> _SEVEN) & _ONES) * _REDUCTION)
    return total


@njit(cache=True, nogil=True)
def _lagrange(points: _Words, values: _Words, wanted: _Words) -> _Words:
    """The values at `wanted` of the polynomials through `values`. Addition and subtraction are both exclusive or."""
    count = points.size
    # 1 / product of (x_i - x_j): 1 / y = y^254 = y^2 y^4 ... y^128.
    scale = np.empty(count, dtype=np.uint64)
    for row in range(count):
        under, inverse = _ONE, _ONE
        for other in range(count):
            if other != row:
                under = _times(under, points[other] ^ points[row])
        for _ in range(7):
            under = _times(under, under)
            inverse = _times(inverse, under)
        scale[row] = inverse
    result = np.zeros((wanted.size, values.shape[1]), dtype=np.uint64)
    for place in range(wanted.size):
        # Products of (x - x_j) over j < row and over j > row, so that none is divided by.
        after = np.empty(count + 1, dtype=np.uint64)
        after[count] = _ONE
        for row in range(count - 1, -1, -1):
            after[row] = _times(after[row + 1], wanted[place] ^ points[row])
        before, total = _ONE, result[place]
        for row in range(count):
            weight = _times(_times(before, after[row + 1]), scale[row])
            before = _times(before, wanted[place] ^ points[row])
            for index in range(total.size):
                total[index] ^= _times(values[row, index], weight)
    return result
