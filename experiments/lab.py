"""What the scripts share: where results and pages lie, what a script was asked to do, provenance, filled Markdown."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import subprocess
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "experiments" / "results", ROOT / "docs"
WIDTH = 120
_ITEM = re.compile(r"(\s*)((?:[-*]|\d+\.)\s+)?")
_GLUE = "\0"
"""Stands for a space inside a code span while lines are filled, so that a span stays on one line."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `python -m experiments.reproduce` asks of a table or figure."""

    figures: Path
    """The folder for PNG files."""
    seeds: Sequence[int] = (0, 1, 2)
    workers: int = 1
    quick: bool = False
    """Every row for one round on padded digits; nothing is kept."""
    train: bool = True
    """Run what is missing. Otherwise only finished runs count."""


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, fields: Any) -> None:
    """Write a result. Infinities and NaN are refused: they are not JSON, and browsers fail on them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def provenance() -> dict[str, Any]:
    """Versions of this process, the commit, and whether files that the commit holds have been changed since."""
    names = ("bqsgd", "torch", "numpy", "dp-accounting")
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}
    status = ["status", "--porcelain", "--untracked-files=no", "--", "src", "experiments/*.py"]
    commit, changed = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        for words in (["rev-parse", "HEAD"], status)
    )
    return {"versions": versions, "commit": commit or "unknown", "changed": bool(changed)}


def wrapped(markdown: str) -> str:
    """The same text with every paragraph refilled that has a longer line; tables, headings and code stay as they are.

    >>> print(wrapped("- " + "word " * 40))  # doctest: +ELLIPSIS
    - word word ... word
      word word ... word
    """
    done: list[str] = []
    paragraph: list[str] = []
    code = False
    for line in markdown.split("\n"):
        fence = line.lstrip().startswith("```")
        if fence or code or not line.strip() or line.startswith(("|", "#")):
            done += [*_filled(paragraph), line]
            paragraph, code = [], code != fence
        elif _ITEM.match(line)[2]:  # type: ignore[index]
            done += _filled(paragraph)
            paragraph = [line]
        else:
            paragraph.append(line)
    return "\n".join(done + _filled(paragraph))


def _filled(paragraph: list[str]) -> list[str]:
    if all(len(line) <= WIDTH for line in paragraph):
        return paragraph
    indent, bullet = _ITEM.match(paragraph[0]).groups(default="")  # type: ignore[union-attr]
    body = " ".join(line.strip() for line in paragraph).removeprefix(bullet)
    glued = re.sub(r"`[^`]+`", lambda span: span[0].replace(" ", _GLUE), body)
    lines = textwrap.wrap(
        glued,
        WIDTH,
        initial_indent=indent + bullet,
        subsequent_indent=indent + " " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_GLUE, " ") for line in lines]
