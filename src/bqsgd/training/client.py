"""One client of Algorithm 1 (Lines 3 to 10): it receives the model and answers with a frame, or declines.

It holds its data, its budget and its ledger, and does no input or output besides the ledger. Engines carry its bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from bqsgd.codec import encode_frame
from bqsgd.errors import BudgetExhausted, Infeasible, InvalidParameter, ModelNotHeld, SecureSumError
from bqsgd.ledger import Ledger, PrivacyBudget
from bqsgd.ledger.spending import Spending
from bqsgd.models import dimension_of, load_vector
from bqsgd.noise import NoiseSource
from bqsgd.persample.interrupts import StopNow, interrupts_deferred
from bqsgd.persample.program import Forward, LossFunction
from bqsgd.planner.plan import Budget
from bqsgd.planner.search import PlanningTooLong, cpu_seconds
from bqsgd.release import Release, Scheme, Unit
from bqsgd.secure.client import SumClient
from bqsgd.secure.messages import is_sum_message
from bqsgd.secure.noise_shares import encode_base
from bqsgd.training.client_plan import client_setting, release_in
from bqsgd.training.draws import Purpose, Rows, Sources, draw_batch
from bqsgd.training.least_squares import message_dimension, objective_of
from bqsgd.training.node_limits import NodeLimits
from bqsgd.training.objective import Objective
from bqsgd.training.samples import reader_of
from bqsgd.training.settings import Config
from bqsgd.training.values import Values, client_values
from bqsgd.training.way_down import WHOLE_MODEL_NEEDED
from bqsgd.wire.model_change import receive_model
from bqsgd.wire.model_message import ModelMessage

PrivateLog = Callable[[dict[str, Any]], None]
"""Receives figures computed from private data, outside the guarantee; they must stay on the client."""


@dataclass(frozen=True, kw_only=True)
class Declined:
    """The client sends nothing this round, and why. The reason depends on budgets and rounds only, not on data."""

    reason: str


def answer_step(sums: SumClient, message: bytes | bytearray | memoryview) -> bytes | Declined:
    """Answer a step of a secure sum. A refusal is declined, and nothing was revealed then."""
    try:
        return sums.answer(message)
    except SecureSumError as error:
        return Declined(reason=f"{type(error).__name__}: {error}")


class Client:
    """A client with its own data.

    Args:
        client: its number; the server knows it by this.
        model: where the received parameters are put to work; clients that answer one after another may share one.
        loss: (outputs, targets) -> one loss per sample.
        samples: its data: inputs and targets, a Dataset or a DataLoader.
        config: the run's settings, the same for all (a client's own budget is in `config.privacy.budgets`).
        ledger: what it has spent, durable. None only with seeded noise or without noise: no privacy claim.
        run: name of the run in the ledger.
        resume: the run continues after a stop; rounds recorded before are counted again when their noise is new.
        private_log: where figures outside the guarantee go when `config.privacy.private_metrics` is on.
        limits: what its operator agrees to; None where that is who set up the run. Where they name an epsilon it is
            the budget of the ledger, and no run changes it.
        forward: (model, batch) -> (outputs, targets), for batches of another form than (inputs..., targets).
        sample: a made-up record as the data set gives one, for its shapes and types: no record is read to find them
            out. Not needed for arrays and tensors in memory.
        sums: its side of the run's secure sums, where the settings have them; it then sends masked vectors.
        objective: that of the model, where clients that share the model share what was checked of it.
    """

    def __init__(
        self,
        *,
        client: int,
        model: nn.Module,
        loss: LossFunction,
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
            raise InvalidParameter("a run with secure sums needs clients that take part in them, and no other does")
        self.sums = sums
        self.client, self.model, self.config, self.limits = client, model, config, limits
        dimension = message_dimension(config.run.method, model)
        if limits is not None:
            refusal = limits.refusal(config, client=client) or limits.model_refusal(dimension)
            if refusal is not None:
                raise InvalidParameter(refusal)
        self.samples, self.objective = reader_of(samples), objective or objective_of(config, model, loss, forward)
        self._check_size()
        if config.privacy.private_metrics and private_log is None:
            raise InvalidParameter("private_metrics needs a private_log that keeps the figures on the client")
        self.private_log = private_log if config.privacy.private_metrics else None
        self.sources = Sources(seed=config.privacy.seed, client=client)
        self.clip, self.range = config.clip.make(), config.range
        self.setting = client_setting(config, dimension=dimension, dataset_size=len(self.samples))
        # A sum is lost with one crash too many, and what was reserved for it with it: nothing is reserved ahead then.
        # With a cohort nobody knows its next turn.
        alone = config.secure.on or config.clients.cohort is not None
        ahead = 1 if alone else config.clients.reserve_rounds
        self.spending = Spending(ledger, run=run, seeded=self.sources.seeded, ahead=ahead, resume=resume)
        self.seconds: dict[str, float] = {}
        """What the last update took, by stage. Depends on the batch's size: outside the guarantee, keep it local."""
        self.held: ModelMessage | None = None
        """The model it was sent last, where the next message may be its changes."""
        self._sample = sample
        self._form: Any = None
        self._last: tuple[int, npt.NDArray[np.float32], bytearray] | None = None

    def answer(self, message: bytes | bytearray | memoryview) -> bytes | bytearray | Declined:
        """Read the server's message and answer it: a model with a frame, a step of a secure sum with the next.

        A model message that is damaged raises ModelMessageError and costs nothing; changes of a model that it does not
        hold are declined with WHOLE_MODEL_NEEDED. A step of a sum that is refused is
        declined, and nothing was revealed; the reason depends on messages alone.
        """
        if self.sums is not None and is_sum_message(message):
            return answer_step(self.sums, message)
        started = time.perf_counter()
        try:
            received = receive_model(message, dimension=dimension_of(self.model), held=self.held)
        except ModelNotHeld:
            return Declined(reason=WHOLE_MODEL_NEEDED)
        if self.config.server.down_bits is not None:
            self.held = received
        elapsed = time.perf_counter() - started
        answer = self.update(received.model, received.round)
        self.seconds["frame"] = elapsed
        return answer

    def update(self, model: npt.NDArray[np.float32], round: int) -> bytearray | Declined:
        """The frame of one round, its spend recorded before it is returned; or a reason for sending nothing.

        Once the round is recorded there is a frame whatever the data are: see `training.values`. A Ctrl-C is raised
        when the frame is made; asked again for the same round, the client then gives the same bytes.

        Raises:
            InvalidParameter, NonFiniteInput: the model vector does not fit or is not finite, or the model cannot be
                trained privately; nothing was recorded.
        """
        with interrupts_deferred():
            return self._update(model, round)

    def _update(self, model: npt.NDArray[np.float32], round: int) -> bytearray | Declined:
        self.seconds = {}
        again = self._last is not None and self._last[0] == round and np.array_equal(self._last[1], model)
        if again and self._last is not None and not (self.sums is not None and self.sums.ready(round)):
            return self._last[2]  # asked again: the same bytes reveal nothing new and cost nothing
        if round >= self.config.run.rounds:
            return Declined(reason=f"round {round} is beyond the {self.config.run.rounds} rounds planned")
        if self.sums is not None and not self.sums.ready(round):
            return Declined(reason=f"no keys for the sum of round {round}, or they were used before")
        refusal = None if self.limits is None else self.limits.parameters_refusal(model)
        if refusal is not None:
            return Declined(reason=refusal)
        try:
            release = self.release(round)
        except Infeasible as error:
            return Declined(reason=f"no plan for the budget: {error}")
        except PlanningTooLong as error:
            return Declined(reason=str(error))
        self._check_agreement(release)
        self._prepare(model)
        budget = self.budget(round)
        self._enter(budget)
        asked = PrivacyBudget(epsilon=budget.epsilon, delta=budget.delta)
        try:
            with self._timed("ledger"), interrupts_deferred(firm=True):
                self.spending.spend(release, round=round, last_round=self._last_round(round), within=asked)
        except BudgetExhausted:
            return Declined(reason="the privacy budget is spent")
        shared = not (self.samples.draws or self.objective.draws)  # or clients of other threads would wait for nothing
        lent = self.sources.lent(Purpose.FORWARD, round, shared=shared)
        with self._timed("gradients"), lent:
            values = self._values(round)
        with self._timed("encode"):
            frame = self._encoded(values, release, round)
        self._last = (round, model.copy(), frame)
        return frame

    def _encoded(self, values: Values, release: Release, round: int) -> bytearray:
        """The frame, or the masked vector of a secure sum.

        Values are clamped: a Poisson batch can exceed L. The clamp is 1-Lipschitz, so the sensitivity stands.
        """
        rng = self.sources.at(Purpose.NOISE, round)
        if self.sums is None:
            return encode_frame(
                values,
                release.mechanism,
                range=self.range,
                rng=rng,
                client=self.client,
                round=round,
                coding=self.config.clients.coding,
                clamp=True,
            )
        agreed = self.sums.agreement
        codes = encode_base(
            values,
            release.mechanism.levels,
            agreed.noise.cuts[0],
            width=agreed.width,
            range=self.range,
            rng=rng,
            clamp=True,
        )
        return self.sums.mask(round, codes)

    def _check_agreement(self, release: Release) -> None:
        """Raise where the clients of a sum insist on other noise or colluders than the ledger would count."""
        if self.sums is None:
            return
        agreed = self.sums.agreement
        counted = (release.mechanism.trials, release.colluders, release.failure, release.dimension)
        if counted != (agreed.trials, agreed.rule.colluders, agreed.rule.failure, agreed.dimension):
            raise InvalidParameter(
                f"the clients agreed on {agreed.trials} trials and {agreed.rule.colluders} colluders, client "
                f"{self.client} would count {release.mechanism.trials} and {release.colluders}: nothing is sent"
            )

    def reserve(self, round: int) -> None:
        """Record the round before it is asked for, so that many clients can do so in one durable write.

        What cannot be recorded is left to `update`, which says why.
        """
        try:
            release = self.release(round)
        except (Infeasible, PlanningTooLong):
            return
        budget = self.budget(round)
        self._enter(budget)
        asked = PrivacyBudget(epsilon=budget.epsilon, delta=budget.delta)
        with suppress(BudgetExhausted):
            self.spending.reserve(release, round=round, last_round=self._last_round(round), within=asked)

    def rest(self) -> None:
        """Let go of everything but the ledger and the model that is held, until it is asked again.

        A round that is asked for a second time is then refused by the ledger, as its bytes are gone.
        """
        self.samples.rest()
        self._form = self._last = None

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started

    def release(self, round: int) -> Release:
        """What it sends in `round`, planned within the CPU seconds that its limits allow.

        Raises:
            Infeasible, PlanningTooLong: there is no plan.
        """
        with cpu_seconds(None if self.limits is None else self.limits.planning_seconds):
            return release_in(self.config, self.setting, client=self.client, round=round)

    def budget(self, round: int) -> Budget:
        """The budget in force in `round`."""
        return self.config.privacy.budget(client=self.client, round=round)

    def _last_round(self, round: int) -> int:
        """The last round of the budget in force: no reservation may reach past it."""
        changes = [change.from_round for change in self.config.privacy.budgets if change.client == self.client]
        return min((start for start in changes if start > round), default=self.config.run.rounds) - 1

    def _enter(self, budget: Budget) -> None:
        """A ledger whose budget is the run's follows the run's schedule of budgets."""
        if self.limits is not None and self.limits.epsilon is not None:
            return  # the budget is the client's own
        ledger = self.spending.ledger
        if ledger is not None and (ledger.budget.epsilon, ledger.budget.delta) != (budget.epsilon, budget.delta):
            ledger.change_budget(epsilon=budget.epsilon, delta=budget.delta, reason="the run's schedule of budgets")

    def _prepare(self, model: npt.NDArray[np.float32]) -> None:
        """Raise now what the model and the settings alone would raise later."""
        with self._timed("gradients"):
            form = self.samples.form(self._sample) if self._form is None else self._form
            # A whole client's model is tried once, before it holds a server's parameters: with those it may fail, which
            # makes the update zero and is no reason to send none.
            if self._form is None or self.setting.unit is Unit.SAMPLE:
                self.objective.check(
                    form,
                    clip=self.clip,
                    batch_size=self.setting.batch_size,
                    unit=self.setting.unit,
                    packed=self.config.clients.packed_rows,
                )
            self._form = form
            load_vector(self.model, model)

    def _values(self, round: int) -> Values:
        """The clipped mean gradient, or the clipped update after several local steps."""
        rng = self.sources.at(Purpose.BATCH, round)
        if self.setting.unit is Unit.CLIENT:
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
            batch_size=self.setting.batch_size,
            packed=self.config.clients.packed_rows,
        )
        if self.private_log is not None:
            self._log(round, rows, dropped, mean)
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
            return None  # as in `training.values`: there is a frame in any case
