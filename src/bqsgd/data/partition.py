"""Sharing a training set among clients: evenly (IID), or with label skew (Dirichlet)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bqsgd.data.dataset import Split
from bqsgd.errors import InvalidParameter
from bqsgd.params import check_int, check_positive

Rows = npt.NDArray[np.int64]
_ATTEMPTS = 1000


def iid(samples: int, clients: int, *, rng: np.random.Generator) -> list[Rows]:
    """Random shares whose sizes differ by at most one; every sample goes to exactly one client."""
    check_int("clients", clients, 1, samples)
    return [np.sort(rows) for rows in np.array_split(rng.permutation(samples), clients)]


def dirichlet(
    labels: npt.NDArray[np.int64], clients: int, *, concentration: float, rng: np.random.Generator, smallest: int = 1
) -> list[Rows]:
    """Label skew: each class is split among the clients by one draw of Dirichlet(concentration).

    A small concentration gives each client few classes, a large one approaches IID. Every sample goes to exactly one
    client. Draws that leave a client with fewer than `smallest` samples are drawn again, at most 1000 times.
    """
    check_int("clients", clients, 1, len(labels))
    check_positive("concentration", concentration)
    check_int("smallest", smallest, 0, len(labels) // clients)
    for _ in range(_ATTEMPTS):
        shares: list[list[Rows]] = [[] for _ in range(clients)]
        for label in np.unique(labels):
            rows = rng.permutation(np.flatnonzero(labels == label))
            cuts = np.rint(np.cumsum(rng.dirichlet(np.full(clients, concentration)))[:-1] * len(rows)).astype(int)
            for share, part in zip(shares, np.split(rows, cuts), strict=True):
                share.append(part)
        joined = [np.sort(np.concatenate(share)) for share in shares]
        if min(len(rows) for rows in joined) >= smallest:
            return joined
    raise InvalidParameter(
        f"no Dirichlet({concentration}) draw in {_ATTEMPTS} left each of {clients} clients {smallest} samples; "
        "raise concentration or lower clients or smallest"
    )


def partition(
    split: Split, clients: int, *, seed: int, concentration: float | None = None, smallest: int = 1
) -> list[Split]:
    """The clients' own splits: IID, or Dirichlet when a concentration is given. `seed` fixes who holds what; it decides
    no noise and no batch, so it has no part in a privacy claim."""
    rng = np.random.default_rng(check_int("seed", seed, 0, 2**63 - 1))
    rows = (
        iid(len(split), clients, rng=rng)
        if concentration is None
        else dirichlet(split.labels, clients, concentration=concentration, rng=rng, smallest=smallest)
    )
    return [split.take(share) for share in rows]
