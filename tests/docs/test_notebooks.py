"""The notebooks run from top to bottom, and print what they show."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from shown import assert_prints_as_shown

nbclient = pytest.importorskip("nbclient", reason="needs the extra `docs`")
nbformat = pytest.importorskip("nbformat", reason="needs the extra `docs`")

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def printed(notebook: Any) -> str:
    return "".join(output["text"] for output in outputs_of(notebook))


each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@each_notebook
def test_the_cells_of_a_notebook_print_what_it_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run in this process, which has imported torch already."""
    monkeypatch.chdir(tmp_path)
    notebook = nbformat.read(path, as_version=4)
    main, found = ModuleType("__main__"), io.StringIO()
    monkeypatch.setitem(sys.modules, "__main__", main)
    with contextlib.redirect_stdout(found):
        for cell in notebook.cells:
            if cell.cell_type == "code":
                exec(compile(cell.source, path.name, "exec"), vars(main))
    assert_prints_as_shown(found.getvalue(), printed(notebook))


@pytest.mark.slow
@each_notebook
def test_a_notebook_prints_what_it_shows_in_a_kernel_of_its_own(path: Path, tmp_path: Path) -> None:
    shown, again = (nbformat.read(path, as_version=4) for _ in range(2))
    for cell in again.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    nbclient.NotebookClient(again, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert_prints_as_shown(printed(again), printed(shown))


def test_the_notebooks_are_kept_with_their_outputs() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["make_a_loop_private", "plan_and_account"]
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        outputs = outputs_of(notebook)
        assert len(outputs) >= 4
        assert {output.output_type for output in outputs} == {"stream"}
        assert {output.name for output in outputs} == {"stdout"}
