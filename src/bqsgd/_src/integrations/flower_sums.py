"""Secure sums of updates around a stock strategy: the server learns the sum of all nodes' updates, and no node's own.

    app = ClientApp(mods=[SummedUpdates(**STUDY)])                             # in the ClientApp
    strategy = OpenSums(FedAvg(fraction_evaluate=0.0), roster="roster.toml", **STUDY)    # in the ServerApp
    STUDY = {"study": "trial-7", "rounds": 20, "epsilon": 8.0, "delta": 1e-5, "clip_norm": 1.0, "clients": 20}

All nodes together add the noise that one node adds behind `PrivateUpdates`. Each needs an identity key and the roster,
as for `bqsgd.flower`. The strategy inside gets one reply, the mean of all nodes' models: those that average work, those
that compare nodes (a median, Krum) do not.

A round takes three exchanges of messages, and three more when keys are exchanged, for ten rounds at a time.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from bqsgd._src.client.sums import answer_step, check_noise, identity_of, masked_vector, roster_of
from bqsgd._src.errors import BqsgdError, FrameError, InvalidParameter
from bqsgd._src.flower.messages import FRAME, MODEL, data_of, field_of, has_data, pack
from bqsgd._src.flower.settings import Node
from bqsgd._src.integrations.flower import PrivateUpdates, node_of
from bqsgd._src.integrations.flower_accountant import UPDATE, SiteAccountant, Statement, stated_by, stated_in
from bqsgd._src.integrations.flower_arrays import (
    ARRAYS,
    EXAMPLES,
    METRICS,
    Wrapped,
    arrays_of,
    flat_of,
    floating_in,
    moved_by,
)
from bqsgd._src.params import Mechanism, check_int, check_positive
from bqsgd._src.persample.clips import L2
from bqsgd._src.planner.plan import Budget
from bqsgd._src.planner.sums import SumPlan, width_of
from bqsgd._src.private.gate import UpdateGate, update_range, update_sum, update_terms
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.graph import Thresholds, thresholds
from bqsgd._src.secure.state import StateFile
from bqsgd._src.server.sums import SumRounds
from bqsgd._src.server.widths import Widths
from bqsgd._src.text import one_line
from bqsgd._src.wire.reply import Reply

logger = logging.getLogger("flwr.bqsgd")
_ROUND, _DIMENSION, _CLIENT = "round", "dimension", "client"
_KEY_ROUNDS = 10
_TRAINING = b"train"
"""Stands for the strategy's own message of a node, which is not bytes."""


def _agreed(rule: Thresholds, mechanism: Mechanism) -> SumPlan:
    levels, trials = mechanism.levels, mechanism.trials
    return SumPlan(rule=rule, levels=levels, trials=trials, width=width_of(rule, levels, trials))


class SummedUpdates(PrivateUpdates):
    """A mod like `PrivateUpdates`, for secure sums: what leaves the node is masked, and opens only in the sum.

    Args: as `PrivateUpdates`, and
        clients: nodes in the roster, which all take part.
        dropouts: nodes that may be missing from a round.
        colluders: nodes that may tell the server all they know.
        mechanism: levels and trials of the sum to use instead of planned ones.

    The node needs `roster` and `identity` in its configuration, and its limits (`fewest-in-sum`, `colluders`) hold.
    """

    def __init__(
        self,
        *,
        clients: int,
        dropouts: int = 0,
        colluders: int = 0,
        mechanism: Mechanism | None = None,
        **study: Any,
    ) -> None:
        super().__init__(**study)
        self._rule = thresholds(clients=clients, dropouts=dropouts, colluders=colluders)
        self._settings |= {"rule": self._rule, "mechanism": mechanism}

    def released(self, message: Message, context: Any, call_next: ClientAppCallable) -> RecordDict:
        """An answer to a step of the sums, or the masked update."""
        node = node_of(context.node_config)
        dimension = field_of(message, _DIMENSION, int)
        if dimension is None:
            return pack(None, kind=FRAME, **{_CLIENT: node.client})
        self.check_limits(node.limits, dimension)
        for limit, value in {"fewest_in_sum": self._rule.fewest, "colluders": self._rule.colluders}.items():
            if value < getattr(node.limits, limit):
                raise InvalidParameter(f"{limit} is {value}, this node asks for {getattr(node.limits, limit)}")
        # Flower may start a process for the next message at once. Two of them must not use the keys of one sum.
        with node.turn(run=self._study), self._ledger(node) as ledger, UpdateGate(ledger, **self._settings) as gate:
            sums = self._sums(node, gate, dimension)
            if has_data(message, kind=MODEL):
                reply = answer_step(sums, data_of(message, kind=MODEL))
                if reply.frame is None:
                    raise InvalidParameter(f"a step of the secure sum was refused: {reply.reason}")
                return pack(bytes(reply.frame), kind=FRAME)
            return self._masked(message, context, call_next, gate, sums, dimension)

    def _sums(self, node: Node, gate: UpdateGate, dimension: int) -> SumClient:
        roster, identity = (node.options.get(key) for key in ("roster", "identity"))
        if roster is None or identity is None:
            raise InvalidParameter("secure sums need roster and identity in the configuration of the node")
        mechanism = gate.plan(dimension).mechanism
        plan = _agreed(self._rule, mechanism)
        return SumClient(
            plan.agreement(
                roster_of(Path(str(roster)).expanduser(), self._rule.clients),
                run=f"study-{self._study}", dimension=dimension, seeded=False,
            ),
            identity=identity_of(Path(str(identity)).expanduser(), node.client),
            number=node.client,
            keep=StateFile(node.folder(run=self._study) / f"client-{node.client:04}-{self._study}.sums"),
            rounds=self._settings["rounds"],
        )  # fmt: skip

    def _masked(
        self,
        message: Message,
        context: Any,
        call_next: ClientAppCallable,
        gate: UpdateGate,
        sums: SumClient,
        dimension: int,
    ) -> RecordDict:
        round, digest, before = field_of(message, _ROUND, int), _digest(message.content), arrays_of(message)
        if round is None or not sums.ready(round):
            raise InvalidParameter(f"no keys for the sum of round {round}, or they were used before")
        if flat_of(before).size != dimension:
            raise InvalidParameter(f"the model has {flat_of(before).size} coordinates, the message says {dimension}")
        check_noise(sums, gate.plan(dimension).release, rule=self._rule, seeded=False)
        outlet = partial(masked_vector, sums, range=gate.range, model=digest)
        update = self.update_of(message, context, call_next, before)
        frame = gate.send(update, dimension=dimension, round=round, outlet=outlet)
        stated = stated_by(gate)
        logger.info("study %s: masked update of round %d; %s", self._study, round, gate.guarantee())
        content = pack(frame, kind=FRAME)
        content[UPDATE] = ConfigRecord(asdict(stated))
        return content


class OpenSums(Wrapped):
    """A strategy around the one given: it runs the secure sums, and gives the mean of the nodes' models to it.

    Args:
        strategy: any strategy that averages.
        roster: file of the nodes' public keys, the same as theirs.
        first_round: of the study, counted from 0: a ServerApp that is started again continues after the last one.
        seconds: how long an exchange waits for the nodes.
        accountant: as for `OpenUpdates`.
        study: as `SummedUpdates`, and the same as there.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        roster: str | Path,
        first_round: int = 0,
        seconds: float = 3600.0,
        accountant: SiteAccountant | None = None,
        **study: Any,
    ) -> None:
        super().__init__(strategy, accountant=accountant)
        agreed = SummedUpdates(**study)._settings
        self._rule, self._mechanism, self._rounds = agreed["rule"], agreed["mechanism"], agreed["rounds"]
        self._roster, self._run = roster_of(roster, self._rule.clients), f"study-{agreed['study']}"
        self._budget = Budget(bits=agreed["bits"], epsilon=agreed["epsilon"], delta=agreed["delta"])
        self._clip = L2(norm=agreed["clip_norm"])
        self._seconds, self._round = check_positive("seconds", seconds), check_int("first_round", first_round, 0, 2**40)
        self._clients: dict[int, int] = {}
        """Client -> its node."""
        self._sums: SumRounds | None = None
        self._plan: SumPlan | None = None
        self._opened: list[Message] = []
        self._stated: dict[int, Statement] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Run the sum of the round with the messages of the strategy inside; nothing is left to send."""
        messages = {
            each.metadata.dst_node_id: each for each in super().configure_train(server_round, arrays, config, grid)
        }
        self._opened = []
        if self._round >= self._rounds:
            logger.warning("all %d rounds of the study are over: nothing is summed", self._rounds)
            return []
        held = ArrayRecord(dict(arrays))
        dimension = flat_of(floating_in(held)).size
        sums, plan = self._begun(dimension)
        self._greet(grid, messages)
        asked = {client: messages[node] for client, node in self._clients.items() if node in messages}
        if not asked:
            logger.warning("no node of the roster was sampled: nothing is summed")
            return []
        fields = {_DIMENSION: dimension, _ROUND: self._round}
        digest = _digest(next(iter(asked.values())).content)
        carry = partial(self._carry, grid=grid, training=asked, fields=fields)
        outcome = sums.round(dict.fromkeys(asked, _TRAINING), round=self._round, carry=carry, model=digest)
        self._round += 1
        for client, reply in sorted(outcome.trouble.items()):
            logger.warning("client %d is not in the sum: %s", client, one_line(reply.reason or "no reason"))
        if outcome.total is None:
            logger.warning("the sum of this round is lost, the model stays as it is: %s", outcome.lost)
            return []
        total = outcome.total
        mean = plan.mean(total.lanes, survivors=len(total.survivors), width=total.width) * self._range
        epsilon = max(self._stated[client].epsilon for client in total.survivors)
        metrics = MetricRecord({EXAMPLES: len(total.survivors), "epsilon": epsilon})
        content = RecordDict({ARRAYS: moved_by(held, mean), METRICS: metrics})
        self._opened = [Message(content, reply_to=next(iter(asked.values())))]
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As the strategy inside, from the mean."""
        return super().aggregate_train(server_round, self._opened)

    def _begun(self, dimension: int) -> tuple[SumRounds, SumPlan]:
        if self._sums is None or self._plan is None:
            self._range = update_range(self._budget, clip_norm=self._clip.norm, rounds=self._rounds)
            terms = update_terms(self._clip, range=self._range, dimension=dimension, rule=self._rule)
            mechanism = self._mechanism
            if mechanism is None:
                mechanism = update_sum(self._budget.privacy, terms, self._rule, rounds=self._rounds).mechanism
            self._plan = _agreed(self._rule, mechanism)
            agreement = self._plan.agreement(self._roster, run=self._run, dimension=dimension, seeded=False)
            # Nodes refuse an epoch that is not larger than all before. Time keeps that over restarts, without a file.
            epochs = [time.time_ns()]
            self._sums = SumRounds(
                agreement,
                rounds=self._rounds,
                key_rounds=_KEY_ROUNDS,
                last_epoch=lambda *given: epochs[0] if not given else epochs.__setitem__(0, given[0]) or given[0],
                widths=Widths(self._plan, dimension=dimension),
            )
        return self._sums, self._plan

    def _greet(self, grid: Grid, messages: Mapping[int, Message]) -> None:
        """Ask the nodes that are not known yet which client they are. Who lies about it has no keys for the sum."""
        known = set(self._clients.values())
        new = [node for node in messages if node not in known]
        for node, reply in self._exchanged(grid, {node: pack(None, kind=MODEL) for node in new}):
            try:
                client = field_of(reply, _CLIENT, int)
            except FrameError as error:
                logger.warning("node %d: %s", node, one_line(error))
                continue
            holder = self._clients.get(client)
            if client not in self._roster.keys or holder in messages:
                # The first to claim a number keeps it while it is online, so that no node drives another one out.
                logger.warning("node %d says that it is client %s, which it cannot be", node, client)
                continue
            self._clients[client] = node

    def _carry(
        self,
        outgoing: Mapping[int, bytes],
        *,
        grid: Grid,
        training: Mapping[int, Message],
        fields: Mapping[str, int],
    ) -> Iterator[Reply]:
        contents: dict[int, RecordDict] = {}
        for client, content in outgoing.items():
            if content == _TRAINING:
                stated = pack(None, kind=MODEL, **fields)
                contents[self._clients[client]] = RecordDict({**training[client].content, **stated})
            else:
                contents[self._clients[client]] = pack(content, kind=MODEL, **fields)
        clients = {node: client for client, node in self._clients.items()}
        for node, reply in self._exchanged(grid, contents):
            try:
                frame = data_of(reply, kind=FRAME)
                if outgoing[clients[node]] == _TRAINING:
                    self._stated[clients[node]] = statement = stated_in(reply)
                    if self._accountant is not None:
                        self._accountant.note(node, statement)
                yield Reply(client=clients[node], frame=frame)
            except (BqsgdError, KeyError, TypeError) as error:
                yield Reply(client=clients[node], reason=one_line(error))

    def _exchanged(self, grid: Grid, contents: Mapping[int, RecordDict]) -> Iterator[tuple[int, Message]]:
        messages = [Message(content, node, MessageType.TRAIN) for node, content in contents.items()]
        if not messages:
            return
        for reply in grid.send_and_receive(messages, timeout=self._seconds):
            node = reply.metadata.src_node_id
            if reply.has_error():
                logger.warning("node %d: %s", node, one_line(reply.error.reason))
            elif node in contents:
                yield node, reply


def _digest(content: RecordDict) -> bytes:
    """What the masks of a round depend on: the model and the configuration that the strategy sends."""
    state = hashlib.sha256()
    for name, record in sorted(content.array_records.items()):
        for key, array in record.items():
            form = (name, key, array.dtype, tuple(array.shape), len(array.data))
            state.update(hashlib.sha256(repr(form).encode()).digest() + array.data)
    return state.digest()
