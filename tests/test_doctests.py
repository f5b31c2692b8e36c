"""Every example in a docstring prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

import bqsgd

MODULES = [
    "bqsgd",
    *sorted(module.name for module in pkgutil.walk_packages(bqsgd.__path__, "bqsgd.", onerror=lambda name: None)),
]
EXTRAS = ("bqsgd._src.flower",)


def load(name):
    if "nvflare" in name:
        pytest.importorskip("nvflare", reason="NVFlare has an environment of its own")
    if name.startswith(EXTRAS):
        pytest.importorskip("flwr", reason="needs the extra `flower`")
    return importlib.import_module(name)


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_examples(name):
    assert doctest.testmod(load(name)).failed == 0


def test_there_are_examples_to_run():
    finder = doctest.DocTestFinder()
    found = sum(
        bool(test.examples)
        for name in ("params", "tasks.named", "data.dataset")
        for test in finder.find(load(f"bqsgd._src.{name}"))
    )
    assert found >= 3
