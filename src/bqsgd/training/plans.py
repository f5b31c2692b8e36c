"""From a run's settings to what one client sends a round: the release, planned for a budget or fixed.

The planner is asked once a distinct question, however many clients ask it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from bqsgd.errors import Infeasible, InvalidParameter
from bqsgd.params import Mechanism
from bqsgd.persample.clips import Clip
from bqsgd.planner.plan import Budget
from bqsgd.planner.search import least_error_mechanism
from bqsgd.privacy.accountant import Accountant
from bqsgd.release import Relation, Release, Sampling, Scheme, Sensitivity, Unit
from bqsgd.training.config import Config

Spent = tuple[tuple[Release, int], ...]
_kept: dict[tuple[Situation, Budget, int], Mechanism] = {}
"""First plans found by an earlier process of the same client."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a client's message depends on besides the mechanism."""

    dimension: int
    dataset_size: int
    batch_size: int
    scheme: Scheme
    clip: Clip
    range: float
    unit: Unit

    @property
    def relation(self) -> Relation:
        """Fixed-size batches and whole clients are replaced; otherwise one record is added or removed."""
        replaced = self.scheme is Scheme.FIXED_SIZE or self.unit is Unit.CLIENT
        return Relation.REPLACE if replaced else Relation.ADD_REMOVE

    @property
    def sensitivity(self) -> Sensitivity:
        """Of the encoder's input, in fractions of its range; a whole client's update counts as a batch of one."""
        batch_size = 1 if self.unit is Unit.CLIENT else self.batch_size
        return self.clip.sensitivity(batch_size=batch_size, range=self.range, relation=self.relation)

    @property
    def sampling(self) -> Sampling:
        """A client takes part in every round, so only samples are sampled."""
        if self.unit is Unit.CLIENT or self.scheme is Scheme.FULL:
            return Sampling(scheme=Scheme.FULL)
        return Sampling.of_batch(self.scheme, batch_size=self.batch_size, dataset_size=self.dataset_size)

    def release(self, mechanism: Mechanism) -> Release:
        """What one message made by `mechanism` reveals."""
        return Release(
            mechanism=mechanism,
            dimension=self.dimension,
            sensitivity=self.sensitivity,
            sampling=self.sampling,
            unit=self.unit,
        )


def release_in(config: Config, situation: Situation, *, client: int, round: int) -> Release:
    """What `client` sends in `round`: the fixed mechanism, or the plan for the budget in force (paper Line 7).

    A budget that changes makes a new plan for the rounds that are left, on top of all rounds of the earlier plans. It
    follows from the settings alone, so a resumed run and every engine plan the same; the ledger has the last word.

    Raises:
        Infeasible: no integers meet the budget.
    """
    if config.mechanism is not None:
        return situation.release(config.mechanism)
    starts = sorted({0, *(change.from_round for change in config.budgets if change.client == client)})
    spent: list[tuple[Release, int]] = []
    for start, stop in pairwise([*starts, config.rounds]):
        budget = config.budget(client=client, round=start)
        try:
            release = plan_release(situation, budget, rounds=config.rounds - start, spent=tuple(spent))
            spent.append((release, stop - start))
        except Infeasible:
            if round < stop:
                raise
            continue  # it sent nothing then
        if round < stop:
            return release
    raise InvalidParameter(f"round {round} is beyond the {config.rounds} rounds planned")


@lru_cache(maxsize=1024)
def plan_release(situation: Situation, budget: Budget, *, rounds: int, spent: Spent = ()) -> Release:
    """The release of least error whose `rounds` messages, after what is `spent`, stay within the budget.

    Raises:
        Infeasible: no integers meet the budget.
    """
    before = Accountant()
    for release, count in spent:
        before = before.compose(release, count)
    if spent and before.epsilon(budget.delta) >= budget.epsilon:
        raise Infeasible(
            f"earlier rounds have spent epsilon {before.epsilon(budget.delta):.4g} at delta {budget.delta:g}, "
            f"the budget is now {budget.epsilon:g}"
        )
    mechanism = None if spent else _kept.get((situation, budget, rounds))
    if mechanism is None:
        mechanism = least_error_mechanism(budget, situation.release, rounds=rounds, spent=before)
    return situation.release(mechanism)


def keep_plan(config: Config, situation: Situation, mechanism: Mechanism, *, client: int) -> None:
    """Take `mechanism` as what planning finds for the client's first budget, so that it need not be found again.

    For a client's own note of its earlier plan. The ledger has the last word on what may be sent in any case.
    """
    _kept[situation, config.budget(client=client, round=0), config.rounds] = mechanism
