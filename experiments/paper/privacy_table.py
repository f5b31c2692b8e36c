"""The ten settings of the paper's tables: nominal epsilon, proven epsilon, audited lower bound, for two clips.

python -m experiments.paper.privacy_table  # runs everything (about ten minutes on one core), writes both
"""

from __future__ import annotations

from typing import Any

from experiments.paper.published import ROWS, PublishedRow
from experiments.paper.tables import guarantee_fields

from bqsgd._src.audit.bound import audit
from bqsgd._src.audit.encoder import EncoderRuns
from bqsgd._src.noise import privacy_rng
from bqsgd._src.paper.nominal import NominalPrivacy
from bqsgd._src.params import Mechanism
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.privacy.guarantee import method_name, rounded_down, rounded_up
from bqsgd._src.release import Release, Terms
from experiments import lab, pages

RESULTS = lab.RESULTS / "privacy_table.json"
DIMENSIONS = {"LeNet-5": 61_706, "AlexNet": 1_158_010}
DELTA, CONFIDENCE = 1e-5, 0.99
MESSAGE_SAMPLES, RUN_SAMPLES, MOST_AUDITED = 10_000, 120, 61_706
CLIPS = {"per-sample clamp": None, "batch-mean clip": 2.0}
"""Most one sample moves a coordinate, in clip ranges: 1/batch (the default) or the whole range."""


def release(row: PublishedRow, *, scheme: str, linf: float | None, dimension: int) -> Release:
    """What one message of the row reveals."""
    batch, held = row.setting.batch_size, row.setting.dataset_size
    terms = Terms.of_batch(dimension=dimension, batch_size=batch, dataset_size=held, scheme=scheme, linf=linf)
    return Release(mechanism=row.corrected, terms=terms)


def audited(what: Release, *, rounds: int, samples: int) -> dict[str, Any]:
    """The lower bound of the real encoder, operating-system noise."""
    source = EncoderRuns(what, rng=privacy_rng(), rounds=rounds)
    result = audit(source, claim=what, samples=samples, delta=DELTA, confidence=CONFIDENCE)
    fields = result.to_dict()
    del fields["release"], fields["note"]
    return fields | {"claimed": guarantee_fields(result.claimed)}


def clip_fields(row: PublishedRow, linf: float | None) -> dict[str, Any]:
    """The proven total, and the audits of one message and (where a run fits) of the whole training."""
    dimension, rounds = DIMENSIONS[row.setting.model], row.setting.rounds
    whole = release(row, scheme="poisson", linf=linf, dimension=dimension)
    one = release(row, scheme="no sampling", linf=linf, dimension=min(dimension, MOST_AUDITED))
    fields = {
        "linf": whole.sensitivity.linf,
        "exact": guarantee_fields(Accountant().compose(whole, rounds).guarantee(delta=DELTA)),
        "one_message": audited(one, rounds=1, samples=MESSAGE_SAMPLES),
    }
    if linf is None and dimension <= MOST_AUDITED:
        fields["all_rounds"] = audited(whole, rounds=rounds, samples=RUN_SAMPLES)
    return fields


def pair(mechanism: Mechanism) -> dict[str, int]:
    """Levels and trials."""
    return {"levels": mechanism.levels, "trials": mechanism.trials}


def compute() -> dict[str, Any]:
    """All ten rows."""
    rows = []
    for row in ROWS:
        print(row.setting.dataset, row.bits, row.epsilon, flush=True)
        nominal = NominalPrivacy.of(row.corrected, row.setting.nominal, rounds=row.setting.rounds)
        rows.append(
            {
                "dataset": row.setting.dataset,
                "model": row.setting.model,
                "dimension": DIMENSIONS[row.setting.model],
                "rounds": row.setting.rounds,
                "bits": row.bits,
                "printed": pair(row.printed),
                "mechanism": pair(row.corrected),
                "published_epsilon": row.epsilon,
                "nominal": nominal.to_dict(),
                "clips": {name: clip_fields(row, linf) for name, linf in CLIPS.items()},
            }
        )
    return {"delta": DELTA, "confidence": CONFIDENCE, "rows": rows}


def _batch_mean(clips: list[dict[str, Any]]) -> str:
    """What all settings have in common with a clip of the batch's mean."""
    guarantees = [part for clip in clips for part in (clip["exact"], clip["one_message"]["claimed"])]
    (proven,) = {guarantee["epsilon_text"] for guarantee in guarantees}  # unpacking fails if settings differ
    (audited,) = {lower(clip["one_message"]) for clip in clips}
    return (
        f"In each of the ten settings, whatever the batch size, the proven epsilon is {proven}, of all rounds and of "
        f"one message. Audited, one message: {audited}."
    )


def section(results: dict[str, Any]) -> str:
    """The last section of docs/paper.md, every figure from the results."""
    first = results["rows"][0]["clips"]["per-sample clamp"]
    total, one = first["exact"], first["one_message"]
    runs = first["all_rounds"]["samples"]
    lines = [
        "## What the published settings guarantee",
        "",
        "Made by `python -m experiments.paper.privacy_table` from "
        "`experiments/results/privacy_table.json`; do not edit.",
        "",
        "The ten settings of the paper's Tables 2 and 3 (misprinted pairs corrected, see [errata](paper.md#errata)).",
        "",
        "- **Nominal epsilon** is the paper's figure, as published; not a guarantee. One round, and Theorem 1's total.",
        f"- **Proven epsilon** is an upper bound: delta {results['delta']:g}, {total['relation']} {total['unit']}, "
        f"worst case over data, {total['trust']}; {method_name(total['method'])}. "
        f"All rounds: {total['sampling'].split(',')[0]}.",
        "  Every coordinate of the model counts (AlexNet narrowed for 28 x 28 images; the original has 50 times as "
        "many).",
        "- **Audited** is a lower bound on epsilon at the same delta, measured on the real encoder with worst-case "
        f"inputs and operating-system noise, each with confidence {results['confidence']:g}. n runs can show at most",
        f"  about log(n/12): {one['samples']} runs per side for one message, {runs} for all rounds. "
        "Passing an audit proves nothing; it would find a fault.",
        "- **One message** is a single message in which the record certainly takes part: sampling does not help. For "
        f"AlexNet {MOST_AUDITED:,} of its coordinates are audited, and the proven figure beside it is for those.",
        "",
        "### Per-sample clamp (one sample moves a coordinate by at most C/32)",
        "",
        "| setting | rounds | levels, trials | nominal, round | nominal, total | proven, all rounds "
        "| audited, all rounds | proven, one message | audited, one message |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        clip, nominal = row["clips"]["per-sample clamp"], row["nominal"]
        whole = clip.get("all_rounds")
        lines.append(
            f"| {setting(row)} | {row['rounds']} | {row['mechanism']['levels']}, {row['mechanism']['trials']} "
            f"| {row['published_epsilon']} (delta {nominal['setting']['delta']:g}) "
            f"| {rounded_up(nominal['epsilon_total'])} (delta {nominal['delta_total']:g}) "
            f"| {clip['exact']['epsilon_text']} | {'not run' if whole is None else lower(whole)} "
            f"| {clip['one_message']['claimed']['epsilon_text']} | {lower(clip['one_message'])} |"
        )
    lines += [
        "",
        "### Batch-mean clip (one sample may move a coordinate over the whole range, 2C)",
        "",
        _batch_mean([row["clips"]["batch-mean clip"] for row in results["rows"]]),
    ]
    return "\n".join(lines)


def setting(row: dict[str, Any]) -> str:
    """The row's name."""
    return f"{row['dataset']}, {row['bits']} bits, {row['published_epsilon']}"


def lower(fields: dict[str, Any]) -> str:
    """An audited figure, or the alarm."""
    violated = " **VIOLATION**" if fields["verdict"] == "violation" else ""
    return f"≥ {rounded_down(fields['epsilon_lower'], 3)}{violated}"


if __name__ == "__main__":
    lab.write_json(RESULTS, compute())
    pages.write()
