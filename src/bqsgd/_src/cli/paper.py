"""`bqsgd paper`: the published formulas on their own. Nominal epsilon: as published; not a guarantee."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer

from bqsgd._src.cli import _options as options
from bqsgd._src.cli.output import Json, answer, out_option, to_json

if TYPE_CHECKING:
    from bqsgd._src.paper.nominal import NominalPrivacy

_CAVEAT = "as published; not a guarantee"
paper = typer.Typer(
    no_args_is_help=True, help=f"The paper's own formulas: nominal epsilon, {_CAVEAT}.", pretty_exceptions_enable=False
)


def _nominal_lines(nominal: NominalPrivacy) -> dict[str, str]:
    from bqsgd._src.privacy.guarantee import rounded_up

    setting = nominal.setting
    lines = {
        "per round": f"epsilon {rounded_up(nominal.epsilon_per_round)} at delta {setting.delta:g} (Remark 1), "
        f"{rounded_up(nominal.epsilon_per_round_exact_peak)} with the exact P_max (Lemma 1)",
    }
    if nominal.rounds > 1:
        total, in_text = rounded_up(nominal.epsilon_total), rounded_up(nominal.epsilon_total_in_text)
        lines |= {
            "in total": f"epsilon {total} at delta {nominal.delta_total:g} after {nominal.rounds} rounds (Theorem 1), "
            f"{in_text} by the text after it",
            "Lemma 2": f"epsilon {rounded_up(nominal.strong_epsilon)} at delta {nominal.strong_delta:g} in total",
        }
    return lines | {"caveat": f"nominal epsilon for dimension {setting.dimension}: {_CAVEAT}"}


@paper.command("account")
def paper_account(
    levels: options.LevelsOption,
    trials: options.TrialsOption,
    dimension: options.NominalDimensionOption,
    batch_size: options.BatchSizeOption,
    dataset_size: options.DatasetSizeOption,
    delta: Annotated[float, typer.Option(help="Delta of one round.")],
    rounds: Annotated[int, typer.Option(help="Rounds T.", min=1)] = 1,
    json: Json = False,
) -> None:
    """The paper's privacy figures of a mechanism (nominal; not a guarantee).

    Example: bqsgd paper account --levels 1 --trials 251 --dimension 3000 --batch-size 32 --dataset-size 15000
    --delta 1e-4 --rounds 1000
    """
    from bqsgd._src.paper.nominal import NominalPrivacy, NominalSetting
    from bqsgd._src.params import Mechanism

    mechanism = Mechanism(levels=levels, trials=trials)
    setting = NominalSetting(dimension=dimension, batch_size=batch_size, dataset_size=dataset_size, delta=delta)
    nominal = NominalPrivacy.of(mechanism, setting, rounds=rounds)
    fields = {"mechanism": mechanism.to_dict(), "code_count": mechanism.code_count, "nominal": nominal.to_dict()}
    answer(f"Nominal privacy of levels {levels}, trials {trials}", _nominal_lines(nominal), fields, json=json)


@paper.command("plan")
def paper_plan(
    bits: Annotated[int, typer.Option(help="Most bits per coordinate; a code takes at most 2^bits values.")],
    epsilon: Annotated[float, typer.Option(help="Nominal epsilon of one round.")],
    delta: Annotated[float, typer.Option(help="Delta of one round.")],
    dimension: options.NominalDimensionOption,
    batch_size: options.BatchSizeOption,
    dataset_size: options.DatasetSizeOption,
    rounds: Annotated[int, typer.Option(help="Rounds T.", min=1)] = 1,
    rounding: Annotated[
        str,
        typer.Option(
            click_type=click.Choice(["strict", "nearest"]),
            help="strict: both constraints hold. nearest: as in the paper's tables, epsilon may be exceeded.",
        ),
    ] = "strict",
    json: Json = False,
) -> None:
    """The paper's choice of levels and trials (nominal; not a guarantee).

    Example: bqsgd paper plan --bits 8 --epsilon 3.45 --delta 1e-4 --dimension 3000 --batch-size 32
    --dataset-size 15000
    """
    from bqsgd._src.answers import message_lines
    from bqsgd._src.paper.nominal import NominalSetting, make_nominal_plan
    from bqsgd._src.planner.plan import Budget
    from bqsgd._src.privacy.guarantee import as_given

    budget = Budget(bits=bits, epsilon=epsilon, delta=delta)
    setting = NominalSetting(dimension=dimension, batch_size=batch_size, dataset_size=dataset_size, delta=delta)
    made = make_nominal_plan(budget, setting, rounds=rounds, rounding=rounding)
    mechanism = made.mechanism
    sizes = {"code_count": mechanism.code_count, "bits_per_coordinate": mechanism.bits_per_coordinate}
    lines = {"mechanism": f"levels {mechanism.levels}, trials {mechanism.trials}"}
    lines |= message_lines(mechanism, variance=made.variance) | _nominal_lines(made.nominal)
    if made.nominal.epsilon_per_round > epsilon:
        lines["rounding"] = (
            f"to the nearest integers exceeds the nominal epsilon {as_given(epsilon)} that was asked for"
        )
    title = f"Plan by the paper's formulas for {bits} bits, nominal epsilon {as_given(epsilon)}, delta {delta:g}"
    answer(title, lines, made.to_dict() | sizes, json=json)


@paper.command("tradeoffs")
def paper_tradeoffs(
    out: Annotated[Path, out_option("Folder to write into; created if missing.")],
    epsilons: Annotated[
        str, typer.Option(help="Nominal epsilons that are held fixed, comma-separated.")
    ] = "1.72,3.44,8.72",
    fixed_bits: Annotated[str, typer.Option(help="Bits that are held fixed, comma-separated.")] = "8,10,12",
    bits_range: Annotated[str, typer.Option(help="Bits that vary, from-to.")] = "6-16",
    epsilon_range: Annotated[str, typer.Option(help="Nominal epsilons that vary, from-to.")] = "0.5-50",
    delta: Annotated[float, typer.Option(help="Delta of one round.")] = 1e-4,
    nominal_dimension: options.NominalDimensionOption = 3000,
    dimension: Annotated[int, typer.Option(help="Parameters of the model, for the bound of Theorem 1.")] = 61706,
    batch_size: Annotated[int, typer.Option(help="Batch size.")] = 32,
    dataset_size: Annotated[int, typer.Option(help="Samples held by one client.")] = 15000,
    clip: Annotated[float, typer.Option(help="Clip range C.")] = 0.0015,
    rounds: Annotated[int, typer.Option(help="Rounds T.")] = 1000,
    clients: Annotated[int, typer.Option(help="Clients N, equally weighted.")] = 4,
    learning_rate: Annotated[float, typer.Option(help="Learning rate, at most 1/smoothness.")] = 0.006,
    initial_gap: Annotated[
        float, typer.Option(help="F(start) - F*, assumed (log 10: ten classes, untrained).")
    ] = 2.3026,
    gradient_variance: Annotated[float, typer.Option(help="sigma^2 of one sample's gradient, assumed.")] = 1.0,
    json: Json = False,
) -> None:
    """Draw how error, levels, trials and the convergence bound move with bits and with nominal epsilon.

    Writes PNG, CSV and JSON. The defaults are the paper's MNIST setting.
    """
    import csv
    from dataclasses import asdict, fields

    import numpy as np

    from bqsgd._src.paper.figures import draw_tradeoffs
    from bqsgd._src.paper.nominal import NominalSetting
    from bqsgd._src.paper.tradeoffs import Curve, Point, Problem, curves_over_bits, curves_over_epsilon

    problem = Problem(
        setting=NominalSetting(
            dimension=nominal_dimension, batch_size=batch_size, dataset_size=dataset_size, delta=delta
        ),
        dimension=dimension,
        clip=clip,
        rounds=rounds,
        clients=clients,
        learning_rate=learning_rate,
        initial_gap=initial_gap,
        gradient_variance=gradient_variance,
    )
    low_bits, high_bits = (int(value) for value in _range("bits-range", bits_range))
    low, high = _range("epsilon-range", epsilon_range)
    grid = [float(value) for value in np.geomspace(low, high, 41)]
    families: dict[str, tuple[Curve, ...]] = {
        "fixed_epsilon": curves_over_bits(
            problem, epsilons=_numbers("epsilons", epsilons), bits=range(low_bits, high_bits + 1)
        ),
        "fixed_bits": curves_over_epsilon(
            problem, epsilons=grid, bits=[_whole("fixed-bits", value) for value in _numbers("fixed-bits", fixed_bits)]
        ),
    }
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, curves in families.items():
        draw_tradeoffs(curves, out / f"{name}.png", delta=delta)
        with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            columns = [field.name for field in fields(Point)]
            writer.writerow(["fixed", "value", *columns])
            for curve in curves:
                for point in curve.points:
                    writer.writerow([curve.fixed, curve.value, *(getattr(point, column) for column in columns)])
        written += [str(out / f"{name}.png"), str(out / f"{name}.csv")]
    caveat = f"nominal epsilon: {_CAVEAT}"
    record = {
        "caveat": caveat,
        "problem": asdict(problem),
        **{name: [asdict(curve) for curve in curves] for name, curves in families.items()},
    }
    (out / "tradeoffs.json").write_text(to_json(record) + "\n", encoding="utf-8")
    written.append(str(out / "tradeoffs.json"))
    points = [point for curves in families.values() for curve in curves for point in curve.points]
    infeasible = sum(point.levels is None for point in points)
    summary = {"written": written, "points": len(points), "infeasible_points": infeasible, "caveat": caveat}
    lines = {
        "written": ", ".join(written),
        "points": f"{len(points)}, of which {infeasible} have no integers within the budget",
        "caveat": caveat,
    }
    answer("Trade-off curves by the paper's formulas", lines, summary, json=json)


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--{option} must be numbers separated by commas, got {text!r}") from None


def _whole(option: str, value: float) -> int:
    if value != int(value):
        raise typer.BadParameter(f"--{option} must be whole numbers, got {value:g}")
    return int(value)


def _range(option: str, text: str) -> tuple[float, float]:
    low, _, high = text.partition("-")
    try:
        ends = float(low), float(high)
    except ValueError:
        raise typer.BadParameter(f"--{option} must read from-to, such as 6-16, got {text!r}") from None
    if not 0 < ends[0] <= ends[1] < 1e9:
        raise typer.BadParameter(f"--{option} must rise from a positive number, got {text!r}")
    return ends
