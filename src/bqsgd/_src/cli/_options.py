"""The options that describe one client: one spelling and one help text for `account`, `plan`, `audit` and `paper`."""

from __future__ import annotations

from typing import Annotated

import click
import typer

LevelsOption = Annotated[int, typer.Option(help="Quantisation levels of the mechanism, s.")]
TrialsOption = Annotated[int, typer.Option(help="Binomial trials of the mechanism, m.")]
DimensionOption = Annotated[int, typer.Option(help="Coordinates of one message: the model's parameters.", min=1)]
NominalDimensionOption = Annotated[
    int, typer.Option(help="Dimension put into the paper's Lemma 1; its tables use 3000 for LeNet-5 (d_P).", min=1)
]
BatchSizeOption = Annotated[int, typer.Option(help="Public batch size by which a client divides, L.", min=1)]
DatasetSizeOption = Annotated[int, typer.Option(help="Samples held by one client.", min=1)]
SamplingOption = Annotated[
    str,
    typer.Option(
        click_type=click.Choice(["poisson", "fixed", "none"]),
        help="How a batch is drawn: poisson (add/remove one), fixed size (replace one), none (all data).",
    ),
]
RelationOption = Annotated[
    str | None,
    typer.Option(
        click_type=click.Choice(["add-remove", "replace"]),
        help="Which data sets are neighbours. --sampling decides it, except for --sampling none, where you can choose.",
    ),
]
LinfOption = Annotated[
    float | None,
    typer.Option(
        help="The most that one sample moves a coordinate, as a fraction of the encoder's range. "
        "Default: per-sample clip at the range, 1/batch size (2/batch size for fixed-size batches)."
    ),
]
L2Option = Annotated[
    float | None,
    typer.Option(
        "--l2",
        help="The most that one sample moves the vector in Euclidean norm, as a fraction of the encoder's range.",
    ),
]
