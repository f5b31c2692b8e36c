"""`bqsgd plan`: the mechanism of least error within a budget. `bqsgd account`: what a given mechanism guarantees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bqsgd._src.cli import _options as options
from bqsgd._src.cli._options import panel_option
from bqsgd._src.cli.output import Json, answer
from bqsgd._src.errors import InvalidParameter

if TYPE_CHECKING:
    from bqsgd import PlanAnswer, SumPlanAnswer

_BUDGET, _SUMS, _SITES, _QUERY = "Budget", "Secure sums", "A whole federation", "Counts and sums"


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
    delta: Annotated[
        float | None, panel_option(_BUDGET, "Delta of the budget, total over all rounds. Default with --sites: 1e-5.")
    ] = None,
    dimension: Annotated[int | None, options.DIMENSION] = None,
    dataset_size: Annotated[int | None, options.DATASET_SIZE] = None,
    sites: Annotated[
        Path | None,
        panel_option(_SITES, "CSV file with a line per site, its number of samples last: plan for these sites."),
    ] = None,
    parameters: Annotated[float | None, panel_option(_SITES, "Trained parameters of the model, such as 1e6.")] = None,
    upload: Annotated[
        str | None, panel_option(_SITES, "Most that one site may send over the whole run, such as 20MB.")
    ] = None,
    figure: Annotated[
        Path | None,
        panel_option(_SITES, "Write a picture too (png, svg or pdf): what learns, by epsilon and parameters."),
    ] = None,
    query: Annotated[
        str | None,
        panel_option(
            _QUERY,
            "Plan the noise of one number or histogram instead: count, histogram, or sum (of bounded values).",
            choices=("count", "histogram", "sum"),
        ),
    ] = None,
    bins: Annotated[int, panel_option(_QUERY, "Bins of the histogram.")] = 1,
    times: Annotated[int, panel_option(_QUERY, "How often the query is released, with fresh noise.")] = 1,
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
    groups: Annotated[
        int, panel_option(_SUMS, "Groups of clients with a sum each, for a robust rule over the sums.")
    ] = 1,
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

    With --sites it answers for a whole federation, before there is a run: both
    trust models side by side, rounds and bytes within --upload, and whether
    the model will learn.

    With --query it answers for a single number or histogram: the least noise
    of every law, beside what the bound of cpSGD asks for.

    Examples:
      bqsgd plan --query count --epsilon 1 --delta 1e-6
      bqsgd plan --sites sizes.csv --parameters 1e6 --upload 20MB --epsilon 2
      bqsgd plan --bits 8 --epsilon 3 --delta 1e-5 \
        --dimension 39700 --dataset-size 15000
      bqsgd plan --bits 8 --epsilon 3 --delta 1e-5 --rounds 600 \
        --dimension 61706 --batch-size 512 --dataset-size 15000
      bqsgd plan --secure --clients 100 --dropouts 10 --epsilon 3 --delta 1e-5 \
        --dimension 39700 --batch-size 41 --dataset-size 600 --rounds 300 \
        --l2 1 --linf 1
    """
    arguments = {
        n: value
        for n, value in locals().items()
        if value is not None and n not in ("secure", "json", "figure", "bins", "times")
    }
    import bqsgd

    if query is not None:
        _plan_query(arguments, bins=bins, times=times, json=json)
        return
    if (bins, times) != (1, 1):
        raise InvalidParameter("--bins and --times are options of --query; add it or leave them out")

    if sites is not None:
        _plan_sites(sites, arguments, secure=secure, figure=figure, json=json)
        return
    missing = [f"--{name}" for name, value in (("delta", delta), ("dimension", dimension)) if value is None]
    missing += ["--dataset-size"] if dataset_size is None else []
    if missing or parameters is not None or upload is not None or figure is not None:
        raise InvalidParameter(
            f"give {', '.join(missing)}; or --sites with --parameters, for a whole federation"
            if missing
            else "--parameters, --upload and --figure are options for --sites; use --dimension for one client"
        )

    planned: PlanAnswer | SumPlanAnswer
    if secure:
        if clients is None:
            raise InvalidParameter("--secure needs --clients, the number of clients that share one noise")
        planned = bqsgd.plan_secure(**{"dropouts": clients // max(1, groups) // 10} | arguments)
    else:
        if dropouts is not None or colluders or groups != 1 or window is not None:
            raise InvalidParameter(
                "--dropouts, --colluders, --groups and --window are options of secure sums; add --secure or leave them "
                "out"
            )
        if bits is None:
            raise InvalidParameter("give --bits, the most bits that a coordinate may take (only --secure chooses them)")
        # Their defaults are not None, so they are among the arguments.
        del arguments["colluders"], arguments["groups"]
        planned = bqsgd.plan(**arguments)
    answer(planned.title, planned.lines, planned.to_dict(), json=json)


def _plan_query(arguments: dict[str, Any], *, bins: int, times: int, json: bool) -> None:
    """Answer for a count, a histogram or a sum; the options for messages are refused."""
    from bqsgd._src.ledger import PrivacyBudget
    from bqsgd._src.planner.queries import plan_query
    from bqsgd._src.release import RELATIONS, Relation

    # Options with a default are always among the arguments.
    extra = sorted(set(arguments) - {"query", "epsilon", "delta", "relation", "sampling", "colluders", "groups"})
    if extra:
        raise InvalidParameter(f"--{', --'.join(name.replace('_', '-') for name in extra)} cannot be used with --query")
    if "delta" not in arguments:
        raise InvalidParameter("give --delta")
    planned = plan_query(
        arguments["query"],
        PrivacyBudget(epsilon=arguments["epsilon"], delta=arguments["delta"]),
        times=times,
        bins=bins,
        relation=RELATIONS[arguments["relation"]] if "relation" in arguments else Relation.ADD_REMOVE,
    )
    answer(planned.title, planned.lines, planned.to_dict(), json=json)


def _plan_sites(path: Path, arguments: dict[str, Any], *, secure: bool, figure: Path | None, json: bool) -> None:
    """Answer for a whole federation; the options for one client are refused."""
    import bqsgd
    from bqsgd._src.settings.sites import read_bytes, read_sites

    known = {"sites", "parameters", "upload", "epsilon", "delta"}
    # Options with a default are always among the arguments.
    extra = sorted(set(arguments) - known - {"sampling", "colluders", "groups"}) + (["secure"] if secure else [])
    if extra:
        raise InvalidParameter(f"--sites chooses --{', --'.join(name.replace('_', '-') for name in extra)} itself")
    parameters = arguments.get("parameters")
    if parameters is None or parameters != int(parameters):
        raise InvalidParameter("--sites needs --parameters, the number of trained parameters, such as 1e6")
    budget = {name: arguments[name] for name in ("epsilon", "delta") if name in arguments}
    upload = None if "upload" not in arguments else read_bytes(arguments["upload"])
    planned = bqsgd.plan_sites(sites=read_sites(path), parameters=int(parameters), upload=upload, **budget)
    lines, fields = planned.lines, planned.to_dict()
    if figure is not None:
        from bqsgd._src.reports.sites_map import draw_sites

        draw_sites(planned, figure)
        lines, fields = lines | {"figure": str(figure)}, fields | {"figure": str(figure)}
    answer(planned.title, lines, fields, json=json)
