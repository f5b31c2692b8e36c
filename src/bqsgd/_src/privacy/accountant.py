"""The accountant: a proven upper bound on what all messages of a client reveal together, worst case over data.

Several proven bounds apply to the same messages: loss distributions under the L-infinity bound (Claims 1 to 3), under
an L2 bound as well (Claim 10), and Renyi moments (Claims 4 and 5). The accountant states the smallest. What cannot be
proven is infinite or an AccountingError, never a smaller figure. The claims are in docs/accounting.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from bqsgd._src.errors import AccountingError, InvalidParameter
from bqsgd._src.laws import TAIL_BITS, Binomial, NoiseLaw
from bqsgd._src.noise import CUT_LAW
from bqsgd._src.params import check_delta, check_int
from bqsgd._src.privacy import _renyi, _rounds
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.release import Relation, Release, Sampling, Scheme, Sensitivity, Spent, Terms, Trust, Unit

METHOD_LINF = "proven upper bound (loss distribution, L-infinity)"
METHOD_L2 = "proven upper bound (loss distribution, L2 and L-infinity)"
METHOD_RENYI = "proven upper bound (Renyi moments, L2 and L-infinity)"
_L2_DECIDES = 0.8
"""With L2 bounds below this fraction of sqrt(d) times L-infinity, the L-infinity route cannot be the better one."""
_SPREADS = (1, 4, 10, 128)
"""Data that a lower bound tries under an L2 bound: the norm spread over this many times the fewest coordinates."""
_NEARLY_WHOLE = 0.9
"""Above this rate sampling gains less than two grids may differ by, so the figure without sampling is computed too."""
_SUM_TRIES = 20
"""Tries to find an epsilon that pays for its own charge; two or three are usual."""
_MANY_ROUNDS = 1 << 20
"""With more rounds the grid of the loss distributions is coarse, and moments may give a smaller figure."""
_FEW_TRIALS = 100
"""Up to this many trials the L2 route charges much to delta, and moments may give a smaller figure."""


@dataclass(frozen=True)
class Accountant:
    """An immutable tally of releases and the epsilon that is proven for it; `compose` returns a new tally.

    >>> from bqsgd import Mechanism, Release, Terms
    >>> terms = Terms.of_batch(dimension=61706, batch_size=32, dataset_size=15000)
    >>> release = Release(mechanism=Mechanism(levels=1, trials=251), terms=terms)
    >>> round(Accountant().compose(release, 1000).epsilon(1e-5), 2)
    0.33

    Releases of different kinds (unit, relation, trust) are composed under the weakest terms among them: what hides a
    whole client hides each of its samples, and what hides a replacement hides a removal (Claim 11).
    """

    spent: Spent = ()

    def compose(self, release: Release, rounds: int = 1) -> Accountant:
        """The tally with `rounds` more messages of one release.

        Coarsening is left out: it reads noised codes only, so it neither costs nor gains privacy (Claim 7).
        """
        check_int("rounds", rounds, 0, 2**40)
        release = replace(release, mechanism=release.mechanism.fine)
        counts = dict(self.spent)
        if rounds:
            counts[release] = counts.get(release, 0) + rounds
        # Sorted, because equal tallies must be equal keys of the caches below whatever order they grew in.
        return Accountant(tuple(sorted(counts.items(), key=lambda item: repr(item[0]))))

    @property
    def kinds(self) -> tuple[Accountant, ...]:
        """One tally for each kind of message (unit, relation, trust), to be accounted under the terms of that kind."""
        parts: dict[tuple[Unit, Relation, Trust], Accountant] = {}
        for release, rounds in self.spent:
            kind = (release.terms.unit, release.terms.sensitivity.relation, release.terms.trust)
            parts[kind] = parts.get(kind, Accountant()).compose(release, rounds)
        return tuple(parts[kind] for kind in sorted(parts))

    def epsilon(self, delta: float) -> float:
        """The smallest proven epsilon at `delta`; infinity if none is proven."""
        return self._best(delta)[0]

    def attained_epsilon(self, delta: float) -> float:
        """A lower bound on the true epsilon: the figure of data whose coordinates, few or many, move by the same shift.

        0 for releases of different kinds, because no single record need attain all of them.
        """
        check_delta("delta", delta)
        spent = tuple((release, rounds) for release, rounds in self.spent if release.event is None)
        if len(spent) < len(self.spent):  # without what was made elsewhere, whose figure is an upper bound
            return Accountant(spent).attained_epsilon(delta)
        if not self.spent or len(self.kinds) > 1:
            return 0.0
        if self._hopeless(delta):
            return math.inf
        figures = [0.0]
        for spread in _SPREADS if any(_rounds.l2_binds(release) for release, _ in self.spent) else (1,):
            with suppress(AccountingError):
                laws = _rounds.composed(self.spent, attained=spread)
                figures += [float(law.get_epsilon_for_delta(delta)) for law in laws]
        return max(figures)

    def delta(self, epsilon: float) -> float:
        """The smallest proven delta at `epsilon`, between the delta floor and 1."""
        if not (math.isfinite(epsilon) and epsilon >= 0):
            raise InvalidParameter(f"epsilon must be finite and at least 0, got {epsilon}")
        if not self.spent:
            return 0.0
        spent = _comparable(self.spent)
        hopeless = any(_rounds.beyond_meaning(release) for release, _ in spent)
        deltas = [1.0, _renyi.delta(spent, epsilon)]
        with suppress(AccountingError):  # the bound by moments stands
            for _, laws in _laws(spent, hopeless):
                deltas.append(max(float(law.get_delta_for_epsilon(epsilon)) for law in laws))
        return min(1.0, min(deltas) + _sum_charge(spent, epsilon))

    def guarantee(self, *, delta: float, seeded: bool = False) -> Guarantee:
        """Epsilon at `delta` with everything that must be stated with it, under the weakest terms of all releases.

        Raises:
            InvalidParameter: nothing was released, or delta is not between 0 and 1.
        """
        if not self.spent:
            raise InvalidParameter("nothing was released, so there is no guarantee to state")
        epsilon, method, floor = self._best(delta)
        terms = [release.terms for release, _ in _comparable(self.spent)]
        assumptions = {str(release.terms.assumption) for release, _ in self.spent if release.terms.assumption}
        return Guarantee(
            epsilon=epsilon,
            delta=delta,
            relation=_weakest(Relation.ADD_REMOVE, [one.sensitivity.relation for one in terms]),
            unit=_weakest(Unit.SAMPLE, [one.unit for one in terms]),
            trust=(trust := _weakest(Trust.SUMS_ONLY, [one.trust for one in terms])),
            colluders=min(one.colluders for one in terms) if trust is Trust.SUMS_ONLY else 0,
            group=min((one.group for one in terms if one.group), default=0) if trust is Trust.SUMS_ONLY else 0,
            sampling=_sampling_text(self.spent),
            method=method,
            delta_floor=floor,
            seeded=seeded,
            assumption="; ".join(sorted(assumptions)),
        )

    def _hopeless(self, delta: float) -> bool:
        return any(_rounds.beyond_meaning(release, rounds, delta) for release, rounds in _comparable(self.spent))

    def _best(self, delta: float) -> tuple[float, str, float]:
        check_delta("delta", delta)
        if not self.spent:
            return 0.0, METHOD_LINF, 0.0
        return _best(_comparable(self.spent), delta, self._hopeless(delta))


T = TypeVar("T")


def _weakest(weak: T, terms: list[T]) -> T:
    """`weak` if it is among the terms; otherwise they are all the same, and the result is that one."""
    return weak if weak in terms else terms[0]


def _with_terms(spent: Spent, changes: Callable[[Terms], dict[str, Any]]) -> Spent:
    """The same messages, each with the changes of its terms that the function returns."""
    return tuple(
        (replace(release, terms=replace(release.terms, **changes(release.terms))), rounds) for release, rounds in spent
    )


def _comparable(spent: Spent) -> Spent:
    """The same messages, accounted so that the weakest terms among them apply to each (Claim 11).

    Only one case needs a change: a message that hides whether a whole client was added or removed. Two data sets of the
    client are then each within the bound of the null client, so within twice the bound of each other. Sampling of the
    client gains nothing for them.
    """
    if len({(release.terms.unit, release.terms.sensitivity.relation) for release, _ in spent}) < 2:
        return spent
    return _with_terms(spent, _as_replacement)


def _as_replacement(terms: Terms) -> dict[str, Any]:
    moved = terms.sensitivity
    if terms.unit is not Unit.CLIENT or moved.relation is not Relation.ADD_REMOVE:
        return {}
    l2 = None if moved.l2 is None else 2 * moved.l2
    sensitivity = Sensitivity(linf=2 * moved.linf, l2=l2, relation=Relation.REPLACE)
    return {"sensitivity": sensitivity, "sampling": Sampling(scheme=Scheme.NONE)}


def _best(spent: Spent, delta: float, hopeless: bool) -> tuple[float, str, float]:
    """(epsilon, method, delta floor): the figure of `_least` with the charge for sums of cut laws in delta.

    The charge grows with epsilon, so the result is an epsilon whose own charge was paid. It is found by iteration: the
    charge for the last epsilon gives the next one.
    """
    tried = 0.0
    for _ in range(_SUM_TRIES):
        charge = _sum_charge(spent, tried)
        if not charge < delta / 2:
            break
        epsilon, method, floor = _least(spent, delta - charge, hopeless)
        if epsilon <= tried or charge == 0:
            # At `tried` the loss takes at most delta - charge and the cut laws the charge: delta in all.
            return max(epsilon, tried), method, min(1.0, floor + charge)
        tried = epsilon * (1 + 1e-6)  # slightly more, so that rounding cannot keep the iteration going
    return math.inf, METHOD_LINF, min(1.0, _sum_charge(spent, 0.0))


@lru_cache(maxsize=4096)
def _least(spent: Spent, delta: float, hopeless: bool) -> tuple[float, str, float]:
    """(epsilon, method, delta floor): the smallest figure of all methods. Each is proven, so the smallest is."""
    results = [(math.inf, METHOD_LINF, 0.0)]
    refusal: AccountingError | None = None
    try:
        for method, laws in _laws(spent, hopeless):
            epsilon = max(float(law.get_epsilon_for_delta(delta)) for law in laws)
            floor = max(float(law.get_delta_for_epsilon(math.inf)) for law in laws)
            # A NaN proves nothing, and `min` could return it, because it compares false with everything.
            results.append((math.inf if math.isnan(epsilon) else epsilon, method, floor))
    except AccountingError as error:
        refusal = error
    many = sum(rounds for _, rounds in spent) > _MANY_ROUNDS
    few = any(release.mechanism.trials <= _FEW_TRIALS and _rounds.l2_binds(release) for release, _ in spent)
    if many or few or min(results)[0] == math.inf:
        results.append((_renyi.epsilon(spent, delta), METHOD_RENYI, _renyi.delta_floor(spent, delta)))
    best = min(results, key=lambda result: result[0])
    if refusal is not None and best[0] == math.inf:
        raise refusal
    return best


def _laws(spent: Spent, hopeless: bool) -> Iterator[tuple[str, tuple[_rounds.Law, _rounds.Law]]]:
    """The composed laws by every route worth trying, with the name of the method.

    First under all bounds. Then without an L2 bound that hardly binds, and without sampling at a rate near 1: leaving
    out either is allowed, since it can only raise the true figure, and the other grid may give a smaller one.

    Raises:
        AccountingError: no route works.
    """
    if hopeless:
        return
    method = METHOD_L2 if any(_rounds.l2_binds(release) for release, _ in spent) else METHOD_LINF
    tallies = [(method, spent)]
    if method == METHOD_L2 and not _l2_decides(spent):
        without_l2 = _with_terms(spent, lambda terms: {"sensitivity": replace(terms.sensitivity, l2=None)})
        tallies.append((METHOD_LINF, without_l2))
    whole = Sampling(scheme=Scheme.NONE)
    if any(release.terms.sampling.rate > _NEARLY_WHOLE and release.terms.sampling != whole for release, _ in spent):
        tallies.append((method, _with_terms(spent, lambda _: {"sampling": whole})))
    refusals: list[AccountingError] = []
    for route, tally in tallies:
        try:
            laws = _rounds.composed(tally)
        except AccountingError as error:
            refusals.append(error)
            continue
        yield route, laws
    if len(refusals) == len(tallies):
        raise refusals[-1]


def _sum_charge(spent: Spent, epsilon: float) -> float:
    """What secure sums add to delta at `epsilon` (Claim 12).

    The noise of a sum is drawn in parts, by different clients, and each part is cut and rounded by itself. Parts of up
    to 64 trials are exact, so at most m / 65 + 1 parts of a sum of m trials are not. Each of these is off by CUT_LAW in
    total variation, under both neighbours; in the denominator that counts e^epsilon times. The sum of draws of another
    law is accounted as it was computed, which is `distance` off. The probability that a round
    reveals more than its sum (`failure`) does not depend on the data, so it counts once.
    """
    failed = sum(rounds * release.terms.failure for release, rounds in spent)
    apart = sum(
        rounds * release.terms.dimension * _apart(release.mechanism.law)
        for release, rounds in spent
        if release.terms.trust is Trust.SUMS_ONLY
    )
    return failed + (apart * (1 + math.exp(min(epsilon, 700.0))) if apart else 0.0)


def _apart(law: NoiseLaw) -> float:
    """How far the law of a sum is from the law that is accounted for it, in total variation for one coordinate."""
    return (law.trials // (TAIL_BITS + 1) + 1) * CUT_LAW if isinstance(law, Binomial) else law.distance


def _l2_decides(spent: Spent) -> bool:
    """Whether the L2 bounds are so much smaller that the L-infinity route need not be tried."""
    own = (release for release, _ in spent if release.event is None)
    bounds = ((release, math.sqrt(release.terms.dimension) * release.shift) for release in own)
    return all(release.shift_l2 < _L2_DECIDES * bound for release, bound in bounds)


def _sampling_text(spent: Spent) -> str:
    texts = {
        str(release.terms.sampling.scheme)
        + ("" if release.terms.sampling.scheme is Scheme.NONE else f" rate {release.terms.sampling.rate:.6g}")
        for release, _ in spent
    }
    rounds = sum(count for _, count in spent)
    return f"{'; '.join(sorted(texts))}, {rounds} rounds"
