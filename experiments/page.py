"""docs/results.md, written from experiments/results/*.json and nothing else.

python -m experiments.page     # writes the page again
"""

from __future__ import annotations

import json
from pathlib import Path

from experiments.sections import section

HERE = Path(__file__).parent
RESULTS, PAGE, TEXT = HERE / "results", HERE.parent / "docs" / "results.md", HERE / "results_text.md"
ORDER = ("table1", "table2", "table3", "figure1", "figure2", "tradeoffs", "compare")


def write() -> Path:
    """Write the page from what is there."""
    PAGE.write_text(page(), encoding="utf-8")
    return PAGE


def page() -> str:
    """The whole page: the text, then a section for every JSON file."""
    parts = [TEXT.read_text(encoding="utf-8").rstrip()]
    for name in ORDER:
        place = RESULTS / f"{name}.json"
        if place.exists():
            parts.append(section(name, json.loads(place.read_text(encoding="utf-8"))))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    write()
