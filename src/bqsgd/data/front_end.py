"""What is done to the inputs before any model sees them: nothing, or a fixed transform that costs no privacy."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bqsgd.data.dataset import Dataset, Split
from bqsgd.errors import InvalidParameter

FRONT_ENDS = ("none", "scattering")
_WORTH_SHOWING = 2000


def through(front_end: str, split: Split, *, of: Dataset, threads: int = 1, quiet: bool = False) -> Split:
    """`split`, a part of the data set `of`, as the front end gives it; for "none" the split itself.

    A sample's features depend on that sample only, so each client transforms its own share and nobody else's.
    """
    _check(front_end)
    if front_end == "none":
        return split
    from bqsgd.data.scattering import features  # torch and compiled loops: only for whoever needs them

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


def output_shape(front_end: str, input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one sample behind the front end.

    >>> output_shape("scattering", (1, 28, 28))
    (81, 7, 7)
    """
    _check(front_end)
    if front_end == "none":
        return input_shape
    from bqsgd.data.morlet import REDUCTION
    from bqsgd.data.scattering import CHANNELS, transform_for

    if len(input_shape) != 3 or input_shape[0] != 1:
        raise InvalidParameter(
            f"the scattering front end takes images of one channel, (1, height, width), got {input_shape}"
        )
    height, width = transform_for(*input_shape[1:]).shape
    return CHANNELS, height // REDUCTION, width // REDUCTION


def _check(front_end: str) -> None:
    if front_end not in FRONT_ENDS:
        raise InvalidParameter(f"front_end must be one of {', '.join(FRONT_ENDS)}, got {front_end!r}")
