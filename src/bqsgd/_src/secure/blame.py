"""Who lied about a share that does not fit: the sum itself tells.

A holder's share of a missing client's mask seed does not fit that client's polynomial. Either the holder revealed
another share than it has, or the missing client gave a false correction. On a full graph that share is the secret from
which the holder made their common mask. So one of the two secrets removes the mask and leaves a sum, whose coordinates
lie close together compared with the modulus. The other one adds a second mask and leaves a uniform vector.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, combinations, islice
from typing import NamedTuple

import numpy as np

from bqsgd._src.errors import BadShares
from bqsgd._src.secure.masks import Lanes, add_mask, scratch_for

_TESTED = 4096
"""Coordinates that are looked at."""
_ENOUGH = 256
"""From so many coordinates on, a sum is told from a uniform vector. With fewer it may not be."""
_CERTAIN = 30.0
"""A uniform vector is gathered more closely than this with probability exp(-30)."""
_MOST_EXPLANATIONS = 256


class Contested(NamedTuple):
    """A mask that a survivor shares with a missing client: its key from what the survivor told, and from the missing
    client's polynomial and corrections; None if nothing follows from these."""

    holder: int
    told: bytes
    derived: bytes | None


def settle(
    contested: Mapping[int, Sequence[Contested]], lanes: Lanes, *, width: int, most: int, known: Collection[int]
) -> frozenset[int]:
    """The missing clients that gave false corrections. The masks that their holders told are removed from the sum, in
    the place of those that follow from the corrections.

    Args:
        contested: by missing client, the masks that it and a survivor state differently.
        lanes: the sum, without the masks that the missing clients state, or told if they state none; changed in place.
        most: with too few coordinates to tell, a client has lied that more holders than this contradict.
        known: holders that have lied for certain, and do not count.

    Raises:
        BadShares: whoever lied, what is left is no sum.
    """
    stating = {client: pairs for client, pairs in contested.items() if all(pair.derived for pair in pairs)}
    moved = {client: np.zeros_like(lanes[:_TESTED]) for client in stating}
    for client, part in moved.items():
        _exchange_masks(client, stating[client], part)
    liars = who_lied(lanes[:_TESTED], moved, width=width)
    if liars is None and (len(lanes) >= _ENOUGH or stating.keys() < contested.keys()):
        raise BadShares("whoever lied about shares, what is left is no sum; the round is lost")
    if liars is None:
        holders = {client: {pair.holder for pair in pairs}.difference(known) for client, pairs in stating.items()}
        liars = frozenset(client for client in stating if len(holders[client]) > most)
    for client in liars:
        _exchange_masks(client, stating[client], lanes)
    return liars | contested.keys() - stating.keys()


def _exchange_masks(client: int, pairs: Iterable[Contested], lanes: Lanes) -> None:
    """Remove the masks that holders told, and put back those that follow from the missing client's corrections."""
    scratch = scratch_for(lanes)
    for pair in pairs:
        assert pair.derived is not None
        # The lower client of a pair added their mask, the higher one subtracted it.
        add_mask(lanes, pair.derived, scratch=scratch, subtract=pair.holder > client)
        add_mask(lanes, pair.told, scratch=scratch, subtract=pair.holder < client)


def gathered(lanes: Lanes, width: int) -> float:
    """How closely numbers modulo 2^width lie together, as points on a circle: d |mean point|^2.

    It is about 1 for d uniform numbers, and d if all are equal.
    """
    points = np.exp(lanes.astype(np.float64) * (2j * np.pi / (1 << width)))
    return float(abs(points.sum()) ** 2 / len(points))


def is_sum(lanes: Lanes, width: int) -> bool:
    """Whether this may be a sum. False only for a uniform vector, and only if there are enough coordinates to tell."""
    return len(lanes) < _ENOUGH or gathered(lanes[:_TESTED], width) > _CERTAIN


def who_lied(lanes: Lanes, moved: Mapping[int, Lanes], *, width: int) -> frozenset[int] | None:
    """Those of the missing clients that lied; None if no explanation leaves a sum.

    lanes: some coordinates of the sum if none of them lied. moved: by missing client, what is added to them if it did.
    """
    clients = sorted(moved)
    sets = chain.from_iterable(combinations(clients, size) for size in range(len(clients) + 1))
    best, most = None, _CERTAIN
    for liars in islice(sets, _MOST_EXPLANATIONS):
        explained = lanes.copy()
        for client in liars:
            explained += moved[client]
        if (score := gathered(explained, width)) > most:
            best, most = frozenset(liars), score
    return best
