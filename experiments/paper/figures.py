"""Figures 1 and 2 of the paper, and the trade-off as curves (the MNIST setting); nothing is trained."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from experiments.lab import Options

from bqsgd._src.paper.figures import draw_figure_1, draw_figure_2, draw_tradeoffs
from bqsgd._src.paper.published import MNIST, ROWS
from bqsgd._src.paper.tradeoffs import Problem, curves_over_bits, curves_over_epsilon

PROBLEM = Problem(
    setting=MNIST.nominal,
    dimension=61_706,
    clip=MNIST.clip,
    rounds=MNIST.rounds,
    clients=MNIST.clients,
    learning_rate=MNIST.learning_rate,
    initial_gap=float(np.log(10)),
    gradient_variance=1.0,
)
"""initial_gap: ten classes, untrained. gradient_variance is assumed; it moves the bound of all curves alike."""


def figure1(options: Options) -> dict[str, Any]:
    """What quantisation and BQ make of two neighbouring values (s = 10, m = 1); the law of every outcome is exact."""
    return draw_figure_1(options.figures / "figure1.png")


def figure2(options: Options) -> dict[str, Any]:
    """The density of BQ's noise against the binomial law and the Gaussian.

    For s = 2 and m = 10: few enough trials to see the steps (the paper does not name its own).
    """
    return draw_figure_2(options.figures / "figure2.png")


def tradeoffs(options: Options) -> dict[str, Any]:
    """Both families of curves, at the budgets of the published MNIST rows."""
    rows = [row for row in ROWS if row.setting is MNIST]
    over_bits = curves_over_bits(PROBLEM, epsilons=sorted({row.epsilon for row in rows}), bits=range(6, 17))
    grid = [float(value) for value in np.geomspace(0.5, 50, 41)]
    over_epsilon = curves_over_epsilon(PROBLEM, epsilons=grid, bits=sorted({row.bits for row in rows}))
    for name, curves in zip(("fixed_epsilon", "fixed_bits"), (over_bits, over_epsilon), strict=True):
        draw_tradeoffs(curves, options.figures / f"tradeoffs_{name}.png", delta=MNIST.delta)
    return {
        "caveat": "nominal epsilon: as published; not a guarantee",
        "problem": asdict(PROBLEM),
        "fixed_epsilon": [asdict(curve) for curve in over_bits],
        "fixed_bits": [asdict(curve) for curve in over_epsilon],
    }
