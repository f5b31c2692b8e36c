"""BQ-SGD beside its baselines on MNIST: the same clients, batches, rounds and server; only the message differs.

Accuracy, epsilon and measured bytes: one table, one figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments.lab import Options
from experiments.paper.baseline_figure import draw_baselines
from experiments.paper.baselines import noise_for, run_float32
from experiments.paper.published import MNIST
from experiments.paper.runs import results
from experiments.paper.tables import DATASETS, DELTA, QUICK_ROUNDS, exact, guarantee_fields, job, summary

from bqsgd._src.params import Mechanism
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.release import Release, Terms

BQ, QSGD = Mechanism(levels=2, trials=251), Mechanism(levels=127, trials=0)
CLIP_NORM = 0.5
"""Of Gaussian DP-SGD: the library's default, not searched."""


def compare(options: Options) -> dict[str, Any]:
    """All methods. Every message-making method shares the recipe of the tables."""
    seeds, quick, train = options.seeds, options.quick, options.train
    rounds = QUICK_ROUNDS if quick else MNIST.rounds
    proven = exact(MNIST, BQ, clip="clamp", rounds=rounds)
    rate = MNIST.batch_size / MNIST.dataset_size
    noise = 1.0 if quick else noise_for(float(proven["epsilon"]), delta=DELTA, rate=rate, rounds=rounds)
    gaussian = proven | {"method": "privacy loss distribution of the Gaussian (dp-accounting)"}

    def framed(mechanism: Mechanism, clip: str) -> list[dict[str, Any]]:
        wanted = [job(MNIST, mechanism, clip=clip, seed=seed, quick=quick) for seed in seeds]
        return list(results([j for j in wanted if train or j.result.exists()], workers=options.workers).values())

    def float32(name: str, noise_multiplier: float, clip_norm: float | None) -> list[dict[str, Any]]:
        made = [job(MNIST, BQ, clip="batch-mean", seed=seed, quick=quick) for seed in seeds]
        wanted = [replace(one, name=f"{name}-seed{seed}") for one, seed in zip(made, seeds, strict=True)]
        return [
            run_float32(one, noise_multiplier=noise_multiplier, clip_norm=clip_norm)
            for one in wanted
            if train or one.result.exists()
        ]

    clamped, batch_mean = framed(BQ, "clamp"), exact(MNIST, BQ, clip="batch-mean", rounds=rounds)
    described = f"L2 clip {CLIP_NORM:g}, noise multiplier {noise:.3g}, set for the epsilon of BQ's clamp"
    rows = [
        _row("plain, float32", float32("mnist-plain", 0.0, None), None, "no noise, no clip"),
        _row("QSGD, 8 bits", framed(QSGD, "batch-mean"), None, "s = 127, m = 0: quantisation alone is not private"),
        _row("BQ, batch-mean clip", framed(BQ, "batch-mean"), batch_mean, "s = 2, m = 251"),
        _row("BQ, per-sample clamp", clamped, proven, "s = 2, m = 251"),
        _row("BQ, Eq. (6) as written", framed(BQ, "scale"), proven, "s = 2, m = 251; whole gradient scaled to C"),
        _row("cpSGD (CQSGD)", clamped, binomial_alone(BQ, rounds), "the same messages; Step 3 counted alone"),
        _row("Gaussian DP-SGD, float32", float32("mnist-gaussian", noise, CLIP_NORM), gaussian, described),
    ]
    draw_baselines(rows, options.figures / "compare.png", delta=DELTA)
    return {"quick": quick, "rounds": rounds, "delta": DELTA, "rows": rows}


def binomial_alone(mechanism: Mechanism, rounds: int) -> dict[str, Any]:
    """The proven total when the rounding's own randomness does not count: one sample then moves a code a whole step.

    For rounding thresholds that are fixed, two means within C/L round to codes at most ceil(s/L) = 1 step apart, and
    nothing less can be promised. This is the accounting that the paper ascribes to cpSGD, done exactly.
    """
    terms = Terms.of_batch(
        dimension=DATASETS[MNIST.dataset][2],
        batch_size=MNIST.batch_size,
        dataset_size=MNIST.dataset_size,
        linf=-(-mechanism.levels // MNIST.batch_size) / mechanism.levels,
    )
    guarantee = Accountant().compose(Release(mechanism=mechanism, terms=terms), rounds).guarantee(delta=DELTA)
    return guarantee_fields(guarantee)


def _row(label: str, runs: Sequence[dict[str, Any]], guarantee: dict[str, Any] | None, note: str) -> dict[str, Any]:
    claim = runs[0]["claim"] if guarantee is not None and runs else "no privacy"
    return {"label": label, "note": note, **summary(runs), "exact": guarantee, "claim": claim}
