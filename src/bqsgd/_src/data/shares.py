"""Divide a data set into shares for clients, evenly (IID) or with label skew (Dirichlet), as features."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from bqsgd._src.data.dataset import Dataset, Split, load
from bqsgd._src.data.features import compute_features, features_shape, kept_features, whole_features
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_int, check_positive

_Rows = npt.NDArray[np.int64]
_ATTEMPTS = 1000


def iid(samples: int, clients: int, *, rng: np.random.Generator) -> list[_Rows]:
    """Random shares whose sizes differ by at most one. Every sample goes to exactly one client."""
    check_int("clients", clients, 1, samples)
    # Sorted, so that the rows of a memory-mapped file are read from front to back.
    return [np.sort(rows) for rows in np.array_split(rng.permutation(samples), clients)]


def dirichlet(
    labels: npt.NDArray[np.int64], clients: int, *, concentration: float, rng: np.random.Generator, smallest: int = 1
) -> list[_Rows]:
    """Label skew: each class is split among the clients by one draw of Dirichlet(concentration).

    A small concentration gives each client few classes, a large one approaches IID. Every sample goes to exactly one
    client. Draws that leave a client with fewer than `smallest` samples are drawn again, at most 1000 times.
    """
    check_int("clients", clients, 1, len(labels))
    check_positive("concentration", concentration)
    check_int("smallest", smallest, 0, len(labels) // clients)
    for _ in range(_ATTEMPTS):
        shares: list[list[_Rows]] = [[] for _ in range(clients)]
        for label in np.unique(labels):
            rows = rng.permutation(np.flatnonzero(labels == label))
            # Rounded once, after adding up: sizes that were rounded one by one would not add up to all rows.
            cuts = np.rint(np.cumsum(rng.dirichlet(np.full(clients, concentration)))[:-1] * len(rows)).astype(int)
            for share, part in zip(shares, np.split(rows, cuts), strict=True):
                share.append(part)
        joined = [np.sort(np.concatenate(share)) for share in shares]
        if min(len(rows) for rows in joined) >= smallest:
            return joined
    raise InvalidParameter(
        f"none of {_ATTEMPTS} Dirichlet({concentration}) draws gave each of the {clients} clients {smallest} samples; "
        "raise concentration, or lower clients or smallest"
    )


def rows_by_client(
    labels: npt.NDArray[np.int64], clients: int, *, seed: int, concentration: float | None = None, smallest: int = 1
) -> list[_Rows]:
    """The rows of each client: IID, or by Dirichlet when a concentration is given.

    `seed` decides only which client holds which sample. It plays no part in noise or batches, so a fixed seed does not
    affect the privacy claim.
    """
    rng = np.random.default_rng(check_int("seed", seed, 0, 2**63 - 1))
    if concentration is None:
        return iid(len(labels), clients, rng=rng)
    return dirichlet(labels, clients, concentration=concentration, rng=rng, smallest=smallest)


def owned_or_drawn(dataset: Dataset, clients: int, *, seed: int, concentration: float | None = None) -> list[_Rows]:
    """The rows of each client: those that it owns, if the data say so; otherwise drawn from the seed.

    Raises:
        InvalidParameter: the data have another number of clients, or a skew is given for clients of their own.
    """
    if dataset.owners is None:
        return rows_by_client(dataset.train.labels, clients, seed=seed, concentration=concentration)
    own = int(dataset.owners.max()) + 1
    if clients != own:
        raise InvalidParameter(f"{dataset.name} has {own} clients of its own, got clients={clients}: set clients={own}")
    if concentration is not None:
        raise InvalidParameter(f"{dataset.name} says which client holds which sample: leave concentration out")
    return [np.flatnonzero(dataset.owners == client) for client in range(own)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Shares:
    """Shares in the order of clients, and the test split if it was loaded."""

    shares: tuple[Split, ...]
    test: Split | None
    classes: int
    input_shape: tuple[int, ...]


# One result: the features of a data set may take gigabytes.
@lru_cache(maxsize=1)
def load_shares(
    name: str,
    *,
    folder: str | None = None,
    features: str = "none",
    clients: int,
    client: int | None = None,
    seed: int,
    concentration: float | None = None,
    threads: int = 1,
) -> Shares:
    """The data set `name`, divided among `clients`, as `features`.

    The last result is cached, so that successive runs in a process read the features once: do not write into the
    arrays. A process for one client reads its rows from the cache file of the whole data set. If there is no such file,
    it computes the features of that client only.

    client: whose share to load, None for all. The test split comes with all shares, and with the share of client 0,
    which runs beside the server.
    """
    if client is not None:
        check_int("client", client, 0, clients - 1)
    dataset = load(name, folder=folder)
    rows = owned_or_drawn(dataset, clients, seed=seed, concentration=concentration)
    if client is None:
        train = whole_features(features, "train", of=dataset, threads=threads)
        shares = [train.take(share) for share in rows]
    # The features of all clients are read if the cache has them, and not computed if it has not: this process needs
    # those of one client.
    elif (kept := kept_features(features, "train", of=dataset)) is not None:
        shares = [kept.take(rows[client])]
    else:
        shares = [compute_features(features, dataset.train.take(rows[client]), of=dataset, threads=threads)]
    return Shares(
        shares=tuple(shares),
        test=whole_features(features, "test", of=dataset, threads=threads) if client in (None, 0) else None,
        classes=dataset.classes,
        input_shape=features_shape(features, dataset.input_shape),
    )
