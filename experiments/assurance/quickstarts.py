"""What the frameworks' own quickstarts need on a machine that cannot reach the hub of Flower's data: not their code.

python -m experiments.assurance.quickstarts     # packages and CIFAR-10 into .quickstarts/, once

Flower's app asks for "uoft-cs/cifar10", and a folder of that name beside it is taken in the place of the hub: the real
images and labels, in the same columns. NVFlare's job finds torchvision's files in the folder that it names itself.
torchvision is the published wheel, but only its Python part runs here (`quickstart_site/sitecustomize.py`).
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from functools import cache
from io import BytesIO
from pathlib import Path

from bqsgd._src.data import _cifar10
from bqsgd._src.data._sources import fetched
from bqsgd._src.data.dataset import CATALOGUE
from experiments import lab

FOLDER = lab.ROOT / ".quickstarts"
HELLO_PT_DATA = Path("/tmp/nvflare/data")
"""In NVFlare's client.py."""
_PACKAGES = (
    "torchvision==0.28.0 flwr-datasets==0.6.1 datasets==4.8.5 pyarrow==26.0.1 pandas==3.1.1 pillow==13.0.0 dill==0.4.1 "
    "multiprocess==0.70.19 xxhash==4.1.0 fsspec==2026.9.0 huggingface_hub==2.4.0 seaborn==0.13.2 tqdm==4.70.1 "
    "matplotlib==3.11.2"
)
_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@cache
def environment() -> dict[str, str]:
    """The environment in which the quickstarts run; makes what is missing of it."""
    path = [Path(__file__).with_name("quickstart_site"), FOLDER / "packages", lab.ROOT / "src", lab.ROOT]
    made = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "HF_HOME": str(FOLDER / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
    }
    if not (FOLDER / "made").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", FOLDER / "packages", *_PACKAGES.split()], check=True)
        subprocess.run([sys.executable, "-m", __spec__.name], env=os.environ | made, cwd=FOLDER, check=True)
        (FOLDER / "made").touch()
    return made


def main() -> None:
    """Write CIFAR-10 in both forms."""
    if not (FOLDER / "packages").exists():
        environment()
        return
    from datasets import ClassLabel, Dataset, Features, Image, load_dataset
    from PIL import Image as Picture

    raw, _ = fetched(CATALOGUE["cifar-10"], quiet=True)
    names = [f"data_batch_{number}" for number in range(1, len(raw))] + ["test_batch"]
    batches = HELLO_PT_DATA / "cifar-10-batches-py"
    batches.mkdir(parents=True, exist_ok=True)
    (batches / "batches.meta").write_bytes(pickle.dumps({"label_names": _NAMES}))
    for name, content in zip(names, raw, strict=True):
        images, labels = _cifar10.parse_batch(content)
        (batches / name).write_bytes(pickle.dumps({"data": images.reshape(len(labels), -1), "labels": labels.tolist()}))
    features, place = Features({"img": Image(), "label": ClassLabel(names=_NAMES)}), FOLDER / "uoft-cs" / "cifar10"
    place.mkdir(parents=True, exist_ok=True)
    for split, part in {"train": raw[:-1], "test": raw[-1:]}.items():
        images, labels = _cifar10.parse_batch(b"".join(part))
        pictures = []
        for image in images.transpose(0, 2, 3, 1):
            stream = BytesIO()
            Picture.fromarray(image).save(stream, format="png")
            pictures.append({"bytes": stream.getvalue(), "path": None})
        rows = Dataset.from_dict({"img": pictures, "label": labels.tolist()}, features=features)
        rows.to_parquet(place / f"{split}-00000-of-00001.parquet")
    load_dataset("uoft-cs/cifar10")  # fills the cache, which many processes would fill at once


if __name__ == "__main__":
    main()
