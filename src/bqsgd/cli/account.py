"""`bqsgd account`: what a mechanism, run for so many rounds, guarantees."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bqsgd.cli import client_options as options
from bqsgd.cli.output import Json, emit
from bqsgd.cli.privacy_fields import NOMINAL_NOTE, guarantee_fields, nominal_fields


def account(
    levels: Annotated[int, typer.Option(help="Quantisation levels of the mechanism, s.")],
    trials: Annotated[int, typer.Option(help="Binomial trials of the mechanism, m.")],
    dim: options.Dim,
    batch: options.Batch,
    dataset_size: options.DatasetSize,
    rounds: Annotated[int, typer.Option(help="Messages the client sends.", min=1)],
    delta: Annotated[float, typer.Option(help="Delta: of the total (exact), of one round (paper).")],
    method: options.Method = options.MethodChoice.EXACT,
    sampling: options.Sampling = options.SamplingChoice.POISSON,
    relation: options.Relation = None,
    linf: options.Linf = None,
    l2: options.L2 = None,
    nominal_dim: options.NominalDim = None,
    json: Json = False,
) -> None:
    """State what privacy a mechanism gives one client over all rounds.

    Example: bqsgd account --levels 1 --trials 251 --delta 1e-5 --dim 61706 --batch 32 --dataset-size 15000
    --rounds 1000
    """
    from bqsgd.params import Mechanism
    from bqsgd.planner.plan import release_of
    from bqsgd.privacy.nominal import NominalPrivacy, NominalSetting

    mechanism = Mechanism(levels=levels, trials=trials)
    release = release_of(
        mechanism,
        dimension=dim,
        batch_size=batch,
        dataset_size=dataset_size,
        scheme=sampling.scheme,
        relation=None if relation is None else relation.relation,
        linf=linf,
        l2=l2,
    )
    setting = NominalSetting(
        dimension=dim if nominal_dim is None else nominal_dim, batch_size=batch, dataset_size=dataset_size, delta=delta
    )
    fields: dict[str, Any] = {"levels": levels, "trials": trials, "code_count": mechanism.code_count, "rounds": rounds}
    notes: tuple[str, ...] = (NOMINAL_NOTE,)
    if method is options.MethodChoice.EXACT:
        from bqsgd.privacy.accountant import Accountant

        guarantee = Accountant().compose(release, rounds).guarantee(delta=delta)
        fields |= guarantee_fields(guarantee, as_json=json)
        notes = (f"Guarantee: {guarantee}.", NOMINAL_NOTE)
    if trials:
        fields |= nominal_fields(NominalPrivacy.of(mechanism, setting, rounds=rounds))
    elif method is options.MethodChoice.PAPER:
        NominalPrivacy.of(mechanism, setting, rounds=rounds)  # raises: no noise has no nominal epsilon
    emit(fields, as_json=json, title=f"Privacy of levels {levels}, trials {trials} over {rounds} rounds", notes=notes)
