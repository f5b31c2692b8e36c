"""What is public about a step or a round, written where you keep figures: CSV, TensorBoard, MLflow, Weights & Biases.

    bqsgd.make_private(..., on_step=CsvLog("steps.csv"))
    bqsgd.train(task, config, on_round=WandbLog(wandb.init(mode="offline")))

A logger takes a `StepReport` or a `RoundRecord`; all that these hold may be published. Nothing else is logged. What a
program logs of its own, such as a training loss, is not covered by any guarantee.
"""

from __future__ import annotations

import csv
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bqsgd._src.errors import InvalidParameter, UnsafeFile
from bqsgd._src.params import check_int
from bqsgd._src.private._progress import StepReport
from bqsgd._src.records.record import RoundRecord
from bqsgd._src.records.tensorboard import TensorBoardLog, scalars

Report = StepReport | RoundRecord


class _Log(ABC):
    """Writes the figures of every report, or of every n-th step: epsilon takes the accountant a moment."""

    def __init__(self, *, every: int = 1) -> None:
        self._every = check_int("every", every, 1, 2**40)

    def __call__(self, report: Report) -> None:
        """Log one step or one round."""
        if isinstance(report, RoundRecord):
            self.write(report.round, scalars(report), "")
        elif not isinstance(report, StepReport):
            raise InvalidParameter(f"a logger takes the report of a step or a round, got {type(report).__name__}")
        elif report.number % self._every == 0 or report.number >= report.planned:
            self.write(report.number, {"privacy/epsilon": report.epsilon}, str(report.guarantee or ""))

    @abstractmethod
    def write(self, step: int, figures: Mapping[str, float], guarantee: str) -> None:
        """Keep the figures of a step or round. guarantee: in words; empty for a round."""


class CsvLog(_Log):
    """Appends rows `step,name,value` to a CSV file; each is on disk when the call returns.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "rounds.csv"
    >>> CsvLog(path)(RoundRecord(round=3, test_accuracy=0.5, epsilon_max=0.25))
    >>> print(path.read_text().splitlines()[:3])
    ['step,name,value', '3,test/accuracy,0.5', '3,privacy/epsilon_max,0.25']
    """

    def __init__(self, path: str | Path, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._path = Path(path)
        # A link could make us write outside of the folder that was meant.
        if self._path.is_symlink():
            raise UnsafeFile(f"{path} is a link; remove it, or log into another file")

    def write(self, step: int, figures: Mapping[str, float], guarantee: str) -> None:
        """Append the figures."""
        with self._path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if file.tell() == 0:
                writer.writerow(["step", "name", "value"])
            writer.writerows([step, name, repr(float(value))] for name, value in figures.items())
            file.flush()
            os.fsync(file.fileno())


class EventLog(_Log):
    """Appends scalars to an event file of TensorBoard. For a run, `bqsgd train --tensorboard` does the same."""

    def __init__(self, folder: str | Path, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._events = TensorBoardLog(folder)

    def write(self, step: int, figures: Mapping[str, float], guarantee: str) -> None:
        """Append the figures."""
        self._events.add(step, figures)

    def close(self) -> None:
        """Flush and close the event file."""
        self._events.close()


class MlflowLog(_Log):
    """Logs metrics into the active run of MLflow, and the guarantee as the tag `guarantee`."""

    def __init__(self, *, every: int = 1) -> None:
        super().__init__(every=every)
        import mlflow  # needs mlflow or mlflow-skinny

        self._mlflow: Any = mlflow

    def write(self, step: int, figures: Mapping[str, float], guarantee: str) -> None:
        """Log the figures."""
        self._mlflow.log_metrics(dict(figures), step=step)
        if guarantee:
            self._mlflow.set_tag("guarantee", guarantee)


class WandbLog(_Log):
    """Logs into a run of Weights & Biases, and puts the guarantee into its summary.

    Args:
        run: what `wandb.init(...)` returns; `mode="offline"` keeps it on this machine.
    """

    def __init__(self, run: Any, *, every: int = 1) -> None:
        super().__init__(every=every)
        self._run = run

    def write(self, step: int, figures: Mapping[str, float], guarantee: str) -> None:
        """Log the figures."""
        self._run.log(dict(figures), step=step)
        if guarantee:
            self._run.summary["guarantee"] = guarantee
