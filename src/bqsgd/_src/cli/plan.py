"""`bqsgd plan`: the mechanism of least error within a budget. `bqsgd account`: what a given mechanism guarantees."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bqsgd._src.cli import _options as options
from bqsgd._src.cli._options import ClientOptions, MechanismOptions, SampleOptions, panel_option, takes
from bqsgd._src.cli.output import Json, answer
from bqsgd._src.errors import InvalidParameter

if TYPE_CHECKING:
    from bqsgd import PlanAnswer, SumPlanAnswer

_BUDGET, _SUMS, _SITES, _QUERY = "Budget", "Secure sums", "A whole federation", "Counts and sums"


@dataclass(frozen=True, kw_only=True)
class AccountOptions(ClientOptions, MechanismOptions):
    """The options of `bqsgd account`: the arguments of `bqsgd.account`."""

    rounds: options.Messages
    delta: Annotated[float, typer.Option(help="Delta at which to state epsilon, total over all rounds.")]
    json: Json = False


@takes(AccountOptions)
def account(asked: AccountOptions) -> None:
    r"""State the privacy that a mechanism guarantees to one client over all rounds.

    Example:
      bqsgd account --levels 1 --trials 251 --delta 1e-5 --rounds 1000 \
        --dimension 61706 --batch-size 32 --dataset-size 15000
    """
    import bqsgd

    accounted = bqsgd.account(**{name: value for name, value in vars(asked).items() if name != "json"})
    answer(accounted.title, accounted.lines, accounted.to_dict(), json=asked.json)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SampleOptions):
    """The options of `bqsgd plan`; those of a question have the names of its function's arguments."""

    epsilon: Annotated[float, panel_option(_BUDGET, "Privacy budget, total over all rounds.")]
    delta: Annotated[
        float | None, panel_option(_BUDGET, "Delta of the budget, total over all rounds. Default with --sites: 1e-5.")
    ] = None
    dimension: Annotated[int | None, options.DIMENSION] = None
    dataset_size: Annotated[int | None, options.DATASET_SIZE] = None
    sites: Annotated[
        Path | None,
        panel_option(_SITES, "CSV file with a line per site, its number of samples last: plan for these sites."),
    ] = None
    parameters: Annotated[float | None, panel_option(_SITES, "Trained parameters of the model, such as 1e6.")] = None
    upload: Annotated[
        str | None, panel_option(_SITES, "Most that one site may send over the whole run, such as 20MB.")
    ] = None
    figure: Annotated[
        Path | None,
        panel_option(_SITES, "Write a picture too (png, svg or pdf): what learns, by epsilon and parameters."),
    ] = None
    query: Annotated[
        str | None,
        panel_option(
            _QUERY,
            "Plan the noise of one number or histogram instead: count, histogram, or sum (of bounded values).",
            choices=("count", "histogram", "sum"),
        ),
    ] = None
    bins: Annotated[int, panel_option(_QUERY, "Bins of the histogram.")] = 1
    times: Annotated[int, panel_option(_QUERY, "How often the query is released, with fresh noise.")] = 1
    bits: Annotated[
        int | None,
        panel_option(
            _BUDGET,
            "Most bits per coordinate: a code has at most 2^bits values. Required, except with --secure, where it "
            "fixes the modulus.",
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        panel_option(options.CLIENT, "Public batch size: a client divides its sum by it, L. Default: proposed."),
    ] = None
    rounds: Annotated[
        int | None, panel_option(options.CLIENT, "Number of messages that the client will send. Default: proposed.")
    ] = None
    clients: Annotated[
        int | None,
        panel_option(options.CLIENT, "Number of clients of this size. Default: 4. --secure requires it."),
    ] = None
    secure: Annotated[
        bool,
        panel_option(
            _SUMS,
            "Plan secure sums: the server sees only sums over clients, and the clients share one noise.",
            "--secure",
        ),
    ] = False
    dropouts: Annotated[
        int | None, panel_option(_SUMS, "Most clients that may be missing from a sum. Default: a tenth of them.")
    ] = None
    colluders: Annotated[int, panel_option(_SUMS, "Most clients that may tell the server all they know.")] = 0
    groups: Annotated[
        int, panel_option(_SUMS, "Groups of clients with a sum each, for a robust rule over the sums.")
    ] = 1
    window: Annotated[
        float | None,
        panel_option(
            _SUMS,
            "Fraction of the range that the modulus always has room for. Default: as much as the released sums need.",
        ),
    ] = None
    json: Json = False

    @property
    def given(self) -> dict[str, Any]:
        """The options that were given, and those with a default, for the functions that answer."""
        handled_here = ("secure", "json", "bins", "times")
        return {name: value for name, value in vars(self).items() if value is not None and name not in handled_here}

    def refuse_others(self, *known: str, why: str) -> None:
        """Raise InvalidParameter, which says `why`, if an option beside these was given.

        Options with a default are not looked at: whether the user has given them is unknown.
        """
        others = sorted(set(self.given) - {*known, "sampling", "colluders", "groups"}) + ["secure"] * self.secure
        if others:
            raise InvalidParameter(why.format(f"--{', --'.join(name.replace('_', '-') for name in others)}"))


@takes(PlanOptions)
def plan(asked: PlanOptions) -> None:
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
    if asked.query is not None:
        _plan_query(asked)
        return
    if (asked.bins, asked.times) != (1, 1):
        raise InvalidParameter("--bins and --times are options of --query; add it or leave them out")
    if asked.sites is not None:
        _plan_sites(asked, asked.sites)
        return
    planned = _plan_client(asked)
    answer(planned.title, planned.lines, planned.to_dict(), json=asked.json)


def _plan_client(asked: PlanOptions) -> PlanAnswer | SumPlanAnswer:
    """Answer for one client, or for a sum over clients of its size."""
    import bqsgd

    required = {"--delta": asked.delta, "--dimension": asked.dimension, "--dataset-size": asked.dataset_size}
    missing = [name for name, value in required.items() if value is None]
    if missing:
        raise InvalidParameter(f"give {', '.join(missing)}; or --sites with --parameters, for a whole federation")
    if asked.parameters is not None or asked.upload is not None or asked.figure is not None:
        raise InvalidParameter(
            "--parameters, --upload and --figure are options for --sites; use --dimension for one client"
        )
    if asked.secure:
        if asked.clients is None:
            raise InvalidParameter("--secure needs --clients, the number of clients that share one noise")
        return bqsgd.plan_secure(**{"dropouts": asked.clients // max(1, asked.groups) // 10} | asked.given)
    if asked.dropouts is not None or asked.colluders or asked.groups != 1 or asked.window is not None:
        raise InvalidParameter(
            "--dropouts, --colluders, --groups and --window are options of secure sums; add --secure or leave them out"
        )
    if asked.bits is None:
        raise InvalidParameter("give --bits, the most bits that a coordinate may take (only --secure chooses them)")
    # The defaults of these two are not None, so they are among the options given.
    return bqsgd.plan(**{name: value for name, value in asked.given.items() if name not in ("colluders", "groups")})


def _plan_query(asked: PlanOptions) -> None:
    """Answer for a count, a histogram or a sum; the options for messages are refused."""
    from bqsgd._src.ledger import PrivacyBudget
    from bqsgd._src.planner.queries import plan_query
    from bqsgd._src.release import RELATIONS, Relation

    assert asked.query is not None
    asked.refuse_others("query", "epsilon", "delta", "relation", why="{} cannot be used with --query")
    if asked.delta is None:
        raise InvalidParameter("give --delta")
    planned = plan_query(
        asked.query,
        PrivacyBudget(epsilon=asked.epsilon, delta=asked.delta),
        times=asked.times,
        bins=asked.bins,
        relation=Relation.ADD_REMOVE if asked.relation is None else RELATIONS[asked.relation],
    )
    answer(planned.title, planned.lines, planned.to_dict(), json=asked.json)


def _plan_sites(asked: PlanOptions, path: Path) -> None:
    """Answer for a whole federation; the options for one client are refused."""
    import bqsgd
    from bqsgd._src.settings.sites import read_bytes, read_sites

    asked.refuse_others("sites", "parameters", "upload", "figure", "epsilon", "delta", why="--sites chooses {} itself")
    if asked.parameters is None or asked.parameters != int(asked.parameters):
        raise InvalidParameter("--sites needs --parameters, the number of trained parameters, such as 1e6")
    planned = bqsgd.plan_sites(
        sites=read_sites(path),
        parameters=int(asked.parameters),
        epsilon=asked.epsilon,
        delta=1e-5 if asked.delta is None else asked.delta,
        upload=None if asked.upload is None else read_bytes(asked.upload),
    )
    lines, fields = planned.lines, planned.to_dict()
    if asked.figure is not None:
        from bqsgd._src.reports.sites_map import draw_sites

        draw_sites(planned, asked.figure)
        lines, fields = lines | {"figure": str(asked.figure)}, fields | {"figure": str(asked.figure)}
    answer(planned.title, lines, fields, json=asked.json)
