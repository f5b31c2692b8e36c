"""The paper's tables and figures as Markdown, every number from its JSON."""

from __future__ import annotations

from typing import Any

from bqsgd._src.privacy.guarantee import method_name, rounded_up

CLIPS = ("batch-mean", "clamp")


def _percent(value: float | None) -> str:
    return "not run" if value is None else f"{100 * value:.2f}"


def _accuracy(clip: dict[str, Any]) -> str:
    """Mean, deviation over the seeds where there are several, and how many they were."""
    if clip["mean"] is None:
        return "not run"
    spread = "" if clip["deviation"] is None else f" ± {100 * clip['deviation']:.2f}"
    return f"{_percent(clip['mean'])}{spread} ({len(clip['seeds'])})"


def _short(exact: dict[str, Any] | None) -> str:
    return "not computed" if exact is None else str(exact["epsilon_text"]).split(":")[0]


def _terms(exact: dict[str, Any], delta: float) -> str:
    return (
        f"Proven epsilon (an upper bound): all rounds, delta {delta:g}, {exact['relation']} {exact['unit']}, "
        f"{exact['trust']}; {method_name(exact['method'])}. It is what the run guarantees with "
        "noise from the operating system; these runs are seeded: no privacy claim. Nominal epsilon: one round, delta "
        "beside it; as published; not a guarantee."
    )


def table(fields: dict[str, Any]) -> str:
    """Table 2 or 3, with the published accuracy beside ours."""
    what = "bits fixed, privacy varied" if fields["table"] == 2 else "privacy fixed, bits varied"
    lines = [
        f"## Table {fields['table']}: {what}",
        "",
        "Accuracy in per cent on the test split after the last round, mean ± deviation (number of seeds).",
        "",
        "| data | row | s, m | published | batch-mean clip | per-sample clamp | nominal ε (printed; of the pair) "
        "| proven ε, batch-mean | proven ε, clamp | bits asked | bits measured |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in fields["rows"]:
        batch_mean, clamp = (row["clips"][clip] for clip in CLIPS)
        measured = batch_mean["bits_measured"] or clamp["bits_measured"]
        nominal = row["nominal"]
        lines.append(
            f"| {row['dataset']} | {row['variant']} | {row['levels']}, {row['trials']} "
            f"| {_percent(row['published_accuracy'])} | {_accuracy(batch_mean)} | {_accuracy(clamp)} "
            f"| {row['published_epsilon']}; {rounded_up(nominal['epsilon_per_round'], 5)} "
            f"(δ {nominal['setting']['delta']:g}) "
            f"| {_short(batch_mean['exact'])} | {_short(clamp['exact'])} "
            f"| {row['bits_asked']} | {'not run' if measured is None else format(measured, '.3f')} |"
        )
    notes = dict.fromkeys(row["note"] for row in fields["rows"] if row["note"])
    if fields["table"] == 2:
        lines += ["", _terms(fields["rows"][0]["clips"]["clamp"]["exact"], fields["delta"])]
    return "\n".join([*lines, "", *(f"- Misprint: {note}." for note in notes)])


def table1(fields: dict[str, Any]) -> str:
    """The setting of both data sets."""
    columns = fields["columns"]
    lines = [
        "## Table 1: setting",
        "",
        "| | " + " | ".join(column["published"]["dataset"] for column in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    names = {
        "model": "net",
        "nominal_dimension": "d_P, published",
        "clip": "clip C",
        "learning_rate": "learning rate",
        "batch_size": "batch size L",
        "clients": "clients",
        "dataset_size": "samples per client",
        "rounds": "rounds",
    }
    for key, label in names.items():
        lines.append(f"| {label} | " + " | ".join(str(column["published"][key]) for column in columns) + " |")
    lines.append("| net, ours | " + " | ".join(column["model"] for column in columns) + " |")
    lines.append("| d, parameters of ours | " + " | ".join(f"{column['dimension']:,}" for column in columns) + " |")
    for points in zip(*(column["nominal_dimension_measured"] for column in columns), strict=True):
        measured = " | ".join(f"{point['nominal_dimension']:,.0f}" for point in points)
        lines.append(f"| d_P measured after {points[0]['rounds']} rounds | {measured} |")
    return "\n".join(
        [*lines, "", "d_P = ‖∇l‖₁ / C (the paper's footnote), mean over batches of 32: it depends on data."]
    )


def compare(fields: dict[str, Any]) -> str:
    """BQ-SGD beside its baselines."""
    lines = [
        "## Baselines on the same axes (MNIST)",
        "",
        "![Accuracy against bytes and against proven epsilon](figures/compare.png)",
        "",
        "| message | accuracy, per cent (seeds) | proven ε, all rounds | bytes per update | bits per coordinate "
        "| how |",
        "|---|---|---|---|---|---|",
    ]
    for row in fields["rows"]:
        size = "not run" if row["mean"] is None else f"{row['frame_bytes']:,.0f} | {row['bits_measured']:.3f}"
        epsilon = "no privacy" if row["exact"] is None else _short(row["exact"])
        lines.append(f"| {row['label']} | {_accuracy(row)} | {epsilon} | {size} | {row['note']} |")
    return "\n".join([*lines, "", f"Proven epsilon at delta {fields['delta']:g}, with the terms under Table 2."])


def tradeoffs(fields: dict[str, Any]) -> str:
    """Both families of curves."""
    figures = [f"![{name}](figures/tradeoffs_{name}.png)" for name in ("fixed_epsilon", "fixed_bits")]
    return "\n\n".join(["## Trade-offs", *figures, fields["caveat"].capitalize() + "."])


def figure1(fields: dict[str, Any]) -> str:
    """The figure, and how much mass the two values share."""
    shares = ", ".join(f"{panel['title']}: {panel['shared_mass']:.0%}" for panel in fields["panels"])
    return f"## Figure 1\n\n![Figure 1](figures/figure1.png)\n\nMass of outcomes that both values share: {shares}."


def figure2(fields: dict[str, Any]) -> str:
    """The figure, and how far BQ's density is from the Gaussian's."""
    gap = f"{fields['largest_gap_to_gaussian']:.4f}"
    return f"## Figure 2\n\n![Figure 2](figures/figure2.png)\n\nLargest gap of BQ's density to the Gaussian's: {gap}."
