"""`bqsgd tradeoffs`: the paper's privacy-communication-convergence curves as PNG, CSV and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bqsgd.cli.output import Json, emit, to_json
from bqsgd.cli.privacy_fields import NOMINAL_NOTE


def tradeoffs(
    out: Annotated[Path, typer.Option(help="Directory to write into; made if missing.", file_okay=False)],
    epsilons: Annotated[
        str, typer.Option(help="Nominal epsilons that are held fixed, comma-separated.")
    ] = "1.72,3.44,8.72",
    fixed_bits: Annotated[str, typer.Option(help="Bits that are held fixed, comma-separated.")] = "8,10,12",
    bits_range: Annotated[str, typer.Option(help="Bits that vary, from-to.")] = "6-16",
    epsilon_range: Annotated[str, typer.Option(help="Nominal epsilons that vary, from-to.")] = "0.5-50",
    delta: Annotated[float, typer.Option(help="Delta of one round.")] = 1e-4,
    nominal_dim: Annotated[int, typer.Option(help="Dimension put into Lemma 1 (the paper's d_P).")] = 3000,
    dim: Annotated[int, typer.Option(help="Number of model parameters, for the bound of Theorem 1.")] = 61706,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 32,
    dataset_size: Annotated[int, typer.Option(help="Samples one client holds.")] = 15000,
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
    """Draw how error, levels, trials and the convergence bound move with bits and with epsilon (published formulas).

    The defaults are the paper's MNIST setting.
    """
    import csv
    from dataclasses import asdict, fields

    import numpy as np

    from bqsgd.planner.tradeoffs import Curve, Point, Problem, curves_over_bits, curves_over_epsilon
    from bqsgd.privacy.nominal import NominalSetting
    from bqsgd.reports.tradeoff_figures import draw

    setting = NominalSetting(dimension=nominal_dim, batch_size=batch, dataset_size=dataset_size, delta=delta)
    problem = Problem(
        setting=setting,
        dimension=dim,
        clip=clip,
        rounds=rounds,
        clients=clients,
        learning_rate=learning_rate,
        initial_gap=initial_gap,
        gradient_variance=gradient_variance,
    )
    low_bits, high_bits = (int(value) for value in _pair("bits-range", bits_range))
    low, high = _pair("epsilon-range", epsilon_range)
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
        draw(curves, out / f"{name}.png", delta=delta)
        with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            columns = [field.name for field in fields(Point)]
            writer.writerow(["fixed", "value", *columns])
            for curve in curves:
                for point in curve.points:
                    writer.writerow([curve.fixed, curve.value, *(getattr(point, column) for column in columns)])
        written += [str(out / f"{name}.png"), str(out / f"{name}.csv")]
    record = {
        "caveat": "nominal epsilon: as published; not a guarantee",
        "problem": asdict(problem),
        **{name: [curve.to_dict() for curve in curves] for name, curves in families.items()},
    }
    (out / "tradeoffs.json").write_text(to_json(record) + "\n", encoding="utf-8")
    written.append(str(out / "tradeoffs.json"))
    points = [point for curves in families.values() for curve in curves for point in curve.points]
    summary = {
        "written": written,
        "points": len(points),
        "infeasible_points": sum(point.levels is None for point in points),
        "nominal_caveat": "as published; not a guarantee",
    }
    emit(summary, as_json=json, title="Trade-off curves", notes=(NOMINAL_NOTE,))


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--{option} must be numbers separated by commas, got {text!r}") from None


def _whole(option: str, value: float) -> int:
    if value != int(value):
        raise typer.BadParameter(f"--{option} must be whole numbers, got {value:g}")
    return int(value)


def _pair(option: str, text: str) -> tuple[float, float]:
    low, _, high = text.partition("-")
    try:
        pair = float(low), float(high)
    except ValueError:
        raise typer.BadParameter(f"--{option} must read from-to, such as 6-16, got {text!r}") from None
    if not 0 < pair[0] <= pair[1] < 1e9:
        raise typer.BadParameter(f"--{option} must rise from a positive number, got {text!r}")
    return pair
