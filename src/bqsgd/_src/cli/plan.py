"""`bqsgd plan`: the mechanism of least error within a budget. `bqsgd account`: what a given mechanism guarantees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bqsgd._src.cli import _options as options
from bqsgd._src.cli._options import panel_option
from bqsgd._src.cli.output import Json, answer
from bqsgd._src.errors import InvalidParameter

if TYPE_CHECKING:
    from bqsgd import PlanAnswer, SumPlanAnswer

_BUDGET, _SUMS = "Budget", "Secure sums"


def account(
    levels: options.LevelsOption,
    trials: options.TrialsOption,
    dimension: options.DimensionOption,
    batch_size: options.BatchSizeOption,
    dataset_size: options.DatasetSizeOption,
    rounds: Annotated[int, panel_option(options.CLIENT, "Number of messages that the client sends.")],
    delta: Annotated[float, typer.Option(help="Delta at which to state epsilon, total over all rounds.")],
    sampling: options.SamplingOption = "poisson",
    relation: options.RelationOption = None,
    linf: options.LinfOption = None,
    l2: options.L2Option = None,
    json: Json = False,
) -> None:
    r"""State the privacy that a mechanism guarantees to one client over all rounds.

    Example:
      bqsgd account --levels 1 --trials 251 --delta 1e-5 --rounds 1000 \
        --dimension 61706 --batch-size 32 --dataset-size 15000
    """
    # The options have the names of the function's arguments. This must be the first statement, before other locals.
    arguments = {name: value for name, value in locals().items() if name != "json"}
    import bqsgd

    accounted = bqsgd.account(**arguments)
    answer(accounted.title, accounted.lines, accounted.to_dict(), json=json)


def plan(
    epsilon: Annotated[float, panel_option(_BUDGET, "Privacy budget, total over all rounds.")],
    delta: Annotated[float, panel_option(_BUDGET, "Delta of the budget, total over all rounds.")],
    dimension: options.DimensionOption,
    dataset_size: options.DatasetSizeOption,
    bits: Annotated[
        int | None,
        panel_option(
            _BUDGET,
            "Most bits per coordinate: a code has at most 2^bits values. Required, except with --secure, where it "
            "fixes the modulus.",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        panel_option(options.CLIENT, "Public batch size: a client divides its sum by it, L. Default: proposed."),
    ] = None,
    rounds: Annotated[
        int | None, panel_option(options.CLIENT, "Number of messages that the client will send. Default: proposed.")
    ] = None,
    sampling: options.SamplingOption = "poisson",
    relation: options.RelationOption = None,
    linf: options.LinfOption = None,
    l2: options.L2Option = None,
    clients: Annotated[
        int | None,
        panel_option(options.CLIENT, "Number of clients of this size. Default: 4. --secure requires it."),
    ] = None,
    secure: Annotated[
        bool,
        panel_option(
            _SUMS,
            "Plan secure sums: the server sees only sums over clients, and the clients share one noise.",
            "--secure",
        ),
    ] = False,
    dropouts: Annotated[
        int | None, panel_option(_SUMS, "Most clients that may be missing from a sum. Default: a tenth of them.")
    ] = None,
    colluders: Annotated[int, panel_option(_SUMS, "Most clients that may tell the server all they know.")] = 0,
    window: Annotated[
        float | None,
        panel_option(
            _SUMS,
            "Fraction of the range that the modulus always has room for. Default: as much as the released sums need.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    r"""Choose levels and trials: the least error within a budget of bits and privacy.

    With few bits the noised codes are coarsened to 2^bits points, which costs
    error but no privacy. If you leave out --batch-size or --rounds, the plan
    proposes them as `bqsgd train` would, together with its clip and range.

    Examples:
      bqsgd plan --bits 8 --epsilon 3 --delta 1e-5 \
        --dimension 39700 --dataset-size 15000
      bqsgd plan --bits 8 --epsilon 3 --delta 1e-5 --rounds 600 \
        --dimension 61706 --batch-size 512 --dataset-size 15000
      bqsgd plan --secure --clients 100 --dropouts 10 --epsilon 3 --delta 1e-5 \
        --dimension 39700 --batch-size 41 --dataset-size 600 --rounds 300 \
        --l2 1 --linf 1
    """
    arguments = {n: value for n, value in locals().items() if value is not None and n not in ("secure", "json")}
    import bqsgd

    planned: PlanAnswer | SumPlanAnswer
    if secure:
        if clients is None:
            raise InvalidParameter("--secure needs --clients, the number of clients that share one noise")
        planned = bqsgd.plan_secure(**{"dropouts": clients // 10} | arguments)
    else:
        if dropouts is not None or colluders or window is not None:
            raise InvalidParameter(
                "--dropouts, --colluders and --window are options of secure sums; add --secure or leave them out"
            )
        if bits is None:
            raise InvalidParameter("give --bits, the most bits that a coordinate may take (only --secure chooses them)")
        # Its default is 0, not None, so it is among the arguments.
        del arguments["colluders"]
        planned = bqsgd.plan(**arguments)
    answer(planned.title, planned.lines, planned.to_dict(), json=json)
