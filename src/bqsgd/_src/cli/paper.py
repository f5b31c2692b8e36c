"""`bqsgd paper`: the published formulas on their own. Nominal epsilon: as published; not a guarantee."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from bqsgd._src.cli import _options as options
from bqsgd._src.cli._options import MechanismOptions, panel_option, takes
from bqsgd._src.cli.output import Json, answer, out_option, to_json

if TYPE_CHECKING:
    from bqsgd._src.paper.nominal import NominalPrivacy, NominalSetting

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


@dataclass(frozen=True, kw_only=True)
class _Nominal:
    """What a nominal epsilon depends on besides the mechanism."""

    dimension: options.NominalDimension
    batch_size: options.BatchSize
    dataset_size: options.DatasetSize
    delta: Annotated[float, typer.Option(help="Delta of one round.")]
    rounds: Annotated[int, panel_option(options.CLIENT, "Number of rounds, T.")] = 1
    json: Json = False

    @property
    def setting(self) -> NominalSetting:
        from bqsgd._src.paper.nominal import NominalSetting

        return NominalSetting(
            dimension=self.dimension, batch_size=self.batch_size, dataset_size=self.dataset_size, delta=self.delta
        )


@dataclass(frozen=True, kw_only=True)
class _Account(_Nominal, MechanismOptions):
    """The options of `bqsgd paper account`."""


@paper.command("account")
@takes(_Account)
def paper_account(asked: _Account) -> None:
    r"""Print the paper's privacy figures for a mechanism (nominal; not a guarantee).

    Example:
      bqsgd paper account --levels 1 --trials 251 --delta 1e-4 --rounds 1000 \
        --dimension 3000 --batch-size 32 --dataset-size 15000
    """
    from bqsgd._src.paper.nominal import NominalPrivacy
    from bqsgd._src.params import Mechanism

    mechanism = Mechanism(levels=asked.levels, trials=asked.trials)
    nominal = NominalPrivacy.of(mechanism, asked.setting, rounds=asked.rounds)
    fields = {"mechanism": mechanism.to_dict(), "code_count": mechanism.code_count, "nominal": nominal.to_dict()}
    title = f"Nominal privacy of levels {mechanism.levels}, trials {mechanism.trials}"
    answer(title, _nominal_lines(nominal), fields, json=asked.json)


@dataclass(frozen=True, kw_only=True)
class _Plan(_Nominal):
    """The options of `bqsgd paper plan`."""

    bits: Annotated[int, panel_option(_BUDGET, "Most bits per coordinate: a code has at most 2^bits values.")]
    epsilon: Annotated[float, panel_option(_BUDGET, "Nominal epsilon of one round.")]
    rounding: Annotated[
        str,
        panel_option(
            _BUDGET,
            "strict keeps both constraints. nearest rounds as the paper's tables do, and may exceed epsilon.",
            choices=("strict", "nearest"),
        ),
    ] = "strict"


@paper.command("plan")
@takes(_Plan)
def paper_plan(asked: _Plan) -> None:
    r"""Choose levels and trials by the paper's formulas (nominal; not a guarantee).

    Example:
      bqsgd paper plan --bits 8 --epsilon 3.45 --delta 1e-4 \
        --dimension 3000 --batch-size 32 --dataset-size 15000
    """
    from bqsgd._src.mechanism.properties import noise_variance
    from bqsgd._src.paper.nominal import NominalPrivacy, nearest_mechanism, strict_mechanism
    from bqsgd._src.planner.plan import Budget
    from bqsgd._src.planner.statements import message_lines
    from bqsgd._src.privacy.guarantee import as_given

    budget, setting = Budget(bits=asked.bits, epsilon=asked.epsilon, delta=asked.delta), asked.setting
    mechanism = {"strict": strict_mechanism, "nearest": nearest_mechanism}[asked.rounding](budget, setting)
    nominal, variance = NominalPrivacy.of(mechanism, setting, rounds=asked.rounds), noise_variance(mechanism)
    lines = {"mechanism": f"levels {mechanism.levels}, trials {mechanism.trials}"}
    lines |= message_lines(mechanism, variance=variance) | _nominal_lines(nominal)
    wanted = as_given(asked.epsilon)
    if nominal.epsilon_per_round > asked.epsilon:
        lines["rounding"] = f"to the nearest integers exceeds the nominal epsilon {wanted} of the budget"
    figures = {
        "budget": asdict(budget),
        "mechanism": mechanism.to_dict(),
        "variance": variance,
        "nominal": nominal.to_dict(),
        "code_count": mechanism.code_count,
        "bits_per_coordinate": mechanism.bits_per_coordinate,
    }
    title = f"Plan by the paper's formulas for {asked.bits} bits, nominal epsilon {wanted}, delta {asked.delta:g}"
    answer(title, lines, figures, json=asked.json)


@dataclass(frozen=True, kw_only=True)
class _Tradeoffs:
    """The options of `bqsgd paper tradeoffs`."""

    out: Annotated[Path, out_option("Folder to write into; created if missing.")]
    epsilons: Annotated[
        str, panel_option(_CURVES, "Nominal epsilons that are held fixed while the bits vary, comma-separated.")
    ] = "1.72,3.44,8.72"
    fixed_bits: Annotated[
        str, panel_option(_CURVES, "Bits that are held fixed while epsilon varies, comma-separated.")
    ] = "8,10,12"
    bits_range: Annotated[str, panel_option(_CURVES, "Bits over which the curves run, from-to.")] = "6-16"
    epsilon_range: Annotated[str, panel_option(_CURVES, "Nominal epsilons over which the curves run, from-to.")] = (
        "0.5-50"
    )
    delta: Annotated[float, panel_option(_CURVES, "Delta of one round.")] = 1e-4
    nominal_dimension: options.NominalDimension = 3000
    batch_size: options.BatchSize = 32
    dataset_size: options.DatasetSize = 15000
    dimension: Annotated[int, panel_option(_PROBLEM, "Parameters of the model.")] = 61706
    clip: Annotated[float, panel_option(_PROBLEM, "Clip range, C.")] = 0.0015
    rounds: Annotated[int, panel_option(_PROBLEM, "Number of rounds, T.")] = 1000
    learning_rate: Annotated[float, panel_option(_PROBLEM, "Learning rate, at most 1/smoothness.")] = 0.006
    initial_gap: Annotated[
        float, panel_option(_PROBLEM, "Assumed F(start) - F*; log 10 for ten classes and an untrained model.")
    ] = 2.3026
    gradient_variance: Annotated[float, panel_option(_PROBLEM, "Assumed variance of one sample's gradient.")] = 1.0
    json: Json = False


@paper.command("tradeoffs")
@takes(_Tradeoffs)
def paper_tradeoffs(asked: _Tradeoffs) -> None:
    """Draw how the error and the convergence bound change with bits and with nominal epsilon.

    Writes PNG, CSV and JSON files. The defaults are the paper's MNIST setting.

    Example:
      bqsgd paper tradeoffs --out curves
    """
    import csv

    import numpy as np

    from bqsgd._src.paper.nominal import NominalSetting
    from bqsgd._src.paper.tradeoffs import Point, Problem, draw_tradeoffs, trade_off_curves

    out, shared = asked.out, ("batch_size", "dataset_size", "delta")
    setting = NominalSetting(dimension=asked.nominal_dimension, **{name: getattr(asked, name) for name in shared})
    own = (field.name for field in fields(Problem) if field.name != "setting")
    problem = Problem(setting=setting, **{name: getattr(asked, name) for name in own})
    fewest, most = _numbers("bits-range", asked.bits_range, int, ends=True)
    low, high = _numbers("epsilon-range", asked.epsilon_range, float, ends=True)
    held = {
        "epsilon": (_numbers("epsilons", asked.epsilons, float), range(fewest, most + 1)),
        "bits": (np.geomspace(low, high, 41).tolist(), _numbers("fixed-bits", asked.fixed_bits, int)),
    }
    families = {
        f"fixed_{fixed}": trade_off_curves(problem, fixed=fixed, epsilons=epsilons, bits=bits)
        for fixed, (epsilons, bits) in held.items()
    }
    out.mkdir(parents=True, exist_ok=True)
    columns = ["fixed", "value", *(field.name for field in fields(Point))]
    for name, curves in families.items():
        draw_tradeoffs(curves, out / f"{name}.png", delta=asked.delta)
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
    answer("Trade-off curves by the paper's formulas", lines, summary, json=asked.json)


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
