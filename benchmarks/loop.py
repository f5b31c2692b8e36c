"""An existing loop made private: Opacus' own MNIST example beside ours, in one run.

`python -m benchmarks loop` prints the figures, writes benchmarks/results/loop.json and exits with 1 unless our step is
ahead of Opacus' with hooks and with ghost clipping. `python -m experiments.pages` writes the page again.

Time: one thread, CPU time, rivals taking turns in one process. A step is everything from `zero_grad` to the optimiser's
step, on Poisson batches with a mean of 256 images; reading the batch is timed apart. Lines: what `train_opacus` and
`train_ours` below add to `train_plain`, counted from their source, which is what the accuracies come from. Accuracy: at
equal epsilon after equal epochs, same learning rate, clip and initial model; Opacus' epsilon is that of its PRV
accountant, ours the proven bound. Without clipping that rate diverges, so the loop without privacy has one of its own.
"""

from __future__ import annotations

import difflib
import inspect
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import benchmarks
import bqsgd
from bqsgd import data
from bqsgd._src.privacy.guarantee import as_given, rounded_up
from bqsgd.clips import L2
from experiments import pages

BATCH, DELTA, CLIP, LEARNING_RATE, PLAIN_LEARNING_RATE = 256, 1e-5, 1.0, 0.25, 0.05
EPSILON, EPOCHS = 3.0, 3
MEAN, DEVIATION = 0.1307, 0.3081


class SampleConvNet(nn.Module):
    """The network of Opacus' examples/mnist.py."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 8, 2, padding=3)
        self.conv2 = nn.Conv2d(16, 32, 4, 2)
        self.fc1 = nn.Linear(32 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        return self.fc2(F.relu(self.fc1(x.view(-1, 32 * 4 * 4))))


def train_plain(model: Any, optimizer: Any, loader: Any, epochs: int, folder: Path) -> str:
    loss = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()
    return "no privacy"


def train_opacus(model: Any, optimizer: Any, loader: Any, epochs: int, folder: Path) -> str:
    from opacus import PrivacyEngine

    loss = nn.CrossEntropyLoss()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, target_epsilon=EPSILON, target_delta=DELTA,
        max_grad_norm=CLIP, epochs=epochs,
    )  # fmt: skip
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()
    return str(engine.get_epsilon(delta=DELTA))


def train_ours(model: Any, optimizer: Any, loader: Any, epochs: int, folder: Path) -> str:
    private = bqsgd.make_private(
        model, optimizer, loader, loss_fn=nn.CrossEntropyLoss(reduction="none"), epsilon=EPSILON, delta=DELTA,
        clip=L2(CLIP), epochs=epochs, ledger=folder / "me.ledger",
    )  # fmt: skip
    for _ in range(epochs):
        for batch in private.loader:
            private.step(batch)
    return str(private.guarantee().epsilon)


LOOPS = {"plain": train_plain, "opacus": train_opacus, "ours": train_ours}


def lines_added(loop: Callable[..., str]) -> dict[str, int]:
    """Lines of code that the loop has and the plain one has not, and the other way round; the import of ours counts."""
    before, after = (
        [line.strip() for line in inspect.getsource(each).splitlines()[1:] if line.strip()]
        for each in (train_plain, loop)
    )
    if loop is train_ours:
        after.insert(0, "import bqsgd")
    changes = [line[0] for line in difflib.ndiff(before, after)]
    return {"added": changes.count("+"), "removed": changes.count("-")}


def images() -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """MNIST as Opacus' example normalises it: training set, and test images with their labels."""
    mnist = data.load("mnist")
    train, test = (
        ((torch.as_tensor(part.inputs).reshape(-1, 1, 28, 28).float() - MEAN) / DEVIATION, torch.as_tensor(part.labels))
        for part in (mnist.train, mnist.test)
    )
    return TensorDataset(*train), test


def made_up(samples: int) -> TensorDataset:
    """Images for timing alone."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, 1, 28, 28, generator=generator), torch.randint(0, 10, (samples,), generator=generator)
    )


Turn = Callable[[], tuple[float, float, int]]
"""Takes a step; returns the CPU seconds of reading its batch, those of the step, and the samples in it."""


def turns_of(read: Callable[[], Iterator[Any]], step: Callable[[Any], int]) -> Turn:
    iterator = read()

    def turn() -> tuple[float, float, int]:
        nonlocal iterator
        start = time.process_time()
        try:
            batch = next(iterator)
        except StopIteration:
            iterator = read()
            batch = next(iterator)
        middle = time.process_time()
        samples = step(batch)
        return middle - start, time.process_time() - middle, samples

    return turn


def rivals(samples: int, folder: Path) -> dict[str, Turn]:
    """One step of each: without privacy, ours, and Opacus in its two modes."""
    dataset = made_up(samples)

    def start() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        torch.manual_seed(0)
        model = SampleConvNet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return model, optimizer, DataLoader(dataset, batch_size=BATCH, shuffle=True)

    return {
        "plain": plain_turn(*start()),
        "ours": our_turn(*start(), folder),
        "opacus, hooks": opacus_turn(*start(), mode="hooks"),
        "opacus, ghost": opacus_turn(*start(), mode="ghost"),
    }


def plain_turn(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> Turn:
    loss = nn.CrossEntropyLoss()

    def step(batch: Any) -> int:
        optimizer.zero_grad()
        loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
        return len(batch[0])

    return turns_of(lambda: iter(loader), step)


def our_turn(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], folder: Path) -> Turn:
    private = bqsgd.make_private(
        model, optimizer, loader, loss_fn=nn.CrossEntropyLoss(reduction="none"), epsilon=1e3, delta=DELTA, epochs=1000,
        clip=L2(CLIP), ledger=folder / "speed.ledger", mechanism=bqsgd.Mechanism(levels=3, trials=249), range=0.05,
    )  # fmt: skip

    def step(batch: Any) -> int:
        private.step(batch)
        return len(batch)

    return turns_of(lambda: iter(private.loader), step)


def opacus_turn(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], *, mode: str) -> Turn:
    from opacus import PrivacyEngine

    asked: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": CLIP, "grad_sample_mode": mode}
    loss: Any = nn.CrossEntropyLoss()
    private: Any = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, criterion=loss, **asked
    )
    if mode == "ghost":
        model, optimizer, loss, loader = private
    else:
        model, optimizer, loader = private

    def step(batch: Any) -> int:
        optimizer.zero_grad()
        loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
        return len(batch[0])

    return turns_of(lambda: iter(loader), step)


def speed(turns: int, samples: int, folder: Path) -> dict[str, Any]:
    """Medians over interleaved turns, the first few left out; times are scaled to a batch of 256."""
    measured: dict[str, list[tuple[float, float, int]]] = {}
    steps = rivals(samples, folder)
    for _ in range(turns):
        for name, turn in steps.items():
            measured.setdefault(name, []).append(turn())
    figures: dict[str, Any] = {}
    for name, values in measured.items():
        kept = [value for value in values[3:] if value[2]]
        figures[name] = {
            "step_ms": 1e3 * statistics.median(step * BATCH / count for _, step, count in kept),
            "reading_ms": 1e3 * statistics.median(reading * BATCH / count for reading, _, count in kept),
        }
    return figures


def accuracy(epochs: int, repeats: int, names: list[str]) -> dict[str, Any]:
    """Test accuracy of each loop, from the same initial models."""
    train, (inputs, targets) = images()
    figures: dict[str, Any] = {}
    for name in names:
        reached, epsilon = [], ""
        for repeat in range(repeats):
            torch.manual_seed(repeat)
            model = SampleConvNet()
            rate = PLAIN_LEARNING_RATE if name == "plain" else LEARNING_RATE
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            loader = DataLoader(train, batch_size=BATCH, shuffle=True)
            with tempfile.TemporaryDirectory() as folder:
                epsilon = LOOPS[name](model, optimizer, loader, epochs, Path(folder))
            with torch.no_grad():
                reached.append(float((model(inputs).argmax(dim=1) == targets).float().mean()))
            print(f"  {name}: {reached[-1]:.2%}", flush=True)
        figures[name] = {"accuracies": reached, "mean": statistics.mean(reached), "epsilon": epsilon}
    return figures


def section(result: dict[str, Any]) -> str:
    """The section of the page that compares the two, from the JSON."""
    times, lines, reached = result["times"], result["lines"], result["accuracy"]

    def step(name: str) -> str:
        return f"{times[name]['step_ms']:.0f} ms"

    def accuracy(name: str) -> str:
        figures = reached[name]
        return f"{100 * figures['mean']:.2f} % (epsilon {rounded_up(float(figures['epsilon']))})"

    def changed(name: str) -> str:
        return f"{lines[name]['added']} added, {lines[name]['removed']} removed"

    table = f"""## Measured side by side

Opacus' MNIST example, its network and batches of {result["batch_size"]} on average, one thread, each in turn in one run
([loop.json](../benchmarks/results/loop.json), `make bench NAME=loop`). Opacus {result["versions"]["opacus"]}.

| | Opacus | bqsgd |
|---|---|---|
| lines of the plain loop | {changed("opacus")} | {changed("ours")} |
| CPU time of a step; {step("plain")} without privacy | {step("opacus, hooks")} with hooks, {step("opacus, ghost")} with ghost clipping | {step("ours")} |
"""  # noqa: E501
    if "ours" in reached:
        table += f"""| test accuracy after {reached["epochs"]} epochs at epsilon {as_given(reached["epsilon"])}, mean of {len(reached["ours"]["accuracies"])}; {100 * reached["plain"]["mean"]:.2f} % without privacy | {accuracy("opacus")} | {accuracy("ours")} |
"""  # noqa: E501
    return table


def main() -> int:
    parser = benchmarks.parser("loop", __doc__)
    parser.add_argument("--turns", type=int, default=60, help="steps of each rival")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="for the accuracies; 0 leaves them out")
    parser.add_argument("--repeats", type=int, default=3, help="initial models for the accuracies")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="opacus|torch")
    with tempfile.TemporaryDirectory() as folder:
        times = speed(options.turns, 20 * BATCH, Path(folder))
    for name, figures in times.items():
        print(f"{name:>14}: {figures['step_ms']:7.1f} ms per step, {figures['reading_ms']:5.1f} ms reading")
    lines = {name: lines_added(loop) for name, loop in LOOPS.items() if name != "plain"}
    print(f"lines: {lines}")
    reached = accuracy(options.epochs, options.repeats, list(LOOPS)) if options.epochs else {}
    ahead = all(times["ours"]["step_ms"] < times[f"opacus, {mode}"]["step_ms"] for mode in ("hooks", "ghost"))
    result = {
        "model": "SampleConvNet of Opacus' MNIST example, 26,010 parameters",
        "batch_size": BATCH,
        "threads": 1,
        "times": times,
        "ahead_of_opacus": ahead,
        "lines": lines,
        "accuracy": {
            "epsilon": EPSILON,
            "delta": DELTA,
            "epochs": options.epochs,
            "learning_rate": LEARNING_RATE,
            "learning_rate_without_privacy": PLAIN_LEARNING_RATE,
            "clip_norm": CLIP,
            **reached,
        },
        "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("bqsgd", "torch", "opacus", "numpy")},
    }
    if benchmarks.write(options.output, result):
        pages.write()
    print(f"ahead of Opacus' hooks and ghost clipping: {ahead}; written to {options.output}")
    return 0 if ahead else 1
