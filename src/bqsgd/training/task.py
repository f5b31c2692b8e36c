"""What a run learns: the model, each client's data, public test data and the loss, as every engine is given it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bqsgd.models import load_vector
from bqsgd.persample.functional import LossFunction

if TYPE_CHECKING:
    from bqsgd.training.settings import Group

_EVALUATION_BATCH = 2048
Samples = tuple[Tensor | npt.NDArray[Any], Tensor | npt.NDArray[Any]]
"""Inputs and targets, a row per sample."""
Evaluate = Callable[[npt.NDArray[np.float32]], tuple[float, float]]
"""Model vector -> (accuracy, loss) on public test data."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What is learnt.

    Args:
        make_model: makes the model; the first one made is where training begins.
        shares: each client's inputs and targets. A process that works for one client may hold that share alone, and a
            server without clients of its own none.
        test: public test data, for accuracy; none without it.
        loss: (outputs, targets) -> one loss per sample.
        source: the settings that made this task, written beside the run's own; None for a task of one's own.

    >>> share = torch.eye(4), torch.arange(4)
    >>> task = Task(make_model=lambda: nn.Linear(4, 4), shares=[share, share], test=share)
    >>> len(task.shares)
    2
    """

    make_model: Callable[[], nn.Module]
    shares: Sequence[Samples] = ()
    test: Samples | None = None
    loss: LossFunction = field(default_factory=lambda: nn.CrossEntropyLoss(reduction="none"))
    source: Group | None = None

    def evaluator(self, model: nn.Module) -> Evaluate | None:
        """Accuracy (share of largest outputs at the target) and mean loss on the test data; None without test data.

        The model object is in evaluation mode meanwhile and left in the mode it had.
        """
        if self.test is None:
            return None
        inputs, targets = (torch.as_tensor(part) for part in self.test)

        def evaluate(vector: npt.NDArray[np.float32]) -> tuple[float, float]:
            load_vector(model, vector)
            training = model.training
            model.eval()
            right, total = 0, 0.0
            try:
                with torch.no_grad():
                    for x, y in zip(
                        torch.split(inputs, _EVALUATION_BATCH), torch.split(targets, _EVALUATION_BATCH), strict=True
                    ):
                        outputs = model(x)
                        total += float(self.loss(outputs, y).sum())
                        right += int((outputs.argmax(dim=1) == y).sum())
            finally:
                model.train(training)
            return right / len(inputs), total / len(inputs)

        return evaluate
