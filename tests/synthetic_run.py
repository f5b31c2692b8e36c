"""A synthetic run folder: made-up curves of a realistic shape, for testing pages only. No figure here was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bqsgd._src.records.folder import RunWriter
from bqsgd._src.records.record import RoundRecord, Summary

GUARANTEE = {
    "epsilon": 2.913,
    "delta": 1e-5,
    "relation": "add/remove one",
    "unit": "sample",
    "trust": "server sees each client's messages",
    "sampling": "poisson, rate 0.0341",
    "method": "proven upper bound (loss distribution, L-infinity)",
    "delta_floor": 3.2e-9,
}


def synthetic_rounds(rounds: int, *, levels: int, trials: int, shape: int) -> Iterator[dict[str, Any]]:
    """Rounds of a made-up run with five clients; `shape` varies the curves."""
    draw = np.random.default_rng(shape)
    dimension, clock = 26_010, 0.0
    frame = math.ceil(dimension * math.log2(2 * levels + trials + 1) / 8) + 64
    for number in range(1, rounds + 1):
        share = number / rounds
        seconds = {
            "gradients": 0.061 * draw.uniform(0.9, 1.2),
            "clip": 0.022 * draw.uniform(0.9, 1.2),
            "encode": 0.0031 * draw.uniform(0.8, 1.5),
            "frame": 0.0008 * draw.uniform(0.8, 1.5),
            "decode": 0.0021 * draw.uniform(0.8, 1.5),
            "aggregate": 0.0016 * draw.uniform(0.8, 1.5),
            "ledger": 0.0042 * draw.uniform(0.6, 2.0),
        }
        clock += sum(seconds.values())
        clients = [
            {"client": i, "status": "ok", "frame_bytes": frame, "levels": levels, "trials": trials} for i in range(4)
        ]
        late = {"client": 4, "status": "ok", "frame_bytes": frame, "levels": levels, "trials": trials}
        if share > 0.7:
            late = {"client": 4, "status": "declined", "reason": "budget spent: epsilon 1.5 at delta 1e-5"}
        elif number % 37 == 0:
            late = {"client": 4, "status": "missing", "reason": "no frame before the deadline"}
        clients.append(late)
        used = sum(entry["status"] == "ok" for entry in clients)
        tested = number % 10 == 0 or number in (1, rounds)
        yield {
            "round": number,
            "time": clock,
            "test_accuracy": 0.972 - 0.86 * math.exp(-share * (9 + shape)) + draw.normal(0, 0.004) if tested else None,
            "test_loss": 0.11 + 2.2 * math.exp(-share * (9 + shape)) + abs(draw.normal(0, 0.01)) if tested else None,
            "epsilon_max": GUARANTEE["epsilon"] * math.sqrt(share),
            "nominal_epsilon": 3.44 * math.sqrt(2 * number * math.log(1e4)),
            "bytes_up": used * frame,
            "bytes_down": 5 * (4 * dimension + 96),
            "bytes_up_float32": used * 4 * dimension,
            "clients": clients,
            "seconds": seconds,
        }


@pytest.fixture
def stated_guarantee() -> dict[str, Any]:
    """The guarantee a synthetic run states unless told otherwise."""
    return dict(GUARANTEE)


@pytest.fixture
def synthetic_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a synthetic run folder and return its path."""

    def write(
        name: str = "mnist-4-clients",
        *,
        rounds: int = 400,
        seeded: bool = False,
        guarantee: dict[str, Any] | None = None,
        levels: int = 8,
        trials: int = 239,
        shape: int = 1,
        finished: bool = True,
    ) -> Path:
        folder = tmp_path / name
        records = list(synthetic_rounds(rounds, levels=levels, trials=trials, shape=shape))
        with RunWriter(folder) as run:
            run.config(
                {
                    "dataset": "mnist",
                    "model": "cnn-tanh",
                    "rounds": rounds,
                    "clients": 5,
                    "budget": {"epsilon": 3.0, "delta": 1e-5, "bits": 8},
                    "optimiser": {"name": "momentum", "learning_rate": 0.5},
                }
            )
            for record in records:
                run.append(RoundRecord.from_dict(record))
            if finished:
                totals = {n: sum(r[n] for r in records) for n in ("bytes_up", "bytes_down", "bytes_up_float32")}
                stated = {"seeded": seeded, **(GUARANTEE if guarantee is None else guarantee)}
                run.summary(
                    Summary.from_dict(
                        {
                            "accuracy": records[-1]["test_accuracy"],
                            "rounds": rounds,
                            "guarantee": stated,
                            "nominal_epsilon": 295.3,
                            "seeded": seeded,
                            "seconds": records[-1]["time"],
                            "versions": {"bqsgd": "0.1.0", "python": "3.11", "torch": "2.13.0"},
                            **totals,
                        }
                    )
                )
        return folder

    return write
