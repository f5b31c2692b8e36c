"""Certificates that a TLS client accepts, node keys, child processes that never outlive their family, the commands."""

import os
import socket
import ssl
import stat
import threading
import time

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from bqsgd._src.cli.app import main
from bqsgd._src.cli.flower import demo_settings
from bqsgd._src.flower.federation import LoggedHandshake, make_certificate, make_node_key
from bqsgd._src.flower.processes import FlowerFailed, Processes


def handshake(served, trusted, host):
    """The name check and the chain of a real TLS handshake over loopback. served: certificate and key."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(*served)
    dialling = ssl.create_default_context(cafile=trusted)
    dialling.verify_flags |= ssl.VERIFY_X509_STRICT
    near, far = socket.socketpair()

    def serve():
        try:
            serving.wrap_socket(far, server_side=True).close()
        except (ssl.SSLError, OSError):
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with dialling.wrap_socket(near, server_hostname=host) as connection:
            return connection.version()
    finally:
        near.close()
        thread.join(10)


def test_the_certificate_stands_for_loopback_and_nothing_else(tmp_path):
    made, other = make_certificate(tmp_path / "a"), make_certificate(tmp_path / "b")
    certificate, key = made
    assert handshake(made, certificate, "127.0.0.1") == "TLSv1.3"
    assert handshake(made, certificate, "localhost") == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        handshake(made, certificate, "127.0.0.2")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made, other[0], "127.0.0.1")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_node_key_is_a_pair_and_is_never_written_over(tmp_path):
    private, public = make_node_key(tmp_path, name="node-0")
    key = load_ssh_private_key(private.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.public_key() == load_ssh_public_key(public.read_bytes())
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        make_node_key(tmp_path, name="node-0")


def test_not_even_a_grandchild_in_a_session_of_its_own_is_left(tmp_path):
    with Processes(tmp_path) as processes:
        processes.start("parent", "bash", "-c", "setsid sleep 300 & echo started $!; wait")
        processes.wait_for("parent", "started", seconds=300)
        parent = processes.running["parent"].pid
        until = time.monotonic() + 300
        while not any(os.getsid(one) not in (os.getsid(0), parent) for one in processes.left_over()):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert len(processes.left_over()) >= 2
    assert processes.left_over() == []
    assert processes.environment["FLWR_TELEMETRY_ENABLED"] == "0"
    assert processes.environment["FLWR_HOME"].startswith(str(tmp_path))


def test_a_program_that_fails_or_hangs_says_so_with_its_last_lines(tmp_path):
    with Processes(tmp_path) as processes:
        assert processes.run("well", "bash", "-c", "echo fine", seconds=300) == "fine\n"
        heard = []
        processes.run(
            "told", "bash", "-c", "echo one; sleep 0.6; echo two; printf half", seconds=300, heard=heard.append
        )
        assert heard == ["one", "two"]
        with pytest.raises(FlowerFailed, match=r"ended with code 3\nthe reason"):
            processes.run("bad", "bash", "-c", "echo the reason; exit 3", seconds=300)
        with pytest.raises(FlowerFailed, match=r"was not done after 0\.5 s"):
            processes.run("slow", "bash", "-c", "sleep 3600", seconds=0.5)  # longer than any test may take
        processes.start("mute", "sleep", "300")
        with pytest.raises(FlowerFailed, match="did not print 'never'"):
            processes.wait_for("mute", "never", seconds=0.3)
        with pytest.raises(FlowerFailed, match="mute is running already"):
            processes.start("mute", "sleep", "300")
        with pytest.raises(FlowerFailed, match="is not installed"):
            processes.run("absent", "no-such-program-of-flower", seconds=1)


def test_the_commands_refuse_what_they_cannot_do(tmp_path, capsys):
    assert main(["flower", "init", str(tmp_path / "app")]) == 0
    assert "task.py" in capsys.readouterr().out
    assert main(["flower", "init", str(tmp_path / "app")]) == 2
    assert "not empty" in capsys.readouterr().err
    assert main(["flower", "demo", "--clients", "1000"]) == 2
    assert "16 samples" in capsys.readouterr().err
    assert main(["flower", "demo", "--out", str(tmp_path / "app")]) == 2
    assert "not empty" in capsys.readouterr().err
    few = demo_settings(clients=50, rounds=None, tls=False, epsilon=3.0, seed=None)["batch_size"]
    assert few == 20, "about 1,024 samples per round over all clients, whatever their number"


@pytest.mark.parametrize(
    ("first_bytes", "line"),
    [
        (b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n", "refused at the TLS port: plain HTTP; nothing of it was read"),
        (b"\0" * 64, "refused at the TLS port: the handshake failed (WRONG_VERSION_NUMBER)"),
    ],
)
def test_a_failed_handshake_is_a_line_in_the_log(tmp_path, caplog, first_bytes, line):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*make_certificate(tmp_path))
    context.sslobject_class = LoggedHandshake
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = context.wrap_bio(incoming, outgoing, server_side=True)
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    assert caplog.messages == []
    incoming.write(first_bytes)
    with pytest.raises(ssl.SSLError):
        connection.do_handshake()
    assert caplog.messages == [line]
