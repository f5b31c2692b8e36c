"""Noise for counts, histograms and sums of bounded values: the least of each law within a budget.

One record moves a count by 1, one or two bins of a histogram by 1, and a sum of values by at most their bound. A count
and a histogram are integers already; the values of a sum are rounded at random to multiples of bound / levels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bqsgd._src.errors import Infeasible, InvalidParameter
from bqsgd._src.laws import MAX_TRIALS, NoiseLaw
from bqsgd._src.ledger import PrivacyBudget
from bqsgd._src.params import check_int, short_repr
from bqsgd._src.planner.compare import LAWS, least_noise, parameter_text
from bqsgd._src.planner.search import shift_per_round
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.privacy.guarantee import Guarantee, as_given
from bqsgd._src.privacy.published import IntegerNorms, binomial_total
from bqsgd._src.release import Relation, Sampling, Scheme, Sensitivity, Terms, Trust


class Query(StrEnum):
    """What is released."""

    COUNT = "count"
    HISTOGRAM = "histogram"
    SUM = "sum"


@dataclass(frozen=True, kw_only=True)
class QueryNoise:
    """The least noise of one law. error: its standard deviation, in units of one record (of the bound, for sums)."""

    name: str
    law: NoiseLaw
    guarantee: Guarantee
    error: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"law": self.law.to_dict(), "guarantee": self.guarantee.to_dict(), "error": self.error}


@dataclass(frozen=True, kw_only=True)
class QueryAnswer:
    """The least noise of every law for a query, and the trials that cpSGD's bound asks for (None: more than 2^20)."""

    query: Query
    budget: PrivacyBudget
    times: int
    laws: tuple[QueryNoise, ...]
    cpsgd_trials: int | None

    @property
    def title(self) -> str:
        """What is released and the budget."""
        times = "" if self.times == 1 else f", {self.times} times"
        asked = f"epsilon {as_given(self.budget.epsilon)}, delta {as_given(self.budget.delta)}"
        return f"Noise for a {self.query}{times} at {asked}"

    @property
    def lines(self) -> dict[str, str]:
        """A line for each law, then whom the figures hide."""
        unit = "the bound" if self.query is Query.SUM else "one record"
        lines = {}
        for row in self.laws:
            lines[row.name] = (
                f"{parameter_text(row.law)}: error {row.error:.4g} (standard deviation, times {unit}); proven epsilon "
                f"{row.guarantee.epsilon_text} at delta {row.guarantee.delta:g} ({row.guarantee.method})"
            )
        trials = f"more than {MAX_TRIALS}" if self.cpsgd_trials is None else str(self.cpsgd_trials)
        stated = self.laws[0].guarantee
        return lines | {
            "cpSGD's bound": f"{trials} trials of binomial noise for the same budget",
            "guarantee": f"{stated.neighbours}; {stated.trust_text}; {stated.sampling}",
        }

    def to_dict(self) -> dict[str, Any]:
        """Every figure in full, in plain JSON types."""
        return {
            "query": str(self.query),
            "epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "times": self.times,
            "laws": {row.name: row.to_dict() for row in self.laws},
            "cpsgd_trials": self.cpsgd_trials,
        }


def query_terms(query: Query, *, levels: int = 1, relation: Relation = Relation.ADD_REMOVE) -> Terms:
    """The terms of one release. The process that adds the noise is trusted with the data.

    Only coordinates that a record moves are counted: the others have the same law with and without it, independently
    of these. A record that is replaced leaves one bin and enters another, or moves a sum from one end to the other.
    """
    replaced = relation is Relation.REPLACE
    bins = 2 if query is Query.HISTOGRAM and replaced else 1
    move = levels * (2.0 if query is Query.SUM and replaced else 1.0)
    return Terms(
        dimension=bins,
        sensitivity=Sensitivity(linf=move, relation=relation),
        sampling=Sampling(scheme=Scheme.NONE),
        trust=Trust.TRAINER,
    )


def plan_query(
    query: Query | str,
    budget: PrivacyBudget,
    *,
    times: int = 1,
    bins: int = 1,
    levels: int = 64,
    relation: Relation = Relation.ADD_REMOVE,
) -> QueryAnswer:
    """The least noise of every law with which `times` releases of the query stay within the budget.

    bins: of a histogram. levels: of a sum, whose values are at most as many steps; the more, the less rounding adds.
    Sums whose values have either sign are asked for with the largest absolute value as the bound.

    Raises:
        InvalidParameter: the query is unknown, or another argument is out of range.
    """
    try:
        query = Query(query)
    except ValueError as error:
        raise InvalidParameter(f"query must be one of {', '.join(Query)}, got {short_repr(query)}") from error
    check_int("bins", bins, 1, 2**30)
    levels = check_int("levels", levels, 1, 2**10) if query is Query.SUM else 1
    terms = query_terms(query, levels=levels, relation=relation)
    check_int("times", times, 1, 1 << 20)
    guess = (terms.shift_l2(1) / shift_per_round(budget, rate=1.0, rounds=times)) ** 2
    rows = []
    for name in LAWS:
        found = least_noise(name, budget, terms, max(guess, 0.2), rounds=times)
        if found is not None:
            law, release = found
            stated = Accountant().compose(release, times).guarantee(delta=budget.delta)
            rows.append(QueryNoise(name=name, law=law, guarantee=stated, error=math.sqrt(law.variance) / levels))
    if not rows:
        raise Infeasible(f"no law of noise meets {budget} for this query; ask for a larger epsilon or fewer levels")
    touched, move = terms.dimension, terms.sensitivity.linf
    norms = IntegerNorms(move * touched, move * math.sqrt(touched), move, bins if query is Query.HISTOGRAM else 1)
    trials = cpsgd_trials(budget, norms, times=times)
    return QueryAnswer(query=query, budget=budget, times=times, laws=tuple(rows), cpsgd_trials=trials)


def cpsgd_trials(budget: PrivacyBudget, norms: IntegerNorms, *, times: int) -> int | None:
    """The fewest trials for which cpSGD's bound, composed as its authors do, states the budget."""

    def enough(trials: int) -> bool:
        return binomial_total(trials, norms, rate=1.0, rounds=times, delta=budget.delta) <= budget.epsilon

    low, high = 0, MAX_TRIALS
    if not enough(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
