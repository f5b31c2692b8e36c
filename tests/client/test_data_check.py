"""Faults of a client's own data are named on the client before the first spend, and by `bqsgd check`."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from bqsgd._src.cli.app import main
from bqsgd._src.client.data_check import findings
from bqsgd._src.client.objectives import objective_of
from bqsgd._src.client.samples import reader_of
from bqsgd._src.run import Run
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.task import Task

CONFIG = Config.of(clients=1, rounds=1, batch_size=8, levels=4, trials=800, seed=1)


def good(samples=40):
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def with_nan(x, y):
    x[7, 1] = float("nan")
    return x, y


def with_a_label_too_many(x, y):
    y[5] = 2
    return x, y


def with_a_constant_feature(x, y):
    x[:, 2] = 1.5
    return x, y


def with_a_repeated_row(x, y):
    return torch.cat([x, x[:2]]), torch.cat([y, y[:2]])


FAULTS = {
    "1 of 40 samples hold NaN or infinity (the first is sample 7)": with_nan,
    "1 of 40 labels are not among the model's classes 0 to 1 (the first is sample 5, label 2)": with_a_label_too_many,
    "1 of 3 features are the same in every sample (the first is feature 2)": with_a_constant_feature,
    "2 samples repeat another one in full": with_a_repeated_row,
}


def found(share, delta=1e-5):
    samples = reader_of(share)
    objective = objective_of(CONFIG, nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="none"))
    return list(findings(samples, objective, form=samples.form(), delta=delta))


@pytest.mark.parametrize("says", FAULTS)
def test_every_fault_is_found_and_no_other(says):
    (finding,) = found(FAULTS[says](*good()))
    assert finding.startswith(says)


def test_data_without_faults_have_none_and_delta_is_compared_with_their_number():
    assert found(good()) == []
    (finding,) = found(good(), delta=0.1)
    assert finding.startswith("delta 0.1 is above 1/n = 0.025 for 40 samples")


def test_scores_of_each_place_of_a_text_are_not_taken_for_classes():
    """A language model gives (batch, places, characters): the places are no classes."""
    model = nn.Embedding(20, 20)
    texts = torch.arange(24).reshape(6, 4) % 20
    objective = objective_of(CONFIG, model, lambda scores, true: scores.sum((1, 2)))
    samples = reader_of((texts, texts.roll(1)))
    assert list(findings(samples, objective, form=samples.form(), delta=1e-5)) == []


def test_a_run_warns_on_the_client_before_the_first_spend_and_records_nothing_of_it(caplog, tmp_path):
    task = Task(make_model=lambda: nn.Linear(3, 2), shares=[with_nan(*good())])
    with Run.start(task, CONFIG, folder=tmp_path, force=True) as run:
        list(run.rounds())
    assert "client 0: some samples hold NaN or infinity" in caplog.text
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"NaN" not in path.read_bytes() or path.suffix == ".html", path


def test_the_command_names_the_faults_and_exits_with_1(tmp_path, monkeypatch, capsys):
    x, y = with_a_label_too_many(*with_nan(*good()))
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    (tmp_path / "checked_task.py").write_text(
        "import bqsgd, numpy as np\nfrom torch import nn\nheld = np.load('mine.npz')\n"
        "task = bqsgd.Task(make_model=lambda: nn.Linear(3, 2), shares=[(held['x'], held['y'])])\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["check", "checked_task:task", "--json"]) == 1
    out, err = capsys.readouterr()
    assert [line[:15] for line in json.loads(out)["clients"]["client 0"]] == ["1 of 40 samples", "1 of 40 labels "]
    assert "private" in err


def test_the_command_is_brief_about_sound_clients_and_refuses_a_delta_that_is_none(tmp_path, monkeypatch, capsys):
    (tmp_path / "sound_task.py").write_text(
        "import bqsgd, numpy as np\nfrom torch import nn\n"
        "held = [(np.eye(3, dtype=np.float32) + n, np.arange(3) % 2) for n in range(200)]\n"
        "task = bqsgd.Task(make_model=lambda: nn.Linear(3, 2), shares=held)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["check", "sound_task:task"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1:] == ["  result  nothing found in the data of 200 of 200 clients"]
    assert main(["check", "sound_task:task", "--delta", "3"]) == 2
    assert "delta must be above 0 and below 1" in capsys.readouterr().err
