"""From other machines a SuperLink answers registered nodes and nobody else."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

import httpx
import stranger
from flwr.superlink.main import create_app

from bqsgd._src.cli.app import main
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.flower.federation import make_certificate, make_node_key
from bqsgd._src.flower.gate import Gate, networks_of

REMOTE, LOCAL = "203.0.113.9", "127.0.0.1"


@pytest.fixture(scope="module")
def served():
    """The app that flower-superlink serves, behind the gate and as it is."""
    app = create_app()
    return {True: Gate(app, control_from=networks_of(["10.8.0.0/24"])), False: app}


def asked(app, path, request, *, caller, **headers):
    """HTTP status of one request."""

    async def ask():
        transport = httpx.ASGITransport(app, client=(caller, 40000), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://192.0.2.1:9092") as client:
            return await client.post(path, content=request, headers=stranger.HEADERS | headers)

    return asyncio.run(ask()).status_code


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    public = make_node_key(tmp_path_factory.mktemp("key"), name="stranger")[1].read_bytes()
    return {path: request.SerializeToString() for path, request in stranger.attempts(public).items()}


def test_a_stranger_can_list_nothing_register_nothing_and_fetch_no_task(served, tried):
    for path, request in tried.items():
        assert asked(served[True], path, request, caller=REMOTE) == 403, path
    for path in ("/docs", "/openapi.json", "/v1/runtime/responses", "/v1", "/", "/v1/fleet"):
        assert asked(served[True], path, b"", caller=REMOTE) == 403, path
    # What the gate is for: as Flower serves it, the same stranger lists runs, registers a key and asks for tasks.
    for path in ("/v1/control/list-runs", "/v1/control/register-node", stranger.TASK):
        assert asked(served[False], path, tried[path], caller=REMOTE) == 200, path


@pytest.mark.parametrize(
    ("caller", "status"),
    [
        *((caller, 200) for caller in (LOCAL, "::1", "::ffff:127.0.0.1", "127.8.9.1", "10.8.0.7")),
        *((caller, 403) for caller in (REMOTE, "10.8.1.7", "0.0.0.0", "::", "::ffff:203.0.113.9")),
    ],
)
def test_who_may_start_runs(served, tried, caller, status):
    path = "/v1/control/list-runs"
    assert asked(served[True], path, tried[path], caller=caller) == status


@pytest.mark.parametrize("header", ["X-Forwarded-For", "forwarded", "Via", "X-Real-IP"])
def test_what_a_proxy_of_this_machine_passes_on_counts_as_a_strangers(served, tried, header):
    path = "/v1/control/list-runs"
    assert asked(served[True], path, tried[path], caller=LOCAL, **{header: "127.0.0.1"}) == 403


def test_nodes_and_the_health_of_the_server_are_for_everybody(served):
    # 401: Flower asks a node for a signature of its registered key, and this one has none.
    assert asked(served[True], "/v1/fleet/pull-messages", b"", caller=REMOTE) == 401
    assert asked(served[True], "/health", b"", caller=REMOTE) == 405  # it is a GET


def test_callers_without_an_address_and_websockets_are_refused():
    sent = []

    async def app(scope, receive, send):
        raise AssertionError(scope)

    async def send(message):
        sent.append(message)

    for kind in ("http", "websocket"):
        scope = {"type": kind, "path": "/v1/control/list-runs", "headers": [], "client": None}
        asyncio.run(Gate(app)(scope, None, send))
    scope = {"type": "websocket", "path": "/v1/fleet/x", "headers": [], "client": (REMOTE, 1)}
    asyncio.run(Gate(app)(scope, None, send))
    assert [message["type"].split(".")[0] for message in sent] == ["http", "http", "websocket", "websocket"]


def test_a_callers_path_cannot_forge_a_line_of_the_log(served, caplog):
    asked(served[True], "/v1/control/a%0AINFO: run started%1b[2J", b"", caller=REMOTE)
    (line,) = [text for text in caplog.messages if "refused" in text]
    assert line == rf"refused /v1/control/a\nINFO: run started\x1b[2J from {REMOTE}: served to this machine only"


def test_a_wrong_network_is_refused_before_anything_listens(capsys):
    with pytest.raises(InvalidParameter, match="takes an address or a network"):
        networks_of(["10.8.0.1/24"])  # host bits set: nobody knows what was meant
    assert main(["flower", "superlink", "--insecure", "--control-from", "everybody"]) == 2
    assert "--control-from takes an address or a network such as 10.8.0.0/24" in capsys.readouterr().err


NETWORK = """
set -eu
unshare -n sleep 600 & other=$!
trap 'kill $other; kill $link 2>/dev/null || true' EXIT
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
ip link set lo up
ip link add here type veth peer name there
ip link set there netns $other
ip addr add 10.77.0.1/24 dev here; ip link set here up
nsenter -t $other -n sh -c 'ip link set lo up; ip addr add 10.77.0.2/24 dev there; ip link set there up'
"$PYTHON" -m bqsgd flower superlink --host "$LISTEN" --port 9092 --enable-supernode-auth \
    --disable-runtime-dependency-installation --ssl-ca-certfile "$CERT" --ssl-certfile "$CERT" --ssl-keyfile "$KEY" \
    > superlink.log 2>&1 & link=$!
for i in $(seq 600); do grep -q "running on http" superlink.log && break; kill -0 $link; sleep 0.1; done
nsenter -t $other -n "$PYTHON" "$STRANGER" https://10.77.0.1:9092 "$CERT" < "$NODE" > from-outside
"$PYTHON" "$STRANGER" https://10.77.0.1:9092 "$CERT" < "$NODE" > from-here
"""


@pytest.mark.slow
@pytest.mark.parametrize("listen", ["0.0.0.0", "10.77.0.1"])
def test_a_real_superlink_and_a_stranger_on_another_network(tmp_path, monkeypatch, listen):
    if subprocess.run(["unshare", "-Urn", "ip", "link"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody make networks of their own")
    certificate, key = make_certificate(tmp_path, hosts=["10.77.0.1"])
    public = make_node_key(tmp_path, name="node")[1]
    names = {"PYTHON": sys.executable, "CERT": certificate, "KEY": key, "NODE": public, "LISTEN": listen}
    names |= {"STRANGER": stranger.__file__, "FLWR_HOME": tmp_path, "FLWR_TELEMETRY_ENABLED": "0"}
    names["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # SuperLink starts its programs by name
    for name, value in (names | {"FLWR_DISABLE_UPDATE_CHECK": "1"}).items():
        monkeypatch.setenv(name, str(value))
    began = time.monotonic()
    done = subprocess.run(
        ["unshare", "-Urn", "--fork", "--kill-child", "bash", "-c", NETWORK],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    log = (tmp_path / "superlink.log").read_text()
    assert done.returncode == 0, f"{time.monotonic() - began:.0f} s\n{done.stderr}\n{log}"
    outside = [line.split() for line in (tmp_path / "from-outside").read_text().splitlines()]
    assert [status for _, status, *_ in outside] == ["403"] * 8, outside
    here = dict(line.split()[:2] for line in (tmp_path / "from-here").read_text().splitlines())
    assert here["/v1/control/list-runs"] == here["/v1/control/register-node"] == here[stranger.TASK] == "200"
    assert "refused /v1/control/register-node from 10.77.0.2" in log
