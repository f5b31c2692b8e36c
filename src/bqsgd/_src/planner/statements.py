"""The answers to the questions before a run, as values that state everything in words, and in full for JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from bqsgd._src.ledger import PrivacyBudget
from bqsgd._src.mechanism.coarsening import noise_to_signal, saturation_bias, worst_squared_error
from bqsgd._src.params import Mechanism
from bqsgd._src.planner.plan import Plan
from bqsgd._src.planner.recipe import Proposal
from bqsgd._src.planner.sums import SumPlan
from bqsgd._src.privacy.guarantee import Guarantee, as_given, rounded_down, rounded_up
from bqsgd._src.release import Release
from bqsgd._src.text import aligned

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
