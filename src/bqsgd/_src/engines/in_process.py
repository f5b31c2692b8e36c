"""All clients in this process, one after another or a few at a time: for simulations, tests and one-machine runs.

With more than FEW clients, a client object is created only when it is first asked; until then it is a row in the
register. Once it has replied it lets go of its data and its last frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bqsgd._src.client.client import Client
from bqsgd._src.client.files import run_register
from bqsgd._src.client.least_squares import objective_of
from bqsgd._src.client.samples import Fetched
from bqsgd._src.engines.engine import FEW, Setup, check_known, make_client
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import Register
from bqsgd._src.ledger.spending import ledger_guarantee
from bqsgd._src.params import check_int
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.release import Unit
from bqsgd._src.settings.client_plan import public_size
from bqsgd._src.wire.model_message import ModelMessage
from bqsgd._src.wire.reply import Reply

_STAGES = ("gradients", "encode", "frame", "ledger")
_AT_ONCE = 64
"""Clients whose answers wait to be put in order, where several work at once."""


def in_process(setup: Setup) -> InProcess:
    """The engine of a run whose clients are all in this process: one per share of the task's data."""
    config, task = setup.config, setup.task
    count = config.clients.count
    if len(task.shares) != count:
        raise InvalidParameter(
            f"clients={count}, but the task has {len(task.shares)} shares of data: one share per client"
        )
    if setup.sums is not None and not setup.sums.simulated:
        raise InvalidParameter(
            "roster and identity are for clients in processes of their own; in one process the keys are made as they "
            "are needed: leave both out"
        )
    if config.privacy.unit == Unit.CLIENT and config.server.weights == "size" and setup.sizes is None:
        raise InvalidParameter(
            "with unit = 'client' the guarantee hides how many samples a client holds, so no weight may depend on it: "
            "leave the weights equal, or give a list of sizes that may be known"
        )
    workers = min(config.clients.workers, count)
    models = [task.make_model() for _ in range(workers)]
    if count <= FEW:
        clients = [
            make_client(setup, number=number, model=models[number % workers], share=share)
            for number, share in enumerate(task.shares)
        ]
        return InProcess(clients, workers=workers)
    objectives = [objective_of(config, model, task.loss_fn, task.forward) for model in models]
    sizes = {number: task.samples_of(number) for number in range(count)}
    register = run_register(config, setup.folder, resuming=setup.resuming)

    def make(number: int) -> Client:
        return make_client(
            setup,
            number=number,
            model=models[number % workers],
            share=Fetched(lambda: task.shares[number], size=sizes[number]),
            register=register,
            objective=objectives[number % workers],
        )

    public = {number: public_size(config, size) for number, size in sizes.items()}
    return InProcess(_MadeWhenAsked(make, public), workers=workers, register=register)


class _MadeWhenAsked(dict[int, Client]):
    """The clients that were asked, by number: each is made when it is looked up for the first time."""

    def __init__(self, make: Callable[[int], Client], sizes: Mapping[int, int]) -> None:
        self._make, self.sizes = make, sizes

    def __missing__(self, number: int) -> Client:
        self[number] = self._make(number)
        return self[number]


class InProcess:
    """An engine over clients in memory.

    Args:
        clients: in any order, each number once; or by number, made when they are asked.
        workers: how many clients work at once. Clients that share a model object work one after another in any case, so
            give each worker's clients a model of their own.
        register: where the ledgers of clients that are made when asked lie; a round of theirs is one durable write.

    Each client's arithmetic is its own, so the number of workers changes no bit of any frame.
    """

    def __init__(
        self,
        clients: Sequence[Client] | _MadeWhenAsked,
        *,
        workers: int = 1,
        register: Register | None = None,
    ) -> None:
        check_int("workers", workers, 1, 1024)
        self._lazy = isinstance(clients, _MadeWhenAsked)
        if isinstance(clients, _MadeWhenAsked):
            self.clients: dict[int, Client] = clients
            self.samples = clients.sizes
        else:
            self.clients = {client.client: client for client in sorted(clients, key=lambda client: client.client)}
            self.samples = {number: client.public_size for number, client in self.clients.items()}
            if len(self.clients) != len(clients) or not clients:
                raise InvalidParameter("an engine needs at least one client, and each number once")
        self.lost: Mapping[int, str] = {}
        self.claimed = False
        self._register = register
        self._seconds: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="client") if workers > 1 else None
        self._held: ModelMessage | None = None
        """The model that a client was sent last: others that hold the same bits hold this very object."""

    def exchange(self, messages: Mapping[int, bytes], *, round: int, enough: int | None = None) -> Iterator[Reply]:
        """The clients that are asked answer in turn, in the order of their numbers.

        Where fewer are enough, the first of `messages` are asked, and of the others as many as do not answer.
        """
        check_known(messages, self.samples)
        self._seconds = Counter()
        left, frames = list(messages), 0
        wanted = len(left) if enough is None else enough
        while left and frames < wanted:
            asked, left = left[: wanted - frames], left[wanted - frames :]
            for answer in self._answers([self.clients[number] for number in sorted(asked)], messages, round):
                frames += answer.frame is not None
                yield answer
        for number in sorted(left):
            yield Reply(client=number, reason=f"not asked: {wanted} others had sent a frame")

    def _answers(self, clients: Sequence[Client], messages: Mapping[int, bytes], round: int) -> Iterator[Reply]:
        if self._register is not None:
            with self._register.together():
                for client in clients:
                    client.reserve(round)
        at_once = 1 if self._pool is None else _AT_ONCE
        for start in range(0, len(clients), at_once):
            some = clients[start : start + at_once]
            groups: dict[int, list[Client]] = {}
            for client in some:
                groups.setdefault(id(client.model), []).append(client)
            replies: dict[int, Reply] = {}

            def work(group: list[Client], replies: dict[int, Reply] = replies) -> None:
                for client in group:
                    replies[client.client] = client.answer(messages[client.client])
                    self._let_go(client)

            run = map if self._pool is None else self._pool.map
            list(run(work, groups.values()))  # clients that share a model object go one after another
            for client in some:
                self._seconds.update(client.seconds)
                yield replies[client.client]

    def _let_go(self, client: Client) -> None:
        """Of many clients, one that has replied keeps nothing in memory but its ledger and a shared model."""
        if not self._lazy:
            return
        client.rest()
        held, last = client.held, self._held
        if held and last and held.round == last.round and np.array_equal(held.model, last.model):
            client.held = held = last  # of thousands of clients that hold the model of one round, one keeps its bits
        self._held = held or last

    def seconds(self) -> Mapping[str, float]:
        """Summed over the clocks of the clients that were asked last."""
        return {stage: float(self._seconds[stage]) for stage in _STAGES}

    def guarantees(self, *, delta: float) -> dict[int, Guarantee | None]:
        """Client -> what its ledger says it has spent, None when it has sent nothing private."""
        return {number: self._guarantee(number, delta) for number in self.samples}

    def _guarantee(self, number: int, delta: float) -> Guarantee | None:
        client = self.clients.get(number)
        if client is not None:
            return client.spending.guarantee(delta=delta)
        if self._register is None:
            return None
        return ledger_guarantee(self._register.ledger(number), delta=delta)

    def close(self) -> None:
        """Close the clients' ledgers, which gives back what was reserved and not sent."""
        if self._pool is not None:
            self._pool.shutdown()
        if self._register is not None:
            self._register.close()
        if not self._lazy:
            for client in self.clients.values():
                if client.spending.ledger is not None:
                    client.spending.ledger.close()
