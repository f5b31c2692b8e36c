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
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from bqsgd.engines.flower.messages import FRAME, MODEL, Word, data_of, parcel, word, write_guarantee
from bqsgd.engines.flower.place import Place
from bqsgd.engines.flower.settings import check_name, read_settings
from bqsgd.engines.task import Pair, private_log_at
from bqsgd.errors import BqsgdError, Infeasible
from bqsgd.params import Mechanism
from bqsgd.persample.functional import LossFunction
from bqsgd.training.client import Client, Declined
from bqsgd.training.config import Config
from bqsgd.training.plans import Situation, keep_plan, release_in
from bqsgd.training.vector import dimension_of

logger = logging.getLogger("flwr.bqsgd")
_PLAN = "bqsgd.plan"
NO_ANSWER = "the client could not answer; its own log says why"
"""All that the server hears of any error here: even the kind of error can depend on the data."""

MakeModel = Callable[[Config], nn.Module]
LoadShare = Callable[[Place, Config], Pair]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Work:
    make_model: MakeModel
    load_share: LoadShare
    loss: LossFunction


def client_app(*, make_model: MakeModel, load_share: LoadShare, loss: LossFunction | None = None) -> ClientApp:
    """A ClientApp that trains privately.

    Args:
        make_model: the settings -> the model.
        load_share: (place, settings) -> this client's inputs and targets; `place.client` is its number and
            `place.options` the node configuration, for instance the folder of its data.
        loss: (outputs, targets) -> one loss a sample; cross-entropy when left out.
    """
    work = _Work(make_model=make_model, load_share=load_share, loss=loss or nn.CrossEntropyLoss(reduction="none"))
    app = ClientApp()

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        return _guarded(_hello, work, message, context)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _guarded(_train, work, message, context)

    return app


def _guarded(
    answer: Callable[[_Work, Message, Context], RecordDict], work: _Work, message: Message, context: Context
) -> Message:
    torch.set_num_threads(1)  # the sums must not depend on how many cores this machine has
    try:
        content = answer(work, message, context)
    except Exception as error:  # Flower would send its text, which may hold private values
        if isinstance(error, BqsgdError):
            logger.error("refused by this client: %s", error)
        else:
            logger.exception("this client failed")
        content = parcel(None, kind=FRAME, declined=NO_ANSWER)
    return Message(content, reply_to=message)


def _hello(work: _Work, message: Message, context: Context) -> RecordDict:
    """Who this is. The number of samples is its weight in the mean and so becomes known to the server."""
    config, _ = read_settings(context.run_config)
    place = Place.of(context.node_config)
    refusal = place.refusal(config)
    if refusal is not None:
        logger.warning("client %d declines the run: %s", place.client, refusal)
        return parcel(None, kind=FRAME, declined=refusal)
    inputs, _ = work.load_share(place, config)
    dimension = dimension_of(work.make_model(config))
    return parcel(None, kind=FRAME, client=place.client, samples=len(inputs), dimension=dimension)


def _train(work: _Work, message: Message, context: Context) -> RecordDict:
    config, _ = read_settings(context.run_config)
    place = Place.of(context.node_config)
    run, books = check_name(word(message, "run", str)), word(message, "books", bool)
    refusal = place.refusal(config)
    if refusal is not None:
        logger.warning("client %d declines: %s", place.client, refusal)
        return parcel(None, kind=FRAME, declined=refusal)
    config = replace(config, reserve_rounds=1)  # one process a message: a reservation could not outlive it
    inputs, targets = work.load_share(place, config)
    ledger = place.ledger(config, run=run)
    try:
        client = Client(
            client=place.client,
            model=work.make_model(config),
            loss=work.loss,
            inputs=inputs,
            targets=targets,
            config=config,
            ledger=ledger,
            run=run,
            resume=True,  # a round that a restarted server asks for again is counted again
            private_log=private_log_at(place.private_path(run=run)) if config.private_metrics else None,
        )
        _plan(config, client.situation, place.client, context.state)
        answer = client.answer(data_of(message, kind=MODEL))
        words: dict[str, Word] = {}
        if books:
            guarantee = client.spending.guarantee(delta=config.delta)
            if guarantee is not None:
                words["guarantee"] = write_guarantee(guarantee)
    finally:
        if ledger is not None:
            ledger.close()
    if isinstance(answer, Declined):
        logger.warning("client %d declines: %s", place.client, answer.reason)
        return parcel(None, kind=FRAME, declined=answer.reason, **words)
    logger.info("client %d sends a frame of %d bytes", place.client, len(answer))
    return parcel(answer, kind=FRAME, **words)


def _plan(config: Config, situation: Situation, client: int, state: MutableMapping[str, Any]) -> None:
    """Keep what the planner finds in this run's first round with the node, from message to message.

    A fresh process then need not plan again. The ledger has the last word in any case.
    """
    if config.mechanism is not None:
        return
    question = json.dumps([config.to_dict(), repr(situation), client], sort_keys=True)
    digest = hashlib.sha256(question.encode()).hexdigest()
    found = state.get(_PLAN)
    if found is not None and found["digest"] == digest:
        keep_plan(config, situation, Mechanism.from_dict(json.loads(found["mechanism"])), client=client)
        return
    try:
        mechanism = release_in(config, situation, client=client, round=0).mechanism
    except Infeasible:
        return  # the client says so itself when it comes to send
    state[_PLAN] = ConfigRecord({"digest": digest, "mechanism": json.dumps(mechanism.to_dict())})
