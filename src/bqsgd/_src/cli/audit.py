"""`bqsgd audit`: run the real encoder, or real clients from end to end, and bound epsilon from below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bqsgd._src.cli import _options as options
from bqsgd._src.cli.output import Json, answer

if TYPE_CHECKING:
    from bqsgd._src.audit import AuditResult, Source


def audit(
    levels: options.LevelsOption,
    trials: options.TrialsOption,
    dimension: options.DimensionOption,
    batch_size: options.BatchSizeOption,
    dataset_size: options.DatasetSizeOption,
    delta: Annotated[float, typer.Option(help="Delta at which epsilon is bounded.")],
    end_to_end: Annotated[
        bool,
        typer.Option(
            "--end-to-end",
            help="Run real clients from their data to their frames (linear model, per-sample clamp), "
            "not the encoder alone.",
        ),
    ] = False,
    rounds: Annotated[int, typer.Option(help="Messages in one run.", min=1)] = 1,
    samples: Annotated[int, typer.Option(help="Runs with the record, and as many without.", min=4)] = 4000,
    confidence: Annotated[float, typer.Option(help="Probability that the audit's statements hold.")] = 0.99,
    audit_dimension: Annotated[
        int | None, typer.Option(help="Audit only this many coordinates: faster, with a weaker bound.", min=1)
    ] = None,
    sampling: options.SamplingOption = "poisson",
    linf: options.LinfOption = None,
    json: Json = False,
) -> None:
    """Bound epsilon from below by running the encoder on worst-case inputs with and without a record.

    With --end-to-end everything before the encoder runs too: data, sampling,
    clip and frame. Exit code 1 means a violation: what ran is less private
    than claimed. Passing proves nothing.

    Example: bqsgd audit --levels 2 --trials 251 --dimension 61706 --batch-size 32 --dataset-size 15000 --delta 1e-5
    --sampling none

    Example: bqsgd audit --end-to-end --levels 8 --trials 60 --dimension 64 --batch-size 16 --dataset-size 64
    --delta 1e-3
    """
    from dataclasses import replace

    from bqsgd._src.audit import EncoderRuns, canary_runs
    from bqsgd._src.audit import audit as run_audit
    from bqsgd._src.errors import InvalidParameter
    from bqsgd._src.noise import privacy_rng
    from bqsgd._src.params import Mechanism
    from bqsgd._src.privacy.accountant import Accountant
    from bqsgd._src.release import SAMPLINGS, Release, Terms

    if audit_dimension is not None and audit_dimension > dimension:
        raise InvalidParameter(f"--audit-dimension must be at most --dimension ({dimension}), got {audit_dimension}")
    if end_to_end and linf is not None:
        raise InvalidParameter("--linf does not go with --end-to-end: there the sensitivity is that of the client")
    mechanism = Mechanism(levels=levels, trials=trials)
    audited = dimension if audit_dimension is None else audit_dimension
    source: Source
    if end_to_end:
        import torch

        from bqsgd._src.settings.config import Config

        torch.set_num_threads(1)  # the models are small: threads would only wait for one another
        config = Config.of(
            clients=1,
            sampling=sampling,
            batch_size=batch_size,
            clip="clamp",
            clip_bound=1.0,
            levels=levels,
            trials=trials,
        )  # of a client with a per-sample clamp; what it states of itself is the claim
        source = canary_runs(config, dimension=audited, dataset_size=dataset_size, rounds=rounds)
        claim = source.release
    else:
        terms = Terms.of_batch(
            dimension=audited,
            batch_size=batch_size,
            dataset_size=dataset_size,
            scheme=SAMPLINGS[sampling],
            linf=linf,
        )
        claim = Release(mechanism=mechanism, terms=terms)
        source = EncoderRuns(claim, rng=privacy_rng(), rounds=rounds)
    result = run_audit(source, claim=claim, samples=samples, delta=delta, confidence=confidence)
    fields = {"path": "data to frame" if end_to_end else "encoder", **result.to_dict(), "dimension": dimension}
    lines = audit_lines(result)
    if claim.terms.dimension < dimension:
        all_coordinates = replace(claim, terms=replace(claim.terms, dimension=dimension))
        whole = Accountant().compose(all_coordinates, rounds).guarantee(delta=delta)
        fields["claimed_whole"] = whole.to_dict()
        lines["coordinates"] = f"only {claim.terms.dimension} of {dimension} were audited; claimed for all: {whole}"
    answer(f"Audit of levels {levels}, trials {trials} ({fields['path']})", lines, fields, json=json)
    if result.violated:
        raise typer.Exit(1)


def audit_lines(result: AuditResult) -> dict[str, str]:
    """What an audit found, in words; lower bounds are rounded down."""
    from bqsgd._src.privacy.guarantee import rounded_down

    return {
        "verdict": result.verdict,
        "audited": f"epsilon at least {rounded_down(result.lower.epsilon)} at delta {result.claimed.delta:g}, "
        f"confidence {result.confidence:g}, {result.samples} runs on each side",
        "claimed": str(result.claimed),
    }
