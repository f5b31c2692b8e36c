"""The wheel: everything the package needs is in it, and it works where the checkout is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

import bqsgd

pytest.importorskip("hatchling", reason="needs the extra `dev`")

ROOT = Path(__file__).resolve().parents[1]
SETTING = "--levels 1 --trials 251 --dimension 1000 --batch-size 32 --dataset-size 15000 --rounds 10 --delta 1e-5"


def run(*command: str | Path, folder: Path) -> str:
    """What the command prints; it runs in `folder` and finds nothing of the checkout."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel; one build for all workers of a test run."""
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent
    folder = shared / "wheel"
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, folder=ROOT)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Templates, `py.typed` and the Flower app among it; neither tests nor caches."""
    package = ROOT / "src" / "bqsgd"
    here = {str(path.relative_to(package.parent)) for path in package.rglob("*") if path.is_file()}
    here = {name for name in here if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == here
    assert "bqsgd/py.typed" in inside
    assert any(name.startswith("bqsgd/_src/reports/templates/") for name in inside)
    assert any(name.startswith("bqsgd/_src/flower/template/") for name in inside)


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """Byte for byte, where neither the checkout nor git is."""
    hatchling = (sys.executable, "-m", "hatchling", "build", "--target")
    run(*hatchling, "sdist", "--directory", tmp_path / "sdist", folder=ROOT)
    (sdist,) = (tmp_path / "sdist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (tree,) = (tmp_path / "unpacked").iterdir()
    run(*hatchling, "wheel", "--directory", tmp_path / "again", folder=tree)
    assert (tmp_path / "again" / wheel.name).read_bytes() == wheel.read_bytes()


def check_the_installed_package(environment: Path) -> None:
    """The command and the module answer from the installed files, and agree."""
    binaries = environment / "bin"
    assert run(binaries / "bqsgd", "--version", folder=environment).split()[-1] == bqsgd.__version__
    printed = json.loads(run(binaries / "bqsgd", "account", *SETTING.split(), "--json", folder=environment))
    script = (
        "import bqsgd\n"
        "answer = bqsgd.account(levels=1, trials=251, dimension=1000, batch_size=32, dataset_size=15000, rounds=10,"
        " delta=1e-5)\n"
        "print(bqsgd.__file__, answer.guarantee.epsilon)"
    )
    file, epsilon = run(binaries / "python", "-c", script, folder=environment).split()
    assert Path(file).is_relative_to(environment)
    assert 0 < float(epsilon) == printed["guarantee"]["epsilon"] < 1


def test_the_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """An environment that holds the wheel alone, and takes the libraries (not the package) from the tests'."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, folder=tmp_path)
    packages = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path).strip()
    )
    # A path file inside that folder is not read again, so the editable install of the tests stays out.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    check_the_installed_package(tmp_path / "env")


@pytest.mark.slow
def test_the_wheel_brings_what_it_needs(wheel: Path, tmp_path: Path) -> None:
    """An empty environment: the declared dependencies, without torch, are enough to plan and to account."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, folder=tmp_path)
    assert run(python, "-c", "import importlib.util as u; print(u.find_spec('torch'))", folder=tmp_path) == "None\n"
    check_the_installed_package(tmp_path / "env")
