"""Who masks with whom: the thresholds of a sum, and the sparse graph of neighbours with its failure probability.

n clients; at most f of them are missing from the sum, at most t collude with the server. Every client draws its own k
neighbours at random; they hold the shares of its secrets, and every pair of neighbours shares a mask. k = n - 1 is the
full graph of Bonawitz et al. (2017), in which nothing is left to chance. A smaller k is the idea of Bell et al. (2020).

quorum: signatures that a list of survivors needs. Two lists that both have floor((n + t) / 2) + 1 of them have more
than t signers in common, so an honest client signed both, which none does: there is one list.

share threshold: of its own k neighbours, a client wants at least so many among the survivors, and so many shares open
a secret. The server gains if some set A of honest clients has no survivor outside A and the colluders as a neighbour:
it would then learn the sum over A alone. Each client of A must have drawn that many of its k neighbours from the
|A| - 1 + t others, whoever the server leaves out, and the draws are independent. Hence at most

    sum over a = 1 .. (n - t) / 2 of  C(n - t, a)  P[Hypergeometric(n - 1, a - 1 + t, k) >= share threshold]^a,

which is `failure`. The term a = 1 is that of colluders who hold enough shares of one client's secrets.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from bqsgd.errors import Infeasible, InvalidParameter
from bqsgd.noise import NoiseSource
from bqsgd.params import check_int
from bqsgd.secure.roster import MAX_CLIENTS

FAILURE_BITS = 40
"""A sparse graph fails to protect somebody with probability at most 2^-40."""
LOSS_BITS = 20
"""With f clients missing at random, somebody lacks neighbours (and the round is lost) with probability 2^-20."""


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The numbers that every client of a sum insists on; use `thresholds`."""

    clients: int
    dropouts: int
    colluders: int
    degree: int
    share_threshold: int

    @property
    def quorum(self) -> int:
        """Signatures on one list of survivors: more than half of all clients and colluders together."""
        return (self.clients + self.colluders) // 2 + 1

    @property
    def fewest(self) -> int:
        """Fewest clients in a sum."""
        return self.clients - self.dropouts

    @property
    def honest(self) -> int:
        """Clients that surely are in the sum and tell nobody their noise: n - f - t."""
        return self.clients - self.dropouts - self.colluders

    @property
    def full(self) -> bool:
        """Whether everybody is everybody's neighbour."""
        return self.degree == self.clients - 1

    @property
    def failure(self) -> float:
        """Upper bound on the probability that a graph leaves somebody unprotected; 0 for the full graph."""
        if self.full:
            return 0.0
        return math.exp2(_failure_log2(self.clients, self.colluders, self.degree, self.share_threshold))


@lru_cache(maxsize=64)
def thresholds(*, clients: int, dropouts: int, colluders: int) -> Thresholds:
    """The thresholds for n, f and t: the sparse graph where it has less than half of the edges, else the full one.

    Raises:
        Infeasible: no list of n - f survivors could have a quorum, or only one client would be honest for sure.

    >>> found = thresholds(clients=10, dropouts=2, colluders=2)
    >>> found.degree, found.share_threshold, found.quorum, found.fewest
    (9, 6, 7, 8)
    """
    n, f, t = clients, dropouts, colluders
    check_int("clients", n, 2, MAX_CLIENTS)
    check_int("dropouts", f, 0, n - 1)
    check_int("colluders", t, 0, n - 1)
    quorum = (n + t) // 2 + 1
    if n - f < quorum:
        most = n - quorum
        raise Infeasible(
            f"{n} clients of which {t} may collude need {quorum} survivors, so that no two lists of survivors are "
            f"signed; {f} dropouts leave {n - f}. With {t} colluders at most {most} dropouts are possible"
            + (f", with {f} dropouts at most {n - 2 * f - 1} colluders" if n - 2 * f - 1 > 0 else "")
        )
    if n - f - t < 2:
        raise Infeasible(
            f"{n} clients with {f} dropouts and {t} colluders leave {n - f - t} that is surely there and honest: its "
            f"vector would be all there is to hide in; at most {n - f - 2} colluders are possible"
        )
    return _sparse(n, f, t) or Thresholds(
        clients=n, dropouts=f, colluders=t, degree=n - 1, share_threshold=(n + t) // 2
    )


def _sparse(n: int, f: int, t: int) -> Thresholds | None:
    for degree in range(8, (n - 1) // 2):
        for threshold in range(degree // 2 + 1, degree + 1):
            if _loss_log2(n, f, degree, threshold) > -LOSS_BITS:
                break  # more shares to open a secret are harder still to come by
            if _colluders_log2(n, t, degree, threshold) > -FAILURE_BITS:
                continue  # the first term alone is too large
            if _failure_log2(n, t, degree, threshold) <= -FAILURE_BITS:
                return Thresholds(clients=n, dropouts=f, colluders=t, degree=degree, share_threshold=threshold)
    return None


def _colluders_log2(n: int, t: int, degree: int, threshold: int) -> float:
    from scipy.stats import hypergeom

    return (math.log(n - t) + float(hypergeom.logsf(threshold - 1, n - 1, t, degree))) / math.log(2)


def _failure_log2(n: int, t: int, degree: int, threshold: int) -> float:
    import numpy as np  # here with scipy: a client that is told its thresholds needs neither
    from scipy.special import gammaln
    from scipy.stats import hypergeom

    honest = n - t
    sizes = np.arange(1, honest // 2 + 1)
    inside = hypergeom.logsf(threshold - 1, n - 1, np.minimum(sizes - 1 + t, n - 1), degree)
    sets = gammaln(honest + 1) - gammaln(sizes + 1) - gammaln(honest - sizes + 1)
    return float(np.logaddexp.reduce(sets + sizes * inside)) / math.log(2)


def _loss_log2(n: int, f: int, degree: int, threshold: int) -> float:
    from scipy.stats import hypergeom

    return (math.log(n) + float(hypergeom.logsf(degree - threshold, n - 1, f, degree))) / math.log(2)


def draw_neighbours(place: int, rule: Thresholds, rng: NoiseSource) -> tuple[int, ...]:
    """Places of k others of n, ascending, every subset equally likely; no draw is made for the full graph."""
    others = [other for other in range(rule.clients) if other != place]
    if rule.full:
        return tuple(others)
    chosen: set[int] = set()
    while len(chosen) < rule.degree:
        word = int(rng.words(1)[0])
        if word < 2**64 - 2**64 % len(others):
            chosen.add(others[word % len(others)])
    return tuple(sorted(chosen))


def check_neighbours(place: int, neighbours: tuple[int, ...], rule: Thresholds) -> None:
    """Raise InvalidParameter unless these can be the neighbours that a client drew."""
    ascending = all(a < b for a, b in itertools.pairwise(neighbours))
    if len(neighbours) != rule.degree or not ascending or place in neighbours:
        raise InvalidParameter(f"a client draws {rule.degree} other clients, each once")
    if neighbours and not (neighbours[0] >= 0 and neighbours[-1] < rule.clients):
        raise InvalidParameter(f"neighbours lie in 0 to {rule.clients - 1}")
