"""The accountant: a proven upper bound on what everything a client has sent reveals, worst case over data.

>>> from bqsgd.params import Mechanism
>>> from bqsgd.release import Release, Sampling, Sensitivity, Spent
>>> release = Release(
...     mechanism=Mechanism(levels=1, trials=251), dimension=61706,
...     sensitivity=Sensitivity(linf=1 / 32), sampling=Sampling(scheme="poisson", rate=32 / 15000))
>>> round(Accountant().compose(release, 1000).epsilon(1e-5), 2)
0.33
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from bqsgd.errors import AccountingError, InvalidParameter
from bqsgd.noise import TAIL_BITS
from bqsgd.params import check_int
from bqsgd.privacy import _renyi, _rounds
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.release import Relation, Release, Sampling, Scheme, Sensitivity, Spent, Trust, Unit

METHOD_LINF = "proven upper bound (loss distribution, L-infinity)"
METHOD_L2 = "proven upper bound (loss distribution, L2 and L-infinity)"
METHOD_RENYI = "proven upper bound (Renyi moments, L2 and L-infinity)"
_L2_DECIDES = 0.8
_SPREADS = (1, 4, 10, 128)
"""Data tried from below under an L2 bound: the norm on so many times the fewest coordinates."""
_NEARLY_WHOLE = 0.9
"""Above this rate sampling gains less than two grids may differ by, so the figure without sampling is looked at too."""
_SUM_TRIES = 20
CUT_LAW = 1.001 * 2.0**-TAIL_BITS
"""Total variation between a cut and rounded law and the binomial."""
_MANY_ROUNDS = 1 << 20
"""Beyond so many rounds the loss distributions' grid is coarse, and moments may be the better route."""
_FEW_TRIALS = 100
"""Up to so many trials an L2 bound's loss distributions charge much to delta, and moments may be the better route."""


@dataclass(frozen=True)
class Accountant:
    """An immutable tally of releases; `compose` returns a new one.

    Releases of different kinds (unit, relation, trust) are composed under the weakest terms among them: hiding a whole
    client hides each of its samples, and what hides a replacement hides a removal (docs/accounting.md, Claim 11).
    """

    spent: Spent = ()

    def compose(self, release: Release, rounds: int = 1) -> Accountant:
        """Add `rounds` messages of one release. The order does not matter, so the tally is kept in a fixed one.

        Coarsening is left out of the tally: it works on noised codes alone, so that it costs and gains nothing.
        """
        check_int("rounds", rounds, 0, 2**40)
        release = replace(release, mechanism=release.mechanism.fine)
        counts = dict(self.spent)
        if rounds:
            counts[release] = counts.get(release, 0) + rounds
        return Accountant(tuple(sorted(counts.items(), key=lambda item: repr(item[0]))))

    @property
    def kinds(self) -> tuple[Accountant, ...]:
        """The tally parted by kind; each part has a guarantee under its own terms."""
        parts: dict[tuple[Unit, Relation, Trust], Accountant] = {}
        for release, rounds in self.spent:
            kind = (release.unit, release.sensitivity.relation, release.trust)
            parts[kind] = parts.get(kind, Accountant()).compose(release, rounds)
        return tuple(parts[kind] for kind in sorted(parts))

    def epsilon(self, delta: float) -> float:
        """Least proven epsilon at `delta`; infinity when none is."""
        return self._best(delta)[0]

    def attained_epsilon(self, delta: float) -> float:
        """A lower bound on the truth: what data attain whose coordinates, few or many, all move by the same shift.

        0 for releases of different kinds: one record need not attain them all.
        """
        _check_delta(delta)
        if not self.spent or len(self.kinds) > 1:
            return 0.0
        if self._hopeless(delta):
            return math.inf
        figures = [0.0]
        for spread in _SPREADS if any(_rounds.l2_binds(release) for release, _ in self.spent) else (1,):
            with suppress(AccountingError):
                laws = _composed(self.spent, attained=spread)
                figures += [float(law.get_epsilon_for_delta(delta)) for law in laws]
        return max(figures)

    def delta(self, epsilon: float) -> float:
        """Least proven delta at `epsilon` (at least the delta floor, at most 1)."""
        if not (math.isfinite(epsilon) and epsilon >= 0):
            raise InvalidParameter(f"epsilon must be finite and at least 0, got {epsilon}")
        if not self.spent:
            return 0.0
        spent = _comparable(self.spent)
        hopeless = any(_rounds.beyond_meaning(release) for release, _ in spent)
        deltas = [1.0, _renyi.delta(spent, epsilon)]
        with suppress(AccountingError):  # the other bound stands
            for _, laws in _laws(spent, hopeless):
                deltas.append(max(float(law.get_delta_for_epsilon(epsilon)) for law in laws))
        return min(1.0, min(deltas) + _sum_charge(spent, epsilon))

    def guarantee(self, *, delta: float, seeded: bool = False) -> Guarantee:
        """The figure with everything that must be stated beside it, under the weakest terms of all releases."""
        if not self.spent:
            raise InvalidParameter("nothing was released: there is no guarantee to state")
        epsilon, method, floor = self._best(delta)
        releases = [release for release, _ in _comparable(self.spent)]
        return Guarantee(
            epsilon=epsilon,
            delta=delta,
            relation=_weakest(Relation.ADD_REMOVE, [release.sensitivity.relation for release in releases]),
            unit=_weakest(Unit.SAMPLE, [release.unit for release in releases]),
            trust=(trust := _weakest(Trust.SUMS_ONLY, [release.trust for release in releases])),
            colluders=min(release.colluders for release in releases) if trust is Trust.SUMS_ONLY else 0,
            sampling=_sampling_text(self.spent),
            method=method,
            delta_floor=floor,
            seeded=seeded,
            assumption="; ".join(sorted({str(r.assumption) for r, _ in self.spent if r.assumption is not None})),
        )

    def _hopeless(self, delta: float) -> bool:
        return any(_rounds.beyond_meaning(release, rounds, delta) for release, rounds in _comparable(self.spent))

    def _best(self, delta: float) -> tuple[float, str, float]:
        _check_delta(delta)
        if not self.spent:
            return 0.0, METHOD_LINF, 0.0
        return _best(_comparable(self.spent), delta, self._hopeless(delta))


T = TypeVar("T")


def _weakest(weak: T, found: list[T]) -> T:
    """`weak` where any is, else what they all are."""
    return weak if weak in found else found[0]


def _comparable(spent: Spent) -> Spent:
    """The same messages such that the weakest terms among them hold of each.

    Only a whole client that is added or removed has nothing to say about one sample: between any two of its data sets
    lies the way to the null client and back, twice as far; that the client may be absent gains nothing then.
    """
    if len({(release.unit, release.sensitivity.relation) for release, _ in spent}) < 2:
        return spent
    return tuple((_replaced(release), rounds) for release, rounds in spent)


def _replaced(release: Release) -> Release:
    moved = release.sensitivity
    if release.unit is not Unit.CLIENT or moved.relation is not Relation.ADD_REMOVE:
        return release
    l2 = None if moved.l2 is None else 2 * moved.l2
    return replace(
        release,
        sensitivity=Sensitivity(linf=2 * moved.linf, l2=l2, relation=Relation.REPLACE),
        sampling=Sampling(scheme=Scheme.NONE),
    )


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise InvalidParameter(f"delta must lie strictly between 0 and 1, got {delta}")


def _best(spent: Spent, delta: float, hopeless: bool) -> tuple[float, str, float]:
    """(epsilon, method, delta floor), the smaller of the methods' figures, with the charge for sums of cut laws.

    The charge grows with epsilon, so an epsilon is sought that pays for its own: each try is the answer to the last.
    """
    tried = 0.0
    for _ in range(_SUM_TRIES):
        charge = _sum_charge(spent, tried)
        if not charge < delta / 2:
            break
        epsilon, method, floor = _least(spent, delta - charge, hopeless)
        if epsilon <= tried or charge == 0:
            return max(epsilon, tried), method, floor + charge
        tried = epsilon * (1 + 1e-6)
    return math.inf, METHOD_LINF, min(1.0, _sum_charge(spent, 0.0))


@lru_cache(maxsize=4096)
def _least(spent: Spent, delta: float, hopeless: bool) -> tuple[float, str, float]:
    """(epsilon, method, delta floor): the smallest of the methods' figures. All are proven, so the smallest one is."""
    results = [(math.inf, METHOD_LINF, 0.0)]
    refused: AccountingError | None = None
    try:
        for method, laws in _laws(spent, hopeless):
            epsilon = max(float(law.get_epsilon_for_delta(delta)) for law in laws)
            floor = max(float(law.get_delta_for_epsilon(math.inf)) for law in laws)
            results.append((math.inf if math.isnan(epsilon) else epsilon, method, floor))
    except AccountingError as error:
        refused = error
    many = sum(rounds for _, rounds in spent) > _MANY_ROUNDS
    few = any(release.mechanism.trials <= _FEW_TRIALS and _rounds.l2_binds(release) for release, _ in spent)
    if many or few or min(results)[0] == math.inf:
        results.append((_renyi.epsilon(spent, delta), METHOD_RENYI, _renyi.delta_floor(spent, delta)))
    best = min(results, key=lambda result: result[0])
    if refused is not None and best[0] == math.inf:
        raise refused
    return best


def _laws(spent: Spent, hopeless: bool) -> Iterator[tuple[str, tuple[_rounds.Law, _rounds.Law]]]:
    """Composed laws and their method: under all bounds, and under fewer of them where that may be as good.

    A long L2 bound is left out once, and sampling at a rate near 1: neither can make less known.

    Raises:
        AccountingError: no route applies.
    """
    if hopeless:
        return
    method = METHOD_L2 if any(_rounds.l2_binds(release) for release, _ in spent) else METHOD_LINF
    tallies = [(method, spent)]
    if method == METHOD_L2 and not _l2_decides(spent):
        plain = ((replace(release, sensitivity=replace(release.sensitivity, l2=None)), n) for release, n in spent)
        tallies.append((METHOD_LINF, tuple(plain)))
    whole = Sampling(scheme=Scheme.NONE)
    if any(release.sampling.rate > _NEARLY_WHOLE and release.sampling != whole for release, _ in spent):
        tallies.append((method, tuple((replace(release, sampling=whole), rounds) for release, rounds in spent)))
    refused: AccountingError | None = None
    found = False
    for route, tally in tallies:
        try:
            laws = _composed(tally)
        except AccountingError as error:
            refused = error
            continue
        found = True
        yield route, laws
    if refused is not None and not found:
        raise refused


def _sum_charge(spent: Spent, epsilon: float) -> float:
    """What sums over clients add to delta at `epsilon` (docs/accounting.md, Claim 12).

    Each client's noise is cut on its own. At most m / 65 clients stand behind a sum of m trials, as laws of up to 64
    trials are not cut. Every law of either neighbour is off by so much in total variation; that of the denominator
    counts e^epsilon times. That a round shows more than its sum is as likely whatever the data: it counts once.
    """
    failed = sum(rounds * release.failure for release, rounds in spent)
    laws = sum(
        rounds * release.dimension * (release.mechanism.trials // (TAIL_BITS + 1) + 1)
        for release, rounds in spent
        if release.trust is Trust.SUMS_ONLY
    )
    return failed + (laws * CUT_LAW * (1 + math.exp(min(epsilon, 700.0))) if laws else 0.0)


def _composed(spent: Spent, *, attained: int = 0) -> tuple[_rounds.Law, _rounds.Law]:
    with warnings.catch_warnings():  # its Chernoff search tries orders that overflow and passes over them
        warnings.simplefilter("ignore", RuntimeWarning)
        return _rounds.composed(spent, attained=attained)


def _l2_decides(spent: Spent) -> bool:
    """True when the L2 bounds are so much smaller that the L-infinity route cannot beat even moments (by a tenth)."""
    return all(release.shift_l2 < _L2_DECIDES * math.sqrt(release.dimension) * release.shift for release, _ in spent)


def _sampling_text(spent: Spent) -> str:
    texts = {
        str(release.sampling.scheme)
        + ("" if release.sampling.scheme is Scheme.NONE else f" rate {release.sampling.rate:.6g}")
        for release, _ in spent
    }
    rounds = sum(count for _, count in spent)
    return f"{'; '.join(sorted(texts))}, {rounds} rounds"
