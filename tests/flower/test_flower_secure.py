"""Secure sums over Flower without a network: the bytes of one process, state on the node's own disk, refusals."""

import copy
import json
import logging
import shutil
import stat
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from flwr.app import Context, Message, MessageType, RecordDict
from loop_federation import LoopFederation
from torch import nn

from bqsgd._src.client.sums import SumSetup, made_identities
from bqsgd._src.errors import InvalidParameter, NotWritten
from bqsgd._src.flower.engine import NoQuorum
from bqsgd._src.flower.messages import FRAME, MODEL, data_of, field_of, has_data, pack
from bqsgd._src.flower.settings import LEDGER_FOLDER_VARIABLE
from bqsgd._src.ledger import Ledger
from bqsgd._src.records.folder import read_rounds
from bqsgd._src.run import Run
from bqsgd._src.secure import messages
from bqsgd._src.secure import state as kept_state
from bqsgd._src.secure.messages import Kind, is_sum_message, message_kind
from bqsgd._src.secure.roster import write_identity
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.task import Task
from bqsgd.flower import Node

pytestmark = pytest.mark.usefixtures("clock")

CLIENTS = 5
BASE = {
    "clients": CLIENTS, "rounds": 4, "batch_size": 8, "rate": 0.25, "clip": "l2", "clip_norm": 1.0, "range": 0.3,
    "levels": 20, "trials": 120, "epsilon": 50.0, "secure": True, "dropouts": 1, "key_rounds": 2, "seed": 3,
    "evaluate_every": 2, "checkpoint_every": 1, "weights": "equal", "learning_rate": 0.5, "run": "sums",
}  # fmt: skip
BATCH, ROUND = ["BATCH", "KEY_BUNDLE", "SHARE_BUNDLE"], ["MODEL", "SURVIVORS", "CERTIFICATE"]


def some_quick(*quick):
    """All steps; those that are not quick ones are for the long suite."""
    return [step if step in quick else pytest.param(step, marks=pytest.mark.slow) for step in [*BATCH, *ROUND]]


def small_task():
    def share(client):
        rng = np.random.default_rng(client)
        inputs = rng.normal(size=(40, 3)).astype(np.float32)
        return inputs, (inputs @ [1.0, -1.0, 0.5] > 0).astype(np.int64)

    def model():
        made = nn.Linear(3, 60)
        nn.init.zeros_(made.weight)
        nn.init.zeros_(made.bias)
        return made

    return Task(make_model=model, shares=[share(client) for client in range(CLIENTS)], test=share(99))


def step_of(message):
    content = data_of(message, kind=MODEL)
    return message_kind(content).name if is_sum_message(content) else "MODEL"


class Federation(LoopFederation):
    """Five nodes, each with its identity key, its roster and its folder; `roster` of the server."""

    def __init__(self, folder, *, tamper=None, nodes=range(CLIENTS), options=None, simulated=False, **changes):
        merged = {**BASE, **changes}
        settings = {name: value for name, value in merged.items() if value is not None}
        self.folder = folder
        if not simulated:
            settings.setdefault("roster", str(folder / "roster.toml"))
            self.write_keys()
        places = [self.node(client, simulated, options or {}) for client in nodes]
        super().__init__(small_task(), folder, settings, places, tamper)

    def write_keys(self, seed=3):
        self.folder.mkdir(exist_ok=True)
        identities, roster = made_identities(Config.of(clients=CLIENTS, seed=seed))
        (self.folder / "roster.toml").write_text(roster.to_toml())
        for client, identity in identities.items():
            path = self.folder / f"{client}.key"
            path.unlink(missing_ok=True)
            write_identity(path, identity)

    def node(self, client, simulated, options):
        if simulated:
            return {"partition-id": client, "num-partitions": CLIENTS}
        keys = {"roster": str(self.folder / "roster.toml"), "identity": str(self.folder / f"{client}.key")}
        place = {"client": client, "ledger-folder": str(self.folder / f"node-{client}")}
        merged = place | keys | {"allow-no-privacy": True, "epsilon": 60.0} | options
        return {name: value for name, value in merged.items() if value is not None}

    def steps(self):
        """Of the messages sent, one name for all clients of an exchange."""
        sent = [step_of(one) for one in self.grid.sent if one.metadata.message_type == MessageType.TRAIN]
        return [step for place, step in enumerate(sent) if place == 0 or sent[place - 1] != step]


def in_process(**changes):
    with Run.start(small_task(), Config.of(**{**BASE, **changes}), force=True) as run:
        frames, take = {}, run.engine.exchange

        def noted(asked, *, round):
            for answer in take(asked, round=round):
                frames.setdefault((round, answer.client), []).append(bytes(answer.frame))
                yield answer

        run.engine.exchange = noted
        list(run.rounds())
    return run.model, frames


def test_same_seed_same_bytes_and_same_model_as_in_process(tmp_path):
    frames = {}

    def note(client, message, reply):
        if message.metadata.message_type == MessageType.TRAIN:
            frames.setdefault((int(message.metadata.group_id), client), []).append(data_of(reply, kind=FRAME))
        return reply

    made = Federation(tmp_path, tamper=note)
    served = made.serve(folder=tmp_path / "server")
    model, expected = in_process()
    assert frames == expected
    np.testing.assert_array_equal(served.model, model)
    # Keys for the first round, which decides the width of the next, then for two rounds at once.
    assert made.steps() == BATCH + ROUND + BATCH + 2 * ROUND + BATCH + ROUND
    down = [data_of(one, kind=MODEL) for one in made.grid.sent if has_data(one, kind=MODEL)]
    # Every node repeats the steps, though each message starts from what Flower has kept for it.
    assert Counter(one[:4] for one in down if not is_sum_message(one)) == {b"BQSM": 5, b"BQST": 15}
    assert made.spent() == dict.fromkeys(range(CLIENTS), 4)
    assert "server sees only sums over clients" in str(served.summary.guarantee)
    # The run is over: the secrets are gone, the last epoch stays.
    kept = sorted((tmp_path / "node-3").glob("*.sums*"))
    assert [(path.suffix, stat.S_IMODE(path.stat().st_mode)) for path in kept] == [(".step", 0o600)]
    assert made.made == CLIENTS + 4 * CLIENTS  # data are read to join and to answer a model, not for a step of a sum


GROUPED = {"groups": 2, "dropouts": 0, "aggregation": "median", "rounds": 2}
"""Groups {0, 2, 4} and {1, 3}."""


def test_groups_have_the_same_bytes_as_in_process_and_the_ledgers_say_so(tmp_path):
    frames = {}

    def note(client, message, reply):
        if message.metadata.message_type == MessageType.TRAIN:
            frames.setdefault((int(message.metadata.group_id), client), []).append(data_of(reply, kind=FRAME))
        return reply

    made = Federation(tmp_path, tamper=note, options={"fewest-in-sum": 2}, **GROUPED)
    served = made.serve(folder=tmp_path / "server")
    model, expected = in_process(**GROUPED)
    assert frames == expected
    np.testing.assert_array_equal(served.model, model)
    assert made.steps() == 2 * (BATCH + ROUND)
    assert "server sees sums over groups of 2" in str(served.summary.guarantee)
    with Ledger(tmp_path / "node-4" / "client-0004.ledger") as ledger:
        ((release, count),) = ledger.released.items()
    assert (release.terms.group, count) == (2, 2)


def test_a_node_declines_groups_of_fewer_clients_than_its_limit(tmp_path):
    made = Federation(tmp_path, **GROUPED)
    with pytest.raises(NoQuorum, match="over as few as 2 clients, this node allows 3"):
        made.serve(folder=tmp_path / "server", join_seconds=5.0)
    assert not any(made.spent().values())


@pytest.mark.parametrize(
    "told", [{"groups": 1, "aggregation": "mean"}, {"clients": 4, "groups": 1, "aggregation": "mean"}]
)
def test_a_server_that_changes_the_groups_in_mid_run_gets_no_vector(tmp_path, told):
    """After keys in groups {0, 2, 4} and {1, 3} the nodes are told of other groups, and asked for vectors."""
    reasons = []

    def note(client, message, reply):
        if message.metadata.message_type == MessageType.TRAIN and step_of(message) == "MODEL":
            reasons.append("sent" if has_data(reply, kind=FRAME) else field_of(reply, "reason", str))
        return reply

    made = Federation(
        tmp_path, tamper=note, seed=None, options={"fewest-in-sum": 2, "allow-no-privacy": None}, **GROUPED
    )
    real = made.grid.app

    def app(message, context):
        asked = message.metadata.message_type == MessageType.TRAIN and step_of(message) == "MODEL"
        context.run_config = made.settings | (told if asked else {})
        return real(message, context)

    made.grid.app = app
    made.serve(folder=tmp_path / "server")
    assert reasons
    assert "sent" not in reasons
    assert not any(made.spent().values())


@pytest.mark.parametrize("seed", [3, pytest.param(None, marks=pytest.mark.slow)])
def test_clients_of_a_simulation_find_keys_made_for_them(tmp_path, monkeypatch, seed):
    monkeypatch.setenv(LEDGER_FOLDER_VARIABLE, str(tmp_path / "nodes"))
    made = Federation(tmp_path, simulated=True, seed=seed)
    served = made.serve(folder=tmp_path / "server")
    assert all(record.used == CLIENTS for record in read_rounds(tmp_path / "server"))
    folder = tmp_path / "nodes" / "simulated-sums"
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")} == {0o600}
    if seed is not None:
        np.testing.assert_array_equal(served.model, in_process()[0])


@pytest.mark.slow
def test_plans_are_kept_and_within_the_budget(tmp_path):
    made = Federation(tmp_path, levels=None, trials=None, seed=None, epsilon=20.0, options={"allow-no-privacy": False})
    run = made.serve()
    assert run.last.used == CLIENTS
    (kept,) = made.grid.contexts[1002].state["bqsgd.plans"].values()
    assert json.loads(kept)["trials"] == run.server.sums[0].trials
    assert 15 < run.summary.guarantee.epsilon <= 20.0


@pytest.mark.slow
def test_what_a_ledger_holds_changes_no_noise_and_a_name_used_before_is_said(tmp_path, caplog):
    def run(name, epsilon):
        unseeded = {"levels": None, "trials": None, "seed": None, "evaluate_every": 4}
        with caplog.at_level(logging.WARNING, logger="bqsgd"):
            options = {"allow-no-privacy": False}
            made = Federation(tmp_path, run=name, epsilon=epsilon, options=options, **unseeded)
            return made.serve(folder=tmp_path / f"server-{name}-{epsilon}")

    first, second = run("first", 15.0), run("second", 15.0)
    assert (first.steps, second.steps) == (4, 4)
    assert first.server.sums == second.server.sums, "the budget of the run, not what a ledger has left"
    assert "is already spent of a budget of epsilon 60" in caplog.text
    caplog.clear()
    # Another run of that name shares its budget with the first: one that goes on would look untrained at its end.
    again = run("first", 16.0)
    assert again.steps < 4
    assert "their ledgers hold earlier rounds under its name, 'first'" in again.out_of_budget
    assert "Give the run a name of its own" in again.out_of_budget
    assert "of a run named 'first'. The round counts again" in caplog.text
    assert "epoch 0 is not above 2" in caplog.text, "nor may keys of a name be used twice: rounds are lost"
    assert "if this is not that run continued, give it a name of its own" in caplog.text
    assert again.summary.guarantee is not None, "the clients state it as they decline"


def sent_to(made, client, step, round=0):
    """The message of that step to a client, as the server sent it."""
    return next(
        one
        for one in made.grid.sent
        if one.metadata.dst_node_id == 1000 + client
        and one.metadata.message_type == MessageType.TRAIN
        and (step_of(one), one.metadata.group_id) == (step, str(round))
    )


def ask(made, client, content, context=None):
    """Another message of a hostile server, with these bytes."""
    fields = dict(made.grid.sent[-1].content.config_records["fields"])
    message = Message(pack(content, kind=MODEL, **fields), 1000 + client, MessageType.TRAIN, group_id="0")
    message.metadata.__dict__["_message_id"] = "again"
    made.grid.sent.append(message)
    return made.grid.app(message, context or made.grid.contexts[1000 + client])


class Stop(Exception):
    pass


def stopped_at(step, folder, **changes):
    """A federation whose server died in round 0 when client 4 had answered `step`; contexts as before that step."""
    before = {}

    def tamper(client, message, reply):
        if message.metadata.message_type == MessageType.TRAIN and client == 4 and step_of(message) == step:
            raise Stop
        before[client] = copy.deepcopy(made.grid.contexts[1000 + client])
        return reply

    made = Federation(folder, tamper=tamper, **changes)
    with pytest.raises(Stop):
        made.serve(folder=folder / "server")
    made.grid.tamper = None
    return made, before


def other_list(made, client):
    """A list of survivors of round 0 without client 0, for a client."""
    setup = SumSetup.of(Config.of(**made.settings), run="sums", dimension=240)
    agreed = setup.agreement_of(client)
    header = replace(messages.SumHeader(kind=Kind.SURVIVORS, epoch=0, round=0, client=client))
    return messages.write_listed(header, agreed, (1, 2, 3, 4))


def test_no_second_list_is_signed_between_the_answer_and_flowers_own_memory(tmp_path):
    """Flower sends an answer before it stores the node's Context: a process in between has the old one."""
    made, before = stopped_at("SURVIVORS", tmp_path)
    first = sent_to(made, 1, "SURVIVORS")
    earlier = copy.deepcopy(before[1])
    again = ask(made, 1, data_of(first, kind=MODEL), earlier)
    assert has_data(again, kind=FRAME)  # the same list: the same signature
    refused = ask(made, 1, other_list(made, 1), earlier)
    assert not has_data(refused, kind=FRAME)
    assert field_of(refused, "declined", str).startswith("ConflictingSurvivors")


def test_a_state_put_back_to_an_earlier_one_is_not_taken(tmp_path):
    made, before = stopped_at("MODEL", tmp_path)  # everybody has masked, nobody was shown a list
    (place,) = (tmp_path / "node-1").glob("*.sums")
    shutil.copy(place, tmp_path / "earlier")
    listed = data_of(sent_to(made, 1, "MODEL"), kind=MODEL)
    assert field_of(ask(made, 1, listed, before[1]), "declined", str).startswith("no keys for the sum of round 0")
    assert has_data(ask(made, 1, other_list(made, 1)), kind=FRAME)
    shutil.copy(tmp_path / "earlier", place)
    refused = ask(made, 1, other_list(made, 1))
    assert field_of(refused, "declined", str).startswith("WrongRound")
    assert made.spent() == dict.fromkeys(range(CLIENTS), 1)


def test_nothing_leaves_when_the_state_cannot_be_written(tmp_path, monkeypatch):
    made, _ = stopped_at("MODEL", tmp_path)

    def full(*_):
        raise NotWritten("the disk is full")

    monkeypatch.setattr(kept_state, "write_atomic", full)
    refused = ask(made, 1, other_list(made, 1))
    assert not has_data(refused, kind=FRAME)
    assert field_of(refused, "declined", str) == "the client could not answer; its own log says why"


def test_two_processes_of_a_client_answer_one_after_the_other(tmp_path):
    made, _ = stopped_at("MODEL", tmp_path)
    node, answers = Node.of(made.grid.contexts[1001].node_config), []
    lists = [other_list(made, 1), data_of(sent_to(made, 1, "MODEL"), kind=MODEL)]
    threads = [threading.Thread(target=lambda one=one: answers.append(ask(made, 1, one)), daemon=True) for one in lists]
    with node.turn(run="sums"):
        for thread in threads:
            thread.start()
        threads[0].join(0.3)
        assert answers == []
    for thread in threads:
        thread.join(300)
    assert sorted(has_data(answer, kind=FRAME) for answer in answers) == [False, True]


@pytest.mark.parametrize("step", some_quick("SURVIVORS"))
def test_a_server_killed_at_any_step_goes_on_to_the_model_of_one_process(tmp_path, step):
    made, _ = stopped_at(step, tmp_path)
    served = made.serve(folder=tmp_path / "server")
    assert [record.used for record in read_rounds(tmp_path / "server")] == [CLIENTS] * 4
    np.testing.assert_array_equal(served.model, in_process()[0])
    assert made.spent() == dict.fromkeys(range(CLIENTS), 4)  # seeded: round 0 made again is the same noise


def test_rounds_made_again_with_new_noise_are_counted_again(tmp_path):
    made, _ = stopped_at("CERTIFICATE", tmp_path, seed=None)
    made.serve(folder=tmp_path / "server")
    assert made.spent() == dict.fromkeys(range(CLIENTS), 5)


@pytest.mark.parametrize("step", some_quick("KEY_BUNDLE", "CERTIFICATE"))
def test_a_node_that_dies_at_any_step_costs_no_round(tmp_path, step):
    def tamper(client, message, reply):
        found = message.metadata.message_type == MessageType.TRAIN and message.metadata.group_id == "0"
        return None if found and client == 3 and step_of(message) == step else reply

    made = Federation(tmp_path, tamper=tamper)
    made.serve(folder=tmp_path / "server", round_seconds=1.0)
    used = [record.used for record in read_rounds(tmp_path / "server")]
    in_sum = step in ("SURVIVORS", "CERTIFICATE")
    assert used == [5 if in_sum else 4, 5, 5, 5]  # the second round has new keys


def test_a_client_that_never_came_is_a_dropout_and_two_are_too_many(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run = Federation(tmp_path / "four", nodes=[0, 1, 2, 4]).serve(join_seconds=0.5)
    assert run.last.used == 4
    assert "starting without clients [3]" in caplog.text
    made = Federation(tmp_path / "three", nodes=[0, 1, 2])
    with pytest.raises(NoQuorum, match=r"3 of 5 clients joined .* and a round needs 4; missing: \[3, 4\]"):
        made.serve(join_seconds=0.5)
    assert made.spent() == {}


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        ({"fewest-in-sum": 5}, {}, "over as few as 4 clients, this node allows 5 (fewest-in-sum)"),
        ({"colluders": 1}, {}, "withstand 0 colluding clients, this node asks for 1 (colluders)"),
        ({"roster": None}, {}, "this node has no roster or no identity key"),
        ({"identity": None}, {}, "this node has no roster or no identity key"),
        ({"roster": "/nowhere/roster.toml"}, {}, "its own log says why"),
        ({"allow-no-privacy": False}, {}, "seeded noise"),
    ],
)
def test_a_run_outside_the_nodes_limits_is_declined_before_anything_is_read(tmp_path, options, changes, reason):
    made = Federation(tmp_path, options=options, **changes)
    with pytest.raises(NoQuorum) as caught:
        made.serve()
    assert reason in str(caught.value)
    assert "/nowhere" not in str(caught.value)
    assert (made.made, made.spent()) == (0, {})


def test_a_node_with_another_roster_or_the_key_of_another_client_takes_no_part(tmp_path):
    made = Federation(tmp_path, rounds=1)
    text = (tmp_path / "roster.toml").read_text()
    (tmp_path / "other.toml").write_text(text.replace("2 = ", "7 = "))
    made.grid.contexts[1001].node_config["roster"] = str(tmp_path / "other.toml")
    with pytest.raises(NoQuorum, match=r"a round needs 5.*this node's roster has the digest"):
        Federation(tmp_path, rounds=1, dropouts=0, options={"roster": str(tmp_path / "other.toml")}).serve()
    run = made.serve()
    assert run.last.used == 4
    assert "all clients and the server need the same roster" in next(iter(run.engine.refused.values()))
    made = Federation(tmp_path, rounds=1, run="again")
    made.grid.contexts[1003].node_config["identity"] = str(tmp_path / "2.key")
    run = made.serve()
    assert "the roster has another key for client 3" in next(iter(run.engine.refused.values()))


def test_a_run_keeps_the_roster_it_began_with(tmp_path):
    made, _ = stopped_at("MODEL", tmp_path)
    made.write_keys(seed=4)
    with pytest.raises(InvalidParameter, match="not the roster that the run began with"):
        made.serve(folder=tmp_path / "server")
    reply = ask(made, 1, data_of(sent_to(made, 1, "MODEL"), kind=MODEL))
    assert "a run keeps the one it began with" in field_of(reply, "declined", str)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"aggregation": "median"}, "compares single messages"),
        ({"coding": "entropy"}, "equally likely"),
        ({"bits": 4}, "coarsening"),
        ({"weights": "size"}, "adds all clients alike"),
        ({"dropouts": 3}, "at most 2 dropouts are possible"),
    ],
)
def test_settings_that_no_sum_can_have_are_refused_by_both_sides(tmp_path, changes, reason):
    made = Federation(tmp_path, **changes)
    with pytest.raises(ValueError, match=reason):
        made.serve()
    message = Message(pack(None, kind=MODEL, run="sums", roster=""), 1001, MessageType.QUERY)
    message.metadata.__dict__["_message_id"] = "one"
    reply = made.grid.app(message, made.grid.contexts[1001])
    assert field_of(reply, "declined", str) == "the client could not answer; its own log says why"
    assert made.made == 0


def test_a_node_without_memory_reads_its_task_for_the_size_and_answers_the_same(tmp_path):
    made, _ = stopped_at("SURVIVORS", tmp_path)
    old = made.grid.contexts[1002]
    fresh = Context(1, 1002, old.node_config, RecordDict(), old.run_config)
    question = data_of(sent_to(made, 2, "SURVIVORS"), kind=MODEL)
    one, two = ask(made, 2, question, old), ask(made, 2, question, fresh)
    assert data_of(one, kind=FRAME) == data_of(two, kind=FRAME)
    assert fresh.state["bqsgd.dimension"] == old.state["bqsgd.dimension"]
