"""Flower on real processes: simulation, a deployment with TLS and node keys, and what goes wrong in one. Minutes each.

One deployment serves all its tests in turn (module scope, in the order of the file): starting it is the dear part.
"""

import http.client
import json
import time

import numpy as np
import pytest

from fault_book import counts, not_ok, seen, together, written_down

pytest.importorskip("flwr", reason="needs the extra `flower`")

from power_cut import kill

from bqsgd._src.cli.flower import demo_settings, run_demo
from bqsgd._src.flower.federation import LocalFederation, free_port, make_node_key, write_app
from bqsgd._src.flower.processes import Processes
from bqsgd._src.flower.settings import LEDGER_FOLDER_VARIABLE
from bqsgd._src.ledger import Ledger
from bqsgd._src.ledger._entries import EntryKind
from bqsgd._src.records.checkpoint import load_checkpoint
from bqsgd._src.records.folder import read_rounds
from bqsgd._src.run import Run
from bqsgd._src.tasks.named import settings_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ENGINE = "Flower"
NOBODY = {"sent": 0, "different": 0, "counted": 0}
SETTINGS = {"batch_size": 64, "levels": 17, "trials": 220, "epsilon": 30.0, "evaluate_every": 1, "momentum": 0.5}
SETTINGS |= {"weights": "equal"}
DEADLINE_SECONDS = 120.0

FAULTY_CLIENT = """
import hashlib, json, os, time
from pathlib import Path
import numpy as np
from flwr.app import Message
from flwr.clientapp import ClientApp
from bqsgd._src.codec import encode_frame
from bqsgd.flower import client_app
from bqsgd._src.flower.messages import FRAME, data_of, pack
from bqsgd._src.noise import privacy_rng
from bqsgd._src.wire.frame import read_frame
from private_app.task import task

honest = client_app(task)
app = ClientApp()


@app.query()
def join(message, context):
    return honest(message, context)


@app.train()
def train(message, context):
    folder = Path(os.environ["BQSGD_FAULTS"])
    key = f"{context.node_config['client']}:{message.metadata.group_id}"
    fault = json.loads((folder / "faults.json").read_text()).get(key)
    reply = honest(message, context)
    frame = data_of(reply, kind=FRAME)
    if fault == "corrupted":
        damaged = bytearray(frame)
        damaged[len(damaged) // 2] ^= 1
        reply.content = pack(damaged, kind=FRAME)
    if fault == "foreign":
        header = read_frame(frame).header
        false = encode_frame(np.zeros(header.dimension), header.mechanism, range=0.03125, rng=privacy_rng(), client=0,
                             round=header.round)
        reply.content = pack(false, kind=FRAME)
    if fault == "killed":
        (folder / "in-mid-round").write_text("the frame is made and not yet sent")
        time.sleep(600)
    if fault == "late":
        time.sleep(float(os.environ["BQSGD_LATE_SECONDS"]))
    if fault == "held":
        while not (folder / "released").exists():
            time.sleep(0.1)
    note = {"round": int(message.metadata.group_id), "sha": hashlib.sha256(data_of(reply, kind=FRAME)).hexdigest()}
    with (folder / f"sent-{context.run_config['run']}-{context.node_config['client']}.jsonl").open("a") as stream:
        print(json.dumps(note), file=stream)
    return reply
"""


def in_process(clients=4, **changes):
    named, config = settings_of(dataset="digits", clients=clients, **{**SETTINGS, **changes})
    with Run.start(named.task(config), config) as run:
        list(run.rounds())
    return run.server.model


def model_in(folder):
    return load_checkpoint(folder)[0]["model"]


def records_in(folder):
    return list(read_rounds(folder))


def as_dicts(records):
    return [record.to_dict() for record in records]


def test_simulation_of_four_gives_the_bits_of_one_process(tmp_path):
    settings = demo_settings(clients=4, rounds=3, tls=False, epsilon=3.0, seed=5) | SETTINGS
    fields = run_demo(tmp_path, settings, tls=False, limit_seconds=400)
    expected = in_process(rounds=3, seed=5, learning_rate=1.0)
    np.testing.assert_array_equal(model_in(tmp_path / "server"), expected)
    assert (fields["frames_received"], fields["rounds_in_ledgers"], fields["processes_left"]) == (12, 12, 0)


def test_simulation_of_fifty(tmp_path):
    settings = demo_settings(clients=50, rounds=3, tls=False, epsilon=3.0, seed=None)
    fields = run_demo(tmp_path, settings, tls=False, limit_seconds=600)
    assert (fields["frames_received"], fields["rounds_in_ledgers"], fields["processes_left"]) == (150, 150, 0)
    assert fields["guarantee"]["epsilon"] <= 3.0
    assert not fields["seeded"]


class Deployment:
    """SuperLink and four SuperNodes with TLS and node keys; clients that misbehave when told to."""

    def __init__(self, folder, processes):
        self.folder, self.processes = folder, processes
        write_app(folder / "app")
        (folder / "app" / "private_app" / "client_app.py").write_text(FAULTY_CLIENT)
        self.faults({})
        processes.environment[LEDGER_FOLDER_VARIABLE] = str(folder / "nowhere")
        processes.environment |= {"BQSGD_FAULTS": str(folder), "BQSGD_LATE_SECONDS": str(DEADLINE_SECONDS)}
        self.federation = LocalFederation(processes, tls=True)
        self.federation.start_superlink()
        self.names = [f"node-{client}" for client in range(4)]
        self.keys = self.federation.register(self.names)
        for client in range(4):
            self.start_node(client)

    def start_node(self, client):
        self.federation.start_node(self.names[client], client=client, key=self.keys[client], epsilon=30.0)

    def faults(self, faults):
        (self.folder / "faults.json").write_text(json.dumps(faults))

    def command(self, **settings):
        return self.federation.command(self.folder / "app", settings=SETTINGS | settings, clients=4)

    def ledgers(self, run):
        """Client -> messages of `run` that its own ledger counts."""
        found = {}
        for client, name in enumerate(self.names):
            with Ledger(self.folder / "nodes" / name / f"client-{client:04}.ledger") as ledger:
                found[client] = sum(entry.rounds for entry in ledger.entries if entry.run == run)
                assert {entry.kind for entry in ledger.entries} == {EntryKind.BUDGET, EntryKind.SPEND}
        return found

    def sent(self, run, client):
        return written_down(self.folder / f"sent-{run}-{client}.jsonl")[0]

    def books(self, run):
        """What each client sent in `run` and what its ledger counts of it; never less than was sent."""
        counted = self.ledgers(run)
        notes = [written_down(self.folder / f"sent-{run}-{client}.jsonl") for client in range(4)]
        found = [counts(note, counted[client]) for client, note in enumerate(notes)]
        assert all(entry["different"] <= entry["counted"] for entry in found), found
        return found

    def wait(self, condition, *, seconds):
        end = time.monotonic() + seconds
        while not condition():
            assert self.processes.running["run"].poll() is None, self.processes.tail("run", 60)
            assert time.monotonic() < end, self.processes.tail("run", 60)
            time.sleep(0.2)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployment")
    with Processes(folder) as processes:
        yield Deployment(folder, processes)
    assert processes.left_over() == []


def test_plain_http_to_the_tls_port_gets_no_answer(deployment, fault_book):
    connection = http.client.HTTPConnection("127.0.0.1", deployment.federation.port, timeout=10)
    connection.request("GET", "/health")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        connection.getresponse()
    connection.close()
    processes = deployment.processes
    options = ("--superlink", deployment.federation.address, "--port", str(free_port()), "--max-retries", "1")
    processes.start("plain", "flower-supernode", "--insecure", *options)
    processes.wait_for("plain", "Connection attempt failed", seconds=90)
    assert "SuperNode ID" not in processes.text("plain")
    kill(processes, "plain")
    log = processes.text("superlink")
    line = seen(log, "refused at the TLS port: plain HTTP")
    injected = log.count(line)
    assert injected >= 2, "one line for the request and one for every attempt of the node"
    fault_book.row(
        engine=ENGINE,
        fault="plain HTTP to the TLS port",
        injected=injected,
        line=line,
        client=NOBODY,
        run=NOBODY,
        others_not_ok=None,
    )


def test_a_node_whose_key_is_not_registered_is_turned_away(deployment, fault_book):
    federation, processes = deployment.federation, deployment.processes
    federation.start_node("stranger", client=1, key=make_node_key(federation.folder / "keys", name="stranger")[0])
    assert processes.running.pop("stranger").wait(120) != 0
    assert "Failed to activate SuperNode" in processes.text("stranger")
    line = seen(processes.text("superlink"), "No SuperNode found with the given public key")
    assert not (deployment.folder / "nodes" / "stranger").exists()
    fault_book.row(
        engine=ENGINE,
        fault="node whose key is not registered",
        injected=1,
        line=line,
        client=NOBODY,
        run=NOBODY,
        others_not_ok=None,
    )


def test_faults_of_clients(deployment, fault_book):
    deployment.faults({"1:0": "corrupted", "2:0": "foreign", "3:1": "late", "1:1": "killed"})
    server, processes = deployment.folder / "server-faults", deployment.processes
    command = deployment.command(
        rounds=3, run="faults", folder=str(server), deadline_seconds=DEADLINE_SECONDS, checkpoint_every=1
    )
    processes.start("run", *command)
    deployment.wait((deployment.folder / "in-mid-round").exists, seconds=600)
    kill(processes, "node-1")
    log = processes.finish("run", seconds=900)
    records = records_in(server)
    became = [{entry.client: entry.status for entry in reversed(record.clients)} for record in records]
    assert became[0] == {0: "ok", 1: "refused", 2: "refused", 3: "ok"}
    assert became[1] == {0: "ok", 1: "missing", 2: "ok", 3: "missing"}
    assert (became[2][0], became[2][1], became[2][2]) == ("ok", "missing", "ok")
    damaged, foreign, gone, _, late, _ = (
        seen(log, line)
        for line in (
            "round 0: client 1 refused: ChecksumMismatch",
            "round 0: client 2 refused: WrongOrigin",
            "round 1: client 1 missing: ",
            "round 1: client 3 missing: no answer",
            "round 2: client 3 refused: FrameError: a frame of round 1 in round 2: a replay or late",
            "round 2: client 1 missing: ",
        )
    )
    assert all(record.stepped for record in records)
    # Nothing counted less than sent: client 1 made a frame in round 1 that never left, and it is counted.
    assert deployment.ledgers("faults") == {0: 3, 1: 2, 2: 3, 3: 3}
    found = deployment.books("faults")
    assert [entry["sent"] for entry in found] == [3, 1, 3, 3]
    explained = {(1, 0), (1, 1), (1, 2), (2, 0), (3, 1), (3, 2)}
    run = {
        "engine": ENGINE,
        "injected": 1,
        "run": together(found),
        "others_not_ok": not_ok(as_dicts(records), explained),
    }
    assert run["others_not_ok"] == 0
    fault_book.row(fault="frame damaged on its way", line=damaged, client=found[1], **run)
    fault_book.row(fault="frame in another client's name", line=foreign, client=found[2], **run)
    fault_book.row(fault="client killed in mid-round", line=gone, client=found[1], **run)
    fault_book.row(fault="client answers after the deadline", line=late, client=found[3], **run)


def test_a_server_killed_and_restarted_goes_on_to_the_bits_of_one_process(deployment, fault_book):
    deployment.faults({"3:1": "held"})  # round 1 stays open until the server is dead
    server, processes = deployment.folder / "server-killed", deployment.processes
    if "node-1" not in processes.running:
        deployment.start_node(1)  # the client that was killed comes back under its key
    command = deployment.command(
        rounds=3, run="killed", folder=str(server), seed=5, checkpoint_every=1, learning_rate=1.0
    )
    processes.start("run", *command)
    deployment.wait(lambda: [deployment.sent("killed", client) for client in range(3)] == [2, 2, 2], seconds=900)
    kill(processes, "superlink")  # and the ServerApp with it: three frames of round 1 are sent, the fourth is made
    kill(processes, "run")
    done = load_checkpoint(server)[1]["round"]
    assert done == 1
    deployment.faults({})
    (deployment.folder / "released").touch()
    time.sleep(5)
    assert load_checkpoint(server)[1]["round"] == done  # dead, not detached
    deployment.federation.start_superlink()
    log = processes.run("run-again", *command, seconds=900)
    line = seen(log, f"resumed from the checkpoint: {done} rounds were done")
    assert [record.round for record in records_in(server)] == [0, 1, 2]
    assert [entry.status for record in records_in(server) for entry in record.clients] == ["ok"] * 12
    np.testing.assert_array_equal(model_in(server), in_process(rounds=3, seed=5, learning_rate=1.0))
    found = deployment.books("killed")
    assert all(entry["counted"] >= 3 for entry in found)
    assert [(entry["sent"], entry["different"]) for entry in found[:3]] == [(4, 3)] * 3, "round 1 was made again"
    fault_book.row(
        engine=ENGINE,
        fault="server killed in mid-round and restarted, seeded noise",
        injected=1,
        line=line,
        client=None,
        run=together(found),
        others_not_ok=not_ok(as_dicts(records_in(server))),
    )
