"""The ClientApp: one message in, one frame out. All the work is `client.Client`'s.

Flower starts a fresh process for every message of a deployment, so what lasts is on the client's disk (its ledger, its
state in secure sums) or in the node's own memory of the run (its plan). Flower sends an answer before it stores that
memory, so nothing that safety rests on is in it. Nothing that depends on the data leaves but the frame: an error goes
to the client's own log, and the server only hears that there was one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, MutableMapping
from contextlib import nullcontext, suppress
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from bqsgd._src.client.client import Client, answer_step
from bqsgd._src.client.files import private_log_at
from bqsgd._src.client.least_squares import message_dimension
from bqsgd._src.client.sum_setup import SumSetup
from bqsgd._src.errors import BqsgdError, Infeasible, InvalidParameter
from bqsgd._src.flower.messages import FRAME, MODEL, Plain, data_of, field_of, pack
from bqsgd._src.flower.processes import keep_ray_on_loopback
from bqsgd._src.flower.settings import MakeTask, Node, check_name, read_settings
from bqsgd._src.models import dimension_of
from bqsgd._src.params import Mechanism
from bqsgd._src.planner.search import PlanningTooLong, cpu_seconds
from bqsgd._src.release import Unit
from bqsgd._src.runtime.modes import one_thread
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.messages import is_sum_message
from bqsgd._src.settings.client_plan import keep_plan, keep_sum_plan, sum_plan
from bqsgd._src.tasks.task import Task
from bqsgd._src.wire.model_message import read_model, write_model
from bqsgd._src.wire.reply import Reply

logger = logging.getLogger("flwr.bqsgd")
_PLAN, _HELD, _DIMENSION = "bqsgd.plan", "bqsgd.held", "bqsgd.dimension"
_SUM_PLAN = ("levels", "trials", "width")
NO_ANSWER = "the client could not answer; its own log says why"
"""All that the server learns of any error here: even the kind of error can depend on the data."""

_Memory = MutableMapping[str, Any]


class _Asked:
    """One message of a run to this client, with the node's memory of the run.

    refusal: why it takes no part; None if it does, and then `config` has what is the client's own in it.
    """

    def __init__(self, make_task: MakeTask, message: Message, context: Context) -> None:
        self.message = message
        self.memory: _Memory = context.state
        config, _, self._options = read_settings(context.run_config)
        self.node, self._make_task = Node.of(context.node_config), make_task
        self.run, roster = check_name(field_of(message, "run", str)), field_of(message, "roster", str)
        self.refusal = self.node.refusal(config, run=self.run, roster=roster)
        self.config = config if self.refusal is not None else self.node.own_settings(config, run=self.run)

    def task(self) -> Task:
        """The task with this client's share of the data alone."""
        task = self._make_task(self.config, self.node, self._options)
        if len(task.shares) != 1:
            raise InvalidParameter(
                f"a client's task holds its own share of the data alone, got {len(task.shares)} shares"
            )
        return task

    def declined(self, reason: str, **stated: Plain) -> RecordDict:
        """The answer that sends nothing, with the reason."""
        logger.warning("client %d declines: %s", self.node.client, reason)
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
        with one_thread():
            asked = _Asked(make_task, message, context)
            content = respond(asked) if asked.refusal is None else asked.declined(asked.refusal)
    except Exception as error:  # Flower would send its text, which may hold private values
        if isinstance(error, BqsgdError):
            logger.error("refused by this client: %s", error)
        else:
            logger.exception("this client failed")
        content = pack(None, kind=FRAME, declined=NO_ANSWER)
    return Message(content, reply_to=message)


def _join(asked: _Asked) -> RecordDict:
    """Who this is. The server learns the number of samples, unless the guarantee hides the whole client."""
    config, task = asked.config, asked.task()
    dimension = message_dimension(config.run.method, task.make_model())
    refusal = asked.node.limits.model_refusal(dimension)
    if refusal is not None:
        return asked.declined(refusal)
    asked.memory[_DIMENSION] = ConfigRecord({"dimension": dimension})
    stated = {} if config.privacy.unit == Unit.CLIENT else {"samples": task.samples_of(0)}
    return pack(None, kind=FRAME, client=asked.node.client, dimension=dimension, **stated)


def _train(asked: _Asked) -> RecordDict:
    secure, question, stated = asked.config.secure.on, data_of(asked.message, kind=MODEL), dict[str, Plain]()
    with asked.node.turn(run=asked.run) if secure else nullcontext():
        reply = _step(asked, question) if secure and is_sum_message(question) else _update(asked, question, stated)
    if reply.frame is None:
        return asked.declined(reply.reason or "no reason", **stated)
    logger.info("client %d sends %d bytes", asked.node.client, len(reply.frame))
    return pack(bytes(reply.frame), kind=FRAME, **stated)


def _step(asked: _Asked, question: bytes) -> Reply:
    """Answer a step of a secure sum that needs no data, nor anything else of the task but its size."""
    known = asked.memory.get(_DIMENSION)
    if known is None:
        dimension = message_dimension(asked.config.run.method, asked.task().make_model())
    else:
        dimension = int(known["dimension"])
    sums = _sum_client(asked, dimension)
    return sums if isinstance(sums, Reply) else answer_step(sums, question)


def _update(asked: _Asked, question: bytes, stated: dict[str, Plain]) -> Reply:
    """Answer a model; what the client says of itself goes into `stated`."""
    config, node, memory, task = asked.config, asked.node, asked.memory, asked.task()
    model = task.make_model()
    sums = _sum_client(asked, message_dimension(config.run.method, model)) if config.secure.on else None
    if isinstance(sums, Reply):
        return sums
    with node.ledger(config, run=asked.run) or nullcontext() as ledger:
        client = Client(
            client=node.client,
            model=model,
            loss_fn=task.loss_fn,
            samples=task.shares[0],
            forward=task.forward,
            sample=task.sample,
            config=config,
            ledger=ledger,
            run=asked.run,
            resume=True,  # a round that a restarted server asks for again is counted again
            private_log=private_log_at(node.private_path(run=asked.run)) if config.privacy.private_metrics else None,
            limits=node.limits,
            sums=sums,
        )
        if sums is None:
            _plan(client, memory)
        record = memory.get(_HELD)
        client.held = None if record is None else read_model(record[MODEL].data, dimension=dimension_of(model))
        reply = client.answer(question)
        if client.held is not None:  # the next message may be changes of the model that this node was sent last
            held = write_model(client.held.model, round=client.held.round)
            memory[_HELD] = pack(held, kind=MODEL).array_records[MODEL]
        if field_of(asked.message, "report", bool):
            guarantee = client.spending.guarantee(delta=config.privacy.delta)
            if guarantee is not None:
                stated["guarantee"] = json.dumps(guarantee.to_dict())
    return reply


def _plan(client: Client, memory: _Memory) -> None:
    """Keep what the planner finds in this run's first round with the node, from message to message.

    A fresh process then need not plan again. The ledger has the last word in any case.
    """
    config, terms = client.config, client.terms
    if config.privacy.mechanism is not None:
        return
    digest = _digest(config.to_dict(), repr(terms), client.client)
    kept_plan = memory.get(_PLAN)
    if kept_plan is not None and kept_plan["digest"] == digest:
        keep_plan(config, terms, Mechanism.from_dict(json.loads(kept_plan["mechanism"])), client=client.client)
        return
    with suppress(Infeasible, PlanningTooLong):  # the client reports it when it is to send
        mechanism = client.release(0).mechanism
        memory[_PLAN] = ConfigRecord({"digest": digest, "mechanism": json.dumps(mechanism.to_dict())})


def _sum_client(asked: _Asked, dimension: int) -> SumClient | Reply:
    """The client's side of the run's secure sums as it stood after its last answer; its plan is kept as `_plan` does.

    Its turn must be this process's.
    """
    config, node, memory = asked.config, asked.node, asked.memory
    digest = _digest(config.to_dict(), dimension, node.client)
    kept_plan = memory.get(_PLAN)
    if kept_plan is not None and kept_plan["digest"] == digest:
        keep_sum_plan(config, dimension=dimension, **{name: int(kept_plan[name]) for name in _SUM_PLAN})
    try:
        with cpu_seconds(node.limits.planning_seconds):
            plan = sum_plan(config, dimension=dimension)
    except (Infeasible, PlanningTooLong) as error:
        return Reply.decline(node.client, f"no plan for the budget: {error}")
    memory[_PLAN] = ConfigRecord({"digest": digest, **{name: getattr(plan, name) for name in _SUM_PLAN}})
    setup = SumSetup.of(config, run=asked.run, dimension=dimension)
    assert setup is not None
    try:
        return setup.client(node.client, folder=node.folder(run=asked.run), seed=config.privacy.seed, lasting=False)
    except InvalidParameter as error:
        logger.error("%s", error)
        return Reply.decline(
            node.client, "what this node kept of the run's secure sums cannot be used; its own log says why"
        )


def _digest(*question: object) -> str:
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
