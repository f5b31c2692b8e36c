"""One entry point for all benchmarks.

python -m benchmarks                                # lists the names
python -m benchmarks NAME                           # runs one; writes benchmarks/results/NAME.json
python -m benchmarks NAME --output FILE             # the same into another file; no page is written
python -m benchmarks NAME --help                    # the options of this one
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """Name -> the first line of its docstring, for every module with a `main`. Nothing is imported."""
    lines = {}
    for path in sorted(HERE.glob("[a-z]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            lines[path.stem] = (ast.get_docstring(tree) or "").splitlines()[0]
    return lines


def run(arguments: list[str]) -> int:
    """Run the benchmark that the first argument names; the exit code is 1 when it missed a target."""
    names = benchmarks()
    if not arguments:
        for name, line in names.items():
            print(f"{name:12} {line}")
        return 0
    name, *options = arguments
    if name not in names:
        print(f"no benchmark is called {name!r}; choose one of {', '.join(names)}", file=sys.stderr)
        return 2
    sys.argv = [f"python -m benchmarks {name}", *options]  # what its argparse reads and shows
    return int(importlib.import_module(f"benchmarks.{name}").main() or 0)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
