"""`bqsgd compare mechanisms`: laws of noise side by side within one budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bqsgd._src.cli import _options as options
from bqsgd._src.cli._options import ClientOptions, panel_option, takes
from bqsgd._src.cli.output import Json, answer

if TYPE_CHECKING:
    from bqsgd._src.planner.compare import Compared, ComparedByValue

_BUDGET = "Budget"
compare = typer.Typer(no_args_is_help=True, help="Compare laws of noise.", pretty_exceptions_enable=False)


@compare.callback()
def _about() -> None:
    """Compare laws of noise."""


@dataclass(frozen=True, kw_only=True)
class MechanismsOptions(ClientOptions):
    """The options of `bqsgd compare mechanisms`."""

    epsilon: Annotated[float, panel_option(_BUDGET, "Privacy budget, total over all rounds.")]
    delta: Annotated[float, panel_option(_BUDGET, "Delta of the budget, total over all rounds.")]
    bits: Annotated[int, panel_option(_BUDGET, "Most bits per coordinate, 2 to 16; of a sum, of its modulus.")]
    rounds: options.Messages
    clients: Annotated[
        int, panel_option(options.CLIENT, "Number of honest clients in a sum that alone is seen; 1: each message is.")
    ] = 1
    json: Json = False


@compare.command()
@takes(MechanismsOptions)
def mechanisms(asked: MechanismsOptions) -> None:
    r"""Find the least noise of each law whose proven epsilon is within the budget.

    The error is that of one coordinate, rounding included, in units of what
    one sample moves. Beside it stands the epsilon that the law's own papers
    prove for the same noise. Poisson binomial and randomised quantisation,
    whose law depends on the value, join in if values may move across their
    whole range (--sampling none --relation replace --linf 2).

    Example:
      bqsgd compare mechanisms --epsilon 3 --delta 1e-5 --bits 8 \
        --dimension 1985 --batch-size 2048 --dataset-size 15000 \
        --rounds 300 --linf 0.0546 --l2 0.0546
    """
    from bqsgd._src.ledger import PrivacyBudget
    from bqsgd._src.planner.compare import BY_VALUE, compare_by_value, refused_by_value
    from bqsgd._src.planner.compare import compare as compared
    from bqsgd._src.privacy.guarantee import as_given
    from bqsgd._src.release import Trust

    clients, bits = asked.clients, asked.bits
    terms = replace(asked.terms, trust=Trust.SUMS_ONLY) if clients > 1 else asked.terms
    budget = PrivacyBudget(epsilon=asked.epsilon, delta=asked.delta)
    rows = compared(budget, terms, rounds=asked.rounds, bits=bits, clients=clients)
    seen = "each message seen" if clients == 1 else f"sums over {clients} clients"
    title = f"Laws of noise at epsilon {as_given(asked.epsilon)}, delta {as_given(asked.delta)}, {bits} bits, {seen}"
    first = next((row.guarantee for _, row in rows if row is not None), None)
    lines = {name: _line(row) for name, row in rows}
    lines |= {} if first is None else {"guarantee": f"{first.neighbours}; {first.trust_text}; {first.sampling}"}
    fields = {name: None if row is None else row.to_dict() for name, row in rows}
    by_value: dict[str, Any] | str = refused_by_value(terms) or {}
    if isinstance(by_value, str):
        lines |= dict.fromkeys(BY_VALUE, by_value)
    else:
        others = compare_by_value(budget, terms, rounds=asked.rounds, bits=bits, clients=clients)
        lines |= {name: _line_by_value(row) for name, row in others}
        by_value = {name: None if row is None else row.to_dict() for name, row in others}
    answer(title, lines, {"title": title, "laws": fields, "by_value": by_value}, json=asked.json)


def _line_by_value(row: ComparedByValue | None) -> str:
    from bqsgd._src.privacy.guarantee import rounded_up

    if row is None:
        return "has no room in these bits, or is not accounted in sums"
    parameters = ", ".join(f"{name} {value:.6g}" for name, value in row.to_dict()["mechanism"].items())
    return (
        f"error {row.error:.4g}, {row.entropy:.3g} bits for an ideal coder; {parameters}; proven epsilon "
        f"{row.guarantee.epsilon_text} at delta {row.guarantee.delta:g} ({row.guarantee.method}), by its Renyi "
        f"divergence {rounded_up(row.published)}"
    )


def _line(row: Compared | None) -> str:
    from bqsgd._src.planner.compare import parameter_text
    from bqsgd._src.privacy.guarantee import rounded_up

    if row is None:
        return "has no room in these bits"
    return (
        f"error {row.error:.4g}, {row.entropy:.3g} bits for an ideal coder; {parameter_text(row.law)}, levels "
        f"{row.mechanism.levels}; proven epsilon {row.guarantee.epsilon_text} at delta {row.guarantee.delta:g} "
        f"({row.guarantee.method}), by its own papers {rounded_up(row.published)}"
    )
