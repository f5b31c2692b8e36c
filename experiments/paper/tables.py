"""Tables 2 and 3: the runs behind every published row, as printed and as corrected, and what they came to."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from experiments.lab import Options
from experiments.paper.published import MNIST, ROWS, PublishedRow, PublishedSetting
from experiments.paper.runs import Job, results

from bqsgd._src.paper.nominal import NominalPrivacy
from bqsgd._src.params import Mechanism
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.release import Release, Terms
from bqsgd._src.tasks.named import settings_of

RECIPE: dict[str, Any] = {"optimizer": "adam", "schedule": "linear", "activation": "tanh"}
"""What the paper leaves open, chosen once for every row; the reasons are on the page of results."""
DATASETS = {"MNIST": ("mnist", "lenet5", 61_706), "Fashion-MNIST": ("fashion-mnist", "alexnet28", 1_158_010)}
CLIPS = {"batch-mean": 2.0, "clamp": None}
"""Most one sample moves a coordinate, in ranges C; None is 1/L."""
QUICK_ROUNDS, DELTA = 1, 1e-5


def job(setting: PublishedSetting, mechanism: Mechanism, *, clip: str, seed: int, quick: bool = False) -> Job:
    """One run of one row."""
    dataset, model, _ = DATASETS[setting.dataset]
    named, config = settings_of(
        dataset=dataset,
        model=model,
        clients=setting.clients,
        rounds=QUICK_ROUNDS if quick else setting.rounds,
        batch_size=setting.batch_size,
        clip=clip,
        clip_bound=setting.clip,
        levels=mechanism.levels,
        trials=mechanism.trials,
        bits=(mechanism.code_count - 1).bit_length(),
        learning_rate=setting.learning_rate,
        seed=seed,
        init_seed=seed,
        workers=1,
        run="reproduction",
        **RECIPE,
    )
    return Job(
        name=f"{dataset}-{clip}-s{mechanism.levels}-m{mechanism.trials}-seed{seed}",
        named=named,
        config=config,
        quick=quick,
    )


def variants(row: PublishedRow) -> list[tuple[str, Mechanism]]:
    """The row as printed and, where the printed pair contradicts the printed budget, as corrected."""
    printed = [("as printed", row.printed)]
    return [("misprinted", row.printed), ("corrected", row.corrected)] if row.misprint else printed


def jobs(rows: Iterable[PublishedRow], *, clip: str, seeds: Iterable[int], quick: bool = False) -> list[Job]:
    """Every distinct pair, seed by seed; corrected pairs before misprinted ones."""
    rows = list(rows)
    pairs = [(row.setting, row.corrected) for row in rows] + [(row.setting, row.printed) for row in rows]
    distinct = list(dict.fromkeys(pairs))
    return [job(setting, pair, clip=clip, seed=seed, quick=quick) for seed in seeds for setting, pair in distinct]


def table2(options: Options) -> dict[str, Any]:
    """Bits fixed, privacy varied: ten runs per seed and clip."""
    return table(2, options)


def table3(options: Options) -> dict[str, Any]:
    """Privacy fixed, bits varied: eight runs per seed and clip."""
    return table(3, options)


def table(number: int, options: Options) -> dict[str, Any]:
    """Every row with both clips; a cell without a finished run is None."""
    seeds, quick = options.seeds, options.quick
    rows = [row for row in ROWS if number in row.tables]
    wanted = [j for clip in CLIPS for j in jobs(rows, clip=clip, seeds=seeds, quick=quick)]
    done = results([j for j in wanted if options.train or j.result.exists()], workers=options.workers)
    table_rows = [_row(row, name, pair, seeds, done, quick=quick) for row in rows for name, pair in variants(row)]
    return {"table": number, "delta": DELTA, "recipe": RECIPE, "quick": quick, "rows": table_rows}


def _row(
    row: PublishedRow, variant: str, pair: Mechanism, seeds: Sequence[int], done: dict[str, Any], *, quick: bool
) -> dict[str, Any]:
    setting = row.setting
    rounds = QUICK_ROUNDS if quick else setting.rounds
    names = {clip: [job(setting, pair, clip=clip, seed=seed).name for seed in seeds] for clip in CLIPS}
    return {
        "dataset": setting.dataset,
        "variant": variant,
        "note": row.note if variant != "as printed" else None,
        "bits_asked": row.bits,
        "published_epsilon": row.epsilon,
        "published_accuracy": row.accuracy / 100,
        "levels": pair.levels,
        "trials": pair.trials,
        "bits_of_codes": pair.bits_per_coordinate,
        "rounds": rounds,
        "nominal": NominalPrivacy.of(pair, setting.nominal, rounds=rounds).to_dict(),
        "clips": {
            clip: summary([done[name] for name in names[clip] if name in done])
            | {"exact": None if quick and setting is not MNIST else exact(setting, pair, clip=clip, rounds=rounds)}
            for clip in CLIPS  # quick: the accountant takes seconds for a million coordinates
        },
    }


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy over the seeds that were run, and the frames as they were measured."""
    accuracies = [run["accuracy"] for run in runs]
    return {
        "runs": [run["name"] for run in runs],
        "seeds": [run["config"]["seed"] for run in runs],
        "accuracies": accuracies,
        "mean": statistics.mean(accuracies) if runs else None,
        "deviation": statistics.stdev(accuracies) if len(runs) > 1 else None,
        "bits_measured": runs[0]["bits_per_coordinate"] if runs else None,
        "frame_bytes": runs[0]["bytes_up"] / runs[0]["frames"] if runs else None,
        "claim": "seeded: no privacy claim",
    }


@lru_cache
def exact(setting: PublishedSetting, pair: Mechanism, *, clip: str, rounds: int) -> dict[str, Any]:
    """The proven guarantee that the same run has with noise from the operating system."""
    client = Terms.of_batch(
        dimension=DATASETS[setting.dataset][2],
        batch_size=setting.batch_size,
        dataset_size=setting.dataset_size,
        linf=CLIPS[clip],
    )
    guarantee = Accountant().compose(Release(mechanism=pair, terms=client), rounds).guarantee(delta=DELTA)
    return guarantee_fields(guarantee)


def guarantee_fields(guarantee: Guarantee) -> dict[str, Any]:
    """Everything that must stand beside an epsilon, and the text to show for it."""
    return guarantee.to_dict() | {"epsilon_text": guarantee.epsilon_text}
