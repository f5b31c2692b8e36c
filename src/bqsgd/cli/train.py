"""`bqsgd train`: a private training run over simulated clients, every setting an option."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bqsgd.cli.output import Json, emit
from bqsgd.errors import DataUnavailable, InvalidParameter

Option = typer.Option
DIGITS = {"batch_size": 64, "rounds": 60, "learning_rate": 0.5, "evaluate_every": 5}
"""What fits the 1,437 training samples of `digits` better than the defaults, which are for MNIST."""


def train(
    dataset: Annotated[str | None, Option(help="mnist, fashion-mnist or digits. Default: mnist, else digits.")] = None,
    data_folder: Annotated[str | None, Option(help="Folder that holds the data set's files.")] = None,
    front_end: Annotated[str | None, Option(help="none, or scattering: fixed wavelet features of the images.")] = None,
    model: Annotated[str | None, Option(help="lenet5, cnn, alexnet28, alexnet227, mlp or linear.")] = None,
    activation: Annotated[str | None, Option(help="tanh or relu.")] = None,
    clients: Annotated[int | None, Option(help="Number of clients.")] = None,
    concentration: Annotated[float | None, Option(help="Label skew: Dirichlet concentration. Default: even.")] = None,
    rounds: Annotated[int | None, Option(help="Rounds to train.")] = None,
    batch_size: Annotated[int | None, Option(help="Public batch size a client divides by, L.")] = None,
    sampling: Annotated[str | None, Option(help="poisson (add/remove one), fixed (replace one) or full.")] = None,
    clip: Annotated[str | None, Option(help="dual, clamp, l2, scale or batch-mean (no per-sample guarantee).")] = None,
    clip_bound: Annotated[float | None, Option(help="Per-sample bound of one coordinate, C.")] = None,
    clip_norm: Annotated[float | None, Option(help="Per-sample Euclidean bound, for dual and l2.")] = None,
    range: Annotated[float | None, Option(help="Range of the encoder; the mean is clamped to it.")] = None,
    bits: Annotated[int | None, Option(help="Most bits a coordinate.")] = None,
    epsilon: Annotated[float | None, Option(help="Total privacy budget of each client (exact).")] = None,
    delta: Annotated[float | None, Option(help="Delta of the budget.")] = None,
    levels: Annotated[int | None, Option(help="Fix the levels instead of planning them; needs --trials.")] = None,
    trials: Annotated[int | None, Option(help="Fix the trials instead of planning them; needs --levels.")] = None,
    coding: Annotated[str | None, Option(help="fixed (equal frames) or entropy (shorter).")] = None,
    optimiser: Annotated[str | None, Option(help="The server's: sgd or adam.")] = None,
    learning_rate: Annotated[float | None, Option(help="The server's learning rate.")] = None,
    momentum: Annotated[float | None, Option(help="Of sgd.")] = None,
    subtract_noise: Annotated[bool | None, Option(help="adam: take the known noise out of its second moment.")] = None,
    schedule: Annotated[str | None, Option(help="constant, linear or cosine.")] = None,
    average: Annotated[float | None, Option(help="Decay of the model's exponential average; 0 for none.")] = None,
    aggregation: Annotated[str | None, Option(help="mean, median, trimmed-mean, krum or multi-krum.")] = None,
    byzantine: Annotated[int | None, Option(help="Adversarial clients a robust rule must bear.")] = None,
    quorum: Annotated[int | None, Option(help="Fewest frames a round needs to count.")] = None,
    deadline_seconds: Annotated[float | None, Option(help="Frames after this are refused.")] = None,
    unit: Annotated[str | None, Option(help="Whom the guarantee hides: sample or client.")] = None,
    local_steps: Annotated[
        int | None, Option(help="Steps a client takes a round; above 1 needs --unit client.")
    ] = None,
    local_learning_rate: Annotated[float | None, Option(help="Of the local steps.")] = None,
    seed: Annotated[int | None, Option(help="Reproducible noise and batches: voids the privacy claim.")] = None,
    init_seed: Annotated[int | None, Option(help="Of the initial model and the shares of data; public.")] = None,
    evaluate_every: Annotated[int | None, Option(help="Rounds between evaluations on the test split.")] = None,
    checkpoint_every: Annotated[int | None, Option(help="Rounds between checkpoints.")] = None,
    reserve_rounds: Annotated[int | None, Option(help="Rounds the ledger records ahead in one write.")] = None,
    private_metrics: Annotated[
        bool | None, Option(help="Keep training loss and batch sizes on the clients: outside the guarantee.")
    ] = None,
    workers: Annotated[int | None, Option(help="Clients that work at the same time.")] = None,
    engine: Annotated[
        str, Option(help="in-process, or distributed (start it with torchrun; each rank is a client).")
    ] = "in-process",
    backend: Annotated[str, Option(help="Of the distributed engine: gloo, nccl or mpi.")] = "gloo",
    preset: Annotated[
        str | None, Option(help="Settings by name: mnist-eps3, mnist-eps1, fashion-eps3 or mnist-eps3-4bit.")
    ] = None,
    config: Annotated[Path | None, Option(help="TOML file of these settings; options win over it.")] = None,
    out: Annotated[Path | None, Option(help="Run folder. Default: a new one under runs/.")] = None,
    resume: Annotated[bool, Option("--resume", help="Go on with the run in --out.")] = False,
    tensorboard: Annotated[bool, Option("--tensorboard", help="Log the public figures for TensorBoard.")] = False,
    json: Json = False,
) -> None:
    """Train a model across clients that each keep a differential privacy guarantee of their own.

    The defaults give an exact total epsilon of at most 3 at delta 1e-5 for every client. Ctrl-C stops after the
    round in hand; --resume goes on.

    Examples: bqsgd train --preset mnist-eps3
              bqsgd train --dataset mnist --epsilon 3 --out runs/first
    """
    given = {name: value for name, value in locals().items() if value is not None and name not in _NOT_SETTINGS}
    if engine not in ENGINES:
        raise InvalidParameter(f"--engine must be {' or '.join(ENGINES)}, got {engine!r}")
    ranks = backend if engine == "distributed" else None
    finish(
        given,
        preset=preset,
        config=config,
        out=out,
        resume=resume,
        tensorboard=tensorboard,
        json=json,
        backend=ranks,
    )


ENGINES = ("in-process", "distributed")
_NOT_SETTINGS = ("engine", "backend", "preset", "config", "out", "resume", "tensorboard", "json")


def finish(
    given: dict[str, Any],
    *,
    config: Path | None,
    out: Path | None,
    resume: bool,
    tensorboard: bool,
    json: bool,
    preset: str | None = None,
    backend: str | None = None,
) -> None:
    """Run with the settings given on the command line, and print what came of it.

    preset, config: settings by name and from a file; the file wins over the name, what is given over both.
    backend: of torch.distributed when this process is one rank of many, None when all clients are in this process.
    """
    from bqsgd.cli.distributed_run import as_rank, run_rank
    from bqsgd.cli.training_run import PRIVATE_NOTE, run, stored
    from bqsgd.training import presets
    from bqsgd.training.config import Config, read_settings

    if backend is not None:
        given = as_rank(given, out=out)
    if resume and out is None:
        raise InvalidParameter("--resume needs --out, the folder of the run to go on with")
    found = stored(out, given) if resume and out is not None else None
    if found is None:
        named = {} if preset is None else presets.preset(preset)
        settings = named | ({} if config is None else read_settings(config)) | given
        chosen = Config.from_dict(fitted(settings))
        folder = out or new_folder(chosen.dataset)
        if (folder / "config.toml").exists():
            raise InvalidParameter(f"{folder} holds a run already; add --resume to go on or name another folder")
    else:
        chosen, folder = found, out or Path()
    if backend is None:
        fields = run(chosen, folder=folder, resuming=found is not None, tensorboard=tensorboard)
    else:
        led = run_rank(
            chosen, folder=folder, found=found is not None, resume=resume, tensorboard=tensorboard, backend=backend
        )
        if led is None:
            return  # the serving rank prints
        fields = led
    notes = [PRIVATE_NOTE] if chosen.private_metrics else []
    emit(outline(fields), as_json=json, title=f"Run {folder}", notes=(*claim(fields), *notes))
    if not fields["finished"]:
        print(
            f"stopped after round {fields['rounds']}; go on with: bqsgd train --out {folder} --resume", file=sys.stderr
        )
        raise typer.Exit(130)


def fitted(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with a data set that is there: MNIST unless named, `digits` when no source of MNIST answers."""
    from bqsgd import data

    chosen = dict(settings)
    if "dataset" not in chosen:
        try:
            data.load("mnist", folder=chosen.get("data_folder"))
            chosen["dataset"] = "mnist"
        except DataUnavailable as error:
            print(f"{error}\nMNIST is not to be had, so this run takes digits instead.", file=sys.stderr)
            chosen["dataset"] = "digits"
    return DIGITS | chosen if chosen["dataset"] == "digits" else chosen


def new_folder(name: str) -> Path:
    """A run folder that does not exist yet."""
    from datetime import datetime

    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    candidates = (Path("runs") / f"{name}-{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 100))))
    return next(path for path in candidates if not path.exists())


def outline(fields: dict[str, Any]) -> dict[str, Any]:
    """What is printed of summary.json."""
    kept = ("accuracy", "loss", "rounds", "guarantee", "nominal", "bytes_up", "bytes_up_float32", "bytes_down")
    return {name: fields[name] for name in (*kept, "bits_per_coordinate", "seeded", "seconds", "report")}


def claim(fields: dict[str, Any]) -> tuple[str, ...]:
    """The guarantee in words, with everything that belongs beside the figure; and the bytes."""
    from bqsgd.privacy.guarantee import Guarantee

    guarantee = fields["guarantee"]
    saved = fields["bytes_up_float32"] / fields["bytes_up"] if fields["bytes_up"] else 0.0
    privacy = "Nothing private was sent." if guarantee is None else f"Guarantee: {Guarantee.from_dict(guarantee)}."
    return (
        f"Test accuracy {fields['accuracy']:.2%} after {fields['rounds']} rounds.",
        f"{privacy} The search for hyper-parameters is not charged to epsilon.",
        f"Sent up: {fields['bytes_up']:,} bytes, {saved:.2f} times less than float32.",
        f"Report: {fields['report']}",
    )
