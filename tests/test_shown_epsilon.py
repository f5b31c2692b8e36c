"""Every epsilon that is shown is rounded up, by one function; JSON keeps the whole number."""

import ast
import json
import math
import re
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bqsgd._src.errors import BudgetExhausted, Infeasible
from bqsgd._src.flower.settings import Node
from bqsgd._src.ledger import Ledger
from bqsgd._src.params import Mechanism
from bqsgd._src.planner.plan import Budget
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.privacy.guarantee import Guarantee, as_given, rounded_down, rounded_up
from bqsgd._src.release import Relation, Release, Scheme, Terms, Trust, Unit
from bqsgd._src.settings.client_plan import plan_release
from bqsgd._src.settings.config import Config

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path for folder in ("src/bqsgd", "experiments", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)
ROUNDING = {"rounded_up", "rounded_down", "as_given"}
"""Bounds from above, bounds from below, and figures that somebody asked for (budgets)."""
FORMATTING = {"round", "format", "short"}


def names_epsilon(node: ast.AST) -> bool:
    """Whether a value called epsilon goes into this expression other than through the rounding functions."""
    match node:
        case ast.Call(func=ast.Name(id=name)) if name in ROUNDING:
            return False
        case ast.Name(id=name) | ast.Attribute(attr=name):
            own = "epsilon" in name.lower() and not name.isupper()  # capitals: a constant of ours, a round number
        case ast.Constant(value=str(name)):
            own = "epsilon" in name and " " not in name
        case _:
            own = False
    inner = ast.iter_child_nodes(node)
    return own or any(names_epsilon(child) for child in inner)


def offences(source: str) -> list[int]:
    """Lines that round an epsilon in a way of their own."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FormattedValue(value=value, format_spec=ast.JoinedStr(values=[_, *_])):
                bad = names_epsilon(value)
            case ast.Call(func=ast.Name(id="short"), args=args, keywords=keywords):
                unit = [ast.unparse(argument) for argument in args] + [ast.unparse(word.value) for word in keywords]
                bad = any(names_epsilon(argument) for argument in args[:1]) and "Quantity.EPSILON" not in unit
            case ast.Call(func=ast.Name(id=name), args=[value, _, *_]) if name in FORMATTING:
                bad = names_epsilon(value)
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str()), attr="format"), args=args):
                bad = any(names_epsilon(argument) for argument in args)
            case ast.BinOp(op=ast.Mod(), left=ast.Constant(value=str()), right=right):
                bad = names_epsilon(right)
            case _:
                bad = False
        if bad:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_epsilon_is_rounded_in_a_way_of_its_own(path):
    assert offences(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        'f"{epsilon:.3g}"',
        'f"{record.epsilon_max:g}"',
        "f\"{row['guarantee']['epsilon']:.3f}\"",
        'f"{before.epsilon(delta):.4g}"',
        'f"{100 * epsilon:8}"',
        "round(found.epsilon, 3)",
        'format(epsilon, ".3f")',
        '"%.3g" % epsilon',
        '"{:.3g}".format(self.epsilon)',
        "short(claim.epsilon)",
        "short(nominal.epsilon, digits=4)",
    ],
)
def test_the_test_finds_what_it_looks_for(line):
    assert offences(line) == [1]


def test_the_test_lets_the_right_ways_pass():
    right = ['f"{rounded_up(epsilon):10}"', 'f"{epsilon}"', "short(claim.epsilon, Quantity.EPSILON)", 'f"{delta:g}"']
    assert [line for line in right if offences(line)] == []


@given(st.floats(min_value=1e-300, max_value=1e300), st.integers(1, 12))
def test_rounding_never_crosses_the_bound_and_keeps_its_digits(value, digits):
    above, below, exact = Decimal(rounded_up(value, digits)), Decimal(rounded_down(value, digits)), Decimal(repr(value))
    assert below <= exact <= above
    assert above - below <= exact * Decimal(10) ** (1 - digits)
    assert len(above.normalize().as_tuple().digits) <= digits


def test_what_is_no_number_of_digits():
    assert [rounded_up(value) for value in (0.0, math.inf)] == ["0", "inf"]
    assert rounded_up(12_345.6) == "12350"
    assert rounded_up(1.2345e300) == "1.235e+300"
    assert [as_given(value) for value in (3, 0.18181637, 1e-5)] == ["3", "0.18181637", "1e-05"]


def test_a_guarantee_in_words():
    stated = Guarantee(
        epsilon=0.18181637, delta=1e-5, relation=Relation.ADD_REMOVE, unit=Unit.SAMPLE, trust=Trust.EACH_CLIENT,
        sampling="all", method="a proof", delta_floor=0.0,
    )  # fmt: skip
    assert str(stated).startswith("epsilon 0.1819 at delta 1e-05")
    assert stated.to_dict()["epsilon"] == 0.18181637


def test_a_plan_that_fails_names_what_was_spent():
    terms = Terms.of_batch(dimension=6, dataset_size=60, batch_size=20, scheme=Scheme.NONE)
    seen = []
    for trials in range(2000, 2008):
        release = Release(mechanism=Mechanism(levels=4, trials=trials), terms=terms)
        spent = Accountant().compose(release, 3).epsilon(1e-5)
        with pytest.raises(Infeasible) as caught:
            plan_release(terms, Budget(bits=12, epsilon=spent / 2, delta=1e-5), rounds=5, spent=((release, 3),))
        words = str(caught.value).split()
        assert spent <= float(words[words.index("epsilon") + 1]) <= spent * 1.0011
        assert float(words[-1]) == spent / 2  # the budget as given
        seen.append(spent)
    assert any(float(f"{figure:.4g}") < figure for figure in seen), "to the nearest would show one too small"


def test_a_spent_budget_is_named_as_given(tmp_path):
    release = Release(
        mechanism=Mechanism(levels=4, trials=200),
        terms=Terms.of_batch(dimension=6, dataset_size=60, batch_size=20, scheme=Scheme.NONE),
    )
    with (
        Ledger.open(tmp_path / "one", client=1, budget_epsilon=0.00010000049, budget_delta=1e-5) as ledger,
        pytest.raises(BudgetExhausted, match=r"budget of client 1 \(epsilon 0\.00010000049 at delta"),
    ):
        ledger.spend(release, run="a", round=0, seeded=False)


def test_a_node_names_both_limits_as_given():
    node = Node.of({"client": 0, "epsilon": 1.00000049})
    refused = node.refusal(Config.of(clients=1, epsilon=1.0000005, delta=1e-5), run="r", roster=None)
    assert refused == "the run asks for epsilon 1.0000005, this node allows 1.00000049"


def test_the_page_of_the_paper_settings_bounds_from_the_right_side():
    results = json.loads((ROOT / "experiments" / "results" / "privacy_table.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (?:Fashion-)?MNIST, .*\| ([0-9.]+) \(delta [0-9.]+\) \|.*\| ≥ ([0-9.]+) \|$", text, re.M)
    assert len(table) == len(results["rows"])
    for row, (total, lower) in zip(results["rows"], table, strict=True):
        assert row["nominal"]["epsilon_total"] <= float(total) <= row["nominal"]["epsilon_total"] * 1.0011
        audited = row["clips"]["per-sample clamp"]["one_message"]["epsilon_lower"]
        assert audited * 0.99 <= float(lower) <= audited


def test_the_page_of_planted_faults_bounds_from_the_right_side():
    results = json.loads((ROOT / "experiments" / "results" / "audit_faults.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    for name, row in (results["faults"] | results["honest"]).items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {name} |"))
        lower, claimed, delta, delta_lower = map(
            float, re.search(r"≥ ([0-9.e-]+) \| epsilon ([0-9.e-]+): ([0-9.e-]+), ≥ ([0-9.e-]+) \|", line).groups()
        )
        point = row["point"]
        assert lower <= row["epsilon_lower"]
        assert claimed >= point["claimed_epsilon"]
        assert delta >= point["delta"]
        assert delta_lower <= point["delta_lower"]


def test_the_pages_of_trained_rows_round_up():
    for name in ("table2", "table3"):
        fields = json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
        for row in fields["rows"]:
            found = re.search(
                rf"\| {row['levels']}, {row['trials']} \|[^\n]*\| {row['published_epsilon']}; ([0-9.]+) \(δ", text
            )
            exact = row["nominal"]["epsilon_per_round"]
            assert exact <= float(found[1]) <= exact * 1.0002
