"""Does this device keep the claims, and how fast is it? For anybody with a GPU; writes a JSON to send in.

python -m benchmarks.device                          # the accelerator that torch finds, else the processor
python -m benchmarks.device --device cuda:1 --output mine.json

Claims 8 and 9 are checked bit for bit, for several models in float32, bfloat16 and float16 and under autocast: what a
sample adds does not depend on the other samples, on its place or on the batch; sums are exact; every sample is within
the clip's bounds. Speed is that of one step up to the summed gradient, in units of a plain forward and backward.
On the processor the same code runs as it would on a device, which tests this script.
"""

from __future__ import annotations

import argparse
import copy
import platform
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import write
from bqsgd._src.persample import L2, Clamp, Clip, Dual, Scale, clipped_gradients, device
from bqsgd._src.persample.gradients import road_of
from bqsgd._src.persample.program import Form

LOSS = nn.CrossEntropyLoss(reduction="none")
SAMPLES = 16
CLIPS: tuple[Clip, ...] = (L2(0.3), Dual(0.3, 0.05), Clamp(0.01), Scale(0.01))
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Text(nn.Module):
    """Words through a table, one transformer layer and a mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(100, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layer(self.table(words)).mean(1))  # type: ignore[no-any-return]


def cases(samples: int, *, large: bool) -> dict[str, tuple[nn.Module, Tensor]]:
    """Models and inputs by name. Inputs span four orders of magnitude."""
    torch.manual_seed(0)
    width = 256 if large else 16
    scale = 10 ** torch.linspace(-2, 2, samples)
    convolutions = nn.Sequential(
        nn.Conv2d(3, width // 4, 3, padding=1), nn.GroupNorm(2, width // 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16 * width, 10),
    )  # fmt: skip
    perceptron = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))
    return {
        "perceptron": (perceptron, torch.randn(samples, 64) * scale[:, None]),
        "convolutions": (convolutions, torch.randn(samples, 3, 16, 16) * scale[:, None, None, None]),
        "text": (Text(width), torch.randint(0, 100, (samples, 32 if large else 6))),
    }


def keeps_claims(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, bool]:
    """Claims 8 and 9 for one model, bit for bit."""

    def mean(index: Any, clip: Clip, inputs: Tensor = x) -> Tensor:
        return clipped_gradients(model, LOSS, (inputs[index], y[index]), clip=clip, batch_size=SAMPLES).mean

    every, turned, apart, placed, exact, bounded = list(range(len(x))), [3, 1, 0, 2], True, True, True, True
    for clip in CLIPS:
        whole, singles = mean(every, clip), [mean([n], clip) for n in every]
        exact &= torch.equal(whole, torch.stack(singles).sum(dim=0))
        placed &= torch.equal(mean(turned, clip), mean(sorted(turned), clip))
        others = x.clone()
        others[1:] = others[1:].roll(1, 0) if not x.is_floating_point() else others[1:] * 7
        apart &= torch.equal(mean(every, clip, others) - mean(every[1:], clip, others), singles[0])
        stated, unit = clip.sensitivity(batch_size=SAMPLES), getattr(clip, "bound", clip.euclidean)
        bounded &= all(float(own.abs().max()) <= stated.linf * unit for own in singles)
        if stated.l2 is not None:
            bounded &= all(float(own.norm()) <= stated.l2 * unit for own in singles)
    return {"sums are exact": exact, "places": placed, "other samples": apart, "bounds": bounded}


def check(where: torch.device) -> dict[str, Any]:
    """The claims for all models and types, and under autocast."""
    found: dict[str, Any] = {}
    y = torch.arange(SAMPLES, device=where) % 10
    for name, (model, x) in cases(SAMPLES, large=False).items():
        for kind, dtype in TYPES.items():
            own = copy.deepcopy(model).to(where, dtype)
            inputs = x.to(where, dtype if x.is_floating_point() else x.dtype)
            found[f"{name}, {kind}"] = tried(partial(row, own, inputs, y))
        own, inputs = copy.deepcopy(model).to(where), x.to(where)
        with suppress(RuntimeError), torch.autocast(where.type, dtype=torch.bfloat16):
            found[f"{name}, autocast"] = tried(partial(row, own, inputs, y))
    return found


def row(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    """What is found of one model: how it runs, and whether the claims hold."""
    claims = keeps_claims(model, x, y)
    road = road_of(model, LOSS, None, Form.of((x, y)), batch_size=SAMPLES, packed=False)
    return {"road": type(road).__name__, "rows": getattr(road, "rows", 1), **claims}


def tried(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it returns, or the error: one missing kernel must not hide the rest."""
    try:
        return measure()
    except Exception as error:  # whatever a kernel or a rival raises
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def seconds(step: Callable[[], object], where: torch.device, repeats: int) -> float:
    """The least time of a step, after two that are not counted."""
    best = float("inf")
    for number in range(repeats + 2):
        started = time.perf_counter()
        step()
        if where.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - started) if number > 1 else best
    return best


def speed(where: torch.device, samples: int, repeats: int) -> dict[str, Any]:
    """Times of a step with and without privacy, and those of Opacus if it is installed, times plain."""
    found: dict[str, Any] = {}
    y = torch.arange(samples, device=where) % 10
    for name, (model, x) in cases(samples, large=repeats > 1).items():
        model, x = model.to(where), x.to(where)

        def plain(model: nn.Module = model, x: Tensor = x) -> None:
            LOSS(model(x), y).sum().backward()

        def ours(model: nn.Module = model, x: Tensor = x) -> None:
            clipped_gradients(model, LOSS, (x, y), clip=L2(1.0), batch_size=samples)

        base = seconds(plain, where, repeats)
        found[name] = {"plain, ms": 1000 * base, "bqsgd": seconds(ours, where, repeats) / base}
        for mode in ("hooks", "ew"):
            with suppress(ImportError):
                step = opacus_step(model, x, y, mode)
                found[name][f"opacus {mode}"] = tried(partial(times_plain, step, where, repeats, base))
    return found


def times_plain(step: Callable[[], object], where: torch.device, repeats: int, base: float) -> dict[str, Any]:
    return {"times plain": seconds(step, where, repeats) / base}


def opacus_step(model: nn.Module, x: Tensor, y: Tensor, mode: str) -> Callable[[], object]:
    """Opacus' per-sample gradients with its clip: hooks or expanded weights."""
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleExpandedWeights

    kind = GradSampleModule if mode == "hooks" else GradSampleModuleExpandedWeights
    wrapped = kind(copy.deepcopy(model), batch_first=True, loss_reduction="sum")

    def step() -> None:
        wrapped.zero_grad(set_to_none=True)
        LOSS(wrapped(x), y).sum().backward()
        rows = [p.grad_sample.flatten(1) for p in wrapped.parameters()]
        weights = (1 / torch.stack([each.norm(dim=1) for each in rows]).norm(dim=0)).clamp(max=1)
        for each in rows:
            weights @ each

    return step


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", help="for example cuda:0, mps or cpu; by default the accelerator that torch finds")
    made.add_argument("--output", type=Path, default=Path("device.json"), help="the JSON file to write")
    made.add_argument("--quick", action="store_true", help="small models and one repeat: a test of the script itself")
    asked = made.parse_args()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    where = torch.device(asked.device) if asked.device else accelerator or torch.device("cpu")
    before, device.forced = device.forced, True  # only the processor needs to be told
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            claims = check(where)
            times = speed(where, 32 if asked.quick else 256, 1 if asked.quick else 20)
    finally:
        device.forced = before
    broken = [name for name, each in claims.items() if not all(value for key, value in each.items() if key != "error")]
    result = {
        "device": device.name_of(where), "type": where.type, "platform": platform.platform(),
        "torch": torch.__version__, "claims": claims, "broken": broken, "speed": times,
    }  # fmt: skip
    write(asked.output, result)
    for name, each in claims.items():
        print(f"{name:24} {each.get('error') or each['road'] + ', rows ' + str(each['rows'])}")
    print(f"{len(broken)} of {len(claims)} break a claim: {broken}" if broken else "all claims hold bit for bit")
    print(f"written to {asked.output}; please send it with an issue")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
