"""`bqsgd audit`: run the real encoder many times and bound epsilon from below."""

from __future__ import annotations

from typing import Annotated

import typer

from bqsgd.cli import client_options as options
from bqsgd.cli.output import Json, emit


def audit(
    levels: options.Levels,
    trials: options.Trials,
    dimension: options.Dimension,
    batch_size: options.BatchSize,
    dataset_size: options.DatasetSize,
    delta: Annotated[float, typer.Option(help="Delta at which epsilon is bounded.")],
    rounds: Annotated[int, typer.Option(help="Messages in one run.", min=1)] = 1,
    samples: Annotated[int, typer.Option(help="Runs with the record, and as many without.", min=4)] = 2000,
    confidence: Annotated[float, typer.Option(help="Probability that the audit's statements hold.")] = 0.99,
    audit_dimension: Annotated[
        int | None, typer.Option(help="Audit only so many coordinates: faster, and a weaker bound.", min=1)
    ] = None,
    sampling: options.Sampling = options.SamplingChoice.POISSON,
    linf: options.Linf = None,
    json: Json = False,
) -> None:
    """Bound epsilon from below by running the encoder on worst-case inputs with and without a record.

    Exit code 1 means a violation: the encoder is less private than claimed. Passing proves nothing.

    Example: bqsgd audit --levels 2 --trials 251 --dimension 61706 --batch-size 32 --dataset-size 15000 --delta 1e-5
    --sampling none
    """
    from dataclasses import replace

    from bqsgd.audit import audit as run_audit
    from bqsgd.errors import InvalidParameter
    from bqsgd.noise import privacy_rng
    from bqsgd.params import Mechanism
    from bqsgd.planner.plan import ClientSetting
    from bqsgd.privacy.accountant import Accountant

    setting = ClientSetting(
        dimension=dimension, batch_size=batch_size, dataset_size=dataset_size, scheme=sampling.scheme, linf=linf
    )
    release = setting.release(Mechanism(levels=levels, trials=trials))
    if audit_dimension is not None and audit_dimension > dimension:
        raise InvalidParameter(f"--audit-dimension must be at most --dimension ({dimension}), got {audit_dimension}")
    audited = release if audit_dimension is None else replace(release, dimension=audit_dimension)
    result = run_audit(audited, rounds=rounds, samples=samples, delta=delta, confidence=confidence, rng=privacy_rng())
    fields = result.to_dict() | {"dimension": dimension}
    notes = [result.verdict, f"Claimed for the audited coordinates: {result.claimed}."]
    if audited is not release:
        whole = Accountant().compose(release, rounds).guarantee(delta=delta)
        fields["claimed_whole"] = whole.to_dict()
        notes.append(f"Only {audited.dimension} of {dimension} coordinates were audited. Claimed for all: {whole}.")
    if not json:
        del fields["release"], fields["note"]
    emit(fields, as_json=json, title=f"Audit of levels {levels}, trials {trials}", notes=tuple(notes))
    if result.violated:
        raise typer.Exit(1)
