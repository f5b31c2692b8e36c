"""The ClientApp: one message in, one frame out. All the work is `training.Client`'s.

Flower starts a fresh process for every message of a deployment, so what lasts is on the client's disk (its ledger) or
in the node's own memory of the run (its plan). Nothing that depends on the data leaves but the frame: an error goes to
the client's own log, and the server only hears that there was one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, MutableMapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from bqsgd.engines.engine import one_thread, private_log_at
from bqsgd.engines.flower.messages import FRAME, MODEL, Plain, data_of, field_of, pack, write_guarantee
from bqsgd.errors import BqsgdError, Infeasible, InvalidParameter
from bqsgd.flower.processes import keep_ray_on_loopback
from bqsgd.flower.settings import MakeTask, Node, check_name, read_settings
from bqsgd.models import dimension_of
from bqsgd.params import Mechanism
from bqsgd.planner.search import PlanningTooLong
from bqsgd.training.client import Client, Declined
from bqsgd.training.client_plan import keep_plan
from bqsgd.training.task import Task
from bqsgd.wire.model_message import ModelMessage, read_model, write_model

logger = logging.getLogger("flwr.bqsgd")
_PLAN, _HELD = "bqsgd.plan", "bqsgd.held"
NO_ANSWER = "the client could not answer; its own log says why"
"""All that the server learns of any error here: even the kind of error can depend on the data."""

_Respond = Callable[[MakeTask, Message, Context], RecordDict]


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


def _guarded(respond: _Respond, make_task: MakeTask, message: Message, context: Context) -> Message:
    try:
        with one_thread():
            content = respond(make_task, message, context)
    except Exception as error:  # Flower would send its text, which may hold private values
        if isinstance(error, BqsgdError):
            logger.error("refused by this client: %s", error)
        else:
            logger.exception("this client failed")
        content = pack(None, kind=FRAME, declined=NO_ANSWER)
    return Message(content, reply_to=message)


def _join(make_task: MakeTask, message: Message, context: Context) -> RecordDict:
    """Who this is. The number of samples is its weight in the mean and so becomes known to the server."""
    config, _, options = read_settings(context.run_config)
    node = Node.of(context.node_config)
    refusal = node.refusal(config)
    if refusal is not None:
        logger.warning("client %d declines the run: %s", node.client, refusal)
        return pack(None, kind=FRAME, declined=refusal)
    task = _own(make_task(config, node, options))
    dimension = dimension_of(task.make_model())
    refusal = node.limits.model_refusal(dimension)
    if refusal is not None:
        logger.warning("client %d declines the run: %s", node.client, refusal)
        return pack(None, kind=FRAME, declined=refusal)
    return pack(None, kind=FRAME, client=node.client, samples=task.samples_of(0), dimension=dimension)


def _own(task: Task) -> Task:
    if len(task.shares) != 1:
        raise InvalidParameter(f"a client's task holds its own share of the data alone, got {len(task.shares)} shares")
    return task


def _train(make_task: MakeTask, message: Message, context: Context) -> RecordDict:
    config, _, options = read_settings(context.run_config)
    node = Node.of(context.node_config)
    run, report = check_name(field_of(message, "run", str)), field_of(message, "report", bool)
    refusal = node.refusal(config)
    if refusal is not None:
        logger.warning("client %d declines: %s", node.client, refusal)
        return pack(None, kind=FRAME, declined=refusal)
    config = config.but(reserve_rounds=1)  # one process per message: a reservation could not outlive it
    task = _own(make_task(config, node, options))
    ledger = node.ledger(config, run=run)
    try:
        client = Client(
            client=node.client,
            model=task.make_model(),
            loss=task.loss,
            samples=task.shares[0],
            forward=task.forward,
            config=config,
            ledger=ledger,
            run=run,
            resume=True,  # a round that a restarted server asks for again is counted again
            private_log=private_log_at(node.private_path(run=run)) if config.privacy.private_metrics else None,
            limits=node.limits,
        )
        _plan(client, context.state)
        client.held = _held(context.state, dimension=client.setting.dimension)
        answer = client.answer(data_of(message, kind=MODEL))
        if client.held is not None:
            held = write_model(client.held.model, round=client.held.round)
            context.state[_HELD] = pack(held, kind=MODEL).array_records[MODEL]
        stated: dict[str, Plain] = {}
        if report:
            guarantee = client.spending.guarantee(delta=config.privacy.delta)
            if guarantee is not None:
                stated["guarantee"] = write_guarantee(guarantee)
    finally:
        if ledger is not None:
            ledger.close()
    if isinstance(answer, Declined):
        logger.warning("client %d declines: %s", node.client, answer.reason)
        return pack(None, kind=FRAME, declined=answer.reason, **stated)
    logger.info("client %d sends a frame of %d bytes", node.client, len(answer))
    return pack(answer, kind=FRAME, **stated)


def _held(state: MutableMapping[str, Any], *, dimension: int) -> ModelMessage | None:
    """The model that this node was sent last, where the next message may be its changes."""
    record = state.get(_HELD)
    return None if record is None else read_model(record[MODEL].data, dimension=dimension)


def _plan(client: Client, state: MutableMapping[str, Any]) -> None:
    """Keep what the planner finds in this run's first round with the node, from message to message.

    A fresh process then need not plan again. The ledger has the last word in any case.
    """
    config, setting = client.config, client.setting
    if config.privacy.mechanism is not None:
        return
    question = json.dumps([config.to_dict(), repr(setting), client.client], sort_keys=True)
    digest = hashlib.sha256(question.encode()).hexdigest()
    found = state.get(_PLAN)
    if found is not None and found["digest"] == digest:
        keep_plan(config, setting, Mechanism.from_dict(json.loads(found["mechanism"])), client=client.client)
        return
    try:
        mechanism = client.release(0).mechanism
    except (Infeasible, PlanningTooLong):
        return  # the client reports it when it is to send
    state[_PLAN] = ConfigRecord({"digest": digest, "mechanism": json.dumps(mechanism.to_dict())})
