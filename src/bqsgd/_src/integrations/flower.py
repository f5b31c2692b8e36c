"""A privacy budget for an existing Flower app: mods for its ClientApp, and a wrapper for its strategy.

    app = ClientApp(mods=[PrivateUpdates(study="trial-7", rounds=20, epsilon=3, delta=1e-5, clip_norm=1.0)])
    app = ClientApp(mods=[ThinUpdates(bits=4)])             # the app trains with `make_private`
    strategy = OpenUpdates(FedAvg(), largest_range=1.0)     # in the ServerApp, for both

A mod sees the app's reply before Flower sends it. Of a training message it lets pass one frame and public figures; of
any other message (evaluation, queries) nothing, because what an app computes there from its data is not counted.

The ledger, its budget and what the node agrees to come from the node's own configuration, as for `bqsgd.flower`. Flower
runs the mods that the app names, so a node is protected only if it runs apps that its operator has checked
(`flower-supernode --trusted-entities`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from bqsgd._src.errors import BqsgdError, BudgetExhausted, FrameError, InvalidParameter
from bqsgd._src.flower.messages import FRAME, data_of, pack
from bqsgd._src.flower.settings import Node
from bqsgd._src.ledger import Ledger, PrivacyBudget
from bqsgd._src.ledger.register import ledger_path, open_ledger
from bqsgd._src.params import check_positive
from bqsgd._src.private.gate import UpdateGate, open_update, thin_update
from bqsgd._src.release import Unit
from bqsgd._src.settings.node_limits import NodeLimits
from bqsgd._src.settings.study import check_not_lost, safe_name
from bqsgd._src.text import one_line

logger = logging.getLogger("flwr.bqsgd")
SPENT = "declined: the privacy budget of this node is spent"
REFUSED = "declined; the log of this node says why"
ONLY_TRAINING = "declined: only training passes the privacy gate of this node"
_UPDATE, _EXAMPLES = "update", "num-examples"
_Arrays = Mapping[str, npt.NDArray[Any]]


class _Gate:
    """What both mods share: one frame out of a training message, a refusal for anything else."""

    def __call__(self, message: Message, context: Any, call_next: ClientAppCallable) -> Message:
        """Flower calls this in the place of the app."""
        try:
            if message.metadata.message_type.split(".")[0] != "train":
                return _declined(ONLY_TRAINING, message)
            return Message(self.released(message, context, call_next), reply_to=message)
        except BudgetExhausted as error:
            logger.error("%s", one_line(error))
            return _declined(SPENT, message)
        except Exception as error:  # Flower would send its text, which may hold private values
            if isinstance(error, BqsgdError):
                logger.error("refused by this node: %s", one_line(error))
            else:
                logger.exception("this node failed")
            return _declined(REFUSED, message)

    def released(self, message: Message, context: Any, call_next: ClientAppCallable) -> RecordDict:
        """What may leave the node."""
        raise NotImplementedError


class PrivateUpdates(_Gate):
    """A mod that clips what an app has learnt, adds the noise of the study's plan, and counts it before it leaves.

    The unit is the whole node. Metrics of the app stay behind; `num-examples` becomes 1, so that all nodes weigh the
    same, and `epsilon` is what the node's ledger holds.

    Args: as `bqsgd.UpdateGate`. The node must agree to the unit: `--node-config 'client=0 units="client" ...'`.
    """

    def __init__(
        self, *, study: str, rounds: int, epsilon: float, delta: float, clip_norm: float, bits: int = 8
    ) -> None:
        self._study = safe_name("study", study)
        self._settings: dict[str, Any] = {"study": study, "rounds": rounds, "epsilon": epsilon, "delta": delta}
        self._settings["bits"] = bits
        self._settings["clip_norm"] = check_positive("clip_norm", clip_norm)

    def released(self, message: Message, context: Any, call_next: ClientAppCallable) -> RecordDict:
        """One frame; whatever the app does, it is sent once it is counted."""
        node, (key, before) = Node.of(context.node_config), _arrays_of(message)
        flat = _flat(before)
        _check_limits(node.limits, flat.size, self._settings)
        with self._ledger(node) as ledger, UpdateGate(ledger, **self._settings) as gate:

            def update() -> npt.NDArray[np.float64]:
                _, after = _arrays_of(call_next(message, context))
                return _flat({name: after[name] for name in before}) - flat

            frame = gate.send(update, dimension=flat.size)
            guarantee = gate.guarantee()
            logger.info("study %s: update %d of %d; %s", self._study, gate.sent, self._settings["rounds"], guarantee)
            epsilon = 0.0 if guarantee is None else guarantee.epsilon
            return _packed(frame, [gate.range], key, {_EXAMPLES: 1, "epsilon": epsilon})

    def _ledger(self, node: Node) -> Ledger:
        """The node's own ledger. Its budget is the node's; in a simulation it is the study's."""
        path, limits = ledger_path(node.folder(run=self._study), node.client), node.limits
        if not path.exists():
            check_not_lost(path)
        asked = PrivacyBudget(epsilon=self._settings["epsilon"], delta=self._settings["delta"])
        own = None
        if limits.epsilon is not None and limits.delta is not None:
            own = PrivacyBudget(epsilon=limits.epsilon, delta=limits.delta)
        return open_ledger(path, client=node.client, budget=asked, own=own, resuming=path.exists())


class ThinUpdates(_Gate):
    """A mod for apps that train with `make_private`: the update leaves in a few bits per coordinate.

    The model is private already, so nothing more is counted. A `BudgetExhausted` of the app becomes a refusal that
    Flower's strategies leave out. bits: 2 to 8. public: metrics of the app that may leave; name none that was computed
    from the data, such as a training loss.
    """

    def __init__(self, *, bits: int = 8, public: Iterable[str] = (_EXAMPLES,)) -> None:
        self._bits, self._public = bits, frozenset(public)
        thin_update([np.zeros(1)], bits=bits)  # an invalid number of bits is refused now

    def released(self, message: Message, context: Any, call_next: ClientAppCallable) -> RecordDict:
        """One frame with a range for each array."""
        key, before = _arrays_of(message)
        reply = call_next(message, context)
        if reply.has_error():
            raise InvalidParameter("the app replied with an error")
        _, after = _arrays_of(reply)
        frame, ranges = thin_update([after[name].astype(np.float64) - before[name] for name in before], bits=self._bits)
        metrics = {
            name: value
            for record in reply.content.metric_records.values()
            for name, value in record.items()
            if name in self._public
        }
        return _packed(frame, ranges, key, metrics)


class OpenUpdates(Strategy):
    """A strategy whose nodes send through a mod of this module: it opens what they send for the strategy inside.

    Args:
        strategy: any strategy that aggregates the models of its clients.
        largest_range: a frame with a larger range is left out: the clip norm of the nodes, or the largest change of a
            parameter in one round.
    """

    def __init__(self, strategy: Strategy, *, largest_range: float) -> None:
        self._inner, self._largest = strategy, check_positive("largest_range", largest_range)
        self._arrays = ArrayRecord()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy inside; remembers the model, to which the updates are added."""
        self._arrays = arrays
        return self._inner.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Open every update, then aggregate as the strategy inside."""
        opened = [reply for each in replies if (reply := self._opened(each))]
        arrays, metrics = self._inner.aggregate_train(server_round, opened)
        if arrays is None:
            return None, metrics
        # A mean makes floats of integers, such as the counters of BatchNorm. No update changes those.
        whole = {name: array for name, array in self._arrays.items() if name not in _floating(self._arrays)}
        return ArrayRecord({name: whole.get(name, array) for name, array in arrays.items()}), metrics

    def _opened(self, reply: Message) -> Message | None:
        if reply.has_error():
            logger.warning("node %d: %s", reply.metadata.src_node_id, one_line(reply.error.reason))
            return reply
        try:
            key, arrays = _moved(reply, self._arrays, largest=self._largest)
        except (BqsgdError, TypeError, ValueError, KeyError) as error:
            logger.warning("node %d sent no valid update, left out: %s", reply.metadata.src_node_id, one_line(error))
            return None
        reply.content = RecordDict({key: arrays, **reply.content.metric_records})
        return reply

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


def _declined(reason: str, message: Message) -> Message:
    return Message(Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=reason), reply_to=message)


def _check_limits(limits: NodeLimits, dimension: int, settings: Mapping[str, Any]) -> None:
    """Raise InvalidParameter if the node's operator does not agree."""
    if Unit.CLIENT.value not in limits.units:
        raise InvalidParameter('this node allows no updates of whole clients: add units="client" to its configuration')
    refusal = limits.model_refusal(dimension)
    if refusal is not None:
        raise InvalidParameter(refusal)
    if not limits.least_clip <= settings["clip_norm"] <= limits.largest_clip:
        raise InvalidParameter(f"clip_norm={settings['clip_norm']:g} is outside the limits of this node")


def _arrays_of(message: Message) -> tuple[str, dict[str, npt.NDArray[Any]]]:
    """The name of the one record of arrays in a message, and its arrays of floating point. Others never change."""
    if message.has_error() or len(message.content.array_records) != 1:
        raise InvalidParameter("the gate needs messages with one ArrayRecord")
    key, record = next(iter(message.content.array_records.items()))
    return key, _floating(record)


def _floating(record: ArrayRecord) -> dict[str, npt.NDArray[Any]]:
    arrays = {name: array.numpy() for name, array in record.items()}
    return {name: values for name, values in arrays.items() if np.issubdtype(values.dtype, np.floating)}


def _flat(arrays: _Arrays) -> npt.NDArray[np.float64]:
    return np.concatenate([np.zeros(0), *(values.astype(np.float64).ravel() for values in arrays.values())])


def _packed(frame: bytes, ranges: list[float], key: str, metrics: Mapping[str, Any]) -> RecordDict:
    content = pack(frame, kind=FRAME)
    content[_UPDATE] = ConfigRecord({"ranges": ranges, "record": key})
    content["metrics"] = MetricRecord(dict(metrics))
    return content


def _moved(reply: Message, held: ArrayRecord, *, largest: float) -> tuple[str, ArrayRecord]:
    """The record that the node's app made, as far as the frame tells: the server's model, and the update added."""
    stated, arrays = reply.content.config_records[_UPDATE], _floating(held)
    key, ranges = stated["record"], stated["ranges"]
    if not isinstance(key, str) or not isinstance(ranges, list):
        raise FrameError("the update states no record and ranges")
    sizes = [values.size for values in arrays.values()]
    frame, floats = data_of(reply, kind=FRAME), [float(reach) for reach in ranges]
    update = open_update(frame, ranges=floats, sizes=sizes, largest_range=largest)
    moved, start = dict(held), 0
    for name, values in arrays.items():
        part = update[start : start + values.size].reshape(values.shape)
        moved[name] = Array((values + part).astype(values.dtype))
        start += values.size
    return key, ArrayRecord(moved)
