"""The programs on the first pages that a reader opens run as they stand, and print what is shown below them."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from shown import assert_prints_as_shown

torch = pytest.importorskip("torch", reason="needs the extra `train`")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import loop  # noqa: E402

BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<shown>.*?)```)?", re.S)


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A model, an optimiser and a loader of a reader's own: those of the tutorial."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(BLOCK.findall(TUTORIAL)[1][0], names)
    return names


def run_page(text: str, names: dict[str, Any]) -> None:
    """Run the Python of a page from top to bottom in `names`, and compare what each block prints."""
    for block in BLOCK.finditer(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], "page", "exec"), names)
        if block["shown"] is not None:
            assert_prints_as_shown(printed.getvalue(), block["shown"])


def test_the_readme_makes_a_loop_private(digits: dict[str, Any]) -> None:
    run_page((ROOT / "README.md").read_text(encoding="utf-8"), digits)
    assert digits["private"].steps == 120
    assert 2.9 < digits["private"].guarantee().epsilon <= 3


TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
LAST = "## Several clients"
"""The heading from which on the tutorial is run in `make test-all` only: it plans for clients and writes a report."""


@pytest.mark.parametrize(
    "text", [TUTORIAL.split(LAST)[0], pytest.param(TUTORIAL, marks=pytest.mark.slow)], ids=["one process", "whole"]
)
def test_the_tutorial(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    run_page(text, names)
    assert names["private"].steps >= names["private"].rounds == 120
    assert (tmp_path / "me.ledger").is_file()
    assert (tmp_path / "runs" / "digits" / "report.html").is_file() == (LAST in text)


def test_the_programs_of_the_training_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    run_page((ROOT / "docs" / "training.md").read_text(encoding="utf-8"), names)
    assert names["choose"](0, [3, 5, 8], 2) == [3, 5]
    assert names["run"].summary.rounds == 20
    assert names["run"].summary.guarantee.epsilon <= 3


def sides(page: str) -> tuple[str, str]:
    """The two programs that a page shows beside each other: the other library's, ours."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").split('<div class="side-by-side" markdown>')[1]
    theirs, ours = (match["code"] for match in BLOCK.finditer(text))
    return theirs, ours


def test_our_side_of_the_opacus_page(digits: dict[str, Any]) -> None:
    theirs, ours = sides("coming_from_opacus.md")
    exec(ours, digits)
    assert digits["private"].guarantee().epsilon <= 3
    assert len(ours.splitlines()) <= len(theirs.splitlines())


@pytest.mark.slow
def test_the_side_of_opacus(digits: dict[str, Any]) -> None:
    pytest.importorskip("opacus", reason="needs the extra `bench`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(sides("coming_from_opacus.md")[0], digits)
    assert digits["engine"].get_epsilon(delta=1e-5) <= 3


@pytest.mark.slow
def test_names_of_opacus_on_its_page_exist() -> None:
    opacus = pytest.importorskip("opacus", reason="needs the extra `bench`")
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
    from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    from opacus.validators import ModuleValidator

    page = (ROOT / "docs" / "coming_from_opacus.md").read_text(encoding="utf-8")
    for found in (
        DifferentiallyPrivateDistributedDataParallel, DPGRU, DPLSTM, DPMultiheadAttention, BatchMemoryManager,
        ModuleValidator, opacus.PrivacyEngine, opacus.GradSampleModule,
    ):  # fmt: skip
        assert f"`{found.__name__}" in page
    assert {"validate", "fix"} <= set(dir(ModuleValidator))
    assert {"make_private_with_epsilon", "get_epsilon", "save_checkpoint", "load_checkpoint"} <= set(
        dir(opacus.PrivacyEngine)
    )


def test_the_section_of_what_was_measured_has_every_figure() -> None:
    times = {"plain": 11, "ours": 22, "opacus, hooks": 44, "opacus, ghost": 33}
    result = {
        "batch_size": 256,
        "times": {name: {"step_ms": value} for name, value in times.items()},
        "lines": {"opacus": {"added": 12, "removed": 1}, "ours": {"added": 13, "removed": 5}},
        "accuracy": {"epsilon": 3.0, "epochs": 3}
        | {
            name: {"accuracies": [0.9], "mean": mean, "epsilon": epsilon}
            for name, mean, epsilon in (
                ("plain", 0.98, "no privacy"),
                ("opacus", 0.91, "2.9912341"),
                ("ours", 0.92, "2.9991"),
            )
        },
        "versions": {"opacus": "1.6.0"},
    }
    text = loop.section(result)
    for figure in ("11 ms", "22 ms", "33 ms", "44 ms", "12 added", "5 removed", "98.00 %", "91.00 %", "2.992", "3.000"):
        assert figure in text
