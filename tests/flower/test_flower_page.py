"""docs/coming_from_flower.md: both apps of the page run, over a grid without a network."""

import json
import re
import sys
import tomllib
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="needs the extra `flower`")

from flwr.app import ArrayRecord, Context, RecordDict

from loop_grid import LoopGrid

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_flower.md"
BLOCK = re.compile(r'```(?:python|toml) title="([\w.]+)"\n(.*?)```', re.S)


def make_net():
    return nn.Linear(5, 2)


def load_my_files(folder):
    rng = np.random.default_rng(int(folder))
    inputs = rng.normal(size=(400, 5)).astype(np.float32)
    return inputs, (inputs.sum(axis=1) > 0).astype(np.int64)


def fit(model, inputs, labels):
    optimiser = torch.optim.SGD(model.parameters(), lr=5.0)
    nn.functional.cross_entropy(model(torch.from_numpy(inputs)), torch.from_numpy(labels)).backward()
    optimiser.step()


@pytest.fixture
def app(monkeypatch):
    """The files of one side of the page, run as the package `my_app`: file name -> its names."""

    def run(side):
        data = types.ModuleType("my_app.data")
        data.Net, data.fit, data.load_my_files, data.load_test_data = (
            make_net,
            fit,
            load_my_files,
            lambda: load_my_files("9"),
        )
        monkeypatch.setitem(sys.modules, "my_app", types.ModuleType("my_app"))
        monkeypatch.setitem(sys.modules, "my_app.data", data)
        files = {}
        for name, text in BLOCK.findall(side):
            if name.endswith(".toml"):
                files[name] = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
                continue
            module = types.ModuleType(f"my_app.{name.removesuffix('.py')}")
            exec(compile(text, name, "exec"), module.__dict__)
            monkeypatch.setitem(sys.modules, module.__name__, module)
            files[name] = module
        return files

    return run


def sides():
    flower, ours = PAGE.read_text(encoding="utf-8").split("**bqsgd**")
    return flower, ours


def test_the_side_of_flower_trains(app):
    files = app(sides()[0])
    settings = {"rounds": 2}
    grid = LoopGrid(files["client_app.py"].app, settings, [{"data-folder": str(client)} for client in range(4)])
    context = Context(1, 1, {}, RecordDict(), settings)
    files["server_app.py"].app(grid, context)
    sent = [message for message in grid.sent if "arrays" in message.content]
    assert len(sent) >= 8
    assert isinstance(sent[-1].content["arrays"], ArrayRecord)


def test_our_side_trains_and_keeps_the_budget(app, tmp_path):
    files = app(sides()[1])
    settings = files["pyproject.toml"] | {"rounds": 3, "folder": str(tmp_path / "server"), "run": "page"}
    nodes = [
        {"client": client, "data-folder": str(client), "ledger-folder": str(tmp_path / f"{client}")}
        for client in range(4)
    ]
    grid = LoopGrid(files["client_app.py"].app, settings, nodes)
    files["server_app.py"].app(grid, Context(1, 1, {}, RecordDict(), settings))
    summary = json.loads((tmp_path / "server" / "summary.json").read_text(encoding="utf-8"))
    assert summary["rounds"] == 3
    assert 0 < summary["guarantee"]["epsilon"] <= files["pyproject.toml"]["epsilon"]
    assert [path.name for path in sorted(tmp_path.rglob("*.ledger"))] == [
        f"client-{client:04}.ledger" for client in range(4)
    ]


def test_the_page_names_settings_that_exist():
    from bqsgd._src.tasks.named import ALL_GROUPS

    known = {name for group in ALL_GROUPS.values() for name in group.settings()}
    table = PAGE.read_text(encoding="utf-8").split("## What is called what")[1].split("## What is promised")[0]
    ours = " ".join(row.strip("|").split("|")[1] for row in table.splitlines() if row.startswith("| "))
    assert len(named := re.findall(r"`([a-z_]+)(?: = [^`]*)?`", ours)) >= 8
    assert set(named) - known == set()


def test_flower_counts_one_message_in_its_local_noise():
    """What the table says of `LocalDpMod`: the deviation is that of one Gaussian mechanism, whatever the rounds."""
    import inspect

    from flwr.clientapp.mod import LocalDpMod

    assert set(inspect.signature(LocalDpMod).parameters) == {"clipping_norm", "sensitivity", "epsilon", "delta"}
