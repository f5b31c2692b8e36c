"""The ClientApp: one message in, one frame out. `client.Client` does all the work.

Flower starts a fresh process for every message of a deployment. What must last is therefore on the client's disk (its
ledger, its state in secure sums) or in the node's memory of the run (its plan). Flower sends a reply before it stores
that memory, so safety must not depend on it. Only the frame depends on the data and leaves: an error goes to the
client's own log, and the server only learns that there was one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, MutableMapping
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from bqsgd._src.client.client import Client, client_sender
from bqsgd._src.client.files import private_log_at
from bqsgd._src.client.objectives import message_dimension, objective_of
from bqsgd._src.client.samples import reader_of
from bqsgd._src.client.sums import SumSetup, answer_step
from bqsgd._src.errors import BqsgdError, Infeasible, InvalidParameter
from bqsgd._src.flower.messages import FRAME, MODEL, Plain, data_of, field_of, pack
from bqsgd._src.flower.processes import keep_ray_on_loopback
from bqsgd._src.flower.settings import MakeTask, Node, check_name, read_settings
from bqsgd._src.planner.search import PlanningTooLong, cpu_seconds
from bqsgd._src.release import Unit
from bqsgd._src.runtime.modes import one_thread
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.messages import is_sum_message
from bqsgd._src.settings.client_plan import plans_kept_in
from bqsgd._src.tasks.task import Task
from bqsgd._src.text import one_line
from bqsgd._src.wire.model_message import write_model
from bqsgd._src.wire.reply import BUDGET_SPENT, Reply

logger = logging.getLogger("flwr.bqsgd")
_PLANS, _HELD, _DIMENSION = "bqsgd.plans", "bqsgd.held", "bqsgd.dimension"
NO_ANSWER = "the client could not answer; its own log says why"
"""All that the server learns about an error here: even the kind of error can depend on the data."""

_Memory = MutableMapping[str, Any]


class _Asked:
    """One message of a run to this client, with the node's memory of the run.

    refusal: why the client does not take part, or None. If it takes part, `config` has the client's own settings in it.
    """

    def __init__(self, make_task: MakeTask, message: Message, context: Context) -> None:
        self.message = message
        self.memory: _Memory = context.state
        config, _, self._options = read_settings(context.run_config)
        self.node, self._make_task = Node.of(context.node_config), make_task
        # The server chooses the name, and it becomes part of file names here.
        self.run, roster = check_name(field_of(message, "run", str)), field_of(message, "roster", str)
        self.refusal = self.node.refusal(config, run=self.run, roster=roster)
        self.config = config if self.refusal is not None else self.node.own_settings(config, run=self.run)

    @cached_property
    def task(self) -> Task:
        """The task with this client's share of the data alone."""
        task = self._make_task(self.config, self.node, self._options)
        if len(task.shares) != 1:
            raise InvalidParameter(
                f"a client's task must hold one share of the data, its own; this one holds {len(task.shares)}"
            )
        return task

    @property
    def dimension(self) -> int:
        """Coordinates of one message. Kept in the node's memory, so that most steps of a secure sum load no data."""
        if _DIMENSION not in self.memory:
            dimension = message_dimension(self.config, self.task.make_model())
            self.memory[_DIMENSION] = ConfigRecord({"dimension": dimension})
        return int(self.memory[_DIMENSION]["dimension"])

    def declined(self, reason: str, **stated: Plain) -> RecordDict:
        """The answer that sends nothing, with the reason."""
        logger.warning("client %d declines: %s", self.node.client, one_line(reason))
        return pack(None, kind=FRAME, declined=reason, **stated)


def client_app(make_task: MakeTask) -> ClientApp:
    """A ClientApp that trains privately.

    Args:
        make_task: (settings, node, options) -> the task with this client's share alone; `node.client` is its number and
            `node.options` the node configuration, for instance the folder of its data.
    """
    keep_ray_on_loopback()
    app = ClientApp()

    @app.query()
    def join(message: Message, context: Context) -> Message:
        return _guarded(_join, make_task, message, context)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _guarded(_train, make_task, message, context)

    return app


def _guarded(
    respond: Callable[[_Asked], RecordDict], make_task: MakeTask, message: Message, context: Context
) -> Message:
    try:
        # As on every engine: the order of sums, and so the bits of a frame, depend on the number of threads.
        with one_thread():
            asked = _Asked(make_task, message, context)
            # Planning is slow: the run's first message plans, and the processes of later messages use its plans.
            with plans_kept_in(context.state.setdefault(_PLANS, ConfigRecord())):
                content = respond(asked) if asked.refusal is None else asked.declined(asked.refusal)
    except Exception as error:  # otherwise Flower would send its text, which may contain private values
        if isinstance(error, BqsgdError):
            logger.error("refused by this client: %s", one_line(error))
        else:
            logger.exception("this client failed")
        content = pack(None, kind=FRAME, declined=NO_ANSWER)
    return Message(content, reply_to=message)


def _join(asked: _Asked) -> RecordDict:
    """Who this is. The server learns the number of samples, unless the guarantee hides the whole client."""
    # Of a subset, the model has at most one_in times as many coordinates as a message.
    refusal = asked.node.limits.model_refusal(asked.dimension * asked.config.clients.one_in)
    if refusal is not None:
        return asked.declined(refusal)
    stated = {} if asked.config.privacy.unit == Unit.CLIENT else {"samples": asked.task.samples_of(0)}
    return pack(None, kind=FRAME, client=asked.node.client, dimension=asked.dimension, **stated)


def _train(asked: _Asked) -> RecordDict:
    secure, question, stated = asked.config.secure.on, data_of(asked.message, kind=MODEL), dict[str, Plain]()
    # Flower may start a second process for the next message. Two of them must not use the keys of one sum.
    with asked.node.turn(run=asked.run) if secure else nullcontext():
        sums = _sum_client(asked) if secure else None
        if isinstance(sums, Reply):
            reply = sums
        elif sums is not None and is_sum_message(question):
            reply = answer_step(sums, question)
        else:
            reply = _update(asked, question, sums, stated)
    if reply.frame is None:
        return asked.declined(reply.reason or "no reason", **stated)
    logger.info("client %d sends %d bytes", asked.node.client, len(reply.frame))
    return pack(bytes(reply.frame), kind=FRAME, **stated)


def _update(asked: _Asked, question: bytes, sums: SumClient | None, stated: dict[str, Plain]) -> Reply:
    """Answer a model. What the client states about itself goes into `stated`."""
    config, node, memory, task = asked.config, asked.node, asked.memory, asked.task
    model = task.make_model()
    with node.ledger(config, run=asked.run) or nullcontext() as ledger:
        client = Client(
            config,
            objective_of(config, model, task.loss_fn, task.forward),
            reader_of(task.shares[0], task.sample),
            # Resumed: a restarted server may ask for a round again, which is then counted again.
            client_sender(config, node.client, ledger, run=asked.run, resume=True),
            sums=sums,
            limits=node.limits,
            private_log=private_log_at(node.private_path(run=asked.run)) if config.privacy.private_metrics else None,
        )
        # A fresh process holds no model. Without this every message would have to be a whole model.
        record = memory.get(_HELD)
        client.held = None if record is None else client.read(record[MODEL].data)
        reply = client.answer(question)
        if client.held is not None:  # the next message may lead on from this model
            held = write_model(client.held.model, round=client.held.round, memory=client.held.memory)
            memory[_HELD] = pack(held, kind=MODEL).array_records[MODEL]
        spent = (reply.reason or "").startswith(BUDGET_SPENT)  # the run may end here
        if spent or field_of(asked.message, "report", bool):
            guarantee = client.spending.guarantee(delta=config.privacy.delta)
            if guarantee is not None:
                stated["guarantee"] = json.dumps(guarantee.to_dict())
    return reply


def _sum_client(asked: _Asked) -> SumClient | Reply:
    """The client's side of the run's secure sums, as its last answer left it. This process must hold the turn."""
    config, node, dimension = asked.config, asked.node, asked.dimension
    try:
        with cpu_seconds(node.limits.planning_seconds):
            setup = SumSetup.of(config, run=asked.run, dimension=dimension)
    except (Infeasible, PlanningTooLong) as error:
        return Reply.decline(node.client, f"no plan for the budget: {error}")
    assert setup is not None
    try:
        return setup.client(node.client, folder=node.folder(run=asked.run), seed=config.privacy.seed, lasting=False)
    except InvalidParameter as error:
        logger.error("%s", one_line(error))
        return Reply.decline(
            node.client, "this node cannot use what it has stored for the run's secure sums; its own log says why"
        )
