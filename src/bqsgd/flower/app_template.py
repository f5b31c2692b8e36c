"""`bqsgd flower init`: a small Flower app to edit."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from bqsgd.errors import InvalidParameter

_PACKAGE = "private_app"


def write_app(folder: Path) -> list[Path]:
    """Write the app; a folder with anything in it is refused. Returns the files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidParameter(f"{folder} is there already and not empty; name another folder")
    (folder / _PACKAGE).mkdir(parents=True, exist_ok=True)
    written = []
    for source in sorted(files("bqsgd.flower").joinpath("template").iterdir(), key=lambda file: file.name):
        if not source.name.endswith(".in"):
            continue
        name = source.name.removesuffix(".in")
        target = folder / name if name == "pyproject.toml" else folder / _PACKAGE / name
        target.write_text(source.read_text())
        written.append(target)
    return written
