"""The trade-off as curves: privacy fixed and bits varied, bits fixed and privacy varied (the MNIST setting)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bqsgd.paper.figures import draw_tradeoffs
from bqsgd.paper.published import MNIST, ROWS
from bqsgd.paper.tradeoffs import Problem, curves_over_bits, curves_over_epsilon

NAME, FIGURES = "tradeoffs", ("tradeoffs_fixed_epsilon.png", "tradeoffs_fixed_bits.png")
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


def reproduce(*, figures: Path, **unused: Any) -> dict[str, Any]:
    """Both families of curves, at the budgets of the published MNIST rows."""
    rows = [row for row in ROWS if row.setting is MNIST]
    over_bits = curves_over_bits(PROBLEM, epsilons=sorted({row.epsilon for row in rows}), bits=range(6, 17))
    grid = [float(value) for value in np.geomspace(0.5, 50, 41)]
    over_epsilon = curves_over_epsilon(PROBLEM, epsilons=grid, bits=sorted({row.bits for row in rows}))
    for name, curves in zip(FIGURES, (over_bits, over_epsilon), strict=True):
        draw_tradeoffs(curves, figures / name, delta=MNIST.delta)
    return {
        "caveat": "nominal epsilon: as published; not a guarantee",
        "problem": asdict(PROBLEM),
        "fixed_epsilon": [curve.to_dict() for curve in over_bits],
        "fixed_bits": [curve.to_dict() for curve in over_epsilon],
    }
