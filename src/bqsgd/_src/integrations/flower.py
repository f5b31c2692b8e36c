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
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode
from flwr.serverapp.strategy import Strategy

from bqsgd._src.errors import BqsgdError, BudgetExhausted, FrameError, InvalidParameter
from bqsgd._src.flower.messages import FRAME, data_of, pack
from bqsgd._src.flower.settings import Node
from bqsgd._src.integrations.flower_accountant import UPDATE, SiteAccountant, stated_by, stated_in
from bqsgd._src.integrations.flower_arrays import (
    ARRAYS,
    EXAMPLES,
    METRICS,
    NamedArrays,
    Wrapped,
    arrays_of,
    flat_of,
    floating_in,
    moved_by,
)
from bqsgd._src.ledger import Ledger, PrivacyBudget
from bqsgd._src.ledger.register import ledger_path, open_ledger
from bqsgd._src.params import check_positive
from bqsgd._src.private.gate import UpdateGate, open_update, thin_update
from bqsgd._src.release import Unit
from bqsgd._src.settings.node_limits import NodeLimits, key_of
from bqsgd._src.settings.study import check_not_lost, safe_name
from bqsgd._src.text import one_line

logger = logging.getLogger("flwr.bqsgd")
SPENT = "declined: the privacy budget of this node is spent"
REFUSED = "declined; the log of this node says why"
ONLY_TRAINING = "declined: only training passes the privacy gate of this node"


class _Gate:
    """What both mods share: one frame out of a training message, a refusal for anything else."""

    def __call__(self, message: Message, context: Any, call_next: ClientAppCallable) -> Message:
        """Flower calls this in the place of the app."""
        if message.metadata.message_type.split(".")[0] != "train":
            return _declined(ONLY_TRAINING, message)
        # The app gets the message itself, and what it wrote into the metadata would be in the reply.
        asked = copy(message)
        asked.__dict__["_metadata"] = copy(message.metadata)
        with declining(asked) as answer:
            answer.append(Message(self.released(message, context, call_next), reply_to=asked))
        return answer[0]

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
        self._study, self._rounds = safe_name("study", study), rounds
        self._settings: dict[str, Any] = {"study": study, "rounds": rounds, "epsilon": epsilon, "delta": delta}
        self._settings["bits"] = bits
        self._settings["clip_norm"] = check_positive("clip_norm", clip_norm)

    def released(self, message: Message, context: Any, call_next: ClientAppCallable) -> RecordDict:
        """One frame; whatever the app does, it is sent once it is counted."""
        node, before = node_of(context.node_config), arrays_of(message)
        dimension = flat_of(before).size
        self.check_limits(node.limits, dimension)
        with self._ledger(node) as ledger, UpdateGate(ledger, **self._settings) as gate:
            frame = gate.send(self.update_of(message, context, call_next, before), dimension=dimension)
            logger.info("study %s: update %d of %d; %s", self._study, gate.sent, self._rounds, gate.guarantee())
            stated = stated_by(gate)
            return _packed(frame, [gate.range], {EXAMPLES: 1, "epsilon": stated.epsilon}, **asdict(stated))

    def check_limits(self, limits: NodeLimits, dimension: int) -> None:
        """Raise InvalidParameter if the node's operator does not agree."""
        if Unit.CLIENT.value not in limits.units:
            raise InvalidParameter(
                'this node allows no updates of whole clients: add units="client" to its configuration'
            )
        refusal = limits.model_refusal(dimension)
        if refusal is not None:
            raise InvalidParameter(refusal)
        if not limits.least_clip <= self._settings["clip_norm"] <= limits.largest_clip:
            raise InvalidParameter(f"clip_norm={self._settings['clip_norm']:g} is outside the limits of this node")

    def update_of(
        self, message: Message, context: Any, call_next: ClientAppCallable, before: NamedArrays
    ) -> Callable[[], npt.NDArray[np.float64]]:
        """What lets the app train, and returns what it has changed in the model."""
        start = flat_of(before)  # a copy: the app could change the message
        # Another: Flower keeps the context for later rounds, and the node's configuration sets its gate and its limits.
        held = copy(context)
        held.node_config = dict(context.node_config)

        def update() -> npt.NDArray[np.float64]:
            try:
                after = arrays_of(call_next(message, held))
            finally:
                context.state = held.state
            return flat_of({name: after[name] for name in before}) - start

        return update

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

    def __init__(self, *, bits: int = 8, public: Iterable[str] = (EXAMPLES,)) -> None:
        self._bits, self._public = bits, frozenset(public)
        thin_update([np.zeros(1)], bits=bits)  # an invalid number of bits is refused now

    def released(self, message: Message, context: Any, call_next: ClientAppCallable) -> RecordDict:
        """One frame with a range for each array."""
        before = arrays_of(message)
        reply = call_next(message, context)
        after = arrays_of(reply)
        frame, ranges = thin_update([after[name].astype(np.float64) - before[name] for name in before], bits=self._bits)
        metrics = {
            name: value
            for record in reply.content.metric_records.values()
            for name, value in record.items()
            if name in self._public
        }
        return _packed(frame, ranges, metrics)


class OpenUpdates(Wrapped):
    """A strategy whose nodes send through a mod of this module: it opens what they send for the strategy inside.

    Args:
        strategy: any strategy that aggregates the models of its clients.
        largest_range: a frame with a larger range is left out: the clip norm of the nodes, or the largest change of a
            parameter in one round.
        accountant: ends the run with Flower's `PrivacyBudgetExhausted` before a round that takes a node beyond its
            limit, and when no node has room for another; every node must send through `PrivateUpdates`.
    """

    def __init__(self, strategy: Strategy, *, largest_range: float, accountant: SiteAccountant | None = None) -> None:
        super().__init__(strategy, accountant=accountant)
        self._largest = check_positive("largest_range", largest_range)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Open every update, then aggregate as the strategy inside."""
        opened = [reply for each in replies if (reply := self._opened(each))]
        return super().aggregate_train(server_round, _alike(opened))

    def _opened(self, reply: Message) -> Message | None:
        if reply.has_error():
            logger.warning("node %d: %s", reply.metadata.src_node_id, one_line(reply.error.reason))
            return reply
        try:
            arrays, metrics = _moved(reply, self._arrays, largest=self._largest), _public(reply)
            if self._accountant is not None:
                self._accountant.note(reply.metadata.src_node_id, stated_in(reply))
        except (BqsgdError, TypeError, ValueError, KeyError) as error:
            logger.warning("node %d sent no valid update, left out: %s", reply.metadata.src_node_id, one_line(error))
            return None
        reply.content = RecordDict({ARRAYS: arrays, METRICS: metrics})
        return reply


@contextmanager
def declining(message: Message) -> Iterator[list[Message]]:
    """If the block raises an error, the list holds a refusal that tells the server nothing; the node's log says why."""
    answer: list[Message] = []
    try:
        yield answer
    except BudgetExhausted as error:
        logger.error("%s", one_line(error))
        answer[:] = [_declined(SPENT, message)]
    except Exception as error:  # Flower would send its text, which may hold private values
        if isinstance(error, BqsgdError):
            logger.error("refused by this node: %s", one_line(error))
        else:
            logger.exception("this node failed")
        answer[:] = [_declined(REFUSED, message)]


def node_of(node_config: Mapping[str, Any]) -> Node:
    """The node as its operator set it up.

    Raises:
        InvalidParameter: it has limits and no client number. A node without a number is a simulated one, whose limits
            nobody reads: its ledger would have the budget that the app asks for.
    """
    node = Node.of(node_config)
    limits = {key_of(limit.name) for limit in fields(NodeLimits)} & node_config.keys()
    if node.simulated and limits:
        raise InvalidParameter(f"this node sets {', '.join(sorted(limits))} and no number: add client=N")
    return node


def _declined(reason: str, message: Message) -> Message:
    return Message(Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=reason), reply_to=message)


def _packed(frame: bytes, ranges: list[float], metrics: Mapping[str, Any], **stated: float) -> RecordDict:
    content = pack(frame, kind=FRAME)
    content[UPDATE] = ConfigRecord({"ranges": ranges, **stated})
    content[METRICS] = MetricRecord(dict(metrics))
    return content


def _moved(reply: Message, held: ArrayRecord, *, largest: float) -> ArrayRecord:
    """The model that the node's app made, as far as the frame tells: the server's, and the update added."""
    ranges, sizes = reply.content.config_records[UPDATE]["ranges"], [v.size for v in floating_in(held).values()]
    if not isinstance(ranges, list):
        raise FrameError("the update states no ranges")
    frame, floats = data_of(reply, kind=FRAME), [float(reach) for reach in ranges]
    return moved_by(held, open_update(frame, ranges=floats, sizes=sizes, largest_range=largest))


def _public(reply: Message) -> MetricRecord:
    """The metrics of a reply; FrameError unless they are plain finite numbers, `num-examples` a positive one."""
    metrics = reply.content.metric_records[METRICS]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in metrics.values()):
        raise FrameError("a metric is not a finite number")
    if not float(metrics.get(EXAMPLES, 1)) > 0:  # type: ignore[arg-type]
        raise FrameError(f"{EXAMPLES} is not positive")
    return metrics


def _alike(replies: list[Message]) -> list[Message]:
    """The replies whose metrics have the names that most have: a strategy ends the run if they differ."""
    names = Counter(frozenset(reply.content[METRICS]) for reply in replies if not reply.has_error())
    usual = names.most_common(1)[0][0] if names else frozenset()
    kept = []
    for reply in replies:
        if reply.has_error() or frozenset(reply.content[METRICS]) == usual:
            kept.append(reply)
        else:
            logger.warning("node %d has other metrics than most, left out", reply.metadata.src_node_id)
    return kept
