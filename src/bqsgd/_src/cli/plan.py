"""`bqsgd plan`: the mechanism of least error within a budget. `bqsgd account`: what a given mechanism guarantees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bqsgd._src.cli import _options as options
from bqsgd._src.cli.output import Json, answer
from bqsgd._src.errors import InvalidParameter

if TYPE_CHECKING:
    from bqsgd import PlanAnswer, SumPlanAnswer


def account(
    levels: options.LevelsOption,
    trials: options.TrialsOption,
    dimension: options.DimensionOption,
    batch_size: options.BatchSizeOption,
    dataset_size: options.DatasetSizeOption,
    rounds: Annotated[int, typer.Option(help="Messages that the client sends.", min=1)],
    delta: Annotated[float, typer.Option(help="Delta of the total.")],
    sampling: options.SamplingOption = "poisson",
    relation: options.RelationOption = None,
    linf: options.LinfOption = None,
    l2: options.L2Option = None,
    json: Json = False,
) -> None:
    """State the privacy that a mechanism guarantees to one client over all rounds.

    Example: bqsgd account --levels 1 --trials 251 --delta 1e-5 --dimension 61706 --batch-size 32 --dataset-size 15000
    --rounds 1000
    """
    asked = {name: value for name, value in locals().items() if name != "json"}
    import bqsgd

    accounted = bqsgd.account(**asked)
    answer(accounted.title, accounted.lines, accounted.to_dict(), json=json)


def plan(
    epsilon: Annotated[float, typer.Option(help="Privacy budget, total over all rounds.")],
    delta: Annotated[float, typer.Option(help="Delta of the budget, total over all rounds.")],
    dimension: options.DimensionOption,
    dataset_size: options.DatasetSizeOption,
    bits: Annotated[
        int | None,
        typer.Option(
            help="Most bits per coordinate; a code takes at most 2^bits values. With --secure, those of the modulus; "
            "chosen if left out."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Public batch size by which a client divides, L. Proposed if left out.", min=1)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Messages that the client will send. Proposed if left out.", min=1)
    ] = None,
    sampling: options.SamplingOption = "poisson",
    relation: options.RelationOption = None,
    linf: options.LinfOption = None,
    l2: options.L2Option = None,
    secure: Annotated[
        bool, typer.Option("--secure", help="Plan secure sums: the server sees only sums, and clients share one noise.")
    ] = False,
    clients: Annotated[
        int | None,
        typer.Option(help="Clients like this one: those of a secure sum, or for a proposed batch size. Default: 4."),
    ] = None,
    dropouts: Annotated[
        int | None, typer.Option(help="Most clients missing from a sum. Default: a tenth of them.", min=0)
    ] = None,
    colluders: Annotated[int, typer.Option(help="Most clients that may tell the server all they know.", min=0)] = 0,
    window: Annotated[
        float | None, typer.Option(help="Share of the range that the sum has room for. Default: it never wraps.")
    ] = None,
    json: Json = False,
) -> None:
    """Choose levels and trials: the least error within a budget of bits and privacy.

    With few bits the noised codes are coarsened to 2^bits points, which costs
    error but no privacy. Without --batch-size or --rounds the plan proposes
    what `bqsgd train` would use, together with its clip and range.

    Examples: bqsgd plan --bits 8 --epsilon 3 --delta 1e-5 --dimension 39700 --dataset-size 15000
              bqsgd plan --bits 8 --epsilon 3 --delta 1e-5 --dimension 61706 --batch-size 512 --dataset-size 15000
              --rounds 600
              bqsgd plan --secure --clients 100 --dropouts 10 --epsilon 3 --delta 1e-5 --dimension 39700
              --batch-size 41 --dataset-size 600 --rounds 300 --l2 1 --linf 1
    """
    asked = {name: value for name, value in locals().items() if value is not None and name not in ("secure", "json")}
    import bqsgd

    planned: PlanAnswer | SumPlanAnswer
    if secure:
        if clients is None:
            raise InvalidParameter("--secure needs --clients: how many share one noise")
        planned = bqsgd.plan_secure(**{"dropouts": clients // 10} | asked)
    else:
        if dropouts is not None or colluders or window is not None:
            raise InvalidParameter("--dropouts, --colluders and --window belong to --secure: add it, or leave them out")
        if bits is None:
            raise InvalidParameter("give --bits, the most that a coordinate may take (--secure chooses its own)")
        del asked["colluders"]
        planned = bqsgd.plan(**asked)
    answer(planned.title, planned.lines, planned.to_dict(), json=json)
