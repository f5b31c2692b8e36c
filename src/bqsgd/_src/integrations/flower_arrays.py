"""Models in Flower's records, and a strategy around another one: what the mods and wrappers share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.exception import PrivacyBudgetExhausted
from flwr.serverapp.strategy import Strategy

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.integrations.flower_accountant import SiteAccountant
from bqsgd._src.privacy.guarantee import rounded_up

METRICS, EXAMPLES, ARRAYS = "metrics", "num-examples", "arrays"
NamedArrays = Mapping[str, npt.NDArray[Any]]


def floating_in(record: ArrayRecord) -> dict[str, npt.NDArray[Any]]:
    """The arrays of floating point. Others, such as the counters of BatchNorm, never leave a node."""
    arrays = {name: array.numpy() for name, array in record.items()}
    return {name: values for name, values in arrays.items() if np.issubdtype(values.dtype, np.floating)}


def arrays_of(message: Message) -> dict[str, npt.NDArray[Any]]:
    """The arrays of floating point in the one record of arrays of an app's message."""
    if message.has_error():
        raise InvalidParameter("the app replied with an error")
    if len(message.content.array_records) != 1:
        raise InvalidParameter("the gate needs messages with one ArrayRecord")
    return floating_in(next(iter(message.content.array_records.values())))


def flat_of(arrays: NamedArrays) -> npt.NDArray[np.float64]:
    """All values, one array after another."""
    return np.concatenate([np.zeros(0), *(values.astype(np.float64).ravel() for values in arrays.values())])


def moved_by(held: ArrayRecord, update: npt.NDArray[np.float64]) -> ArrayRecord:
    """The model with the update added to its arrays of floating point."""
    moved, start = dict(held), 0
    for name, values in floating_in(held).items():
        part = update[start : start + values.size].reshape(values.shape)
        moved[name] = Array((values + part).astype(values.dtype))
        start += values.size
    return ArrayRecord(moved)


class Wrapped(Strategy):
    """A strategy that does what the one inside does. It remembers the model, to which updates are added.

    accountant: is asked before every round.
    """

    def __init__(self, strategy: Strategy, *, accountant: SiteAccountant | None = None) -> None:
        self._inner, self._arrays, self._accountant = strategy, ArrayRecord(), accountant

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy inside.

        Raises:
            PrivacyBudgetExhausted: the accountant says that another round would exceed a limit.
        """
        if self._accountant is not None and self._accountant.would_exceed():
            spent = self._accountant.get_privacy_spent()
            raise PrivacyBudgetExhausted(
                f"the nodes' ledgers hold up to epsilon {rounded_up(spent.epsilon)} at delta {spent.delta:g}, and "
                "another round would exceed the limit, or no node has room for one"
            )
        self._arrays = arrays
        return self._inner.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As the strategy inside; what is not floating point stays as it was."""
        arrays, metrics = self._inner.aggregate_train(server_round, replies)
        if arrays is None:
            return None, metrics
        if self._accountant is not None and getattr(self._inner, "accountant", None) is None:
            self._accountant.compose()
        # A mean makes floats of integers, such as the counters of BatchNorm. No update changes those.
        floats = floating_in(self._arrays)
        whole = {name: array for name, array in self._arrays.items() if name not in floats}
        return ArrayRecord({name: whole.get(name, array) for name, array in arrays.items()}), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy inside. Nodes behind a gate decline to evaluate: use its `fraction_evaluate=0`."""
        return self._inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the strategy inside."""
        return self._inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """As the strategy inside."""
        self._inner.summary()
