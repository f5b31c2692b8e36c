"""What a run learns: the model, each client's data, public test data, the loss and the metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bqsgd._src.client.least_squares import LeastSquares
from bqsgd._src.client.objective import Objective
from bqsgd._src.client.objectives import objective_of
from bqsgd._src.client.samples import Reader, reader_of
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.models import device_of, dimension_of, load_vector
from bqsgd._src.persample.program import Forward, LossFunction, inputs_then_target
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.settings.fit import Sizes, fit
from bqsgd._src.settings.groups import LEAST_SQUARES
from bqsgd._src.tasks.metrics import NAMES, Tally

if TYPE_CHECKING:
    from bqsgd._src.settings.config import Config
    from bqsgd._src.settings.group import Group

_EVALUATION_BATCH = 2048
Samples = Any
"""A client's data, or public test data: (inputs, targets) as arrays or tensors with a row per sample, a map-style
Dataset, or a DataLoader of one."""
Metric = Callable[[Tensor, Tensor], float | Tensor]
"""(all outputs, all targets) of the test data -> one number."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results of a model on the test data. accuracy: None if targets are no classes, or if a metric is given."""

    loss: float
    accuracy: float | None = None
    metric: float | None = None
    metric_name: str | None = None

    def figures(self) -> dict[str, float | None]:
        """The three numbers, by name."""
        return {"loss": self.loss, "accuracy": self.accuracy, "metric": self.metric}


Evaluate = Callable[[npt.NDArray[np.float32]], Evaluation]
"""Model vector -> its results on public test data."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What is learnt, and from which data.

    Args:
        make_model: makes the model. Training begins with the parameters of the first one made.
        shares: each client's data: (inputs, targets) as arrays, a Dataset or a DataLoader. A process that works for one
            client may hold only that share, and a server without clients of its own holds none.
        test: public test data, in any of the same forms; without it nothing is evaluated.
        loss_fn: (outputs, targets) -> one loss per sample.
        metric: by default accuracy for classes and labels (one score per sample, or one per class), R2 for regression;
            "MAE" is the mean absolute error. Or a function (all outputs, all targets) of the test data -> a number;
            records call it by its `__name__`.
        forward: (model, batch) -> (outputs, targets), if a batch is not (inputs..., targets) but, say, a dict.
        sample: a made-up record of the same form as those of the shares, for example (torch.zeros(3, 32, 32), 0). It
            tells shapes and types, so that no real record is read for them. Arrays and tensors in memory need none.
        public_data: data that a pretrained network has seen; every guarantee then says that they are public.
        source: the settings that made this task, stored with the run's own; None for your own task.

    >>> share = torch.eye(4), torch.arange(4)
    >>> task = Task(make_model=lambda: nn.Linear(4, 4), shares=[share, share], test=share)
    >>> len(task.shares)
    2
    """

    make_model: Callable[[], nn.Module]
    shares: Sequence[Samples] = ()
    test: Samples | None = None
    loss_fn: LossFunction = field(default_factory=lambda: nn.CrossEntropyLoss(reduction="none"))
    metric: Metric | str | None = None
    forward: Forward | None = None
    sample: Any = None
    public_data: str = ""
    source: Group | None = None

    def stated(self, guarantee: Guarantee) -> Guarantee:
        """The guarantee, with the assumption about public data added."""
        public = f"{self.public_data}, which a pretrained network saw, is public"
        return guarantee.assuming(public if self.public_data else "")

    def config(self, **settings: Any) -> Config:
        """The settings of a run on this task: the given ones, and for all others what fits its data.

        This is what `bqsgd train` does. `Config.of` does not see the data and takes every setting as it is.

        >>> share = torch.eye(8), torch.arange(8)
        >>> task = Task(make_model=lambda: nn.Linear(8, 8), shares=[share, share])
        >>> config = task.config(epsilon=8.0)
        >>> config.clients.count, config.privacy.batch_size, config.run.rounds
        (2, 8, 60)
        """
        shares = len(self.shares)
        if settings.setdefault("clients", shares) != shares:
            raise InvalidParameter(
                f"clients={settings['clients']}, but the task has data for {shares}: leave clients out"
            )
        return fit(settings, self.sizes(settings.get("method", "sgd")))

    def sizes(self, method: str = "sgd") -> Sizes:
        """How large the data of all clients and the model are."""
        samples = sum(self.samples_of(share) for share in range(len(self.shares)))
        return sizes_of(self.make_model(), samples=samples, method=method)

    def samples_of(self, share: int) -> int:
        """How many samples a share holds."""
        return len(reader_of(self.shares[share]))

    def check(self, config: Config, model: nn.Module) -> Objective:
        """Try the model, the loss, the shapes and the metric before anything is spent. No record of a share is read.

        Returns the objective: what a sample adds to a message, and which assumption keeps samples apart.

        Raises:
            InvalidParameter: something would fail in a round, or after the last one.
        """
        if isinstance(self.metric, str) and self.metric not in NAMES:
            raise InvalidParameter(f"metric must be a function or one of {', '.join(NAMES)}, got {self.metric!r}")
        objective = objective_of(config, model, self.loss_fn, self.forward)
        if self.shares:
            objective.check(reader_of(self.shares[0], self.sample).form())
        if self.test is not None:
            try:
                with _evaluating(model):
                    test = reader_of(self.test)
                    _check_finite(test)
                    # A metric may need all samples, for example some of every class; a loss is tried on one.
                    self._evaluate(model, test, most=None if callable(self.metric) else 1)
            except InvalidParameter:
                raise
            except Exception as error:  # the model, the loss and the metric are the user's, and may raise anything
                raise InvalidParameter(
                    f"the test data cannot be evaluated, so nothing was spent: {type(error).__name__}: "
                    f"{' '.join(str(error).split())[:500]}"
                ) from error
        return objective

    def evaluator(self, model: nn.Module) -> Evaluate | None:
        """Model vector -> its results on the test data; None without test data.

        The model object is in evaluation mode meanwhile, and is left in the mode that it had.
        """
        if self.test is None:
            return None
        test = reader_of(self.test)

        def evaluate(vector: npt.NDArray[np.float32]) -> Evaluation:
            load_vector(model, vector)
            with _evaluating(model):
                return self._evaluate(model, test, most=None)

        return evaluate

    def _evaluate(self, model: nn.Module, test: Reader, *, most: int | None) -> Evaluation:
        forward = self.forward or inputs_then_target
        count = len(test) if most is None else min(most, len(test))
        total, kept = 0.0, list[tuple[Tensor, Tensor]]()
        own = self.metric if callable(self.metric) else None
        device = device_of(model)
        tally = Tally(self.loss_fn, None if callable(self.metric) else self.metric)
        for start in range(0, count, _EVALUATION_BATCH):
            for part in test.read(range(start, min(start + _EVALUATION_BATCH, count))):
                if part.data is None:
                    raise InvalidParameter(f"{len(part)} samples of the test data cannot be read")
                outputs, targets = forward(model, tree_map(lambda leaf: leaf.to(device), part.data))
                total += float(self.loss_fn(outputs, targets).sum())
                if own is None:
                    tally.add(outputs, targets)
                else:
                    kept.append((outputs.cpu(), targets.cpu()))
        if own is not None:
            name, value = getattr(own, "__name__", type(own).__name__), _number(own, kept)
        else:
            name, value = tally.figure()
        if own is None and name == "accuracy":
            return Evaluation(loss=total / count, accuracy=value)
        return Evaluation(loss=total / count, metric=value, metric_name=name)


def sizes_of(model: nn.Module, *, samples: int, method: str) -> Sizes:
    """The sizes of a run that learns `model` from this many samples of all clients."""
    parameters = dimension_of(model)
    dimension = LeastSquares.of(model).dimension if method == LEAST_SQUARES else parameters
    return Sizes(samples=samples, dimension=dimension, parameters=parameters)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def _check_finite(test: Reader) -> None:
    """Raise for NaN in the public test data: one such sample would make every test loss NaN."""
    for start in range(0, len(test), _EVALUATION_BATCH):
        for part in test.read(range(start, min(start + _EVALUATION_BATCH, len(test)))):
            for leaf in tree_leaves(part.data):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    bad = ~leaf.isfinite().reshape(len(leaf), -1).all(dim=1)
                    if bool(bad.any()):
                        first = int(part.numbers[int(bad.nonzero()[0])])
                        raise InvalidParameter(
                            f"{int(bad.sum())} samples of the test data hold NaN or infinity (the first is sample "
                            f"{first}): remove them or fill the gaps"
                        )


def _number(metric: Metric, kept: list[tuple[Tensor, Tensor]]) -> float:
    outputs, targets = (torch.cat(column) for column in zip(*kept, strict=True))
    value = float(metric(outputs, targets))
    if math.isnan(value):
        raise InvalidParameter("the metric is NaN on the test data; it must be a number")
    return value
