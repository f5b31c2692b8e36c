"""What one client sends in a round: a fixed mechanism, or one that is planned for its budget.

Planning is slow, so every distinct question is answered once, however many clients ask it: clients whose messages
depend on the same figures get the same plan, or the same reason why there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

from bqsgd._src.errors import Infeasible, InvalidParameter
from bqsgd._src.ledger import PrivacyBudget
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

_Plan = TypeVar("_Plan")
_answers: dict[Hashable, Any] = {}
"""Question -> the plan, or the Infeasible that says why there is none."""
_MOST_ANSWERS = 1024


def client_terms(config: Config, *, dimension: int, dataset_size: int) -> Terms:
    """The terms of a client that holds `dataset_size` samples, from the settings of the run."""
    privacy = config.privacy
    terms = clipped_terms(
        config.clip.make(),
        range=config.range,
        batch_size=privacy.batch_size,
        sampling=_sampling(config, dataset_size),
        unit=Unit(privacy.unit),
        dimension=dimension,
    )
    if config.secure.on:
        terms = in_sums(terms, config.secure.rule(config.asked))
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


def sum_plan(config: Config, *, dimension: int) -> SumPlan:
    """The plan that all clients of a run with secure sums share; it follows from the settings alone.

    Raises:
        Infeasible: no levels and trials meet the budget.
        InvalidParameter: clients of different sizes would need different plans.
    """
    privacy, rule, window = config.privacy, config.secure.rule(config.asked), config.secure.window
    fixed = privacy.mechanism
    if fixed is not None:
        width = width_of(rule, fixed.levels, fixed.trials, window=window)
        return SumPlan(rule=rule, levels=fixed.levels, trials=fixed.trials, width=width, window=window)
    # Without a rate of the run, a client's rate depends on how many samples it has. (Only Poisson batches have a rate.)
    if privacy.unit == Unit.SAMPLE and privacy.scheme is not Scheme.NONE and privacy.rate is None:
        raise InvalidParameter(
            "all clients of a secure sum need one plan, so all must have one sampling rate: use Poisson batches and "
            "set rate, the chance of a sample to be in a round's batch, or give levels and trials"
        )
    question = _sum_question(config, dimension=dimension)
    terms, budget, _, rounds, _ = question
    return _answer(question, lambda: plan_sum(budget, terms, rule, rounds=rounds, window=window))


def _sum_question(config: Config, *, dimension: int) -> tuple[Terms, PrivacyBudget, Thresholds, int, float | None]:
    privacy, secure = config.privacy, config.secure
    # The size of the data does not matter: `sum_plan` refuses settings whose plan would depend on it.
    terms = client_terms(config, dimension=dimension, dataset_size=privacy.batch_size)
    rule = secure.rule(config.asked)
    return terms, privacy.budget(client=0, round=0).privacy, rule, config.turns, secure.window


def keep_sum_plan(config: Config, *, dimension: int, levels: int, trials: int, width: int) -> None:
    """Take this as the plan of the run's secure sums, as `keep_plan` does for one client."""
    rule, window = config.secure.rule(config.asked), config.secure.window
    plan = SumPlan(rule=rule, levels=levels, trials=trials, width=width, window=window)
    _keep(_sum_question(config, dimension=dimension), plan)


def plan_release(terms: Terms, budget: Budget, *, rounds: int, spent: Spent = ()) -> Release:
    """The release of least error whose `rounds` messages, after those in `spent`, stay within the budget.

    Raises:
        Infeasible: no levels and trials meet the budget.
    """
    mechanism = _answer((terms, budget, rounds, spent), lambda: _planned(terms, budget, rounds, spent))
    return Release(mechanism=mechanism, terms=terms)


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


def keep_plan(config: Config, terms: Terms, mechanism: Mechanism, *, client: int) -> None:
    """Take `mechanism` as the plan for the client's first budget, which saves planning it again.

    For a plan that the same client found in an earlier process. The ledger still decides whether a message may be sent.
    """
    _keep((terms, config.privacy.budget(client=client, round=0), config.turns, ()), mechanism)


def _answer(question: Hashable, plan: Callable[[], _Plan]) -> _Plan:
    """The plan for `question`: as it was answered before, or made now."""
    answer: _Plan | Infeasible | None = _answers.get(question)
    if answer is None:
        try:
            answer = plan()
        except Infeasible as error:
            answer = error
        _keep(question, answer)
    if isinstance(answer, Infeasible):
        raise Infeasible(str(answer))  # a new one, because raising the same error again would lengthen its traceback
    return answer


def _keep(question: Hashable, answer: Any) -> None:
    # Clients of many sizes ask many questions. Clearing is safe with other threads at work, dropping the oldest is not.
    if len(_answers) >= _MOST_ANSWERS:
        _answers.clear()
    _answers[question] = answer
