"""Settings: groups and names agree, files round-trip, and refusals say what to do."""

import dataclasses
import json

import pytest
import tomli_w

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import Mechanism
from bqsgd._src.persample import L2, BatchMean, Clamp, Dual, Normalize, PerLayer, Scale
from bqsgd._src.planner.plan import Budget
from bqsgd._src.settings.config import CONFIG_GROUPS, Config
from bqsgd._src.settings.groups import BudgetChange
from bqsgd._src.storage import read_toml
from bqsgd._src.tasks.named import NamedTask, stored_task


def test_toml_round_trip(tmp_path):
    changes = (BudgetChange(client=1, from_round=5, epsilon=1.0), BudgetChange(client=2, bits=6))
    config = Config.of(seed=3, rounds=20, budgets=changes, clip="l2", clip_norm=2.0, run="a")
    (tmp_path / "config.toml").write_text(tomli_w.dumps(config.to_dict()))
    assert Config.from_dict(read_toml(tmp_path / "config.toml")) == config


def test_every_setting_has_one_name_and_one_group():
    names = [name for group in (NamedTask, *CONFIG_GROUPS.values()) for name in group.settings()]
    assert len(names) == len(set(names))
    assert set(Config().flat()) == {name for group in CONFIG_GROUPS.values() for name in group.settings()}
    assert Config.of(**Config().flat()) == Config()
    for group in (NamedTask, *CONFIG_GROUPS.values()):
        for name, each in group.settings().items():
            assert each.metadata["help"].endswith("."), name


def test_every_setting_that_may_be_left_out_is_left_out_by_default():
    # to_dict leaves None out, so None must be what a missing setting means.
    for group in (NamedTask, *CONFIG_GROUPS.values()):
        for each in dataclasses.fields(group):
            if "None" in str(each.type):
                assert each.default is None


def test_but_changes_what_is_named_and_nothing_else():
    config = Config.of(clients=7, epsilon=2.0)
    changed = config.but(epsilon=1.0, clip="l2")
    assert changed.flat() == config.flat() | {"epsilon": 1.0, "clip": "l2"}
    assert config.privacy.epsilon == 2.0


def test_budgets_by_client_and_round():
    changes = (
        BudgetChange(client=1, from_round=5, epsilon=1.0),
        BudgetChange(client=1, from_round=8, epsilon=2.0, bits=4),
    )
    privacy = Config.of(budgets=changes, rounds=10).privacy
    default = Budget(bits=8, epsilon=3.0, delta=1e-5)
    assert privacy.budget(client=0, round=9) == privacy.budget(client=1, round=4) == default
    assert privacy.budget(client=1, round=5) == Budget(bits=8, epsilon=1.0, delta=1e-5)
    assert privacy.budget(client=1, round=9) == Budget(bits=4, epsilon=2.0, delta=1e-5)


def test_clip_range_and_mechanism():
    assert Config.of(clip="dual", clip_norm=2.0, clip_bound=0.5).clip.make() == Dual(norm=2.0, bound=0.5)
    assert Config.of(clip="l2", clip_norm=2.0, range=None).clip.make() == L2(2.0)
    assert Config.of(clip="normalize", clip_norm=2.0).clip.make() == Normalize(2.0)
    assert Config.of(clip="per-layer", clip_norm=2.0).clip.make() == PerLayer(L2(2.0))
    assert Config.of(clip="per-layer", clip_norm=2.0, one_in=4).message_clip == PerLayer(L2(1.0))
    assert all(Config.of(clip=word, one_in=4).rotates for word in ("l2", "dual", "normalize", "per-layer"))
    assert not any(Config.of(clip=word, one_in=4).rotates for word in ("clamp", "scale", "batch-mean"))
    assert Config.of(clip="l2", clip_norm=2.0, batch_size=2).range == 2.0
    assert Config.of(clip="per-layer", clip_norm=2.0, batch_size=2).range == 2.0
    assert Config.of(clip="l2", clip_norm=2.0, batch_size=100).range == 0.08
    assert Config.of(clip="dual", clip_norm=2.0, clip_bound=0.05, batch_size=100).range == 0.05
    assert Config.of(clip="dual", clip_norm=2.0, clip_bound=0.5, unit="client").range == 0.5
    assert Config.of(clip="dual", range=0.3).range == 0.3
    assert Config.of(clip="clamp", clip_bound=0.5, range=None).range == 0.5
    for name, kind in {"clamp": Clamp, "scale": Scale, "batch-mean": BatchMean}.items():
        assert Config.of(clip=name, clip_bound=0.5).clip.make() == kind(0.5)
    assert Config().privacy.mechanism is None
    assert Config.of(levels=2, trials=251).privacy.mechanism == Mechanism(levels=2, trials=251)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_steps": 2}, "no claim about one sample"),
        ({"unit": "client", "clip": "batch-mean"}, "whole update is clipped"),
        ({"levels": 2}, "both levels and trials"),
        ({"levels": 2, "trials": 3, "budgets": (BudgetChange(client=0),)}, "need planning"),
        ({"budgets": (BudgetChange(client=9),)}, "budgets.client"),
        ({"aggregation": "krum", "byzantine": 1, "clients": 4}, "never meet"),
        ({"quorum": 5, "clients": 4}, "never meet"),
        ({"clients": 100_001}, "clients must be from 1 to 100000"),
        ({"clip": "none"}, "clip must be one of"),
        ({"sampling": "sequential"}, "sampling must be one of"),
        ({"unit": "household"}, "unit must be one of"),
        ({"schedule": "step"}, "schedule must be"),
        ({"optimizer": "lion"}, "optimizer must be"),
        ({"average": 1.0}, "average"),
        ({"average": "much"}, "average must be a number, got 'much'"),
        ({"average": False}, "average must be a number, got False"),
        ({"run": 3}, "run must be a text, got 3"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"epsilon": None}, "epsilon must be given"),
        ({"delta": 1.0}, "delta"),
        ({"rounds": 0}, "rounds"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"private_metrics": "yes"}, "private_metrics must be true or false, got 'yes'"),
        ({"range": float("inf")}, "range"),
        ({"range": 1e101}, "range must be from 1e-100 to 1e"),
        ({"range": 1e-101}, "range must be from 1e-100 to 1e"),
        ({"seed": -1}, "seed"),
        ({"epsilom": 3}, "unknown setting 'epsilom'"),
        ({"budgets": [{"customer": 1}]}, "wrong type"),
        ({"budgets": 3}, "wrong type"),
        ({"budgets": [{"client": 0, "from_round": "later"}]}, "budgets.from_round must be an integer"),
        ({"budgets": [{"client": 1, "from_round": None}, {"client": 1}]}, "budgets.from_round must be an integer"),
        ({"budgets": [{"client": "1"}]}, "budgets.client must be an integer"),
        ({"budgets": [{"client": 1, "from_round": 5, "epsilon": "much"}]}, "epsilon must be a positive"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(InvalidParameter, match=message):
        Config.of(**settings)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"privacy": {"epsilom": 3}}, r"unknown setting 'epsilom' in \[privacy\]"),
        ({"batch_size": 3}, r"belongs in the table \[privacy\]"),
        ({"weather": {}}, "unknown table or setting 'weather'"),
        ({"privacy": 3}, "must be a table"),
        ({"run": {"rounds": "many"}}, "rounds"),
    ],
)
def test_a_file_with_unknown_misplaced_or_mistyped_settings_is_refused(tables, message):
    with pytest.raises(InvalidParameter, match=message):
        Config.from_dict(tables)


@pytest.mark.parametrize("table", [{"data_folder": 3}, {"model": ["cnn"]}, {"dataset": True}])
def test_a_data_table_with_a_value_of_another_type_is_refused(table):
    with pytest.raises(InvalidParameter, match=f"{next(iter(table))} must be a text"):
        stored_task(table)


def test_an_unreadable_file_is_refused(tmp_path):
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(InvalidParameter, match="not a readable TOML"):
        read_toml(tmp_path / "bad.toml")
    (tmp_path / "big.toml").write_bytes(b"#" * (1 << 20 | 1))
    with pytest.raises(InvalidParameter, match="not a readable TOML"):
        read_toml(tmp_path / "big.toml")


def test_every_setting_is_bound_into_the_masks_of_sums_or_changes_no_value_that_a_client_adds():
    """A server that could change an unbound one for all clients but one would see that client stand out in the sum."""
    not_values = {
        # What is counted and how much noise is added; the agreement of a sum binds trials, colluders and the seed.
        "epsilon", "delta", "bits", "trials", "budgets", "seed", "private_metrics", "reserve_rounds", "turns",
        "secure", "dropouts", "colluders", "key_rounds", "window", "roster", "roster_digest", "identity",
        # The digest of a group's roster, and so the session of its sums, holds their number.
        "groups",
        # Who is asked, how bytes are carried, and threads.
        "clients", "cohort", "ask", "sizes", "coding", "workers", "deadline_seconds", "quorum", "down_bits", "run",
        "rounds", "evaluate_every", "checkpoint_every", "patience",
        # What the server does with the sum; it decides the next model, which is bound by its digest.
        "aggregation", "byzantine", "weights", "optimizer", "learning_rate", "momentum", "subtract_noise", "schedule",
        "average",
    }  # fmt: skip
    bound = set(json.loads(Config().summed))
    assert bound.isdisjoint(not_values)
    assert bound | not_values == set(Config().flat())
