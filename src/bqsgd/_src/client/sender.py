"""The privacy argument, in the order in which it runs: nothing leaves a client except through `Sender`.

`Client` (a client of a run), `private.Private` (a loop of your own) and the DDP hook all send through this class. To
check that their messages are private, check three things here:

1. The spend is durable in the ledger before gradients are computed. A client of a run reads no sample for a message
   before it (`client.data_check` looks at the data before the first spend, and tells only the client's own log); the
   loader of a private loop and the caller of the DDP hook have drawn and read their batch by then.
2. After the spend nothing depends on the data except through the mechanism: no error, no warning, no order of random
   draws, no Ctrl-C. The caller raises what the model and the settings alone would raise before it calls `send`.
3. What is encoded is the clipped mean (its sensitivity is in the release that was counted), clamped to the range, with
   noise from the source of that round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bqsgd._src.client.draws import Purpose, Sources
from bqsgd._src.client.values import Values
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger.spending import Charge, Spending
from bqsgd._src.params import Mechanism
from bqsgd._src.runtime.interrupts import interrupts_deferred
from bqsgd._src.runtime.modes import full_precision, silence

Outlet = Callable[..., bytearray]
"""(values, mechanism, round=, rng=, clamp=) -> the bytes of a message: `codec.encode_frame` makes a frame for the
server, `client.sums.masked_vector` a vector that only a secure sum can open. The two trust models differ in nothing
else."""


class Sender:
    """Counts one message, computes its values, and encodes them.

    Args:
        spending: the client's side of its ledger.
        sources: where every random draw of this client comes from; they know the client's number.
    """

    def __init__(self, spending: Spending, sources: Sources) -> None:
        self.spending, self.sources = spending, sources
        self.next_round = 0
        """The round after the last one that was counted, whatever ended it; a private loop's step number."""
        self.seconds: dict[str, float] = {}
        """How long each stage of the last message took. It depends on the size of the batch: keep it private."""

    def send(self, charge: Charge, outlet: Outlet, values: Callable[[], Values], *, draws: bool = True) -> bytearray:
        """The bytes of one message; its spend is recorded before `values` is called.

        The first Ctrl-C is raised when the message is complete, a second one at once.

        values: draws, reads, clips and adds up. It returns values for any data whatever: see `client.objective`.
        draws: whether model or data draw at random. If not, clients in other threads need not wait for their turn.

        Raises:
            BudgetExhausted: the message would exceed the budget. Nothing was recorded, and `values` was not called.
        """
        with interrupts_deferred():
            with self.counted(charge, draws=draws):
                mean = values()
            return self.encode(mean, charge.release.mechanism, outlet, round=charge.round)

    @contextmanager
    def counted(self, charge: Charge, *, draws: bool = True) -> Iterator[None]:
        """Record the spend; the block then computes the clipped mean, which is for `encode` and for nothing else."""
        if charge.release.event is not None:
            raise InvalidParameter("a release that was made elsewhere is no message: it has no noise of ours")
        # Firm: not even a second Ctrl-C may come between the ledger's entry and the note that the round is taken.
        with self.timed("ledger"), interrupts_deferred(firm=True):
            self.spending.spend(charge)
            self.next_round = charge.round + 1
        # What dropout and augmentation draw is secret too: with known masks, one sample would move all the others.
        lent = self.sources.lent(Purpose.FORWARD, charge.round, shared=not draws)
        # A warning that a filter turns into an error would cost the sample that caused it, so warnings are off.
        with self.timed("gradients"), full_precision(), silence, lent:
            yield

    def encode(self, mean: Values, mechanism: Mechanism, outlet: Outlet, *, round: int) -> bytearray:
        """What may leave: the mean as codes with the noise of that round."""
        # A process that was forked while the values were made would send a second message for the one that was counted.
        if self.spending.ledger is not None:
            self.spending.ledger.check_process()
        rng = self.sources.at(Purpose.NOISE, round)
        # A Poisson batch can be larger than the public batch size, and its mean then larger than the range. The clamp
        # is 1-Lipschitz, so the sensitivity that the accountant was given still holds.
        with self.timed("encode"):
            return outlet(mean, mechanism, round=round, rng=rng, clamp=True)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time that the block takes to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started
