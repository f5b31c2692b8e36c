"""What one client sends in a round: a fixed mechanism, or one that is planned for its budget.

Planning is slow, so every distinct question is answered once, however many clients ask it: clients whose messages
depend on the same figures get the same plan, or the same reason why there is none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import pairwise
from typing import Any

from bqsgd._src.errors import Infeasible, InvalidParameter
from bqsgd._src.params import Mechanism
from bqsgd._src.persample.clips import Clip
from bqsgd._src.planner.plan import Budget
from bqsgd._src.planner.search import least_error_mechanism
from bqsgd._src.planner.sums import SumPlan, in_sums, plan_sum, width_of
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.privacy.guarantee import as_given, rounded_up
from bqsgd._src.release import Assumption, Relation, Release, Sampling, Scheme, Spent, Terms, Unit
from bqsgd._src.secure.graph import Thresholds
from bqsgd._src.settings.config import Config

_Figures = dict[str, Any]
"""A plan in plain values, for JSON."""
_answers: dict[Hashable, _Figures | Infeasible] = {}
"""Question -> the plan, or the Infeasible that says why there is none."""
_store: ContextVar[MutableMapping[str, Any] | None] = ContextVar("store", default=None)
"""What `plans_kept_in` was given."""
_MOST_ANSWERS = 1024


def client_terms(config: Config, *, dimension: int, dataset_size: int) -> Terms:
    """The terms of a client that holds `dataset_size` samples, from the settings of the run."""
    privacy = config.privacy
    terms = clipped_terms(
        config.message_clip,
        range=config.range,
        batch_size=privacy.batch_size,
        sampling=_sampling(config, dataset_size),
        unit=Unit(privacy.unit),
        dimension=dimension,
    )
    if config.secure.on:
        terms = in_sums(terms, *config.secure.rules(config.asked))
    # A whole client's update comes from its own data alone, so nothing rests on how kernels treat rows.
    packed = config.clients.packed_rows and terms.unit is Unit.SAMPLE
    return replace(terms, assumption=Assumption.PACKED_ROWS) if packed else terms


def _sampling(config: Config, dataset_size: int) -> Sampling:
    """How a client draws a batch: Poisson batches have the run's rate, or else L / D, and all samples if D < L.

    With unit "client" nothing is sampled: a whole client takes part in every round in which it is asked.
    """
    privacy = config.privacy
    if privacy.unit == Unit.CLIENT:
        return Sampling(scheme=Scheme.NONE)
    if privacy.scheme is Scheme.POISSON:
        rate = min(1.0, privacy.batch_size / dataset_size) if privacy.rate is None else privacy.rate
        return Sampling(scheme=Scheme.POISSON, rate=rate)
    return Sampling.of_batch(privacy.scheme, batch_size=privacy.batch_size, dataset_size=dataset_size)


def public_size(config: Config, samples: int) -> int:
    """The number of samples that a client may tell the server.

    A guarantee for one sample takes that number as public. A guarantee for the whole client hides the number too, so
    every client states the batch size instead.
    """
    return config.privacy.batch_size if config.privacy.unit == Unit.CLIENT else samples


def clipped_terms(
    clip: Clip, *, range: float, batch_size: int, sampling: Sampling, dimension: int, unit: Unit = Unit.SAMPLE
) -> Terms:
    """The terms of a client that clips by this rule and encodes in [-range, range].

    Fixed-size batches and whole clients are accounted under replace-one, everything else under add/remove. A whole
    client's update counts as a batch of one.
    """
    whole = unit is Unit.CLIENT
    # With batches of a fixed size, a sample that is added pushes another one out, which is a replacement. A client that
    # is added or removed would change the public number of clients.
    relation = Relation.REPLACE if whole or sampling.scheme is Scheme.FIXED_SIZE else Relation.ADD_REMOVE
    sensitivity = clip.sensitivity(batch_size=1 if whole else batch_size, range=range, relation=relation)
    return Terms(dimension=dimension, sensitivity=sensitivity, sampling=sampling, unit=unit)


def release_in(config: Config, terms: Terms, *, client: int, round: int) -> Release:
    """What `client` sends in `round`: the fixed mechanism, or the plan for the budget in force (paper Line 7).

    When a budget changes, the rounds that are left are planned anew, on top of all rounds of the earlier plans. A plan
    follows from the settings alone, so a resumed run and every engine make the same plan. The ledger still decides
    whether a message may be sent.

    Raises:
        Infeasible: no levels and trials meet the budget.
    """
    if config.secure.on:
        return Release(mechanism=sum_plan(config, dimension=terms.dimension).mechanism, terms=terms)
    if config.privacy.mechanism is not None:
        return Release(mechanism=config.privacy.mechanism, terms=terms)
    spent: list[tuple[Release, int]] = []
    for start, stop in pairwise([*config.privacy.budget_starts(client), config.run.rounds]):
        budget = config.privacy.budget(client=client, round=start)
        try:
            # config.turns counts rounds here: with a cohort no budget changes in mid-run, so start is 0.
            release = plan_release(terms, budget, rounds=config.turns - start, spent=tuple(spent))
            spent.append((release, stop - start))
        except Infeasible:
            if round < stop:
                raise
            continue  # the client sent nothing under this budget, so it spent nothing
        if round < stop:
            return release
    raise InvalidParameter(f"round {round} is beyond the last, {config.run.rounds - 1}")


def sum_plan(config: Config, *, dimension: int, group: int = 0) -> SumPlan:
    """The plan that all clients of a secure sum share; it follows from the settings alone.

    Levels and trials are the same for all groups, those that fit the largest; each has the trials in its own sum.

    Raises:
        Infeasible: no levels and trials meet the budget.
        InvalidParameter: clients of different sizes would need different plans.
    """
    secure, window = config.secure, config.secure.window
    rule, of_group = secure.rule(config.asked), secure.rule(config.asked, group)
    mechanism = config.privacy.mechanism
    if mechanism is None:
        planned = _least_error_sum(config, rule, dimension=dimension)
        if of_group == rule:
            return planned
        mechanism = planned.mechanism
    width = width_of(of_group, mechanism.levels, mechanism.trials, window=window)
    return SumPlan(rule=of_group, levels=mechanism.levels, trials=mechanism.trials, width=width, window=window)


def sum_plans(config: Config, *, dimension: int) -> tuple[SumPlan, ...]:
    """The plans of all sums of a round, one for each group of clients; none if the run has no secure sums."""
    groups = config.secure.groups if config.secure.on else 0
    return tuple(sum_plan(config, dimension=dimension, group=group) for group in range(groups))


def _least_error_sum(config: Config, rule: Thresholds, *, dimension: int) -> SumPlan:
    privacy, window = config.privacy, config.secure.window
    check_one_plan(config)
    # Any size of the data will do: settings whose plan would depend on it were refused above.
    terms = client_terms(config, dimension=dimension, dataset_size=privacy.batch_size)
    budget, rounds = privacy.budget(client=0, round=0).privacy, config.turns
    fill = config.clip.range is not None or window is not None

    def figures() -> _Figures:
        plan = plan_sum(budget, terms, rule, rounds=rounds, window=window, fill=fill)
        return {"levels": plan.levels, "trials": plan.trials, "width": plan.width}

    return SumPlan(rule=rule, window=window, **_answer((terms, budget, rule, rounds, window, fill), figures))


def check_one_plan(config: Config) -> None:
    """Raise InvalidParameter if clients of different sizes would need different plans for a secure sum."""
    privacy = config.privacy
    # Without a rate of the run, a client's rate depends on how many samples it has. (Only Poisson batches have a rate.)
    sampled = privacy.unit == Unit.SAMPLE and privacy.scheme is not Scheme.NONE
    if config.secure.on and privacy.mechanism is None and sampled and privacy.rate is None:
        raise InvalidParameter(
            "all clients of a secure sum need one plan, so all must have one sampling rate: use Poisson batches and "
            "set rate, the chance of a sample to be in a round's batch, or give levels and trials"
        )


def plan_release(terms: Terms, budget: Budget, *, rounds: int, spent: Spent = ()) -> Release:
    """The release of least error whose `rounds` messages, after those in `spent`, stay within the budget.

    Raises:
        Infeasible: no levels and trials meet the budget.
    """
    figures = _answer((terms, budget, rounds, spent), lambda: _planned(terms, budget, rounds, spent).to_dict())
    return Release(mechanism=Mechanism.from_dict(figures), terms=terms)


def _planned(terms: Terms, budget: Budget, rounds: int, spent: Spent) -> Mechanism:
    before = Accountant()
    for release, count in spent:
        before = before.compose(release, count)
    if spent and before.epsilon(budget.delta) >= budget.epsilon:
        raise Infeasible(
            f"earlier rounds have spent epsilon {rounded_up(before.epsilon(budget.delta))} at delta {budget.delta:g}, "
            f"the budget is now {as_given(budget.epsilon)}"
        )
    return least_error_mechanism(budget, terms, rounds=rounds, spent=before)


@contextmanager
def plans_kept_in(store: MutableMapping[str, Any]) -> Iterator[None]:
    """In this block, look plans up in `store`, and keep there those that are made or used: digest -> JSON.

    For a client whose rounds are answered by a process each. The ledger still decides whether a message may be sent.
    """
    before = _store.set(store)
    try:
        yield
    finally:
        _store.reset(before)


def _answer(question: Hashable, plan: Callable[[], _Figures]) -> _Figures:
    """The figures of the plan for `question`: as it was answered before, or made now."""
    store, answer = _store.get(), _answers.get(question)
    digest = "" if store is None else hashlib.sha256(repr(question).encode()).hexdigest()
    if answer is None and store is not None and digest in store:
        answer = json.loads(store[digest])
    if answer is None:
        try:
            answer = plan()
        except Infeasible as error:
            answer = error
        # Clients of many sizes ask many questions. Clearing is safe with other threads at work, dropping the oldest is
        # not.
        if len(_answers) >= _MOST_ANSWERS:
            _answers.clear()
        _answers[question] = answer
    if isinstance(answer, Infeasible):
        raise Infeasible(str(answer))  # a new one, because raising the same error again would lengthen its traceback
    if store is not None:
        store[digest] = json.dumps(answer)
    return answer
