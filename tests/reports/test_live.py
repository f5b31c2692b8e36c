"""`bqsgd watch`: one page for browsers on this machine, whatever the run folder holds and whoever asks."""

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from bqsgd._src.cli.app import main
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.reports.live import LivePage, watching
from bqsgd._src.storage import has_writer, one_writer


@contextmanager
def served(folder):
    with watching(folder, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def asked(port, path="/", *, method="GET", host=None, headers=()):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{port}")
    for name, value in headers:
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def test_a_run_that_goes_on_is_shown_and_refreshes_until_it_has_ended(synthetic_run):
    folder = synthetic_run(rounds=40, finished=False)
    with served(folder) as port:
        answer, body = asked(port)
        assert answer.status == 200
        assert answer.getheader("Refresh") == "3"
        assert answer.getheader("Cache-Control") == "no-store"
        for words in (
            "40 of 40 rounds",
            "4 of 5 clients answered",
            "client 4 declined",
            "spent epsilon 2.913",
            "1e-05",
        ):
            assert words in body, words
        assert "Privacy guarantee" in body
        assert "ε = 2.913" not in body  # nothing is claimed before the run has ended
        assert "Not running" in body, "no process writes the folder"
        with one_writer(folder):
            body = asked(port)[1]
            assert "<b>Running</b>" in body
            assert "no process" not in body
        (folder / ".lock").write_text("999999999\n")  # left by a process that was killed
        body = asked(port)[1]
        assert "the run was killed" in body
        assert "Unfinished run" not in body, "said once"
        again = asked(port, host=f"localhost:{port}")[1]
        assert again == body
        shutil.copy(synthetic_run("ended", rounds=40) / "summary.json", folder)
        answer, body = asked(port)
        assert answer.getheader("Refresh") is None
        assert "ε = 2.913" in body
        assert "unning" not in body


def test_a_folder_without_a_run_waits_for_one(tmp_path):
    for folder in (tmp_path, tmp_path / "not-yet"):
        with served(folder) as port:
            answer, body = asked(port)
            assert answer.status == 200
            assert answer.getheader("Refresh") == "3"
            assert "has not written a round yet" in body


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", ""])
def test_another_host_name_is_refused(synthetic_run, host):
    """DNS rebinding: a page from elsewhere whose name now leads here sends that name as its host."""
    with served(synthetic_run(rounds=3)) as port:
        answer, body = asked(port, host=host.format(port=port))
        assert answer.status == 421
        assert "mnist" not in body


def test_two_host_names_are_refused(synthetic_run):
    with served(synthetic_run(rounds=3)) as port:
        assert asked(port, headers=[("Host", "evil.example")])[0].status == 421


@pytest.mark.parametrize(
    "path",
    [
        "/config.toml",
        "/../config.toml",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/?a",
        "*",
        "/index.html",
        "/\x01",
    ],
)
def test_no_request_names_a_file(synthetic_run, path):
    with served(synthetic_run(rounds=3)) as port:
        if path == "/\x01":
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
                assert b" 404 " in raw.recv(64)
        else:
            assert asked(port, path)[0].status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_written(synthetic_run, method):
    folder = synthetic_run(rounds=3)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with served(folder) as port:
        assert asked(port, method=method)[0].status == 501
        assert asked(port, method="HEAD")[1] == ""
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def half_written(folder):
    with (folder / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round": 41, "time"')


def script(folder):
    (folder / "config.toml").write_text("rounds = '<script>alert(1)</script>'\n[run]\nrounds = '<img src=x>'\n")


def not_json(folder):
    (folder / "rounds.jsonl").write_text("<script>alert(1)</script>\n")


def huge_figures(folder):
    (folder / "rounds.jsonl").write_text('{"round": 1, "epsilon_max": "inf", "clients": []}\n')


def a_pipe(folder):
    (folder / "rounds.jsonl").unlink()
    os.mkfifo(folder / "rounds.jsonl")


def a_link(folder):
    (folder / "rounds.jsonl").unlink()
    (folder / "rounds.jsonl").symlink_to("/etc/passwd")


@pytest.mark.parametrize("spoil", [half_written, script, not_json, huge_figures, a_pipe, a_link])
def test_a_hostile_folder_harms_nobody(synthetic_run, spoil):
    folder = synthetic_run(rounds=4, finished=False)
    spoil(folder)
    with served(folder) as port:
        answer, body = asked(port)
    assert answer.status == 200
    assert "<script>alert" not in body
    assert "<img" not in body
    assert "root:" not in body
    assert "Traceback" not in body


def test_a_page_is_made_again_only_after_a_change(synthetic_run):
    folder = synthetic_run(rounds=4, finished=False)
    page = LivePage(folder)
    first = page.now()[0]
    assert page.now()[0] is first
    half_written(folder)
    assert page.now()[0] is not first


def test_a_slow_stranger_keeps_nobody_else_waiting(synthetic_run):
    with served(synthetic_run(rounds=3)) as port, socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        assert asked(port)[0].status == 200


def test_a_port_in_use_is_one_line(synthetic_run, capsys):
    folder = synthetic_run(rounds=3)
    with served(folder) as port:
        assert main(["watch", str(folder), "--port", str(port)]) == 2
    captured = capsys.readouterr().err
    assert captured.count("\n") == 1
    assert "choose another with --port" in captured
    with pytest.raises(InvalidParameter, match="port -1 cannot be used"), watching(folder, port=-1):
        pass


def test_a_file_is_not_a_run(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["watch", str(tmp_path / "file")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_ctrl_c_ends_the_command_without_a_word(tmp_path):
    command = [sys.executable, "-m", "bqsgd", "watch", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, rest, errors) == (0, "", "")


@pytest.mark.parametrize("content", [b"", b"-1", b"0", b"9" * 32, b"9" * 99, b"one", b"\xff"])
def test_a_lock_file_that_names_no_process_is_nobody(tmp_path, content):
    (tmp_path / ".lock").write_bytes(content)
    assert not has_writer(tmp_path)
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").symlink_to("/proc/self/stat")
    assert not has_writer(tmp_path)
