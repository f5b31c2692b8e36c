"""Fine-tuning adapters of a language model in private, beside Opacus and beside no privacy, in one run.

`python -m benchmarks lora` runs what `examples/lora.py` has: the public model is trained once, then its adapters are
trained on other text, the same steps and learning rate for all: without privacy, by Opacus, by `make_private` in one
process, and over four clients in secure sums. It writes benchmarks/results/lora.json. Nothing was tuned on the test
plays: learning rate, clip and steps were fixed before any of these was run. Times are CPU seconds on one thread.
"""

from __future__ import annotations

import copy
import math
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import benchmarks
import bqsgd

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import lora

FLOAT_BYTES = 4
STEPS = lora.EPOCHS * lora.CLIENTS * lora.PASSAGES // lora.BATCH


def in_batches(data: TensorDataset, steps: int) -> Iterator[Any]:
    loader = DataLoader(data, batch_size=lora.BATCH, shuffle=True, drop_last=True)
    while True:
        for batch in loader:
            if steps == 0:
                return
            steps -= 1
            yield batch


def in_parts(batch: Any) -> Iterator[tuple[Any, int]]:
    """What is in memory at a time, and the size of the whole batch."""
    for part in zip(*(column.split(128) for column in batch), strict=True):
        yield part, len(batch[0])


def plain(model: nn.Module, optimizer: Any, data: TensorDataset, steps: int, folder: Path) -> None:
    for batch in in_batches(data, steps):
        optimizer.zero_grad()
        for part, whole in in_parts(batch):
            (lora.loss_fn(*lora.forward(model, part)).sum() / whole).backward()
        optimizer.step()


def opacus(model: nn.Module, optimizer: Any, data: TensorDataset, steps: int, folder: Path) -> float:
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    loader, engine = DataLoader(data, batch_size=lora.BATCH, shuffle=True), PrivacyEngine()
    # Opacus plans for a number of epochs; these are the steps that are taken.
    made, noisy, drawn = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, target_epsilon=lora.EPSILON, target_delta=lora.DELTA,
        max_grad_norm=lora.CLIP, epochs=steps * lora.BATCH / len(data),
    )  # fmt: skip
    taken = 0
    while taken < steps:
        with BatchMemoryManager(data_loader=drawn, max_physical_batch_size=128, optimizer=noisy) as small:
            for part in small:
                noisy.zero_grad()
                lora.loss_fn(*lora.forward(made, part)).mean().backward()
                noisy.step()
                taken += not noisy._is_last_step_skipped
                if taken == steps:
                    break
    return float(engine.get_epsilon(lora.DELTA))


def ours(model: nn.Module, optimizer: Any, data: TensorDataset, steps: int, folder: Path) -> float:
    private = lora.private_loop(model, optimizer, data, folder / "me.ledger")
    guarantee = private.guarantee()
    assert guarantee is not None
    return guarantee.epsilon


def federation(steps: int, folder: Path) -> dict[str, Any]:
    """Four clients in secure sums, as the page's command runs them."""
    task = lora.federation(None)
    config = task.config(
        secure=True, rounds=steps, batch_size=lora.BATCH // lora.CLIENTS, epsilon=lora.EPSILON, delta=lora.DELTA,
        clip_norm=lora.CLIP, optimizer="adam", learning_rate=lora.RATE, evaluate_every=steps,
    )  # fmt: skip
    with bqsgd.Run.start(task, config, folder=folder / "run") as run:
        records = list(run.rounds())
    summary = run.summary
    return {
        "accuracy": records[-1].test_metric,
        "epsilon": max(record.epsilon_max or 0.0 for record in records),
        "guarantee": str(summary.guarantee),
        "rounds": len(records),
        "bytes_up_per_client_and_round": sum(record.bytes_up for record in records) / len(records) / lora.CLIENTS,
    }


LOOPS: dict[str, Callable[..., float | None]] = {"plain": plain, "opacus": opacus, "ours": ours}


def main() -> int:
    parser = benchmarks.parser("lora", __doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the rivals; fewer for a trial")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    shares, test = lora.split()
    data = TensorDataset(*(torch.from_numpy(np.concatenate(column)) for column in zip(*shares, strict=True)))
    first = lora.adapted()
    trained = sum(parameter.numel() for parameter in first.parameters() if parameter.requires_grad)
    whole = sum(parameter.numel() for parameter in first.parameters()) - trained
    result: dict[str, Any] = {
        "passages": len(data),
        "test_passages": len(test[0]),
        "settings": {"batch_size": lora.BATCH, "steps": options.steps, "learning_rate": lora.RATE, "clip": lora.CLIP}
        | {"epsilon": lora.EPSILON, "delta": lora.DELTA},
        "parameters": {"trained": trained, "frozen": whole},
        "bytes_of_float32": {"adapters": FLOAT_BYTES * trained, "whole_model": FLOAT_BYTES * whole},
        "before": {"accuracy": lora.accuracy(first, test)},
    }
    print(f"before: {result['before']['accuracy']:.2%}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, loop in LOOPS.items():
            model = copy.deepcopy(first)
            optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=lora.RATE)
            torch.manual_seed(0)
            start = time.process_time()
            epsilon = loop(model, optimizer, data, options.steps, Path(folder))
            seconds = time.process_time() - start
            result[name] = {"accuracy": lora.accuracy(model, test), "epsilon": epsilon, "cpu_seconds": seconds}
            print(f"{name}: {result[name]}", flush=True)
        result["four clients in sums"] = federation(options.steps, Path(folder))
    print(result["four clients in sums"])
    result["machine"] = {"processor": platform.machine(), "cores": os.cpu_count()}
    result["versions"] = {each: version(each) for each in ("bqsgd", "torch", "opacus", "peft", "transformers")}
    benchmarks.write(options.output, result)
    reached = all(math.isfinite(result[name]["accuracy"]) for name in LOOPS)
    return 0 if reached else 1
