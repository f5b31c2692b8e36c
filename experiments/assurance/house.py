"""The size of a package, how much it explains, and the path of a round through it: one script for ours and others.

python -m experiments.assurance.house  # this tree and the installed packages it is compared with
python -m experiments.assurance.house --before OLD  # the same, with the older checkout in the folder OLD beside it
python -m experiments.assurance.house --tree PATH  # only the table of one package folder; writes nothing

What is counted, tests excluded (folders `tests`, `test`, `testing`; files test_*.py, *_test.py, conftest.py):

- modules: files of Python other than `__init__.py`. Everything below counts the `__init__.py` files too.
- source lines: lines that hold code. Blank lines, comments and docstrings are none.
- tokens: names, operators and numbers. Strings, comments and layout are none.
- functions, median and max lines: from `def` to the last line, docstring included, methods and inner functions too.
- functions with 8 or more arguments: `self`, `cls`, `*args` and `**kwargs` do not count.
- public names: classes and functions without a leading underscore, at the top of modules none of whose path begins
  with one. exported: names in `__all__` of such modules.
- docstring lines over source lines; comment lines (a whole line, the licence at the head of a file left out) per
  1,000 source lines.

Of bqsgd also: the options of `bqsgd train` without `--help`, the pages in docs/ and their words, and the second round
of a seeded run of two clients in one process. Of that round: calls of functions of the package, the files they are in,
and the depth of the gradients: frames of the package from `Run.rounds` to the gradients' torch operators, and that
operator. Only the second round is like those after it: the first compiles, and makes the first plan.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.lab import RESULTS, ROOT, read_json, write_json

from experiments import pages

OTHERS = ("opacus", "dp_accounting", "flwr")
MANY_ARGUMENTS = 8
_TEST_FOLDERS = {"tests", "test", "testing"}
_COUNTED_TOKENS = {tokenize.NAME, tokenize.OP, tokenize.NUMBER}
_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def measure(package: Path) -> dict[str, Any]:
    """The table of one package folder."""
    lengths: list[int] = []
    counts = dict.fromkeys(("modules", "source", "tokens", "many", "public", "exported", "docstring", "comment"), 0)
    for path in sorted(package.rglob("*.py")):
        if _is_test(path.relative_to(package)):
            continue
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
        lengths += [_last_line(node) - node.lineno + 1 for node in functions]
        counts["modules"] += path.name != "__init__.py"
        counts["many"] += sum(_arguments(node) >= MANY_ARGUMENTS for node in functions)
        for name, count in _lines(text, tree).items():
            counts[name] += count
        if not any(part.startswith("_") and part != "__init__.py" for part in path.relative_to(package).parts):
            counts["public"] += sum(
                isinstance(node, _Function | ast.ClassDef) and not node.name.startswith("_") for node in tree.body
            )
            counts["exported"] += _exported(tree)
    return {
        "modules": counts["modules"],
        "source_lines": counts["source"],
        "tokens_thousands": round(counts["tokens"] / 1000),
        "function_lines_median": int(statistics.median(lengths)),
        "function_lines_max": max(lengths),
        "functions_with_8_arguments": counts["many"],
        "public_names": counts["public"],
        "exported_names": counts["exported"],
        "docstring_lines_per_source_line": round(counts["docstring"] / counts["source"], 2),
        "comment_lines_per_1000": round(1000 * counts["comment"] / counts["source"]),
    }


def _is_test(path: Path) -> bool:
    name = path.name
    return bool(
        _TEST_FOLDERS & set(path.parts[:-1])
        or name.startswith("test_")
        or name.endswith("_test.py")
        or name == "conftest.py"
    )


def _last_line(node: ast.stmt | ast.expr) -> int:
    assert node.end_lineno is not None
    return node.end_lineno


def _arguments(function: _Function) -> int:
    named = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return sum(argument.arg not in ("self", "cls") for argument in named)


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | _Function) and ast.get_docstring(node) is not None:
            lines |= set(range(node.body[0].lineno, _last_line(node.body[0]) + 1))
    return lines


def _lines(text: str, tree: ast.Module) -> dict[str, int]:
    docstrings = _docstring_lines(tree)
    first_statement = tree.body[0].lineno if tree.body else sys.maxsize
    source: set[int] = set()
    tokens = comments = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row = token.start[0]
        if token.type == tokenize.COMMENT:
            # A comment before the first statement is a licence or an encoding line: it explains nothing.
            comments += token.line.lstrip().startswith("#") and row > first_statement
        elif token.type not in _LAYOUT:
            source |= set(range(row, token.end[0] + 1))
            tokens += token.type in _COUNTED_TOKENS and row not in docstrings
    source -= docstrings
    return {"source": len(source), "tokens": tokens, "docstring": len(docstrings), "comment": comments}


def _exported(tree: ast.Module) -> int:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "__all__" for target in node.targets):
            return len(node.value.elts) if isinstance(node.value, ast.List | ast.Tuple) else 0
    return 0


def measure_checkout(root: Path) -> dict[str, Any]:
    """Our package in a checkout: its table, the options of `train`, the pages, and the path of a round."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(root / "src"), str(ROOT))), "COLUMNS": "200"}

    def output(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    # Run as a file: with -m the folder of this checkout would come first, and its `src` is what is installed.
    path_of_a_round = json.loads(output(__file__, "--round").splitlines()[-1])
    options = set(re.findall(r"(?m)^[^a-z-]*(?:-[a-z],? +)?(--[a-z-]+)", output("-m", "bqsgd", "train", "--help")))
    pages = [page.read_text(encoding="utf-8") for page in (root / "docs").glob("*.md")]
    return {
        **measure(root / "src" / "bqsgd"),
        "train_options": len(options - {"--help"}),
        "pages": len(pages),
        "words": sum(len(page.split()) for page in pages),
        "round": path_of_a_round,
    }


def trace_round() -> dict[str, int]:
    """The second round of a small run of the bqsgd that is imported here: calls, files, depth of the gradients."""
    import bqsgd

    package = str(Path(bqsgd.__file__).parent) + os.sep
    files: set[str] = set()
    counts = {"calls": 0, "depth": 0}

    def look(frame: Any, event: str, _: Any) -> None:
        if event != "call":
            return
        name = frame.f_code.co_filename
        if name.startswith(package):
            files.add(name)
            counts["calls"] += 1
        elif _runs_an_operator(frame):
            inside = [code for code in _stack(frame) if code.co_filename.startswith(package)]
            above = [place for place, code in enumerate(inside) if code.co_qualname == "Run.rounds"]
            if above and "persample" in inside[0].co_filename:
                counts["depth"] = max(counts["depth"], above[0] + 2)  # both ends, and the operator itself

    with tempfile.TemporaryDirectory() as folder, _small_run(Path(folder) / "run") as run:
        rounds = run.rounds()
        next(rounds)
        threading.setprofile(look)  # for threads that start from here on; clients may be asked in one
        sys.setprofile(look)
        next(rounds)
        sys.setprofile(None)
        threading.setprofile(None)
        rounds.close()
    return {"files": len(files), "depth": counts["depth"], "calls": counts["calls"]}


def _stack(frame: Any) -> Iterator[Any]:
    """The code of a frame and of its callers, innermost first."""
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _runs_an_operator(frame: Any) -> bool:
    """Whether torch is about to run one operator of a traced program, or autograd."""
    name, function = frame.f_code.co_filename, frame.f_code.co_name
    return name.endswith("torch/_ops.py") or ("torch/autograd" in name and function in ("grad", "backward"))


def _small_run(folder: Path) -> Any:
    import numpy as np
    import torch

    import bqsgd

    def make_model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Linear(4, 2)

    rng = np.random.default_rng(0)
    shares = [(rng.normal(size=(32, 4)).astype(np.float32), rng.integers(0, 2, 32)) for _ in range(2)]
    config = bqsgd.Config.of(
        clients=2, rounds=3, batch_size=8, levels=4, trials=60, clip="l2", clip_norm=1.0, range=0.1, epsilon=900.0,
        seed=1, workers=1,
    )  # fmt: skip
    return bqsgd.Run.start(bqsgd.Task(make_model=make_model, shares=shares, test=shares[0]), config, folder=folder)


def installed(name: str) -> dict[str, Any] | None:
    """An installed package with its version, or None where it is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    version = importlib.metadata.version(name.replace("_", "-"))
    return {"version": version, **measure(Path(spec.origin).parent)}


ROWS = {
    "modules": "{modules}",
    "source lines": "{source_lines:,}",
    "tokens (thousands)": "{tokens_thousands}",
    "functions, median / max lines": "{function_lines_median} / {function_lines_max}",
    "functions with 8 or more arguments": "{functions_with_8_arguments}",
    "public names outside `_` modules; exported": "{public_names}; {exported_names}",
    "docstring lines / source lines": "{docstring_lines_per_source_line:.2f}",
    "comment lines per 1,000 source lines": "{comment_lines_per_1000}",
}
OUR_ROWS = {
    "options of `bqsgd train`": "{train_options}",
    "pages, words": "{pages}, {words:,}",
    "a round: files, depth of the gradients, calls": "{round[files]}, {round[depth]}, {round[calls]:,}",
}


def section(fields: dict[str, Any]) -> str:
    """The table as Markdown, every figure from the results."""
    columns = {"before": fields.get("before"), "bqsgd": fields["bqsgd"]}
    columns |= {f"{name} {other['version']}": other for name, other in fields["others"].items()}
    columns = {name: column for name, column in columns.items() if column is not None}
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
    for label, form in (ROWS | OUR_ROWS).items():
        cells = [form.format(**column) if label in ROWS or "round" in column else "" for column in columns.values()]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="an older checkout; without it, what the JSON has stays")
    parser.add_argument("--tree", type=Path, help="only print the table of this package folder")
    parser.add_argument("--round", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.round:
        print(json.dumps(trace_round()))
        return
    if options.tree is not None:
        print(json.dumps(measure(options.tree), indent=1))
        return
    place = RESULTS / "house.json"
    before = read_json(place).get("before") if place.exists() else None
    fields = {
        "before": before if options.before is None else measure_checkout(options.before.resolve()),
        "bqsgd": measure_checkout(ROOT),
        "others": {name: table for name in OTHERS if (table := installed(name)) is not None},
    }
    write_json(place, fields)
    pages.write()
    print(section(fields))


if __name__ == "__main__":
    main()
