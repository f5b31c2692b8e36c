"""Build the sdist and the wheel, check both in fresh environments, and tag the release.

`make dist` builds and checks any version. `make release` first requires that the version is final, that the changelog
has its date and that everything is committed, and it sets the tag after the checks have passed. Nothing is uploaded or
pushed: publish the files of dist/ and the tag yourself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
ACCOUNT = (
    "account --levels 1 --trials 251 --dimension 1000 --batch-size 32 --dataset-size 15000 --rounds 10 --delta 1e-5"
)


def run(*command: str | Path, folder: Path) -> str:
    """What the command prints. Raises CalledProcessError if it fails."""
    # Without these two a child would import the checkout instead of what was installed.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def obstacles(version: str, *, changelog: str, tags: Collection[str], uncommitted: str) -> list[str]:
    """Why this version cannot be released as things stand; empty if it can."""
    reasons = []
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        reasons.append(f"version {version} is not final: write X.Y.Z into src/bqsgd/__init__.py")
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.M):
        reasons.append(f"CHANGELOG.md has no heading '## {version} (YYYY-MM-DD)'")
    if f"v{version}" in tags:
        reasons.append(f"tag v{version} exists: releases are never made twice, so take a new version")
    if uncommitted:
        reasons.append(f"commit or remove these first:\n{uncommitted}")
    return reasons


def hatchling(*arguments: str | Path, folder: Path) -> str:
    """Run the build backend in `folder`."""
    return run(sys.executable, "-m", "hatchling", *arguments, folder=folder)


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist and the wheel of the checkout, in `folder`. Fails unless the sdist builds the same wheel."""
    hatchling("build", "--target", "sdist", "--directory", folder, folder=ROOT)
    hatchling("build", "--target", "wheel", "--directory", folder, folder=ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        (unpacked,) = Path(scratch).iterdir()
        hatchling("build", "--target", "wheel", "--directory", "again", folder=unpacked)
        if (unpacked / "again" / wheel.name).read_bytes() != wheel.read_bytes():
            raise SystemExit(f"{sdist.name} builds another wheel than the checkout does")
    return sdist, wheel


def check(file: Path, *, version: str) -> None:
    """Install `file` into an empty environment and run the program there."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        venv.create(folder / "env", with_pip=True)
        binaries = folder / "env" / "bin"
        constraints = ("--constraint", ROOT / "constraints.txt")
        run(binaries / "python", "-m", "pip", "install", "--quiet", *constraints, file, folder=folder)
        printed = run(binaries / "bqsgd", "--version", folder=folder).split()[-1]
        if printed != version:
            raise SystemExit(f"{file.name} says that it is version {printed}, not {version}")
        print(f"{file.name}\n{run(binaries / 'bqsgd', *ACCOUNT.split(), folder=folder)}")


def main(arguments: list[str]) -> None:
    """`dist` builds and checks; `release` also tags."""
    if arguments not in (["dist"], ["release"]):
        raise SystemExit("say dist or release")
    release = arguments == ["release"]
    version = hatchling("version", folder=ROOT).strip()
    if release:
        changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        tags = run("git", "tag", folder=ROOT).split()
        uncommitted = run("git", "status", "--porcelain", folder=ROOT)
        if reasons := obstacles(version, changelog=changelog, tags=tags, uncommitted=uncommitted):
            raise SystemExit("no release: " + "; ".join(reasons))
    shutil.rmtree(DIST, ignore_errors=True)  # files of another version must not be published by mistake
    for file in build(DIST):
        check(file, version=version)
    if release:  # last, so that a tag means: built and checked
        run("git", "tag", "--annotate", f"v{version}", "--message", f"bqsgd {version}", folder=ROOT)
        print(f"tagged v{version}; push the tag and publish the files of {DIST}")


if __name__ == "__main__":
    main(sys.argv[1:])
