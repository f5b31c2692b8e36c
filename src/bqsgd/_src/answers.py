"""The two questions before a run: what does a mechanism guarantee, and which mechanism meets a budget?

`account` and `plan` answer them in Python. The commands of the same names call these functions and print the answers,
which are in `planner.statements`.
"""

from __future__ import annotations

import math
from typing import Any

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import PrivacyBudget
from bqsgd._src.mechanism.properties import noise_variance
from bqsgd._src.params import Mechanism, check_choice, check_delta, check_int
from bqsgd._src.planner.plan import Budget
from bqsgd._src.planner.recipe import CLIENTS, Federation, Proposal, propose
from bqsgd._src.planner.search import make_plan
from bqsgd._src.planner.statements import AccountAnswer, PlanAnswer, SumPlanAnswer
from bqsgd._src.planner.sums import in_sums, plan_sum
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.release import RELATIONS, SAMPLINGS, Release, Terms
from bqsgd._src.secure.graph import thresholds


def account(
    *,
    levels: int,
    trials: int,
    dimension: int,
    batch_size: int,
    dataset_size: int,
    rounds: int,
    delta: float,
    sampling: str = "poisson",
    relation: str | None = None,
    linf: float | None = None,
    l2: float | None = None,
) -> AccountAnswer:
    """State the privacy that a mechanism guarantees to one client over all rounds, as `bqsgd account` does.

    Args:
        levels, trials: the mechanism, s and m.
        dimension: coordinates of one message: the model's parameters.
        batch_size: public batch size; a client divides its sum by it, L.
        dataset_size: number of samples that one client holds.
        rounds: number of messages that the client sends.
        delta: at which to state epsilon, total over all rounds.
        sampling: how a batch is drawn: "poisson" (add/remove one), "fixed" size (replace one), "none" (all data).
        relation: which data sets are neighbours, "add-remove" or "replace". Only sampling="none" leaves a choice.
        linf: the most that one sample can move a coordinate, as a fraction of the encoder's range. Default:
            1 / batch_size, as with per-sample clipping at the range; twice that for batches of fixed size.
        l2: the most that one sample can move the whole vector in Euclidean norm, as a fraction of the encoder's range.

    >>> accounted = account(
    ...     levels=1, trials=251, dimension=100, batch_size=32, dataset_size=15000, rounds=10, delta=1e-5)
    >>> accounted.guarantee.epsilon < 0.04
    True
    >>> print(accounted.lines["neighbours"])
    add/remove one sample (a null record in its place)
    """
    check_delta("delta", delta)
    check_int("rounds", rounds, 1, 2**53)
    mechanism = Mechanism(levels=levels, trials=trials)
    terms = terms_of(
        dimension=dimension,
        batch_size=batch_size,
        dataset_size=dataset_size,
        sampling=sampling,
        relation=relation,
        linf=linf,
        l2=l2,
    )
    release = Release(mechanism=mechanism, terms=terms)
    accountant = Accountant().compose(release, rounds)
    return AccountAnswer(
        release=release,
        rounds=rounds,
        guarantee=accountant.guarantee(delta=delta),
        attained_epsilon=accountant.attained_epsilon(delta),
        variance=noise_variance(mechanism),
    )


def plan(
    *,
    bits: int,
    epsilon: float,
    delta: float,
    dimension: int,
    dataset_size: int,
    batch_size: int | None = None,
    rounds: int | None = None,
    clients: int = CLIENTS,
    sampling: str = "poisson",
    relation: str | None = None,
    linf: float | None = None,
    l2: float | None = None,
) -> PlanAnswer:
    """Choose levels and trials: the least error within a budget of bits and privacy, as `bqsgd plan` does.

    Args:
        bits: most bits per coordinate; a code has at most 2^bits values.
        epsilon, delta: privacy budget, total over all rounds.
        batch_size, rounds: if you leave out either, the plan proposes what `bqsgd train` would use, clip and range too.
        clients: number of clients of this size; used only for a proposal.
        dimension, dataset_size, sampling, relation, linf, l2: as in `account`.

    Raises:
        Infeasible: no mechanism meets the budget. The message names the nearest feasible budget.

    >>> planned = plan(
    ...     bits=6, epsilon=1, delta=1e-3, dimension=5, batch_size=32, dataset_size=1000, rounds=1, sampling="none")
    >>> planned.guarantee.epsilon <= 1, planned.mechanism.code_count <= 64
    (True, True)
    """
    budget = Budget(bits=bits, epsilon=epsilon, delta=delta)
    check_int("clients", clients, 1, 2**53)
    terms, rounds, proposal = _proposed(
        budget, Federation(samples=clients * dataset_size, clients=clients, dimension=dimension),
        dataset_size=dataset_size, batch_size=batch_size, rounds=rounds, sampling=sampling, relation=relation,
        linf=linf, l2=l2,
    )  # fmt: skip
    return PlanAnswer(plan=make_plan(budget, terms, rounds=rounds), proposal=proposal)


def plan_secure(
    *,
    clients: int,
    dropouts: int,
    colluders: int,
    epsilon: float,
    delta: float,
    dimension: int,
    dataset_size: int,
    batch_size: int | None = None,
    rounds: int | None = None,
    groups: int = 1,
    bits: int | None = None,
    window: float | None = None,
    sampling: str = "poisson",
    relation: str | None = None,
    linf: float | None = None,
    l2: float | None = None,
) -> SumPlanAnswer:
    """Choose levels, trials and modulus of secure sums for the least error of the sum, as `bqsgd plan --secure` does.

    Args:
        clients: number of clients. dropouts: most clients that may be missing from a sum. colluders: most clients that
            may tell the server all they know.
        groups: the clients are split into so many groups with a sum each, for a robust rule; dropouts and colluders are
            then those of any one group.
        bits: the modulus is 2^bits. Default: the plan chooses it.
        window: fraction of the range that the modulus always has room for. Default: as much as the released sums need.
        epsilon, delta, dimension, dataset_size, batch_size, rounds, sampling, relation, linf, l2: as in `plan`, of each
            client. Clients of different sizes can share a plan at one rate; give the size of any of them. linf and l2
            are for a run with a range of its own; without them the range is the clip's.

    Raises:
        Infeasible: no plan meets the budget or tolerates so many dropouts and colluders. The message names the nearest
            feasible ones.

    >>> planned = plan_secure(
    ...     clients=10, dropouts=1, colluders=0, epsilon=4, delta=1e-3, dimension=5, batch_size=32, dataset_size=1000,
    ...     rounds=1, sampling="none")
    >>> planned.guarantee.epsilon <= 4, planned.plan.wrap_probability
    (True, 0.0)
    """
    check_int("groups", groups, 1, max(1, clients // 2))
    sizes = [-(-clients // groups)] + [clients // groups] * (groups > 1)
    rules = [thresholds(clients=size, dropouts=dropouts, colluders=colluders) for size in sizes]
    budget = PrivacyBudget(epsilon=epsilon, delta=delta)
    alone, rounds, _ = _proposed(
        budget, Federation(samples=clients * dataset_size, clients=clients, dimension=dimension, sums=groups),
        dataset_size=dataset_size, batch_size=batch_size, rounds=rounds, sampling=sampling, relation=relation,
        linf=linf, l2=l2,
    )  # fmt: skip
    terms = in_sums(alone, *rules)
    fill = any(given is not None for given in (bits, window, linf, l2))
    chosen = plan_sum(budget, terms, rules[0], rounds=rounds, window=window, width=bits, fill=fill)
    release = Release(mechanism=chosen.mechanism, terms=terms)
    return SumPlanAnswer(
        plan=chosen,
        release=release,
        budget=budget,
        rounds=rounds,
        guarantee=Accountant().compose(release, rounds).guarantee(delta=delta),
        clients=clients,
        groups=groups,
    )


def _proposed(
    budget: Budget | PrivacyBudget,
    federation: Federation,
    *,
    batch_size: int | None,
    rounds: int | None,
    **client: Any,
) -> tuple[Terms, int, Proposal | None]:
    """A client's terms and rounds. If batch size or rounds are left out, both are proposed together with the clip.

    client: the other arguments of `terms_of`.
    """
    if batch_size is not None and rounds is not None:
        check_int("rounds", rounds, 1, 2**53)
        return terms_of(dimension=federation.dimension, batch_size=batch_size, **client), rounds, None
    if client["sampling"] != "poisson" or client["linf"] is not None or client["l2"] is not None:
        raise InvalidParameter(
            "batch size and rounds can be proposed only for Poisson batches, and together with linf and l2: give both, "
            "or leave out sampling, linf and l2"
        )
    proposal = propose(budget, federation, batch_size=batch_size, rounds=rounds)
    client |= {"batch_size": proposal.batch_size, "linf": proposal.linf, "l2": proposal.l2}
    kept = math.ceil(federation.dimension / proposal.one_in)
    return terms_of(dimension=kept, **client), proposal.rounds, proposal


def terms_of(*, sampling: str, relation: str | None, **client: Any) -> Terms:
    scheme = SAMPLINGS[check_choice("sampling", sampling, SAMPLINGS)]
    chosen = None if relation is None else RELATIONS[check_choice("relation", relation, RELATIONS)]
    return Terms.of_batch(scheme=scheme, relation=chosen, **client)
