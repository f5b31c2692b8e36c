"""What becomes of each client in a round, and the round's own books."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bqsgd.codec import Accumulator
from bqsgd.wire.frame import Frame, Header

OK, DECLINED, REFUSED, MISSING = "ok", "declined", "refused", "missing"


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What became of one client in one round. client is None when a refused frame does not say whose it is.

    points and width are those of the coarsening, 0 where there is none.
    """

    client: int | None
    status: str
    reason: str | None = None
    frame_bytes: int = 0
    levels: int = 0
    trials: int = 0
    points: int = 0
    width: int = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One closed round."""

    round: int
    stepped: bool
    receipts: tuple[Receipt, ...]
    seeded: bool
    bytes_up: int
    bytes_down: int
    seconds: Mapping[str, float]


@dataclass
class OpenRound:
    """The round in progress."""

    opened: float
    bytes_down: int
    sum: Accumulator | None
    frames: dict[int, Frame] = field(default_factory=dict)
    headers: dict[int, Header] = field(default_factory=dict)
    receipts: dict[int, Receipt] = field(default_factory=dict)
    refused: list[Receipt] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"decode": 0.0, "aggregate": 0.0})
    bytes_up: int = 0


def explained(receipts: list[Receipt], refused: list[Receipt]) -> list[Receipt]:
    """A client whose only frame was refused is refused, not missing; frames beyond that are listed after."""
    by_client = {receipt.client: receipt for receipt in reversed(refused) if receipt.client is not None}
    shown, used = [], set()
    for receipt in receipts:
        if receipt.status == MISSING and receipt.client in by_client:
            receipt = by_client[receipt.client]
            used.add(id(receipt))
        shown.append(receipt)
    return shown + [receipt for receipt in refused if id(receipt) not in used]
