"""One round over any engine: the server's messages out, the clients' replies in; and a log line for what went wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from bqsgd._src.engines.engine import Engine
from bqsgd._src.records.record import RoundRecord
from bqsgd._src.secure.masks import model_digest
from bqsgd._src.server.server import Server
from bqsgd._src.server.sums import SumRounds, together
from bqsgd._src.text import one_line
from bqsgd._src.wire.model_change import is_change
from bqsgd._src.wire.model_steps import is_steps
from bqsgd._src.wire.reply import WHOLE_MODEL_NEEDED, Reply

_log = logging.getLogger("bqsgd.run")
_MOST_NAMED = 10


def run_round(
    server: Server, engine: Engine, *, asked: Sequence[int] | None = None, sums: Sequence[SumRounds] = ()
) -> RoundRecord:
    """One round of Algorithm 1: open, exchange, close. Accuracy and epsilon are left to the caller.

    asked: the clients to ask, most wanted first; all by default.
    sums: run the exchanges of the secure sum of each group of clients.
    """
    began = time.perf_counter()
    messages = server.open_round(asked)
    writing = time.perf_counter() - began
    if not sums:
        wanted = messages if asked is None else {client: messages[client] for client in asked}
        for reply in _exchanged(server, engine, wanted):
            server.take(reply)
    else:
        carry = partial(_exchanged, server, engine)
        model = model_digest(server.model, server.config.summed)
        server.receive_sums(together(sums, messages, round=server.round, carry=carry, model=model))
    record = server.close_round()
    seconds = dict(engine.seconds())
    for stage, elapsed in {**record.seconds, "frame": writing}.items():
        seconds[stage] = seconds.get(stage, 0.0) + elapsed
    return replace(record, seconds=seconds)


def _exchanged(server: Server, engine: Engine, messages: Mapping[int, bytes]) -> Iterator[Reply]:
    """The replies to these messages. A client that does not hold the model that was changed is sent the whole one."""
    clients, carry = server.config.clients, partial(engine.exchange, round=server.round)
    whole: dict[int, bytes] = {}
    for reply in carry(messages) if clients.ask is None else carry(messages, enough=clients.cohort):
        message = messages.get(reply.client, b"")
        if reply.reason == WHOLE_MODEL_NEEDED and (is_change(message) or is_steps(message)):
            whole[reply.client] = server.whole_model(reply.client)
        else:
            yield reply
    if whole:
        yield from carry(whole)


def log_trouble(record: RoundRecord) -> None:
    """A line for each client whose frame was not used, up to a limit, and one for a round without a step."""
    trouble = record.trouble
    for entry in trouble[:_MOST_NAMED]:
        who = "somebody" if entry.client is None else f"client {entry.client}"
        _log.warning("round %d: %s %s: %s", record.round, who, entry.status, one_line(entry.reason or "-"))
    if len(trouble) > _MOST_NAMED:
        _log.warning("round %d: %d more answers were not used", record.round, len(trouble) - _MOST_NAMED)
    if not record.stepped:
        _log.warning("round %d: %d frames are too few; the model stays as it is", record.round, record.used)
