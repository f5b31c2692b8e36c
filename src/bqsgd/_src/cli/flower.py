"""`bqsgd flower`: a Flower app to edit, and a whole federation on this machine to see it work."""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bqsgd._src.cli._options import takes
from bqsgd._src.cli.output import Json, answer, out_option, summary_lines
from bqsgd._src.errors import InvalidParameter

flower = typer.Typer(help="Run private clients on Flower.", no_args_is_help=True)

_ROUND_LINE = re.compile(r"(client \d+ joined|round \d+: \d+ of \d+ frames).*")
"""Lines of the server's log that show how far the run is."""
_SAMPLES = 1437
"""Training samples of `digits`, which the demo cuts into shares."""


@flower.command()
def init(folder: Annotated[Path, typer.Argument()]) -> None:
    """Write a small Flower app for you to edit: put in your model and your data.

    FOLDER must be new or empty.

    Example:
      bqsgd flower init my-app
    """
    from bqsgd._src.flower.federation import write_app

    for path in write_app(folder):
        typer.echo(path)
    typer.echo(f"Edit {folder / 'private_app' / 'task.py'}, then: flwr run {folder} --stream")


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The options of `bqsgd flower demo`."""

    tls: Annotated[
        bool, typer.Option("--tls", help="Start real processes with TLS and node keys instead of a simulation.")
    ] = False
    secure: Annotated[
        bool,
        typer.Option("--secure", help="Use secure sums: the server sees only sums, and the clients share one noise."),
    ] = False
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 4
    rounds: Annotated[int | None, typer.Option(help="Rounds to train. Default: 30; with --tls 4.")] = None
    epsilon: Annotated[float, typer.Option(help="Total privacy budget of each client (proven).")] = 3.0
    seed: Annotated[int | None, typer.Option(help="Seed for reproducible noise. It voids the privacy claim.")] = None
    out: Annotated[
        Path | None, out_option("Keep everything in this folder. Default: a folder that is deleted at the end.")
    ] = None
    limit_seconds: Annotated[float, typer.Option(help="Give up after this many seconds.")] = 900.0
    json: Json = False


@flower.command()
@takes(DemoOptions)
def demo(asked: DemoOptions) -> None:
    """Train on a Flower federation on this machine, then stop all its processes.

    The default is Flower's simulation. With --tls it is a SuperLink that
    accepts only TLS and registered node keys, and one SuperNode process per
    client, each with its own key and its own ledger.

    Example:
      bqsgd flower demo --tls --secure
    """
    out, tls = asked.out, asked.tls
    if not 1 <= asked.clients <= _SAMPLES // 16:
        raise InvalidParameter(
            f"clients must be from 1 to {_SAMPLES // 16}, so that each has 16 samples, got {asked.clients}"
        )
    chosen = {name: getattr(asked, name) for name in ("clients", "rounds", "epsilon", "seed", "secure")}
    settings = demo_settings(tls=tls, **chosen)
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidParameter(f"{out} is not empty; name another folder")
    fields = run_demo(None if out is None else out.resolve(), settings, tls=tls, limit_seconds=asked.limit_seconds)
    if out is None:
        del fields["report"]  # it was in the deleted folder
    answer("Flower demo" + (" with TLS and node keys" if tls else ""), _lines(fields), fields, json=asked.json)


@flower.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def run(
    context: typer.Context,
    app: Annotated[Path, typer.Argument()],
    run_config: Annotated[
        str, typer.Option(help="Settings that override the app's, such as 'rounds=20 epsilon=2.0'.")
    ] = "",
) -> None:
    """Check the settings of a Flower app, then run it with `flwr run`.

    APP is the app's folder. A wrong setting is named, with the valid ones.
    Other arguments and options are passed on to `flwr run`.

    Example:
      bqsgd flower run my-app my-superlink --stream --run-config 'rounds=20'
    """
    import os

    from bqsgd._src.flower.settings import check_overrides

    check_overrides(app, run_config)
    overrides = ["--run-config", run_config] if run_config else []
    # The flwr of this environment, even if the environment is not activated and PATH has another one.
    installed = Path(sys.executable).with_name("flwr")
    program = str(installed) if installed.exists() else "flwr"
    # Replace this process: Ctrl-C and the exit code then belong to flwr itself.
    os.execvp(program, [program, "run", str(app), *context.args, *overrides])


@flower.command()
def sign(
    app: Annotated[Path, typer.Argument()],
    key: Annotated[Path, typer.Option(help="Private Ed25519 key, as ssh-keygen writes it.")],
    out: Annotated[Path, out_option("New file for the signature.")],
    json: Json = False,
) -> None:
    """Sign an app, for nodes that run only code signed by somebody they trust.

    The signature is for the files in the folder APP as they are now. It goes
    to `bqsgd flower superlink --signed`; the line that is printed goes into
    the file that nodes name with --trusted-entities.

    Example:
      bqsgd flower sign my-app --key signer --out my-app.signature
    """
    from bqsgd._src.cli.output import to_json
    from bqsgd._src.flower.signing import sign_app
    from bqsgd._src.storage import write_atomic

    if out.exists():
        raise InvalidParameter(f"{out} exists; name another file")
    signature, trusted = sign_app(app, key)
    write_atomic(out, to_json(signature).encode(), mode=0o644)
    fields = {"app": signature["app"], "signature": str(out), "trusted_entity": trusted}
    typer.echo(to_json(fields) if json else trusted)


@flower.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def superlink(
    context: typer.Context,
    control_from: Annotated[
        list[str] | None, typer.Option(help="Network that may start runs and register keys, besides this machine.")
    ] = None,
    signed: Annotated[
        list[Path] | None, typer.Option(help="Signature of an app, as `bqsgd flower sign` writes it.")
    ] = None,
) -> None:
    r"""Run Flower's SuperLink, safe to be reached by strangers.

    From other machines it answers only registered nodes; runs are started
    and keys registered from this machine, and from each network given with
    --control-from. It also logs failed TLS handshakes. All other options are
    those of flower-superlink; `flower-superlink --help` lists them.

    Example:
      bqsgd flower superlink --ssl-ca-certfile ca.crt \
        --ssl-certfile server.pem --ssl-keyfile server.key
    """
    from bqsgd._src.flower.federation import superlink as serve

    serve(context.args, control_from=control_from or (), signed=signed or ())


@flower.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def supernode(context: typer.Context) -> None:
    r"""Run Flower's SuperNode with client apps that start in a fraction of the time.

    A message still has a process of its own, forked from one that has torch
    and bqsgd loaded. With gate-study, gate-rounds, gate-epsilon, gate-delta
    and gate-clip-norm in its node configuration, every app answers behind
    the node's own gate. The options are those of flower-supernode;
    `flower-supernode --help` lists them.

    Example:
      bqsgd flower supernode --superlink fl.example.org:9092 \
        --root-certificates ca.crt --node-config 'client=3'
    """
    from bqsgd._src.integrations.flower_node import gated_supernode

    gated_supernode(context.args)


def demo_settings(
    *, clients: int, rounds: int | None, tls: bool, epsilon: float, seed: int | None, secure: bool = False
) -> dict[str, Any]:
    """The app's settings for a short demo. With --tls there are few rounds, so the steps are large."""
    from bqsgd._src.tasks.resolve import resolve

    chosen = {"clients": clients, "epsilon": epsilon, "secure": secure, "rounds": rounds or (4 if tls else 30)}
    config = resolve({"dataset": "digits", **chosen}).config
    settings = chosen | {
        "run": "demo",
        "momentum": 0.5,
        "learning_rate": 8.0 if tls else 1.0,
        "batch_size": config.privacy.batch_size,
        "range": config.clip.range,
    }
    if secure:  # clients of a secure sum need one plan, so they need one rate whatever their sizes
        settings["rate"] = config.privacy.rate
    return settings if seed is None else settings | {"seed": seed}


def run_demo(place: Path | None, settings: dict[str, Any], *, tls: bool, limit_seconds: float) -> dict[str, Any]:
    """Run the whole demo in the folder `place`, or in one that is deleted at the end. No process outlives this call."""
    import secrets
    import tempfile
    import time

    from bqsgd._src.flower.federation import LocalFederation, write_app
    from bqsgd._src.flower.processes import FlowerFailed, Processes
    from bqsgd._src.flower.settings import LEDGER_FOLDER_VARIABLE

    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {text}", file=sys.stderr)

    clients = settings["clients"]
    # A name that nobody can guess, because another user of the machine could create the folder first.
    folder = place or Path(tempfile.gettempdir()) / f"bqsgd-flower-{secrets.token_hex(8)}"
    with Processes(folder, temporary=place is None) as processes:
        write_app(folder / "app")
        # Without this the simulated clients would spend from the user's own ledgers.
        processes.environment[LEDGER_FOLDER_VARIABLE] = str(folder / "nodes")
        federation = LocalFederation(processes, tls=tls)
        federation.start_superlink()
        say(f"SuperLink at {federation.address}" + (", TLS" if tls else ", simulation"))
        if tls:
            names = [f"node-{client}" for client in range(clients)]
            roster = None
            if settings.get("secure"):
                roster = federation.make_identities(clients, seed=settings.get("seed"))
                settings = settings | {"roster": str(roster)}
            for client, (name, key) in enumerate(zip(names, federation.register(names), strict=True)):
                federation.start_node(name, client=client, key=key, epsilon=settings["epsilon"], roster=roster)
            say(f"{clients} node keys registered, {clients} SuperNodes started")
        app_settings = settings | {"folder": str(folder / "server")}
        say(f"flwr run: {clients} clients, {settings['rounds']} rounds")

        def heard(line: str) -> None:
            if progress := _ROUND_LINE.search(line):
                say(progress.group())

        command = federation.command(folder / "app", settings=app_settings, clients=clients)
        processes.run("run", *command, seconds=limit_seconds, heard=heard)
        say("done; stopping all processes")
        if not (folder / "server" / "summary.json").exists():
            raise FlowerFailed(f"the run ended without a summary\n{processes.tail('run')}")
        # The run's files are complete only when the processes that write them have stopped.
        processes.stop()
        seconds = {"processes_left": len(processes.left_over()), "seconds": time.monotonic() - started}
        return _result(folder) | {"clients": clients} | seconds


def _result(folder: Path) -> dict[str, Any]:
    """What the demo has left in its folder, in figures."""
    from bqsgd._src.records.checkpoint import load_checkpoint
    from bqsgd._src.records.folder import read_history
    from bqsgd._src.records.record import Status

    history, checkpoint = read_history(folder / "server"), load_checkpoint(folder / "server")
    assert history.summary is not None
    assert checkpoint is not None
    summary, model = history.summary.to_dict(), checkpoint[0].get("averaged", checkpoint[0]["model"])
    figures = ("accuracy", "rounds", "guarantee", "seeded", "bytes_up", "bytes_up_float32", "bytes_down")
    return {
        **{name: summary[name] for name in (*figures, "bytes_down_float32")},
        "model_sha256": hashlib.sha256(model.astype("<f4").tobytes()).hexdigest(),
        "frames_received": sum(tally.counts[Status.OK] for tally in history.clients),
        "rounds_in_ledgers": _ledgers(folder / "nodes"),
        "report": str(folder / "server" / "report.html"),
    }


def _ledgers(folder: Path) -> int:
    """Rounds that the clients' own ledgers count in total."""
    from bqsgd._src.ledger.register import SUFFIX, Ledgers

    total = 0
    for path in [*folder.rglob("*.ledger"), *folder.rglob(f"*{SUFFIX}")]:
        with Ledgers(path) as ledgers:
            total += sum(ledgers.ledger(client).spent_rounds for client in ledgers.clients)
    return total


def _lines(fields: dict[str, Any]) -> dict[str, str]:
    """The demo's result in words."""
    from bqsgd._src.records.record import Summary

    lines = summary_lines(Summary.from_dict(fields))
    if fields["guarantee"] is not None:
        lines["stated by"] = "the client with the largest epsilon, about itself"
    lines["frames"] = f"{fields['frames_received']} received, {fields['rounds_in_ledgers']} in the clients' ledgers"
    lines["processes"] = f"{fields['processes_left']} left after {fields['seconds']:.0f} s"
    return lines | ({"report": fields["report"]} if "report" in fields else {})
