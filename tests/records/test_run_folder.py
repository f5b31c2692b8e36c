"""Run folders: killed writers, resumed runs and hostile folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bqsgd._src.errors import BqsgdError
from bqsgd._src.records import folder as folders
from bqsgd._src.records.folder import RunWriter, read_config, read_history, read_rounds, read_summary
from bqsgd._src.records.record import RoundRecord, RunFolderError, Status, Summary
from bqsgd._src.reports.page import run_page


def test_what_a_run_writes_is_read_back(synthetic_run) -> None:
    run = read_history(synthetic_run(rounds=60))
    assert [record.round for record in run.rounds] == list(range(1, 61))
    assert run.figures.rounds == 60
    assert run.summary is not None
    assert run.figures.accuracy == run.rounds[-1].test_accuracy
    assert run.figures.bytes_up == sum(record.bytes_up for record in run.rounds)
    assert run.bits_per_coordinate == pytest.approx(32 * run.figures.bytes_up / run.figures.bytes_up_float32)
    assert run.mechanism is not None
    assert (run.mechanism.levels, run.mechanism.trials) == (8, 239)
    last = run.clients[4]
    assert last.counts == {Status.OK: 41, Status.MISSING: 1, Status.DECLINED: 18}
    assert last.reasons["no frame before the deadline"] == 1
    assert run.config["budget"] == {"epsilon": 3.0, "delta": 1e-5, "bits": 8}


def test_run_folders_of_earlier_versions_with_the_paper_s_figure_are_still_read(tmp_path: Path) -> None:
    """Version 0.1 wrote `nominal_epsilon` into rounds.jsonl and summary.json: it is ignored, and the rest is read."""
    line = {"round": 0, "epsilon_max": 0.4, "nominal_epsilon": 3.44, "bytes_up": 7}
    (tmp_path / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "summary.json").write_text(json.dumps({"rounds": 1, "nominal_epsilon": "inf", "seeded": True}))
    run = read_history(tmp_path)
    assert (run.rounds[0].epsilon_max, run.rounds[0].bytes_up) == (0.4, 7)
    assert run.summary == Summary(rounds=1, seeded=True)
    assert "3.44" not in run_page(run)


def test_a_run_without_summary_claims_nothing_and_sums_its_rounds(synthetic_run) -> None:
    run = read_history(synthetic_run(rounds=20, finished=False))
    assert run.summary is None
    assert run.figures.rounds == 20
    assert run.figures.bytes_down == 20 * 5 * (4 * 26_010 + 96)
    assert run.figures.seconds == run.rounds[-1].time


def test_one_seeded_round_is_enough_and_idle_rounds_are_told(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run:
        run.append(RoundRecord.from_dict({"round": 0}))
        run.append(RoundRecord.from_dict({"round": 1, "seeded": True, "stepped": False}))
    seeded = read_history(tmp_path)
    assert seeded.figures.seeded
    assert seeded.figures.rounds == 2
    page = run_page(seeded)
    assert "seeded noise: no privacy claim" in page
    assert "Too few clients replied in 1 round" in page


def test_bits_per_coordinate_count_only_the_frames_used(tmp_path: Path) -> None:
    used = {"client": 0, "status": "ok", "frame_bytes": 250, "levels": 1, "trials": 1}
    refused = {"client": 1, "status": "refused", "frame_bytes": 250}
    with RunWriter(tmp_path) as run:
        run.append(
            RoundRecord.from_dict({"round": 1, "bytes_up": 500, "bytes_up_float32": 1000, "clients": [used, refused]})
        )
    assert read_history(tmp_path).bits_per_coordinate == 8
    assert read_history(tmp_path).figures.saving == 2


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_a_half_written_last_line_is_dropped_by_readers_and_cut_by_the_writer(synthetic_run, cut: int) -> None:
    path = synthetic_run(rounds=8, finished=False)
    lines = path / "rounds.jsonl"
    os.truncate(lines, lines.stat().st_size - cut)
    assert [record.round for record in read_rounds(path)] == list(range(1, 8))
    with RunWriter(path) as run:
        run.append(RoundRecord.from_dict({"round": 8}))
    assert [record.round for record in read_rounds(path)] == list(range(1, 9))


def test_a_killed_writer_leaves_every_appended_round(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from bqsgd._src.records.folder import RunWriter\n"
        "from bqsgd._src.records.record import RoundRecord\n"
        "run = RunWriter(sys.argv[1])\nnumber = 0\n"
        "while True:\n    number += 1\n    run.append(RoundRecord(round=number, bytes_up=7))\n"
        "    print(number, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [int(process.stdout.readline()) for _ in range(50)]
    process.send_signal(signal.SIGKILL)
    said += [int(line) for line in process.communicate()[0].splitlines() if line]
    rounds = [record.round for record in read_rounds(tmp_path)]
    assert rounds == list(range(1, len(rounds) + 1))
    assert len(rounds) >= said[-1]


def test_a_resumed_run_drops_what_the_checkpoint_does_not_know(synthetic_run) -> None:
    path = synthetic_run(rounds=9, finished=False)
    with RunWriter(path, keep_through=4) as run:
        run.append(RoundRecord.from_dict({"round": 5, "bytes_up": 1}))
    assert [record.round for record in read_rounds(path)] == [1, 2, 3, 4, 5]


def test_the_summary_of_an_earlier_stop_is_gone_once_a_resumed_run_has_a_round(synthetic_run) -> None:
    path = synthetic_run(rounds=9)
    assert (path / "summary.json").exists()
    with RunWriter(path, keep_through=9) as run:
        assert (path / "summary.json").exists(), "a resume that fails before its first round leaves it"
        run.append(RoundRecord.from_dict({"round": 10, "bytes_up": 1}))
    assert read_history(path).summary is None


def test_a_round_run_again_replaces_the_earlier_one_and_is_counted(synthetic_run) -> None:
    path = synthetic_run(rounds=6, finished=False)
    with RunWriter(path) as run:
        run.append(RoundRecord.from_dict({"round": 4, "bytes_up": 11}))
        run.append(RoundRecord.from_dict({"round": 5, "bytes_up": 12}))
    run_again = read_history(path)
    assert [record.round for record in run_again.rounds] == [1, 2, 3, 4, 5]
    assert [record.bytes_up for record in run_again.rounds[3:]] == [11, 12]
    assert run_again.repeated_rounds == 3
    assert "3 rounds were run again" in run_page(run_again)


def test_nothing_is_written_that_could_not_be_read_back(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run, pytest.raises(RunFolderError, match="object"):
        run.summary(Summary(accuracy=object()))  # type: ignore[arg-type]
    assert list(read_rounds(tmp_path)) == []
    assert read_summary(tmp_path) is None
    assert not list(tmp_path.glob(".*"))


def test_settings_are_toml(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run:
        run.config({"b": {"c": [1, 2]}, "status": Status.OK})
    expected = {"b": {"c": [1, 2]}, "status": "ok"}
    assert tomllib.loads((tmp_path / "config.toml").read_text()) == expected == read_config(tmp_path)


@pytest.mark.parametrize("name", ["rounds.jsonl", "summary.json", "config.toml"])
def test_links_pipes_and_devices_are_refused(synthetic_run, name: str) -> None:
    path = synthetic_run(rounds=2) / name
    for make in (lambda: path.symlink_to("/dev/zero"), lambda: os.mkfifo(path), path.mkdir):
        path.unlink()
        make()
        with pytest.raises(RunFolderError, match=name):
            read_history(path.parent)
        if path.is_dir():
            path.rmdir()
            path.touch()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rounds.jsonl", b"{}\n", "line 1.*no 'round'"),
        ("rounds.jsonl", b'{"round": 1}\nnot json\n', "line 2.*not valid JSON"),
        ("rounds.jsonl", b"[" * 200_000 + b"\n", "line 1.*not valid JSON"),
        ("rounds.jsonl", b'{"round": ' + b"9" * 5000 + b"}\n", "not valid JSON"),
        ("rounds.jsonl", b"\xff\xfe\n", "not valid JSON"),
        ("summary.json", b"[1]", "must be a table"),
        ("summary.json", b'{"accuracy": ', "not valid JSON"),
        ("config.toml", b"secret-of-the-reader", "not valid TOML"),
        ("config.toml", b"a=" + b"[" * 5000, "not valid TOML"),
        ("config.toml", b"\xff", "not valid TOML"),
    ],
)
def test_hostile_content_is_one_clear_error(synthetic_run, name: str, content: bytes, words: str) -> None:
    path = synthetic_run(rounds=2)
    (path / name).write_bytes(content)
    with pytest.raises(RunFolderError, match=words) as caught:
        read_history(path)
    assert name in str(caught.value)
    assert "secret-of-the-reader" not in str(caught.value)


def test_sizes_are_bounded_before_reading(synthetic_run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = synthetic_run(rounds=5)
    for limit, value in (
        ("_MAX_ROUNDS", 3),
        ("_MAX_LINE_BYTES", 100),
        ("_MAX_ROUNDS_BYTES", 999),
        ("_MAX_SUMMARY_BYTES", 9),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(folders, limit, value)
            with pytest.raises(RunFolderError):
                read_history(path)
    read_history(path)
    with (path / "config.toml").open("ab") as sparse:
        sparse.truncate(1 << 33)  # 8 GiB without a block of disk
    with pytest.raises(RunFolderError, match="regular file of at most"):
        read_history(path)


def test_no_folder_and_an_empty_folder_say_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="not a folder"):
        read_history(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match="nothing to report"):
        read_history(tmp_path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["inf", "ok"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    ["round", "time", "test_accuracy", "epsilon_max", "bytes_up", "bytes_up_float32", "clients", "seconds"]
)


@given(st.lists(st.dictionaries(names, values).map(lambda fields: {"round": 1, **fields}), max_size=4), st.data())
def test_any_json_is_either_reported_or_refused(tmp_path_factory: pytest.TempPathFactory, rounds, data) -> None:
    path = tmp_path_factory.mktemp("fuzz")
    (path / "rounds.jsonl").write_text("".join(json.dumps(fields) + "\n" for fields in rounds))
    keys = st.sampled_from(["accuracy", "rounds", "guarantee", "nominal", "bytes_up", "seeded", "versions", "seconds"])
    (path / "summary.json").write_text(json.dumps(data.draw(st.dictionaries(keys, values))))
    try:
        page = run_page(read_history(path))
    except BqsgdError:
        return
    assert page.startswith("<!doctype html>")
