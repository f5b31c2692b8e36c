"""What all parties of a secure sum agree on before the first message; its digest, the session, is in every one."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

from bqsgd.errors import InvalidParameter
from bqsgd.params import check_int
from bqsgd.secure.graph import Thresholds
from bqsgd.secure.masks import MAX_WIDTH
from bqsgd.secure.noise_shares import NoiseParts
from bqsgd.secure.roster import Roster

_MAX_DIMENSION = 2**40


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Roster, run, thresholds, size of the vectors, and the noise that a sum needs.

    width: the sum is taken modulo 2^width. trials: M, what the honest clients of a sum must bring together.
    """

    roster: Roster
    run: str
    rule: Thresholds
    dimension: int
    width: int
    trials: int = 0

    def __post_init__(self) -> None:
        check_int("dimension", self.dimension, 1, _MAX_DIMENSION)
        check_int("width", self.width, 2, MAX_WIDTH)
        if len(self.roster.keys) != self.rule.clients:
            raise InvalidParameter(
                f"the roster has {len(self.roster.keys)} clients, the thresholds are for {self.rule.clients}"
            )
        if not 1 <= len(self.run.encode()) <= 255:
            raise InvalidParameter("the run's name must take 1 to 255 bytes")
        self.noise.parts  # noqa: B018  (checks the trials now)

    @cached_property
    def noise(self) -> NoiseParts:
        """Who brings how many trials."""
        return NoiseParts(total=self.trials, rule=self.rule)

    @cached_property
    def session(self) -> bytes:
        """SHA-256 over all of it."""
        rule, name = self.rule, self.run.encode()
        state = hashlib.sha256(b"bqsgd.secure.session.v1" + self.roster.digest)
        state.update(struct.pack("<B", len(name)) + name)
        state.update(struct.pack("<III", rule.clients, rule.dropouts, rule.colluders))
        state.update(struct.pack("<QBI", self.dimension, self.width, self.trials))
        return state.digest()
