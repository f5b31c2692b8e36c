"""`bqsgd train` and `bqsgd demo`: a private training run, every setting an option.

The options are made from the settings' own table (`bqsgd.training.settings`), so they cannot drift from it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
import typer.core

from bqsgd.cli.output import Json, out_option, print_lines, to_json
from bqsgd.errors import DataUnavailable, InvalidParameter

if TYPE_CHECKING:
    from bqsgd.engines.engine import MakeEngine
    from bqsgd.records.record import Summary
    from bqsgd.run import Run
    from bqsgd.tasks import NamedTask, OwnTask
    from bqsgd.training.settings import Config

_ENGINES = ("in-process", "torch-distributed")
_DIGITS = {"rounds": 60, "learning_rate": 0.5, "evaluate_every": 5}
"""What fits the 1,437 training samples of `digits` better than the defaults."""

_DEMO: dict[str, tuple[str | None, dict[str, Any]]] = {
    "mnist": ("mnist-eps3", {}),
    "digits": (None, {"rounds": 60, "epsilon": 8.0, "evaluate_every": 10, "reserve_rounds": 60}),
}
"""Preset and settings per data set. The few samples of `digits` need a larger epsilon to be learnt from."""


class SettingsCommand(typer.core.TyperCommand):
    """A command with an option for every setting, made when first asked for: `bqsgd --help` needs none of them."""

    _made = False

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own options and those of the settings."""
        if not self._made:
            self._made = True
            self.params.extend(_settings_options())
        return super().get_params(ctx)


def _settings_options() -> Iterator[typer.core.TyperOption]:
    from bqsgd.tasks import ALL_GROUPS
    from bqsgd.training.setting_groups import kind_of

    for group in ALL_GROUPS.values():
        for name, each in group.options():
            kind, option = kind_of(each), f"--{name.replace('_', '-')}"
            yield typer.core.TyperOption(
                param_decls=[name, f"{option}/--no-{option[2:]}" if kind is bool else option],
                type=kind,
                help=_help(each),
                rich_help_panel=group.title,
            )


def _takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Hide `**settings` from typer, which knows no such parameter; click passes them by name."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each for each in own if each.kind is not each.VAR_KEYWORD]
    )
    return command


def _help(each: Any) -> str:
    text: str = each.metadata["help"]
    if each.default is None or each.default is False or "Default" in text:
        return text
    return f"{text} Default: {each.default}."


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
    config: Annotated[Path | None, typer.Option(help="TOML file of settings; options override it.")] = None,
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
    nominal: Annotated[
        bool, typer.Option("--nominal", help="Record the paper's nominal epsilon as well (not a guarantee).")
    ] = False,
    json: Json = False,
    **settings: Any,
) -> None:
    """Train a model over clients, each with its own differential privacy guarantee.

    By default each client's proven total epsilon is at most 3 at delta 1e-5.
    Batch size, rate, rounds, range and learning rate are fitted to the number
    of clients and samples unless given. A run that cannot learn does not
    start. Ctrl-C stops after the current round; --resume continues.

    Examples: bqsgd train --preset mnist-eps3
              bqsgd train --dataset mnist --epsilon 3 --out runs/first
              bqsgd train --task my_module:task --batch-size 64 --rounds 200
    """
    given = {name: value for name, value in (settings | {"task": task}).items() if value is not None}
    if engine == "flower":
        raise InvalidParameter(
            "a Flower federation is started by Flower, and its nodes import no code that a server names: write your "
            "task into the app that `bqsgd flower init` makes"
        )
    if engine not in _ENGINES:
        raise InvalidParameter(f"--engine must be {' or '.join(_ENGINES)}, got {engine!r}")
    if resume and out is None:
        raise InvalidParameter("--resume needs --out, the folder of the run to continue")
    shown = _Shown(tensorboard=tensorboard, nominal=nominal, json=json, force=force)
    if engine == "torch-distributed":
        _as_rank(
            given,
            preset=preset,
            file=config,
            out=out,
            resume=resume,
            backend=backend,
            node_limits=node_limits,
            shown=shown,
        )
    elif node_limits is not None:
        raise InvalidParameter("--node-limits applies to a rank of --engine torch-distributed only")
    elif resume and out is not None:
        named, chosen = _resumed(out, given)
        _lead(named, chosen, folder=out, resuming=True, shown=shown)
    else:
        _begin(given, preset=preset, file=config, out=out, shown=shown)


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
    chosen = _fit({} if dataset is None else {"dataset": dataset})["dataset"]
    if chosen not in _DEMO:
        raise InvalidParameter(f"the demo trains on {' or '.join(_DEMO)}, got {chosen!r}; use bqsgd train")
    preset, given = _DEMO[chosen]
    given = {"dataset": chosen, **given} | ({} if rounds is None else {"rounds": rounds})
    _begin(given, preset=preset, out=out, shown=_Shown(json=json))


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """How a run starts and what is shown of it besides its progress."""

    tensorboard: bool = False
    nominal: bool = False
    json: bool = False
    force: bool = False


def _begin(
    given: dict[str, Any],
    *,
    shown: _Shown,
    preset: str | None = None,
    file: Path | None = None,
    out: Path | None = None,
) -> None:
    """Start a run in this process with the settings given on the command line, and print what came of it."""
    from bqsgd.tasks import NamedTask

    named, chosen = new_settings(given, preset=preset, file=file)
    folder = out or _new_folder(named.dataset)
    _refuse_run_in(folder)
    if isinstance(named, NamedTask):  # your own task is checked when the run starts
        _foresee_run(named, chosen, force=shown.force)
    _lead(named, chosen, folder=folder, resuming=False, shown=shown)


def new_settings(given: dict[str, Any], *, preset: str | None, file: Path | None) -> tuple[NamedTask | OwnTask, Config]:
    """The settings of a new run: defaults for the federation, then the preset, then the file, then what is given."""
    from bqsgd import tasks
    from bqsgd.storage import read_toml
    from bqsgd.training.defaults import fitted
    from bqsgd.training.settings import Config

    settings = {} if preset is None else tasks.preset(preset)
    if file is not None:
        settings |= _flat(read_toml(file))
    if "task" in given:
        return _own_settings(settings | given)
    settings = _fit(settings | given)
    named, _ = tasks.settings_of(**settings)
    own = named.settings()
    chosen = {name: value for name, value in settings.items() if name not in own}
    samples, dimension, _ = named.size(chosen.get("method", "sgd"))
    return named, Config.of(**fitted(chosen, samples=samples, dimension=dimension))


def _foresee_run(named: NamedTask, chosen: Config, *, force: bool) -> None:
    """Plan, say what noise the run will carry, and refuse it where nothing could be learnt (unless forced).

    Nothing is read but sizes, and nothing computed but plans: no features, no folder, no spend.
    """
    from bqsgd.cli.output import planning
    from bqsgd.training.outlook import check_outlook, foresee

    samples, dimension, learnt = named.size(chosen.run.method)
    clients = chosen.clients.count
    held = {client: samples // clients + (client < samples % clients) for client in range(clients)}
    with planning() as progress:
        outlook = foresee(chosen, held, dimension=dimension, learnt=learnt, progress=progress)
    if not force:
        check_outlook(outlook, chosen, held)
    for line in outlook.lines():
        print(line, file=sys.stderr, flush=True)


def _own_settings(settings: dict[str, Any]) -> tuple[OwnTask, Config]:
    """The settings of a run with your own task: as many clients as it has shares, unless said otherwise."""
    from bqsgd.tasks import NamedTask, OwnTask
    from bqsgd.training.settings import Config

    foreign = sorted(set(settings) & set(NamedTask.settings()))
    if foreign:
        raise InvalidParameter(f"--task brings its own data and model: leave out {', '.join(foreign)} (or the preset)")
    own = OwnTask.of(task=settings.pop("task"))
    shares = getattr(own.found(), "shares", ())
    return own, Config.of(**({"clients": len(shares)} if shares else {}) | settings)


def _flat(tables: dict[str, Any]) -> dict[str, Any]:
    """The settings of a TOML file by their own names; every table is checked as a whole first."""
    from bqsgd.tasks import ALL_GROUPS, NamedTask
    from bqsgd.training.settings import Config

    data = tables.pop("data", {})
    NamedTask.from_table("data", data)
    Config.from_dict(tables)
    return {
        name: table[each.name]
        for group, table in (("data", data), *tables.items())
        for name, each in ALL_GROUPS[group].settings().items()
        if each.name in table
    }


def _resumed(folder: Path, given: dict[str, Any]) -> tuple[NamedTask | OwnTask, Config]:
    """The settings of the run in `folder`; one that is given and differs is refused."""
    from bqsgd.run import stored_settings
    from bqsgd.tasks import plain_settings, stored_task

    chosen, data = stored_settings(folder)
    named = stored_task(data)
    stored = plain_settings(named, chosen)
    if "task" in stored and "task" not in given:
        raise InvalidParameter(
            f"{folder} was started with --task {stored['task']}: give it again, as no file decides what code is run"
        )
    for name, value in given.items():
        if stored.get(name) != value:
            raise InvalidParameter(
                f"{folder} was started with {name}={stored.get(name)!r}, not {value!r}; resume it without that option "
                "or start a new run in another folder"
            )
    return named, chosen


def _refuse_run_in(folder: Path) -> None:
    """Raise when `folder` holds a run."""
    if (folder / "config.toml").exists():
        raise InvalidParameter(f"{folder} holds a run already; add --resume to continue it or name another folder")


def _fit(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with a data set that is there: MNIST unless named, `digits` when no source of MNIST answers."""
    from bqsgd import data

    chosen = dict(settings)
    if "dataset" not in chosen:
        try:
            data.load("mnist", folder=chosen.get("data_folder"))
            chosen["dataset"] = "mnist"
        except DataUnavailable as error:
            print(f"{error}\nMNIST is unavailable, so this run uses digits instead.", file=sys.stderr)
            chosen["dataset"] = "digits"
    return _DIGITS | chosen if chosen["dataset"] == "digits" else chosen


def _new_folder(name: str) -> Path:
    """A run folder that does not exist yet."""
    from datetime import datetime

    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    candidates = (Path("runs") / f"{name}-{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 100))))
    return next(path for path in candidates if not path.exists())


def _as_rank(
    given: dict[str, Any],
    *,
    preset: str | None,
    file: Path | None,
    out: Path | None,
    resume: bool,
    backend: str,
    node_limits: Path | None,
    shown: _Shown,
) -> None:
    """Lead the run on rank 0, and be a client of it on every other rank of those that torchrun started.

    A client on a machine of its own has no settings file to resume from, only its ledger: its settings are those given.
    """
    from bqsgd.engines.torch_distributed import join, torch_distributed, work
    from bqsgd.engines.torch_distributed._transport import world_size
    from bqsgd.engines.torch_distributed.client import decline
    from bqsgd.training.node_limits import NodeLimits

    size = world_size()
    if out is None:
        raise InvalidParameter("--engine torch-distributed needs --out: all ranks must name the same run folder")
    continues = resume and (out / "config.toml").exists()
    if continues:
        named, chosen = _resumed(out, given)
    else:
        named, chosen = new_settings({"clients": size} | given, preset=preset, file=file)
        _refuse_run_in(out)
    limits = None if node_limits is None else NodeLimits.read(node_limits)
    with join(backend=backend) as group:
        if group.serves:
            if resume and not continues:
                raise InvalidParameter(f"{out} holds no run to resume")
            engine = torch_distributed(group, limits=limits)
            _lead(named, chosen, folder=out, resuming=continues, shown=shown, engine=engine, client=0)
        else:
            refusal = None if limits is None else limits.refusal(chosen, client=group.rank)
            if refusal is not None:  # before its data are loaded
                decline(group, refusal)
            task = named.task(chosen, client=group.rank)
            work(task, chosen, group=group, folder=out, resuming=resume, limits=limits)


def _lead(
    named: NamedTask | OwnTask,
    chosen: Config,
    *,
    folder: Path,
    resuming: bool,
    shown: _Shown,
    engine: MakeEngine | None = None,
    client: int | None = None,
) -> None:
    """Train to the end, or to Ctrl-C, and print what came of it. Everything about the run is in `folder` then.

    client: the only one whose data this process holds, None when it holds all.
    """
    from bqsgd.engines.in_process import in_process
    from bqsgd.paper.nominal import nominal_epsilon_after
    from bqsgd.run import Run

    task = named.task(chosen, client=client)
    how: dict[str, Any] = {"engine": engine or in_process, "nominal": nominal_epsilon_after if shown.nominal else None}
    if resuming:
        run = Run.resume(task, folder=folder, **how)
    else:
        run = Run.start(task, chosen, folder=folder, force=shown.force, **how)
    with run:
        _train(run, tensorboard=shown.tensorboard)
    summary = run.close()
    _print(summary, folder=folder, chosen=chosen, json=shown.json)
    if run.steps == 0 and summary.rounds:
        print("bqsgd: nothing was learnt: no round moved the model; rounds.jsonl says why", file=sys.stderr)
        raise typer.Exit(1)
    if run.stalled:
        print(f"bqsgd: stopped after round {summary.rounds}: the model no longer moved", file=sys.stderr)
        raise typer.Exit(1)
    if summary.rounds < chosen.run.rounds:
        print(
            f"stopped after round {summary.rounds}; continue with: bqsgd train --out {folder} --resume", file=sys.stderr
        )
        raise typer.Exit(130)


def _train(run: Run, *, tensorboard: bool) -> None:
    from contextlib import nullcontext

    from bqsgd.cli.output import shown
    from bqsgd.records.tensorboard import TensorBoardLog

    assert run.folder is not None
    log = TensorBoardLog(run.folder / "tensorboard") if tensorboard else None
    with log or nullcontext(), _interrupts() as asked_to_stop:
        for record in shown(run.rounds(), config=run.config, first_round=run.round):
            if log is not None:
                log.append(record)
            if asked_to_stop:
                break


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list that fills at the first Ctrl-C or SIGTERM: the current round is finished; the second one interrupts it."""
    from bqsgd.engines.engine import stop_signals

    asked: list[int] = []

    def note(number: int) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    with stop_signals(note):
        yield asked


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


def _print(summary: Summary, *, folder: Path, chosen: Config, json: bool) -> None:
    """What a person wants to know in a few lines; with --json all of summary.json."""
    from bqsgd.answers import guarantee_lines
    from bqsgd.privacy.guarantee import rounded_up

    report = str(folder / "report.html")
    if json:
        typer.echo(to_json(summary.to_dict() | {"report": report}))
        return
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
    lines["sent down"] = f"{summary.bytes_down / 1e6:.2f} MB{less if chosen.server.down_bits else ''}"
    if summary.nominal_epsilon is not None:
        lines["nominal"] = f"epsilon {rounded_up(summary.nominal_epsilon)} (as published; not a guarantee)"
    if chosen.privacy.private_metrics:
        lines["private metrics"] = "outside the guarantee; they stay in the clients' own files"
    print_lines(f"Run {folder}", lines | {"report": report})
