"""docs/results.md and docs/frontier.md, written from experiments/results/*.json and nothing else.

python -m experiments.page     # writes the pages again
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.prose import wrapped
from experiments.sections import section as paper_section

from experiments import frontier_section

HERE = Path(__file__).parent
RESULTS, DOCS = HERE / "results", HERE.parent / "docs"
PAGES = {
    "results": ("table1", "table2", "table3", "figure1", "figure2", "tradeoffs", "compare"),
    "frontier": ("frontier", "frontier_search"),
}


def write() -> list[Path]:
    """Write the pages from what is there."""
    for name in PAGES:
        (DOCS / f"{name}.md").write_text(page(name), encoding="utf-8")
    return [DOCS / f"{name}.md" for name in PAGES]


def page(name: str) -> str:
    """One whole page: its text, then a section for every JSON file."""
    parts = [(HERE / f"{name}_text.md").read_text(encoding="utf-8").rstrip()]
    for subject in PAGES[name]:
        place = RESULTS / f"{subject}.json"
        if place.exists():
            parts.append(section(subject, json.loads(place.read_text(encoding="utf-8"))))
    return wrapped("\n\n".join(parts)) + "\n"


def section(name: str, fields: dict[str, Any]) -> str:
    """One table or figure as Markdown."""
    writers = {
        "frontier": frontier_section.table,
        "frontier_search": frontier_section.search,
    }
    return writers[name](fields) if name in writers else paper_section(name, fields)


if __name__ == "__main__":
    write()
