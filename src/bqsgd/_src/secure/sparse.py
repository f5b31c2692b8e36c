"""The sparse graph for many clients: how many neighbours, and a computed bound on the probability that they fail.

The seed in the roster gives random cyclic orders of all clients, and in each order a client has two neighbours. The
first `masks` / 2 orders give the clients with which it shares masks, the first `holders` / 2 those that hold shares of
its secrets. A committee, drawn in the same way, signs the list of survivors.

The proof is the lemma of Claim 12 in docs/accounting.md. It needs bounds on three probabilities, for every set of t
colluders that was fixed before the seed was drawn:

1. `_cut`: a list that the committee signs splits the honest survivors into two parts that share no mask.
2. `_committee`: so many members of the committee collude that two lists could both have a quorum.
3. `_opened`: colluders hold enough shares to open a secret.

Every bound errs upwards. The colluders must not depend on the seed: see docs/secure.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from bqsgd._src.errors import Infeasible

FAILURE_BITS = 40
"""A round of a sparse sum is safe except with probability 2^-40."""
MAX_SPARSE = 10_000
"""The most clients of a sum."""
_PART = 2.0 ** -(FAILURE_BITS + 2)
"""What each of the three probabilities may contribute; they add up to less than 2^-40."""
_LOST_CLIENT = 3e-3
"""Fraction of clients that a round may lose because too many of their neighbours are missing."""
_LOST_SECRET = 1e-6
"""Probability that too few holders of a secret are left to open it, so that the round is lost."""
_TILTS = (0.003, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
"""Values of `tilt` in the bound of `_cut`; each size takes the best."""
_EXACT_UP_TO = 48
"""Up to this size of a part, `_crossings` distinguishes runs of gaps."""
_LOST_QUORUM = 1e-9
"""Probability that so many members of the committee are missing that too few are left to sign."""
_Logs = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """The numbers of a sparse graph.

    masks: neighbours with which a client shares a mask, counted in slots (two in each order). away: how many of these
    slots may be missing from a list, for every survivor. holders: slots of neighbours that hold shares; `threshold` of
    them open a secret. committee: clients that sign a list. quorum: signatures that a list needs. failure: bound on the
    probability that a round is unsafe.
    """

    masks: int
    away: int
    holders: int
    threshold: int
    committee: int
    quorum: int
    failure: float


@lru_cache(maxsize=64)
def sparse_numbers(clients: int, dropouts: int, colluders: int) -> Sparse:
    """The cheapest numbers for which a round is unsafe with probability at most 2^-40.

    Raises:
        Infeasible: no numbers reach that, or there are too many clients.
    """
    # Imported here because it is slow to import, and sums over few clients do not need it.
    from scipy.stats import binom

    n, f, t = clients, dropouts, max(colluders, 1)
    if n > MAX_SPARSE:
        raise Infeasible(f"a secure sum has at most {MAX_SPARSE} clients, got {n}; use cohorts")
    committee, quorum = _committee(n, f, t)
    masks, away, cut = _masks(n, f, t)
    for holders in range(masks, 129, 2):
        # Safety asks for a high threshold, dropouts for a low one: take the lowest that is safe.
        threshold = next((k for k in range(1, holders + 1) if _opened(n, t, holders, k) <= _PART), None)
        different = _different(n, holders)
        if threshold is None or binom.sf(different - threshold, different, f / n) > _LOST_SECRET:
            continue
        return Sparse(
            masks=masks,
            away=away,
            holders=holders,
            threshold=threshold,
            committee=committee,
            quorum=quorum,
            failure=cut + _PART + _opened(n, t, holders, threshold),
        )
    raise _too_many(n, f, t)


def _too_many(n: int, f: int, t: int) -> Infeasible:
    return Infeasible(
        f"no sparse graph of {n} clients withstands {f} dropouts and {t} colluders with a failure probability of "
        f"2^-{FAILURE_BITS}; plan for fewer of both, or use cohorts"
    )


def _committee(n: int, f: int, t: int) -> tuple[int, int]:
    """Size and quorum of the smallest committee of which two lists cannot both have a quorum.

    Except with probability `_PART`, at most c members of the committee collude. Two lists with more than (size + c) / 2
    signatures each would have more than c signers in common, so an honest member would have signed both.
    """
    from scipy.stats import hypergeom

    for size in range(3, n + 1):
        colluding = min(t, int(hypergeom.isf(_PART, n, t, size)) + 1)
        missing = min(f, int(hypergeom.isf(_LOST_QUORUM, n, f, size)) + 1)
        assert hypergeom.sf(colluding, n, t, size) <= _PART
        quorum = (size + colluding) // 2 + 1
        if size - missing >= quorum:
            return size, quorum
    raise _too_many(n, f, t)


def _opened(n: int, t: int, holders: int, threshold: int) -> float:
    """Bound on the probability that `threshold` holders of some client collude.

    The slots of one order are drawn without replacement, and orders are independent. So the number of bad holders is at
    most a binomial one in the convex order, and Chernoff's bound for the binomial applies.
    """
    bad = t / (n - 1)
    needed = threshold / holders
    if needed <= bad:
        return 1.0
    rate = needed * math.log(needed / bad)
    rate += (1 - needed) * math.log((1 - needed) / (1 - bad)) if needed < 1 else 0.0
    return min(1.0, n * math.exp(-holders * rate))


def _different(n: int, slots: int) -> int:
    """How many different clients fill the slots of a client, nearly always: repetitions are roughly Poisson."""
    twice = slots * (slots - 1) / (2 * (n - 1))
    return max(0, slots - math.ceil(twice + 3 * math.sqrt(twice)))


def _masks(n: int, f: int, t: int) -> tuple[int, int, float]:
    """The fewest slots that suffice, how many of them may be missing, and the probability of a cut."""
    from scipy.stats import binom

    table = _crossings(n, t)
    for masks in range(8, 129, 2):
        away = int(binom.isf(_LOST_CLIENT, masks, f / n))
        probability = _cut(table, n, t, masks=masks, away=away)
        if probability <= _PART:
            return masks, away, probability
    raise _too_many(n, f, t)


def _cut(table: _Logs, n: int, t: int, *, masks: int, away: int) -> float:
    """Bound on the probability that the graph can be cut.

    Suppose that the honest survivors fall into two parts without a common mask, and let S be the smaller part, of s
    clients. Slots from S to honest clients outside S then lead to missing clients, so there are at most `away` for each
    client, and away * s in all. By Markov's inequality that has probability at most tilt^(-away s) E[tilt^X]^(masks/2),
    where X is the number of such slots in one order. The result is the sum over all sets S of up to half of the honest
    clients.
    """
    honest = n - t
    s = np.arange(1, honest // 2 + 1)
    sets = gammaln(honest + 1) - gammaln(s + 1) - gammaln(honest - s + 1)
    bounds = [
        sets - away * s * math.log(tilt) + masks / 2 * table[row] for row, tilt in enumerate(_TILTS)
    ]  # fmt: skip
    best: _Logs = np.min(bounds, axis=0)
    return float(min(1.0, np.exp(np.minimum(best, 0.0)).sum() * (1 + 1e-6)))


def _crossings(n: int, t: int) -> _Logs:
    """log of a bound on E[tilt^X], for every tilt and every size s of S from 1 to half of the honest clients.

    In a random cyclic order of n clients, the s members of S fill j of the N = n - s gaps between the others with
    probability C(N, j) C(s - 1, j - 1) / C(n - 1, s). The filled gaps form r runs with probability
    N / (N - j) C(N - j, r) C(j - 1, r - 1) / C(N, j). A run touches one client more than it has gaps: the outer two
    once, the inner ones twice. Which of the N clients collude is drawn without replacement, so the expectation of the
    product is at most the product of expectations. Beyond _EXACT_UP_TO runs are not distinguished: by Cauchy-Schwarz
    E[tilt^X] <= E[tilt^(2 X')], where X' counts successors only, which are j different clients of the N.
    """
    factorials: _Logs = gammaln(np.arange(n + 2) + 1.0)

    def choose(top: npt.NDArray[np.int64] | int, of: npt.NDArray[np.int64] | int) -> _Logs:
        top, of = np.asarray(top), np.asarray(of)
        fits = (of >= 0) & (of <= top)
        low, high = np.clip(of, 0, n), np.clip(top - of, 0, n)
        logs: _Logs = np.where(fits, factorials[np.clip(top, 0, n)] - factorials[low] - factorials[high], -np.inf)
        return logs

    sizes = range(1, (n - t) // 2 + 1)
    table = np.empty((len(_TILTS), len(sizes)))
    for s in sizes:
        others = n - s
        filled = np.arange(1, s + 1)
        gaps = choose(others, filled) + choose(s - 1, filled - 1) - choose(n - 1, s)
        j, r = filled[:, None], filled[None, :]
        if s <= _EXACT_UP_TO:
            with np.errstate(divide="ignore", invalid="ignore"):
                runs = np.log(others / (others - j)) + choose(others - j, r) + choose(j - 1, r - 1) - choose(others, j)
            runs = np.where((r <= j) & (j < others), runs, -np.inf)
        for row, tilt in enumerate(_TILTS):
            outer = math.log((t + tilt * (others - t)) / others)
            inner = math.log((t + tilt * tilt * (others - t)) / others)
            terms = (
                gaps[:, None] + runs + 2 * r * outer + (j - r) * inner if s <= _EXACT_UP_TO else gaps + filled * inner
            )
            most = terms.max()
            table[row, s - 1] = min(0.0, most + math.log(np.exp(terms - most).sum()))
    return table
