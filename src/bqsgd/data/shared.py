"""A data set as a run uses it: through the front end and cut into the clients' shares."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from bqsgd.data.dataset import Split
from bqsgd.data.front_end import output_shape, through
from bqsgd.data.loading import load
from bqsgd.data.partition import partition
from bqsgd.params import check_int


@dataclass(frozen=True, kw_only=True, eq=False)
class Shared:
    """Shares in the order of clients, and the test split where it was asked for."""

    shares: tuple[Split, ...]
    test: Split | None
    classes: int
    input_shape: tuple[int, ...]


@lru_cache(maxsize=1)
def shared(
    name: str,
    *,
    folder: str | None = None,
    front_end: str = "none",
    clients: int,
    client: int | None = None,
    seed: int,
    concentration: float | None = None,
    smallest: int = 1,
    threads: int = 1,
) -> Shared:
    """The data set `name`, shared among `clients`.

    The last answer is kept, so that runs after one another in a process compute the features once; nobody may write
    into these arrays. Features are computed after the cut: they are in memory once, and a process that works for one
    client does that client's only.

    client: the one whose share is wanted, None for all. The test split comes with all and with client 0, the server's.
    """
    if client is not None:
        check_int("client", client, 0, clients - 1)
    dataset = load(name, folder=folder)
    shares = partition(dataset.train, clients, seed=seed, concentration=concentration, smallest=smallest)
    wanted = shares if client is None else [shares[client]]
    splits = [
        through(front_end, split, of=dataset, threads=threads)
        for split in (*wanted, *([dataset.test] if client in (None, 0) else []))
    ]
    return Shared(
        shares=tuple(splits[: len(wanted)]),
        test=splits[-1] if len(splits) > len(wanted) else None,
        classes=dataset.classes,
        input_shape=output_shape(front_end, dataset.input_shape),
    )
