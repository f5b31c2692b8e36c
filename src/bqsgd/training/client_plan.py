"""What one client sends in a round: the release, planned for its budget or fixed.

The planner is asked once per distinct question, however many clients ask it: two clients whose messages depend on the
same figures have the same plan, or the same reason for having none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from bqsgd.errors import Infeasible, InvalidParameter
from bqsgd.params import Mechanism
from bqsgd.persample.clips import Clip
from bqsgd.planner.plan import Budget, ClientSetting
from bqsgd.planner.search import least_error_mechanism
from bqsgd.planner.sums import SumPlan, in_sums, plan_sum, width_of
from bqsgd.privacy.accountant import Accountant
from bqsgd.privacy.guarantee import as_given, rounded_up
from bqsgd.release import Assumption, Relation, Release, Scheme, Spent, Unit
from bqsgd.secure.graph import Thresholds
from bqsgd.training.settings import Config

_ANY = Mechanism(levels=1, trials=1)
_kept: dict[tuple[Release, Budget, int], Mechanism] = {}
"""First plans found by an earlier process of the same client."""
_SumQuestion = tuple[ClientSetting, Budget, Thresholds, int, float | None]
_kept_sums: dict[_SumQuestion, SumPlan] = {}
"""The same of secure sums."""


def client_setting(config: Config, *, dimension: int, dataset_size: int) -> ClientSetting:
    """What the messages of a client that holds so many samples depend on besides the mechanism.

    Poisson batches are drawn at the run's rate, or at L / D; a client with fewer than L samples then takes them all.
    Where the guarantee hides the whole client, nothing depends on how many samples it holds (`public_size`).
    """
    dataset_size = public_size(config, dataset_size)
    setting = clipped_setting(
        config.clip.make(),
        range=config.range,
        batch_size=config.privacy.batch_size,
        scheme=config.privacy.scheme,
        unit=Unit(config.privacy.unit),
        dimension=dimension,
        dataset_size=dataset_size,
    )
    if setting.scheme is Scheme.POISSON:
        few = 1.0 if dataset_size < config.privacy.batch_size else None
        setting = replace(setting, rate=few if config.privacy.rate is None else config.privacy.rate)
    if config.secure.on:
        setting = in_sums(setting, config.secure.rule(config.asked))
    packed = config.clients.packed_rows and setting.unit is Unit.SAMPLE
    return replace(setting, assumption=Assumption.PACKED_ROWS) if packed else setting


def public_size(config: Config, samples: int) -> int:
    """How many samples a client counts as: as many as it holds, which a guarantee for one sample takes as public, or
    the batch size, the same for all, where the guarantee hides the whole client and the number with it."""
    return config.privacy.batch_size if config.privacy.unit == Unit.CLIENT else samples


def clipped_setting(
    clip: Clip, *, range: float, batch_size: int, scheme: Scheme, dimension: int, dataset_size: int, unit: Unit
) -> ClientSetting:
    """The setting of a client that clips by this rule and encodes in [-range, range].

    Fixed-size batches and whole clients are replaced; otherwise one record is added or removed. A whole client's update
    counts as a batch of one, and as a client takes part in every round, only samples are sampled.
    """
    whole = unit is Unit.CLIENT
    relation = Relation.REPLACE if whole or scheme is Scheme.FIXED_SIZE else Relation.ADD_REMOVE
    moved = clip.sensitivity(batch_size=1 if whole else batch_size, range=range, relation=relation)
    return ClientSetting(
        dimension=dimension,
        batch_size=batch_size,
        dataset_size=dataset_size,
        scheme=Scheme.NONE if whole else scheme,
        relation=relation,
        linf=moved.linf,
        l2=moved.l2,
        unit=unit,
    )


def release_in(config: Config, setting: ClientSetting, *, client: int, round: int) -> Release:
    """What `client` sends in `round`: the fixed mechanism, or the plan for the budget in force (paper Line 7).

    A budget that changes makes a new plan for the rounds that are left, on top of all rounds of the earlier plans. It
    follows from the settings alone, so a resumed run and every engine plan the same; the ledger has the last word.

    Raises:
        Infeasible: no integers meet the budget.
    """
    if config.secure.on:
        return setting.release(sum_plan(config, dimension=setting.dimension).mechanism)
    if config.privacy.mechanism is not None:
        return setting.release(config.privacy.mechanism)
    starts = sorted({0, *(change.from_round for change in config.privacy.budgets if change.client == client)})
    spent: list[tuple[Release, int]] = []
    for start, stop in pairwise([*starts, config.run.rounds]):
        budget = config.privacy.budget(client=client, round=start)
        try:
            # With a cohort no budget changes in mid-run: start is 0.
            release = plan_release(setting, budget, rounds=config.turns - start, spent=tuple(spent))
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
    any_client = client_setting(config, dimension=dimension, dataset_size=privacy.batch_size)
    rule = secure.rule(config.asked)
    return any_client, privacy.budget(client=0, round=0), rule, config.turns, secure.window


def keep_sum_plan(config: Config, *, dimension: int, levels: int, trials: int, width: int) -> None:
    """Take these as what planning a secure sum finds, as `keep_plan` does."""
    question = _sum_question(config, dimension=dimension)
    plan = SumPlan(rule=question[2], levels=levels, trials=trials, width=width, window=config.secure.window)
    _kept_sums[question] = plan


@lru_cache(maxsize=256)
def _planned_sum(
    setting: ClientSetting, budget: Budget, rule: Thresholds, rounds: int, window: float | None
) -> SumPlan | Infeasible:
    try:
        return plan_sum(budget, setting, rule, rounds=rounds, window=window)
    except Infeasible as error:
        return error


def plan_release(setting: ClientSetting, budget: Budget, *, rounds: int, spent: Spent = ()) -> Release:
    """The release of least error whose `rounds` messages, after what is `spent`, stay within the budget.

    Raises:
        Infeasible: no integers meet the budget.
    """
    found = _planned(setting.release(_ANY), budget, rounds, spent)
    if isinstance(found, Infeasible):
        raise Infeasible(str(found))
    return setting.release(found)


@lru_cache(maxsize=1024)
def _planned(any_release: Release, budget: Budget, rounds: int, spent: Spent) -> Mechanism | Infeasible:
    """The mechanism to use in place of the one in `any_release`, or why there is none."""
    before = Accountant()
    for release, count in spent:
        before = before.compose(release, count)
    if spent and before.epsilon(budget.delta) >= budget.epsilon:
        return Infeasible(
            f"earlier rounds have spent epsilon {rounded_up(before.epsilon(budget.delta))} at delta {budget.delta:g}, "
            f"the budget is now {as_given(budget.epsilon)}"
        )
    kept = None if spent else _kept.get((any_release, budget, rounds))
    if kept is not None:
        return kept
    try:
        return least_error_mechanism(
            budget, lambda mechanism: replace(any_release, mechanism=mechanism), rounds=rounds, spent=before
        )
    except Infeasible as error:
        return error


def keep_plan(config: Config, setting: ClientSetting, mechanism: Mechanism, *, client: int) -> None:
    """Take `mechanism` as what planning finds for the client's first budget, so that it need not be found again.

    For a client's own note of its earlier plan. The ledger has the last word on what may be sent in any case.
    """
    budget = config.privacy.budget(client=client, round=0)
    _kept[setting.release(_ANY), budget, config.turns] = mechanism
