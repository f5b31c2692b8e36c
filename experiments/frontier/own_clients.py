"""Data that clients hold from the start: practices of a health study, and the speaking roles of plays.

python -m experiments.frontier.own_clients PRESET SEED  # one run, kept in results/frontier_own_clients/
python -m experiments.frontier.own_clients PRESET without-privacy | without-noise
python -m experiments.frontier.own_clients search [PRESET]  # what was tried on held-out samples, beside the runs
python -m experiments.frontier.own_clients table  # gathers them and writes the page

The noise of a preset's run comes from the operating system. A run without noise has the same model, rounds and clip,
and no masks or ledger; one without privacy has no clip that binds either. In the search the noise is seeded. Of roles,
Gaussian noise of about the plan's deviation takes the mechanism's place.
"""

from __future__ import annotations

import statistics
import sys
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from experiments.frontier.held_out import cut_of, try_out
from experiments.frontier.points import fields_of, trained
from experiments.lab import RESULTS, ROOT, provenance, read_json, write_json
from torch.nn.functional import one_hot

from bqsgd import data
from bqsgd._src.privacy.guarantee import as_given, rounded_up
from bqsgd._src.tasks.named import preset, settings_of
from experiments import pages

RUNS, FOLDERS, TABLE = RESULTS / "frontier_own_clients", ROOT / "runs" / "own_clients", "frontier_own_clients"
NOISE_SEED = 1
_NO_NOISE: dict[str, Any] = {"secure": False, "levels": 1 << 16, "trials": 0, "range": 1.0, "seed": 0}
_NO_CLIP = {"clip_norm": 100.0, "range": 10.0}
WITHOUT: dict[str, dict[str, Any]] = {"without-noise": _NO_NOISE, "without-privacy": _NO_NOISE | _NO_CLIP}
TRAINED_OUT = WITHOUT["without-privacy"] | {"rounds": 200, "learning_rate": 3.0}
"""What a table is trained with where nothing is private: until it learns no more."""
PRESETS = {
    "rand-hie-eps1-sums": ("two or more visits to a physician in a year", 0.01),
    "shakespeare-eps8-sums": ("next character", 0.03),
    "shakespeare-eps3-sums": ("next character", None),
}
"""Preset -> what is predicted, and how far below the same model without noise (of the table, without privacy) its mean
may be: the target."""
TABLE_TRIED: list[dict[str, Any]] = [
    {},
    {"learning_rate": 3.0},
    {"rounds": 100, "reserve_rounds": 100},
    {"learning_rate": 3.0, "clip_norm": 2.0},
    TRAINED_OUT,
]
ROLES: dict[str, Any] = {
    "rounds": 12, "steps": 5, "local_learning_rate": 8.0, "learning_rate": 8.0, "clip": 1.0, "noise": 4.4,
}  # fmt: skip
ROLES_TRIED: list[dict[str, Any]] = [
    ROLES,
    ROLES | {"local_learning_rate": 16.0},
    ROLES | {"learning_rate": 12.0},
    ROLES | {"noise": 10.4},
    ROLES | {"noise": 10.4, "learning_rate": 5.0},
    ROLES | {"clip": 100.0, "noise": 0.0, "learning_rate": 3.0},
]
"""Noise: deviation on the sum over the roles, in clips."""


def run(name: str, kind: str) -> None:
    """One run of a preset, unless there is one: with a seed, or without noise or privacy."""
    place = RUNS / f"{name}-{kind if kind in WITHOUT else f'seed{int(kind)}'}.json"
    if place.exists():
        return
    changes = WITHOUT[kind] if kind in WITHOUT else {"init_seed": int(kind)}
    if kind == "without-privacy":
        changes = TRAINED_OUT if name.startswith("rand") else changes | {"learning_rate": 3.0}
    named, config = settings_of(**preset(name) | changes | {"run": place.stem})
    fields = fields_of(trained(named, config, FOLDERS / place.stem), named, config)
    if kind in WITHOUT:
        del fields["guarantee"]  # it has none
    write_json(place, fields | provenance())
    print(f"{place.stem}: {fields['accuracy']:.2%} in {fields['seconds']:.0f} s", flush=True)


@lru_cache(maxsize=1)
def _roles() -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor, torch.Tensor]:
    """Every role's samples but the last quarter, and the contexts and labels of those, all as codes."""
    loaded = data.load("shakespeare")
    assert loaded.owners is not None
    inputs = torch.from_numpy(loaded.train.inputs).long() + loaded.classes * torch.arange(loaded.input_shape[0])
    labels = torch.from_numpy(loaded.train.labels)
    rows = [np.flatnonzero(loaded.owners == role) for role in range(int(loaded.owners.max()) + 1)]
    kept = [torch.from_numpy(each[: cut_of(each)]) for each in rows]
    held = torch.from_numpy(np.concatenate([each[cut_of(each) :] for each in rows]))
    return [(inputs[each], labels[each]) for each in kept], inputs[held], labels[held]


def roles_accuracy(
    *, rounds: int, steps: int, local_learning_rate: float, learning_rate: float, clip: float, noise: float
) -> float:
    """On the held-out quarter, of one dense layer over the codes before; the server's settings are the preset's."""
    roles, inputs, labels = _roles()
    classes = data.load("shakespeare").classes
    width = inputs.shape[1] * classes
    rng = torch.Generator().manual_seed(NOISE_SEED)
    weights = torch.zeros(width + 1, classes)
    velocity = torch.zeros_like(weights)
    for number in range(rounds):
        summed = noise * clip * torch.randn(weights.shape, generator=rng)
        for before, after in roles:
            ones = torch.cat([torch.zeros(len(before), width).scatter_(1, before, 1.0), torch.ones(len(before), 1)], 1)
            own, targets = weights.clone(), one_hot(after, classes)
            for _ in range(steps):
                own -= local_learning_rate / len(before) * (ones.T @ (torch.softmax(ones @ own, 1) - targets))
            update = own - weights
            summed += update * min(1.0, clip / float(update.norm()))
        velocity = 0.5 * velocity + summed / len(roles)
        weights = weights + learning_rate * (1 - number / rounds) * velocity
    return float(((weights[inputs].sum(1) + weights[-1]).argmax(1) == labels).float().mean())


def search(only: str | None) -> None:
    """Try what has not been tried, keeping every answer as it comes."""
    place = RUNS / "search.json"
    for name, tried in (("rand-hie-eps1-sums", TABLE_TRIED), ("shakespeare-eps8-sums", ROLES_TRIED)):
        for varied in tried if only in (None, name) else ():
            kept: dict[str, Any] = dict(read_json(place)) if place.exists() else {}
            if any(row["varied"] == varied for row in kept.get(name, [])):
                continue
            if tried is ROLES_TRIED:
                found = roles_accuracy(**varied)
            else:
                # A quarter less samples, and the batch size with them: the rate stays that of the preset.
                settings = preset(name)
                fewer = {"batch_size": settings["batch_size"] * 3 // 4, "seed": NOISE_SEED, "workers": 1}
                found = try_out(**settings | fewer | varied)["held_out_accuracy"]
            kept.setdefault(name, []).append({"varied": varied, "held_out_accuracy": found, **provenance()})
            write_json(place, kept)
            print(f"{name} {varied}: held-out accuracy {found:.2%}", flush=True)


def gathered() -> dict[str, Any]:
    """What the runs came to, by preset."""
    rows = []
    for name, (predicted, below) in PRESETS.items():
        runs = [read_json(place) for seed in range(5) if (place := RUNS / f"{name}-seed{seed}.json").exists()]
        if not runs:
            continue
        beside = name if name.startswith("rand") else "shakespeare-eps8-sums"
        without = {
            kind: read_json(place)["accuracy"] for kind in WITHOUT if (place := RUNS / f"{beside}-{kind}.json").exists()
        }
        rows.append(
            {
                "preset": name,
                "predicted": predicted,
                "below": below,
                "clients": runs[0]["config"]["clients"],
                "accuracies": [one["accuracy"] for one in runs],
                "without": without,
                "guarantee": max((one["guarantee"] for one in runs), key=lambda given: float(given["epsilon"])),
                "bits": max(one["bits_per_coordinate"] for one in runs),
                "bytes_up": max(one["bytes_up"] for one in runs),
                "bytes_down": max(one["bytes_down"] for one in runs),
                "seconds": max(one["seconds"] for one in runs),
                "changed": any(one["changed"] for one in runs),
            }
        )
    return {"rows": rows, "search": read_json(RUNS / "search.json")}


def reference_of(row: dict[str, Any]) -> float:
    """The accuracy that the target of a row counts from: the best without noise."""
    return max(float(one) for one in row["without"].values())


def section(fields: dict[str, Any]) -> str:
    """The table, and what was tried."""
    lines = [
        "| run | clients | it predicts | hidden | total ε | bits | accuracy, each seed | mean | without noise "
        "| without noise or clip | target | a client sends; receives, MB |",
        "|---|---:|---|---|---:|---:|---|---:|---:|---:|---|---:|",
    ]
    for row in fields["rows"]:
        mean, without = statistics.mean(row["accuracies"]), row["without"]
        target = "" if row["below"] is None else f"at most {100 * row['below']:.0f} below"
        if target and without:
            target += f": {100 * (mean - reference_of(row)):+.2f}"
        beside = [f"{100 * without[kind]:.2f}" if kind in without else "" for kind in WITHOUT]
        sent = [f"{row[name] / row['clients'] / 1e6:.3g}" for name in ("bytes_up", "bytes_down")]
        lines.append(
            f"| `{row['preset']}` | {row['clients']} | {row['predicted']} "
            f"| {row['guarantee']['relation']} {row['guarantee']['unit']} | {rounded_up(row['guarantee']['epsilon'])} "
            f"| {row['bits']:.2f} | {', '.join(f'{100 * one:.2f}' for one in row['accuracies'])} "
            f"| **{100 * mean:.2f}** | {beside[0]} | {beside[1]} | {target} | {'; '.join(sent)} |"
        )
    guarantee = fields["rows"][0]["guarantee"]
    lines += ["", f"δ = {guarantee['delta']:g}; {guarantee['trust']}; no client colludes with it.", ""]
    lines += ["Tried on the last quarter of each client's training samples, which the others never see, one run each:"]
    for name, tried in fields["search"].items():
        lines += ["", f"**`{name}`**: " + "; ".join(_tried(row, first=tried[0]) for row in tried) + "."]
    return "\n".join(lines)


def _tried(row: dict[str, Any], *, first: dict[str, Any]) -> str:
    varied = row["varied"]
    plain = {key for kind in WITHOUT.values() for key in kind} if "trials" in varied else set()
    changed = {key: value for key, value in varied.items() if first["varied"].get(key) != value and key not in plain}
    told = ", ".join(
        f"{key} {as_given(value) if isinstance(value, float) else value}" for key, value in changed.items()
    )
    told = f"without noise or clip, {told}" if plain else told
    return f"{told or 'as it is'} {100 * row['held_out_accuracy']:.2f} %"


def main() -> None:
    """What the command says."""
    torch.set_num_threads(1)
    what, *more = sys.argv[1:]
    if what == "search":
        search(more[0] if more else None)
    elif what == "table":
        write_json(RESULTS / f"{TABLE}.json", gathered())
        pages.write()
    else:
        run(what, *more)


if __name__ == "__main__":
    main()
