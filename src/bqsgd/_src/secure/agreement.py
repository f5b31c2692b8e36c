"""What all parties of a secure sum fix before the first message.

Its digest, the session, is in every message and in everything that is signed. So parties that disagree about anything
here refuse each other's messages, and no message of one run, cohort or setting is valid in another.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from bqsgd._src.errors import InvalidParameter, TooFewClients
from bqsgd._src.params import check_int
from bqsgd._src.secure.graph import Graph, Thresholds
from bqsgd._src.secure.masks import MAX_WIDTH
from bqsgd._src.secure.noise_shares import NoiseParts
from bqsgd._src.secure.roster import Roster

_MAX_DIMENSION = 2**40


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Roster, run, thresholds, size of the vectors, and the noise that a sum needs.

    width: sums are taken modulo 2^width. trials: M, the trials that the honest clients of a sum must contribute
    together. seeded: the secrets of all clients follow from seeds, so there is no claim. cohort: the clients of a key
    batch, ascending; None if the whole roster takes part. widest: the largest width that a key batch may have; 0 for
    `width`.

    The server names cohort and width of every key batch, and `of` makes the agreement for it. The thresholds are those
    of one cohort. Whatever width the server names, it learns a function of the same sum. The width is in the session,
    from which all keys of masks and shares derive. So clients that were told different widths have no keys in common:
    their masks are independent, and a sum over them does not open.
    """

    roster: Roster
    run: str
    rule: Thresholds
    dimension: int
    width: int
    trials: int = 0
    seeded: bool = False
    cohort: tuple[int, ...] | None = None
    widest: int = 0

    def __post_init__(self) -> None:
        check_int("dimension", self.dimension, 1, _MAX_DIMENSION)
        if not self.widest:
            object.__setattr__(self, "widest", self.width)
        check_int("width", self.width, 2, check_int("widest", self.widest, 2, MAX_WIDTH))
        clients, taking_part = len(self.roster.keys), self.rule.clients
        if taking_part > clients:
            raise InvalidParameter(f"the roster has {clients} clients, the thresholds are for {taking_part}")
        if taking_part < clients and self.rule.sparse is not None:
            raise InvalidParameter(
                f"a cohort of {taking_part} clients is too large: it would have a sparse graph, and a server that "
                "chooses the cohort would choose a client's neighbours; name fewer clients, or all"
            )
        if self.cohort is not None and len(self.cohort) != taking_part:
            raise TooFewClients(f"the cohort has {len(self.cohort)} clients, but {taking_part} were agreed on")
        if not 1 <= len(self.run.encode()) <= 255:
            raise InvalidParameter(f"the run's name must take 1 to 255 bytes, got {len(self.run.encode())}")
        # Raises now, not in the middle of a sum, if the trials are out of range.
        self.noise.parts  # noqa: B018

    def of(self, cohort: Iterable[int] | None = None, *, width: int | None = None) -> Agreement:
        """The agreement for one key batch: of this cohort (None: all), modulo 2^width (None: the widest).

        Raises:
            TooFewClients: the cohort does not have the agreed number of clients.
            ForeignClient: a member is not in the roster.
            InvalidParameter: the width is not from 2 to the widest.
        """
        chosen = self.roster.clients if cohort is None else tuple(sorted(set(cohort)))
        everybody = self.rule.clients == len(self.roster.keys) and chosen == self.roster.clients
        named = replace(self, cohort=None if everybody else chosen, width=self.widest if width is None else width)
        # Equal agreements stay one object, with its cached graph.
        named = self if named == self else named
        # Raises now if a member is not in the roster.
        named.members  # noqa: B018
        return named

    @property
    def before_batches(self) -> Agreement:
        """The agreement as the clients know it before the server names a cohort and a width."""
        return replace(self, cohort=None, width=self.widest)

    @cached_property
    def members(self) -> Roster:
        """The clients that take part: the whole roster, or the cohort."""
        if self.cohort is not None:
            return self.roster.only(self.cohort)
        if self.rule.clients < len(self.roster.keys):
            raise TooFewClients(f"the server must name a cohort of {self.rule.clients} clients, but named none")
        return self.roster

    @cached_property
    def graph(self) -> Graph:
        """The neighbours of every client that takes part."""
        return Graph(self.members, self.rule)

    @cached_property
    def noise(self) -> NoiseParts:
        """How many trials each client contributes."""
        return NoiseParts(total=self.trials, rule=self.rule)

    @cached_property
    def run_digest(self) -> bytes:
        """SHA-256 over everything except cohort and width of a key batch."""
        rule, name = self.rule, self.run.encode()
        state = hashlib.sha256(b"bqsgd.secure.run.v3" + self.roster.digest)
        state.update(struct.pack("<B", len(name)) + name)
        state.update(struct.pack("<III", rule.clients, rule.dropouts, rule.colluders))
        state.update(struct.pack("<QBIB", self.dimension, self.widest, self.trials, self.seeded))
        return state.digest()

    @cached_property
    def session(self) -> bytes:
        """SHA-256 over everything, including cohort and width of a key batch."""
        cohort = np.array(() if self.cohort is None else self.cohort, dtype="<u4").tobytes()
        return hashlib.sha256(b"bqsgd.secure.session.v3" + self.run_digest + bytes([self.width]) + cohort).digest()
