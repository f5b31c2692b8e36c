"""The exact planner: the mechanism of least error whose proven total epsilon is within the budget."""

from __future__ import annotations

from dataclasses import replace

from bqsgd.mechanism.properties import noise_variance
from bqsgd.params import Mechanism
from bqsgd.planner.few_bits import LEAST_FINE_BITS, coarsened, fine_bits
from bqsgd.planner.pairs import MakeRelease, TooFewBits, least_error_pair
from bqsgd.planner.plan import Budget, Method, Plan, release_of
from bqsgd.privacy.accountant import Accountant
from bqsgd.privacy.nominal import NominalPrivacy, NominalSetting
from bqsgd.release import Relation, Release, Scheme


def least_error_mechanism(
    budget: Budget, make_release: MakeRelease, *, rounds: int, spent: Accountant | None = None
) -> Mechanism:
    """The mechanism of least error whose exact epsilon of (`spent`, then `rounds` of the release) is within budget.

    From 8 bits on it is the pair of smallest V with 2s + m + 1 <= 2^b. With fewer bits, or where no pair fits, a pair
    that takes more bits is coarsened to 2^b points (`few_bits`): with its many levels it has less noise to signal than
    the few levels of a pair that fits, if there is one at all.

    Raises:
        Infeasible: no pair of up to MAX_BITS bits reaches the epsilon, so none is left to coarsen either.
    """

    def pair(bits: int) -> Mechanism:
        return least_error_pair(replace(budget, bits=bits), make_release, rounds=rounds, spent=spent)

    try:
        fine = pair(max(budget.bits, LEAST_FINE_BITS))
    except TooFewBits as error:
        if error.needed is None:
            raise
        fine = pair(fine_bits(error.needed))
    return coarsened(fine, bits=budget.bits)


def plan_exact(
    budget: Budget,
    *,
    dimension: int,
    batch_size: int,
    dataset_size: int,
    rounds: int,
    scheme: Scheme | str = Scheme.POISSON,
    relation: Relation | str | None = None,
    linf: float | None = None,
    l2: float | None = None,
) -> Plan:
    """Plan `rounds` rounds of one client; budget.epsilon and budget.delta are totals over all of them.

    The paper's nominal figure for the same (s, m) stands beside the guarantee: as published; not a guarantee.
    """

    def make_release(mechanism: Mechanism) -> Release:
        return release_of(
            mechanism,
            dimension=dimension,
            batch_size=batch_size,
            dataset_size=dataset_size,
            scheme=scheme,
            relation=relation,
            linf=linf,
            l2=l2,
        )

    mechanism = least_error_mechanism(budget, make_release, rounds=rounds)
    release = make_release(mechanism)
    setting = NominalSetting(dimension=dimension, batch_size=batch_size, dataset_size=dataset_size, delta=budget.delta)
    return Plan(
        method=Method.EXACT,
        budget=budget,
        release=release,
        rounds=rounds,
        variance=noise_variance(mechanism),
        nominal=NominalPrivacy.of(mechanism, setting, rounds=rounds),
        guarantee=Accountant().compose(release, rounds).guarantee(delta=budget.delta),
    )
