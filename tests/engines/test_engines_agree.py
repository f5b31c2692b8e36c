"""With one seed, every engine sends the same frames (of subsets) and ends with the same model, bit for bit."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from digits_worker import digits_task
from distributed_worker import recording

from bqsgd._src.run import Run
from bqsgd._src.settings.config import Config
from distributed_processes import lines, run_ranks

SETTINGS = {
    "clients": 4, "rounds": 5, "batch_size": 32, "levels": 17, "trials": 220, "epsilon": 100.0,
    "seed": 11, "coding": "entropy", "optimizer": "adam", "subtract_noise": True, "learning_rate": 0.01,
    "average": 0.5, "evaluate_every": 5, "weights": "equal", "one_in": 3,
}  # fmt: skip


def noted(folder):
    return {(line["round"], line["client"]): line["sha"] for line in lines(folder / "frames.jsonl")}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Frames by (round, client) and the final model, all clients in this process."""
    folder = tmp_path_factory.mktemp("one")
    with Run.start(digits_task(4), Config.of(**SETTINGS), force=True) as run:  # five rounds teach it nothing
        recording(run.engine, folder / "frames.jsonl")
        list(run.rounds())
    frames = noted(folder)
    assert len(frames) == len(set(frames.values())) == 20
    return frames, run.model


@pytest.mark.slow  # `test_distributed` compares the model of the ranks with that of one process, bit for bit
def test_torch_distributed_sends_the_same_bytes(one_process, tmp_path):
    for code, output in run_ranks(tmp_path, SETTINGS, script=Path(__file__).parent / "digits_worker.py"):
        assert code == 0, output
    assert noted(tmp_path) == one_process[0]
    np.testing.assert_array_equal(np.load(tmp_path / "model.npy"), one_process[1])


def test_flower_sends_the_same_bytes(one_process, tmp_path):
    pytest.importorskip("flwr", reason="needs the extra `flower`")
    from flwr.app import MessageType

    from bqsgd._src.flower.messages import FRAME, data_of
    from bqsgd._src.flower.server_app import serve
    from bqsgd._src.flower.settings import Service, read_settings
    from bqsgd.flower import client_app
    from loop_grid import LoopGrid

    task, frames = digits_task(4), {}

    def note(client, message, reply):
        if message.metadata.message_type == MessageType.TRAIN:
            frame = data_of(reply, kind=FRAME)
            frames[int(message.metadata.group_id), client] = hashlib.sha256(frame).hexdigest()
        return reply

    app = client_app(lambda config, node, options: replace(task, shares=[task.shares[node.client]]))
    limits = {"allow-no-privacy": True, "epsilon": 100.0}
    nodes = [{"client": client, "ledger-folder": str(tmp_path), **limits} for client in range(4)]
    grid = LoopGrid(app, SETTINGS, nodes, note)
    config, _, _ = read_settings(SETTINGS)
    run = serve(grid, config, Service(join_seconds=60.0, force=True), replace(task, shares=()))
    assert frames == one_process[0]
    np.testing.assert_array_equal(run.model, one_process[1])
