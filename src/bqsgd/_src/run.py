"""A run from start to end, on any engine: its settings, rounds, records, checkpoint, summary and report.

    task = Task(make_model=Net, shares=[(x0, y0), (x1, y1)], test=(x, y))
    with Run.start(task, Config.of(clients=2, epsilon=3), folder="runs/one") as run:
        for record in run.rounds():
            print(record.round, record.test_accuracy)
    print(run.summary.guarantee)

`Run` is the one owner of a run's state. The engine given to it only exchanges bytes, so a run in this process, over
torch.distributed or over Flower leaves the same folder: config.toml, rounds.jsonl, summary.json, report.html,
model.safetensors, checkpoint.safetensors and, where clients work here, their ledgers. With `patience` the run stops
early by its results on the public test data, and best.safetensors is the best of its models.

kill -9 it at any point and `Run.resume` continues from the last checkpoint. Rounds that are made again are counted
again when their noise is new; with seeded noise they are the same bytes, and the final model is the same bit for bit.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import math
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bqsgd import __version__
from bqsgd._src.client.least_squares import LeastSquares
from bqsgd._src.client.objectives import message_dimension
from bqsgd._src.client.sums import SumSetup, with_roster
from bqsgd._src.engines.engine import MakeEngine, Setup
from bqsgd._src.engines.in_process import in_process
from bqsgd._src.engines.round import log_trouble, run_round
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.models import as_numpy, load_vector, to_vector
from bqsgd._src.planner.search import PlanningTooLong, cpu_seconds
from bqsgd._src.privacy.guarantee import Guarantee, as_given
from bqsgd._src.records.checkpoint import (
    BEST,
    MODEL,
    CheckpointError,
    load_checkpoint,
    round_of,
    save_checkpoint,
    save_model,
    seconds_of,
    take,
)
from bqsgd._src.records.folder import CONFIG, RunWriter, read_config, read_rounds
from bqsgd._src.records.record import RoundRecord, Status, Summary
from bqsgd._src.reports.page import write_report
from bqsgd._src.runtime.modes import one_thread
from bqsgd._src.secure.state import EpochFile
from bqsgd._src.server.aggregation import client_weights, read_sizes
from bqsgd._src.server.cohort import Choose, Cohorts
from bqsgd._src.server.server import Server
from bqsgd._src.server.sums import SumRounds
from bqsgd._src.server.widths import Widths
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.groups import LEAST_SQUARES
from bqsgd._src.settings.outlook import check_outlook, foresee
from bqsgd._src.storage import one_writer
from bqsgd._src.tasks.best import Best
from bqsgd._src.tasks.task import Evaluation, Task
from bqsgd._src.wire.reply import BUDGET_SPENT, NO_PLAN, RUN_SPENT

_log = logging.getLogger("bqsgd.run")
_DATA = "data"
"""The table of config.toml that holds the settings of a named task."""
_WIDTHS = "sum_widths"
_SETTINGS = "settings_sha256"
_BEST = "best"
"""The array of a checkpoint that holds the best model so far."""
_TOTALS = ("bytes_up", "bytes_down", "bytes_up_float32", "bytes_down_float32")
_OUTLOOK_SECONDS = 60.0
"""CPU time for the outlook if it rests on sizes that clients claim."""
STILL_ROUNDS = 10
"""A run stops when this many rounds in a row have left the model unchanged."""


class Run:
    """A run; use `Run.start` or `Run.resume`, as a context manager.

    >>> from torch import nn
    >>> share = np.eye(4, dtype=np.float32), np.arange(4)
    >>> task = Task(make_model=lambda: nn.Linear(4, 4), shares=[share], test=share)
    >>> settings = Config.of(clients=1, rounds=2, batch_size=4, levels=8, trials=0)  # trials=0: no noise, no privacy
    >>> with Run.start(task, settings) as run:
    ...     [record.round for record in run.rounds()]
    [0, 1]
    >>> run.summary.rounds
    2

    Leaving the `with` block writes checkpoint, summary and report, and closes the engine; after an error it only closes
    the engine, and the folder stays as the last round left it.
    """

    def __init__(
        self,
        task: Task,
        config: Config,
        *,
        folder: Path | None,
        engine: MakeEngine,
        resuming: bool,
        choose: Choose | None,
        resources: ExitStack,
    ) -> None:
        self.task, self.config, self.folder = task, config, folder
        self.summary: Summary | None = None
        """The results of the run, once it is closed."""
        patience = config.run.patience
        if patience is not None and task.test is None:
            raise InvalidParameter("patience stops a run by its results on test data: give the task public test data")
        self._best = None if patience is None else Best(task.metric, patience=patience)
        model = task.make_model()
        self._objective = task.check(config, model)
        self._rest = {name: value.clone() for name, value in model.state_dict().items()}
        self._evaluate = task.evaluator(model)
        initial = to_vector(model)
        self._resources = resources
        sizes = None if config.server.sizes is None else read_sizes(config.server.sizes)
        self.config = config = with_roster(config)
        problem = LeastSquares.of(model) if config.run.method == LEAST_SQUARES else None
        subsets = self._objective.subsets
        dimension = message_dimension(config, model)
        sums = SumSetup.of(config, run=config.run.name or "run", dimension=dimension)
        setup = Setup(
            task=task, config=config, folder=folder, resuming=resuming, dimension=dimension, sizes=sizes, sums=sums
        )
        self.engine = engine(setup)
        self._resources.callback(self.engine.close)
        choice = config.server.weights
        if choice is None and (config.privacy.rate is not None or config.secure.on):
            # At one rate a batch grows with the client's samples, so equal weights give every sample the same weight.
            choice = "equal"
        weights = client_weights(choice, self.engine.samples, claimed=self.engine.claimed, sizes=sizes)
        self.server = Server(
            model=initial,
            weights=weights,
            config=config,
            least_squares=problem,
            subsets=subsets,
            centre=self._objective.centre,
        )
        self._sums = [] if sums is None else self._sum_rounds(sums)
        """The secure sums of every group of clients."""
        self.cohorts = Cohorts(config, self.engine.samples, choose=choose)
        """Who is asked, and how often each client was."""
        self._started = time.monotonic()
        self.last: RoundRecord | None = None
        """The record of the last round, None before the first."""
        self._totals = dict.fromkeys(_TOTALS, 0)
        self.steps = 0
        """Rounds that moved the model."""
        self._still = 0
        self.out_of_budget: str | None = None
        """Why the run ended early, if the reason is that clients have spent their budgets; which limit to raise."""
        self._spent: set[int] = set()
        self._spent_by_name = False
        self._resumed = resuming
        self._writer: RunWriter | None = None

    def _sum_rounds(self, sums: SumSetup) -> list[SumRounds]:
        return [
            SumRounds(
                agreement,
                rounds=self.config.run.rounds,
                key_rounds=self.config.secure.key_rounds,
                last_epoch=None if self.folder is None else EpochFile(self.folder / _epoch_file(group)),
                widths=Widths(plan, dimension=self.server.dimension, first=int(self.server.descent.measures(0))),
            )
            for group, (agreement, plan) in enumerate(zip(sums.agreements, self.server.sums, strict=True))
        ]

    @classmethod
    def start(
        cls,
        task: Task,
        config: Config,
        *,
        folder: str | Path | None = None,
        engine: MakeEngine = in_process,
        choose: Choose | None = None,
        force: bool = False,
    ) -> Self:
        """Begin a run in `folder`, which must not contain a run.

        Without a folder nothing is stored. That is allowed only for seeded and noiseless runs, which make no privacy
        claim.

        choose: picks each round's cohort instead of a random draw: (round, clients with turns left, how many) -> whom.
        force: start even if the plans say that nothing can be learnt (`settings.outlook`).

        Raises:
            CannotLearn: no client has a plan, or the noise is larger than any signal; nothing was spent.
            CheckpointError: the folder contains a run.
        """
        path = None if folder is None else Path(folder)
        with ExitStack() as resources:
            if path is not None:
                path.mkdir(parents=True, exist_ok=True)
                resources.enter_context(one_writer(path))
                if (path / CONFIG).exists() or load_checkpoint(path) is not None:
                    raise CheckpointError(
                        f"{path} contains a run already; continue it with Run.resume(task, folder=...), or name "
                        "another folder"
                    )
            run = cls(
                task, named(config), folder=path, engine=engine, resuming=False, choose=choose, resources=resources
            )
            if not force:
                run._check_outlook()
            if path is not None:
                run._open_writer(keep_through=-1)
            run._resources = resources.pop_all()  # kept open: without an error, closing them is up to the run
        return run

    @classmethod
    def resume(
        cls,
        task: Task,
        *,
        folder: str | Path,
        engine: MakeEngine = in_process,
        choose: Choose | None = None,
    ) -> Self:
        """Continue the run in `folder` from its last checkpoint, or from round 0 when it was stopped before the first.

        The settings are those the run was started with.
        """
        path = Path(folder)
        config, _ = stored_settings(path)
        with ExitStack() as resources:
            resources.enter_context(one_writer(path))
            checkpoint = load_checkpoint(path)
            run = cls(task, config, folder=path, engine=engine, resuming=True, choose=choose, resources=resources)
            best = None
            if checkpoint is not None:
                arrays, state = checkpoint
                best = arrays.pop(_BEST, None)
                if state.get("run") != config.run.name:
                    raise CheckpointError(
                        f"the checkpoint in {path} is of run {state.get('run')!r}, not {config.run.name!r}"
                    )
                if state.get(_SETTINGS, digest := _digest(config)) != digest:  # older checkpoints have none
                    raise CheckpointError(
                        f"{path / CONFIG} is not as it was when the checkpoint was written; put the settings back, or "
                        "start a new run in another folder"
                    )
                run.server.restore(arrays, round=round_of(state))
                run._restore_widths(state.get(_WIDTHS))
                run._started -= seconds_of(state)
            run._open_writer(keep_through=run.server.round - 1)
            if run._best is not None and run._best.rounds:
                # The records say which evaluation was the best, and the checkpoint has the model of it.
                run._best.model = take({} if best is None else {_BEST: best}, _BEST, like=run.model)
            run._resources = resources.pop_all()
        return run

    def _restore_widths(self, state: Any) -> None:
        states = state if len(self._sums) > 1 and isinstance(state, list) else [state] * len(self._sums)
        if len(states) != len(self._sums):
            raise CheckpointError(f"the checkpoint has the widths of {len(states)} sums, this run {len(self._sums)}")
        for sums, one in zip(self._sums, states, strict=True):
            if sums.widths is not None:
                sums.widths.restore(one)

    def _check_outlook(self) -> None:
        """Log what the plans leave to be learnt; raise CannotLearn if that is nothing.

        If clients claim their sizes, one plan for the median size stands for all, with a time limit. Otherwise a client
        could make this process plan a thousand times, or for ever, by what it claims.
        """
        samples = self.engine.samples
        if self.engine.claimed:
            samples = dict.fromkeys(samples, sorted(samples.values())[len(samples) // 2])
        with cpu_seconds(_OUTLOOK_SECONDS if self.engine.claimed else None):
            try:
                outlook = foresee(
                    self.config,
                    samples,
                    dimension=self.server.dimension,
                    learnt=self.server.model.size,
                    weights=self.server.weights,
                )
                check_outlook(outlook)
            except PlanningTooLong:
                _log.warning("planning took too long to say what the noise leaves to be learnt")
                return
        for line in outlook.lines():
            _log.info(line)

    def _open_writer(self, *, keep_through: int) -> None:
        assert self.folder is not None
        self._writer = self._resources.enter_context(RunWriter(self.folder, keep_through=keep_through))
        if not (self.folder / CONFIG).exists():  # written after the ledgers: a folder with settings has all of them
            self._writer.config(self._settings())
        for record in read_rounds(self.folder):
            self._count(record)

    def _settings(self) -> dict[str, Any]:
        source = self.task.source
        return self.config.to_dict() | ({} if source is None else {_DATA: source.to_table()})

    def _count(self, record: RoundRecord) -> None:
        self.last = record
        self.cohorts.turns.update(entry.client for entry in record.clients if entry.client is not None)
        self.steps += record.stepped
        self._still = 0 if record.stepped else self._still + 1
        if self._best is not None:
            self._best.note(record, self.model)
        for name in _TOTALS:
            self._totals[name] += getattr(record, name)

    @property
    def round(self) -> int:
        """Rounds done."""
        return self.server.round

    @property
    def model(self) -> npt.NDArray[np.float32]:
        """The current model, flat: the exponential average if the run keeps one."""
        return self.server.best_model

    def rounds(self) -> Iterator[RoundRecord]:
        """Run the rounds that are left, yielding the record of each; stop by not asking for the next.

        Every round's record is written first; the checkpoint follows every `checkpoint_every` rounds and after the
        last. The run stops early if too few clients are left for a round to count, because they are lost or have spent
        their budgets, if the model has not moved for STILL_ROUNDS rounds, if LOST_SUMS secure sums in a row were lost,
        or if the results on the test data have exhausted `patience`.
        """
        settings = self.config.run
        while self.round < settings.rounds and self.stopped is None:
            asked = None
            if self.config.clients.cohort is not None:
                asked = self.cohorts.draw(self.round, lost=self.engine.lost)
                if len(asked) < self.config.server.fewest_frames:
                    _log.warning("%d clients have turns left: stopping before round %d", len(asked), self.round)
                    return
            with one_thread():
                record = self._evaluated(run_round(self.server, self.engine, asked=asked, sums=self._sums))
            self._count(record)
            if self._writer is not None:
                # Before the checkpoint below: a resumed run drops records after its checkpoint, but cannot make up one
                # that is missing before it.
                self._writer.append(record)
            log_trouble(record)
            yield record
            if self.round % settings.checkpoint_every == 0 or self.round == settings.rounds:
                self.checkpoint()
            left, needed = len(self.engine.samples) - len(self.engine.lost), self.config.fewest_clients
            self._note_spent(record)
            if left - len(self._spent - set(self.engine.lost)) < needed <= left:
                self.out_of_budget = self._budget_text(needed)
                _log.warning("stopping after %d rounds: %s", self.round, self.out_of_budget)
                return
            if left < needed:
                _log.warning("%d clients are left and a round needs %d frames: stopping", left, needed)
                return
            if self.stalled:
                _log.warning("stopping after %d rounds: %s", self.round, self.ended_early)
                return

    def _note_spent(self, record: RoundRecord) -> None:
        """Remember who says that it can send nothing in any later round either."""
        for entry in record.clients:
            if entry.client is None:
                continue
            if entry.status is Status.OK:
                self._spent.discard(entry.client)
            # A budget that grows later in the run will let the client send again.
            elif max(self.config.privacy.budget_starts(entry.client)) <= record.round and (
                (entry.reason or "").startswith((BUDGET_SPENT, NO_PLAN))
            ):
                self._spent.add(entry.client)
                self._spent_by_name |= entry.reason == RUN_SPENT

    def _budget_text(self, needed: int) -> str:
        budget, clients = self.config.privacy, len(self.engine.samples)
        why = (
            f"{len(self._spent)} of {clients} clients have no privacy budget left, and a round needs {needed} of them. "
        )
        if self._resumed:
            why += (
                "This run was resumed: rounds made again after the last checkpoint have new noise and count again, "
                "which uses up the budget before the last round; a smaller checkpoint_every repeats fewer. "
            )
        if self._spent_by_name and not self._resumed:
            return (
                f"{len(self._spent)} of {clients} clients have spent the budget of this run, epsilon "
                f"{as_given(budget.epsilon)}: their ledgers hold earlier rounds under its name, "
                f"{self.config.run.name!r}, which count against it. Give the run a name of its own"
            )
        return why + (
            f"Start a run with a larger epsilon than {as_given(budget.epsilon)}; if other runs have spent from a "
            "client's ledger, its owner can raise the limit epsilon of that client"
        )

    @property
    def stopped(self) -> str | None:
        """Why the run stops early by its results on the test data, or None. What it means for the budget is said too.

        The stop is computed from released models and public data. So the epsilon of all planned rounds bounds the run
        whenever it stops, while the figure that the ledgers count is that of the rounds taken.
        """
        reason = None if self._best is None else self._best.exhausted
        if reason is None or self.round >= self.config.run.rounds:
            return None
        taken = f"{reason}; {self.round} of {self.config.run.rounds} rounds were taken"
        if self.config.privacy.noiseless:
            return taken
        return (
            f"{taken}, with the noise planned for all, and the rest of the budget is unspent. Epsilon counts the "
            "rounds taken; the whole budget holds whenever a run stops"
        )

    @property
    def ended_early(self) -> str | None:
        """Why the run ended by itself before its last round, or None: by the test data, for want of budget, stalled."""
        if self.stopped is not None or self.out_of_budget is not None:
            return self.stopped or self.out_of_budget
        if not self.stalled or self.round >= self.config.run.rounds:
            return None
        if self._still >= STILL_ROUNDS:
            return f"no round has moved the model in the last {self._still}; rounds.jsonl says why"
        return "too many secure sums in a row were lost; rounds.jsonl says why"

    @property
    def stalled(self) -> bool:
        """Whether the last STILL_ROUNDS rounds all left the model unchanged, or the last LOST_SUMS sums were lost.

        A lost sum has cost every client that masked a vector a round of its budget. With groups it is only that group
        that is given up, as long as the aggregation rule has sums enough.
        """
        live = sum(not group.given_up for group in self._sums)
        too_few = live < min(len(self._sums), self.config.server.fewest_updates)
        return self._still >= STILL_ROUNDS or too_few

    def _evaluated(self, record: RoundRecord) -> RoundRecord:
        """The record of the round that was just closed, with figures of the new model if they are due."""
        figures: dict[str, Any] = {"time": time.monotonic() - self._started}
        if self.config.run.evaluated_after(self.round):
            evaluation, (_, guarantee) = self.evaluate(), self._worst_guarantee()
            figures["epsilon_max"] = None if guarantee is None else guarantee.epsilon
            if evaluation is not None:
                figures |= {f"test_{name}": figure for name, figure in evaluation.figures().items()}
                if not math.isfinite(evaluation.loss):
                    _log.warning(
                        "round %d: the test loss is %s: the model diverges; lower the learning rate",
                        record.round,
                        evaluation.loss,
                    )
        return replace(record, **figures)

    def _worst_guarantee(self) -> tuple[int | None, Guarantee | None]:
        """The client with the largest epsilon and its guarantee; (None, None) if nothing private was sent."""
        guarantees = self.engine.guarantees(delta=self.config.privacy.delta)
        spent = {client: guarantee for client, guarantee in guarantees.items() if guarantee is not None}
        if not spent:
            return None, None
        client = max(spent, key=lambda client: (spent[client].epsilon, client))
        return client, spent[client]

    def evaluate(self) -> Evaluation | None:
        """The results of the current model on the test data; None without test data."""
        return None if self._evaluate is None else self._evaluate(self.model)

    def state_dict(self) -> dict[str, Tensor]:
        """The current model, for `load_state_dict` of your own module."""
        return self._state_dict(self.model)

    def _state_dict(self, vector: npt.NDArray[np.float32]) -> dict[str, Tensor]:
        model = self.task.make_model()
        model.load_state_dict(self._rest)  # buffers and frozen parameters, which no round changes
        load_vector(model, vector)
        return dict(model.state_dict())

    def _save_models(self, folder: Path) -> None:
        """Write the current model and, with `patience`, the best one."""
        models = {MODEL: self.model}
        if self._best is not None and self._best.model is not None:
            models[BEST] = self._best.model
        for name, vector in models.items():
            tensors = {key: as_numpy(value) for key, value in self._state_dict(vector).items()}
            save_model(folder, tensors, name=name)

    def checkpoint(self) -> None:
        """Write the state to the folder; it is durable when this returns."""
        if self.folder is not None:
            elapsed = time.monotonic() - self._started
            state: dict[str, Any] = {
                "round": self.round,
                "run": self.config.run.name,
                _SETTINGS: _digest(self.config),
                "elapsed_seconds": elapsed,
            }
            if self._sums:
                # Without groups it is one state, as in checkpoints from before there were groups.
                widths = [sums.widths.state() for sums in self._sums if sums.widths is not None]
                state[_WIDTHS] = widths if len(widths) > 1 else widths[0]
            arrays = self.server.arrays()
            if self._best is not None and self._best.model is not None:
                arrays[_BEST] = self._best.model
            save_checkpoint(self.folder, arrays, state)

    def close(self) -> Summary:
        """Write checkpoint, model, summary and report, and end the run on every client. Returns the summary."""
        if self.summary is None:
            try:
                # The checkpoint first: if the summary or a disk fails after it, the run can still be resumed.
                self.checkpoint()
                self.summary = self._summarise()
                if self._writer is not None and self.folder is not None:
                    self._save_models(self.folder)
                    self._writer.summary(self.summary)
            finally:
                self._resources.close()
            if self.folder is not None:
                # After the ledgers are closed, so that the report does not count reserved rounds that were never sent.
                write_report(self.folder)
        return self.summary

    def _summarise(self) -> Summary:
        with one_thread():
            evaluation = self.evaluate()
        client, guarantee = self._worst_guarantee()
        figures: dict[str, Any] = self._totals | ({} if evaluation is None else asdict(evaluation))
        best = self._best
        if best is not None and best.model is not None:
            figures |= {"best_rounds": best.rounds, "best_metric": best.name, "best_value": best.value}
            figures["best_model"] = BEST
        return Summary(
            **figures,
            stopped=self.ended_early,
            rounds=self.round,
            guarantee=None if guarantee is None else self._stated(guarantee),
            guarantee_client=client,
            seeded=self.config.privacy.seed is not None,
            seconds=None if self.last is None else self.last.time,
            one_liar=self.server.one_liar(0 if self.last is None else self.last.sum_width),
            versions=_versions(),
            config=self._settings(),
        )

    def _stated(self, guarantee: Guarantee) -> Guarantee:
        """The guarantee with what it assumes of the task, the objective and an early stop."""
        public = "" if self.stopped is None else "the test data that stopped the run early are public"
        return self._objective.stated(self.task.stated(guarantee)).assuming(public)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._resources.close()


def train(
    task: Task,
    config: Config | None = None,
    *,
    folder: str | Path | None = None,
    engine: MakeEngine = in_process,
    on_round: Callable[[RoundRecord], object] | None = None,
    **settings: Any,
) -> Summary:
    """Run every round of a new run and return its summary.

    on_round: called with the record of each round once it is written; what a record holds may be published.

    Give the settings as keywords; those you leave out are fitted to the data, as `bqsgd train` does (`Task.config`).
    Or give a complete `config`.

    >>> from torch import nn
    >>> share = np.eye(4, dtype=np.float32), np.arange(4)
    >>> task = Task(make_model=lambda: nn.Linear(4, 4), shares=[share, share], test=share)
    >>> train(task, Config.of(clients=2, rounds=100, batch_size=4, levels=64, trials=0)).accuracy  # no privacy
    1.0
    """
    if config is not None and settings:
        raise InvalidParameter(f"give {', '.join(settings)} in the config, or leave out the config")
    config = task.config(**settings) if config is None else config
    with Run.start(task, config, folder=folder, engine=engine) as run:
        for record in run.rounds():
            if on_round is not None:
                on_round(record)
    return run.close()


def named(config: Config) -> Config:
    """The same settings with a name for the ledgers, drawn at random if there is none."""
    return config if config.run.name is not None else config.but(run=f"run-{secrets.token_hex(8)}")


def stored_settings(folder: Path) -> tuple[Config, Mapping[str, Any]]:
    """The settings of the run in `folder`, and those of its named task (empty for your own task).

    Raises:
        InvalidParameter: the folder contains no run.
    """
    if not (folder / CONFIG).exists():
        raise InvalidParameter(f"{folder} contains no run to resume: it has no {CONFIG}")
    tables = read_config(folder)
    data = tables.pop(_DATA, {})
    config = Config.from_dict(tables)
    if config.run.name is None:
        raise InvalidParameter(f"{folder / CONFIG} does not name its run, so it cannot be resumed")
    return config, data


def _digest(config: Config) -> str:
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()


def _epoch_file(group: int) -> str:
    """The file of the run folder with the number of a group's last key batch; groups have numbers of their own."""
    return f"secure-{group}.epoch" if group else "secure.epoch"


def _versions() -> dict[str, str]:
    # Ours comes from the code that runs: the metadata of an editable install are as old as the installation.
    libraries = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "dp-accounting")}
    return {"python": platform.python_version(), "bqsgd": __version__} | libraries
