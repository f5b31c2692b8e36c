"""The sections of docs/frontier.md: the frontier's table and the search behind its presets, from their JSON."""

from __future__ import annotations

from typing import Any

from bqsgd._src.privacy.guarantee import as_given, method_name, rounded_up

CHANGED = "°"
"""Marks a point with a run of files that no commit holds."""


def table(fields: dict[str, Any]) -> str:
    """Our points beside their targets, the curve over bits, the references."""
    rows = [row for row in fields["rows"] if row["mean"] is not None]
    lines = [
        "## The table",
        "",
        "![Accuracy against epsilon and against bytes](figures/frontier.png)",
        "",
        "| run | data; clients | features; what they saw | who sees what | total ε | bits | accuracy, each seed "
        "| mean ± standard error | target | a client sends, MB; times less than float32 | a client receives, MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(row) for row in rows]
    if rows:
        guarantee = rows[0]["guarantee"]
        methods = sorted({method_name(row["guarantee"]["method"]) for row in rows})
        lines += [
            "",
            f"ε: total over all rounds at δ = {guarantee['delta']:g}, {guarantee['relation']} {guarantee['unit']}; "
            f"{' or '.join(methods)}. The largest of the runs and clients; noise from the operating system. Bits: as "
            "measured, headers and keys included. A run is `bqsgd train --preset NAME`; one with other bits is the "
            "preset with `--bits`, of sums with the levels and trials that `bqsgd plan --secure --bits` finds; one "
            "with another share of the coordinates has `--one-in`, a centred one `--method centred`; in one that is "
            "fitted the recipe "
            "chooses the range and the share.",
        ]
        if any(row["changed"] for row in rows):
            lines[-1] += (
                f" {CHANGED}: while such a run was made, files differed from those of the commit that it names."
            )
    lines += _fitted(rows)
    lines += ["", "References, published figures at δ = 1e-05:", ""]
    lines += ["| | data | accuracy | ε | who sees what | other data |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {one['name']} | {one['dataset']} | {100 * one['accuracy']:.2f} | {as_given(one['epsilon'])} "
        f"| {one['trust']} | {one.get('other_data', 'none')} |"
        for one in fields["references"]
    ]
    return "\n".join(lines)


def sums_gain(fields: dict[str, Any]) -> str:
    """What secure sums gain: the presets of epsilon 3 with and without them.

    The runs that sent every coordinate stand in for a preset that has none yet.
    """
    points = {row["point"]: row for row in fields["rows"]}
    lines = [
        "| data | clients | sums only, % (epsilon) | each message, % (epsilon) | bits of a sum; of a message |",
        "|---|---:|---:|---:|---:|",
    ]
    for data, preset in (("MNIST", "mnist-eps3"), ("Fashion-MNIST", "fashion-eps3")):
        for clients, after in ((4, ""), (100, "-100")):
            names = (f"{preset}-sums{after}", f"{preset}{after}")
            pair = [points[name] if points[name]["mean"] else points[f"{name}-one-in-1"] for name in names]
            cells = [f"{100 * row['mean']:.2f} ({rounded_up(row['guarantee']['epsilon'])})" for row in pair]
            bits = "; ".join(f"{row['bits_measured']:.2f}" for row in pair)
            lines.append(f"| {data} | {clients} | {' | '.join(cells)} | {bits} |")
    return "\n".join(lines)


def _fitted(rows: list[dict[str, Any]]) -> list[str]:
    """The runs whose range and share the recipe chose, beside their presets."""
    means = {row["point"]: 100 * row["mean"] for row in rows}
    pairs = [row for row in rows if row["fitted"] and row["preset"] in means]
    if not pairs:
        return []
    told = ", ".join(
        f"`{row['preset']}` {100 * row['mean']:.2f} ({100 * row['mean'] - means[row['preset']]:+.2f})" for row in pairs
    )
    return ["", f"Without `--range` and `--one-in`, beside the preset's mean: {told}."]


def _line(row: dict[str, Any]) -> str:
    spread = "" if row["standard_error"] is None else f" ± {100 * row['standard_error']:.2f}"
    down = "" if row["bytes_down"] is None else f"{row['bytes_down'] / row['clients'] / 1e6:.3g}"
    target = "" if row["target"] is None else f"{100 * row['target']:.1f}"
    return (
        f"| `{row['point']}`{CHANGED if row['changed'] else ''} | {row['dataset']}; {row['clients']} "
        f"| {row['features']}; {row['public_data'] or 'no other data'} | {row['guarantee']['trust']} "
        f"| {rounded_up(row['guarantee']['epsilon'])} | {row['bits_measured']:.2f} "
        f"| {', '.join(f'{100 * one:.2f}' for one in row['accuracies'])} "
        f"| **{100 * row['mean']:.2f}**{spread} | {target} "
        f"| {row['bytes_up'] / row['clients'] / 1e6:.3g}; {row['bytes_up_float32'] / row['bytes_up']:.3g} | {down} |"
    )


def search(fields: dict[str, Any]) -> str:
    """What was tried for each preset, in the order it was tried."""
    lines = [
        "## The search",
        "",
        f"Accuracy on the {fields['held_out']:,} held-out training samples, one run each, of "
        "`experiments.frontier.search` (Gaussian noise of about the plan's deviation in place of the mechanism's). The "
        "test split was not looked at.",
        "",
    ]
    for question, rows in fields.items():
        if question == "held_out":
            continue
        first = rows[0]["varied"]
        told = ", ".join(f"{key} {value}" for key, value in first.items())
        lines += [f"**{question}** ({told}):", "", f"- as above: {100 * rows[0]['held_out_accuracy']:.2f} %"]
        for row in rows[1:]:
            changed = {key: value for key, value in row["varied"].items() if first.get(key) != value}
            varied = ", ".join(f"{key} {value}" for key, value in changed.items())
            lines.append(f"- {varied}: {100 * row['held_out_accuracy']:.2f} %")
        lines.append("")
    return "\n".join(lines).rstrip()
