"""Fine-tuning adapters of a language model in private, beside Opacus and beside no privacy, in one run.

`python -m benchmarks lora` runs what `examples/lora.py` has: the public model is trained once, then its adapters are
trained on other text, the same steps and learning rate for all: without privacy, by Opacus, by `make_private` in one
process, and over four clients in secure sums. It writes benchmarks/results/lora.json. Nothing was tuned on the test
plays: learning rate, clip and steps were fixed before any of these was run. Times are CPU seconds on one thread.
"""

from __future__ import annotations

import copy
import importlib
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
from bqsgd._src.privacy.guarantee import as_given, rounded_up
from experiments import pages

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
FLOAT_BYTES = 4
lora: Any = None
"""The example; `main` imports it, because it takes seconds and `section` does not need it."""


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
        "clients": len(task.shares),
        "bytes_up_per_client_and_round": sum(record.bytes_up for record in records) / len(records) / lora.CLIENTS,
    }


LOOPS: dict[str, Callable[..., float | None]] = {"plain": plain, "opacus": opacus, "ours": ours}


def section(result: dict[str, Any]) -> str:
    """The section of the page, from the JSON."""
    settings, sizes, sums = result["settings"], result["parameters"], result["four clients in sums"]

    def row(name: str, kind: str) -> str:
        found = result[kind]
        epsilon = "none" if found.get("epsilon") is None else rounded_up(found["epsilon"])
        seconds = f"{found['cpu_seconds']:.0f} s" if "cpu_seconds" in found else "-"
        return f"| {name} | {100 * found['accuracy']:.1f} % | {epsilon} | {seconds} |\n"

    rows = (
        row("public model, as it is", "before")
        + row("adapters, without privacy", "plain")
        + row(f"adapters, Opacus {result['versions']['opacus']}", "opacus")
        + row("adapters, `make_private`, one process", "ours")
        + row(f"adapters, {sums['clients']} clients in secure sums", "four clients in sums")
    )
    sent, whole = sums["bytes_up_per_client_and_round"], result["bytes_of_float32"]["whole_model"]
    return f"""| {result["test_passages"]} passages of plays kept out | next character right | epsilon | CPU time |
|---|--:|--:|--:|
{rows}
One run of each: {result["passages"]:,} passages, {settings["steps"]} steps of {settings["batch_size"]} passages on
average, Adam with {settings["learning_rate"]}, clip norm {settings["clip"]}, delta {as_given(settings["delta"])},
add/remove one passage. The first private row trusts its process with the data, the second a server with nothing but
sums. {sizes["trained"]:,} of {sizes["trained"] + sizes["frozen"]:,} parameters train. A client of the sums sends
{sent:,.0f} bytes a round, masks and headers included; the whole model in 32-bit floats is {whole:,} bytes
([lora.json](../benchmarks/results/lora.json), `make bench NAME=lora`).
"""


def main() -> int:
    global lora
    options = benchmarks.parser("lora", __doc__).parse_args()
    lora = importlib.import_module("lora")
    steps = lora.EPOCHS * lora.CLIENTS * lora.PASSAGES // lora.BATCH
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
        "settings": {"batch_size": lora.BATCH, "steps": steps, "learning_rate": lora.RATE, "clip": lora.CLIP}
        | {"epsilon": lora.EPSILON, "delta": lora.DELTA},
        "parameters": {"trained": trained, "frozen": whole},
        "bytes_of_float32": {"adapters": FLOAT_BYTES * trained, "whole_model": FLOAT_BYTES * (whole + trained)},
        "before": {"accuracy": lora.accuracy(first, test)},
    }
    print(f"before: {result['before']['accuracy']:.2%}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, loop in LOOPS.items():
            model = copy.deepcopy(first)
            optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=lora.RATE)
            torch.manual_seed(0)
            start = time.process_time()
            epsilon = loop(model, optimizer, data, steps, Path(folder))
            seconds = time.process_time() - start
            result[name] = {"accuracy": lora.accuracy(model, test), "epsilon": epsilon, "cpu_seconds": seconds}
            print(f"{name}: {result[name]}", flush=True)
        result["four clients in sums"] = federation(steps, Path(folder))
    print(result["four clients in sums"])
    result["machine"] = {"processor": platform.machine(), "cores": os.cpu_count()}
    result["versions"] = {each: version(each) for each in ("bqsgd", "torch", "opacus", "peft", "transformers")}
    if benchmarks.write(options.output, result):
        pages.write()
    reached = all(math.isfinite(result[name]["accuracy"]) for name in LOOPS)
    return 0 if reached else 1
