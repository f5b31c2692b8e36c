"""A training run as `train` and `demo` do it: data, session, run folder, progress, report."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bqsgd.errors import InvalidParameter

if TYPE_CHECKING:
    from bqsgd.engines.session import Session, Task
    from bqsgd.engines.task import PrivateLogs
    from bqsgd.training.config import Config

PRIVATE_NOTE = "private_metrics: computed from private data, outside the guarantee; kept in the clients' own files."


def task_of(config: Config, *, client: int | None = None) -> Task:
    """The data set, shares and model that the settings name.

    client: the only one whose share is wanted, in a process that works for one; client 0 has the test data too.
    """
    from bqsgd import data, models
    from bqsgd.engines.session import Task
    from bqsgd.training.seeds import Purpose, derive

    found = data.load_shares(
        config.dataset,
        folder=config.data_folder,
        features=config.front_end,
        clients=config.clients,
        client=client,
        seed=derive(config.init_seed, Purpose.SHARES),
        concentration=config.concentration,
        smallest=1 if config.concentration is None else config.batch_size,
        threads=config.workers,
    )
    shape, classes, test = found.input_shape, found.classes, found.test
    name = config.model or models.default_for(shape, features=config.front_end)
    seed = derive(config.init_seed, Purpose.MODEL)
    return Task(
        make_model=lambda: models.build(
            name, input_shape=shape, classes=classes, seed=seed, activation=config.activation
        ),
        shares=[(share.inputs, share.labels) for share in found.shares],
        test=None if test is None else (test.inputs, test.labels),
    )


def run(
    config: Config,
    *,
    folder: Path,
    resuming: bool,
    tensorboard: bool = False,
    begin: Callable[..., Session] | None = None,
    client: int | None = None,
) -> dict[str, Any]:
    """Train to the end, or to Ctrl-C; returns the fields to print. Everything about the run is in `folder` then.

    begin: makes the session; one with all clients in this process unless given. client: the only one that works here.
    """
    from bqsgd.cli.progress import shown
    from bqsgd.engines.session import Session
    from bqsgd.reports.folder import RunWriter
    from bqsgd.reports.page import write_report

    task = task_of(config, client=client)
    folder.mkdir(parents=True, exist_ok=True)
    if begin is None:
        begin = Session.resume if resuming else Session.start
    with ExitStack() as stack:
        log = private_log_in(folder) if config.private_metrics else None
        session = stack.enter_context(begin(task, config, folder=folder, private_log=log))
        config = session.config
        writer = stack.enter_context(RunWriter(folder, keep_through=session.server.round - 1 if resuming else -1))
        if not resuming:
            writer.config(config.to_dict())  # after the ledgers: a folder with settings has all its ledgers
        sinks = [writer.append]
        if tensorboard:
            from bqsgd.reports.tensorboard import TensorBoardLog

            sinks.append(stack.enter_context(TensorBoardLog(folder / "tensorboard")).append)
        with _interrupts() as asked_to_stop:
            for record in shown(session.rounds(), config=config, first_round=session.server.round):
                for sink in sinks:
                    sink(record)
                if asked_to_stop:
                    break
        session.checkpoint()
        final = session.evaluate()
    fields = _summary(session, final, folder)
    with RunWriter(folder) as writer:
        writer.summary(fields)
    fields["report"] = str(write_report(folder))
    fields["finished"] = session.server.round == config.rounds
    return fields


def _summary(session: Session, final: tuple[float, float] | None, folder: Path) -> dict[str, Any]:
    from bqsgd.reports.folder import read_rounds

    result = session.result()
    totals = dict.fromkeys(("bytes_up", "bytes_down", "bytes_up_float32"), 0)
    seconds, nominal = 0.0, None
    for record in read_rounds(folder):
        for name in totals:
            totals[name] += getattr(record, name)
        seconds, nominal = record.time, record.nominal_epsilon
    coordinates = totals["bytes_up_float32"] / 4
    return {
        "accuracy": None if final is None else final[0],
        "loss": None if final is None else final[1],
        "rounds": result.rounds,
        "guarantee": None if result.guarantee is None else result.guarantee.to_dict(),
        "guarantee_client": result.client,
        "nominal": None
        if nominal is None
        else {
            "epsilon": nominal,
            "delta": session.config.delta,
            "method": "Theorem 1: nominal epsilon (as published; not a guarantee)",
        },
        **totals,
        "bits_per_coordinate": 8 * totals["bytes_up"] / coordinates if coordinates else None,
        "seeded": result.seeded,
        "seconds": seconds,
        "versions": _versions(),
        "config": session.config.to_dict(),
    }


def _versions() -> dict[str, str]:
    names = ("bqsgd", "torch", "numpy", "dp-accounting")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list that fills at the first Ctrl-C or SIGTERM: the round in hand is finished; the second one interrupts it."""
    from bqsgd.engines.stopping import stop_signals

    asked: list[int] = []

    def note(number: int) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    with stop_signals(note):
        yield asked


def private_log_in(folder: Path) -> PrivateLogs:
    """One file a client under private/."""
    from bqsgd.engines.task import private_log_at

    place = folder / "private"
    place.mkdir(parents=True, exist_ok=True)
    return lambda client: private_log_at(place / f"client-{client:04}.jsonl")


def stored(folder: Path, given: dict[str, Any]) -> Config | None:
    """The settings of the run in `folder`, None when there is none; a setting given that differs is refused."""
    from bqsgd.training.config import Config

    path = folder / "config.toml"
    if not path.exists():
        return None
    config = Config.from_toml(path)
    for name, value in given.items():
        if getattr(config, name) != value:
            raise InvalidParameter(
                f"{folder} was started with {name}={getattr(config, name)!r}, not {value!r}; resume it without that "
                "option or start a new run in another folder"
            )
    return config
