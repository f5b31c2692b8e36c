"""`bqsgd paper`: the published formulas on their own. Nominal epsilon: as published; not a guarantee."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from bqsgd._src.cli import _options as options
from bqsgd._src.cli._options import panel_option
from bqsgd._src.cli.output import Json, answer, out_option, to_json

if TYPE_CHECKING:
    from bqsgd._src.paper.nominal import NominalPrivacy

_Number = TypeVar("_Number", int, float)
_CAVEAT = "as published; not a guarantee"
_BUDGET, _CURVES, _PROBLEM = "Budget", "Curves", "Theorem 1"
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
    rounds: Annotated[int, panel_option(options.CLIENT, "Number of rounds, T.")] = 1,
    json: Json = False,
) -> None:
    r"""Print the paper's privacy figures for a mechanism (nominal; not a guarantee).

    Example:
      bqsgd paper account --levels 1 --trials 251 --delta 1e-4 --rounds 1000 \
        --dimension 3000 --batch-size 32 --dataset-size 15000
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
    bits: Annotated[int, panel_option(_BUDGET, "Most bits per coordinate: a code has at most 2^bits values.")],
    epsilon: Annotated[float, panel_option(_BUDGET, "Nominal epsilon of one round.")],
    delta: Annotated[float, panel_option(_BUDGET, "Delta of one round.")],
    dimension: options.NominalDimensionOption,
    batch_size: options.BatchSizeOption,
    dataset_size: options.DatasetSizeOption,
    rounds: Annotated[int, panel_option(options.CLIENT, "Number of rounds, T.")] = 1,
    rounding: Annotated[
        str,
        panel_option(
            _BUDGET,
            "strict keeps both constraints. nearest rounds as the paper's tables do, and may exceed epsilon.",
            choices=("strict", "nearest"),
        ),
    ] = "strict",
    json: Json = False,
) -> None:
    r"""Choose levels and trials by the paper's formulas (nominal; not a guarantee).

    Example:
      bqsgd paper plan --bits 8 --epsilon 3.45 --delta 1e-4 \
        --dimension 3000 --batch-size 32 --dataset-size 15000
    """
    from dataclasses import asdict

    from bqsgd._src.answers import message_lines
    from bqsgd._src.mechanism.properties import noise_variance
    from bqsgd._src.paper.nominal import NominalPrivacy, NominalSetting, nearest_mechanism, strict_mechanism
    from bqsgd._src.planner.plan import Budget
    from bqsgd._src.privacy.guarantee import as_given

    budget = Budget(bits=bits, epsilon=epsilon, delta=delta)
    setting = NominalSetting(dimension=dimension, batch_size=batch_size, dataset_size=dataset_size, delta=delta)
    mechanism = {"strict": strict_mechanism, "nearest": nearest_mechanism}[rounding](budget, setting)
    nominal, variance = NominalPrivacy.of(mechanism, setting, rounds=rounds), noise_variance(mechanism)
    lines = {"mechanism": f"levels {mechanism.levels}, trials {mechanism.trials}"}
    lines |= message_lines(mechanism, variance=variance) | _nominal_lines(nominal)
    if nominal.epsilon_per_round > epsilon:
        lines["rounding"] = f"to the nearest integers exceeds the nominal epsilon {as_given(epsilon)} of the budget"
    fields = {
        "budget": asdict(budget),
        "mechanism": mechanism.to_dict(),
        "variance": variance,
        "nominal": nominal.to_dict(),
        "code_count": mechanism.code_count,
        "bits_per_coordinate": mechanism.bits_per_coordinate,
    }
    title = f"Plan by the paper's formulas for {bits} bits, nominal epsilon {as_given(epsilon)}, delta {delta:g}"
    answer(title, lines, fields, json=json)


@paper.command("tradeoffs")
def paper_tradeoffs(
    out: Annotated[Path, out_option("Folder to write into; created if missing.")],
    epsilons: Annotated[
        str, panel_option(_CURVES, "Nominal epsilons that are held fixed while the bits vary, comma-separated.")
    ] = "1.72,3.44,8.72",
    fixed_bits: Annotated[
        str, panel_option(_CURVES, "Bits that are held fixed while epsilon varies, comma-separated.")
    ] = "8,10,12",
    bits_range: Annotated[str, panel_option(_CURVES, "Bits over which the curves run, from-to.")] = "6-16",
    epsilon_range: Annotated[
        str, panel_option(_CURVES, "Nominal epsilons over which the curves run, from-to.")
    ] = "0.5-50",
    delta: Annotated[float, panel_option(_CURVES, "Delta of one round.")] = 1e-4,
    nominal_dimension: options.NominalDimensionOption = 3000,
    batch_size: options.BatchSizeOption = 32,
    dataset_size: options.DatasetSizeOption = 15000,
    dimension: Annotated[int, panel_option(_PROBLEM, "Parameters of the model.")] = 61706,
    clip: Annotated[float, panel_option(_PROBLEM, "Clip range, C.")] = 0.0015,
    rounds: Annotated[int, panel_option(_PROBLEM, "Number of rounds, T.")] = 1000,
    learning_rate: Annotated[float, panel_option(_PROBLEM, "Learning rate, at most 1/smoothness.")] = 0.006,
    initial_gap: Annotated[
        float, panel_option(_PROBLEM, "Assumed F(start) - F*; log 10 for ten classes and an untrained model.")
    ] = 2.3026,
    gradient_variance: Annotated[float, panel_option(_PROBLEM, "Assumed variance of one sample's gradient.")] = 1.0,
    json: Json = False,
) -> None:
    """Draw how the error and the convergence bound change with bits and with nominal epsilon.

    Writes PNG, CSV and JSON files. The defaults are the paper's MNIST setting.

    Example:
      bqsgd paper tradeoffs --out curves
    """
    import csv
    from dataclasses import asdict, fields

    import numpy as np

    from bqsgd._src.paper.nominal import NominalSetting
    from bqsgd._src.paper.tradeoffs import Point, Problem, draw_tradeoffs, trade_off_curves

    problem = Problem(
        setting=NominalSetting(
            dimension=nominal_dimension, batch_size=batch_size, dataset_size=dataset_size, delta=delta
        ),
        dimension=dimension,
        clip=clip,
        rounds=rounds,
        learning_rate=learning_rate,
        initial_gap=initial_gap,
        gradient_variance=gradient_variance,
    )
    low_bits, high_bits = _numbers("bits-range", bits_range, int, ends=True)
    low, high = _numbers("epsilon-range", epsilon_range, float, ends=True)
    families = {
        f"fixed_{fixed}": trade_off_curves(problem, fixed=fixed, epsilons=held_epsilons, bits=held_bits)
        for fixed, held_epsilons, held_bits in (
            ("epsilon", _numbers("epsilons", epsilons, float), range(low_bits, high_bits + 1)),
            ("bits", np.geomspace(low, high, 41).tolist(), _numbers("fixed-bits", fixed_bits, int)),
        )
    }
    out.mkdir(parents=True, exist_ok=True)
    columns = ["fixed", "value", *(field.name for field in fields(Point))]
    for name, curves in families.items():
        draw_tradeoffs(curves, out / f"{name}.png", delta=delta)
        with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, columns)
            writer.writeheader()
            for curve in curves:
                for point in curve.points:
                    writer.writerow({"fixed": curve.fixed, "value": curve.value, **asdict(point)})
    caveat = f"nominal epsilon: {_CAVEAT}"
    curves_by_family = {name: [asdict(curve) for curve in curves] for name, curves in families.items()}
    record = {"caveat": caveat, "problem": asdict(problem), **curves_by_family}
    (out / "tradeoffs.json").write_text(to_json(record) + "\n", encoding="utf-8")
    written = [str(out / f"{name}{suffix}") for name in families for suffix in (".png", ".csv")]
    written.append(str(out / "tradeoffs.json"))
    points = [point for curves in families.values() for curve in curves for point in curve.points]
    infeasible = sum(point.levels is None for point in points)
    summary = {"written": written, "points": len(points), "infeasible_points": infeasible, "caveat": caveat}
    lines = {
        "written": ", ".join(written),
        "points": f"{len(points)}; for {infeasible} of them no integers are within the budget",
        "caveat": caveat,
    }
    answer("Trade-off curves by the paper's formulas", lines, summary, json=json)


def _numbers(option: str, text: str, kind: type[_Number], *, ends: bool = False) -> list[_Number]:
    """The numbers of an option: a list such as 8,10,12, or with `ends` a range such as 6-16."""
    try:
        numbers = [kind(part) for part in text.split("-" if ends else ",")]
    except ValueError:
        numbers = []
    # The upper limit keeps a mistyped range from filling the memory.
    if not numbers or (ends and not (len(numbers) == 2 and 0 < numbers[0] <= numbers[1] < 1e9)):
        what = "whole numbers" if kind is int else "numbers"
        form = "must be two positive WHAT, from-to, such as 6-16" if ends else "must be WHAT separated by commas"
        raise typer.BadParameter(f"--{option} {form.replace('WHAT', what)}, got {text!r}")
    return numbers
