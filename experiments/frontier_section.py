"""The sections of docs/frontier.md: the frontier's table and the search behind its presets, from their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bqsgd.privacy.guarantee import as_given, method_name, rounded_up


def table(fields: dict[str, Any]) -> str:
    """Our points beside their targets, the curve over bits, the references."""
    rows = [row for row in fields["rows"] if row["mean"] is not None]
    guarantee = next((row["guarantee"] for row in rows), None)
    lines = [
        "## The table",
        "",
        "![Accuracy against epsilon and against bytes](figures/frontier.png)",
        "",
        "| preset | data | bits asked; measured | total ε | accuracy, each seed | mean ± deviation | target "
        "| sent up, MB | times less than float32 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spread = "" if row["deviation"] is None else f" ± {100 * row['deviation']:.2f}"
        target = "" if row["target"] is None else f"{100 * row['target']:.1f}"
        lines.append(
            f"| `{row['preset']}` | {row['dataset']} | {row['bits']}; {row['bits_measured']:.3f} "
            f"| {rounded_up(row['guarantee']['epsilon'])} "
            f"| {', '.join(f'{100 * one:.2f}' for one in row['accuracies'])} "
            f"| **{100 * row['mean']:.2f}**{spread} | {target} | {row['bytes_up'] / 1e6:.1f} "
            f"| {row['bytes_up_float32'] / row['bytes_up']:.1f} |"
        )
    if guarantee is not None:
        lines += [
            "",
            f"ε: total over all rounds at δ = {guarantee['delta']:g}, {guarantee['relation']} {guarantee['unit']}, "
            f"{guarantee['trust']}; {method_name(guarantee['method'])}. The largest of the runs and clients; noise "
            "from the operating system. Rows of `mnist-eps3-4bit` with other bits are the preset with `--bits`.",
        ]
    lines += _simulated(fields["simulated"])
    lines += ["", "References, published figures at δ = 1e-05:", ""]
    lines += ["| | data | accuracy | ε | who sees what | other data |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {one['name']} | {one['dataset']} | {100 * one['accuracy']:.2f} | {as_given(one['epsilon'])} "
        f"| {one['trust']} | {one.get('other_data', 'none')} |"
        for one in fields["references"]
    ]
    return "\n".join(lines)


def _simulated(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Presets whose accuracy is simulated, in a table of their own."""
    if not rows:
        return []
    lines = [
        "",
        "### Secure sums and CIFAR-10, simulated",
        "",
        "Accuracy on the test split of `experiments.sum_simulation`: clips, grids, rounding and noise of the preset's "
        "plan, so that the server gets what it would get from a run with all clients there, but no frames, masks or "
        "ledgers. Nothing is sent, so these rows have no guarantee of their own: ε is what the accountant proves for a "
        "run of the preset (δ = 1e-05, add/remove one sample). `bqsgd train --preset NAME` is that run.",
        "",
        "| preset | data; clients | features; what they saw | who sees what | ε | bits | accuracy, each seed "
        "| mean ± standard error | asked |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spread = "" if row["standard_error"] is None else f" ± {100 * row['standard_error']:.2f}"
        asked = "" if row["target"] is None else f"{100 * row['target']:.1f}"
        lines.append(
            f"| `{row['preset']}` | {row['dataset']}; {row['clients']} "
            f"| {row['features']}; {row['public_data'] or 'no other data'} | {row['trust']} "
            f"| {rounded_up(row['epsilon'])} | {row['bits']:.1f} "
            f"| {', '.join(f'{100 * one:.2f}' for one in row['accuracies'])} "
            f"| **{100 * row['mean']:.2f}**{spread} | {asked} |"
        )
    return lines


def search(fields: dict[str, Any]) -> str:
    """What was tried for each preset, in the order it was tried."""
    lines = ["## The search", "", f"Accuracy on the {fields['held_out']:,} held-out training samples, one seed.", ""]
    for question, rows in fields.items():
        if question == "held_out":
            continue
        shared = {
            key: value for key, value in rows[0]["varied"].items() if all(r["varied"][key] == value for r in rows)
        }
        told = ", ".join(f"{key} {value}" for key, value in shared.items())
        lines += [f"**{question}** ({told}):", ""]
        for row in rows:
            varied = ", ".join(f"{key} {value}" for key, value in row["varied"].items() if key not in shared)
            lines.append(f"- {varied}: {100 * row['held_out_accuracy']:.2f} %")
        lines.append("")
    return "\n".join(lines).rstrip()


def sketch(fields: dict[str, Any]) -> str:
    """The first look behind the presets of sums, in the order it was taken."""
    lines = [
        "## The first look at sums",
        "",
        "Accuracy on the held-out training samples, one run each, of `experiments.frontier_sketch` (principal "
        "directions of the features, Gaussian noise of the plan's variance). Differences below 0.3 points are noise. "
        "The test split was not looked at.",
        "",
    ]
    for question, rows in fields.items():
        if question == "note":
            continue
        lines += [f"**{question}**:", ""]
        for row in rows:
            told = ", ".join(f"{key} {value}" for key, value in row["varied"].items())
            lines.append(f"- {told}: {100 * row['held_out_accuracy']:.2f} %")
        lines.append("")
    return "\n".join(lines).rstrip()
