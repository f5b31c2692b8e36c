"""One thread a process unless told otherwise (the suite runs several), and the count of cases the battery ran."""

from __future__ import annotations

import os
from typing import Any

import torch

torch.set_num_threads(int(os.environ.get("BQSGD_TEST_THREADS", "1")))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    passed = terminalreporter.stats.get("passed", [])
    cases = sum(value for report in passed for name, value in report.user_properties if name == "battery_cases")
    if cases:
        terminalreporter.write_line(f"per-sample gradient battery: {cases} cases against the batch-of-one oracle")
