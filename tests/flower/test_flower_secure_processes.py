"""Secure sums on Flower's real processes: simulated, and deployed with TLS and node keys, faults included. Minutes."""

import json
import time

import numpy as np
import pytest

from fault_book import counts, not_ok, seen, together, written_down

pytest.importorskip("flwr", reason="needs the extra `flower`")

from power_cut import kill

from bqsgd._src.cli.flower import demo_settings, run_demo
from bqsgd._src.flower.federation import LocalFederation, write_app
from bqsgd._src.flower.processes import Processes
from bqsgd._src.flower.settings import LEDGER_FOLDER_VARIABLE
from bqsgd._src.ledger import Ledger
from bqsgd._src.records.checkpoint import load_checkpoint
from bqsgd._src.records.folder import read_rounds
from bqsgd._src.run import Run
from bqsgd._src.tasks.named import settings_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ENGINE = "Flower"
SECONDS = 1500
DEADLINE_SECONDS = 240.0
"""Far longer than Flower takes to notice that a client's process has died (60 s)."""
SETTINGS = {"batch_size": 64, "levels": 17, "trials": 220, "epsilon": 30.0, "evaluate_every": 1, "momentum": 0.5}
SETTINGS |= {"weights": "equal", "rate": 0.2, "secure": True, "dropouts": 1, "key_rounds": 2, "rounds": 2}
SETTINGS |= {"window": 1.0}  # one width for the run, so that the first key batch has two rounds as well

FAULTY_CLIENT = """
import hashlib, json, os, signal, time
from pathlib import Path
from flwr.clientapp import ClientApp
from bqsgd._src.flower.messages import FRAME, MODEL, data_of
from bqsgd.flower import client_app
from bqsgd._src.secure.messages import is_sum_message, message_kind
from private_app.task import task

honest = client_app(task)
app = ClientApp()


@app.query()
def join(message, context):
    return honest(message, context)


@app.train()
def train(message, context):
    folder, client = Path(os.environ["BQSGD_FAULTS"]), context.node_config["client"]
    content = data_of(message, kind=MODEL)
    step = message_kind(content).name if is_sum_message(content) else "MODEL"
    round = message.metadata.group_id
    fault = json.loads((folder / "faults.json").read_text()).get(f"{client}:{round}:{step}")
    reply = honest(message, context)
    if fault == "killed":
        (folder / "in-mid-round").write_text("the answer is made and not yet sent")
        time.sleep(3600)
    if fault == "crashed":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == "SURVIVORS":
        (folder / f"survivors-{context.run_config['run']}-{round}").touch()
    while fault == "late" and not (folder / f"survivors-{context.run_config['run']}-{round}").exists():
        time.sleep(0.1)
    if fault == "held":
        (folder / "held").touch()
        while not (folder / "released").exists():
            time.sleep(0.1)
    if step == "MODEL":
        seeded = context.run_config["seed"] != ""  # then a round made again is the same codes, under other masks
        said = b"" if seeded else data_of(reply, kind=FRAME)
        note = {"round": int(round), "sha": hashlib.sha256(said).hexdigest()}
        with (folder / f"sent-{context.run_config['run']}-{client}.jsonl").open("a") as stream:
            print(json.dumps(note), file=stream)
    return reply
"""


def in_process(**changes):
    given = {**SETTINGS, "dataset": "digits", "clients": 4, "roster": None, **changes}
    named, config = settings_of(**{name: value for name, value in given.items() if value is not None})
    with Run.start(named.task(config), config, force=True) as run:
        list(run.rounds())
    return run.server.model


def model_in(folder):
    return load_checkpoint(folder)[0]["model"]


def test_simulation_gives_the_model_of_one_process(tmp_path):
    settings = demo_settings(clients=4, rounds=3, tls=False, epsilon=3.0, seed=5, secure=True) | SETTINGS
    fields = run_demo(tmp_path, settings, tls=False, limit_seconds=SECONDS)
    np.testing.assert_array_equal(model_in(tmp_path / "server"), in_process(seed=5, run="demo", learning_rate=1.0))
    assert (fields["frames_received"], fields["rounds_in_ledgers"], fields["processes_left"]) == (8, 8, 0)


class Deployment:
    """SuperLink and four SuperNodes with TLS, node keys and identity keys; clients that misbehave when told to."""

    def __init__(self, folder, processes):
        self.folder, self.processes = folder, processes
        write_app(folder / "app")
        (folder / "app" / "private_app" / "client_app.py").write_text(FAULTY_CLIENT)
        self.faults({})
        processes.environment[LEDGER_FOLDER_VARIABLE] = str(folder / "nowhere")
        processes.environment |= {"BQSGD_FAULTS": str(folder)}
        self.federation = LocalFederation(processes, tls=True)
        self.federation.start_superlink()
        self.names = [f"node-{client}" for client in range(4)]
        self.keys = self.federation.register(self.names)
        self.roster = self.federation.make_identities(4, seed=5)
        for client in range(4):
            self.start_node(client)

    def start_node(self, client):
        name, key = self.names[client], self.keys[client]
        self.federation.start_node(name, client=client, key=key, epsilon=60.0, roster=self.roster)

    def faults(self, faults):
        (self.folder / "faults.json").write_text(json.dumps(faults))

    def command(self, **settings):
        given = SETTINGS | {"roster": str(self.roster), "checkpoint_every": 1} | settings
        return self.federation.command(self.folder / "app", settings=given, clients=4)

    def books(self, run):
        """What each client sent in `run` and what its ledger counts of it; never less than was sent."""
        found = []
        for client, name in enumerate(self.names):
            with Ledger(self.folder / "nodes" / name / f"client-{client:04}.ledger") as ledger:
                counted = sum(entry.rounds for entry in ledger.entries if entry.run == run)
            found.append(counts(written_down(self.folder / f"sent-{run}-{client}.jsonl"), counted))
        assert all(entry["different"] <= entry["counted"] for entry in found), found
        return found

    def wait(self, path):
        end = time.monotonic() + SECONDS
        while not path.exists():
            assert self.processes.running["run"].poll() is None, self.processes.tail("run", 60)
            assert time.monotonic() < end, self.processes.tail("run", 60)
            time.sleep(0.2)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployment")
    with Processes(folder) as processes:
        yield Deployment(folder, processes)
    assert processes.left_over() == []


def as_dicts(folder):
    return [record.to_dict() for record in read_rounds(folder)]


def test_a_node_killed_in_mid_round_is_a_dropout_of_the_sum(deployment, fault_book):
    deployment.faults({"1:0:MODEL": "killed"})
    server, processes = deployment.folder / "server-dropout", deployment.processes
    processes.start("run", *deployment.command(run="dropout", folder=str(server)))
    deployment.wait(deployment.folder / "in-mid-round")
    kill(processes, "node-1")  # its masked vector is made, counted and not sent
    log = processes.finish("run", seconds=SECONDS)
    line = seen(log, "round 0: client 1 missing: ")
    records = list(read_rounds(server))
    assert [(record.used, record.stepped) for record in records] == [(3, True), (3, True)]
    found = deployment.books("dropout")
    assert [(entry["sent"], entry["counted"]) for entry in found] == [(2, 2), (0, 1), (2, 2), (2, 2)]
    fault_book.row(
        engine=ENGINE,
        fault="secure sum: node killed in mid-round",
        injected=1,
        line=line,
        client=found[1],
        run=together(found),
        others_not_ok=not_ok(as_dicts(server), {(1, 0), (1, 1)}),
    )


def test_a_client_that_crashes_at_any_step_or_is_late_costs_no_round(deployment, fault_book):
    """Its process is killed once its answer is made and its state written; the next message starts another."""
    deployment.faults(
        {
            "1:0:BATCH": "crashed",
            "0:1:CERTIFICATE": "crashed",
            "1:2:MODEL": "late",
            "3:3:SURVIVORS": "crashed",
            "2:4:KEY_BUNDLE": "crashed",
        }
    )
    server, processes = deployment.folder / "server-crashes", deployment.processes
    if "node-1" not in processes.running:
        deployment.start_node(1)
    command = deployment.command(run="crashes", folder=str(server), rounds=5, deadline_seconds=DEADLINE_SECONDS)
    log = processes.run("run-crashes", *command, seconds=2 * SECONDS)
    records = as_dicts(server)
    assert [(record.used, record.stepped) for record in read_rounds(server)] == [
        (3, True),
        (3, True),
        (3, True),
        (4, True),
        (3, True),
    ]
    missing = {(1, 0), (1, 1), (1, 2), (2, 4)}
    assert {(entry["client"], record["round"]) for record in records for entry in record["clients"]
            if entry["status"] != "ok"} == missing  # fmt: skip
    found = deployment.books("crashes")
    assert [(entry["sent"], entry["counted"]) for entry in found] == [(5, 5), (3, 3), (4, 4), (5, 5)]
    for client, answer, line in (
        (1, "keys", seen(log, "round 0: client 1 missing: ")),
        (2, "shares", seen(log, "round 4: client 2 missing: ")),
        (3, "signature", seen(log, "round 3: 4 of 4 frames")),
        (0, "unmasking", seen(log, "round 1: 3 of 4 frames")),
    ):
        fault_book.row(
            engine=ENGINE,
            fault=f"secure sum: client killed before its {answer} left",
            injected=1,
            line=line,
            client=found[client],
            run=together(found),
            others_not_ok=not_ok(records, missing),
        )
    fault_book.row(
        engine=ENGINE,
        fault="secure sum: client answers after the deadline",
        injected=1,
        line=seen(log, "round 2: client 1 missing: "),
        client=found[1],
        run=together(found),
        others_not_ok=not_ok(records, missing),
    )


def test_a_server_killed_in_mid_sum_goes_on_to_the_model_of_one_process(deployment, fault_book):
    deployment.faults({"3:1:SURVIVORS": "held"})  # round 1 stays open, with three signatures, until the server is dead
    server, processes = deployment.folder / "server-killed", deployment.processes
    if "node-1" not in processes.running:
        deployment.start_node(1)
    command = deployment.command(run="killed", folder=str(server), seed=5, learning_rate=1.0)
    processes.start("run", *command)
    deployment.wait(deployment.folder / "held")
    kill(processes, "superlink")
    kill(processes, "run")
    assert load_checkpoint(server)[1]["round"] == 1
    deployment.faults({})
    (deployment.folder / "released").touch()
    deployment.federation.start_superlink()
    log = processes.run("run-again", *command, seconds=SECONDS)
    line = seen(log, "resumed from the checkpoint: 1 rounds were done")
    assert [record.used for record in read_rounds(server)] == [4, 4]
    expected = in_process(seed=5, run="killed", learning_rate=1.0)
    np.testing.assert_array_equal(model_in(server), expected)
    found = deployment.books("killed")
    fault_book.row(
        engine=ENGINE,
        fault="secure sum: server killed when the signatures were due, and restarted, seeded noise",
        injected=1,
        line=line,
        client=None,
        run=together(found),
        others_not_ok=not_ok(as_dicts(server)),
    )
