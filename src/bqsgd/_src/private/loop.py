"""`make_private` and what it returns: one private step of a loop, its plan, its guarantee and its state."""

from __future__ import annotations

import json
import logging
import math
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.utils.data import DataLoader

from bqsgd._src.client.data_check import log_findings
from bqsgd._src.client.draws import Sources
from bqsgd._src.client.objective import Objective
from bqsgd._src.client.samples import Part
from bqsgd._src.client.sender import Outlet, Sender
from bqsgd._src.client.sums import check_noise, masked_vector
from bqsgd._src.client.values import Values
from bqsgd._src.codec import Accumulator, encode_frame
from bqsgd._src.errors import (
    BudgetExhausted,
    Infeasible,
    InvalidParameter,
    LedgerError,
    NonFiniteInput,
    SecureSumError,
)
from bqsgd._src.ledger import Ledger
from bqsgd._src.ledger.history import Earlier, shift_of
from bqsgd._src.ledger.spending import Charge, Spending
from bqsgd._src.mechanism.properties import noise_variance
from bqsgd._src.models import trainable
from bqsgd._src.params import MOST_ONE_IN, Kept, Mechanism, check_int, check_positive
from bqsgd._src.persample.clips import L2, Clip
from bqsgd._src.persample.program import Forward, LossFunction, refuse_mixing
from bqsgd._src.planner.plan import Budget, Plan
from bqsgd._src.planner.recipe import fitting_range
from bqsgd._src.planner.search import shift_per_round
from bqsgd._src.planner.sums import SumPlan, in_sums, plan_sum, width_of
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.private._batches import Batch, PoissonLoader
from bqsgd._src.private._gradients import Gradients
from bqsgd._src.private._progress import Progress, StepReport
from bqsgd._src.private._ranks import Peers
from bqsgd._src.private._sums import RankSums, SecureRanks
from bqsgd._src.release import Release, Sampling, Scheme, Terms
from bqsgd._src.runtime.interrupts import errors_dropped, interrupts_deferred
from bqsgd._src.runtime.modes import full_precision
from bqsgd._src.secure.graph import Thresholds, thresholds
from bqsgd._src.settings.client_plan import clipped_terms, plan_release
from bqsgd._src.settings.outlook import CannotLearn, Forecast, Verdict, variance_of_message
from bqsgd._src.settings.study import Study, check_not_lost, differences
from bqsgd._src.subset import Subset, Subsets
from bqsgd._src.wire.fixed import FixedWidth
from bqsgd._src.wire.frame import header_bytes

_FORMAT = "bqsgd.private.v1"
_log = logging.getLogger("bqsgd.private")
_WITH_EARLIER_SPENDS = (
    "To continue that training, load its checkpoint (load_state_dict). To train again on the same data, raise the "
    "budget with Ledger(path).change_budget(...) and ask for that epsilon. A fresh ledger is right only for other data."
)
_AHEAD = 20
"""Steps that the ledger records in one write, unless the caller sets it."""


def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    *,
    loss_fn: LossFunction,
    epsilon: float,
    delta: float,
    epochs: int,
    ledger: str | Path | Ledger | None,
    bits: int = 8,
    clip: Clip = L2(1.0),  # noqa: B008 (frozen)
    range: float | None = None,
    one_in: int = 1,
    forward: Forward | None = None,
    sample: Any = None,
    micro_batch: int = 512,
    mechanism: Mechanism | None = None,
    secure: SecureRanks | None = None,
    seed: int | None = None,
    force: bool = False,
    on_step: Callable[[StepReport], object] | None = None,
    progress: bool = False,
    study: str | None = None,
    reserve: int | None = None,
) -> Private:
    """Plan private training of an ordinary model, and return what a loop of your own needs for it.

    Model, loss and shapes are tried on made-up samples first; nothing is spent before the first step. From then on the
    optimizer refuses to step on gradients that were not released, until `close`.

    Args:
        model: an ordinary module. Only parameters that require a gradient are clipped, encoded and counted.
        optimizer: any torch optimizer of those parameters; use schedulers and `state_dict` as usual.
        loader: its data set, collate_fn and workers are used, and its batch_size is the public batch size L; the
            batches are drawn afresh: every sample independently with probability L / len(dataset).
        loss_fn: (outputs, targets) -> one loss per sample.
        epsilon, delta: what all steps may spend together.
        epochs: passes of ceil(len(dataset) / L) steps that the budget is planned for.
        ledger: path of the ledger that records what is spent, or an open one. Under torchrun each rank adds its number
            to the name. None only with a seed, which makes no privacy claim.
        bits: most bits per coordinate of a message.
        clip: what bounds the Euclidean norm of a sample's gradient: `L2`, `Dual`, `Normalize`, or `PerLayer` of these.
        range: what the mean is clamped to before it is encoded; chosen from the plan unless given.
        one_in: N; a message carries one in N coordinates of the rotated gradient, a random subset in every step.
        forward: (model, batch) -> (outputs, targets), where a batch is not (inputs..., targets): a dict, for example.
        sample: a made-up record as the data set gives one, for example (torch.zeros(3, 32, 32), 0): shapes and types
            are found out from it, and no record is read for them. Not needed for tensors in memory (TensorDataset, and
            Subset, random_split or ConcatDataset of such).
        micro_batch: samples that are read and differentiated at a time; the result does not depend on it.
        mechanism: levels and trials to use instead of planned ones; the ledger still enforces the budget.
        secure: roster and identity of this rank, for secure sums under torchrun: no rank sees another's message, and
            all share one noise. Every rank then needs the same rate and range; a mechanism has the trials of the sum.
        seed: reproducible noise and batches; anyone who knows it can remove the noise: no privacy claim.
        force: train even if the planned noise leaves next to nothing to be learnt.
        on_step: called after every `step` with what `step` returns; all of it may be published.
        progress: show steps and epsilon on stderr.
        study: a name, for training that goes on in other processes, such as the rounds of a federation: `epochs` then
            counts those of the whole study. The plan is made once and kept beside the ledger; made private again under
            this name with the same settings, training continues with the same noise, after the last recorded step.
        reserve: steps that the ledger records in one write, by default 20, and 1 in a study. After a crash it may count
            up to this many that were never taken.

    If the ledger holds earlier spends, planning waits for the first step or for `plan`, because a checkpoint may be
    loaded first; the plan is then for what is left, and a warning says how much that is.

    Raises:
        InvalidParameter: something cannot be private (BatchNorm, a reduced loss, a weighted sampler); the message says
            what to do instead. Nothing was spent.
        Infeasible: no mechanism meets the budget.
        CannotLearn: the planned noise is larger than anything that could be learnt. Nothing was spent.

    >>> import tempfile
    >>> from torch.utils.data import TensorDataset
    >>> model = nn.Linear(4, 2)
    >>> loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.arange(64) % 2), batch_size=16, shuffle=True)
    >>> private = make_private(
    ...     model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss_fn=nn.CrossEntropyLoss(reduction="none"),
    ...     epsilon=3, delta=1e-5, epochs=1, ledger=tempfile.mkdtemp() + "/me.ledger",
    ...     mechanism=Mechanism(levels=1, trials=3000), range=0.5)
    >>> for batch in private.loader:
    ...     report = private.step(batch)
    >>> private.steps, private.guarantee().epsilon <= 3
    (4, True)
    >>> print(private.guarantee().trust)
    the training process is trusted with the data; what it releases is protected
    """
    model = _uncompiled(model)
    if not isinstance(clip, Clip) or clip.euclidean is None:
        raise InvalidParameter(f"clip must bound a norm: L2, Dual, Normalize, or PerLayer of these; got {clip!r}")
    clip = clip.of_share(1 / check_int("one_in", one_in, 1, MOST_ONE_IN))
    budget = Budget(bits=bits, epsilon=epsilon, delta=delta)
    check_int("epochs", epochs, 1, 2**31)
    check_int("micro_batch", micro_batch, 1, 2**31)
    _check_model(model, optimizer)
    # After the checks of this rank's own arguments: once the ranks have met, one that fails keeps the others waiting.
    peers = Peers.met()
    if secure is not None and peers.size == 1:
        raise InvalidParameter("secure sums are between the ranks of torchrun; this process is alone")
    sources = Sources(seed=seed, client=peers.rank)
    batches = PoissonLoader(loader, micro_batch=micro_batch, sources=sources, sample=sample)
    objective = Objective(
        model,
        loss_fn,
        clip=clip,
        batch_size=batches.batch_size,
        forward=forward,
        subsets=Subsets.of(trainable(model), one_in=one_in, rotated=True),
    )
    return Private(
        objective,
        optimizer,
        batches,
        peers,
        sources,
        budget=budget,
        epochs=epochs,
        range=None if range is None else check_positive("range", range),
        mechanism=mechanism,
        secure=secure,
        ledger=ledger,
        force=force,
        on_step=[call for call in (on_step, Progress() if progress else None) if call is not None],
        study=study,
        reserve=reserve,
    )


class Private:
    """Private training of one model; made by `make_private`."""

    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        loader: PoissonLoader,
        peers: Peers,
        sources: Sources,
        *,
        budget: Budget,
        epochs: int,
        range: float | None,
        mechanism: Mechanism | None,
        secure: SecureRanks | None,
        ledger: str | Path | Ledger | None,
        force: bool,
        on_step: Sequence[Callable[[StepReport], object]] = (),
        study: str | None,
        reserve: int | None,
    ) -> None:
        model, self._on_step = objective.model, on_step
        self.model, self.optimizer, self.loader, self.budget = model, optimizer, loader, budget
        self._objective, self._peers, self._sources = objective, peers, sources
        self._range, self._mechanism, self._secure = range, mechanism, secure
        assert objective.clip.euclidean is not None
        self._clip_norm = objective.clip.euclidean
        if mechanism is not None and mechanism.noise is not None:
            mechanism.noise.to_bytes()  # raises if no frame can carry this law, before anything is spent
        self._force = force
        self._parameters = trainable(model)
        self._shapes = [parameter.shape for parameter in self._parameters]
        self._sums: RankSums | None = None
        self._form = loader.form()
        self._check_objective()
        log_findings(loader.reader, objective, form=self._form, delta=budget.delta, who="the training data")
        note = {"steps": len(self.loader), "dimension": self._objective.dimension, "epochs": epochs}
        told = self._peers.tell(note)
        if any((each["dimension"], each["epochs"]) != (note["dimension"], epochs) for each in told):
            raise InvalidParameter(
                "the ranks train models of different sizes, for different epochs or with another one_in"
            )
        # All ranks take the same number of steps in an epoch, because each step needs a frame from every rank.
        self.loader.steps = max(check_int("steps", each["steps"], 1, 2**40) for each in told)
        self._shared = self._peers.share(model)
        self.rounds = epochs * len(self.loader)
        """Steps that the budget is planned for."""
        self.dropped = 0
        """Samples that counted as zero so far, because they could not be read, raised an error or had a gradient that
        was not finite. It depends on the data: keep it private."""
        self._refusal: BudgetExhausted | None = None
        self._plan: Plan | None = None
        self._settings: list[tuple[Mechanism, float]] | None = None
        """Mechanism and range of every rank."""
        self._ledger = _opened(ledger, budget, peers)
        if self._ledger is not None and not isinstance(ledger, Ledger):
            # Only a ledger that we opened: the user closes their own.
            weakref.finalize(self, self._ledger.close)
        self._study = self._opened_study(study)
        usual = _AHEAD if self._study is None else 1
        self._ahead = check_int("reserve", usual if reserve is None else reserve, 1, 2**20)
        run = f"private-{secrets.token_hex(8)}" if self._study is None else self._study.run
        self._sender = self._sending(run, resume=False)
        if self._study is not None:
            self._continue(self._study)
        elif not self._sender.spending.sent:
            # Refuse now a budget that cannot be met. With earlier spends this may be a resumed run, whose plan comes
            # from its checkpoint.
            self.plan  # noqa: B018
        self._gradients = Gradients(model, optimizer)

    def _opened_study(self, name: str | None) -> Study | None:
        if name is None:
            return None
        if self._ledger is None:
            raise InvalidParameter("a study is kept beside a ledger; give make_private a ledger")
        return Study(self._ledger, name)

    def _continue(self, study: Study) -> None:
        """Take up a study where its earlier processes left it; plan it if this is the first."""
        if study.plan is None:
            study.keep(self.plan, range=self.range)
            return
        if self._range not in (None, study.range):
            raise InvalidParameter(f"the study {study.name!r} has the range {study.range}, not {self._range}")
        self._range = study.range
        study.check_same(budget=self.budget, rounds=self.rounds, terms=self._terms())
        fixed = self._mechanism if self.sum_plan is None else self.sum_plan.mechanism
        if fixed not in (None, study.plan.mechanism):
            raise InvalidParameter(f"the study {study.name!r} has the mechanism {study.plan.mechanism}, not {fixed}")
        self._plan, self._sender.next_round, self.loader.next_draw = study.plan, study.taken, study.taken

    def _sending(self, run: str, *, resume: bool) -> Sender:
        """What records and sends the steps of a run."""
        # With secure sums nothing is reserved ahead: if a sum is lost, only its own step has been counted.
        ahead = self._ahead if self._secure is None else 1
        spending = Spending(self._ledger, run=run, seeded=self._sources.seeded, ahead=ahead, resume=resume)
        return Sender(spending, self._sources)

    @property
    def steps(self) -> int:
        """Steps taken. A step is taken once it is recorded, whatever ends it: its number is never used again."""
        return self._sender.next_round

    @cached_property
    def _rule(self) -> Thresholds | None:
        if self._secure is None:
            return None
        return thresholds(clients=self._peers.size, dropouts=0, colluders=self._secure.colluders)

    @cached_property
    def sum_plan(self) -> SumPlan | None:
        """What the ranks run for secure sums, None without them.

        Raises:
            Infeasible: no plan meets the budget, or the sums cannot withstand this many colluders.
        """
        rule, fixed = self._rule, self._mechanism
        if rule is None:
            return None
        if fixed is None:
            return plan_sum(self.budget.privacy, self._terms(), rule, rounds=self.rounds)
        if fixed.noise is not None:
            raise InvalidParameter(f"secure sums share binomial noise between the clients, got {fixed.noise}")
        width = width_of(rule, fixed.levels, fixed.trials)
        return SumPlan(rule=rule, levels=fixed.levels, trials=fixed.trials, width=width)

    @property
    def dimension(self) -> int:
        """Trained coordinates, d."""
        return sum(shape.numel() for shape in self._shapes)

    @property
    def plan(self) -> Plan:
        """What is run: mechanism, sampling and rounds, and what all rounds together guarantee.

        The steps are planned for what the earlier spends in the ledger leave of the budget.
        """
        if self._plan is None:
            self._plan = self._planned()
        return self._plan

    def _planned(self) -> Plan:
        spent, earlier = self._sender.spending.tally, Earlier.of(self._ledger)
        if earlier is not None:
            shift = self._shift_left(earlier)
            if shift:  # with nothing left the planner says so at once
                noise = self._terms().shift_l2(1) * self.range / shift
                self._refuse_hopeless(self._forecast_of(noise), earlier, shift)
            _log.warning("%s: %s. %s", self._ledger_name, earlier, _WITH_EARLIER_SPENDS)
        chosen = self._mechanism if self.sum_plan is None else self.sum_plan.mechanism
        if chosen is None:
            try:
                release = plan_release(self._terms(), self.budget, rounds=self.rounds, spent=spent.spent)
            except Infeasible as error:
                if earlier is None:
                    raise
                raise CannotLearn(
                    f"{self._ledger_name}: {earlier}, which is too little for {self.rounds} more steps. "
                    f"{_WITH_EARLIER_SPENDS} (The planner says: {error})"
                ) from error
        else:
            release = Release(mechanism=chosen, terms=self._terms())
        total = spent.compose(release, self.rounds)
        plan = Plan(
            budget=self.budget,
            release=release,
            rounds=self.rounds,
            variance=noise_variance(release.mechanism),
            guarantee=total.guarantee(delta=self.budget.delta, seeded=self._sources.seeded),
        )
        forecast, shift = self._forecast(plan), shift_of(release)
        self._refuse_hopeless(forecast, earlier, shift)
        quiet = forecast.verdict is Verdict.WELL or self._mechanism is not None
        compared = "" if earlier is None else f"{earlier.compared(shift)}; "
        _log.log(logging.INFO if quiet else logging.WARNING, "%s%s", compared, "; ".join(forecast.lines()))
        return plan

    def _shift_left(self, earlier: Earlier) -> float | None:
        """How far a record could move a step with Gaussian noise for what is left: nearly the plan's, known at once.

        Little left takes the planner long, and a script that is run twice should not wait for its refusal. None if
        only the planner knows: other ranks, or a secure sum, have a say in the noise.
        """
        if self._peers.size > 1 or self._secure is not None:
            return None
        rate, spent = self._terms().sampling.rate, earlier.guarantee.epsilon
        return shift_per_round(self.budget, rate=rate, rounds=self.rounds, spent=spent)

    @property
    def forecast(self) -> Forecast:
        """How much noise the planned steps carry beside their signal, and what that leaves to be learnt."""
        return self._forecast(self.plan)

    def _forecast(self, plan: Plan) -> Forecast:
        if self.sum_plan is None:
            # Each rank adds noise of its own; ranks with other settings are taken to be like this one.
            variance = variance_of_message(plan.mechanism) / self._peers.size
        else:
            variance = self.sum_plan.variance()
        return self._forecast_of(self.range * math.sqrt(variance))

    def _forecast_of(self, noise: float) -> Forecast:
        """The forecast if the mean of all ranks has this much noise in a coordinate that it carries."""
        subsets = self._objective.subsets
        one_in = 1 if subsets is None else subsets.one_in
        longest = min(self._clip_norm * math.sqrt(one_in), self.range * math.sqrt(self.dimension))
        # A kept coordinate is multiplied by one_in, and one in one_in is kept.
        return Forecast(noise=noise * math.sqrt(one_in), learnt=self.dimension, signal=longest, rounds=self.rounds)

    def _refuse_hopeless(self, forecast: Forecast, earlier: Earlier | None, shift: float) -> None:
        """Raises CannotLearn if the noise leaves nothing to be learnt, unless it is forced."""
        # A mechanism that was given is the user's own choice, and so is its noise.
        if forecast.verdict is not Verdict.NOTHING or self._mechanism is not None or self._force:
            return
        because, remedy = "", "Use more data, a smaller model, a larger epsilon or more epochs."
        if earlier is not None:
            because = f"{self._ledger_name}: {earlier}. With what is left, {earlier.compared(shift)}; "
            remedy = _WITH_EARLIER_SPENDS
        raise CannotLearn(
            f"{because}{'; '.join(forecast.lines())}. Nothing was spent. {remedy} force=True trains it anyway."
        )

    @property
    def _ledger_name(self) -> str:
        return "the ledger" if self._ledger is None else str(self._ledger.path)

    @property
    def range(self) -> float:
        """R: the mean is clamped to [-R, R] and encoded there."""
        if self._range is None:
            batch_size = self.loader.batch_size
            unit_range = fitting_range(
                self.budget,
                clip_norm=1.0,
                batch_size=batch_size,
                rate=batch_size / self.loader.samples,
                messages=self.rounds,
            )
            self._range = min(unit_range, 1.0) * self._clip_norm
        return self._range

    def _terms(self) -> Terms:
        loader = self.loader
        terms = clipped_terms(
            self._objective.clip,
            range=self.range,
            batch_size=self._objective.batch_size,
            sampling=Sampling.of_batch(Scheme.POISSON, batch_size=loader.batch_size, dataset_size=loader.samples),
            dimension=self._objective.dimension,
        )
        if self._rule is not None:
            return in_sums(terms, self._rule)
        return replace(terms, trust=self._peers.trust)

    def step(self, batch: Batch) -> StepReport:
        """Take one private step: clear the gradients, call `backward(batch)`, then `optimizer.step()`.

        Returns what is public about it: its number, and epsilon so far.

        A Ctrl-C is raised when the step is complete, a second one at once; the next step works after either.

        Raises:
            BudgetExhausted: the step would exceed the budget; nothing was recorded, and the model stays as it is.
        """
        with interrupts_deferred():
            self.optimizer.zero_grad()
            self.backward(batch)
            self.optimizer.step()
        report = StepReport(number=self.steps, planned=self.rounds, _guarantee=self.guarantee)
        for call in self._on_step:
            call(report)
        return report

    def backward(self, batch: Batch, *, accumulate: bool = False) -> None:
        """Put the private gradient of a batch into `.grad`, instead of `loss.backward()`; each call is counted.

        Once the spend is recorded there is a gradient, whatever the data are: a sample counts as zero if it cannot be
        read, raises an error in the model or the loss, or has a gradient that is not finite. Do not change the gradient
        before the optimizer steps: the optimizer refuses one that was changed.

        accumulate: add it to the gradients that were released since `optimizer.zero_grad()`, for a step on their sum.

        Raises:
            BudgetExhausted: as `step`.
            InvalidParameter: the batch was used before, or model, data set or gradients have changed in a way that the
                plan does not cover; nothing was spent.
        """
        with interrupts_deferred():
            self._check_unchanged()
            if self._study is not None:
                self._study.check_left(self.steps)
            held = self._gradients.held(self._parameters)
            # Last of the checks: from here on the batch counts as used, even if the ledger refuses the step.
            samples, step = self.loader.take(batch), self.steps
            if self._secure is not None:
                update = self._summed(samples, step)
            else:
                update = self._exchange(self._frame(samples, step), step)
            self._gradients.put(update, self._parameters, onto=held if accumulate else None)

    def _check_unchanged(self) -> None:
        """Check what the plan depends on, before the step is recorded: an error after that could depend on the data."""
        # First: torch's threads do not survive a fork, and any parallel operation of a forked child waits for them.
        if self._ledger is not None:
            self._ledger.check_process()
        if torch.is_inference_mode_enabled():
            raise InvalidParameter("a step needs gradients: take it outside of torch.inference_mode()")
        now = trainable(self.model)
        if [id(p) for p in now] != [id(p) for p in self._parameters] or [p.shape for p in now] != self._shapes:
            raise InvalidParameter(
                "the parameters that require gradients have changed since training was planned, and those are clipped, "
                "sent and counted: freeze parameters before make_private, or call it again"
            )
        refuse_mixing(self.model)
        for parameter in now:
            if not bool(parameter.isfinite().all()):
                raise NonFiniteInput("the model holds NaN or infinity; lower the learning rate and resume")
        self.loader.check_size()
        if self._terms() != self.plan.release.terms:
            raise InvalidParameter(
                "the loader or the clip has changed since training was planned; call make_private again"
            )
        self._check_objective()

    def _check_objective(self) -> None:
        self._objective.in_callers_autocast()
        with full_precision():
            self._objective.check(self._form)

    def _summed(self, samples: Iterator[Part], step: int) -> npt.NDArray[np.float32]:
        """The mean of all ranks from a secure sum.

        Raises:
            BudgetExhausted: this rank's budget is spent.
            TooFewClients: another rank sent nothing; all ranks stop at this step.
        """
        self._settle()
        assert self._sums is not None
        assert self._rule is not None
        check_noise(self._sums.client, self.plan.release, rule=self._rule, seeded=self._sources.seeded)
        try:
            mean = self._sums.mean(lambda: self._frame(samples, step), round=step) * np.float32(self.range)
            subset = self._subset(step)
            return mean if subset is None else subset.estimate(mean.astype(np.float64)).astype(np.float32)
        except SecureSumError as error:
            if self._refusal is not None:
                raise BudgetExhausted("the budget of this rank is spent, so every rank stops") from self._refusal
            raise error

    def _frame(self, samples: Iterator[Part], step: int) -> bytearray | None:
        """Record the step, then encode its clipped mean; None when the budget is spent."""
        self._settle()
        charge = Charge(release=self.plan.release, round=step, last_round=max(self.rounds - 1, step))
        outlet: Outlet = partial(encode_frame, client=self._peers.rank, range=self.range, kept=self._kept)
        if self._sums is not None:
            outlet = partial(masked_vector, self._sums.client, range=self.range, model=self._sums.told)
        try:
            return self._sender.send(charge, outlet, lambda: self._mean(samples, step))
        except BudgetExhausted as reason:
            if self._peers.size == 1:
                raise
            self._refusal = reason
            # No error yet: the other ranks wait for this one, and are told first, so that all stop at the same step.
            return None

    def _subset(self, step: int, rank: int | None = None) -> Subset | None:
        """The coordinates of a rank's message (default: this rank's), None for all. Secure sums need one for all."""
        client = self._peers.rank if rank is None else rank
        return self._objective.subset(round=step, client=None if self._secure is not None else client)

    @property
    def _kept(self) -> Kept | None:
        subsets = self._objective.subsets
        return None if subsets is None else subsets.header

    def _mean(self, samples: Iterator[Part], step: int) -> Values:
        mean, lost = self._objective.mean(_until_error(samples), self._subset(step))
        self.dropped += lost
        return mean

    def _settle(self) -> None:
        """Tell the other ranks, once, how this rank's frames are to be read."""
        if self._settings is None:
            note = {"mechanism": self.plan.mechanism.to_dict(), "range": self.range, "step": self.steps}
            notes = self._peers.tell(note)
            # A frame that names another step is refused, so ranks that are at different steps could never exchange any.
            if any(note["step"] != self.steps for note in notes):
                raise InvalidParameter(
                    f"the ranks are at steps {[note['step'] for note in notes]}; resume all from the same checkpoint"
                )
            self._settings = [self._frames_of(rank, note) for rank, note in enumerate(notes)]
            if self._secure is not None and self.sum_plan is not None:
                if len(set(self._settings)) > 1:
                    raise InvalidParameter(
                        "the ranks of a secure sum need one plan: give all of them the same range, and the same share "
                        "of their samples in a batch or the same mechanism"
                    )
                self._sums = RankSums(
                    self._peers,
                    plan=self.sum_plan,
                    dimension=self._objective.dimension,
                    secure=self._secure,
                    seed=self._sources.seed,
                    told=self._shared,
                )

    def _frames_of(self, rank: int, note: dict[str, Any]) -> tuple[Mechanism, float]:
        """The mechanism and range of a rank's frames.

        Raises:
            InvalidParameter: its range or its codes are larger than this rank's settings allow, which would give it
                more weight in the mean than the others have.
        """
        try:
            mechanism, reach = Mechanism.from_dict(note["mechanism"]), check_positive("range", note["range"])
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidParameter(f"rank {rank} sent an invalid mechanism or range") from error
        if self._secure is not None:
            return mechanism, reach  # `_settle` refuses any that differ from this rank's own
        most, bits = max(self.range, self._clip_norm), (mechanism.code_count - 1).bit_length()
        if reach > most or bits > max(self.budget.bits, (self.plan.mechanism.code_count - 1).bit_length()):
            raise InvalidParameter(
                f"rank {rank} sends {bits} bits per coordinate within +-{reach:g}; this rank accepts at most "
                f"{self.budget.bits} bits within +-{most:g}: give every rank the same bits, clip and range"
            )
        return mechanism, reach

    def _exchange(self, frame: bytearray | None, step: int) -> npt.NDArray[np.float32]:
        """The mean of all ranks' frames. Any of them may be hostile.

        All have the same weight: a weight that a rank claims for itself would let it decide the mean.
        """
        assert self._settings is not None
        sizes = [
            header_bytes(self._kept, mechanism.noise)
            + FixedWidth(mechanism.code_count).payload_bytes(self._objective.dimension)
            for mechanism, _ in self._settings
        ]
        # Zeros stand for a rank that sends nothing, because every rank must take part in the gathering.
        frames = self._peers.gather(frame or bytearray(sizes[self._peers.rank]), sizes)
        spent = [rank for rank, content in enumerate(frames) if not content.any()]
        if spent:
            raise BudgetExhausted(f"the budget of rank {spent[0]} is spent, so every rank stops") from self._refusal
        total = Accumulator(self.dimension)
        for rank, (content, (mechanism, reach)) in enumerate(zip(frames, self._settings, strict=True)):
            subset = self._subset(step, rank)
            total.add(content, range=reach, mechanism=mechanism, client=rank, round=step, subset=subset)
        subsets = self._objective.subsets
        mean = total.mean() if subsets is None else subsets.rotated_back(total.mean(), round=step)
        return mean.astype(np.float32)

    def guarantee(self, *, delta: float | None = None) -> Guarantee | None:
        """The guarantee of all steps so far and of everything else in the ledger; None before anything is spent."""
        guarantee = self._sender.spending.guarantee(delta=self.budget.delta if delta is None else delta)
        return None if guarantee is None else self._objective.stated(guarantee)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, in plain values. Save those of the model, the optimizer and the scheduler too."""
        return {
            "format": _FORMAT,
            "run": self._sender.spending.run,
            "steps": self.steps,
            "range": self.range,
            # Through JSON: torch.load with weights_only reads plain strings, and refuses our enums.
            "plan": json.loads(json.dumps(self.plan.to_dict())),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: the same plan, run and step. Load model and optimizer as well.

        Steps that the ledger has recorded are not counted again. Steps taken after the checkpoint and now taken again
        draw new noise, which is a new release: they are counted, and the budget may then end training early.

        Raises:
            InvalidParameter: the state was saved with other settings.
            LedgerError: the ledger does not know the steps of this state; a lost ledger must be restored.
        """
        if self.steps or self._study is not None:
            raise InvalidParameter("load the state before the first step; a study continues without one")
        try:
            if state["format"] != _FORMAT:
                raise InvalidParameter(f"not a state of {_FORMAT}")
            plan, run, steps, reach = Plan.from_dict(state["plan"]), state["run"], state["steps"], state["range"]
        except (KeyError, TypeError) as error:
            raise InvalidParameter(f"not a state of {_FORMAT}: {error}") from error
        check_int("steps", steps, 0, 2**40)
        before, self._range = self._range, check_positive("range", reach)
        differing = differences(plan, budget=self.budget, rounds=self.rounds, terms=self._terms())
        # The ranks of a sum add the noise of the sum plan, so the ledger must count exactly that noise.
        if self.sum_plan is not None and self.sum_plan.mechanism != plan.mechanism:
            differing.append("another mechanism of secure sums")
        if differing:
            self._range = before
            raise InvalidParameter(
                f"the state was saved with other settings ({'; '.join(differing)}): another budget, clip, batch size, "
                "number of samples, parameters or epochs; make_private must be given the same"
            )
        sender = self._sending(run, resume=True)
        recorded = sender.spending.recorded
        if self._ledger is not None and recorded < steps:
            self._range = before
            raise LedgerError(
                f"the state was saved after {steps} steps, but {self._ledger.path} has recorded only {recorded} of "
                "them: restore the ledger that belongs to this training"
            )
        self._plan, self._sender = plan, sender
        self._sender.next_round = self.loader.next_draw = steps

    def close(self) -> None:
        """Return the steps that were reserved and not taken, and make the optimizer an ordinary one again.

        This also happens when the program exits, but not after a crash.
        """
        self._gradients.close()
        if self._ledger is not None:
            self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        loader = self.loader
        return (
            f"Private({type(self.model).__name__} with {self.dimension} trained coordinates, step {self.steps} of "
            f"{self.rounds}, batches of {loader.batch_size} in {loader.samples}, clip {self._objective.clip}, budget "
            f"{self.budget})"
        )

    def __reduce__(self) -> str:
        # Its noise and its budget exist once: a copy would use both a second time.
        raise TypeError("private training cannot be copied or pickled; use state_dict for a checkpoint")


def _uncompiled(model: nn.Module) -> nn.Module:
    """The module that torch.compile was given: compiled code computes a batch, and samples need a program each."""
    own = getattr(model, "_orig_mod", model)
    if own is not model:
        _log.warning(
            "the model was compiled by torch.compile: private steps use the module itself, which has the same "
            "parameters; the compiled one can still be used to evaluate"
        )
    return own


def _check_model(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse a model or an optimizer that cannot be made private; the message says what to do instead."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise InvalidParameter("give the module itself (model.module): make_private joins the ranks")
    refuse_mixing(model)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not held <= {id(parameter) for parameter in model.parameters()}:
        raise InvalidParameter(
            "the optimizer holds a parameter that does not belong to the model, so its gradient would not be private: "
            "give the optimizer the model's parameters only"
        )
    if not {id(parameter) for parameter in trainable(model)} <= held:
        raise InvalidParameter(
            "some parameters require gradients but are not in the optimizer, so they would be sent and counted without "
            "any use: freeze them with requires_grad_(False), or add them to the optimizer"
        )
    if isinstance(optimizer, (LBFGS, SparseAdam)):
        raise InvalidParameter(f"{type(optimizer).__name__} cannot step on one dense gradient; use SGD, Adam or AdamW")


def _opened(ledger: str | Path | Ledger | None, budget: Budget, peers: Peers) -> Ledger | None:
    if ledger is None or isinstance(ledger, Ledger):
        if ledger is not None and (ledger.budget.epsilon, ledger.budget.delta) != (budget.epsilon, budget.delta):
            raise InvalidParameter(f"the ledger has a budget of {ledger.budget}; plan for the same epsilon and delta")
        return ledger
    path = Path(ledger)
    if peers.size > 1:
        path = path.with_name(f"{path.stem}-{peers.rank}{path.suffix}")
    if not path.exists():
        check_not_lost(path)
    return Ledger.open(path, client=peers.rank, budget_epsilon=budget.epsilon, budget_delta=budget.delta)


def _until_error(samples: Iterator[Part]) -> Iterator[Part]:
    """The parts of a batch. When reading fails, for example if no worker process can start, the rest counts as zero."""
    with errors_dropped("reading a batch failed; the rest of it counts as zero"):
        yield from samples
