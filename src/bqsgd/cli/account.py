"""`bqsgd account`: what a mechanism guarantees when it is run for a number of rounds."""

from __future__ import annotations

from typing import Annotated

import typer

from bqsgd.cli import options
from bqsgd.cli.output import Json, answer


def account(
    levels: options.Levels,
    trials: options.Trials,
    dimension: options.Dimension,
    batch_size: options.BatchSize,
    dataset_size: options.DatasetSize,
    rounds: Annotated[int, typer.Option(help="Messages that the client sends.", min=1)],
    delta: Annotated[float, typer.Option(help="Delta of the total.")],
    sampling: options.Sampling = options.SamplingChoice.POISSON,
    relation: options.Relation = None,
    linf: options.Linf = None,
    l2: options.L2 = None,
    nominal: options.Nominal = False,
    json: Json = False,
) -> None:
    """State the privacy that a mechanism guarantees to one client over all rounds.

    Example: bqsgd account --levels 1 --trials 251 --delta 1e-5 --dimension 61706 --batch-size 32 --dataset-size 15000
    --rounds 1000
    """
    import bqsgd

    found = bqsgd.account(
        levels=levels,
        trials=trials,
        dimension=dimension,
        batch_size=batch_size,
        dataset_size=dataset_size,
        rounds=rounds,
        delta=delta,
        sampling=sampling.value,
        relation=None if relation is None else relation.value,
        linf=linf,
        l2=l2,
    )
    published = None
    if nominal:
        from bqsgd.cli.paper import nominal_privacy

        published = nominal_privacy(found.release.mechanism, found.setting, delta=delta, rounds=rounds)
    answer(found, nominal=published, json=json)
