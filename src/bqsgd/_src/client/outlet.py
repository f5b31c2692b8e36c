"""What leaves a client: a frame for the server to read, or a masked vector that only a secure sum can open.

This is all that differs between the two trust models. Everything before it (`sender.Sender`) is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bqsgd._src.client.values import Values
from bqsgd._src.codec import encode_frame
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.noise import NoiseSource
from bqsgd._src.params import Mechanism
from bqsgd._src.release import Release
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.noise_shares import encode_base


class Outlet(Protocol):
    """Turns clipped values into the bytes of one message.

    Values are clamped to the range, because a Poisson batch can be larger than the public batch size. The clamp is
    1-Lipschitz, so the sensitivity that the accountant was given still holds.
    """

    def encode(self, values: Values, mechanism: Mechanism, *, round: int, rng: NoiseSource) -> bytearray:
        """The bytes of the message of `round`; `rng` draws the rounding and the noise."""


@dataclass(frozen=True, kw_only=True)
class FrameOutlet:
    """A frame with the client's own noise: the server may read it alone."""

    client: int
    range: float
    coding: str = "fixed"

    def encode(self, values: Values, mechanism: Mechanism, *, round: int, rng: NoiseSource) -> bytearray:
        """The frame of `round`."""
        return encode_frame(
            values,
            mechanism,
            range=self.range,
            rng=rng,
            client=self.client,
            round=round,
            coding=self.coding,
            clamp=True,
        )


@dataclass(frozen=True, kw_only=True)
class MaskedOutlet:
    """A vector with this client's part of the noise, under masks that cancel in the sum over the clients."""

    sums: SumClient
    range: float

    def check(self, release: Release, *, seeded: bool) -> None:
        """Check that the sum has the noise that the ledger would count; call it before the spend.

        seeded: whether the ledger would count the noise as seeded.

        Raises:
            InvalidParameter: the clients agreed on other noise or colluders, or this client's part is seeded.
        """
        agreed, terms = self.sums.agreement, release.terms
        counted = (release.mechanism.trials, terms.colluders, terms.failure, terms.dimension)
        if counted != (agreed.trials, agreed.rule.colluders, agreed.rule.failure, agreed.dimension):
            raise InvalidParameter(
                f"the clients agreed on {agreed.trials} trials and {agreed.rule.colluders} colluders, client "
                f"{self.sums.number} would count {release.mechanism.trials} and {terms.colluders}: nothing is sent"
            )
        if self.sums.seeded and not seeded:
            raise InvalidParameter(
                f"the secure sums of client {self.sums.number} are seeded, so its noise can be removed, and its ledger "
                "would count it as private: nothing is sent; leave out the seed"
            )

    def encode(self, values: Values, mechanism: Mechanism, *, round: int, rng: NoiseSource) -> bytearray:
        """The masked vector of `round`. The keys of a round mask one vector only; `SumClient.mask` refuses a second."""
        agreed = self.sums.agreement
        codes = encode_base(
            values,
            mechanism.levels,
            agreed.noise.cuts[0],
            width=agreed.width,
            range=self.range,
            rng=rng,
            clamp=True,
        )
        return self.sums.mask(round, codes)
