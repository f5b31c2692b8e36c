"""What docs/gate.md says about Flower's own mods and strategies, and the example that starts from its quickstart."""

import hashlib
import importlib
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flower_cases import app_of, model, two_nodes
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp import strategy as strategies

import bqsgd
from bqsgd.integrations.flower import SummedUpdates
from loop_grid import LoopGrid

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "flower_gate"
THEIRS = [ROOT / "examples" / name for name in ("flower_quickstart", "nvflare_hello_pt")]


def test_flowers_local_mod_never_stops_and_lets_metrics_pass(tmp_path):
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=1.0, delta=1e-5)
    grid = LoopGrid(app_of(mod), {}, two_nodes(tmp_path)[:1])
    content = RecordDict({"arrays": ArrayRecord(model().state_dict()), "config": ConfigRecord()})
    for _ in range(20):
        (reply,) = grid.send_and_receive([Message(content, dst_node_id=1000, message_type="train")])
        assert reply.content["metrics"]["train_loss"] == 0.123
    assert not any("ledger" in name or "spent" in name for name in vars(mod))


def test_only_fixed_clipping_takes_an_accountant():
    for name, accounted in {"FixedClipping": True, "AdaptiveClipping": False}.items():
        for side in ("ServerSide", "ClientSide"):
            made = getattr(strategies, f"DifferentialPrivacy{side}{name}")
            assert ("accountant" in inspect.signature(made).parameters) == accounted


def patched(folder, diff):
    app = folder / "app"
    shutil.copytree(EXAMPLE, app)
    subprocess.run(["patch", "-s", "-p1", "-i", EXAMPLE / diff], cwd=app, check=True)
    return app


@pytest.fixture
def imported(monkeypatch):
    """Imports the example's modules from a folder, and forgets them afterwards."""

    def load(app, name):
        monkeypatch.syspath_prepend(str(app))
        return importlib.import_module(f"quickstart.{name}")

    yield load
    for name in [name for name in sys.modules if name.split(".")[0] == "quickstart"]:
        del sys.modules[name]


@pytest.mark.parametrize("diff", ["private_training.diff", "private_updates.diff"])
def test_the_example_with_its_diff_counts_what_leaves(tmp_path, imported, diff):
    app = patched(tmp_path, diff)
    node = {
        "client": 0, "units": "client", "epsilon": 10.0, "ledger-folder": str(tmp_path / "site"), "partition-id": 0,
        "num-partitions": 2, "ledger": str(tmp_path / "train.ledger"),
    }  # fmt: skip
    config = {"batch-size": 300, "local-epochs": 1, "study-rounds": 2, "num-server-rounds": 2}
    grid = LoopGrid(imported(app, "client_app").app, config, [node])
    content = RecordDict(
        {"arrays": ArrayRecord(imported(app, "task").Net().state_dict()), "config": ConfigRecord({"lr": 0.5})}
    )
    (reply,) = grid.send_and_receive([Message(content, dst_node_id=1000, message_type="train")])
    assert sorted(reply.content) == ["bqsgd.frame.v1", "fields", "metrics", "update"]
    ledger = tmp_path / ("train.ledger" if "training" in diff else "site/client-0000.ledger")
    with bqsgd.Ledger(ledger) as held:
        assert held.guarantee().epsilon == reply.content["metrics"]["epsilon"] <= 8
    assert imported(app, "server_app").app is not None


def test_the_example_with_secure_sums_is_one_study_on_both_sides(tmp_path, imported):
    app = patched(tmp_path, "secure_sums.diff")
    study = imported(app, "task").STUDY
    SummedUpdates(**study)
    assert "OpenSums" in (app / "quickstart" / "server_app.py").read_text()
    assert imported(app, "client_app").app is not None


@pytest.mark.parametrize("folder", THEIRS, ids=lambda folder: folder.name)
def test_the_frameworks_own_quickstarts_are_unchanged_and_each_diff_makes_them_private(folder, tmp_path):
    published = dict(re.findall(r"^    ([0-9a-f]{64})  (\S+)$", (folder / "ORIGIN.md").read_text(), re.MULTILINE))
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in (".py", ".toml")}
    assert set(published.values()) == files
    for digest, name in published.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    for kind, names in {"training": ("make_private(", "ThinUpdates"), "updates": ("PrivateUpdates",)}.items():
        copy = shutil.copytree(folder, tmp_path / kind)
        subprocess.run(["patch", "-s", "-p1", "-i", folder / f"private_{kind}.diff"], cwd=copy, check=True)
        code = "".join(path.read_text() for path in sorted(copy.rglob("*.py")))
        compile(code, kind, "exec")
        assert all(name in code for name in (*names, "OpenUpdates"))


def test_the_lines_that_the_page_shows_are_those_of_the_diffs():
    page = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")
    diffs = "".join(path.read_text() for path in (*EXAMPLE.glob("*.diff"), *THEIRS[0].glob("*.diff")))
    training = page.split("## Private training")[1].split("## Private updates")[0]
    lines = [line for block in re.findall(r"```diff\n(.*?)```", training, re.DOTALL) for line in block.splitlines()]
    assert len(lines) >= 5
    assert [line for line in lines if line not in diffs] == []
