"""The best model of a run by its results on public test data, and whether the run should stop waiting for a better one.

Which evaluation is the best follows from the records alone, so a resumed run counts exactly as one that never stopped.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bqsgd._src.records.record import RoundRecord
from bqsgd._src.tasks.task import Metric

_LOWER_IS_BETTER = ("loss", "MAE")


class Best:
    """The evaluation that was best so far, its model, and how many evaluations have passed since.

    metric: the task's. Accuracy and R2 should be high, the mean absolute error low. Whether a function of your own
        should be high or low is unknown, so the test loss decides in its place.
    patience: this many evaluations without a better one exhaust it.
    """

    def __init__(self, metric: Metric | str | None, *, patience: int) -> None:
        self._metric, self._patience = metric, patience
        self._score, self._since = -math.inf, 0
        self.rounds, self.name, self.value = 0, "", math.nan
        """Rounds done when the model was best (0: no evaluation has counted yet), and the figure it had then."""
        self.model: npt.NDArray[np.float32] | None = None

    def note(self, record: RoundRecord, model: npt.NDArray[np.float32]) -> None:
        """Count the evaluation of `model` in this record, if there is one."""
        if record.test_loss is None:
            return
        name, value = self._figure(record)
        score = -value if name in _LOWER_IS_BETTER else value
        self._since += 1
        if score > self._score:  # false for NaN: a model that diverged is never the best
            self._score, self._since = score, 0
            self.rounds, self.name, self.value, self.model = record.round + 1, name, value, model.copy()

    def _figure(self, record: RoundRecord) -> tuple[str, float]:
        if record.test_accuracy is not None:
            return "accuracy", record.test_accuracy
        if callable(self._metric) or record.test_metric is None:
            return "loss", record.test_loss if record.test_loss is not None else math.nan
        return self._metric or "R2", record.test_metric

    @property
    def exhausted(self) -> str | None:
        """Why the run should stop, or None while it should not."""
        if self._since < self._patience:
            return None
        return f"no better {self.name or 'result'} on the public test data in {self._since} evaluations"
