"""The answer for a whole federation as a picture: what learns at which epsilon and model size, and the point asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.settings.outlook import Verdict
from bqsgd._src.settings.sites import SitesAnswer, verdicts
from bqsgd._src.storage import write_atomic

_COLOURS = {Verdict.WELL: "#2a9d8f", Verdict.SOMETHING: "#e9c46a", Verdict.NOTHING: "#d1495b", None: "#dddddd"}
_TITLES = {False: "the server sees each message", True: "secure sums: it sees only sums"}
_STEPS = 9
"""Cells of each axis: the whole answer takes seconds."""
_EPSILONS, _SIZES = (0.25, 16.0), (1e3, 1e8)
_SUFFIXES = (".png", ".svg", ".pdf")


def draw_sites(answer: SitesAnswer, path: Path) -> None:
    """Write the picture; its suffix names the format.

    Raises:
        InvalidParameter: another suffix.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise InvalidParameter(f"a figure's name must end in {', '.join(_SUFFIXES)}, got {path.name!r}")
    from io import BytesIO

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    trusts = sorted({secure for _, _, secure in answer.map}) or [False]
    epsilons, sizes = _cells(answer.epsilon, *_EPSILONS), _cells(answer.parameters, *_SIZES)
    found = verdicts(answer, epsilons=epsilons.tolist(), sizes=[round(size) for size in sizes])
    figure = Figure(figsize=(4.6 * len(trusts) + 0.4, 4.9), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, secure in zip(figure.subplots(1, len(trusts), squeeze=False)[0], trusts, strict=True):
        colours = [
            [_COLOURS[found.get((epsilon, round(size), secure))] for size in sizes] for epsilon in epsilons.tolist()
        ]
        _draw(axes, colours, edges=(_edges(sizes), _edges(epsilons)))
        axes.plot(answer.parameters, answer.epsilon, "*", ms=16, mfc="white", mec="black", label="asked")
        option = next((option for option in answer.options if option.secure is secure), None)
        verdict = "no message fits" if option is None else f"the model {option.verdict}"
        axes.set_title(f"{_TITLES[secure]}\nasked (star): {verdict}", fontsize=10)
        axes.set(xlabel="trained parameters", ylabel="epsilon", xscale="log", yscale="log")
        ticks = [value for value in (0.25, 0.5, 1, 2, 4, 8, 16) if epsilons[0] <= value <= epsilons[-1]]
        axes.set_yticks(ticks, [f"{value:g}" for value in ticks])
        axes.minorticks_off()
    handles = [Patch(color=colour, label=verdict or "no message fits") for verdict, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, frameon=False)
    figure.suptitle(answer.title.replace(", epsilon", ",\nepsilon"), fontsize=10)
    stream = BytesIO()
    figure.savefig(stream, format=path.suffix[1:].lower())
    write_atomic(path, stream.getvalue())


def _draw(axes: Any, colours: list[list[str]], *, edges: tuple[np.ndarray, np.ndarray]) -> None:
    """One coloured cell per pair of values."""
    from matplotlib.colors import to_rgb

    cells = np.array([[to_rgb(colour) for colour in row] for row in colours])
    axes.pcolormesh(*edges, cells, edgecolors="white", linewidth=0.5)


def _cells(asked: float, low: float, high: float) -> np.ndarray:
    """The middles of the cells, evenly spaced in logarithms, one of them at the value asked."""
    low, high = min(low, asked), max(high, asked)
    step = (np.log(high) - np.log(low)) / (_STEPS - 1)
    below = round(float((np.log(asked) - np.log(low)) / step))
    return np.asarray(asked * np.exp(step * (np.arange(_STEPS) - below)))


def _edges(middles: np.ndarray) -> np.ndarray:
    half = np.sqrt(middles[1] / middles[0])
    return np.concatenate([middles / half, [middles[-1] * half]])
