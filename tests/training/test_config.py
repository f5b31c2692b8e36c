"""Settings: round trips, one truth for budgets, and refusals that say what to do."""

import dataclasses

import pytest

from bqsgd.errors import InvalidParameter
from bqsgd.params import Mechanism
from bqsgd.persample import L2, BatchMean, Clamp, Dual, Scale
from bqsgd.planner.plan import Budget
from bqsgd.training.config import BudgetChange, Config


def test_toml_round_trip(tmp_path):
    import tomli_w

    changes = (BudgetChange(client=1, from_round=5, epsilon=1.0), BudgetChange(client=2, bits=6))
    config = Config(seed=3, rounds=20, budgets=changes, concentration=0.5, run="a")
    (tmp_path / "config.toml").write_text(tomli_w.dumps(config.to_dict()))
    assert Config.from_toml(tmp_path / "config.toml") == config
    assert Config.from_toml(tmp_path / "config.toml", rounds=30).rounds == 30


def test_every_setting_that_may_be_left_out_is_left_out_by_default():
    # to_dict leaves None out, so None must be what a missing setting means.
    optional = [field.name for field in dataclasses.fields(Config) if "None" in str(field.type)]
    assert len(optional) == 9
    assert all(getattr(Config(), name) is None for name in optional)


def test_budgets_by_client_and_round():
    changes = (
        BudgetChange(client=1, from_round=5, epsilon=1.0),
        BudgetChange(client=1, from_round=8, epsilon=2.0, bits=4),
    )
    config = Config(budgets=changes, rounds=10)
    default = Budget(bits=8, epsilon=3.0, delta=1e-5)
    assert config.budget(client=0, round=9) == config.budget(client=1, round=4) == default
    assert config.budget(client=1, round=5) == Budget(bits=8, epsilon=1.0, delta=1e-5)
    assert config.budget(client=1, round=9) == Budget(bits=4, epsilon=2.0, delta=1e-5)


def test_clip_range_and_mechanism():
    assert Config(clip="dual", clip_norm=2.0, clip_bound=0.5).make_clip() == Dual(norm=2.0, bound=0.5)
    assert Config(clip="l2", clip_norm=2.0, range=None).make_clip() == L2(2.0)
    assert Config(clip="l2", clip_norm=2.0, batch_size=2).encoder_range == 2.0
    assert Config(clip="l2", clip_norm=2.0, batch_size=100).encoder_range == 0.08
    assert Config(clip="dual", clip_norm=2.0, clip_bound=0.05, batch_size=100).encoder_range == 0.05
    assert Config(clip="dual", clip_norm=2.0, clip_bound=0.5, unit="client").encoder_range == 0.5
    assert Config(clip="dual", range=0.3).encoder_range == 0.3
    assert Config(clip="clamp", clip_bound=0.5, range=None).encoder_range == 0.5
    for name, kind in {"clamp": Clamp, "scale": Scale, "batch-mean": BatchMean}.items():
        assert Config(clip=name, clip_bound=0.5).make_clip() == kind(0.5)
    assert Config().mechanism is None
    assert Config(levels=2, trials=251).mechanism == Mechanism(levels=2, trials=251)


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
        ({"clip": "none"}, "clip must be one of"),
        ({"sampling": "sequential"}, "sampling must be one of"),
        ({"unit": "household"}, "unit must be one of"),
        ({"schedule": "step"}, "schedule must be"),
        ({"optimiser": "lion"}, "optimiser must be"),
        ({"average": 1.0}, "average"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"rounds": 0}, "rounds"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"range": float("inf")}, "range"),
        ({"seed": -1}, "seed"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(InvalidParameter, match=message):
        Config(**settings)


def test_unknown_and_mistyped_settings_are_refused(tmp_path):
    with pytest.raises(InvalidParameter, match="unknown setting 'epsilom'"):
        Config.from_dict({"epsilom": 3})
    with pytest.raises(InvalidParameter, match="rounds"):
        Config.from_dict({"rounds": "many"})
    with pytest.raises(InvalidParameter, match="wrong type"):
        Config.from_dict({"budgets": [{"customer": 1}]})
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(InvalidParameter, match="not a readable TOML"):
        Config.from_toml(tmp_path / "bad.toml")
    (tmp_path / "big.toml").write_bytes(b"#" * (1 << 20 | 1))
    with pytest.raises(InvalidParameter, match="larger than"):
        Config.from_toml(tmp_path / "big.toml")
