"""Flower's Message API around our client and server: the same bits, honest books, and every fault named in the log."""

import json
import logging
import socket
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from flwr.app import Array, ArrayRecord, Context, Error, MessageType, RecordDict
from loop_federation import LoopFederation

from bqsgd._src import models
from bqsgd._src.cli.app import main
from bqsgd._src.codec import encode_frame
from bqsgd._src.engines.engine import read_guarantee
from bqsgd._src.errors import BudgetExhausted, FrameError, InvalidParameter
from bqsgd._src.flower.engine import NoQuorum
from bqsgd._src.flower.federation import write_app
from bqsgd._src.flower.messages import FRAME, data_of, field_of, pack
from bqsgd._src.flower.server_app import server_app
from bqsgd._src.flower.settings import Service, check_overrides, read_settings
from bqsgd._src.noise import seeded_rng
from bqsgd._src.params import Mechanism
from bqsgd._src.records.checkpoint import load_checkpoint
from bqsgd._src.records.folder import read_rounds
from bqsgd._src.run import Run
from bqsgd._src.server.server import Server
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.outlook import CannotLearn
from bqsgd._src.tasks.named import NamedTask
from bqsgd._src.text import one_line
from bqsgd._src.wire.frame import read_frame
from bqsgd.flower import Node, client_app

pytestmark = pytest.mark.usefixtures("clock")


class Federation(LoopFederation):
    """Four nodes over a loop grid, with ledgers under `folder`."""

    def __init__(self, task, folder, *, tamper=None, nodes=range(4), options=None, **settings):
        self.folder = folder
        super().__init__(task, folder, settings, [self.node(client, options) for client in nodes], tamper)

    def node(self, client, options=None):
        base = {"client": client, "ledger-folder": str(self.folder / f"node-{client}"), "allow-no-privacy": True}
        return base | {"epsilon": 30.0} | (options or {})


def flat(config, **changes):
    plain = {name: value for name, value in config.flat().items() if value is not None and name != "budgets"}
    return plain | changes


@pytest.fixture
def federation(task, settings, tmp_path):
    def make(tamper=None, nodes=range(4), options=None, **changes):
        given = flat(settings(rounds=4, evaluate_every=2, checkpoint_every=1), **changes)
        return Federation(task, tmp_path, tamper=tamper, nodes=nodes, options=options, **given)

    return make


def statuses(records):
    return [[entry.status for entry in record.clients] for record in records]


def records_in(folder):
    return list(read_rounds(folder))


def test_a_run_that_cannot_learn_does_not_start_and_spends_nothing(federation):
    made = federation(levels="", trials="", epsilon=0.01, range=1e-6, rounds=2)
    with pytest.raises(CannotLearn, match=r"--force .*runs it anyway"):
        made.serve(force=False)
    assert not any(made.spent().values())
    served = made.serve()
    assert served.steps == 0  # every client declines, as the outlook said
    assert served.round == 1, "it ends at once"
    assert served.out_of_budget.startswith("4 of 4 clients have no privacy budget left")
    context = Context(1, 0, {}, RecordDict(), made.settings | {"force": True})
    with pytest.raises(BudgetExhausted, match=r"the run ended early: 4 of 4 clients .* larger epsilon than 0\.01"):
        server_app(made.own)(made.grid, context)


def test_same_seed_same_frames_and_same_model_as_in_process(task, settings, federation, tmp_path):
    frames = {}

    def note(client, message, reply):
        if message.metadata.message_type == MessageType.TRAIN:
            frames[int(message.metadata.group_id), client] = data_of(reply, kind=FRAME)
        return reply

    made = federation(note)
    served = made.serve(folder=tmp_path / "server")
    with Run.start(task, settings(rounds=4, evaluate_every=2)) as run:
        taken, receive = {}, run.server.receive

        def noted(frame, *, sender, arrived=None):
            taken[run.server.round, sender] = bytes(frame)
            return receive(frame, sender=sender)

        run.server.receive = noted
        local = list(run.rounds())
    assert frames == taken
    assert len(frames) == 16
    np.testing.assert_array_equal(served.model, run.model)
    records = records_in(tmp_path / "server")
    for name in ("bytes_up", "bytes_down", "epsilon_max", "clients", "stepped", "seeded"):
        assert [getattr(record, name) for record in records] == [getattr(record, name) for record in local]
    arrays, state = load_checkpoint(tmp_path / "server")
    np.testing.assert_array_equal(arrays["model"], run.server.model)
    assert state["round"] == 4
    assert made.spent() == dict.fromkeys(range(4), 4)
    assert main(["report", str(tmp_path / "server"), "--out", str(tmp_path / "server.html")]) == 0
    assert "4 rounds" in (tmp_path / "server.html").read_text()


@pytest.mark.parametrize("down", [{"down_bits": 4}, {"aggregation": "median", "one_in": 8}], ids=["changes", "steps"])
def test_cohorts_without_whole_models_lead_to_the_model_of_one_process(task, settings, federation, tmp_path, down):
    changes = {"cohort": 2, "turns": 3, **down}
    made = federation(**changes)
    served = made.serve(folder=tmp_path / "server")
    with Run.start(task, settings(rounds=4, evaluate_every=2, **changes), force=True) as run:
        local = list(run.rounds())
    assert served.server.model.tobytes() == run.server.model.tobytes()
    records = records_in(tmp_path / "server")
    for name in ("bytes_up", "bytes_down", "clients"):
        assert [getattr(record, name) for record in records] == [getattr(record, name) for record in local]
    assert made.spent() == dict.fromkeys(range(4), 2)
    assert records[3].bytes_down < 0.5 * records[0].bytes_down  # they are two rounds behind


@pytest.mark.parametrize(("method", "rounds"), [("least-squares", 1), ("centred", 3)])
def test_a_linear_method_leads_to_the_model_of_one_process(task, settings, tmp_path, method, rounds):
    own = replace(task, make_model=lambda: models.build("linear", input_shape=(1, 8, 8), classes=10, seed=0))
    changes = {"method": method, "rounds": rounds, "rate": 1.0, "batch_size": 300}
    made = Federation(own, tmp_path, **flat(settings(**changes)))
    served = made.serve(folder=tmp_path / "server")
    with Run.start(own, settings(**changes), force=True) as run:
        list(run.rounds())
    np.testing.assert_array_equal(served.model, run.model)
    assert made.spent() == dict.fromkeys(range(4), rounds)


@pytest.mark.slow
def test_the_order_of_nodes_changes_no_bit(federation, tmp_path):
    first = federation().serve()
    second = federation(nodes=[3, 1, 0, 2]).serve()
    np.testing.assert_array_equal(first.server.model, second.server.model)


def test_planned_once_and_the_budget_is_the_clients_own(task, settings, tmp_path):
    given = flat(settings(levels=None, trials=None, rounds=3, seed=None, epsilon=3.0))
    made = Federation(task, tmp_path, options={"allow-no-privacy": False, "epsilon": 3.0}, **given)
    run = made.serve()
    assert [receipt.status for receipt in run.last.clients] == ["ok"] * 4
    (kept,) = made.grid.contexts[1000].state["bqsgd.plans"].values()
    assert json.loads(kept)["levels"] == run.last.clients[0].levels
    assert 2.5 < run.summary.guarantee.epsilon <= 3.0
    again = made.serve()  # the same ledgers, a run of another name: nothing is left to spend
    assert [receipt.status for receipt in again.last.clients] == ["declined"] * 4
    assert not again.last.stepped
    assert made.spent() == dict.fromkeys(range(4), 3)


def test_a_name_that_was_used_before_is_said_on_both_sides(federation, caplog):
    # Noise is given, so that nothing is planned; one round fits into this budget, and not two.
    options = {"allow-no-privacy": False, "epsilon": 10.0}
    made = federation(options=options, run="autumn", rounds=1, seed="", epsilon=1.0)
    assert made.serve(force=True).steps == 1
    with caplog.at_level(logging.WARNING):
        again = made.serve(force=True)
    # The node would allow more, but the budget of a run of that name is spent: its end would look untrained.
    assert again.steps == 0
    assert made.spent() == dict.fromkeys(range(4), 1)
    assert "of a run named 'autumn'. The round counts again" in caplog.text
    assert "Give the run a name of its own" in again.out_of_budget


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({}, {"allow-no-privacy": False}, "seeded noise"),
        ({"seed": "", "trials": 0}, {"allow-no-privacy": False}, "has no noise"),
        ({"epsilon": 30.0}, {"epsilon": 3.0}, "asks for epsilon 30, this node allows 3"),
        ({"packed_rows": True}, {}, "allow it with allow-packed-rows=true"),
        ({"delta": 1e-3}, {"delta": 1e-5}, "asks for delta 0.001, this node allows 1e-05"),
    ],
)
def test_no_run_can_talk_a_node_out_of_its_limits(federation, caplog, changes, options, reason):
    made = federation(options=options, **changes)
    with caplog.at_level(logging.WARNING), pytest.raises(NoQuorum, match="0 of 4 clients joined") as caught:
        made.serve(join_seconds=300.0)  # every node has said no: nobody is left to wait for
    assert reason in caplog.text
    assert reason in str(caught.value)
    assert made.spent() == {}


def corrupted(reply, kind=FRAME):
    data = bytearray(data_of(reply, kind=kind))
    data[len(data) // 2] ^= 1
    return pack(bytes(data), kind=kind)


def foreign(reply, client, round):
    """A well-formed frame under another client's name."""
    mechanism, dimension = Mechanism(levels=17, trials=220), read_frame(data_of(reply, kind=FRAME)).header.dimension
    rng, values = seeded_rng(seed=1), np.zeros(dimension)
    return pack(encode_frame(values, mechanism, range=0.03125, rng=rng, client=client, round=round), kind=FRAME)


def test_faults_are_named_and_cost_only_their_own_round(federation, tmp_path, caplog):
    def tamper(client, message, reply):
        if message.metadata.message_type != MessageType.TRAIN:
            return reply
        round = int(message.metadata.group_id)
        if (client, round) == (1, 0):
            reply.content = corrupted(reply)
        if (client, round) == (2, 0):
            reply.content = foreign(reply, client=0, round=0)
        if (client, round) == (3, 1):
            return ("late", reply)
        if (client, round) == (0, 2):
            return Error(code=8, reason="the ClientApp\x1b[31m crashed\n")
        if (client, round) == (1, 2):
            reply.content = pack(None, kind=FRAME)
        if (client, round) == (2, 2):
            array = Array(dtype="float32", shape=(2,), stype=FRAME, data=b"12345678")
            reply.content[FRAME] = ArrayRecord({FRAME: array})
        return reply

    made = federation(tamper)
    with caplog.at_level(logging.INFO):
        run = made.serve(folder=tmp_path / "server", round_seconds=1.0)
    assert statuses(records_in(tmp_path / "server")) == [
        ["ok", "refused", "refused", "ok"],
        ["ok", "ok", "ok", "missing"],
        ["missing", "missing", "missing", "ok", "refused"],  # the last is client 3's late frame of round 1
        ["ok"] * 4,
    ]
    for line in (
        "round 0: client 1 refused: ChecksumMismatch",
        "round 0: client 2 refused: WrongOrigin",
        "round 1: client 3 missing: no answer",
        "round 2: client 3 refused: FrameError: a frame of round 1 in round 2: a replay or late",
        r"round 2: client 0 missing: the ClientApp\x1b[31m crashed\n (code 8)",
        "round 2: client 1 missing: refused: its answer holds neither",
        "round 2: client 2 missing: refused: a bqsgd.frame.v1 is ('uint8'",
    ):
        assert line in caplog.text
    assert made.spent() == dict.fromkeys(range(4), 4)  # sent is counted, whatever became of it
    assert run.server.round == 4


def test_the_deadline_is_held_against_the_arrival_not_against_the_handing_over(
    federation, tmp_path, monkeypatch, clock
):
    monkeypatch.setitem(Server.__init__.__kwdefaults__, "clock", clock.monotonic)

    def tamper(client, message, reply):
        if client == 3 and message.metadata.message_type == MessageType.TRAIN:
            return None  # never answers, so every round is handed over only after its deadline
        return reply

    made = federation(tamper, deadline_seconds=10.0, rounds=1)
    made.serve(folder=tmp_path / "server")
    assert clock.now > 109
    assert statuses(records_in(tmp_path / "server")) == [["ok", "ok", "ok", "missing"]]


def test_a_node_that_goes_and_comes_back(federation, tmp_path, caplog):
    def tamper(client, message, reply):
        if message.metadata.message_type == MessageType.TRAIN and client == 0:
            made.grid.offline = {1002} if message.metadata.group_id in ("0", "1") else set()
        return reply

    made = federation(tamper)
    with caplog.at_level(logging.INFO):
        made.serve(folder=tmp_path / "server")
    assert [row[2] for row in statuses(records_in(tmp_path / "server"))] == ["ok", "missing", "missing", "ok"]
    assert "client 2 missing: its node 1002 is offline" in caplog.text
    assert made.spent() == {0: 4, 1: 4, 2: 2, 3: 4}


def test_a_late_frame_is_not_lost_while_a_newcomer_is_greeted(federation, tmp_path, caplog):
    def tamper(client, message, reply):
        if message.metadata.message_type != MessageType.TRAIN:
            return reply
        if (client, message.metadata.group_id) == (3, "0"):
            made.grid.contexts[1004] = Context(1, 1004, made.node(9), RecordDict(), made.grid.run_config)
            return ("late", reply)
        return reply

    made = federation(tamper, rounds=2)
    with caplog.at_level(logging.INFO):
        made.serve(folder=tmp_path / "server", round_seconds=1.0)
    assert "node 1004 declines the run: the run has clients 0 to 3, this is client 9" in caplog.text
    assert statuses(records_in(tmp_path / "server"))[1] == ["ok"] * 4 + ["refused"]


@pytest.mark.parametrize("lost", [False, True])
def test_a_node_that_is_slow_to_join_is_asked_again_only_once_nobody_answers(federation, clock, lost):
    questions, kept = Counter(), {}

    def tamper(client, message, reply):
        if message.metadata.message_type == MessageType.TRAIN:
            return reply
        questions[client] += 1
        if client == 0 or questions[client] > 1:
            return reply
        kept[clock.now + 100 * client] = reply  # one every 100 seconds
        return None

    made = federation(tamper, rounds=1)
    pull = made.grid.pull_messages

    def pull_messages(numbers):
        for due in [due for due in kept if due <= clock.now and not lost]:
            reply = kept.pop(due)
            made.grid.replies[reply.metadata.reply_to_message_id] = reply
        return pull(numbers)

    made.grid.pull_messages = pull_messages
    run = made.serve(join_seconds=1000.0)
    assert sorted(run.engine.nodes) == [0, 1, 2, 3]
    assert questions == {0: 1} | dict.fromkeys((1, 2, 3), 2 if lost else 1)
    assert clock.now == pytest.approx(220 if lost else 400, abs=5)


def test_two_nodes_with_one_number_and_a_number_beyond(federation, caplog):
    made = federation(nodes=[0, 1, 2, 3, 1, 9])
    with caplog.at_level(logging.INFO):
        run = made.serve()
    assert sorted(run.engine.nodes.items()) == [(client, 1000 + client) for client in range(4)]
    made = federation(nodes=[0, 1, 1])
    with caplog.at_level(logging.INFO):
        run = made.serve(join_seconds=0.5)
    assert "client 1 is on node 1001 already" in caplog.text
    assert "starting without clients [2, 3]" in caplog.text
    assert len(run.last.clients) == 2


def test_a_server_continues_from_its_checkpoint(task, settings, federation, tmp_path):
    class Cut(Exception):
        pass

    def cut(client, message, reply):
        if message.metadata.group_id == "2" and client == 3:
            raise Cut
        return reply

    with pytest.raises(Cut):
        federation(cut, run="r1").serve(folder=tmp_path / "server")
    assert len(records_in(tmp_path / "server")) == 2
    with pytest.raises(InvalidParameter, match="run='r1'"):
        federation(run="r2").serve(folder=tmp_path / "server")
    with pytest.raises(InvalidParameter, match="set `run` to that name"):
        federation().serve(folder=tmp_path / "server")
    made = federation(run="r1")
    served = made.serve(folder=tmp_path / "server")
    with Run.start(task, settings(rounds=4, evaluate_every=2)) as run:
        list(run.rounds())
    np.testing.assert_array_equal(served.model, run.model)
    assert [record.round for record in records_in(tmp_path / "server")] == [0, 1, 2, 3]
    done = federation(run="r1").serve(folder=tmp_path / "server")  # nothing is left to do
    np.testing.assert_array_equal(done.server.model, run.server.model)


@pytest.mark.slow
def test_unseeded_rounds_made_again_are_counted_again(federation, tmp_path):
    class Cut(Exception):
        pass

    def cut(client, message, reply):
        if message.metadata.group_id == "2" and client == 3:
            raise Cut
        return reply

    with pytest.raises(Cut):
        federation(cut, run="r1", seed="").serve(folder=tmp_path / "server")
    made = federation(run="r1", seed="")
    made.serve(folder=tmp_path / "server")
    assert made.spent() == dict.fromkeys(range(4), 5)


def test_a_failing_client_tells_the_server_nothing_of_its_data(task, settings, tmp_path, caplog):
    made = Federation(task, tmp_path, **flat(settings(rounds=1)))

    def fail(config, node, options):
        if node.client == 1 and made.grid.sent[-1].metadata.message_type == MessageType.TRAIN:
            raise ValueError("patient 4711 is 93 years old")
        return made.own(config, node, options)

    made.grid.app = client_app(fail)
    replies = []
    made.grid.tamper = lambda client, message, reply: replies.append(reply) or reply
    run = made.serve()
    assert run.last.clients[1].reason == "the client could not answer; its own log says why"
    assert not any("4711" in str(reply.content) for reply in replies)
    assert "patient 4711" in caplog.text  # in the client's own log


def test_a_client_that_claims_a_trillion_samples_weighs_what_the_others_do(federation, tmp_path):
    def tamper(client, message, reply):
        if message.metadata.message_type == MessageType.QUERY and client == 1:
            reply.content = pack(None, kind=FRAME, client=1, samples=2**40 - 1, dimension=4810)
        return reply

    run = federation(tamper, rounds=1).serve()
    assert run.server.weights == dict.fromkeys(range(4), 0.25)
    assert run.engine.samples[1] == 2**40 - 1
    assert "One lying client can move a coordinate of the mean by up to" in run.summary.one_liar
    listed = tmp_path / "sizes.toml"
    listed.write_text("[samples]\n0 = 400\n1 = 400\n2 = 400\n")
    with pytest.raises(InvalidParameter, match="needs a list of sizes"):
        federation(rounds=1, weights="size").serve()
    run = federation(tamper, rounds=1, weights="size", sizes=str(listed)).serve()
    assert run.server.weights == {0: 0.5, 2: 0.5}  # client 1 claims more than its place, client 3 has none
    assert sorted(run.engine.refused.values()) == [
        "client 1 claims 1099511627775 samples, the list of sizes has 400", "client 3 is not on the list of sizes",
    ]  # fmt: skip


def test_a_whole_client_does_not_say_how_many_samples_it_holds_and_answers_with_few(task, federation, tmp_path):
    """The guarantee hides everything that it holds. Before, its number of samples was in its first message, and one
    that held fewer than the batch size was refused."""
    said = []

    def heard(client, message, reply):
        if message.metadata.message_type == MessageType.QUERY:
            said.append(str(reply.content))
        return reply

    whole = {"unit": "client", "clip": "l2", "clip_norm": 1e-3, "range": 0.1, "sampling": "fixed", "rounds": 1}
    allowed = {"units": "client", "samplings": "fixed"}
    made = federation(heard, options=allowed, **whole)
    few = [tuple(rows[:7] for rows in task.shares[0]), *task.shares[1:]]
    made.task = replace(task, shares=few)
    run = made.serve()
    assert len(said) == 4
    assert not any("samples" in content for content in said)
    assert set(run.engine.samples.values()) == {64}
    assert [entry.status for entry in run.last.clients] == ["ok"] * 4
    listed = tmp_path / "sizes.toml"
    listed.write_text("[samples]\n0 = 5\n1 = 15\n2 = 10\n")
    run = federation(options=allowed, weights="size", sizes=str(listed), **whole).serve()
    assert run.server.weights == {0: 1 / 6, 1: 1 / 2, 2: 1 / 3}  # what may be known; client 3 has no place


def test_budgets_that_differ_by_client_are_a_line_of_toml(tmp_path):
    given = "[{client = 2, epsilon = 1.0}, {client = 2, from_round = 3, epsilon = 1.5, bits = 6}]"
    config, _, _ = read_settings({"clients": 4, "rounds": 10, "budgets": given})
    assert [config.privacy.budget(client=2, round=round).epsilon for round in (0, 3)] == [1.0, 1.5]
    assert config.privacy.budget(client=1, round=3).epsilon == 3.0
    for wrong in (
        "client = 2",
        "[2]",
        "[{client = 2}",
        7,
        "[]\nrun = 'x'",
        "[" * 9999,
        "[{client = 9, epsilon = 1.0}]",
    ):
        with pytest.raises(InvalidParameter, match="budgets"):
            read_settings({"clients": 4, "budgets": wrong})


def test_a_wrong_key_or_value_of_a_run_is_named_with_what_would_do(tmp_path):
    write_app(tmp_path / "app")
    app = tmp_path / "app"
    check_overrides(app, 'schedule="cosine" rounds=7')
    with pytest.raises(InvalidParameter, match="schedule must be one of constant, linear, cosine, got 'cosin'"):
        check_overrides(app, 'schedule="cosin"')
    with pytest.raises(InvalidParameter, match=r"did you mean 'schedule'\? Known: .*learning_rate"):
        check_overrides(app, 'shedule="cosine"')
    with pytest.raises(InvalidParameter, match="cannot be read as a Flower app"):
        check_overrides(tmp_path, "rounds=7")
    check_overrides(app, """rounds=7  schedule='cosine' run="two words" """.replace("two words", "two"))
    for ignored in ("epsilon = 1.0", "epsilon 1.0", "rounds=7 epsilon: 1.0"):  # Flower would keep the app's epsilon
        with pytest.raises(InvalidParameter, match="key=value pairs without blanks around '='"):
            check_overrides(app, ignored)


def test_what_the_server_would_refuse_after_its_clients_have_joined_is_refused_at_once(tmp_path):
    write_app(tmp_path / "app")
    with pytest.raises(InvalidParameter, match="all must have one sampling rate: use Poisson batches and set rate"):
        check_overrides(tmp_path / "app", "secure=true")
    check_overrides(tmp_path / "app", "secure=true rate=0.1")
    with pytest.raises(InvalidParameter, match="weights"):
        check_overrides(tmp_path / "app", 'weights="size"')


def test_a_port_in_use_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["flower", "superlink", "--insecure", "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"bqsgd: port {port} of 127.0.0.1 is in use: stop the program that listens there, or choose another port with "
        "--port\n"
    )


def test_settings_are_flat_with_empty_for_left_out():
    config, service, options = read_settings({"clients": 4, "seed": "", "join_seconds": 7, "folder": "x", "mine": 3})
    assert options == {"mine": 3}
    assert (config.clients.count, config.privacy.seed, service.join_seconds, str(service.folder)) == (4, None, 7.0, "x")
    with pytest.raises(InvalidParameter, match="epsilon"):
        read_settings({"epsilon": -1.0})
    with pytest.raises(InvalidParameter, match="run must be"):
        read_settings({"run": "../../etc"})


def test_nodes():
    assert Node.of({"partition-id": 2, "num-partitions": 4}).simulated
    node = Node.of({"client": 3, "ledger-folder": "/x", "epsilon": 2.0})
    assert (node.client, node.limits.epsilon, node.folder(run="r").name) == (3, 2.0, "x")
    for wrong in ({}, {"client": -1}, {"client": 0, "epsilon": -1.0}, {"client": 0, "allow-no-privacy": "yes"}):
        with pytest.raises(InvalidParameter):
            Node.of(wrong)


def test_words_are_checked_and_texts_cleaned(federation):
    made = federation()
    made.serve()
    message = made.grid.sent[-1]
    assert field_of(message, "report", bool) is True
    with pytest.raises(FrameError, match="must be int"):
        field_of(message, "run", int)
    assert one_line("a\nb\x00c" + "d" * 999).startswith(r"a\nb\x00c")
    assert len(one_line("d" * 999)) == 300
    assert read_guarantee("[" * 100_000) is None
    assert read_guarantee('{"epsilon": 1}') is None


def test_init_writes_an_app_that_flower_accepts_and_bqsgd_reads(tmp_path):
    files = write_app(tmp_path / "app")
    assert sorted(file.name for file in files) == [
        "__init__.py", "client_app.py", "pyproject.toml", "server_app.py", "task.py",
    ]  # fmt: skip
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == []
    given = project["tool"]["flwr"]["app"]["config"]
    config, _, options = read_settings(given)
    settings = {*Config().flat(), *NamedTask.settings(), *(field.name for field in fields(Service))}
    assert set(given) == settings  # Flower lets a run change only what the app lists
    assert NamedTask.of(**options).dataset == "digits"
    assert config == Config.from_dict(config.to_dict())
    assert config.privacy.seed is None
    with pytest.raises(InvalidParameter, match="not empty"):
        write_app(tmp_path / "app")


def test_without_flower_the_error_names_the_extra_and_the_rest_works():
    code = (
        "import sys; sys.modules['flwr'] = None\n"
        "import bqsgd._src.run, bqsgd._src.cli.app\n"
        "sys.exit(bqsgd._src.cli.app.main(['flower', 'init', 'never-made']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 2
    assert "pip install 'bqsgd[flower]'" in done.stderr


def test_a_clients_process_starts_without_libraries_it_never_needs():
    """Flower starts one process a message, which the ledger's own bound serves: a second saved each time."""
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, bqsgd._src.flower.client_app; print({'dp_accounting', 'scipy.stats'} & set(sys.modules))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "set()"
