"""Features: what a model sees of the inputs, the inputs themselves or a fixed transform that costs no privacy."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bqsgd.data.dataset import Dataset, Split
from bqsgd.errors import InvalidParameter

FEATURES = ("none", "scattering")
_WORTH_SHOWING = 2000


def compute_features(name: str, split: Split, *, of: Dataset, threads: int = 1, quiet: bool = False) -> Split:
    """`split`, a part of the data set `of`, as the features `name`; for "none" the split itself.

    A sample's features depend on that sample only, so each client transforms its own share and nobody else's.
    """
    _check(name)
    if name == "none":
        return split
    from bqsgd.data.scattering import features  # torch and compiled loops: only where they are needed

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=quiet or len(split) < _WORTH_SHOWING,
        transient=True,
    ) as bar:
        task = bar.add_task(f"scattering {of.name}", total=len(split))
        inputs = features(
            split.inputs,
            mean=of.mean,
            deviation=of.deviation,
            threads=threads,
            progress=lambda done: bar.update(task, advance=done),
        )
    return Split(inputs=inputs, labels=split.labels)


def features_shape(name: str, input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one sample's features.

    >>> features_shape("scattering", (1, 28, 28))
    (81, 7, 7)
    """
    _check(name)
    if name == "none":
        return input_shape
    from bqsgd.data.scattering import CHANNELS, REDUCTION, transform_for

    if len(input_shape) != 3 or input_shape[0] != 1:
        raise InvalidParameter(f"scattering features need images of one channel, (1, height, width), got {input_shape}")
    height, width = transform_for(*input_shape[1:]).shape
    return CHANNELS, height // REDUCTION, width // REDUCTION


def _check(name: str) -> None:
    if name not in FEATURES:
        raise InvalidParameter(f"features must be one of {', '.join(FEATURES)}, got {name!r}")
