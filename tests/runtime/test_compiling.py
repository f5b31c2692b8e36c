"""Compiled loops: kept on disk, said while they are compiled, and quick to compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core.caching import CacheImpl

from bqsgd._src.runtime import compiling

SUMS = """
import numpy as np
from bqsgd._src.persample._kernels import lanes

lanes.sums(np.ones((2, 3, 16), np.float32))
"""
PROGRAM = """
import numpy as np
from numba.core import event
from bqsgd._src.persample._kernels import contiguous, lanes

seen = event.RecordingListener()
with event.install_listener("numba:compile", seen):
    lanes.sums(np.ones((2, 3, 16), np.float32))
    starts = np.zeros((1, 1), np.int64)
    x = np.arange(20, dtype=np.float32)
    rows = contiguous.Rows(x=x, starts=starts, blocks=contiguous.blocks_of((20,)), sizes=(20,))
    assert contiguous.row_norms(rows)[0].tolist() == [19.0]
print(*(event.data["dispatcher"].py_func.__module__ for _, event in seen.buffer))
"""


def run(cache: Path, program: str = PROGRAM, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "NUMBA_CACHE_DIR": str(cache), **environment}
    return subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, check=True)


def test_compiling_is_said_once_and_a_second_process_finds_the_loops(tmp_path: Path) -> None:
    cold, warm = run(tmp_path), run(tmp_path)
    assert cold.stderr == compiling.NOTICE + "\n"
    assert "bqsgd._src.persample._kernels.lanes" in cold.stdout
    assert (warm.stdout, warm.stderr) == ("\n", "")
    # numba prepares the text of an error for a copy between slices, which takes longer than the loop itself
    assert "unicode" not in cold.stdout


def test_a_terminal_shows_which_loop_is_compiled(tmp_path: Path) -> None:
    shown = run(tmp_path, SUMS, FORCE_COLOR="1", COLUMNS="200").stderr
    assert compiling.NOTICE in shown
    assert "(sums)" in shown


def test_loops_work_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])

    @compiling.njit(nogil=True, cache=True)
    def double(x: np.ndarray) -> np.ndarray:
        return x + x

    assert double(np.ones(2)).tolist() == [2, 2]
