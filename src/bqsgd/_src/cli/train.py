"""`bqsgd train` and `bqsgd demo`: a private training run.

Most options are made from the settings themselves (`bqsgd._src.settings.groups`), so the two cannot differ.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
import typer.core

from bqsgd._src.cli._options import panel_option, takes
from bqsgd._src.cli.output import Json, answer, out_option, summary_lines
from bqsgd._src.errors import InvalidParameter

if TYPE_CHECKING:
    from bqsgd._src.engines.engine import MakeEngine
    from bqsgd._src.records.record import Summary
    from bqsgd._src.run import Run
    from bqsgd._src.settings.config import Config
    from bqsgd._src.settings.fit import Sizes
    from bqsgd._src.tasks.resolve import Resolved

BUDGET_SPENT = 3
"""The exit code of a run that ended early because the clients have spent their privacy budgets."""
_DATA, _RUN, _RANKS = "Data and model", "Run", "Several processes (torchrun)"
_DEMO: dict[str, tuple[str | None, dict[str, Any]]] = {
    "mnist": ("mnist-eps3", {}),
    "digits": (None, {"rounds": 60, "epsilon": 8.0, "evaluate_every": 10, "reserve_rounds": 60}),
}
"""Preset and settings per data set. `digits` has few samples, so a model needs a larger epsilon to learn from them."""
_FIRST = {"mnist": "computes features and compiles loops", "digits": "compiles loops"}
DEMO_SECONDS = {"mnist": (94, 49), "digits": (14, 8)}
"""CPU seconds of a demo, the first time and later (benchmarks/results/first_use.json)."""


class SettingsCommand(typer.core.TyperCommand):
    """A command with an option for each setting that has one.

    The options are made on first use, because the settings import numpy, and `bqsgd --help` must stay quick.
    """

    _made = False

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own options and those of the settings."""
        if not self._made:
            self._made = True
            # The help page shows the panels in the order in which their first options stand here.
            after = 1 + next(i for i, parameter in enumerate(self.params) if parameter.name == "task")
            self.params[after:after] = _settings_options()
        return super().get_params(ctx)


def _settings_options() -> Iterator[typer.core.TyperOption]:
    from bqsgd._src.settings.group import kind_of
    from bqsgd._src.tasks.named import ALL_GROUPS

    for group in ALL_GROUPS.values():
        for name, setting in group.settings().items():
            if not setting.metadata["option"]:
                continue
            kind, option = kind_of(setting), f"--{name.replace('_', '-')}"
            yield typer.core.TyperOption(
                param_decls=[name, f"{option}/--no-{option[2:]}" if kind is bool else option],
                type=kind,
                help=_help(setting),
                rich_help_panel=group.title,
            )


def _help(field: Any) -> str:
    text: str = field.metadata["help"]
    if field.default is None or field.default is False or "Default" in text:
        return text
    return f"{text} Default: {field.default}."


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for on the command line. settings: those with options of their own, by name."""

    preset: Annotated[
        str | None,
        typer.Option(help="Start from named settings, such as mnist-eps3; docs/frontier.md lists them."),
    ] = None
    config: Annotated[
        Path | None, typer.Option(help="Read settings from this TOML file. Options override what it says.")
    ] = None
    json: Json = False
    task: Annotated[
        str | None,
        panel_option(_DATA, "Your own data and model: module:name of a bqsgd.Task, or of a function (config) -> Task."),
    ] = None
    out: Annotated[Path | None, out_option("Run folder. Default: a new one under runs/.", panel=_RUN)] = None
    resume: Annotated[bool, panel_option(_RUN, "Continue the run in --out.", "--resume")] = False
    force: Annotated[
        bool, panel_option(_RUN, "Start even if the noise is so large that nothing can be learnt.", "--force")
    ] = False
    tensorboard: Annotated[
        bool,
        panel_option(_RUN, "Log the public figures for TensorBoard too.", "--tensorboard"),
    ] = False
    engine: Annotated[
        str,
        panel_option(
            _RANKS,
            "in-process runs all clients in this process. torch-distributed is started by torchrun; each rank is a "
            "client.",
        ),
    ] = "in-process"
    backend: Annotated[str, panel_option(_RANKS, "Backend of torch.distributed: gloo, nccl or mpi.")] = "gloo"
    node_limits: Annotated[
        Path | None, panel_option(_RANKS, "TOML file with the limits that this rank sets as a client.")
    ] = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def resume_command(self) -> str:
        """What continues a run in the folder `out`, to be pasted into the same shell."""
        words = ["bqsgd", "train", "--out", str(self.out), "--resume"]
        # The run's files do not decide which code runs, so the user names it again.
        return shlex.join(words + ([] if self.task is None else ["--task", self.task]))


@takes(Request)
def train(request: Request, **settings: Any) -> None:
    """Train a model over clients, each with its own differential privacy guarantee.

    By default each client's proven total epsilon is at most 3 at delta 1e-5.
    Batch size, rate, rounds, range and learning rate are fitted to the number
    of clients and samples unless you give them. A run that cannot learn does
    not start. Ctrl-C stops after the current round; --resume continues.

    These are the options used most. Every other setting goes into a TOML file
    that you give with --config; docs/training.md lists all settings.

    Examples:
      bqsgd train --preset mnist-eps3
      bqsgd train --dataset mnist --epsilon 3 --out runs/first
      bqsgd train --task my_module:task --batch-size 64 --rounds 200
    """
    engine = request.engine
    if engine == "flower":
        raise InvalidParameter(
            "a Flower federation is started by Flower, and its nodes never import code that a server names; put your "
            "task into the app that `bqsgd flower init` writes"
        )
    if engine not in ("in-process", "torch-distributed"):
        raise InvalidParameter(f"--engine must be in-process or torch-distributed, got {engine!r}")
    if request.resume and request.out is None:
        raise InvalidParameter("--resume needs --out, the folder of the run to continue")
    named = settings | {"task": request.task}
    request = replace(request, settings={name: value for name, value in named.items() if value is not None})
    if engine == "torch-distributed":
        _train_as_rank(request)
    elif request.node_limits is not None:
        raise InvalidParameter("--node-limits needs --engine torch-distributed; leave it out")
    else:
        _train_here(request)


def demo(
    out: Annotated[Path | None, out_option("Run folder. Default: a new one under runs/.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds to train. Default: 300 for mnist, 60 for digits.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="mnist or digits. Default: mnist if its files are here, else digits.")
    ] = None,
    json: Json = False,
) -> None:
    """Train on MNIST over four clients with a proven guarantee, and write a report.

    The model is linear on fixed wavelet features, which are computed the first
    time. The demo first says how long it will take. Noise comes from the
    operating system. The server sees every client's messages and is not
    trusted.
    """
    from bqsgd._src.tasks.resolve import available_dataset

    dataset = dataset or available_dataset()
    if dataset not in _DEMO:
        raise InvalidParameter(f"the demo trains on {' or '.join(_DEMO)}, got {dataset!r}; for others use bqsgd train")
    preset, settings = _DEMO[dataset]
    settings = {"dataset": dataset} | settings | ({} if rounds is None else {"rounds": rounds})
    if rounds is None:
        first, later = DEMO_SECONDS[dataset]
        print(
            f"the demo on {dataset} takes about {later} CPU seconds, {first} the first time, when it {_FIRST[dataset]}",
            file=sys.stderr,
            flush=True,
        )
    _train_here(Request(settings=settings, preset=preset, out=out, json=json))


def _train_here(request: Request) -> None:
    """Train with all clients in this process, and print the result."""
    resolved = _resolved(request, resuming=request.resume)
    request = replace(request, out=request.out or _new_folder(resolved.source.dataset))
    if not request.resume and resolved.sizes is not None:
        _foresee_run(resolved.config, resolved.sizes, force=request.force)
    _lead(resolved, request, resuming=request.resume)


def _resolved(request: Request, *, resuming: bool, **defaults: Any) -> Resolved:
    """The settings and the task to train with: those of the run to resume, or those of the command line."""
    from bqsgd._src.tasks.resolve import resolve

    if resuming and request.out is not None:
        return _resumed(request.out, request.settings)
    resolved = resolve(defaults | request.settings, preset=request.preset, file=request.config)
    if request.out is not None and request.out.exists() and not request.out.is_dir():
        raise InvalidParameter(f"{request.out} is a file; name a folder for the run")
    if request.out is not None and (request.out / "config.toml").exists():
        raise InvalidParameter(
            f"{request.out} holds a run already; continue it with `{request.resume_command}`, or name another folder"
        )
    return resolved


def _foresee_run(config: Config, sizes: Sizes, *, force: bool) -> None:
    """Print how much noise the run will have. Refuse a run that cannot learn anything, unless it is forced.

    This only reads sizes and computes plans: no features, no folder, no spend.
    """
    from bqsgd._src.cli.output import planning
    from bqsgd._src.settings.outlook import check_outlook, foresee

    clients = config.clients.count
    # Even data shares: the real ones may differ, but nobody has divided the data yet.
    samples = {client: len(range(client, sizes.samples, clients)) for client in range(clients)}
    with planning() as progress:
        outlook = foresee(
            config, samples, dimension=config.kept(sizes.dimension), learnt=sizes.parameters, progress=progress
        )
    if not force:
        check_outlook(outlook)
    for line in outlook.lines():
        print(line, file=sys.stderr, flush=True)


def _resumed(folder: Path, options: dict[str, Any]) -> Resolved:
    """What the run in `folder` was started with. Raises InvalidParameter for an option that differs from it."""
    from bqsgd._src.run import stored_settings
    from bqsgd._src.tasks.named import plain_settings, stored_task
    from bqsgd._src.tasks.resolve import Resolved

    config, data = stored_settings(folder)
    source = stored_task(data)
    stored = plain_settings(source, config)
    if "task" in stored and "task" not in options:
        raise InvalidParameter(
            f"{folder} was started with --task {stored['task']}; give it again, because a file must not decide which "
            "code runs"
        )
    # A resumed run keeps its settings: its ledgers and plans were made for them.
    for name, value in options.items():
        if stored.get(name) != value:
            how = f"with --task {stored[name]}" if name == "task" and name in stored else "without that option"
            raise InvalidParameter(
                f"{folder} was started with {name}={stored.get(name)!r}, not {value!r}; resume it {how}, or start a "
                "new run in another folder"
            )
    return Resolved(source=source, config=config)


def _new_folder(name: str) -> Path:
    """A run folder that does not exist yet."""
    from datetime import datetime

    # Two runs that start in the same second get different folders.
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    candidates = (Path("runs") / f"{name}-{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 100))))
    return next(path for path in candidates if not path.exists())


def _train_as_rank(request: Request) -> None:
    """Lead the run on rank 0; on every other rank that torchrun started, be a client of it.

    A client on its own machine has a ledger but no settings file to resume from, so it takes its settings from the
    command line.
    """
    from bqsgd._src.engines.torch_distributed.client import decline, work
    from bqsgd._src.engines.torch_distributed.engine import torch_distributed
    from bqsgd._src.engines.torch_distributed.ranks import join, world_size
    from bqsgd._src.settings.node_limits import NodeLimits

    ranks, folder = world_size(), request.out
    if folder is None:
        raise InvalidParameter("--engine torch-distributed needs --out; give the same run folder on all ranks")
    resuming = request.resume and (folder / "config.toml").exists()
    resolved = _resolved(request, resuming=resuming, clients=ranks)
    limits = None if request.node_limits is None else NodeLimits.read(request.node_limits)
    with join(backend=request.backend) as group:
        if group.serves:
            if request.resume and not resuming:
                raise InvalidParameter(f"{folder} holds no run to resume")
            engine = torch_distributed(group, limits=limits)
            _lead(resolved, request, resuming=resuming, engine=engine, client=0)
        else:
            refusal = None if limits is None else limits.refusal(resolved.config, client=group.rank)
            if refusal is not None:
                decline(group, refusal)  # before any data are loaded
            task = resolved.make_task(client=group.rank)
            work(task, resolved.config, group=group, folder=folder, resuming=request.resume, limits=limits)


def _lead(
    resolved: Resolved,
    request: Request,
    *,
    resuming: bool,
    engine: MakeEngine | None = None,
    client: int | None = None,
) -> None:
    """Train to the end, or until Ctrl-C, and print the result. Afterwards all about the run is in `request.out`.

    client: the one client whose data this process holds; None if it holds all clients' data.
    """
    from bqsgd._src.engines.in_process import in_process
    from bqsgd._src.run import Run

    task, config, folder = resolved.make_task(client=client), resolved.config, request.out
    assert folder is not None
    engine = engine or in_process
    if resuming:
        run = Run.resume(task, folder=folder, engine=engine)
    else:
        run = Run.start(task, config, folder=folder, engine=engine, force=request.force)
    with run:
        _train(run, tensorboard=request.tensorboard)
    # The `with` block has closed the run and written its files; this only returns the summary.
    summary = run.close()
    _print(summary, folder=folder, config=config, json=request.json)
    if run.out_of_budget is not None:
        raise typer.Exit(BUDGET_SPENT)
    if run.steps == 0 and summary.rounds:
        print("bqsgd: nothing was learnt, because no round moved the model; rounds.jsonl says why", file=sys.stderr)
        raise typer.Exit(1)
    if run.stalled:
        raise typer.Exit(1)
    if summary.rounds < config.run.rounds and summary.stopped is None:
        # A rank is started by torchrun, with arguments that only its caller knows.
        how = request.resume_command if client is None else "the same torchrun command and --resume"
        print(f"stopped after {summary.rounds} rounds; continue with: {how}", file=sys.stderr)
        raise typer.Exit(130)


def _train(run: Run, *, tensorboard: bool) -> None:
    """Run the rounds. The first Ctrl-C or SIGTERM stops after the current round; the second interrupts the round."""
    from contextlib import nullcontext

    from bqsgd._src.cli.output import shown
    from bqsgd._src.records.tensorboard import TensorBoardLog
    from bqsgd._src.runtime.interrupts import stop_signals

    asked_to_stop: list[int] = []

    def note(number: int) -> None:
        # The second signal: the user does not want to wait for the round, so give up what it has done.
        if asked_to_stop:
            raise KeyboardInterrupt
        asked_to_stop.append(number)

    assert run.folder is not None
    with TensorBoardLog(run.folder / "tensorboard") if tensorboard else nullcontext() as log, stop_signals(note):
        for record in shown(run.rounds(), config=run.config, first_round=run.round):
            if log is not None:
                log.append(record)
            if asked_to_stop:
                break


def _print(summary: Summary, *, folder: Path, config: Config, json: bool) -> None:
    """Print the result in a few lines; with --json, all of summary.json."""
    lines = summary_lines(summary)
    if summary.guarantee is not None:
        lines["not charged"] = "other runs on the same data, the search for settings among them"
    if config.privacy.private_metrics:
        lines["private metrics"] = "outside the guarantee; they stay in the clients' own files"
    report = {"report": str(folder / "report.html")}
    answer(f"Run {folder}", lines | report, summary.to_dict() | report, json=json)
