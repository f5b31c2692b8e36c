"""What a pretrained network saw is said beside every epsilon of a run on its features."""

import numpy as np
import pytest
from torch import nn

from bqsgd import data
from bqsgd._src.data.features import FEATURES
from bqsgd._src.data.shares import Shares
from bqsgd._src.reports.page import write_report
from bqsgd._src.run import Run
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.named import NamedTask
from bqsgd._src.tasks.task import Task


@pytest.fixture
def task():
    share = np.eye(8, dtype=np.float32), np.arange(8) % 2
    return Task(make_model=lambda: nn.Linear(8, 2), shares=[share, share], public_data="ImageNet")


def test_guarantee_and_report_name_it(task, tmp_path):
    config = Config.of(clients=2, rounds=1, batch_size=4, levels=10, trials=100, epsilon=1e6)
    with Run.start(task, config, folder=tmp_path / "run", force=True) as run:
        for _ in run.rounds():
            pass
    summary = run.close()
    assert "ImageNet, which a pretrained network saw, is public" in str(summary.guarantee)
    assert "ImageNet" in write_report(tmp_path / "run").read_text()


def test_named_features_say_what_their_network_saw(monkeypatch):
    digits = data.load("digits")
    share = Shares(shares=(digits.train,), test=digits.test, classes=10, input_shape=digits.input_shape)
    monkeypatch.setattr("bqsgd._src.tasks.named.load_shares", lambda *_, **__: share)
    named = {features: NamedTask.of(dataset="digits", features=features) for features in FEATURES}
    said = {features: each.task(Config.of(clients=1)).public_data for features, each in named.items()}
    pretrained = dict.fromkeys(("imagenet", "imagenet-pair"), "ImageNet")
    assert said == {"none": "", "scattering": "", "whitened": ""} | pretrained
