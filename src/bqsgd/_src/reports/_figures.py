"""The charts of one run: accuracy, loss, epsilon, bytes, time by stage, and the density of the noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from bqsgd._src.params import Mechanism
from bqsgd._src.records.folder import History
from bqsgd._src.records.record import STAGES, RoundRecord
from bqsgd._src.reports._chart import MAX_POINTS, Chart, Point, Quantity, Series, short

# The stages that a run without privacy has too.
OUTSIDE_NOISE = ("gradients", "clip")
# A run folder may state any number of trials and seconds; larger ones would take long to draw or overflow.
MAX_DRAWN_TRIALS = 20_000
MAX_STAGE_SECONDS = 1e9
MAX_STAGE_POINTS = 80
# Neighbouring layers of the stack get colours that are easy to tell apart.
STAGE_COLOURS = (0, 1, 2, 7, 4, 5, 6, 3)


_BY_ROUND: dict[str, Any] = {"x_label": "round", "x_unit": Quantity.COUNT}
_ACCURACY: dict[str, Any] = {"y_label": "accuracy", "y_unit": Quantity.PERCENT}
_FRAMES: dict[str, dict[str, Any]] = {
    "accuracy": _BY_ROUND | _ACCURACY | {"title": "Test accuracy"},
    "accuracy-bytes": _ACCURACY
    | {"title": "Accuracy for the bytes sent", "x_label": "bytes up so far", "x_unit": Quantity.BYTES, "log_x": True},
    "accuracy-epsilon": _ACCURACY
    | {"title": "Accuracy for the privacy spent", "x_label": "proven epsilon so far", "x_unit": Quantity.EPSILON},
    "metric": _BY_ROUND | {"title": "Test metric", "y_label": "metric"},
    "loss": _BY_ROUND | {"title": "Test loss", "y_label": "loss"},
    "epsilon": _BY_ROUND
    | {"title": "Privacy spent", "y_label": "epsilon of the client that spent most", "y_unit": Quantity.EPSILON},
    "bytes": _BY_ROUND | {"title": "Bytes sent by the clients", "y_label": "bytes up so far", "y_unit": Quantity.BYTES},
    "stages": _BY_ROUND
    | {
        "title": "Where a round's time goes",
        "y_label": "seconds per round",
        "y_unit": Quantity.SECONDS,
        "stacked": True,
    },
}
"""Key of a chart -> its title and axes, the same in the report of one run and in a comparison."""


def framed(key: str, note: str, *series: Series) -> Chart:
    """The chart `key` with these curves."""
    return Chart(key=key, note=note, series=series, **_FRAMES[key])


def run_figures(run: History) -> list[Chart]:
    """The charts of a run, in reading order, as far as its records have the figures."""
    return [result(run), loss(run), epsilon(run), traffic(run), *stages(run), *noise(run)]


def measured(rounds: Iterable[RoundRecord], name: str) -> list[Point]:
    """(round, figure) for the rounds in which the figure was measured."""
    return [(float(r.round), float(getattr(r, name))) for r in rounds if getattr(r, name) is not None]


def running_total(rounds: Sequence[RoundRecord], name: str) -> list[Point]:
    """(round, total so far)."""
    totals = accumulate(getattr(r, name) for r in rounds)
    return [(float(r.round), float(total)) for r, total in zip(rounds, totals, strict=True)]


def result(run: History) -> Chart:
    """Test accuracy against rounds, or the task's own metric."""
    points = measured(run.rounds, "test_metric")
    if points:
        name = run.figures.metric_name or "metric"
        note = f"{name}, on the public test split."
        return framed("metric", note, Series(label=name, points=points, colour=0))
    points = measured(run.rounds, "test_accuracy")
    best = max((y for _, y in points if math.isfinite(y)), default=None)
    note = "On the public test split." + ("" if best is None else f" Best {short(best, Quantity.PERCENT, 4)}.")
    return framed("accuracy", note, Series(label="test accuracy", points=points, colour=0, fill=True))


def loss(run: History) -> Chart:
    """Test loss against rounds."""
    note = "On the public test split. The training loss is private and stays on the clients."
    return framed("loss", note, Series(label="test loss", points=measured(run.rounds, "test_loss"), colour=4))


def epsilon(run: History) -> Chart:
    """Proven epsilon of the client that has spent most, against rounds."""
    proven = measured(run.rounds, "epsilon_max")
    claimed = run.guarantee or "the run states no guarantee yet, so nothing is claimed"
    note = f"Proven upper bound: {claimed}."
    if run.figures.seeded:
        note = "Seeded noise: no privacy claim. The figures are those of the same run with secret noise. " + note
    return framed("epsilon", note, Series(label="proven epsilon", points=proven, colour=2, fill=True))


def traffic(run: History) -> Chart:
    """Bytes sent up so far, and the size of the same updates as 32-bit floats."""
    saving, saved = run.figures.saving, ""
    if saving is not None and saving >= 1:
        saved = f" {short(saving)} times fewer than as 32-bit floats."
    elif saving is not None:
        saved = f" {short(1 / saving)} times as many as 32-bit floats: headers and keys outweigh so small a model."
    plain = running_total(run.rounds, "bytes_up_float32")
    return framed(
        "bytes",
        "Measured frames, headers included, summed over clients and rounds." + saved,
        Series(label="as 32-bit floats", points=plain, colour=5, dashed=True),
        Series(label="sent", points=running_total(run.rounds, "bytes_up"), colour=0, fill=True),
    )


def stages(run: History) -> list[Chart]:
    """Seconds of a round by stage, stacked. Long runs are averaged over neighbouring rounds. Empty if not recorded."""
    # Known stages first, in the order of a round; a run may have timed others.
    names = list(dict.fromkeys([*STAGES, *(name for r in run.rounds[:1] for name in r.seconds)]))
    timed = [r for r in run.rounds if r.seconds and all(0 <= s < MAX_STAGE_SECONDS for s in r.seconds.values())]
    names = [name for name in names if sum(r.seconds.get(name, 0.0) for r in timed) > 1e-12]
    if not timed or not names:
        return []
    size = math.ceil(len(timed) / MAX_STAGE_POINTS)
    groups = [timed[i : i + size] for i in range(0, len(timed), size)]
    sums = {name: sum(r.seconds.get(name, 0.0) for r in timed) for name in names}
    whole = sum(sums.values())
    other_share = 1 - sum(sums.get(name, 0.0) for name in OUTSIDE_NOISE) / whole
    average = f" Average of {size} neighbouring rounds." if size > 1 else ""
    note = (
        f"Mean {short(whole / len(timed), Quantity.SECONDS)} per round; all but gradients and clip take "
        f"{short(other_share, Quantity.PERCENT)}.{average}"
    )
    curves = (
        Series(
            label=name,
            colour=STAGE_COLOURS[index % 8],
            points=[(float(g[-1].round), sum(r.seconds.get(name, 0.0) for r in g) / len(g)) for g in groups],
        )
        for index, name in enumerate(names)
    )
    return [framed("stages", note, *curves)]


def noise(run: History) -> list[Chart]:
    """The density of the noise (Proposition 1, before coarsening), its binomial part, and a Gaussian."""
    mechanism = run.mechanism
    if mechanism is None or not 0 < mechanism.trials <= MAX_DRAWN_TRIALS:
        return []
    return [noise_chart(mechanism.fine)]


def noise_chart(mechanism: Mechanism) -> Chart:
    """The noise of one coordinate in units of the range R. The server cannot remove it."""
    import numpy as np

    from bqsgd._src.laws import Binomial
    from bqsgd._src.mechanism.properties import noise_density, noise_variance

    s, m = mechanism.levels, mechanism.trials
    deviation = math.sqrt(noise_variance(mechanism))
    grid = np.linspace(-4 * deviation, 4 * deviation, MAX_POINTS - 1)
    gaussian = np.exp(-(grid**2) / (2 * deviation**2)) / (deviation * math.sqrt(2 * math.pi))

    def over_grid(density: Any) -> list[Point]:
        return list(zip(grid.tolist(), density.tolist(), strict=True))

    law = Binomial(m)
    steps: list[Point] = []
    for outcome, mass in enumerate(law.pmf.tolist(), start=law.first):
        centre = (outcome - m / 2) / s
        if abs(centre) <= 4 * deviation:
            steps += [(centre - 0.5 / s, mass * s), (centre + 0.5 / s, mass * s)]
    return Chart(
        key="noise",
        title="Noise on one coordinate",
        note=f"BQ with {s} levels and {m} trials: rounding and binomial noise in one integer step. "
        f"Standard deviation {short(deviation)} R. What hides a sample is this noise and the sampling together.",
        x_label="noise, in units of the range R",
        y_label="density",
        ends=False,
        series=[
            Series(label="binomial part (steps)", points=steps, colour=3, fill=True),
            Series(label="BQ", points=over_grid(noise_density(grid, mechanism, range=1.0)), colour=0),
            Series(label="Gaussian of the same variance", points=over_grid(gaussian), colour=1, dashed=True),
        ],
    )
