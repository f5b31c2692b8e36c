"""What comes back from one client in one exchange: bytes, or the reason why there are none.

The client makes it, every engine carries it, and the server turns it into a line of the round's record. There is one
type, so that "declined" and "missing" mean the same on every way from a client to the record.
"""

from __future__ import annotations

from dataclasses import dataclass

from bqsgd._src.wire.frame import Buffer

WHOLE_MODEL_NEEDED = "it does not hold the model that was changed: send the whole one"
"""A client's reason for declining changes of a model; the server then sends it the whole model in the same round."""
BUDGET_SPENT = "the privacy budget is spent"
NO_PLAN = "no plan for the budget"
"""How the reasons of a client begin that can send nothing in any later round either."""
RUN_SPENT = f"{BUDGET_SPENT}: that of this run, to which its ledger counts all rounds under the run's name"
"""The reason of a client whose own limit has room left."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One client's reply.

    Attributes:
        client: the number of the client, as the engine knows it.
        frame: its bytes, not yet checked: a frame, or a message of a secure sum. None if there are none.
        reason: why there are no bytes. It must not depend on the client's data: the server reads it.
        declined: True if the client itself said that it sends nothing. False with no bytes means that it is missing:
            it crashed, is late or cannot be reached.
        arrived: when the reply came, on the monotonic clock; None for "now".
    """

    client: int
    frame: Buffer | None = None
    reason: str | None = None
    declined: bool = False
    arrived: float | None = None

    @classmethod
    def decline(cls, client: int, reason: str) -> Reply:
        """The reply of a client that sends nothing, with its reason."""
        return cls(client=client, reason=reason, declined=True)
