"""The options that describe one client: one spelling and one help text for `account`, `plan`, `audit` and `paper`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import click
import typer


def panel_option(panel: str, help: str, *names: str, choices: Sequence[str] = ()) -> Any:
    """An option shown in the panel `panel` of the help page.

    It sets no limits on numbers: the functions behind the commands check them, also for callers in Python.
    """
    return typer.Option(*names, help=help, rich_help_panel=panel, click_type=click.Choice(choices) if choices else None)


MECHANISM, CLIENT, ONE_SAMPLE = "Mechanism", "Client", "What one sample can change"

LevelsOption = Annotated[int, panel_option(MECHANISM, "Quantisation levels, s.")]
TrialsOption = Annotated[int, panel_option(MECHANISM, "Binomial trials of the noise, m.")]
DIMENSION = panel_option(CLIENT, "Coordinates of one message: the model's parameters.")
DimensionOption = Annotated[int, DIMENSION]
NominalDimensionOption = Annotated[
    int, panel_option(CLIENT, "Dimension in the paper's Lemma 1, d_P. Its tables use 3000 for LeNet-5.")
]
BatchSizeOption = Annotated[int, panel_option(CLIENT, "Public batch size: a client divides its sum by it, L.")]
DATASET_SIZE = panel_option(CLIENT, "Number of samples that one client holds.")
DatasetSizeOption = Annotated[int, DATASET_SIZE]
SamplingOption = Annotated[
    str,
    panel_option(
        CLIENT,
        "How a client draws a batch: each sample by chance (poisson), a fixed number of samples (fixed), or all its "
        "samples (none).",
        choices=("poisson", "fixed", "none"),
    ),
]
RelationOption = Annotated[
    str | None,
    panel_option(
        ONE_SAMPLE,
        "Which data sets are neighbours. Only --sampling none leaves a choice: poisson means add-remove, fixed means "
        "replace.",
        choices=("add-remove", "replace"),
    ),
]
LinfOption = Annotated[
    float | None,
    panel_option(
        ONE_SAMPLE,
        "Most that one sample can move a coordinate, as a fraction of the encoder's range. Default: 1/batch size, as "
        "with per-sample clipping at the range; 2/batch size with --sampling fixed.",
    ),
]
L2Option = Annotated[
    float | None,
    panel_option(
        ONE_SAMPLE,
        "Most that one sample can move the whole vector in Euclidean norm, as a fraction of the encoder's range. "
        "Default: no such bound.",
    ),
]
