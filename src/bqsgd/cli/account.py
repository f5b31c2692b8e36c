"""`bqsgd account`: what a mechanism guarantees when it is run for a number of rounds."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bqsgd.cli import options
from bqsgd.cli.output import Json, guarantee_lines, message_lines, show, to_json


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
    from bqsgd.mechanism.properties import noise_variance
    from bqsgd.params import Mechanism, check_delta
    from bqsgd.planner.plan import ClientSetting
    from bqsgd.privacy.accountant import Accountant

    check_delta("delta", delta)
    mechanism = Mechanism(levels=levels, trials=trials)
    setting = ClientSetting(
        dimension=dimension,
        batch_size=batch_size,
        dataset_size=dataset_size,
        scheme=sampling.scheme,
        relation=None if relation is None else relation.relation,
        linf=linf,
        l2=l2,
    )
    release, variance = setting.release(mechanism), noise_variance(mechanism)
    accountant = Accountant().compose(release, rounds)
    guarantee, attained = accountant.guarantee(delta=delta), accountant.attained_epsilon(delta)
    fields: dict[str, Any] = {
        "release": release.to_dict(),
        "rounds": rounds,
        "code_count": mechanism.code_count,
        "bits_per_coordinate": mechanism.bits_per_coordinate,
        "variance": variance,
        "guarantee": guarantee.to_dict(),
        "attained_epsilon": attained,
    }
    lines = guarantee_lines(guarantee, attained=attained) | message_lines(mechanism, variance=variance)
    if nominal:
        from bqsgd.cli.paper import nominal_line, nominal_privacy

        found = nominal_privacy(mechanism, setting, delta=delta, rounds=rounds)
        fields["nominal"] = found.to_dict()
        lines["nominal"] = nominal_line(found)
    if json:
        typer.echo(to_json(fields))
    else:
        show(f"Levels {levels}, trials {trials}, {rounds} rounds", lines)
