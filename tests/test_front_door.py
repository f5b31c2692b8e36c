"""`import bqsgd`: a dozen names, loaded when used, documented with an example, and the same answers as the commands."""

import ast
import doctest
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import bqsgd
from bqsgd.cli import app

SMALL = {"dimension": 5, "batch_size": 32, "dataset_size": 1000, "rounds": 3, "delta": 1e-3}


def shown(capsys, *arguments):
    capsys.readouterr()
    assert app.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def as_options(values):
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)]


def test_every_name_is_there_and_stays_the_same_object():
    for name in bqsgd.__all__:
        assert getattr(bqsgd, name) is getattr(bqsgd, name)
        assert name in dir(bqsgd)
    assert len(bqsgd.__all__) <= 15
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        bqsgd.nothing  # noqa: B018


@pytest.mark.parametrize("name", bqsgd.__all__)
def test_every_name_has_an_example(name):
    """`test_doctests` runs it; here it is checked to be on the name itself, not on a method of it."""
    (found,) = [
        test for test in doctest.DocTestFinder(recurse=False).find(getattr(bqsgd, name), name) if test.name == name
    ]
    assert found.examples


def test_what_type_checkers_see_is_what_is_loaded():
    """The imports under TYPE_CHECKING, the table of homes and `__all__` name the same things."""
    tree = ast.parse(Path(bqsgd.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {alias.name: node.module for node in block.body for alias in node.names}
    assert typed == bqsgd._HOMES
    assert sorted(typed) == sorted(bqsgd.__all__)


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


@pytest.mark.parametrize(("name", "questions"), [("account", ["account"]), ("plan", ["plan", "plan_secure"])])
def test_questions_have_the_words_of_the_commands(name, questions):
    """Every keyword is an option and every option a keyword, besides how the command prints and which it asks."""
    own = set().union(*(inspect.signature(getattr(bqsgd, question)).parameters for question in questions))
    assert own == set(inspect.signature(getattr(app, name)).parameters) - {"nominal", "json", "secure"}


def test_bad_words_are_refused_with_those_that_are_known():
    asked = {"levels": 1, "trials": 51} | SMALL
    with pytest.raises(ValueError, match="sampling must be one of poisson, fixed, none"):
        bqsgd.account(**asked, sampling="shuffled")
    with pytest.raises(ValueError, match="relation must be one of add-remove, replace"):
        bqsgd.account(**asked, sampling="none", relation="zero-out")
