"""CPU time of one image's scattering features on one thread, ours and kymatio's.

Random 28 x 28 images; both sides end with the same constants and norms. Interleaved, the smallest of the repeats
counts: CPU time of the process, which a busy machine disturbs less than the clock on the wall. kymatio gets its best
batch.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.special
import torch

import benchmarks
from bqsgd._src.data.features import transformed
from bqsgd._src.data.scattering import SCATTERING, constants, each_position

PAGE = Path(__file__).parent.parent / "docs" / "data.md"
IMAGES, REPEATS = 512, 9
BATCHES = (8, 64, 512)
LEAST_RATIO = 4.0


def kymatio() -> Callable[[torch.Tensor], torch.Tensor]:
    """kymatio 0.3.0 imports its 3-D part, which wants a function that SciPy 1.17 has no more; 2-D never calls it."""
    scipy.special.sph_harm = None
    from kymatio.torch import Scattering2D

    transform = Scattering2D(J=2, shape=(28, 28))
    means, deviations = constants(1)
    return lambda pixels: each_position((transform(pixels) - means) / deviations)


def page_with(result: dict[str, Any]) -> str:
    """The page with the figures of this run in its table."""
    times = dict(result["cpu_microseconds_per_image"])
    ours, theirs = times.pop("bqsgd"), min(times.values())
    text = re.sub(r"(?m)^\| this \| .*$", f"| this | {ours:.0f} |", PAGE.read_text())
    return re.sub(r"(?m)^(\| kymatio [^|]*) \| .*$", rf"\1 | {theirs:.0f} |", text)


def main() -> int:
    """Both sides, the table, and 1 when the target is missed or the features differ."""
    output = benchmarks.parser("scattering", __doc__).parse_args().output
    torch.set_num_threads(1)
    images = np.random.default_rng(0).random((IMAGES, 28, 28), dtype=np.float32)
    pixels, theirs = torch.from_numpy(images), kymatio()
    cases: dict[str, Callable[[], object]] = {"bqsgd": lambda: transformed(SCATTERING, images[:, None])}
    for batch in BATCHES:
        cases[f"kymatio, batches of {batch}"] = lambda batch=batch: [theirs(part) for part in pixels.split(batch)]  # type: ignore[misc]
    difference = float(np.abs(transformed(SCATTERING, images[:64, None]) - theirs(pixels[:64]).numpy()).max())
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(REPEATS):
        for name, run in cases.items():
            started = time.process_time()
            run()
            best[name] = min(best[name], (time.process_time() - started) / IMAGES)
    ratio = min(seconds for name, seconds in best.items() if name != "bqsgd") / best["bqsgd"]
    result = {
        "cpu_microseconds_per_image": {name: seconds * 1e6 for name, seconds in best.items()},
        "ratio": ratio,
        "least_ratio": LEAST_RATIO,
        "largest_difference": difference,
        "images": IMAGES,
        "repeats": REPEATS,
        "threads": 1,
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }
    if benchmarks.write(output, result):
        PAGE.write_text(page_with(result))
    for name, seconds in best.items():
        print(f"{name:26} {seconds * 1e6:8.0f} us an image")
    print(f"{ratio:.1f} times kymatio (target {LEAST_RATIO:g}); features differ by at most {difference:.1e}")
    return int(ratio < LEAST_RATIO or difference > 1e-3)
