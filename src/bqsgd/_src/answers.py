"""The two questions before a run: what does a mechanism guarantee, and which mechanism meets a budget?

`account` and `plan` answer them in Python. The commands of the same names call these functions and print the answers.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import PrivacyBudget
from bqsgd._src.mechanism.coarsening import noise_to_signal, saturation_bias, worst_squared_error
from bqsgd._src.mechanism.properties import noise_variance
from bqsgd._src.params import Mechanism, check_delta, check_int
from bqsgd._src.planner.plan import Budget, Plan
from bqsgd._src.planner.recipe import CLIENTS, Federation, Proposal, propose
from bqsgd._src.planner.search import make_plan
from bqsgd._src.planner.sums import SumPlan, in_sums, plan_sum
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.privacy.guarantee import Guarantee, as_given, rounded_down, rounded_up
from bqsgd._src.release import RELATIONS, SAMPLINGS, Release, Terms
from bqsgd._src.secure.graph import thresholds

_WIDTH = 120


def _printed(answer: AccountAnswer | PlanAnswer | SumPlanAnswer) -> str:
    """An answer as the command prints it: a title, then aligned lines."""
    return aligned(answer.title, answer.lines, width=_WIDTH)


@dataclass(frozen=True, kw_only=True)
class AccountAnswer:
    """What a mechanism guarantees when it is run for a number of rounds.

    attained_epsilon: a lower bound on the epsilon of some data, which shows how tight the guarantee is.
    variance: V of Eq. 14.
    """

    release: Release
    rounds: int
    guarantee: Guarantee
    attained_epsilon: float | None
    variance: float
    __str__ = _printed

    @property
    def title(self) -> str:
        """Mechanism and rounds."""
        mechanism = self.release.mechanism
        return f"Levels {mechanism.levels}, trials {mechanism.trials}, {self.rounds} rounds"

    @property
    def lines(self) -> dict[str, str]:
        """The guarantee, then what a message costs."""
        return guarantee_lines(self.guarantee, attained=self.attained_epsilon) | message_lines(
            self.release.mechanism, variance=self.variance
        )

    def to_dict(self) -> dict[str, Any]:
        """Every figure in full, in plain JSON types."""
        mechanism = self.release.mechanism
        return {
            "release": self.release.to_dict(),
            "rounds": self.rounds,
            "code_count": mechanism.code_count,
            "bits_per_coordinate": mechanism.bits_per_coordinate,
            "variance": self.variance,
            "guarantee": self.guarantee.to_dict(),
            "attained_epsilon": self.attained_epsilon,
        }


@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """The mechanism of least error within a budget. proposal: batch size, rounds and clip, if they were left out."""

    plan: Plan
    proposal: Proposal | None
    __str__ = _printed

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism to run."""
        return self.plan.mechanism

    @property
    def guarantee(self) -> Guarantee:
        """What all planned rounds together guarantee."""
        return self.plan.guarantee

    @property
    def title(self) -> str:
        """Budget and rounds."""
        budget = self.plan.budget
        return (
            f"Plan for {budget.bits} bits, epsilon {as_given(budget.epsilon)}, delta {as_given(budget.delta)}, "
            f"{self.plan.rounds} rounds"
        )

    @property
    def lines(self) -> dict[str, str]:
        """The mechanism, what a message costs, the guarantee, and the command that trains with a proposal."""
        mechanism, budget = self.mechanism, self.plan.budget
        lines = {"mechanism": f"levels {mechanism.levels}, trials {mechanism.trials}"}
        lines |= message_lines(mechanism, variance=self.plan.variance)
        if mechanism.coarsening is not None:
            cost = _coarsening_cost(mechanism)
            lines["mechanism"] += f", coarsened to {mechanism.coarsening.points} points after the noise"
            lines["coarsening"] = (
                f"costs no privacy; {cost['noise_cost']:.3g} times as many messages for the same precision, bias of at "
                f"most {cost['bias_worst']:.2g} times the range"
            )
        lines |= guarantee_lines(self.guarantee)
        if self.proposal is not None:
            lines["train with"] = (
                f"bqsgd train --epsilon {as_given(budget.epsilon)} --delta {as_given(budget.delta)} "
                f"--bits {budget.bits} --rounds {self.proposal.rounds} --clients {self.proposal.clients} "
                f"--batch-size {self.proposal.batch_size} "
                f"--range {self.proposal.range:g} --one-in {self.proposal.one_in}"
            )
            if self.proposal.one_in > 1:
                per_coordinate = mechanism.bits_per_coordinate / self.proposal.one_in
                lines["subset"] = (
                    f"a message carries one in {self.proposal.one_in} coordinates, {per_coordinate:.2g} bits per "
                    "coordinate of the model: beside the noise, the others are not worth their bits"
                )
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Every figure in full, in plain JSON types."""
        mechanism = self.mechanism
        fields = self.plan.to_dict() | {
            "code_count": mechanism.code_count,
            "bits_per_coordinate": mechanism.bits_per_coordinate,
        }
        if mechanism.coarsening is not None:
            fields["coarsening_cost"] = _coarsening_cost(mechanism)
        return fields | ({} if self.proposal is None else {"proposal": asdict(self.proposal)})


@dataclass(frozen=True, kw_only=True)
class SumPlanAnswer:
    """Levels, modulus and trials of a whole secure sum, and what they guarantee to each client.

    With groups `plan` is that of the largest group; the sums of the others have the same levels and trials.
    """

    plan: SumPlan
    release: Release
    budget: PrivacyBudget
    rounds: int
    guarantee: Guarantee
    clients: int
    groups: int = 1
    __str__ = _printed

    @property
    def title(self) -> str:
        """Who takes part, budget and rounds."""
        groups = f" in {self.groups} groups, each with a sum of its own" if self.groups > 1 else ""
        return (
            f"Plan for sums over {self.clients} clients{groups}, epsilon {as_given(self.budget.epsilon)}, delta "
            f"{as_given(self.budget.delta)}, {self.rounds} rounds"
        )

    @property
    def variance(self) -> float:
        """The variance of the noise in a coordinate of the mean over all clients, in squared ranges."""
        sizes = [len(range(group, self.clients, self.groups)) for group in range(self.groups)]
        trials = sum(map(self.plan.noise.in_sum, sizes))
        return trials / (4 * (self.clients * self.plan.levels) ** 2)

    @property
    def rounding(self) -> float:
        """The most that the clients' rounding adds to it."""
        return 1 / (4 * self.clients * self.plan.levels**2)

    @property
    def _clients_line(self) -> str:
        rule, smallest = self.plan.rule, self.release.terms.group or self.plan.rule.clients
        absent, groups, one_group = rule.dropouts, "", ""
        if self.groups > 1:
            most = f" or {rule.clients}" if smallest < rule.clients else ""
            groups, one_group = f"{self.groups} groups of {smallest}{most}; ", ", perhaps all of one group"
        return (
            f"{groups}at least {smallest - absent} of {smallest} in a sum, at most {rule.colluders} collude"
            f"{one_group if rule.colluders else ''}; at least {smallest - absent - rule.colluders} are present and "
            "honest"
        )

    @property
    def lines(self) -> dict[str, str]:
        """The mechanism, the modulus, who may be missing or collude, the error and the guarantee."""
        plan, noise = self.plan, self.plan.noise
        deviation, single = math.sqrt(self.variance + self.rounding), math.sqrt(self.variance)
        modulus = f"{plan.width} bits per coordinate: "
        if plan.window is None:
            modulus += "never wraps"
            if plan.least_width < plan.width:
                modulus += (
                    f". A run starts with it; from the second round on the width follows the sums that were released, "
                    f"down to {plan.least_width} bits as the means become small beside the noise. A mean that outgrows "
                    "it costs accuracy, never privacy"
                )
        else:
            modulus += (
                f"a coordinate whose mean is within {plan.window:g} of the range wraps with probability at most "
                f"{rounded_up(plan.wrap_probability, 2)} in a round, a larger mean may wrap always; wrapping costs "
                "accuracy, never privacy"
            )
        return {
            "mechanism": (
                f"levels {plan.levels}, trials {plan.trials} in every sum; a client draws {noise.drawn}, and the noise "
                "that is not needed is taken out"
            ),
            "modulus": modulus,
            "clients": self._clients_line,
            "error": (
                f"{deviation:.3g} times the range of a client (standard deviation per coordinate of the mean), "
                f"{single:.3g} from noise alone, the rest is at most rounding"
            ),
            **guarantee_lines(self.guarantee),
        }

    def to_dict(self) -> dict[str, Any]:
        """Every figure in full, in plain JSON types."""
        plan, rule = self.plan, self.plan.rule
        return {
            "clients": self.clients,
            **({"groups": self.groups} if self.groups > 1 else {}),
            "dropouts": rule.dropouts,
            "colluders": rule.colluders,
            **asdict(self.budget),
            "rounds": self.rounds,
            "release": self.release.to_dict(),
            "levels": plan.levels,
            "trials": plan.trials,
            "trials_per_client": plan.noise.drawn,
            "bits_per_coordinate": plan.width,
            "bits_least": plan.least_width,
            "window": plan.window,
            "wrap_probability": plan.wrap_probability,
            "variance": self.variance,
            "variance_rounding": self.rounding,
            "guarantee": self.guarantee.to_dict(),
        }


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
    if sampling not in SAMPLINGS:
        raise InvalidParameter(f"sampling must be one of {', '.join(SAMPLINGS)}, got {sampling!r}")
    if relation is not None and relation not in RELATIONS:
        raise InvalidParameter(f"relation must be one of {', '.join(RELATIONS)}, got {relation!r}")
    chosen = None if relation is None else RELATIONS[relation]
    return Terms.of_batch(scheme=SAMPLINGS[sampling], relation=chosen, **client)


def guarantee_lines(guarantee: Guarantee, *, attained: float | None = None) -> dict[str, str]:
    """Everything that must be read beside an epsilon, in words. attained: a lower bound on the epsilon of some data."""
    tight = {}
    if attained is not None:
        # A lower bound, so it is rounded down.
        tight["attained"] = f"epsilon {rounded_down(attained)} for some data, as far as its grid resolves"
    void = " [seeded noise: no privacy claim]" if guarantee.seeded else ""
    return {
        "guarantee": f"epsilon {guarantee.epsilon_text} at delta {guarantee.delta:g}, total over all rounds{void}",
        **tight,
        "neighbours": guarantee.neighbours,
        "trust": guarantee.trust_text,
        "sampling": guarantee.sampling,
        "method": guarantee.method,
        **({"assuming": f"that {guarantee.assumption}"} if guarantee.assumption else {}),
    }


def message_lines(mechanism: Mechanism, *, variance: float) -> dict[str, str]:
    """What one message costs in bits and in error. variance: V of Eq. 14, in units of the squared range."""
    return {
        "message": f"{mechanism.bits_per_coordinate:.3g} bits per coordinate ({mechanism.code_count} codes)",
        "error": f"{math.sqrt(variance):.3g} times the range (standard deviation per coordinate)",
    }


def _coarsening_cost(mechanism: Mechanism) -> dict[str, float]:
    """What coarsening costs: bias and squared error in units of the encoder's range, and the factor on the noise.

    noise_cost: how many times as many messages are needed for the same precision as without coarsening.
    """
    return {
        "bias_worst": saturation_bias(mechanism),
        "variance_worst": worst_squared_error(mechanism),
        "noise_cost": noise_to_signal(mechanism) / noise_to_signal(mechanism.fine),
    }


def aligned(title: str, lines: Mapping[str, str], *, width: int) -> str:
    """A title and, below it, one aligned line per label. Long lines wrap within the width."""
    indent = 4 + max(map(len, lines), default=0)
    wrapped = (
        textwrap.fill(
            text,
            width,
            initial_indent=f"  {label}".ljust(indent),
            subsequent_indent=" " * indent,
            # Commands and figures must stay whole, so that a reader can copy them.
            break_on_hyphens=False,
            break_long_words=False,
        )
        for label, text in lines.items()
    )
    return "\n".join((title, *wrapped))
