"""Speed, memory and bytes beside what one would otherwise use: `python -m benchmarks NAME`, never in tests."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has: `--output`, by default benchmarks/results/NAME.json."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--output", type=Path, default=RESULTS / f"{name}.json", help="the JSON file to write")
    return made


def write(output: Path, result: dict[str, Any]) -> bool:
    """Write a result; whether it is the committed one, from which pages are made."""
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return output.resolve().parent == RESULTS.resolve()
