"""One client of Algorithm 1 (Lines 3 to 10): it receives the model and answers with a frame, or declines.

It holds its data, its budget and its ledger, and does no input or output besides the ledger. Engines carry its bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from bqsgd._src.client.draws import Purpose, Rows, Sources, draw_batch
from bqsgd._src.client.least_squares import message_dimension, objective_of
from bqsgd._src.client.objective import Objective
from bqsgd._src.client.outlet import FrameOutlet, MaskedOutlet, Outlet
from bqsgd._src.client.samples import reader_of
from bqsgd._src.client.sender import Sender
from bqsgd._src.client.values import Values, client_values
from bqsgd._src.errors import BudgetExhausted, Infeasible, InvalidParameter, ModelNotHeld, SecureSumError
from bqsgd._src.ledger import Ledger
from bqsgd._src.ledger.spending import Charge, Spending
from bqsgd._src.models import dimension_of, load_vector
from bqsgd._src.noise import NoiseSource
from bqsgd._src.persample.program import Forward, LossFunction
from bqsgd._src.planner.plan import Budget
from bqsgd._src.planner.search import PlanningTooLong, cpu_seconds
from bqsgd._src.release import Release, Scheme, Unit
from bqsgd._src.runtime.interrupts import StopNow, interrupts_deferred
from bqsgd._src.runtime.modes import full_precision
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.messages import is_sum_message
from bqsgd._src.settings.client_plan import client_terms, public_size, release_in
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.node_limits import NodeLimits
from bqsgd._src.wire.model_change import receive_model
from bqsgd._src.wire.model_message import ModelMessage
from bqsgd._src.wire.reply import WHOLE_MODEL_NEEDED, Reply

_log = logging.getLogger("bqsgd.samples")
PrivateLog = Callable[[dict[str, Any]], None]
"""Receives figures computed from private data, outside the guarantee; they must stay on the client."""


def answer_step(sums: SumClient, message: bytes | bytearray | memoryview) -> Reply:
    """Answer a step of a secure sum. If the step is refused the client declines, and nothing was revealed."""
    try:
        return Reply(client=sums.number, frame=sums.answer(message))
    except SecureSumError as error:
        return Reply.decline(sums.number, f"{type(error).__name__}: {error}")


class Client:
    """A client with its own data.

    Args:
        client: its number; the server knows it by this.
        model: where the received parameters are put to work; clients that answer one after another may share one.
        loss_fn: (outputs, targets) -> one loss per sample.
        samples: its data: inputs and targets, a Dataset or a DataLoader.
        config: the run's settings, the same for all (a client's own budget is in `config.privacy.budgets`).
        ledger: what it has spent, durable. None only with seeded noise or without noise: no privacy claim.
        run: name of the run in the ledger.
        resume: the run continues after a stop; rounds recorded before are counted again when their noise is new.
        private_log: where figures outside the guarantee go when `config.privacy.private_metrics` is on.
        limits: what its operator agrees to; None if the operator set up the run. An epsilon in them is the budget of
            the ledger, and no run changes it.
        forward: (model, batch) -> (outputs, targets), for batches of another form than (inputs..., targets).
        sample: a made-up record as the data set gives one, for its shapes and types: no record is read to find them
            out. Not needed for arrays and tensors in memory.
        sums: its side of the run's secure sums if the settings have them; the client then sends masked vectors.
        objective: of the model. Clients that share a model share it too, so that the model is checked once.
    """

    def __init__(
        self,
        *,
        client: int,
        model: nn.Module,
        loss_fn: LossFunction,
        samples: Any,
        config: Config,
        ledger: Ledger | None,
        run: str = "run",
        resume: bool = False,
        private_log: PrivateLog | None = None,
        limits: NodeLimits | None = None,
        forward: Forward | None = None,
        sample: Any = None,
        sums: SumClient | None = None,
        objective: Objective | None = None,
    ) -> None:
        if config.secure.on != (sums is not None):
            raise InvalidParameter(
                "secure sums are on for this run, but this client was created without them (or the other way round)"
            )
        self.sums = sums
        self.client, self.model, self.config, self.limits = client, model, config, limits
        dimension = message_dimension(config.run.method, model)
        if limits is not None:
            refusal = limits.refusal(config, client=client) or limits.model_refusal(dimension)
            if refusal is not None:
                raise InvalidParameter(refusal)
        self.samples, self.objective = reader_of(samples), objective or objective_of(config, model, loss_fn, forward)
        self._check_size()
        if config.privacy.private_metrics and private_log is None:
            raise InvalidParameter("private_metrics needs a private_log that keeps the figures on the client")
        self.private_log = private_log if config.privacy.private_metrics else None
        self.sources = Sources(seed=config.privacy.seed, client=client)
        self.clip, self.range = config.clip.make(), config.range
        self.terms = client_terms(config, dimension=dimension, dataset_size=len(self.samples))
        self.public_size = public_size(config, len(self.samples))
        """How many samples it states."""
        # A sum is lost with one crash too many, and what was reserved for it with it: nothing is reserved ahead then.
        # With a cohort nobody knows its next turn.
        alone = config.secure.on or config.clients.cohort is not None
        ahead = 1 if alone else config.clients.reserve_rounds
        self.spending = Spending(ledger, run=run, seeded=self.sources.seeded, ahead=ahead, resume=resume)
        self.sender = Sender(self.spending, self.sources)
        self.held: ModelMessage | None = None
        """The model it was sent last, where the next message may be its changes."""
        self._sample = sample
        self._form: Any = None
        self._last: tuple[int, npt.NDArray[np.float32], Reply] | None = None

    @property
    def outlet(self) -> Outlet:
        """What its messages leave as: frames, or masked vectors of the run's secure sums."""
        if self.sums is not None:
            return MaskedOutlet(sums=self.sums, range=self.range)
        return FrameOutlet(client=self.client, range=self.range, coding=self.config.clients.coding)

    @property
    def seconds(self) -> dict[str, float]:
        """How long each stage of the last reply took. It depends on the size of the batch: keep it private."""
        return self.sender.seconds

    def answer(self, message: bytes | bytearray | memoryview) -> Reply:
        """Read the server's message and reply: to a model with a frame, to a step of a secure sum with the next one.

        A model message that is damaged raises ModelMessageError and costs nothing; changes of a model that it does not
        hold are declined with WHOLE_MODEL_NEEDED. A step of a sum that is refused is declined, and nothing was
        revealed; the reason depends on messages alone.
        """
        if self.sums is not None and is_sum_message(message):
            return answer_step(self.sums, message)
        started = time.perf_counter()
        try:
            received = receive_model(message, dimension=dimension_of(self.model), held=self.held)
        except ModelNotHeld:
            return self._declined(WHOLE_MODEL_NEEDED)
        if self.config.server.down_bits is not None:
            self.held = received
        elapsed = time.perf_counter() - started
        reply = self.update(received.model, received.round)
        self.seconds["frame"] = elapsed
        return reply

    def _declined(self, reason: str) -> Reply:
        return Reply.decline(self.client, reason)

    def update(self, model: npt.NDArray[np.float32], round: int) -> Reply:
        """The frame of one round, its spend recorded before it is returned; or the reason for sending nothing.

        Once the round is recorded there is a frame whatever the data are: see `client.objective`. A Ctrl-C is raised
        when the frame is made; asked again for the same round, the client then gives the same bytes.

        Raises:
            InvalidParameter, NonFiniteInput: the model vector does not fit or is not finite, or the model cannot be
                trained privately; nothing was recorded.
        """
        with interrupts_deferred():
            self.sender.seconds = {}
            again = self._last is not None and self._last[0] == round and np.array_equal(self._last[1], model)
            if again and self._last is not None and not (self.sums is not None and self.sums.ready(round)):
                return self._last[2]  # asked again: the same bytes reveal nothing new and cost nothing
            reason = self._refusal(model, round)
            if reason is not None:
                return self._declined(reason)
            try:
                release = self.release(round)
            except Infeasible as error:
                return self._declined(f"no plan for the budget: {error}")
            except PlanningTooLong as error:
                return self._declined(str(error))
            outlet = self.outlet
            if isinstance(outlet, MaskedOutlet):
                outlet.check(release, seeded=self.sources.seeded)
            self._prepare(model)
            draws = self.samples.draws or self.objective.draws
            try:
                frame = self.sender.send(
                    self._charge(release, round), outlet, partial(self._values, round), draws=draws
                )
            except BudgetExhausted:
                return self._declined("the privacy budget is spent")
            self._last = (round, model.copy(), Reply(client=self.client, frame=frame))
            return self._last[2]

    def _refusal(self, model: npt.NDArray[np.float32], round: int) -> str | None:
        """Why nothing is sent in this round, as far as rounds, keys and limits decide it."""
        if round >= self.config.run.rounds:
            return f"round {round} is beyond the {self.config.run.rounds} rounds planned"
        if self.sums is not None and not self.sums.ready(round):
            return f"no keys for the sum of round {round}, or they were used before"
        return None if self.limits is None else self.limits.parameters_refusal(model)

    def _charge(self, release: Release, round: int) -> Charge:
        """What the ledger counts for this round; a ledger that follows the run's schedule moves to its budget first."""
        budget = self.budget(round)
        self._enter(budget)
        return Charge(release=release, round=round, last_round=self._last_round(round), within=budget.privacy)

    def reserve(self, round: int) -> None:
        """Record the round before it is asked for, so that many clients can do so in one durable write.

        What cannot be recorded is left to `update`, which says why.
        """
        try:
            release = self.release(round)
        except (Infeasible, PlanningTooLong):
            return
        with suppress(BudgetExhausted):
            self.spending.reserve(self._charge(release, round))

    def rest(self) -> None:
        """Let go of everything but the ledger and the model that is held, until it is asked again.

        A round that is asked for a second time is then refused by the ledger, as its bytes are gone.
        """
        self.samples.rest()
        self._form = self._last = None

    def release(self, round: int) -> Release:
        """What it sends in `round`, planned within the CPU seconds that its limits allow.

        Raises:
            Infeasible, PlanningTooLong: there is no plan.
        """
        with cpu_seconds(None if self.limits is None else self.limits.planning_seconds):
            return release_in(self.config, self.terms, client=self.client, round=round)

    def budget(self, round: int) -> Budget:
        """The budget in force in `round`."""
        return self.config.privacy.budget(client=self.client, round=round)

    def _last_round(self, round: int) -> int:
        """The last round of the budget in force: no reservation may reach past it."""
        starts = self.config.privacy.budget_starts(self.client)
        return min((start for start in starts if start > round), default=self.config.run.rounds) - 1

    def _enter(self, budget: Budget) -> None:
        """A ledger whose budget is the run's follows the run's schedule of budgets."""
        if self.limits is not None and self.limits.epsilon is not None:
            return  # the budget is the client's own
        ledger = self.spending.ledger
        if ledger is not None and (ledger.budget.epsilon, ledger.budget.delta) != (budget.epsilon, budget.delta):
            ledger.change_budget(epsilon=budget.epsilon, delta=budget.delta, reason="the run's schedule of budgets")

    def _prepare(self, model: npt.NDArray[np.float32]) -> None:
        """Raise now what the model and the settings alone would raise later."""
        with self.sender.timed("gradients"), full_precision():
            form = self.samples.form(self._sample) if self._form is None else self._form
            # A whole client's model is tried once, before it holds a server's parameters: with those it may fail, which
            # makes the update zero and is no reason to send none.
            if self._form is None or self.terms.unit is Unit.SAMPLE:
                self.objective.check(
                    form,
                    clip=self.clip,
                    batch_size=self.config.privacy.batch_size,
                    unit=self.terms.unit,
                    packed=self.config.clients.packed_rows,
                )
            self._form = form
            load_vector(self.model, model)

    def _values(self, round: int) -> Values:
        """The clipped mean gradient, or the clipped update after several local steps."""
        rng = self.sources.at(Purpose.BATCH, round)
        if self.terms.unit is Unit.CLIENT:
            return client_values(
                self.model,
                lambda model: self.objective.mean_loss(self.samples.read(self._drawn(rng)), model),
                steps=self.config.clients.local_steps,
                learning_rate=self.config.clients.local_learning_rate,
                clip=self.clip,
            )
        rows = self._drawn(rng)
        mean, dropped = self.objective.mean(
            self.samples.read(rows),
            clip=self.clip,
            batch_size=self.config.privacy.batch_size,
            packed=self.config.clients.packed_rows,
        )
        if self.private_log is not None:
            try:
                self._log(round, rows, dropped, mean)
            except StopNow:
                raise
            except BaseException:  # its figures depend on the data, so whether it fails may too: there is a frame
                _log.debug("the private log failed (keep this line private)", exc_info=True)
        return mean

    def _check_size(self) -> None:
        """Raise where the batch size asks for more samples than there are.

        A guarantee for one sample takes the number of samples as public. One for the whole client hides it, so such a
        client takes as many as it has: its update is clipped as a whole, however many samples it comes from.
        """
        privacy, samples = self.config.privacy, len(self.samples)
        fewest = privacy.batch_size if privacy.scheme is Scheme.FIXED_SIZE else 1
        if privacy.unit == Unit.SAMPLE and samples < fewest:
            raise InvalidParameter(
                f"batch_size={privacy.batch_size} is more than the {samples} samples of client {self.client}"
            )

    def _drawn(self, rng: NoiseSource) -> Rows:
        """Numbers of the samples of a batch; all where a client has fewer than the batch size."""
        privacy, samples = self.config.privacy, len(self.samples)
        if samples == 0:
            return np.empty(0, np.int64)
        rate = 1.0 if privacy.rate is None and privacy.batch_size > samples else privacy.rate
        size = min(privacy.batch_size, samples)
        return draw_batch(privacy.scheme, batch_size=size, dataset_size=samples, rng=rng, rate=rate)

    def _log(self, round: int, rows: Rows, dropped: int, mean: Values) -> None:
        assert self.private_log is not None
        self.private_log(
            {
                "outside_the_guarantee": True,
                "round": round,
                "batch_size": len(rows),
                "training_loss": self._training_loss(rows),
                "dropped_samples": dropped,
                "clamped_fraction": float((np.abs(mean) > self.range).mean()),
            }
        )

    def _training_loss(self, rows: Rows) -> float | None:
        """The mean loss of a batch, 0 of an empty one; None when a sample makes the model or the loss fail."""
        try:
            with torch.no_grad():
                found = self.objective.mean_loss(self.samples.read(rows))
            return 0.0 if found is None else float(found)
        except StopNow:
            raise
        except BaseException:
            return None  # as in `client.values`: there is a frame in any case
