"""`bqsgd train` and `bqsgd demo`: a private training run.

The options are made from the settings themselves (`bqsgd._src.settings.config`), so that they cannot drift apart.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
import typer.core

from bqsgd._src.cli.output import Json, answer, out_option
from bqsgd._src.errors import InvalidParameter

if TYPE_CHECKING:
    from bqsgd._src.engines.engine import MakeEngine
    from bqsgd._src.records.record import Summary
    from bqsgd._src.run import Run
    from bqsgd._src.settings.config import Config
    from bqsgd._src.settings.fit import Sizes
    from bqsgd._src.tasks.resolve import Resolved

_ENGINES = ("in-process", "torch-distributed")
_DEMO: dict[str, tuple[str | None, dict[str, Any]]] = {
    "mnist": ("mnist-eps3", {}),
    "digits": (None, {"rounds": 60, "epsilon": 8.0, "evaluate_every": 10, "reserve_rounds": 60}),
}
"""Preset and settings per data set. The few samples of `digits` need a larger epsilon to be learnt from."""


class SettingsCommand(typer.core.TyperCommand):
    """A command with the options of the settings, made when first asked for: `bqsgd --help` needs none of them."""

    _made = False

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own options and those of the settings."""
        if not self._made:
            self._made = True
            self.params.extend(_settings_options())
        return super().get_params(ctx)


def _settings_options() -> Iterator[typer.core.TyperOption]:
    from bqsgd._src.settings.group import kind_of
    from bqsgd._src.tasks.named import ALL_GROUPS

    for group in ALL_GROUPS.values():
        for name, field in group.options():
            kind, option = kind_of(field), f"--{name.replace('_', '-')}"
            yield typer.core.TyperOption(
                param_decls=[name, f"{option}/--no-{option[2:]}" if kind is bool else option],
                type=kind,
                help=_help(field),
                rich_help_panel=group.title,
            )


def _takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Hide `**settings` from typer, which knows no such parameter; click passes them by name."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    )
    return command


def _help(field: Any) -> str:
    text: str = field.metadata["help"]
    if field.default is None or field.default is False or "Default" in text:
        return text
    return f"{text} Default: {field.default}."


@_takes_settings
def train(
    *,
    engine: Annotated[
        str, typer.Option(help="in-process, or torch-distributed (start it with torchrun; each rank is a client).")
    ] = "in-process",
    backend: Annotated[str, typer.Option(help="Backend of torch.distributed: gloo, nccl or mpi.")] = "gloo",
    preset: Annotated[
        str | None, typer.Option(help="Settings by name: mnist-eps3, fashion-eps3-sums, ... (docs/frontier.md).")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file of settings, also of those without an option. Options win over it.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="Your own data and model: module:name of a bqsgd.Task, or of a function (config) -> Task."),
    ] = None,
    out: Annotated[Path | None, out_option("Run folder. Default: a new one under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    node_limits: Annotated[
        Path | None, typer.Option(help="TOML file with the limits of this rank as a client (torch-distributed).")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start even if the noise leaves nothing to be learnt.")
    ] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Log the public figures for TensorBoard.")] = False,
    json: Json = False,
    **settings: Any,
) -> None:
    """Train a model over clients, each with its own differential privacy guarantee.

    By default each client's proven total epsilon is at most 3 at delta 1e-5.
    Batch size, rate, rounds, range and learning rate are fitted to the number
    of clients and samples unless given. A run that cannot learn does not
    start. Ctrl-C stops after the current round; --resume continues.

    All other settings go into a TOML file for --config; docs/training.md
    lists them.

    Examples: bqsgd train --preset mnist-eps3
              bqsgd train --dataset mnist --epsilon 3 --out runs/first
              bqsgd train --task my_module:task --batch-size 64 --rounds 200
    """
    if engine == "flower":
        raise InvalidParameter(
            "a Flower federation is started by Flower, and its nodes import no code that a server names: write your "
            "task into the app that `bqsgd flower init` makes"
        )
    if engine not in _ENGINES:
        raise InvalidParameter(f"--engine must be {' or '.join(_ENGINES)}, got {engine!r}")
    if resume and out is None:
        raise InvalidParameter("--resume needs --out, the folder of the run to continue")
    request = _Request(
        options={name: value for name, value in (settings | {"task": task}).items() if value is not None},
        preset=preset,
        file=config,
        out=out,
        resume=resume,
        force=force,
        tensorboard=tensorboard,
        json=json,
    )
    if engine == "torch-distributed":
        _train_as_rank(request, backend=backend, node_limits=node_limits)
    elif node_limits is not None:
        raise InvalidParameter("--node-limits applies to a rank of --engine torch-distributed only")
    else:
        _train_here(request)


def demo(
    out: Annotated[Path | None, out_option("Run folder. Default: a new one under runs/.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds to train.", min=1)] = None,
    dataset: Annotated[str | None, typer.Option(help="mnist or digits. Default: mnist, else digits.")] = None,
    json: Json = False,
) -> None:
    """Train on MNIST over four clients with a proven guarantee, and write the report.

    The model is linear on fixed wavelet features, which take half a minute to compute first.

    Noise comes from the operating system. The server sees every client's messages and is not trusted.
    """
    from bqsgd._src.tasks.resolve import available_dataset

    dataset = dataset or available_dataset()
    if dataset not in _DEMO:
        raise InvalidParameter(f"the demo trains on {' or '.join(_DEMO)}, got {dataset!r}; use bqsgd train")
    preset, settings = _DEMO[dataset]
    options = {"dataset": dataset} | settings | ({} if rounds is None else {"rounds": rounds})
    _train_here(_Request(options=options, preset=preset, out=out, json=json))


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What the command line asks for. options: the settings given there, by name."""

    options: dict[str, Any]
    preset: str | None = None
    file: Path | None = None
    out: Path | None = None
    resume: bool = False
    force: bool = False
    tensorboard: bool = False
    json: bool = False


def _train_here(request: _Request) -> None:
    """Train with all clients in this process, and print what came of it."""
    from bqsgd._src.tasks.resolve import resolve

    if request.resume and request.out is not None:
        _lead(_resumed(request.out, request.options), request, folder=request.out, resuming=True)
        return
    resolved = resolve(request.options, preset=request.preset, file=request.file)
    folder = request.out or _new_folder(resolved.source.dataset)
    _refuse_run_in(folder)
    if resolved.task is None and resolved.sizes is not None:  # your own task is checked when the run starts
        _foresee_run(resolved.config, resolved.sizes, force=request.force)
    _lead(resolved, request, folder=folder, resuming=False)


def _foresee_run(config: Config, sizes: Sizes, *, force: bool) -> None:
    """Plan, say what noise the run will carry, and refuse it where nothing could be learnt (unless forced).

    Only sizes are read and only plans computed: no features, no folder, no spend.
    """
    from bqsgd._src.cli.output import planning
    from bqsgd._src.settings.outlook import check_outlook, foresee

    clients = config.clients.count
    least, more = divmod(sizes.samples, clients)
    samples = {client: least + (client < more) for client in range(clients)}
    with planning() as progress:
        outlook = foresee(config, samples, dimension=sizes.dimension, learnt=sizes.parameters, progress=progress)
    if not force:
        check_outlook(outlook)
    for line in outlook.lines():
        print(line, file=sys.stderr, flush=True)


def _resumed(folder: Path, options: dict[str, Any]) -> Resolved:
    """What the run in `folder` was started with; an option that differs from it is refused."""
    from bqsgd._src.run import stored_settings
    from bqsgd._src.tasks.named import plain_settings, stored_task
    from bqsgd._src.tasks.resolve import Resolved

    config, data = stored_settings(folder)
    source = stored_task(data)
    stored = plain_settings(source, config)
    if "task" in stored and "task" not in options:
        raise InvalidParameter(
            f"{folder} was started with --task {stored['task']}: give it again, as no file decides what code is run"
        )
    for name, value in options.items():
        if stored.get(name) != value:
            raise InvalidParameter(
                f"{folder} was started with {name}={stored.get(name)!r}, not {value!r}; resume it without that option "
                "or start a new run in another folder"
            )
    return Resolved(source=source, config=config)


def _refuse_run_in(folder: Path) -> None:
    """Raise when `folder` holds a run."""
    if (folder / "config.toml").exists():
        raise InvalidParameter(f"{folder} holds a run already; add --resume to continue it or name another folder")


def _new_folder(name: str) -> Path:
    """A run folder that does not exist yet."""
    from datetime import datetime

    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    candidates = (Path("runs") / f"{name}-{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 100))))
    return next(path for path in candidates if not path.exists())


def _train_as_rank(request: _Request, *, backend: str, node_limits: Path | None) -> None:
    """Lead the run on rank 0, and be a client of it on every other rank of those that torchrun started.

    A client on a machine of its own has no settings file to resume from, only its ledger: its settings are those given.
    """
    from bqsgd._src.engines.torch_distributed import join, torch_distributed, work
    from bqsgd._src.engines.torch_distributed.client import decline
    from bqsgd._src.engines.torch_distributed.ranks import world_size
    from bqsgd._src.settings.node_limits import NodeLimits
    from bqsgd._src.tasks.resolve import resolve

    ranks, folder = world_size(), request.out
    if folder is None:
        raise InvalidParameter("--engine torch-distributed needs --out: all ranks must name the same run folder")
    resuming = request.resume and (folder / "config.toml").exists()
    if resuming:
        resolved = _resumed(folder, request.options)
    else:
        resolved = resolve({"clients": ranks} | request.options, preset=request.preset, file=request.file)
        _refuse_run_in(folder)
    limits = None if node_limits is None else NodeLimits.read(node_limits)
    with join(backend=backend) as group:
        if group.serves:
            if request.resume and not resuming:
                raise InvalidParameter(f"{folder} holds no run to resume")
            engine = torch_distributed(group, limits=limits)
            _lead(resolved, request, folder=folder, resuming=resuming, engine=engine, client=0)
        else:
            refusal = None if limits is None else limits.refusal(resolved.config, client=group.rank)
            if refusal is not None:  # before its data are loaded
                decline(group, refusal)
            task = resolved.make_task(client=group.rank)
            work(task, resolved.config, group=group, folder=folder, resuming=request.resume, limits=limits)


def _lead(
    resolved: Resolved,
    request: _Request,
    *,
    folder: Path,
    resuming: bool,
    engine: MakeEngine | None = None,
    client: int | None = None,
) -> None:
    """Train to the end, or to Ctrl-C, and print what came of it. Everything about the run is in `folder` then.

    client: the only one whose data this process holds, None when it holds all.
    """
    from bqsgd._src.engines.in_process import in_process
    from bqsgd._src.run import Run

    task, config = resolved.make_task(client=client), resolved.config
    engine = engine or in_process
    if resuming:
        run = Run.resume(task, folder=folder, engine=engine)
    else:
        run = Run.start(task, config, folder=folder, engine=engine, force=request.force)
    with run:
        _train(run, tensorboard=request.tensorboard)
    summary = run.close()
    _print(summary, folder=folder, config=config, json=request.json)
    if run.steps == 0 and summary.rounds:
        print("bqsgd: nothing was learnt: no round moved the model; rounds.jsonl says why", file=sys.stderr)
        raise typer.Exit(1)
    if run.stalled:
        print(f"bqsgd: stopped after round {summary.rounds}: the model no longer moved", file=sys.stderr)
        raise typer.Exit(1)
    if summary.rounds < config.run.rounds:
        print(
            f"stopped after round {summary.rounds}; continue with: bqsgd train --out {folder} --resume", file=sys.stderr
        )
        raise typer.Exit(130)


def _train(run: Run, *, tensorboard: bool) -> None:
    """Run the rounds. The first Ctrl-C or SIGTERM ends them after the current round; the second one interrupts it."""
    from contextlib import ExitStack

    from bqsgd._src.cli.output import shown
    from bqsgd._src.records.tensorboard import TensorBoardLog
    from bqsgd._src.runtime.interrupts import stop_signals

    asked_to_stop: list[int] = []

    def note(number: int) -> None:
        if asked_to_stop:
            raise KeyboardInterrupt
        asked_to_stop.append(number)

    assert run.folder is not None
    with ExitStack() as opened:
        log = opened.enter_context(TensorBoardLog(run.folder / "tensorboard")) if tensorboard else None
        opened.enter_context(stop_signals(note))
        for record in shown(run.rounds(), config=run.config, first_round=run.round):
            if log is not None:
                log.append(record)
            if asked_to_stop:
                break


def _learnt_lines(summary: Summary) -> dict[str, str]:
    """What the model comes to on the test data: its accuracy or metric, its loss where there is neither."""
    after = f"on the test data, after {summary.rounds} rounds"
    if summary.metric is not None and summary.metric_name is not None:
        return {summary.metric_name: f"{summary.metric:.4g} {after}"}
    if summary.accuracy is not None:
        return {"accuracy": f"{summary.accuracy:.2%} {after}"}
    return {
        "loss": f"{summary.loss:.4g} {after}" if summary.loss is not None else f"no test data, {summary.rounds} rounds"
    }


def _print(summary: Summary, *, folder: Path, config: Config, json: bool) -> None:
    """What a person wants to know in a few lines; with --json all of summary.json."""
    from bqsgd._src.answers import guarantee_lines

    lines = _learnt_lines(summary)
    if summary.guarantee is None:
        lines["guarantee"] = "nothing private was sent"
    else:
        lines |= guarantee_lines(summary.guarantee)
        lines["not charged"] = "the search for hyper-parameters"
    bits = "" if summary.bits_per_coordinate is None else f", {summary.bits_per_coordinate:.2f} bits per coordinate"
    saved = "" if summary.saving is None else f", {summary.saving:.2f} times less than float32"
    lines["sent up"] = f"{summary.bytes_up / 1e6:.2f} MB{saved}{bits}"
    less = "" if summary.saving_down is None else f", {summary.saving_down:.2f} times less than float32"
    lines["sent down"] = f"{summary.bytes_down / 1e6:.2f} MB{less if config.server.down_bits else ''}"
    if config.privacy.private_metrics:
        lines["private metrics"] = "outside the guarantee; they stay in the clients' own files"
    report = {"report": str(folder / "report.html")}
    answer(f"Run {folder}", lines | report, summary.to_dict() | report, json=json)
