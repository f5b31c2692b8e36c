"""The charts of one run: accuracy, loss, epsilon, bytes, time by stage, and the density of the noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

from bqsgd.params import Mechanism
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.records.folder import History
from bqsgd.records.record import STAGES, RoundRecord
from bqsgd.reports._chart import MAX_POINTS, Chart, Point, Quantity, Series, short

NOMINAL = "nominal epsilon (as published; not a guarantee)"
OUTSIDE_NOISE = ("gradients", "clip")
ORDERS_APART = 20.0
MAX_DRAWN_TRIALS = 20_000
MAX_STAGE_POINTS = 80
MAX_STAGE_SECONDS = 1e9
STAGE_COLOURS = (0, 1, 2, 7, 4, 5, 6, 3)


def run_figures(run: History) -> list[Chart]:
    """The charts that the run's records can fill, in reading order."""
    return [accuracy(run), loss(run), epsilon(run), traffic(run), *stages(run), *noise(run)]


def measured(rounds: Iterable[RoundRecord], name: str) -> list[Point]:
    """(round, figure) where the figure was measured."""
    return [(float(r.round), float(getattr(r, name))) for r in rounds if getattr(r, name) is not None]


def running_total(rounds: Sequence[RoundRecord], name: str) -> list[Point]:
    """(round, total so far)."""
    totals = accumulate(getattr(r, name) for r in rounds)
    return [(float(r.round), float(total)) for r, total in zip(rounds, totals, strict=True)]


def accuracy(run: History) -> Chart:
    """Test accuracy against rounds."""
    points = measured(run.rounds, "test_accuracy")
    best = max((y for _, y in points if math.isfinite(y)), default=None)
    return Chart(
        key="accuracy",
        title="Test accuracy",
        note="On the public test split." + ("" if best is None else f" Best {short(best, Quantity.PERCENT, 4)}."),
        x_label="round",
        y_label="accuracy",
        x_unit=Quantity.COUNT,
        y_unit=Quantity.PERCENT,
        series=[Series(label="test accuracy", points=points, colour=0, fill=True)],
    )


def loss(run: History) -> Chart:
    """Test loss against rounds."""
    return Chart(
        key="loss",
        title="Test loss",
        note="On the public test split. The training loss is private and stays on the clients.",
        x_label="round",
        y_label="loss",
        x_unit=Quantity.COUNT,
        series=[Series(label="test loss", points=measured(run.rounds, "test_loss"), colour=4)],
    )


def terms(claim: Guarantee) -> str:
    """What an epsilon must be stated with, in one line."""
    stated = (claim.relation, f"unit: {claim.unit}", claim.trust_text, f"sampling: {claim.sampling}", claim.method)
    return ", ".join((f"δ = {short(claim.delta)}", *stated))


def epsilon(run: History) -> Chart:
    """Proven epsilon of the client that spent most, and the paper's figure, against rounds."""
    proven, nominal = measured(run.rounds, "epsilon_max"), measured(run.rounds, "nominal_epsilon")
    claim = run.summary.guarantee if run.summary is not None else None
    note = (
        "Proven upper bound: "
        + (terms(claim) if claim is not None else "the run states no guarantee yet, so nothing is claimed")
        + "."
    )
    if run.seeded:
        note = "Seeded noise: no privacy claim. What the accountant gives for the same run with secret noise. " + note
    return Chart(
        key="epsilon",
        title="Privacy spent",
        note=note,
        x_label="round",
        y_label="epsilon of the client that spent most",
        x_unit=Quantity.COUNT,
        y_unit=Quantity.EPSILON,
        log_y=_orders_apart(proven, nominal),
        series=[
            Series(label="proven epsilon", points=proven, colour=2, fill=not nominal),
            *([Series(label=NOMINAL, points=nominal, colour=5, dashed=True)] if nominal else []),
        ],
    )


def traffic(run: History) -> Chart:
    """Bytes sent up so far, beside the same updates as 32-bit floats."""
    saved = "" if run.saving is None else f" {short(run.saving)} times fewer than as 32-bit floats."
    return Chart(
        key="bytes",
        title="Bytes sent by the clients",
        note="Measured frames, headers included, summed over clients and rounds." + saved,
        x_label="round",
        y_label="bytes up so far",
        x_unit=Quantity.COUNT,
        y_unit=Quantity.BYTES,
        series=[
            Series(
                label="as 32-bit floats", points=running_total(run.rounds, "bytes_up_float32"), colour=5, dashed=True
            ),
            Series(label="sent", points=running_total(run.rounds, "bytes_up"), colour=0, fill=True),
        ],
    )


def stages(run: History) -> list[Chart]:
    """Seconds of a round by stage, stacked; long runs are averaged over neighbouring rounds. None when not recorded."""
    names = list(dict.fromkeys([*STAGES, *(name for r in run.rounds[:1] for name in r.seconds)]))
    timed = [r for r in run.rounds if r.seconds and all(0 <= s < MAX_STAGE_SECONDS for s in r.seconds.values())]
    names = [name for name in names if sum(r.seconds.get(name, 0.0) for r in timed) > 1e-12]
    if not timed or not names:
        return []
    size = math.ceil(len(timed) / MAX_STAGE_POINTS)
    groups = [timed[i : i + size] for i in range(0, len(timed), size)]
    sums = {name: sum(r.seconds.get(name, 0.0) for r in timed) for name in names}
    whole = sum(sums.values())
    rest = 1 - sum(sums.get(name, 0.0) for name in OUTSIDE_NOISE) / whole
    average = f" Average of {size} neighbouring rounds." if size > 1 else ""
    return [
        Chart(
            key="stages",
            title="Where a round's time goes",
            note=f"Mean {short(whole / len(timed), Quantity.SECONDS)} per round; all but gradients and clip take "
            f"{short(rest, Quantity.PERCENT)}.{average}",
            x_label="round",
            y_label="seconds per round",
            x_unit=Quantity.COUNT,
            y_unit=Quantity.SECONDS,
            stacked=True,
            series=[
                Series(
                    label=name,
                    colour=STAGE_COLOURS[index % 8],
                    points=[(float(g[-1].round), sum(r.seconds.get(name, 0.0) for r in g) / len(g)) for g in groups],
                )
                for index, name in enumerate(names)
            ],
        )
    ]


def noise(run: History) -> list[Chart]:
    """Density of the BQ noise (Proposition 1, before coarsening), its binomial part, the Gaussian of that variance."""
    mechanism = run.mechanism
    if mechanism is None or not 0 < mechanism.trials <= MAX_DRAWN_TRIALS:
        return []
    return [noise_chart(mechanism.fine)]


def noise_chart(mechanism: Mechanism) -> Chart:
    """The noise of one coordinate in units of the clip C: what the server cannot remove."""
    import numpy as np

    from bqsgd.mechanism.properties import noise_density, noise_variance
    from bqsgd.noise import binomial_pmf

    s, m = mechanism.levels, mechanism.trials
    deviation = math.sqrt(noise_variance(mechanism))
    grid = np.linspace(-4 * deviation, 4 * deviation, MAX_POINTS - 1)
    gaussian = np.exp(-(grid**2) / (2 * deviation**2)) / (deviation * math.sqrt(2 * math.pi))
    law = binomial_pmf(m)
    steps: list[Point] = []
    for outcome, mass in enumerate(law.pmf.tolist(), start=law.first):
        centre = (outcome - m / 2) / s
        if abs(centre) <= 4 * deviation:
            steps += [(centre - 0.5 / s, mass * s), (centre + 0.5 / s, mass * s)]
    return Chart(
        key="noise",
        title="Noise on one coordinate",
        note=f"BQ with {s} levels and {m} trials: rounding and binomial noise in one integer step. "
        f"Standard deviation {short(deviation)} C. What hides a sample is this noise and the sampling together.",
        x_label="noise, in units of the clip C",
        y_label="density",
        ends=False,
        series=[
            Series(label="binomial part (steps)", points=steps, colour=3, fill=True),
            Series(
                label="BQ",
                points=list(zip(grid.tolist(), noise_density(grid, mechanism, range=1.0).tolist(), strict=True)),
                colour=0,
            ),
            Series(
                label="Gaussian of the same variance",
                points=list(zip(grid.tolist(), gaussian.tolist(), strict=True)),
                colour=1,
                dashed=True,
            ),
        ],
    )


def _orders_apart(*curves: Sequence[Point]) -> bool:
    tops = [
        max(y for _, y in points)
        for points in ([p for p in c if math.isfinite(p[1]) and p[1] > 0] for c in curves)
        if points
    ]
    return len(tops) > 1 and max(tops) > ORDERS_APART * min(tops)
