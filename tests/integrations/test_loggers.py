"""Loggers of steps and rounds, in the real MLflow, Weights & Biases and TensorBoard."""

import csv
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bqsgd
from bqsgd._src.errors import UnsafeFile
from bqsgd._src.records.record import RoundRecord
from bqsgd.integrations.loggers import CsvLog, EventLog, MlflowLog, WandbLog

ROUND = RoundRecord(round=3, test_accuracy=0.5, epsilon_max=0.1, bytes_up=17)


@pytest.fixture
def steps(tmp_path):
    """Runs four private steps, and returns the guarantee after them."""

    def run(log):
        model = nn.Linear(4, 2)
        loader = DataLoader(TensorDataset(torch.randn(32, 4), torch.arange(32) % 2), batch_size=8)
        private = bqsgd.make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss_fn=nn.CrossEntropyLoss(reduction="none"),
            epsilon=8, delta=1e-5, epochs=1, ledger=tmp_path / "me.ledger", range=0.5, on_step=log,
            mechanism=bqsgd.Mechanism(levels=1, trials=2000),
        )  # fmt: skip
        with private:
            for batch in private.loader:
                private.step(batch)
            return private.guarantee()

    return run


def test_csv_rows_are_what_is_public_and_add_to_a_file_that_is_there(steps, tmp_path):
    path = tmp_path / "steps.csv"
    guarantee = steps(CsvLog(path, every=3))
    CsvLog(path)(ROUND)
    rows = list(csv.DictReader(path.read_text("utf-8").splitlines()))
    assert [row["step"] for row in rows[:3]] == ["3", "4", "3"]  # every third, and the last
    assert float(rows[1]["value"]) == guarantee.epsilon
    assert {row["name"] for row in rows[:2]} == {"privacy/epsilon"}
    assert {"name": "test/accuracy", "step": "3", "value": "0.5"} in rows
    assert float(next(row["value"] for row in rows if row["name"] == "privacy/epsilon_max")) >= 0.1
    link = tmp_path / "link.csv"
    link.symlink_to(path)
    with pytest.raises(UnsafeFile):
        CsvLog(link)
    with pytest.raises(bqsgd.InvalidParameter, match="a step or a round"):
        CsvLog(path)({"loss": 0.3})
    with pytest.raises(bqsgd.InvalidParameter, match="every"):
        CsvLog(path, every=0)


def test_tensorboard_gets_steps_and_rounds(steps, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventLog(tmp_path / "events", every=2)
    guarantee = steps(log)
    log(ROUND)
    log.close()
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    found = events.Scalars("privacy/epsilon")
    assert [event.step for event in found] == [2, 4]
    assert guarantee.epsilon <= found[-1].value <= guarantee.epsilon * (1 + 1e-6)
    assert events.Scalars("test/accuracy")[0].step == 3


@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_metrics_and_the_guarantee_in_words(steps, tmp_path):
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.create_experiment("private", artifact_location=str(tmp_path))
    mlflow.set_experiment("private")
    with mlflow.start_run() as run:
        guarantee = steps(MlflowLog(every=4))
        MlflowLog()(ROUND)
    kept = mlflow.get_run(run.info.run_id).data
    assert kept.metrics["privacy/epsilon"] == guarantee.epsilon
    assert kept.metrics["bytes/up"] == 17
    assert kept.tags["guarantee"] == str(guarantee)


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_keeps_an_offline_run(steps, tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    with wandb.init(mode="offline", dir=tmp_path, project="private", settings=wandb.Settings(silent=True)) as run:
        guarantee = steps(WandbLog(run, every=4))
        assert run.summary["guarantee"] == str(guarantee)
        WandbLog(run)(RoundRecord(round=9, bytes_up=1717))
    wandb.teardown()  # the process that writes the file ends
    (path,) = Path(tmp_path).glob("wandb/offline-run-*/*.wandb")
    kept = path.read_bytes()
    assert repr(guarantee.epsilon).encode() in kept
    assert b"bytes/up" in kept
    assert b"1717" in kept
