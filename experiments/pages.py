"""The measured sections of the pages, each written from one JSON file and nothing else.

A page holds a section between the lines `<!-- measured: NAME -->` and `<!-- end of measured -->`; the section may move
to any page. The text around it is written by hand.

python -m experiments.pages     # writes every section again
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from experiments.lab import DOCS, ROOT, read_json, wrapped

_PAPER, _FRONTIER, _SCALE = "experiments.paper.sections", "experiments.frontier.sections", "experiments.scale.sections"
_SECTIONS = {
    "table1": f"{_PAPER}:table1",
    "table2": f"{_PAPER}:table",
    "table3": f"{_PAPER}:table",
    "figure1": f"{_PAPER}:figure1",
    "figure2": f"{_PAPER}:figure2",
    "tradeoffs": f"{_PAPER}:tradeoffs",
    "compare": f"{_PAPER}:compare",
    "privacy_table": "experiments.paper.privacy_table:section",
    "paper_subsets": "experiments.paper.subsets:section",
    "frontier": f"{_FRONTIER}:table",
    "frontier_search": f"{_FRONTIER}:search",
    "frontier_own_clients": "experiments.frontier.own_clients:section",
    "sums_gain": f"{_FRONTIER}:sums_gain",
    "digits_range": "experiments.frontier.digits_range:section",
    "audit_faults": "experiments.assurance.audit_faults:section",
    "faults": "experiments.assurance.faults:section",
    "l2_accounting": "experiments.assurance.l2_accounting:section",
    "mechanisms": "experiments.assurance.mechanisms:section",
    "by_value": "experiments.assurance.by_value:section",
    "gates": "experiments.assurance.gates:section",
    "tightness": "experiments.assurance.tightness:section",
    "counts": "experiments.assurance.counts:section",
    "outlook": "experiments.assurance.outlook:section",
    "liars": "experiments.assurance.liars:section",
    "house": "experiments.assurance.house:section",
    "way_down": f"{_SCALE}:way_down",
    "flower_clients": f"{_SCALE}:flower_clients",
    "heterogeneity": f"{_SCALE}:heterogeneity",
    "user_level": f"{_SCALE}:user_level",
    "flower_processes": "experiments.scale.flower_processes:section",
    "secure_flower": "experiments.scale.secure_flower:section",
    "clients": f"{_SCALE}:clients",
    "loop": "benchmarks.loop:section",
    "lora": "benchmarks.lora:section",
}
"""Name -> module:function that makes the Markdown from the JSON. Imported when used: some need opacus or flwr."""
_MEASURED_IN_BENCHMARKS = ("clients", "loop", "lora")
_SECOND_SECTIONS = {"sums_gain": "frontier"}
"""Name -> the section from whose JSON file it is made too."""
_BLOCK = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end of measured -->\n)", re.DOTALL)


def results_of(name: str) -> Path:
    """The JSON file of a section."""
    folder = "benchmarks" if name in _MEASURED_IN_BENCHMARKS else "experiments"
    return ROOT / folder / "results" / f"{_SECOND_SECTIONS.get(name, name)}.json"


def section(name: str, fields: dict[str, Any]) -> str:
    """One section as Markdown."""
    module, function = _SECTIONS[name].split(":")
    return wrapped(getattr(importlib.import_module(module), function)(fields).strip("\n"))


def with_sections(text: str) -> str:
    """The text of a page with every section as its JSON file has it; empty where there is no file yet."""

    def block(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        place = results_of(name)
        return f"{begin}\n{section(name, read_json(place))}\n\n{end}" if place.exists() else begin + end

    return _BLOCK.sub(block, text)


def sections_on(page: Path) -> list[str]:
    """The names of a page's sections."""
    return [name for _, name, _ in _BLOCK.findall(page.read_text(encoding="utf-8"))]


def write() -> None:
    """Write every page again that has a section."""
    for page in sorted(DOCS.glob("*.md")):
        if sections_on(page):
            page.write_text(with_sections(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
