"""What one client sends in a round: the release, planned for its budget or fixed.

The planner is asked once per distinct question, however many clients ask it: two clients whose messages depend on the
same figures have the same plan, or the same reason for having none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

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

_kept: dict[tuple[Terms, Budget, int], Mechanism] = {}
"""First plans found by an earlier process of the same client."""
_SumQuestion = tuple[Terms, PrivacyBudget, Thresholds, int, float | None]
_kept_sums: dict[_SumQuestion, SumPlan] = {}
"""The same for secure sums."""


def client_terms(config: Config, *, dimension: int, dataset_size: int) -> Terms:
    """What the messages of a client that holds `dataset_size` samples depend on besides the mechanism."""
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
    packed = config.clients.packed_rows and terms.unit is Unit.SAMPLE
    return replace(terms, assumption=Assumption.PACKED_ROWS) if packed else terms


def _sampling(config: Config, dataset_size: int) -> Sampling:
    """Poisson batches at the run's rate, or at L / D; a client with fewer than L samples takes them all.

    A whole client takes part in every round it is asked for, so nothing is sampled and its size does not matter.
    """
    privacy = config.privacy
    if privacy.unit == Unit.CLIENT:
        return Sampling(scheme=Scheme.NONE)
    if privacy.scheme is Scheme.POISSON:
        rate = min(1.0, privacy.batch_size / dataset_size) if privacy.rate is None else privacy.rate
        return Sampling(scheme=Scheme.POISSON, rate=rate)
    return Sampling.of_batch(privacy.scheme, batch_size=privacy.batch_size, dataset_size=dataset_size)


def public_size(config: Config, samples: int) -> int:
    """The number of samples that a client may state.

    A guarantee for one sample takes that number as public. One that hides the whole client hides the number too: then
    every client states the batch size.
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
    relation = Relation.REPLACE if whole or sampling.scheme is Scheme.FIXED_SIZE else Relation.ADD_REMOVE
    sensitivity = clip.sensitivity(batch_size=1 if whole else batch_size, range=range, relation=relation)
    return Terms(dimension=dimension, sensitivity=sensitivity, sampling=sampling, unit=unit)


def release_in(config: Config, terms: Terms, *, client: int, round: int) -> Release:
    """What `client` sends in `round`: the fixed mechanism, or the plan for the budget in force (paper Line 7).

    A budget that changes makes a new plan for the rounds that are left, on top of all rounds of the earlier plans. It
    follows from the settings alone, so a resumed run and every engine plan the same; the ledger has the last word.

    Raises:
        Infeasible: no integers meet the budget.
    """
    if config.secure.on:
        return Release(mechanism=sum_plan(config, dimension=terms.dimension).mechanism, terms=terms)
    if config.privacy.mechanism is not None:
        return Release(mechanism=config.privacy.mechanism, terms=terms)
    starts = sorted({0, *(change.from_round for change in config.privacy.budgets if change.client == client)})
    spent: list[tuple[Release, int]] = []
    for start, stop in pairwise([*starts, config.run.rounds]):
        budget = config.privacy.budget(client=client, round=start)
        try:
            # With a cohort no budget changes in mid-run: start is 0.
            release = plan_release(terms, budget, rounds=config.turns - start, spent=tuple(spent))
            spent.append((release, stop - start))
        except Infeasible:
            if round < stop:
                raise
            continue  # it sent nothing then
        if round < stop:
            return release
    raise InvalidParameter(f"round {round} is beyond the {config.run.rounds} rounds planned")


def sum_plan(config: Config, *, dimension: int) -> SumPlan:
    """What all clients of a run with secure sums use; it follows from the settings alone.

    Raises:
        Infeasible: no integers meet the budget.
        InvalidParameter: clients of different sizes would need different plans.
    """
    privacy, rule, window = config.privacy, config.secure.rule(config.asked), config.secure.window
    fixed = privacy.mechanism
    if fixed is not None:
        width = width_of(rule, fixed.levels, fixed.trials, window=window)
        return SumPlan(rule=rule, levels=fixed.levels, trials=fixed.trials, width=width, window=window)
    if privacy.unit == Unit.SAMPLE and privacy.scheme is Scheme.FIXED_SIZE:
        raise InvalidParameter(
            "fixed-size batches have a rate that depends on the client's samples, and all clients of a secure sum need "
            "one plan: use Poisson batches with a rate, or give levels and trials"
        )
    if privacy.unit == Unit.SAMPLE and privacy.scheme is Scheme.POISSON and privacy.rate is None:
        raise InvalidParameter(
            "all clients of a secure sum need one plan, so their sampling rate must be known to all: set rate, the "
            "chance of every sample to be in a round's batch (or levels and trials)"
        )
    question = _sum_question(config, dimension=dimension)
    found = _kept_sums.get(question) or _planned_sum(*question)
    if isinstance(found, Infeasible):
        raise Infeasible(str(found))
    return found


def _sum_question(config: Config, *, dimension: int) -> _SumQuestion:
    privacy, secure = config.privacy, config.secure
    any_client = client_terms(config, dimension=dimension, dataset_size=privacy.batch_size)
    rule = secure.rule(config.asked)
    return any_client, privacy.budget(client=0, round=0).privacy, rule, config.turns, secure.window


def keep_sum_plan(config: Config, *, dimension: int, levels: int, trials: int, width: int) -> None:
    """Take these as what planning a secure sum finds, as `keep_plan` does."""
    question = _sum_question(config, dimension=dimension)
    plan = SumPlan(rule=question[2], levels=levels, trials=trials, width=width, window=config.secure.window)
    _kept_sums[question] = plan


@lru_cache(maxsize=256)
def _planned_sum(
    terms: Terms, budget: PrivacyBudget, rule: Thresholds, rounds: int, window: float | None
) -> SumPlan | Infeasible:
    try:
        return plan_sum(budget, terms, rule, rounds=rounds, window=window)
    except Infeasible as error:
        return error


def plan_release(terms: Terms, budget: Budget, *, rounds: int, spent: Spent = ()) -> Release:
    """The release of least error whose `rounds` messages, after what is `spent`, stay within the budget.

    Raises:
        Infeasible: no integers meet the budget.
    """
    found = _planned(terms, budget, rounds, spent)
    if isinstance(found, Infeasible):
        raise Infeasible(str(found))
    return Release(mechanism=found, terms=terms)


@lru_cache(maxsize=1024)
def _planned(terms: Terms, budget: Budget, rounds: int, spent: Spent) -> Mechanism | Infeasible:
    """The mechanism for these terms, or why there is none."""
    before = Accountant()
    for release, count in spent:
        before = before.compose(release, count)
    if spent and before.epsilon(budget.delta) >= budget.epsilon:
        return Infeasible(
            f"earlier rounds have spent epsilon {rounded_up(before.epsilon(budget.delta))} at delta {budget.delta:g}, "
            f"the budget is now {as_given(budget.epsilon)}"
        )
    kept = None if spent else _kept.get((terms, budget, rounds))
    if kept is not None:
        return kept
    try:
        return least_error_mechanism(budget, terms, rounds=rounds, spent=before)
    except Infeasible as error:
        return error


def keep_plan(config: Config, terms: Terms, mechanism: Mechanism, *, client: int) -> None:
    """Take `mechanism` as what planning finds for the client's first budget, so that it need not be found again.

    For a client's own note of its earlier plan. The ledger has the last word on what may be sent in any case.
    """
    budget = config.privacy.budget(client=client, round=0)
    _kept[terms, budget, config.turns] = mechanism
