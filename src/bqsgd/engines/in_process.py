"""All clients in this process, one after another or a few at a time: for simulations, tests and one-machine runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from bqsgd.engines.engine import Answer, Setup, check_known, make_client
from bqsgd.errors import InvalidParameter
from bqsgd.params import check_int
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.training.client import Client, Declined

_STAGES = ("gradients", "encode", "frame", "ledger")


def in_process(setup: Setup) -> InProcess:
    """The engine of a run whose clients are all in this process: one per share of the task's data."""
    config, task = setup.config, setup.task
    if len(task.shares) != config.clients.count:
        raise InvalidParameter(
            f"clients={config.clients.count}, but the task has {len(task.shares)} shares of data: one share per client"
        )
    if setup.sums is not None and not setup.sums.simulated:
        raise InvalidParameter(
            "roster and identity are for clients in processes of their own; in one process the keys are made as they "
            "are needed: leave both out"
        )
    models = [task.make_model() for _ in range(min(config.clients.workers, config.clients.count))]
    clients = [
        make_client(setup, number=number, model=models[number % len(models)], share=share)
        for number, share in enumerate(task.shares)
    ]
    return InProcess(clients, workers=config.clients.workers)


class InProcess:
    """An engine over clients in memory.

    Args:
        clients: in any order; each number once.
        workers: how many clients work at once. Clients that share a model object work one after another in any case, so
            give each worker's clients a model of their own.

    Each client's arithmetic is its own, so the number of workers changes no bit of any frame.
    """

    def __init__(self, clients: Sequence[Client], *, workers: int = 1) -> None:
        check_int("workers", workers, 1, 1024)
        self.clients = {client.client: client for client in sorted(clients, key=lambda client: client.client)}
        if len(self.clients) != len(clients) or not clients:
            raise InvalidParameter("an engine needs at least one client, and each number once")
        self.lost: Mapping[int, str] = {}
        self.claimed = False
        self._asked: list[Client] = []
        groups: dict[int, list[Client]] = {}
        for client in self.clients.values():
            groups.setdefault(id(client.model), []).append(client)
        self._groups = list(groups.values())
        parallel = min(workers, len(self._groups))
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="client") if parallel > 1 else None

    @property
    def samples(self) -> Mapping[int, int]:
        """Client -> how many samples it holds."""
        return {number: client.setting.dataset_size for number, client in self.clients.items()}

    def exchange(self, messages: Mapping[int, bytes], *, round: int) -> Iterator[Answer]:
        """The clients that are asked answer in turn, in the order of their numbers."""
        self._asked = asked = [self.clients[number] for number in check_known(messages, self.clients)]
        if self._pool is None:
            for client in asked:
                yield _ask(client, messages[client.client])
            return
        answers: dict[int, Answer] = {}
        groups = [[client for client in group if client.client in messages] for group in self._groups]
        for found in self._pool.map(lambda group: [_ask(client, messages[client.client]) for client in group], groups):
            answers.update((answer.client, answer) for answer in found)
        for client in asked:
            yield answers[client.client]

    def seconds(self) -> Mapping[str, float]:
        """Summed over the clocks of the clients that were asked last."""
        total: Counter[str] = Counter()
        for client in self._asked:
            total.update(client.seconds)
        return {stage: float(total[stage]) for stage in _STAGES}

    def guarantees(self, *, delta: float) -> dict[int, Guarantee | None]:
        """Client -> what its ledger says it has spent, None when it has sent nothing private."""
        return {number: client.spending.guarantee(delta=delta) for number, client in self.clients.items()}

    def close(self) -> None:
        """Close the clients' ledgers, which gives back what was reserved and not sent."""
        if self._pool is not None:
            self._pool.shutdown()
        for client in self.clients.values():
            if client.spending.ledger is not None:
                client.spending.ledger.close()


def _ask(client: Client, message: bytes) -> Answer:
    answer = client.answer(message)
    if isinstance(answer, Declined):
        return Answer(client=client.client, reason=answer.reason, declined=True)
    return Answer(client=client.client, frame=answer)
