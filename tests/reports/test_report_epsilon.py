"""The report shows every epsilon rounded up: headline, curves, descriptions, settings, TensorBoard."""

import json
import re
from importlib.resources import files

import numpy as np
import pytest

from bqsgd._src.records.folder import read_history
from bqsgd._src.records.tensorboard import scalars
from bqsgd._src.reports._chart import Chart, Quantity, Series, short
from bqsgd._src.reports._figures import epsilon
from bqsgd._src.reports.page import comparison_figures, comparison_page, flatten, run_page


def test_a_label_rounds_up():
    assert short(0.18181637, Quantity.EPSILON) == "0.182"
    assert short(2.9130001, Quantity.EPSILON, 4) == "2.914"
    assert short(1_234_567.0, Quantity.EPSILON) == "1.24e6"
    assert short(float("inf"), Quantity.EPSILON) == "∞"
    for value in np.geomspace(1e-6, 1e7, 500):
        assert float(short(float(value), Quantity.EPSILON)) >= value


def test_a_curve_holds_what_the_script_may_show_as_it_is():
    points = [(float(i), 0.18181637 * i) for i in range(1, 50)]
    chart = Chart(
        key="k", title="t", note="", x_label="x", y_label="y", y_unit=Quantity.EPSILON,
        series=[Series(label="exact epsilon", points=points, colour=0)],
    )  # fmt: skip
    drawing = chart.drawing()
    data = drawing["hover"]["curves"][0]["data"]
    for (_, true), (_, held) in zip(points, data, strict=True):
        assert true <= held <= true * 1.001
        assert float(f"{held:.4g}") == held, "four digits, which is what the script keeps"
    assert "0.182 at 1" in drawing["alt"]
    assert drawing["hover"]["units"][1] == "epsilon"


def test_the_script_knows_every_unit():
    script = (files("bqsgd._src.reports") / "templates" / "page.js").read_text("utf-8")
    known = re.search(r"const show = \{(.*?)\n  \};", script, re.S)[1]
    assert set(re.findall(r"^    (\w+): ", known, re.M)) == {str(unit) for unit in Quantity}


def test_the_pages_use_it(synthetic_run, stated_guarantee):
    folder = synthetic_run(guarantee={**stated_guarantee, "epsilon": 2.9130001})
    run = read_history(folder)
    assert epsilon(run).y_unit is Quantity.EPSILON
    by_key = {chart.key: chart for chart in comparison_figures([run])}
    assert by_key["epsilon"].y_unit is by_key["accuracy-epsilon"].x_unit is Quantity.EPSILON
    assert "ε = 2.914" in comparison_page([run, run])
    text = run_page(run)
    assert "ε = 2.914" in text
    held = [
        row[1]
        for found in re.findall(r'<script type="application/json">(.*?)</script>', text, re.S)
        for hover in [json.loads(found)]
        if hover["units"][1] == "epsilon"
        for row in hover["curves"][0]["data"]
    ]
    exact = [record.epsilon_max for record in run.rounds]
    assert held
    assert held[-1] == pytest.approx(exact[-1], rel=1e-3)
    assert held[0] >= exact[0]
    assert held[-1] >= exact[-1]


def test_an_epsilon_asked_for_is_shown_as_given_among_the_settings():
    assert dict(flatten({"budget": {"epsilon": 0.18181637, "delta": 1e-5}}))["budget.epsilon"] == "0.18181637"
    assert dict(flatten({"budget": {"epsilon": 3.0}}))["budget.epsilon"] == "3"


def test_tensorboard_keeps_float32_that_is_not_below(synthetic_run):
    for record in read_history(synthetic_run()).rounds:
        kept = scalars(record)
        drawn, true = kept["privacy/epsilon_max"], record.epsilon_max
        assert float(np.float32(drawn)) == drawn
        assert true <= drawn <= true * (1 + 2.0**-22)
