"""The public API: loaded when used, documented with an example on the reference pages, and all that examples use."""

import ast
import doctest
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bqsgd
from bqsgd._src.cli import app

ROOT = Path(__file__).resolve().parents[1]
SMALL = {"dimension": 5, "batch_size": 32, "dataset_size": 1000, "rounds": 3, "delta": 1e-3}


def shown(capsys, *arguments):
    capsys.readouterr()
    assert app.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def as_options(values):
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)]


MODULES = ("clips", "data", "distributed", "flower", "integrations.flower", "integrations.loggers", "laws", "tables")
HEAVY = ("integrations.dp_accounting", "integrations.huggingface", "integrations.lightning")
"""Public modules that take seconds to import: these tests read them, and tests of their own import them."""
MADE_BY = {
    "AccountAnswer": "account",
    "Plan": "plan",
    "PlanAnswer": "plan",
    "PoissonLoader": "make_private",
    "Private": "make_private",
    "open_update": "UpdateGate",
    "SumPlanAnswer": "plan_secure",
}
"""What a function returns: its docstring has the example."""
USERS = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(path for path in ROOT.glob("examples/**/*") if path.suffix in {".py", ".mjs"}),
    *sorted(ROOT.glob("notebooks/*.ipynb")),
    *sorted(ROOT.glob("src/bqsgd/_src/flower/template/*")),
]
"""What people copy from."""


def public_names() -> set[str]:
    """Every public name, as `bqsgd.name` or `bqsgd.module.name`."""
    found = {f"bqsgd.{name}" for name in bqsgd.__all__}
    for name in MODULES:
        if "flower" in name:
            pytest.importorskip("flwr", reason="needs the extra `flower`")
        module = importlib.import_module(f"bqsgd.{name}")
        found |= {f"bqsgd.{name}.{each}" for each in module.__all__}
    return found | {f"bqsgd.{name}.{each}" for name in HEAVY for each in defined_in(name)}


def defined_in(name: str) -> dict[str, str | None]:
    """The public names of a module that is not imported, each with its docstring."""
    src = Path(bqsgd.__file__).parent
    tree = ast.parse((src / "_src" / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
    known = {
        each.name: ast.get_docstring(each) for each in tree.body if isinstance(each, (ast.ClassDef, ast.FunctionDef))
    }
    listed = (src / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8").split("__all__ = ")[1]
    return {each: known[each] for each in ast.literal_eval(listed)}


def test_every_name_is_there_and_stays_the_same_object():
    for name in bqsgd.__all__:
        assert getattr(bqsgd, name) is getattr(bqsgd, name)
        assert name in dir(bqsgd)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        bqsgd.nothing  # noqa: B018


def test_the_public_modules_are_those_outside_of_src():
    package = Path(bqsgd.__file__).parent
    outside = {path.stem for path in package.glob("*.py")}
    assert outside == {"__init__", "__main__", *(name for name in MODULES if "." not in name)}
    # NVFlare has an environment of its own, so its module cannot be imported here.
    within = {path.stem for path in (package / "integrations").glob("*.py")}
    assert within == {"__init__", "dp_accounting", "flower", "huggingface", "lightning", "loggers", "nvflare"}
    assert bqsgd.data is importlib.import_module("bqsgd.data")


def test_the_reference_pages_document_the_public_names_and_no_others():
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    documented = [name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.M)]
    assert sorted(documented) == sorted(public_names())


def test_every_public_name_has_a_docstring():
    for name in public_names():
        module, _, last = name.rpartition(".")
        if module.removeprefix("bqsgd.") in HEAVY:
            assert defined_in(module.removeprefix("bqsgd."))[last], name
            continue
        assert inspect.getdoc(getattr(importlib.import_module(module), last)), name


@pytest.mark.parametrize("path", USERS, ids=lambda path: path.name)
def test_what_people_copy_from_imports_public_names_only(path):
    """Prose may name an internal module; code that a reader copies imports none."""
    assert re.findall(r"(?:from|import) bqsgd\._src.*", path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", bqsgd.__all__)
def test_every_name_has_an_example(name):
    """`test_doctests` runs it; here it is checked to be on the name itself, not on a method of it."""
    shown = MADE_BY.get(name, name)
    if isinstance(getattr(bqsgd, name), type) and issubclass(getattr(bqsgd, name), bqsgd.BqsgdError):
        return  # an error needs no example: it says what it is when it is raised
    (found,) = [
        test for test in doctest.DocTestFinder(recurse=False).find(getattr(bqsgd, shown), shown) if test.name == shown
    ]
    assert found.examples


def test_what_type_checkers_see_is_what_is_loaded():
    """The imports under TYPE_CHECKING and the table of homes agree; with the errors, they make up `__all__`."""
    tree = ast.parse(Path(bqsgd.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {node.module: tuple(alias.name for alias in node.names) for node in block.body}
    assert {home: sorted(names) for home, names in typed.items()} == {
        home: sorted(names) for home, names in bqsgd._HOMES.items()
    }
    (errors,) = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "bqsgd._src.errors"]
    loaded = [name for names in typed.values() for name in names] + [alias.name for alias in errors.names]
    assert sorted(loaded) == sorted(bqsgd.__all__)


def test_asking_needs_no_torch():
    script = (
        "import sys, bqsgd\n"
        f"bqsgd.account(levels=1, trials=51, **{SMALL})\n"
        "bqsgd.Mechanism, bqsgd.Guarantee, bqsgd.Ledger, bqsgd.encode_frame, bqsgd.decode_frame\n"
        "sys.exit(','.join({'torch', 'flwr'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "more",
    [{}, {"sampling": "none", "relation": "replace", "linf": 0.02}],
    ids=["default", "replace"],
)
def test_account_answers_as_the_command_does(more, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    asked = {"levels": 1, "trials": 51} | SMALL | more
    found = bqsgd.account(**asked)
    assert json.loads(shown(capsys, "account", *as_options(asked), "--json")) == found.to_dict()
    assert shown(capsys, "account", *as_options(asked)) == f"{found}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        {"bits": 6, "sampling": "none"} | SMALL | {"rounds": 1},
        {"bits": 3, "sampling": "none"} | SMALL | {"rounds": 1},
        {"bits": 8, "dimension": 20, "dataset_size": 2000, "delta": 1e-3},
    ],
    ids=["given", "coarsened", "proposed"],
)
def test_plan_answers_as_the_command_does(asked, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    asked = {"epsilon": 2} | asked
    found = bqsgd.plan(**asked)
    assert json.loads(shown(capsys, "plan", *as_options(asked), "--json")) == found.to_dict()
    assert shown(capsys, "plan", *as_options(asked)) == f"{found}\n"
    assert found.guarantee.epsilon <= 2


@pytest.mark.parametrize(
    ("name", "questions"), [("account", ["account"]), ("plan", ["plan", "plan_secure", "plan_sites"])]
)
def test_questions_have_the_words_of_the_commands(name, questions):
    """Every keyword is an option and every option a keyword, besides how the command prints and which it asks."""
    of_queries = {"query", "bins", "times"}  # asked of the planner alone (planner/queries.py)
    own = set().union(*(inspect.signature(getattr(bqsgd, question)).parameters for question in questions))
    assert own == set(inspect.signature(getattr(app, name)).parameters) - {"json", "secure", "figure"} - of_queries


def test_bad_words_are_refused_with_those_that_are_known():
    asked = {"levels": 1, "trials": 51} | SMALL
    with pytest.raises(ValueError, match="sampling must be one of poisson, fixed, none"):
        bqsgd.account(**asked, sampling="shuffled")
    with pytest.raises(ValueError, match="relation must be one of add-remove, replace"):
        bqsgd.account(**asked, sampling="none", relation="zero-out")
