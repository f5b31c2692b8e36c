"""The options that describe one client to `plan` and `account`: one spelling and one help text for both."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

METHOD_HELP = "exact: proven, worst case over data. paper: the published formulas (nominal epsilon; not a guarantee)."


class MethodChoice(StrEnum):
    """Values of --method."""

    EXACT = "exact"
    PAPER = "paper"


class SamplingChoice(StrEnum):
    """Values of --sampling."""

    POISSON = "poisson"
    FIXED = "fixed"
    NONE = "none"

    @property
    def scheme(self) -> str:
        """The value of `bqsgd.release.Scheme` that is meant."""
        schemes = {"poisson": "poisson", "fixed": "fixed-size without replacement", "none": "no sampling"}
        return schemes[self.value]


class RelationChoice(StrEnum):
    """Values of --relation."""

    ADD_REMOVE = "add-remove"
    REPLACE = "replace"

    @property
    def relation(self) -> str:
        """The value of `bqsgd.release.Relation` that is meant."""
        return {"add-remove": "add/remove one", "replace": "replace one"}[self.value]


Method = Annotated[MethodChoice, typer.Option(help=METHOD_HELP)]
Dim = Annotated[int, typer.Option(help="Number of coordinates of one message (model parameters).", min=1)]
NominalDim = Annotated[
    int | None,
    typer.Option(help="Dimension put into the paper's Lemma 1 if not --dim (its tables use 3000 for LeNet-5).", min=1),
]
Batch = Annotated[int, typer.Option(help="Public batch size a client divides by, L.", min=1)]
DatasetSize = Annotated[int, typer.Option(help="Samples one client holds.", min=1)]
Sampling = Annotated[
    SamplingChoice,
    typer.Option(help="How a batch is drawn: poisson (add/remove one), fixed size (replace one), none (all data)."),
]
Relation = Annotated[
    RelationChoice | None,
    typer.Option(help="Which data sets are neighbours; follows from --sampling, free only where that is none."),
]
Linf = Annotated[
    float | None,
    typer.Option(
        help="Most one sample moves a coordinate, as a fraction of the clip range. "
        "Default: per-sample clip, 1/batch (2/batch for fixed-size batches)."
    ),
]
L2 = Annotated[
    float | None,
    typer.Option("--l2", help="Most one sample moves the vector in Euclidean norm, as a fraction of the clip range."),
]
