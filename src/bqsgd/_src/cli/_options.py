"""Options as the fields of dataclasses: one spelling and one help text for `account`, `plan`, `audit` and `paper`.

A command says with `takes` which dataclass declares its options, and gets all of them as one value. What several
commands ask for stands in a class that theirs derive from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import click
import typer

if TYPE_CHECKING:
    from bqsgd._src.release import Terms

_Options = TypeVar("_Options")


def panel_option(panel: str, help: str, *names: str, choices: Sequence[str] = ()) -> Any:
    """An option shown in the panel `panel` of the help page.

    It sets no limits on numbers: the functions behind the commands check them, also for callers in Python.
    """
    return typer.Option(*names, help=help, rich_help_panel=panel, click_type=click.Choice(choices) if choices else None)


def takes(kind: type[_Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that the annotated fields of a dataclass declare; it gets them as one value.

    Options that click knows beside these, such as the settings of `bqsgd train`, are passed on by name.
    """
    hints = get_type_hints(kind, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(kind).parameters.items()
        if hasattr(hints[name], "__metadata__")
    ]
    # Required options first: a help page shows the panels in the order of their first options.
    parameters.sort(key=lambda parameter: parameter.default is not parameter.empty)
    names = {parameter.name for parameter in parameters}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            own = {name: value for name, value in given.items() if name in names}
            command(kind(**own), **{name: value for name, value in given.items() if name not in names})

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


MECHANISM, CLIENT, ONE_SAMPLE = "Mechanism", "Client", "What one sample can change"
DIMENSION = panel_option(CLIENT, "Coordinates of one message: the model's parameters.")
DATASET_SIZE = panel_option(CLIENT, "Number of samples that one client holds.")
BatchSize = Annotated[int, panel_option(CLIENT, "Public batch size: a client divides its sum by it, L.")]
DatasetSize = Annotated[int, DATASET_SIZE]
NominalDimension = Annotated[
    int, panel_option(CLIENT, "Dimension in the paper's Lemma 1, d_P. Its tables use 3000 for LeNet-5.")
]
Messages = Annotated[int, panel_option(CLIENT, "Number of messages that the client sends.")]
Sampling = Annotated[
    str,
    panel_option(
        CLIENT,
        "How a client draws a batch: each sample by chance (poisson), a fixed number of samples (fixed), or all its "
        "samples (none).",
        choices=("poisson", "fixed", "none"),
    ),
]
Linf = Annotated[
    float | None,
    panel_option(
        ONE_SAMPLE,
        "Most that one sample can move a coordinate, as a fraction of the encoder's range. Default: 1/batch size, as "
        "with per-sample clipping at the range; 2/batch size with --sampling fixed.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class MechanismOptions:
    """The mechanism of one message."""

    levels: Annotated[int, panel_option(MECHANISM, "Quantisation levels, s.")]
    trials: Annotated[int, panel_option(MECHANISM, "Binomial trials of the noise, m.")]


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How a client draws its batches, and what one sample can change."""

    sampling: Sampling = "poisson"
    relation: Annotated[
        str | None,
        panel_option(
            ONE_SAMPLE,
            "Which data sets are neighbours. Only --sampling none leaves a choice: poisson means add-remove, fixed "
            "means replace.",
            choices=("add-remove", "replace"),
        ),
    ] = None
    linf: Linf = None
    l2: Annotated[
        float | None,
        panel_option(
            ONE_SAMPLE,
            "Most that one sample can move the whole vector in Euclidean norm, as a fraction of the encoder's range. "
            "Default: no such bound.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ClientOptions(SampleOptions):
    """Everything about one client that its terms depend on."""

    dimension: Annotated[int, DIMENSION]
    batch_size: BatchSize
    dataset_size: DatasetSize

    @property
    def terms(self) -> Terms:
        """The terms of this client's messages."""
        from bqsgd._src.answers import terms_of

        return terms_of(**{field.name: getattr(self, field.name) for field in fields(ClientOptions)})
