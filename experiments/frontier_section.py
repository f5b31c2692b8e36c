"""The sections of docs/frontier.md: the frontier's table and the search behind its presets, from their JSON."""

from __future__ import annotations

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
    lines += ["", "References, all with a trusted server, 60,000 samples in one place and 32 bits per coordinate:", ""]
    lines += [
        f"- {one['name']}: {100 * one['accuracy']:.2f} % on {one['dataset']} at ε = {as_given(one['epsilon'])}"
        for one in fields["references"]
    ]
    return "\n".join(lines)


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
