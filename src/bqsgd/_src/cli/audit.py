"""`bqsgd audit`: run the real encoder, or real clients from end to end, and bound epsilon from below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bqsgd._src.cli import _options as options
from bqsgd._src.cli._options import panel_option
from bqsgd._src.cli.output import Json, answer

if TYPE_CHECKING:
    from bqsgd._src.audit.bound import AuditResult, Source

_AUDIT = "Audit"


def audit(
    levels: options.LevelsOption,
    trials: options.TrialsOption,
    dimension: options.DimensionOption,
    batch_size: options.BatchSizeOption,
    dataset_size: options.DatasetSizeOption,
    delta: Annotated[float, panel_option(_AUDIT, "Delta at which epsilon is bounded.")],
    end_to_end: Annotated[
        bool,
        panel_option(
            _AUDIT,
            "Run real clients from their data to their frames (linear model, per-sample clamp), not the encoder alone.",
            "--end-to-end",
        ),
    ] = False,
    rounds: Annotated[int, panel_option(_AUDIT, "Number of messages in one run.")] = 1,
    samples: Annotated[int, panel_option(_AUDIT, "Number of runs with the record, and as many without it.")] = 4000,
    confidence: Annotated[float, panel_option(_AUDIT, "Probability that what the audit states is true.")] = 0.99,
    audit_dimension: Annotated[
        int | None, panel_option(_AUDIT, "Audit only this many coordinates: faster, but the bound is lower.")
    ] = None,
    sampling: options.SamplingOption = "poisson",
    linf: options.LinfOption = None,
    json: Json = False,
) -> None:
    r"""Measure a lower bound on epsilon by running the encoder with and without one record.

    The encoder's inputs are the worst case. With --end-to-end everything before
    the encoder runs too: data, sampling, clip and frame. Exit code 1 means a
    violation: what ran is less private than claimed. Passing proves nothing.

    Examples:
      bqsgd audit --levels 2 --trials 251 --delta 1e-5 --sampling none \
        --dimension 61706 --batch-size 32 --dataset-size 15000
      bqsgd audit --end-to-end --levels 8 --trials 60 --delta 1e-3 \
        --dimension 64 --batch-size 16 --dataset-size 64
    """
    from dataclasses import replace

    from bqsgd._src.audit.bound import audit as run_audit
    from bqsgd._src.audit.encoder import EncoderRuns
    from bqsgd._src.errors import InvalidParameter
    from bqsgd._src.noise import privacy_rng
    from bqsgd._src.params import Mechanism
    from bqsgd._src.privacy.accountant import Accountant
    from bqsgd._src.release import SAMPLINGS, Release, Terms

    audited = dimension if audit_dimension is None else audit_dimension
    if audited > dimension:
        raise InvalidParameter(f"--audit-dimension must be at most --dimension ({dimension}), got {audited}")
    source: Source
    if end_to_end:
        if linf is not None:
            raise InvalidParameter(
                "--linf cannot be combined with --end-to-end, where the client states its own sensitivity; leave it out"
            )
        import torch

        from bqsgd._src.audit.client import canary_runs
        from bqsgd._src.settings.config import Config

        torch.set_num_threads(1)  # the models are so small that several threads would only wait for one another
        config = Config.of(
            clients=1,
            sampling=sampling,
            batch_size=batch_size,
            clip="clamp",
            clip_bound=1.0,
            levels=levels,
            trials=trials,
        )
        source = canary_runs(config, dimension=audited, dataset_size=dataset_size, rounds=rounds)
        claim = source.release  # what the client states about itself
    else:
        terms = Terms.of_batch(
            dimension=audited,
            batch_size=batch_size,
            dataset_size=dataset_size,
            scheme=SAMPLINGS[sampling],
            linf=linf,
        )
        claim = Release(mechanism=Mechanism(levels=levels, trials=trials), terms=terms)
        source = EncoderRuns(claim, rng=privacy_rng(), rounds=rounds)
    result = run_audit(source, claim=claim, samples=samples, delta=delta, confidence=confidence)
    fields = {"path": "data to frame" if end_to_end else "encoder", **result.to_dict(), "dimension": dimension}
    lines = audit_lines(result)
    if audited < dimension:
        # The audited claim is about fewer coordinates, so its epsilon is smaller. Show the whole message's beside it.
        all_coordinates = replace(claim, terms=replace(claim.terms, dimension=dimension))
        whole = Accountant().compose(all_coordinates, rounds).guarantee(delta=delta)
        fields["claimed_whole"] = whole.to_dict()
        lines["coordinates"] = f"only {audited} of {dimension} were audited; claimed for all: {whole}"
    answer(f"Audit of levels {levels}, trials {trials} ({fields['path']})", lines, fields, json=json)
    if result.violated:
        raise typer.Exit(1)


def audit_lines(result: AuditResult) -> dict[str, str]:
    """The result in words. Lower bounds are rounded down, so that they stay true."""
    from bqsgd._src.privacy.guarantee import rounded_down

    return {
        "verdict": result.verdict,
        "audited": f"epsilon at least {rounded_down(result.lower.epsilon)} at delta {result.claimed.delta:g}, "
        f"confidence {result.confidence:g}, {result.samples} runs on each side",
        "claimed": str(result.claimed),
    }
