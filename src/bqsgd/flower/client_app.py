"""The ClientApp: one message in, one frame out. All the work is `training.Client`'s.

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

from bqsgd.engines.engine import one_thread, private_log_at
from bqsgd.engines.flower.messages import FRAME, MODEL, Plain, data_of, field_of, pack, write_guarantee
from bqsgd.errors import BqsgdError, Infeasible, InvalidParameter
from bqsgd.flower.processes import keep_ray_on_loopback
from bqsgd.flower.settings import MakeTask, Node, check_name, read_settings
from bqsgd.models import dimension_of
from bqsgd.params import Mechanism
from bqsgd.planner.search import PlanningTooLong, cpu_seconds
from bqsgd.release import Unit
from bqsgd.secure.client import SumClient
from bqsgd.secure.messages import is_sum_message
from bqsgd.training.client import Client, Declined, answer_step
from bqsgd.training.client_plan import keep_plan, keep_sum_plan, sum_plan
from bqsgd.training.least_squares import message_dimension
from bqsgd.training.settings import Config
from bqsgd.training.sums import SumSetup
from bqsgd.training.task import Task
from bqsgd.wire.model_message import ModelMessage, read_model, write_model

logger = logging.getLogger("flwr.bqsgd")
_PLAN, _HELD, _DIMENSION = "bqsgd.plan", "bqsgd.held", "bqsgd.dimension"
_SUM_PLAN = ("levels", "trials", "width")
NO_ANSWER = "the client could not answer; its own log says why"
"""All that the server learns of any error here: even the kind of error can depend on the data."""

_Memory = MutableMapping[str, Any]
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
    """Who this is. The server learns the number of samples, unless the guarantee hides the whole client."""
    config, _, options = read_settings(context.run_config)
    node = Node.of(context.node_config)
    run, roster = check_name(field_of(message, "run", str)), field_of(message, "roster", str)
    refusal = node.refusal(config, run=run, roster=roster)
    if refusal is not None:
        return _declined(node, refusal)
    task = _own(make_task(config, node, options))
    dimension = message_dimension(config.run.method, task.make_model())
    refusal = node.limits.model_refusal(dimension)
    if refusal is not None:
        return _declined(node, refusal)
    context.state[_DIMENSION] = ConfigRecord({"dimension": dimension})
    stated = {} if config.privacy.unit == Unit.CLIENT else {"samples": task.samples_of(0)}
    return pack(None, kind=FRAME, client=node.client, dimension=dimension, **stated)


def _own(task: Task) -> Task:
    if len(task.shares) != 1:
        raise InvalidParameter(f"a client's task holds its own share of the data alone, got {len(task.shares)} shares")
    return task


def _declined(node: Node, reason: str, **stated: Plain) -> RecordDict:
    logger.warning("client %d declines: %s", node.client, reason)
    return pack(None, kind=FRAME, declined=reason, **stated)


def _train(make_task: MakeTask, message: Message, context: Context) -> RecordDict:
    config, *_ = read_settings(context.run_config)
    node = Node.of(context.node_config)
    run, roster = check_name(field_of(message, "run", str)), field_of(message, "roster", str)
    refusal = node.refusal(config, run=run, roster=roster)
    if refusal is not None:
        return _declined(node, refusal)
    config = node.own_settings(config, run=run)
    question, stated = data_of(message, kind=MODEL), dict[str, Plain]()
    answer: bytes | bytearray | Declined
    with node.turn(run=run) if config.secure.on else nullcontext():
        if config.secure.on and is_sum_message(question):
            answer = _step(make_task, question, config, node, context, run=run)
        else:
            answer = _update(make_task, message, config, node, context, run=run, stated=stated)
    if isinstance(answer, Declined):
        return _declined(node, answer.reason, **stated)
    logger.info("client %d sends %d bytes", node.client, len(answer))
    return pack(answer, kind=FRAME, **stated)


def _step(
    make_task: MakeTask, question: bytes, config: Config, node: Node, context: Context, *, run: str
) -> bytes | Declined:
    """Answer a step of a secure sum that needs no data, nor anything else of the task but its size."""
    memory: _Memory = context.state
    known = memory.get(_DIMENSION)
    if known is None:
        *_, options = read_settings(context.run_config)
        dimension = message_dimension(config.run.method, _own(make_task(config, node, options)).make_model())
    else:
        dimension = int(known["dimension"])
    sums = _sum_client(config, node, memory, run=run, dimension=dimension)
    return sums if isinstance(sums, Declined) else answer_step(sums, question)


def _update(
    make_task: MakeTask,
    message: Message,
    config: Config,
    node: Node,
    context: Context,
    *,
    run: str,
    stated: dict[str, Plain],
) -> bytes | bytearray | Declined:
    """Answer a model; what the client says of itself goes into `stated`."""
    *_, options = read_settings(context.run_config)
    task = _own(make_task(config, node, options))
    model = task.make_model()
    dimension = message_dimension(config.run.method, model)
    sums = _sum_client(config, node, context.state, run=run, dimension=dimension) if config.secure.on else None
    if isinstance(sums, Declined):
        return sums
    ledger = node.ledger(config, run=run)
    try:
        client = Client(
            client=node.client,
            model=model,
            loss=task.loss,
            samples=task.shares[0],
            forward=task.forward,
            sample=task.sample,
            config=config,
            ledger=ledger,
            run=run,
            resume=True,  # a round that a restarted server asks for again is counted again
            private_log=private_log_at(node.private_path(run=run)) if config.privacy.private_metrics else None,
            limits=node.limits,
            sums=sums,
        )
        if sums is None:
            _plan(client, context.state)
        client.held = _held(context.state, dimension=dimension_of(model))
        answer = client.answer(data_of(message, kind=MODEL))
        if client.held is not None:
            held = write_model(client.held.model, round=client.held.round)
            context.state[_HELD] = pack(held, kind=MODEL).array_records[MODEL]
        if field_of(message, "report", bool):
            guarantee = client.spending.guarantee(delta=config.privacy.delta)
            if guarantee is not None:
                stated["guarantee"] = write_guarantee(guarantee)
    finally:
        if ledger is not None:
            ledger.close()
    return answer


def _held(memory: _Memory, *, dimension: int) -> ModelMessage | None:
    """The model that this node was sent last, where the next message may be its changes."""
    record = memory.get(_HELD)
    return None if record is None else read_model(record[MODEL].data, dimension=dimension)


def _plan(client: Client, memory: _Memory) -> None:
    """Keep what the planner finds in this run's first round with the node, from message to message.

    A fresh process then need not plan again. The ledger has the last word in any case.
    """
    config, setting = client.config, client.setting
    if config.privacy.mechanism is not None:
        return
    digest = _digest(config.to_dict(), repr(setting), client.client)
    found = memory.get(_PLAN)
    if found is not None and found["digest"] == digest:
        keep_plan(config, setting, Mechanism.from_dict(json.loads(found["mechanism"])), client=client.client)
        return
    with suppress(Infeasible, PlanningTooLong):  # the client reports it when it is to send
        mechanism = client.release(0).mechanism
        memory[_PLAN] = ConfigRecord({"digest": digest, "mechanism": json.dumps(mechanism.to_dict())})


def _sum_client(config: Config, node: Node, memory: _Memory, *, run: str, dimension: int) -> SumClient | Declined:
    """The client's side of the run's secure sums as it stood after its last answer; its plan is kept as `_plan` does.

    Its turn must be this process's.
    """
    digest = _digest(config.to_dict(), dimension, node.client)
    found = memory.get(_PLAN)
    if found is not None and found["digest"] == digest:
        keep_sum_plan(config, dimension=dimension, **{name: int(found[name]) for name in _SUM_PLAN})
    try:
        with cpu_seconds(node.limits.planning_seconds):
            plan = sum_plan(config, dimension=dimension)
    except (Infeasible, PlanningTooLong) as error:
        return Declined(reason=f"no plan for the budget: {error}")
    memory[_PLAN] = ConfigRecord({"digest": digest, **{name: getattr(plan, name) for name in _SUM_PLAN}})
    setup = SumSetup.of(config, run=run, dimension=dimension)
    assert setup is not None
    try:
        return setup.client(node.client, folder=node.folder(run=run), seed=config.privacy.seed, lasting=False)
    except InvalidParameter as error:
        logger.error("%s", error)
        return Declined(reason="what this node kept of the run's secure sums cannot be used; its own log says why")


def _digest(*question: object) -> str:
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
