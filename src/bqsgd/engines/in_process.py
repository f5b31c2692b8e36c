"""All clients in this process, one after another or a few at a time: for simulations, tests and one-machine runs.

Of more than FEW clients each is a row in a register and its share of the data until it is asked for the first time, and
lets go of its data and its last frame once it has answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bqsgd.engines.engine import FEW, Answer, Setup, check_known, make_client, run_register
from bqsgd.errors import InvalidParameter
from bqsgd.ledger import Register
from bqsgd.ledger.spending import guarantee_of, sorted_releases
from bqsgd.params import check_int
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.release import Unit
from bqsgd.training.client import Client, Declined
from bqsgd.training.client_plan import public_size
from bqsgd.training.least_squares import objective_of
from bqsgd.training.samples import Fetched
from bqsgd.wire.model_message import ModelMessage

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
    objectives = [objective_of(config, model, task.loss, task.forward) for model in models]
    sizes = {number: task.samples_of(number) for number in range(count)}
    register = run_register(setup)

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


class _MadeWhenAsked(Mapping[int, Client]):
    """Clients by number, each made when it is looked up for the first time."""

    def __init__(self, make: Callable[[int], Client], sizes: Mapping[int, int]) -> None:
        self._make, self.sizes = make, sizes
        self.made: dict[int, Client] = {}

    def __getitem__(self, number: int) -> Client:
        if number not in self.made:
            if number not in self.sizes:
                raise KeyError(number)
            self.made[number] = self._make(number)
        return self.made[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __contains__(self, number: object) -> bool:
        return number in self.sizes


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
        clients: Sequence[Client] | Mapping[int, Client],
        *,
        workers: int = 1,
        register: Register | None = None,
    ) -> None:
        check_int("workers", workers, 1, 1024)
        self.clients: Mapping[int, Client] = (
            clients
            if isinstance(clients, Mapping)
            else {client.client: client for client in sorted(clients, key=lambda client: client.client)}
        )
        if len(self.clients) != len(clients) or not clients:
            raise InvalidParameter("an engine needs at least one client, and each number once")
        self.lost: Mapping[int, str] = {}
        self.claimed = False
        self._lazy = clients if isinstance(clients, _MadeWhenAsked) else None
        self._register = register
        self._seconds: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="client") if workers > 1 else None
        self._held: ModelMessage | None = None
        """The model that a client was sent last: others that hold the same bits hold this very object."""

    @property
    def samples(self) -> Mapping[int, int]:
        """Client -> how many samples it holds, or counts as."""
        if self._lazy is not None:
            return self._lazy.sizes
        return {number: client.setting.dataset_size for number, client in self.clients.items()}

    def exchange(self, messages: Mapping[int, bytes], *, round: int, enough: int | None = None) -> Iterator[Answer]:
        """The clients that are asked answer in turn, in the order of their numbers.

        Where fewer are enough, the first of `messages` are asked, and of the others as many as do not answer.
        """
        check_known(messages, self.clients)
        self._seconds = Counter()
        left, frames = list(messages), 0
        wanted = len(left) if enough is None else enough
        while left and frames < wanted:
            asked, left = left[: wanted - frames], left[wanted - frames :]
            for answer in self._answers([self.clients[number] for number in sorted(asked)], messages, round):
                frames += answer.frame is not None
                yield answer
        for number in sorted(left):
            yield Answer(client=number, reason=f"not asked: {wanted} others had sent a frame")

    def _answers(self, clients: Sequence[Client], messages: Mapping[int, bytes], round: int) -> Iterator[Answer]:
        if self._register is not None:
            with self._register.together():
                for client in clients:
                    client.reserve(round)
        if self._pool is None:
            for client in clients:
                yield self._answer(client, messages[client.client])
                self._seconds.update(client.seconds)
            return
        for start in range(0, len(clients), _AT_ONCE):
            some = clients[start : start + _AT_ONCE]
            groups: dict[int, list[Client]] = {}
            for client in some:
                groups.setdefault(id(client.model), []).append(client)
            answers: dict[int, Answer] = {}
            for found in self._pool.map(
                lambda group: [self._answer(client, messages[client.client]) for client in group], groups.values()
            ):
                answers.update((answer.client, answer) for answer in found)
            for client in some:
                self._seconds.update(client.seconds)
                yield answers[client.client]

    def _answer(self, client: Client, message: bytes) -> Answer:
        answer = client.answer(message)
        if self._lazy is not None:
            client.rest()
            self._share_held(client)
        if isinstance(answer, Declined):
            return Answer(client=client.client, reason=answer.reason, declined=True)
        return Answer(client=client.client, frame=answer)

    def _share_held(self, client: Client) -> None:
        """Of thousands of clients that hold the model of one round, one keeps its bits."""
        held, last = client.held, self._held
        if held is None or held is last:
            return
        if last is not None and held.round == last.round and np.array_equal(held.model, last.model):
            client.held = last
        else:
            self._held = held

    def seconds(self) -> Mapping[str, float]:
        """Summed over the clocks of the clients that were asked last."""
        return {stage: float(self._seconds[stage]) for stage in _STAGES}

    def guarantees(self, *, delta: float) -> dict[int, Guarantee | None]:
        """Client -> what its ledger says it has spent, None when it has sent nothing private."""
        if self._lazy is None:
            return {number: client.spending.guarantee(delta=delta) for number, client in self.clients.items()}
        return {number: self._guarantee(number, delta) for number in self._lazy}

    def _guarantee(self, number: int, delta: float) -> Guarantee | None:
        assert self._lazy is not None
        client = self._lazy.made.get(number)
        if client is not None:
            return client.spending.guarantee(delta=delta)
        if self._register is None:
            return None
        ledger = self._register.ledger(number)
        return guarantee_of(tuple(sorted_releases(ledger.released)), delta, ledger.seeded_rounds > 0)

    def close(self) -> None:
        """Close the clients' ledgers, which gives back what was reserved and not sent."""
        if self._pool is not None:
            self._pool.shutdown()
        if self._register is not None:
            self._register.close()
        if self._lazy is None:
            for client in self.clients.values():
                if client.spending.ledger is not None:
                    client.spending.ledger.close()
