"""`bqsgd plan`: the mechanism of least error within a budget."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bqsgd.cli import client_options as options
from bqsgd.cli.output import Json, emit
from bqsgd.cli.privacy_fields import NOMINAL_NOTE, guarantee_fields, nominal_fields
from bqsgd.errors import InvalidParameter

if TYPE_CHECKING:
    from bqsgd.params import Mechanism


class RoundingChoice(StrEnum):
    """Values of --rounding."""

    STRICT = "strict"
    NEAREST = "nearest"


COARSE_NOTE = (
    "Coarsened after the noise: epsilon is that of levels and trials alone. bias_worst is in units of the clip; "
    "noise_cost is how many times more messages give the same precision as without coarsening."
)


def _coarse_fields(mechanism: Mechanism) -> dict[str, Any]:
    """What few bits are, and what they cost in error."""
    if mechanism.coarsening is None:
        return {}
    from bqsgd.mechanism.coarsening import noise_to_signal, saturation_bias, worst_squared_error

    return {
        "points": mechanism.coarsening.points,
        "width": mechanism.coarsening.width,
        "bias_worst": saturation_bias(mechanism),
        "variance_worst": worst_squared_error(mechanism),
        "noise_cost": noise_to_signal(mechanism) / noise_to_signal(mechanism.fine),
    }


def plan(
    bits: Annotated[int, typer.Option(help="Most bits a coordinate; a code takes at most 2^bits values.")],
    epsilon: Annotated[float, typer.Option(help="Privacy budget: total (exact) or nominal a round (paper).")],
    delta: Annotated[float, typer.Option(help="Delta of the budget: total (exact) or of one round (paper).")],
    dim: options.Dim,
    dataset_size: options.DatasetSize,
    batch: Annotated[
        int | None, typer.Option(help="Public batch size a client divides by, L. Left out: proposed (exact).", min=1)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Messages the client will send. Left out: proposed (exact).", min=1)
    ] = None,
    method: options.Method = options.MethodChoice.EXACT,
    sampling: options.Sampling = options.SamplingChoice.POISSON,
    relation: options.Relation = None,
    linf: options.Linf = None,
    l2: options.L2 = None,
    rounding: Annotated[
        RoundingChoice | None,
        typer.Option(
            help="Method paper only. strict: both constraints hold (default). nearest: as in the paper's tables."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Choose levels and trials: the least error within a budget of bits and privacy.

    With few bits the noised codes are coarsened to 2^bits points, which costs error but no privacy. Without --batch or
    --rounds the plan proposes them, and an L2 clip with its range, by what the frontier's search taught.

    Examples: bqsgd plan --bits 8 --epsilon 3 --delta 1e-5 --dim 39700 --dataset-size 15000
              bqsgd plan --bits 8 --epsilon 3 --delta 1e-5 --dim 61706 --batch 512 --dataset-size 15000 --rounds 600
    """
    from bqsgd.planner.plan import Budget

    neighbours = None if relation is None else relation.relation
    budget = Budget(bits=bits, epsilon=epsilon, delta=delta)
    proposal = None
    if method is options.MethodChoice.PAPER:
        from bqsgd.planner.paper import plan_paper

        if batch is None:
            raise InvalidParameter("--batch is needed by --method paper: the paper's formulas do not choose it")

        made = plan_paper(
            budget,
            dimension=dim,
            batch_size=batch,
            dataset_size=dataset_size,
            rounds=1 if rounds is None else rounds,
            scheme=sampling.scheme,
            relation=neighbours,
            linf=linf,
            l2=l2,
            rounding=(rounding or RoundingChoice.STRICT).value,
        )
    else:
        if rounding is not None:
            raise InvalidParameter("--rounding belongs to --method paper; exact plans always keep both constraints")
        from bqsgd.planner.exact import plan_exact

        if batch is None or rounds is None:
            if sampling is not options.SamplingChoice.POISSON or linf is not None or l2 is not None:
                raise InvalidParameter(
                    "--batch and --rounds are proposed for Poisson batches and together with the clip; give both, "
                    "or leave out --sampling, --linf and --l2"
                )
            from bqsgd.planner.propose import propose

            proposal = propose(budget, dimension=dim, dataset_size=dataset_size, batch_size=batch, rounds=rounds)
            batch, rounds = proposal.batch_size, proposal.rounds
            linf = l2 = proposal.sensitivity

        made = plan_exact(
            budget,
            dimension=dim,
            batch_size=batch,
            dataset_size=dataset_size,
            rounds=rounds,
            scheme=sampling.scheme,
            relation=neighbours,
            linf=linf,
            l2=l2,
        )
    mechanism, guarantee = made.mechanism, made.guarantee
    fields = {
        "planned_by": str(made.method),
        **({} if proposal is None else asdict(proposal)),
        "levels": mechanism.levels,
        "trials": mechanism.trials,
        "code_count": mechanism.code_count,
        "bits_per_coordinate": mechanism.bits_per_coordinate,
        **_coarse_fields(mechanism),
        "variance": made.variance,
        "rounds": made.rounds,
        **({} if guarantee is None else guarantee_fields(guarantee, as_json=json)),
        "nominal_epsilon": made.nominal.epsilon_per_round,
        **nominal_fields(made.nominal, totals=rounds is not None),
    }
    notes = [NOMINAL_NOTE] if guarantee is None else [f"Guarantee: {guarantee}.", NOMINAL_NOTE]
    if made.method == "paper" and made.nominal.epsilon_per_round > budget.epsilon:
        notes.append(f"Rounding to the nearest passes the asked nominal epsilon {budget.epsilon}.")
    if mechanism.coarsening is not None:
        notes.append(COARSE_NOTE)
    if proposal is not None:
        notes.append(
            f"Proposed: bqsgd train --epsilon {epsilon:g} --delta {delta:g} --bits {bits} --rounds {proposal.rounds} "
            f"--batch-size {proposal.batch_size} --clip l2 --clip-norm {proposal.clip_norm:g} "
            f"--range {proposal.range:g}"
        )
    title = f"Plan for {bits} bits, epsilon {epsilon}, delta {delta:g}"
    emit(fields | ({"plan": made.to_dict()} if json else {}), as_json=json, title=title, notes=tuple(notes))
