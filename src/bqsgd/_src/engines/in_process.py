"""All clients in this process, one after another or a few at a time: for simulations, tests and one-machine runs.

With more than FEW clients, a client object is created only when it is first asked; until then it is a row in the
register. After its reply it drops its data and its last frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bqsgd._src.client.client import Client
from bqsgd._src.client.files import run_register
from bqsgd._src.client.objectives import objective_of
from bqsgd._src.client.samples import Fetched
from bqsgd._src.engines.engine import FEW, Engine, Setup, check_known, make_client
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import Register
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.release import Unit
from bqsgd._src.settings.client_plan import public_size
from bqsgd._src.wire.model_message import ModelMessage
from bqsgd._src.wire.reply import Reply

_STAGES = ("gradients", "encode", "frame", "ledger")
_AT_ONCE = 64
"""With several workers: the clients whose replies may wait in memory until those before them are ready."""


def in_process(setup: Setup) -> InProcess:
    """The engine of a run whose clients are all in this process: one per share of the task's data."""
    config, task = setup.config, setup.task
    count = config.clients.count
    if len(task.shares) != count:
        raise InvalidParameter(f"clients={count}, but the task has data for {len(task.shares)}: leave it out")
    if setup.sums is not None and not setup.sums.simulated:
        raise InvalidParameter(
            "roster and identity are for clients in processes of their own; in one process the keys are made when they "
            "are needed: leave both out"
        )
    if config.privacy.unit == Unit.CLIENT and config.server.weights == "size" and setup.sizes is None:
        raise InvalidParameter(
            "with unit = 'client' the guarantee hides how many samples a client holds, so no weight may depend on it: "
            "leave the weights equal, or give a list of sizes that may be known"
        )
    workers = min(config.clients.workers, count)
    models = [task.make_model() for _ in range(workers)]
    # Clients that share a model share its objective too, so that the model is traced and checked once.
    objectives = [objective_of(config, model, task.loss_fn, task.forward) for model in models]
    many = count > FEW
    register = run_register(config, setup.folder, resuming=setup.resuming) if many else None
    sizes = {number: task.samples_of(number) for number in range(count)} if many else {}

    def make(number: int) -> Client:
        return make_client(
            setup,
            number=number,
            model=models[number % workers],
            share=Fetched(lambda: task.shares[number], size=sizes[number], sample=task.sample)
            if many
            else task.shares[number],
            register=register,
            objective=objectives[number % workers],
        )

    if not many:
        return InProcess({number: make(number) for number in range(count)}, workers=workers)
    public = {number: public_size(config, size) for number, size in sizes.items()}
    return InProcess(_MadeWhenAsked(make), samples=public, workers=workers, register=register)


class _MadeWhenAsked(dict[int, Client]):
    """Clients by number; looking one up creates it. Iteration shows those that exist."""

    def __init__(self, make: Callable[[int], Client]) -> None:
        self._make = make

    def __missing__(self, number: int) -> Client:
        self[number] = self._make(number)
        return self[number]


class InProcess(Engine):
    """An engine over clients in memory.

    Args:
        clients: number -> client, in order.
        samples: client -> its number of samples, if `clients` creates them when they are looked up. There are many
            then, so each keeps as little as possible in memory between its replies.
        workers: how many clients work at once. Clients that share a model object work one after another in any case, so
            each worker's clients need a model of their own.
        register: the ledgers of clients that are created when they are asked. One durable write counts a whole round.

    The number of workers changes no bit of any frame, because every client computes alone.
    """

    claimed = False

    def __init__(
        self,
        clients: dict[int, Client],
        *,
        samples: Mapping[int, int] | None = None,
        workers: int = 1,
        register: Register | None = None,
    ) -> None:
        self.clients = clients
        self._frugal = samples is not None
        self.samples = samples or {number: client.public_size for number, client in clients.items()}
        self._register = register
        self._seconds: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="client") if workers > 1 else None
        self._last_held: ModelMessage | None = None
        """The model that the last client holds."""

    def exchange(self, messages: Mapping[int, bytes], *, round: int, enough: int | None = None) -> Iterator[Reply]:
        """Ask the clients and yield their replies in the order of their numbers.

        If fewer are enough, this asks the first of `messages` and then one more for each that sends nothing.
        """
        self._seconds = Counter()
        check_known(messages, self.samples)
        left, frames = list(messages), 0
        wanted = len(left) if enough is None else enough
        while left and frames < wanted:
            clients = [self.clients[number] for number in sorted(left[: wanted - frames])]
            left = left[wanted - frames :]
            if self._register is not None:
                # All spends of the round in one write, before any client reads its data: a write each is far slower.
                with self._register.together():
                    for client in clients:
                        client.reserve(round)
            from_threads = None if self._pool is None else self._replies(self._pool, clients, messages)
            for client in clients:
                if from_threads is None:  # in this thread: only the main thread can defer a Ctrl-C
                    reply = client.answer(messages[client.client])
                    self._let_go(client)
                else:
                    reply = next(from_threads)
                self._seconds.update(client.sender.seconds)
                frames += reply.frame is not None
                yield reply
        for number in sorted(left):
            yield Reply(client=number, reason=f"not asked: {wanted} others had sent a frame")

    def _replies(
        self, pool: ThreadPoolExecutor, clients: Sequence[Client], messages: Mapping[int, bytes]
    ) -> Iterator[Reply]:
        """The replies of these clients in order, made in the threads of the pool."""
        for start in range(0, len(clients), _AT_ONCE):
            batch = clients[start : start + _AT_ONCE]
            by_model: dict[int, list[Client]] = {}
            for client in batch:
                by_model.setdefault(id(client.model), []).append(client)
            replies: dict[int, Reply] = {}

            def work(group: list[Client], replies: dict[int, Reply] = replies) -> None:
                for client in group:
                    replies[client.client] = client.answer(messages[client.client])
                    self._let_go(client)

            list(pool.map(work, by_model.values()))  # one task per model: two threads must not use the same model
            for client in batch:
                yield replies[client.client]

    def _let_go(self, client: Client) -> None:
        """Free what one of many clients need not keep between replies: all but its ledger and the model it holds."""
        if not self._frugal:
            return
        client.rest()
        held, last = client.held, self._last_held
        if held and last and held.round == last.round and np.array_equal(held.model, last.model):
            client.held = held = last  # thousands of clients may hold the model of one round: keep its bits once
        self._last_held = held or last

    def seconds(self) -> Mapping[str, float]:
        """The sum over the clients that were asked last."""
        return {stage: float(self._seconds[stage]) for stage in _STAGES}

    def guarantees(self, *, delta: float) -> dict[int, Guarantee | None]:
        """Client -> what its ledger says it has spent; None if it has sent nothing private."""
        return {number: self._guarantee(number, delta) for number in self.samples}

    def _guarantee(self, number: int, delta: float) -> Guarantee | None:
        client = self.clients.get(number)  # `get` creates no client
        if client is not None:
            return client.spending.guarantee(delta=delta)
        if self._register is None:
            return None
        return self._register.ledger(number).guarantee(delta=delta)

    def close(self) -> None:
        """Close the clients' ledgers, which returns what was reserved and not sent."""
        if self._pool is not None:
            self._pool.shutdown()
        if self._register is not None:
            self._register.close()  # all its ledgers in one write; after a failed write none may be touched again
            return
        for client in self.clients.values():
            if client.spending.ledger is not None:
                client.spending.ledger.close()
