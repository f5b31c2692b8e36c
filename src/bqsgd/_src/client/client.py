"""One client of Algorithm 1 (Lines 3 to 10): it receives the model and answers with a frame, or declines.

It holds its data, its budget and its ledger, and does no input or output besides the ledger. Engines carry its bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bqsgd._src.client.data_check import log_findings
from bqsgd._src.client.draws import Purpose, Rows, Sources, draw_batch
from bqsgd._src.client.objective import Objective
from bqsgd._src.client.objectives import subsets_of
from bqsgd._src.client.samples import Reader
from bqsgd._src.client.sender import Outlet, Sender
from bqsgd._src.client.sums import answer_step, check_noise, masked_vector
from bqsgd._src.client.values import Values, client_values
from bqsgd._src.codec import encode_frame
from bqsgd._src.descent.descent import Descent
from bqsgd._src.errors import BudgetExhausted, Infeasible, InvalidParameter, ModelNotHeld
from bqsgd._src.ledger import Ledger
from bqsgd._src.ledger.history import Earlier
from bqsgd._src.ledger.spending import Charge, Spending
from bqsgd._src.models import dimension_of
from bqsgd._src.noise import NoiseSource
from bqsgd._src.planner.search import PlanningTooLong, cpu_seconds
from bqsgd._src.release import Scheme, Unit
from bqsgd._src.runtime.interrupts import errors_dropped, interrupts_deferred
from bqsgd._src.runtime.modes import full_precision
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.graph import Thresholds
from bqsgd._src.secure.masks import model_digest
from bqsgd._src.secure.messages import is_sum_message
from bqsgd._src.settings.client_plan import client_terms, public_size, release_in, sum_plan
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.groups import CENTRED
from bqsgd._src.settings.node_limits import NodeLimits
from bqsgd._src.text import one_line
from bqsgd._src.wire.model_change import receive_model
from bqsgd._src.wire.model_message import ModelMessage
from bqsgd._src.wire.reply import BUDGET_SPENT, NO_PLAN, RUN_SPENT, WHOLE_MODEL_NEEDED, Reply

_log = logging.getLogger("bqsgd.client")
PrivateLog = Callable[[dict[str, Any]], None]
"""Receives figures computed from private data, outside the guarantee; they must stay on the client."""


def client_sender(
    config: Config, client: int, ledger: Ledger | None, *, run: str = "run", resume: bool = False
) -> Sender:
    """What counts and encodes the messages of client number `client` in a run with these settings.

    ledger: what the client has spent, durable. None only with seeded noise or without noise: no privacy claim.
    run: name of the run in the ledger.
    resume: the run continues after a stop; rounds recorded before are counted again if their noise is new.
    """
    sources = Sources(seed=config.privacy.seed, client=client)
    # A secure sum is lost with one crash too many, and everything reserved for it too, so nothing is reserved ahead.
    # Nor with a cohort, because a client does not know its next turn.
    one_by_one = config.secure.on or config.clients.cohort is not None
    ahead = 1 if one_by_one else config.clients.reserve_rounds
    return Sender(Spending(ledger, run=run, seeded=sources.seeded, ahead=ahead, resume=resume), sources)


class Client:
    """A client with its own data.

    Args:
        config: the run's settings, the same for all (a client's own budget is in `config.privacy.budgets`).
        objective: what a sample adds. Clients that answer one after another may share one and its model, into which
            the received parameters are loaded; the model is then checked once.
        samples: its data.
        sender: counts and encodes its messages; it knows the client's number (`client_sender`).
        sums: its side of the run's secure sums if the settings have them; the client then sends masked vectors.
        limits: what its operator agrees to; None if the operator set up the run. An epsilon in them is the budget of
            the ledger, and no run changes it.
        private_log: where figures outside the guarantee go when `config.privacy.private_metrics` is on.
    """

    def __init__(
        self,
        config: Config,
        objective: Objective,
        samples: Reader,
        sender: Sender,
        *,
        sums: SumClient | None = None,
        limits: NodeLimits | None = None,
        private_log: PrivateLog | None = None,
    ) -> None:
        if config.secure.on != (sums is not None):
            raise InvalidParameter(
                "secure sums are on for this run, but this client was created without them (or the other way round)"
            )
        self.config, self.objective, self.samples, self.sender = config, objective, samples, sender
        self.sums, self.limits = sums, limits
        self.model, self.spending, self.sources = objective.model, sender.spending, sender.sources
        self.client = sender.sources.client
        """Its number; the server knows it by this."""
        if limits is not None:
            refusal = limits.refusal(config, client=self.client) or limits.model_refusal(
                max(objective.dimension, dimension_of(objective.model))
            )
            if refusal is not None:
                raise InvalidParameter(refusal)
        self._check_objective()
        # A guarantee for one sample takes the number of samples as public. One for the whole client hides it, so such a
        # client takes as many as it has: its update is clipped as a whole, however many samples it comes from.
        privacy = config.privacy
        fewest = privacy.batch_size if privacy.scheme is Scheme.FIXED_SIZE else 1
        if privacy.unit == Unit.SAMPLE and len(samples) < fewest:
            raise InvalidParameter(
                f"batch_size={privacy.batch_size} is more than the {len(samples)} samples of client {self.client}"
            )
        if privacy.private_metrics and private_log is None:
            raise InvalidParameter("private_metrics needs a private_log that keeps the figures on the client")
        self.private_log = private_log if privacy.private_metrics else None
        self.range = config.range
        self.terms = client_terms(config, dimension=objective.dimension, dataset_size=len(samples))
        self.public_size = public_size(config, len(samples))
        """The number of samples that it states."""
        self.held: ModelMessage | None = None
        """The model it was sent last, if the next message may be its changes or steps."""
        self._charge: Charge | None = None
        """For the first round that was planned within the budget in force."""
        self._looked = False
        self._form: Any = None
        self._last: tuple[int, npt.NDArray[np.float32], Reply] | None = None

    def _check_objective(self) -> None:
        """Check that samples are clipped as the ledger will count them: a larger clip would leave no trace."""
        config, objective = self.config, self.objective
        centred = objective.centre is not None
        made = (objective.clip, objective.batch_size, objective.unit, objective.packed, objective.subsets, centred)
        privacy, clients = config.privacy, config.clients
        unit, packed, subsets = privacy.unit, clients.packed_rows, subsets_of(config, objective.model)
        centred = config.run.method == CENTRED
        if made != (config.message_clip, privacy.batch_size, unit, packed, subsets, centred):
            raise InvalidParameter(
                "the objective was made with another clip, batch size, unit, packed_rows, one_in or method than these "
                "settings count: make it with objective_of and the settings of this client"
            )

    def answer(self, message: bytes | bytearray | memoryview) -> Reply:
        """Read the server's message and reply: to a model with a frame, to a step of a secure sum with the next one.

        A damaged model message raises ModelMessageError and costs nothing; one that does not lead on from the model
        that is held is declined with WHOLE_MODEL_NEEDED. A refused step of a sum is declined, and nothing was revealed;
        the reason depends on messages alone.
        """
        if self.sums is not None and is_sum_message(message):
            return answer_step(self.sums, message)
        started = time.perf_counter()
        try:
            received = self.read(message)
        except ModelNotHeld:
            return Reply.decline(self.client, WHOLE_MODEL_NEEDED)
        if self.config.server.down_bits is not None or self.config.repeats_steps:
            self.held = received
        elapsed = time.perf_counter() - started
        reply = self.update(received.model, received.round)
        self.sender.seconds["frame"] = elapsed
        return reply

    def read(self, message: bytes | bytearray | memoryview) -> ModelMessage:
        """The model that a message leads to, from the model that is held if it is not a whole one.

        Raises:
            ModelNotHeld: the message does not lead on from the model that is held.
            ModelMessageError: the message is not valid.
        """
        if not self.config.repeats_steps:
            return receive_model(message, dimension=dimension_of(self.model), held=self.held)
        return self._descent.receive(message, held=self.held)

    @cached_property
    def _descent(self) -> Descent:
        """The server's steps, to be repeated."""
        sums = sum_plan(self.config, dimension=self.objective.dimension) if self.config.sends_sums else None
        return Descent(
            config=self.config,
            dimension=dimension_of(self.model),
            subsets=self.objective.subsets,
            sums=sums,
            centre=self.objective.centre,
        )

    @cached_property
    def _rule(self) -> Thresholds:
        """The thresholds of the sums that the settings put this client into."""
        secure = self.config.secure
        return secure.rule(self.config.asked, secure.group_of(self.client))

    def update(self, model: npt.NDArray[np.float32], round: int) -> Reply:
        """The frame of one round, its spend recorded before it is returned; or the reason for sending nothing.

        Once the round is recorded there is a frame whatever the data are: see `client.objective`. A Ctrl-C is raised
        when the frame is made; asked again for the same round, the client then returns the same bytes.

        Raises:
            InvalidParameter, NonFiniteInput: the model vector does not fit or is not finite, or the model cannot be
                trained privately; nothing was recorded.
        """
        with interrupts_deferred():
            self.sender.seconds = {}
            has_keys = self.sums is not None and self.sums.ready(round)
            last = self._last
            # Asked again: the same bytes reveal nothing new and cost nothing. Not with fresh keys, because the masks of
            # the old vector would not cancel.
            if last is not None and not has_keys and last[0] == round and np.array_equal(last[1], model):
                return last[2]
            reason = self._refusal(model, round, has_keys=has_keys)
            if reason is not None:
                return Reply.decline(self.client, reason)
            try:
                charge = self.charge(round)
            except (Infeasible, PlanningTooLong) as error:
                return Reply.decline(self.client, f"{NO_PLAN}: {error}")
            subsets = self.objective.subsets
            outlet: Outlet = partial(
                encode_frame,
                client=self.client,
                range=self.range,
                coding=self.config.clients.coding,
                kept=None if subsets is None else subsets.header,
            )
            if self.sums is not None:
                check_noise(self.sums, charge.release, rule=self._rule, seeded=self.sources.seeded)
                digest = model_digest(model, self.config.summed)
                outlet = partial(masked_vector, self.sums, range=self.range, model=digest)
            self._prepare(model, round)
            self._look_first(charge)
            self._follow_schedule(charge)
            draws = self.samples.draws or self.objective.draws
            try:
                frame = self.sender.send(charge, outlet, partial(self._values, round), draws=draws)
            except BudgetExhausted as error:
                if self.limits is not None:
                    # For the client's operator: what is spent, and which budget to raise.
                    _log.warning("%s", one_line(error))
                return Reply.decline(self.client, RUN_SPENT if self.spending.has_room(charge) else BUDGET_SPENT)
            reply = Reply(client=self.client, frame=frame)
            self._last = (round, model.copy(), reply)
            return reply

    def _refusal(self, model: npt.NDArray[np.float32], round: int, *, has_keys: bool) -> str | None:
        """Why nothing is sent in this round, as far as rounds, keys and limits decide it."""
        if round >= self.config.run.rounds:
            return f"round {round} is beyond the {self.config.run.rounds} rounds planned"
        if self.sums is not None and not has_keys:
            return f"no keys for the sum of round {round}, or they were used before"
        return None if self.limits is None else self.limits.parameters_refusal(model)

    def charge(self, round: int) -> Charge:
        """What the ledger counts for `round`, planned once for every budget within the CPU seconds that limits allow.

        Raises:
            Infeasible, PlanningTooLong: there is no plan.
        """
        planned = self._charge
        if planned is None or not planned.round <= round <= planned.last_round:
            privacy = self.config.privacy
            with cpu_seconds(None if self.limits is None else self.limits.planning_seconds):
                release = release_in(self.config, self.terms, client=self.client, round=round)
            starts = privacy.budget_starts(self.client)
            self._charge = planned = Charge(
                release=release,
                round=round,
                # No reservation may reach past the budget in force.
                last_round=min((start for start in starts if start > round), default=self.config.run.rounds) - 1,
                within=privacy.budget(client=self.client, round=round).privacy,
            )
        return replace(planned, round=round)

    def _follow_schedule(self, charge: Charge) -> None:
        """Give the ledger the budget of the run's schedule, unless the budget is the client's own."""
        ledger, budget = self.spending.ledger, charge.within
        is_clients_own = self.limits is not None and self.limits.epsilon is not None
        if ledger is None or budget is None or is_clients_own or ledger.budget == budget:
            return
        ledger.change_budget(epsilon=budget.epsilon, delta=budget.delta, reason="the run's schedule of budgets")

    def _look_first(self, charge: Charge) -> None:
        """Before the first round of a run, tell the client's operator what is odd about its data and its ledger."""
        if self._looked:
            return
        self._looked = True
        if self.limits is not None and self.spending.repeats(charge.round):
            _log.warning(
                "client %d: its ledger holds round %d of a run named %r. The round counts again, also against the "
                "budget of this run; if this is another run, give it a name of its own",
                self.client,
                charge.round,
                self.spending.run,
            )
        if self.spending.recorded:
            return
        delta, who = self.config.privacy.delta, f"client {self.client}"
        log_findings(self.samples, self.objective, form=self._form, delta=delta, who=who)
        ledger = self.spending.ledger
        # Ledgers that outlast a run have owners, who set limits.
        earlier = None if self.limits is None else Earlier.of(ledger)
        if ledger is None or earlier is None:
            return
        fitting = ledger.headroom(charge.release, run=self.spending.run, within=charge.within)
        _log.warning(
            "%s: %s. Of the %d rounds of this run %s",
            ledger.path,
            earlier,
            self.config.turns,
            "all fit" if fitting >= self.config.turns else f"{fitting} fit; to allow more, raise the limit epsilon",
        )

    def reserve(self, round: int) -> None:
        """Record the round before it is asked for, so that many clients can do so in one durable write.

        If that is impossible, nothing happens here: `update` says why.
        """
        with suppress(Infeasible, PlanningTooLong, BudgetExhausted):
            charge = self.charge(round)
            self._follow_schedule(charge)
            self.spending.reserve(charge)

    def rest(self) -> None:
        """Free everything but the ledger and the model that is held, until the client is asked again.

        If it is asked for the same round a second time, the ledger refuses, because the bytes are gone.
        """
        self.samples.rest()
        self._form = self._last = None

    def _prepare(self, model: npt.NDArray[np.float32], round: int) -> None:
        """Raise now what the model and the settings alone would raise later."""
        with self.sender.timed("gradients"), full_precision():
            is_first = self._form is None
            form = self.samples.form() if is_first else self._form
            # The model of a whole client is tried only once, before it holds a server's parameters. With those it may
            # fail, but then the update is zero: a reason to send nothing would depend on the data.
            if is_first or self.terms.unit is Unit.SAMPLE:
                self.objective.check(form)
            self._form = form
            self.objective.load(model, round=round)

    def _values(self, round: int) -> Values:
        """The clipped mean gradient, or the clipped update after several local steps."""
        rng = self.sources.at(Purpose.BATCH, round)
        subset = self.objective.subset(round=round, client=None if self.config.shares_subset else self.client)
        if self.terms.unit is Unit.CLIENT:
            return client_values(
                self.model,
                lambda model: self.objective.mean_loss(self.samples.read(self._drawn(rng)), model),
                steps=self.config.clients.local_steps,
                learning_rate=self.config.clients.local_learning_rate,
                clip=self.objective.clip,
                subset=subset,
            )
        rows = self._drawn(rng)
        mean, dropped = self.objective.mean(self.samples.read(rows), subset)
        if self.private_log is not None:
            # The figures depend on the data, so whether writing them fails may too: there is a frame in any case.
            with errors_dropped("the private log failed"):
                self._log(round, rows, dropped, mean)
        return mean

    def _drawn(self, rng: NoiseSource) -> Rows:
        """Numbers of the samples of a batch; all if the client has fewer than the batch size."""
        privacy, samples = self.config.privacy, len(self.samples)
        if samples == 0:
            return np.empty(0, np.int64)
        size = min(privacy.batch_size, samples)
        return draw_batch(privacy.scheme, batch_size=size, dataset_size=samples, rng=rng, rate=privacy.rate)

    def _log(self, round: int, rows: Rows, dropped: int, mean: Values) -> None:
        assert self.private_log is not None
        loss: float | None = None
        with errors_dropped("a sample makes the model or the loss fail: there is no training loss"), torch.no_grad():
            mean_loss = self.objective.mean_loss(self.samples.read(rows))
            loss = 0.0 if mean_loss is None else float(mean_loss)
        self.private_log(
            {
                "outside_the_guarantee": True,
                "round": round,
                "batch_size": len(rows),
                "training_loss": loss,
                "dropped_samples": dropped,
                "clamped_fraction": float((np.abs(mean) > self.range).mean()),
            }
        )
