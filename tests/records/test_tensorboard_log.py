"""TensorBoard logging: the public figures of each round, and no others, can be read back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bqsgd._src.records.record import ClientRecord, RoundRecord, Status
from bqsgd._src.records.tensorboard import TensorBoardLog, scalars


def test_rounds_are_read_back_from_the_event_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    with TensorBoardLog(tmp_path) as log:
        log.append(RoundRecord(round=1, test_accuracy=0.5, bytes_up=10))
        log.append(RoundRecord(round=2, test_accuracy=0.75, bytes_up=20, seconds={"encode": 0.25}))
    (file,) = tmp_path.iterdir()
    seen = {
        (event.step, value.tag): value.tensor.float_val[0]
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert seen[1, "test/accuracy"] == 0.5
    assert seen[2, "test/accuracy"] == 0.75
    assert seen[2, "bytes/up"] == 20
    assert seen[2, "seconds/encode"] == 0.25
    assert (1, "test/loss") not in seen


def test_what_cannot_be_drawn_is_left_out() -> None:
    clients = tuple(ClientRecord(client=i, status=Status.OK if i else Status.MISSING) for i in range(3))
    figures = scalars(RoundRecord(round=1, test_loss=math.nan, epsilon_max=math.inf, clients=clients))
    assert "test/loss" not in figures
    assert "privacy/epsilon_max" not in figures
    assert figures["clients/ok"] == 2
    assert figures["clients/missing"] == pytest.approx(1)
