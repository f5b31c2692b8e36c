"""The measured sections about many clients, as Markdown from the JSON of the runs behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bqsgd._src.privacy.guarantee import Guarantee


def clients(results: Mapping[str, Any]) -> str:
    """Thousands of clients in one process."""
    rows = results["rows"]
    lines = [
        "| clients | asked in a round | rounds | way down | peak memory | time over the gradients' | up, per frame | "
        "down, per client asked |",
        "|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        bits = "whole models" if row["down_bits"] is None else f"{row['down_bits']} bits"
        lines.append(
            f"| {row['clients']:,} | {row['asked']:,} | {row['rounds']} | {bits} | {row['peak_mib']:,.0f} MiB | "
            f"{row['times_gradients']:.2f} | {row['bytes_up_per_frame'] / 1e3:.1f} kB | "
            f"{row['bytes_down_per_frame'] / 1e3:.1f} kB |"
        )
    last = rows[-1]
    stages = sorted(last["seconds_by_stage"].items(), key=lambda pair: -pair[1])
    whole = last["wall_seconds"]
    where = ", ".join(f"{stage} {100 * seconds / whole:.1f} %" for stage, seconds in stages)
    load = ", ".join(f"{row['load']:g}" for row in rows)
    return (
        "\n".join(lines)
        + "\n\n"
        + f"Where the time of {last['clients']:,} clients goes: {where}. Its register of ledgers takes "
        + f"{last['ledger_bytes'] / 1e6:.1f} MB. Load of the machine in each row: {load}."
    )


def way_down(results: Mapping[str, Any]) -> str:
    """Accuracy and bytes with changes of the model."""
    lines = [
        "| way down | test accuracy, three seeds | from whole models | down | of whole models |",
        "|---|---|---|---|---|",
    ]
    for name, mean in results["means"].items():
        runs = [row for row in results["runs"] if row["down_bits"] == (None if name == "whole" else int(name))]
        each = ", ".join(f"{100 * row['accuracy']:.2f}" for row in runs)
        down, whole = (sum(row[key] for row in runs) for key in ("bytes_down", "bytes_down_float32"))
        label = "whole models" if name == "whole" else f"{name} bits"
        lines.append(
            f"| {label} | {100 * mean:.2f} % ({each}) | {results['points_from_whole'][name]:+.2f} points | "
            f"{down / len(runs) / 1e6:.2f} MB | {100 * down / whole:.0f} % |"
        )
    return "\n".join(lines) + "\n"


def flower_clients(results: Mapping[str, Any]) -> str:
    """A thousand clients on Flower, without and with secure sums."""
    lines = [
        "| messages | frames | seconds in all | a round | in one process | peak memory | up, per frame | "
        "the same model as in one process |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name, label in (("plain", "one per client"), ("secure", "secure sums")):
        run = results.get(name)
        if run is None:
            continue
        rounds, frames = run["seconds_by_round"], sum(run["frames"])
        later = sum(rounds[1:]) / max(1, len(rounds) - 1)
        lines.append(
            f"| {label} | {frames} | {run['seconds_in_all']:.0f} s | {later:.0f} s | "
            f"{run['seconds_in_one_process']:.0f} s | {run['peak_mib'] / 1024:.1f} GiB | "
            f"{run['bytes_up'] / frames / 1e3:.1f} kB | "
            f"{'yes, bit for bit' if run['same_model_as_in_one_process'] else 'no'} |"
        )
    runs = [results[name] for name in ("plain", "secure") if name in results]
    settings = runs[0]["settings"]
    loads = " and ".join(f"{run['load']:g}" for run in runs)
    ledgers = " and ".join(str(run["rounds_in_ledgers"]) for run in runs)
    return (
        "\n".join(lines)
        + "\n\n"
        + f"{settings['clients']:,} simulated clients, of which {settings['cohort']} are asked in each of "
        + f"{settings['rounds']} rounds. *In all* holds the start of Flower and everybody joining; *a round* is the "
        + f"mean of all but the first. The clients' register of ledgers counts {ledgers} messages. "
        + f"Load of the machine: {loads} on two cores."
    )


def heterogeneity(results: Mapping[str, Any]) -> str:
    """Accuracy of clients that differ."""
    runs, seeds = results["runs"], len({row["seed"] for row in results["runs"]})
    lines = ["| shares | samples: least, median, most | equal | size | rate |", "|---|---|---|---|---|"]
    for kind in dict.fromkeys(row["shares"] for row in runs):
        some = [row for row in runs if row["shares"] == kind]
        figures = []
        for weights in ("equal", "size", "rate"):
            values = [row["accuracy"] for row in some if row["weights"] == weights]
            figures.append(f"{100 * sum(values) / len(values):.1f} %" if values else "-")
        sizes = ", ".join(f"{value:,}" for value in some[0]["sizes"])
        lines.append(f"| {kind} | {sizes} | {' | '.join(figures)} |")
    return (
        "\n".join(lines)
        + "\n\n"
        + f"{results['clients']} clients, {results['cohort']} asked in each of {results['rounds']} rounds, test "
        + f"accuracy, {'one seed' if seeds == 1 else f'mean of {seeds} seeds'}."
    )


def user_level(results: Mapping[str, Any]) -> str:
    """The preset beside the same without privacy."""
    guarantee = Guarantee.from_dict(results["guarantee"])
    lines = ["| run | test accuracy |", "|---|---|"]
    lines.append(f"| `mnist-users`, one run, epsilon {guarantee.epsilon_text} | {100 * results['accuracy']:.2f} % |")
    for key, label in (
        ("without_privacy", "the same without noise or masks"),
        ("without_privacy_or_clip", "and without the clip"),
    ):
        if key in results:
            lines.append(f"| {label} | {100 * results[key]:.2f} % |")
    return (
        "\n".join(lines)
        + "\n\n"
        + f"The guarantee in full: {guarantee}. A client sends "
        + f"{results['bytes_up_per_client_and_round'] / 1e3:.1f} kB a round and is sent "
        + f"{results['bytes_down_per_client_and_round'] / 1e3:.1f} kB, keys included. The run took "
        + f"{results['seconds'] / 60:.0f} min with all clients in one process (load {results['load']:g} on two cores)."
    )
