"""The figures of the page are those of the committed run."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import RESULTS
from benchmarks.scattering import PAGE, page_with


def test_the_table_of_the_page_is_that_of_the_committed_run() -> None:
    assert page_with(json.loads((RESULTS / "scattering.json").read_text())) == PAGE.read_text()
