"""`bqsgd plan`: the mechanism of least error within a budget."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bqsgd.cli import options
from bqsgd.cli.output import Json, guarantee_lines, message_lines, show, to_json
from bqsgd.errors import InvalidParameter

if TYPE_CHECKING:
    from bqsgd.params import Mechanism


def plan(
    bits: Annotated[int, typer.Option(help="Most bits per coordinate; a code takes at most 2^bits values.")],
    epsilon: Annotated[float, typer.Option(help="Privacy budget, total over all rounds.")],
    delta: Annotated[float, typer.Option(help="Delta of the budget, total over all rounds.")],
    dimension: options.Dimension,
    dataset_size: options.DatasetSize,
    batch_size: Annotated[
        int | None, typer.Option(help="Public batch size by which a client divides, L. Proposed if left out.", min=1)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Messages that the client will send. Proposed if left out.", min=1)
    ] = None,
    sampling: options.Sampling = options.SamplingChoice.POISSON,
    relation: options.Relation = None,
    linf: options.Linf = None,
    l2: options.L2 = None,
    nominal: options.Nominal = False,
    json: Json = False,
) -> None:
    """Choose levels and trials: the least error within a budget of bits and privacy.

    With few bits the noised codes are coarsened to 2^bits points, which costs error but no privacy. Without
    --batch-size or --rounds the plan proposes them, together with an L2 clip and its range.

    Examples: bqsgd plan --bits 8 --epsilon 3 --delta 1e-5 --dimension 39700 --dataset-size 15000
              bqsgd plan --bits 8 --epsilon 3 --delta 1e-5 --dimension 61706 --batch-size 512 --dataset-size 15000
              --rounds 600
    """
    from bqsgd.planner.plan import Budget, ClientSetting
    from bqsgd.planner.search import make_plan
    from bqsgd.privacy.guarantee import as_given

    budget = Budget(bits=bits, epsilon=epsilon, delta=delta)
    proposal = None
    if batch_size is None or rounds is None:
        if sampling is not options.SamplingChoice.POISSON or linf is not None or l2 is not None:
            raise InvalidParameter(
                "--batch-size and --rounds are proposed for Poisson batches and together with the clip; give both, "
                "or leave out --sampling, --linf and --l2"
            )
        from bqsgd.planner.propose import propose

        proposal = propose(budget, dimension=dimension, dataset_size=dataset_size, batch_size=batch_size, rounds=rounds)
        batch_size, rounds = proposal.batch_size, proposal.rounds
        linf = l2 = proposal.sensitivity
    setting = ClientSetting(
        dimension=dimension,
        batch_size=batch_size,
        dataset_size=dataset_size,
        scheme=sampling.scheme,
        relation=None if relation is None else relation.relation,
        linf=linf,
        l2=l2,
    )
    made = make_plan(budget, setting, rounds=rounds)
    mechanism = made.mechanism
    fields: dict[str, Any] = made.to_dict() | {
        "code_count": mechanism.code_count,
        "bits_per_coordinate": mechanism.bits_per_coordinate,
    }
    lines = {"mechanism": f"levels {mechanism.levels}, trials {mechanism.trials}"}
    lines |= message_lines(mechanism, variance=made.variance)
    if mechanism.coarsening is not None:
        cost = _coarsening_cost(mechanism)
        fields["coarsening_cost"] = cost
        lines["mechanism"] += f", coarsened to {mechanism.coarsening.points} points after the noise"
        lines["coarsening"] = (
            f"costs no privacy; {cost['noise_cost']:.3g} times as many messages for the same precision, bias of at "
            f"most {cost['bias_worst']:.2g} times the range"
        )
    lines |= guarantee_lines(made.guarantee)
    if nominal:
        from bqsgd.cli.paper import nominal_line, nominal_privacy

        found = nominal_privacy(mechanism, setting, delta=delta, rounds=rounds)
        fields["nominal"] = found.to_dict()
        lines["nominal"] = nominal_line(found)
    if proposal is not None:
        fields["proposal"] = asdict(proposal)
        lines["train with"] = (
            f"bqsgd train --epsilon {as_given(epsilon)} --delta {as_given(delta)} --bits {bits} "
            f"--rounds {proposal.rounds} --batch-size {proposal.batch_size} --clip l2 "
            f"--clip-norm {proposal.clip_norm:g} --range {proposal.range:g}"
        )
    if json:
        typer.echo(to_json(fields))
    else:
        show(f"Plan for {bits} bits, epsilon {as_given(epsilon)}, delta {as_given(delta)}, {rounds} rounds", lines)


def _coarsening_cost(mechanism: Mechanism) -> dict[str, float]:
    """What coarsening costs: bias and squared error in units of the encoder's range, and the factor on the noise.

    noise_cost is how many times as many messages give the same precision as without coarsening.
    """
    from bqsgd.mechanism.coarsening import noise_to_signal, saturation_bias, worst_squared_error

    return {
        "bias_worst": saturation_bias(mechanism),
        "variance_worst": worst_squared_error(mechanism),
        "noise_cost": noise_to_signal(mechanism) / noise_to_signal(mechanism.fine),
    }
