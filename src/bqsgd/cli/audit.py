"""`bqsgd audit`: run the real encoder, or real clients from end to end, and bound epsilon from below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bqsgd.cli import _options as options
from bqsgd.cli.output import Json, print_lines, to_json

if TYPE_CHECKING:
    from bqsgd.audit import AuditResult, ClientRuns, Source
    from bqsgd.params import Mechanism
    from bqsgd.planner.plan import ClientSetting


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
    sampling: options.SamplingOption = options.SamplingChoice.POISSON,
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

    from bqsgd.audit import EncoderRuns
    from bqsgd.audit import audit as run_audit
    from bqsgd.errors import InvalidParameter
    from bqsgd.noise import privacy_rng
    from bqsgd.params import Mechanism
    from bqsgd.planner.plan import ClientSetting
    from bqsgd.privacy.accountant import Accountant
    from bqsgd.release import SAMPLINGS

    if audit_dimension is not None and audit_dimension > dimension:
        raise InvalidParameter(f"--audit-dimension must be at most --dimension ({dimension}), got {audit_dimension}")
    if end_to_end and linf is not None:
        raise InvalidParameter("--linf does not go with --end-to-end: there the sensitivity is that of the client")
    mechanism = Mechanism(levels=levels, trials=trials)
    setting = ClientSetting(
        dimension=dimension if audit_dimension is None else audit_dimension,
        batch_size=batch_size,
        dataset_size=dataset_size,
        scheme=SAMPLINGS[sampling.value],
        linf=linf,
    )
    source: Source
    if end_to_end:
        source = _clients(setting, mechanism, sampling=sampling, rounds=rounds)
        claim = source.release
    else:
        claim = setting.release(mechanism)
        source = EncoderRuns(claim, rng=privacy_rng(), rounds=rounds)
    result = run_audit(source, claim=claim, samples=samples, delta=delta, confidence=confidence)
    fields = {"path": "data to frame" if end_to_end else "encoder", **result.to_dict(), "dimension": dimension}
    lines = audit_lines(result)
    if claim.dimension < dimension:
        whole = Accountant().compose(replace(claim, dimension=dimension), rounds).guarantee(delta=delta)
        fields["claimed_whole"] = whole.to_dict()
        lines["coordinates"] = f"only {claim.dimension} of {dimension} were audited; claimed for all: {whole}"
    if json:
        typer.echo(to_json(fields))
    else:
        print_lines(f"Audit of levels {levels}, trials {trials} ({fields['path']})", lines)
    if result.violated:
        raise typer.Exit(1)


def audit_lines(result: AuditResult) -> dict[str, str]:
    """What an audit found, in words; lower bounds are rounded down."""
    from bqsgd.privacy.guarantee import rounded_down

    return {
        "verdict": result.verdict,
        "audited": f"epsilon at least {rounded_down(result.lower.epsilon)} at delta {result.claimed.delta:g}, "
        f"confidence {result.confidence:g}, {result.samples} runs on each side",
        "claimed": str(result.claimed),
    }


def _clients(
    setting: ClientSetting, mechanism: Mechanism, *, sampling: options.SamplingChoice, rounds: int
) -> ClientRuns:
    """Clients with a per-sample clamp; what they state of themselves is the claim."""
    import torch

    from bqsgd.audit import canary_runs
    from bqsgd.training.settings import Config

    torch.set_num_threads(1)  # the models are small: threads would only wait for one another
    config = Config.of(
        clients=1,
        sampling=sampling.value,
        batch_size=setting.batch_size,
        clip="clamp",
        clip_bound=1.0,
        levels=mechanism.levels,
        trials=mechanism.trials,
    )
    return canary_runs(config, dimension=setting.dimension, dataset_size=setting.dataset_size, rounds=rounds)
