"""`bqsgd audit`: run the real encoder, or real clients from end to end, and bound epsilon from below."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from bqsgd._src.cli import _options as options
from bqsgd._src.cli._options import MechanismOptions, panel_option, takes
from bqsgd._src.cli.output import Json, answer

if TYPE_CHECKING:
    from bqsgd._src.audit.bound import AuditResult, Source
    from bqsgd._src.release import Release

_AUDIT = "Audit"


@dataclass(frozen=True, kw_only=True)
class AuditOptions(MechanismOptions):
    """The options of `bqsgd audit`."""

    dimension: Annotated[int, options.DIMENSION]
    batch_size: options.BatchSize
    dataset_size: options.DatasetSize
    delta: Annotated[float, panel_option(_AUDIT, "Delta at which epsilon is bounded.")]
    end_to_end: Annotated[
        bool,
        panel_option(
            _AUDIT,
            "Run real clients from their data to their frames (linear model, per-sample clamp), not the encoder alone.",
            "--end-to-end",
        ),
    ] = False
    rounds: Annotated[int, panel_option(_AUDIT, "Number of messages in one run.")] = 1
    samples: Annotated[int, panel_option(_AUDIT, "Number of runs with the record, and as many without it.")] = 4000
    confidence: Annotated[float, panel_option(_AUDIT, "Probability that what the audit states is true.")] = 0.99
    audit_dimension: Annotated[
        int | None, panel_option(_AUDIT, "Audit only this many coordinates: faster, but the bound is lower.")
    ] = None
    sampling: options.Sampling = "poisson"
    linf: options.Linf = None
    json: Json = False

    @property
    def audited(self) -> int:
        """How many coordinates are audited."""
        return self.dimension if self.audit_dimension is None else self.audit_dimension


@takes(AuditOptions)
def audit(asked: AuditOptions) -> None:
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
    from bqsgd._src.audit.bound import audit as run_audit
    from bqsgd._src.errors import InvalidParameter
    from bqsgd._src.privacy.accountant import Accountant

    audited, dimension = asked.audited, asked.dimension
    if audited > dimension:
        raise InvalidParameter(f"--audit-dimension must be at most --dimension ({dimension}), got {audited}")
    source, claim = _clients(asked) if asked.end_to_end else _encoder(asked)
    result = run_audit(source, claim=claim, samples=asked.samples, delta=asked.delta, confidence=asked.confidence)
    path = "data to frame" if asked.end_to_end else "encoder"
    fields, lines = {"path": path, **result.to_dict(), "dimension": dimension}, audit_lines(result)
    if audited < dimension:
        # The audited claim is about fewer coordinates, so its epsilon is smaller. Show the whole message's beside it.
        all_coordinates = replace(claim, terms=replace(claim.terms, dimension=dimension))
        whole = Accountant().compose(all_coordinates, asked.rounds).guarantee(delta=asked.delta)
        fields["claimed_whole"] = whole.to_dict()
        lines["coordinates"] = f"only {audited} of {dimension} were audited; claimed for all: {whole}"
    answer(f"Audit of levels {asked.levels}, trials {asked.trials} ({path})", lines, fields, json=asked.json)
    if result.violated:
        raise typer.Exit(1)


def _clients(asked: AuditOptions) -> tuple[Source, Release]:
    """Real clients, and what they state about themselves."""
    import torch

    from bqsgd._src.audit.client import canary_runs
    from bqsgd._src.errors import InvalidParameter
    from bqsgd._src.settings.config import Config

    if asked.linf is not None:
        raise InvalidParameter(
            "--linf cannot be combined with --end-to-end, where the client states its own sensitivity; leave it out"
        )
    torch.set_num_threads(1)  # the models are so small that several threads would only wait for one another
    own = {name: getattr(asked, name) for name in ("sampling", "batch_size", "levels", "trials")}
    config = Config.of(clients=1, clip="clamp", clip_bound=1.0, **own)
    runs = canary_runs(config, dimension=asked.audited, dataset_size=asked.dataset_size, rounds=asked.rounds)
    return runs, runs.release


def _encoder(asked: AuditOptions) -> tuple[Source, Release]:
    """The encoder alone, and the claim for its messages."""
    from bqsgd._src.audit.encoder import EncoderRuns
    from bqsgd._src.noise import privacy_rng
    from bqsgd._src.params import Mechanism
    from bqsgd._src.release import SAMPLINGS, Release, Terms

    own = {name: getattr(asked, name) for name in ("batch_size", "dataset_size", "linf")}
    terms = Terms.of_batch(dimension=asked.audited, scheme=SAMPLINGS[asked.sampling], **own)
    claim = Release(mechanism=Mechanism(levels=asked.levels, trials=asked.trials), terms=terms)
    return EncoderRuns(claim, rng=privacy_rng(), rounds=asked.rounds), claim


def audit_lines(result: AuditResult) -> dict[str, str]:
    """The result in words. Lower bounds are rounded down, so that they stay true."""
    from bqsgd._src.privacy.guarantee import rounded_down

    return {
        "verdict": result.verdict,
        "audited": f"epsilon at least {rounded_down(result.lower.epsilon)} at delta {result.claimed.delta:g}, "
        f"confidence {result.confidence:g}, {result.samples} runs on each side",
        "claimed": str(result.claimed),
    }
