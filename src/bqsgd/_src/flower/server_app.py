"""The ServerApp: a run over Flower's grid, recorded in a folder on the server."""

from __future__ import annotations

import logging

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from bqsgd._src.engines.engine import MakeEngine
from bqsgd._src.errors import BudgetExhausted, InvalidParameter
from bqsgd._src.flower.engine import flower
from bqsgd._src.flower.messages import TrackedGrid
from bqsgd._src.flower.settings import MakeTask, Service, read_settings, with_simulated_keys
from bqsgd._src.records.folder import CONFIG
from bqsgd._src.run import Run, named, stored_settings
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.task import Task

logger = logging.getLogger("flwr.bqsgd")
_ROSTER_DIGEST = "roster_digest"
"""The digest of the roster that the run began with. The run itself compares it, with a better message."""


def server_app(make_task: MakeTask) -> ServerApp:
    """A ServerApp that trains with private clients.

    Args:
        make_task: (settings, None, options) -> the server's task: the initial model and public test data, no share. It
            is the same function as for `client_app`.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config, service, options = read_settings(context.run_config)
        run = serve(grid, config, service, make_task(config, None, options))
        if run.out_of_budget is not None:
            # Everything is written; the error makes Flower report the run as failed, with this text.
            raise BudgetExhausted(f"the run ended early: {run.out_of_budget}")

    return app


def serve(grid: Grid, config: Config, service: Service, task: Task) -> Run:
    """Run the rounds that are left, over any Flower grid."""
    tracked = TrackedGrid(grid)
    engine = flower(tracked, join_seconds=service.join_seconds, round_seconds=service.round_seconds)
    if config.privacy.seed is not None:
        logger.warning("the noise is seeded: this run makes no privacy claim")
    with _opened(task, config, service, engine) as run:
        clients, joined = len(run.engine.samples), tracked.batches
        logger.info(
            "run %s: %d clients, %d coordinates, rounds %d to %d",
            run.config.run.name, clients, run.server.model.size, run.round, config.run.rounds - 1,
        )  # fmt: skip
        for record in run.rounds():
            logger.info(
                "round %d: %d of %d frames, %d bytes up; %s",
                record.round, record.used, clients, record.bytes_up,
                "the model stepped" if record.stepped else "too few frames, the model stays as it is",
            )  # fmt: skip
    summary = run.close()
    accuracy = "no test data" if summary.accuracy is None else f"accuracy {summary.accuracy:.2%}"
    logger.info(
        "done: %d rounds, %d round trips, %s, %s",
        summary.rounds, tracked.batches - joined, accuracy, summary.guarantee or "nothing private was sent",
    )  # fmt: skip
    return run


def _opened(task: Task, config: Config, service: Service, engine: MakeEngine) -> Run:
    """A new run, or the run in the server's folder, if it has this name and these settings."""
    folder = service.folder
    if folder is None or not (folder / CONFIG).exists():
        # Named first: the keys of a simulation are in a folder of the run's name.
        return Run.start(task, with_simulated_keys(named(config)), folder=folder, engine=engine, force=service.force)
    stored, _ = stored_settings(folder)
    name = stored.run.name
    if config.run.name is None:
        raise InvalidParameter(f"{folder} holds run {name!r}; set `run` to that name to continue it, or another folder")
    asked = with_simulated_keys(config).flat()
    for setting, value in stored.flat().items():
        if asked[setting] != value and setting != _ROSTER_DIGEST:
            raise InvalidParameter(
                f"{folder} holds a run with {setting}={value!r}, not {asked[setting]!r}; name another folder"
            )
    run = Run.resume(task, folder=folder, engine=engine)
    logger.warning("resumed from the checkpoint: %d rounds were done", run.round)
    return run
