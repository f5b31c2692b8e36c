"""Runs with secure sums, in one process: the same steps as on every engine."""

import random

import numpy as np
import pytest
from torch import nn

from bqsgd._src.client.objectives import objective_of
from bqsgd._src.client.sums import SumSetup
from bqsgd._src.errors import Infeasible, InvalidParameter
from bqsgd._src.ledger import Ledger
from bqsgd._src.params import Mechanism
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.release import Release, Trust
from bqsgd._src.run import Run
from bqsgd._src.secure.messages import HEADER_BYTES, Kind, is_sum_message, message_kind, read_parts, write_parts
from bqsgd._src.settings.client_plan import client_terms
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.task import Task
from bqsgd._src.wire.model_message import write_model

CLIENTS = 5
BASE = {
    "clients": CLIENTS, "rounds": 6, "batch_size": 8, "rate": 0.25, "clip": "l2", "clip_norm": 1.0, "range": 0.3,
    "levels": 20, "trials": 120, "epsilon": 50.0, "secure": True, "dropouts": 1, "key_rounds": 3, "seed": 3,
    "window": 1.0,  # one width for the run, so that no key batch ends early
    "evaluate_every": 3, "checkpoint_every": 1, "weights": "equal", "learning_rate": 0.5,
}  # fmt: skip


def small_task(clients=CLIENTS):
    def share(client):
        rng = np.random.default_rng(client)
        inputs = rng.normal(size=(40, 3)).astype(np.float32)
        return inputs, (inputs @ [1.0, -1.0, 0.5] > 0).astype(np.int64)

    def model():
        made = nn.Linear(3, 2)
        nn.init.zeros_(made.weight)
        nn.init.zeros_(made.bias)
        return made

    return Task(make_model=model, shares=[share(client) for client in range(clients)], test=share(99))


def settings(**changes):
    merged = {**BASE, **changes}
    return Config.of(**{name: value for name, value in merged.items() if value is not None})


def plain(**changes):
    return settings(secure=None, dropouts=None, key_rounds=None, window=None, **changes)


class Steps:
    """Between run and engine: names the step of every exchange and lets `lose(step, round, client)` drop answers."""

    def __init__(self, run, lose=lambda step, round, client: False):
        self.real, self.lose, self.asked = run.engine.exchange, lose, []
        run.engine.exchange = self

    def __call__(self, messages, *, round):
        step = step_of(next(iter(messages.values()))) if messages else None
        self.asked.append((round, step, tuple(sorted(messages))))
        for answer in self.real(messages, round=round):
            if self.lose(step_of(messages[answer.client]), round, answer.client):
                answer = type(answer)(client=answer.client, reason="lost on the way")
            yield answer


def step_of(message):
    return message_kind(message).name if is_sum_message(message) else "MODEL"


def trained(config, folder=None, *, lose=None, rounds=None, task=None):
    with Run.start(task or small_task(), config, folder=folder, force=True) as run:
        steps = Steps(run, lose or (lambda step, round, client: False))
        records = []
        for record in run.rounds():
            records.append(record)
            if len(records) == rounds:
                break
    return run, records, steps


def test_the_sum_is_that_of_the_plain_messages():
    secure, records, _ = trained(settings(trials=0))
    without, _, _ = trained(plain(trials=0))
    np.testing.assert_allclose(secure.model, without.model, rtol=0, atol=1e-6)
    assert all(record.stepped and record.used == CLIENTS for record in records)


def test_steps_of_a_round_and_keys_for_several(tmp_path):
    run, records, steps = trained(settings(), tmp_path)
    batch = ["BATCH", "KEY_BUNDLE", "SHARE_BUNDLE"]
    each = ["MODEL", "SURVIVORS", "CERTIFICATE"]
    assert [step for _, step, _ in steps.asked] == 2 * (batch + 3 * each)
    assert records[0].bytes_down > records[1].bytes_down > 0  # with the keys of a batch, and without
    assert records[0].bytes_up > records[1].bytes_up > sum(entry.frame_bytes for entry in records[1].clients)
    assert run.summary.bytes_up == sum(record.bytes_up for record in records)


def test_the_ledger_counts_the_sum_and_the_guarantee_says_whom_it_holds_against(tmp_path):
    run, _, _ = trained(settings(colluders=1, seed=None), tmp_path)
    assert run.summary.guarantee.trust is Trust.SUMS_ONLY
    assert run.summary.guarantee.colluders == 1
    assert "server sees only sums over clients; at most 1 clients collude with it" in str(run.summary.guarantee)
    with Ledger(tmp_path / "ledgers/client-0002.ledger") as ledger:
        ((release, count),) = ledger.released.items()
    assert (release.mechanism.levels, release.mechanism.trials, count) == (20, 120, 6)
    assert release.terms.colluders == 1


def test_the_ledger_has_the_round_before_the_masked_vector_leaves(tmp_path):
    seen = []

    def lose(step, round, client):
        if step == "MODEL":
            with Ledger(tmp_path / f"ledgers/client-{client:04}.ledger") as ledger:
                seen.append((round, ledger.spent_rounds))
        return False

    trained(settings(seed=None), tmp_path, lose=lose)
    assert len(seen) == 6 * CLIENTS
    assert all(spent >= round + 1 for round, spent in seen)


@pytest.mark.parametrize("step", ["BATCH", "KEY_BUNDLE", "SHARE_BUNDLE", "MODEL", "SURVIVORS", "CERTIFICATE"])
def test_a_client_that_leaves_at_any_step_costs_no_round(step):
    whole, _, _ = trained(settings(trials=0))
    run, records, _ = trained(
        settings(trials=0), lose=lambda at, round, client: (at, client) == (step, 3) and round in (0, 1)
    )
    assert all(record.stepped for record in records)
    absent = [[entry.client for entry in record.trouble] for record in records]
    in_sum = step in ("SURVIVORS", "CERTIFICATE")  # its masked vector is there: opened from the others' shares
    keys = step in ("BATCH", "KEY_BUNDLE", "SHARE_BUNDLE")  # it comes back with the next batch
    assert absent == [[] if in_sum else [3]] * 2 + [[3] if keys else []] + [[]] * 3
    if in_sum:
        np.testing.assert_array_equal(run.model, whole.model)


@pytest.mark.parametrize("step", ["BATCH", "KEY_BUNDLE", "SHARE_BUNDLE", "MODEL"])
def test_too_few_clients_lose_the_round_and_the_next_has_new_keys(step):
    def lose(at, round, client):
        return (at, round) == (step, 1 if step == "MODEL" else 0) and client < 2

    _, records, steps = trained(settings(), lose=lose)
    lost = 1 if step == "MODEL" else 0
    assert [record.stepped for record in records] == [round != lost for round in range(6)]
    assert "no sum: " in records[lost].clients[4].reason
    assert records[lost].used == 0
    assert (lost + 1, "BATCH", tuple(range(CLIENTS))) in steps.asked


def test_no_sum_without_a_quorum_of_signatures():
    def lose(at, round, client):
        return (at, round) == ("SURVIVORS", 0) and client < 3

    _, records, steps = trained(settings(), lose=lose)
    assert [record.stepped for record in records] == [False] + [True] * 5
    assert "2 survivors signed their list, 3 are needed" in records[0].clients[4].reason
    assert not any(step == "CERTIFICATE" for round, step, _ in steps.asked if round == 0)


def test_same_seed_same_model_and_noise_of_exactly_the_planned_size():
    one, _, _ = trained(settings())
    two, _, _ = trained(settings(workers=2))
    np.testing.assert_array_equal(one.model, two.model)
    dropped, _, _ = trained(settings(), lose=lambda at, round, client: at == "MODEL" and client == 0)
    assert one.server.sums[0].noise.in_sum(5) == one.server.sums[0].noise.in_sum(4) == 120
    assert np.abs(dropped.model - one.model).max() > 0


def test_a_killed_run_goes_on_within_its_budget(tmp_path):
    release = Release(
        mechanism=Mechanism(levels=20, trials=120), terms=client_terms(settings(), dimension=8, dataset_size=40)
    )
    epsilon = Accountant().compose(release, 6).epsilon(1e-5)
    config = settings(seed=None, epsilon=epsilon)
    killed = Run.start(small_task(), config, folder=tmp_path, force=True)
    assert next(record for record in killed.rounds() if record.round == 3).stepped
    killed.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)  # before the checkpoint of round 3
    with Run.resume(small_task(), folder=tmp_path) as run:
        records = list(run.rounds())
    assert [record.round for record in records] == [3, 4, 5]
    assert [record.stepped for record in records] == [True, True, False]  # round 3 was counted twice
    assert "the privacy budget is spent" in records[-1].clients[0].reason
    assert "This run was resumed: rounds made again after the last checkpoint" in run.out_of_budget
    assert run.summary.guarantee.epsilon <= epsilon


def test_a_client_that_forgot_its_keys_is_back_with_the_next_batch():
    with Run.start(small_task(), settings(), force=True) as run:
        rounds = run.rounds()
        next(rounds)
        fresh = SumSetup.of(run.config, run=run.config.run.name, dimension=8)
        run.engine.clients[2].sums = fresh.client(2, folder=None, seed=3)
        records = [next(rounds), next(rounds), next(rounds)]
    assert [[entry.client for entry in record.trouble] for record in records] == [[2], [2], []]
    assert "no keys for the sum of round 1" in records[0].clients[2].reason


def test_a_client_sends_nothing_where_less_noise_was_agreed_on_than_its_ledger_counts():
    with Run.start(small_task(), settings(), force=True) as run:
        fewer = SumSetup.of(settings(trials=12), run=run.config.run.name, dimension=8)
        other = SumSetup.of(settings(colluders=1), run=run.config.run.name, dimension=8)
        client = run.engine.clients[2]
        for setup in (fewer, other):
            client.sums = setup.client(2, folder=None, seed=3)
            client.sums.ready = lambda round: True
            with pytest.raises(InvalidParameter, match="agreed on"):
                client.update(np.zeros(8, np.float32), 0)
        assert not client.spending.sent


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"aggregation": "median"}, "compares single messages"),
        ({"coding": "entropy"}, "equally likely"),
        ({"weights": "size"}, "adds all clients alike"),
        ({"bits": 4}, "coarsening.*bqsgd plan --secure --bits 4"),
        ({"levels": None, "trials": None, "budgets": ({"client": 1, "epsilon": 1.0},)}, "share the noise"),
        ({"secure": None}, "is a setting of secure sums"),
        ({"dropouts": 3}, "at most 2 dropouts are possible"),
        ({"clients": 2, "dropouts": 0, "colluders": 1}, "colluders are possible"),
    ],
)
def test_settings_that_no_sum_can_have(changes, reason):
    with pytest.raises((InvalidParameter, Infeasible), match=reason):
        settings(**changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rate": None, "levels": None, "trials": None}, "one sampling rate"),
        ({"rate": None, "sampling": "fixed", "levels": None, "trials": None}, "one plan"),
        ({"roster": "/nowhere/roster.toml"}, "no such file"),
        ({"identity": "/nowhere/one.key"}, "without roster"),
    ],
)
def test_runs_that_are_refused_before_anything_is_spent(changes, reason, tmp_path):
    with pytest.raises(InvalidParameter, match=reason):
        Run.start(small_task(), settings(**changes), folder=tmp_path)
    assert not (tmp_path / "ledgers").exists()


class Liar:
    """In the place of a client's sums: what it reveals when it unmasks is random, but for what it should be about."""

    def __init__(self, client, *, own):
        self.real, self.own, self.number = client.sums, own, client.sums.number
        client.sums = self

    def __getattr__(self, name):
        return getattr(self.real, name)

    def answer(self, message):
        said = self.real.answer(message)
        if message_kind(message) is not Kind.CERTIFICATE:
            return said
        lied = bytearray(said)
        parts = slice(-16, None) if self.own else slice(HEADER_BYTES + 1, -16)
        lied[parts] = random.Random(1).randbytes(len(lied[parts]))
        return bytes(lied)


def lying(*, own, gone):
    """Six clients, f = t = 1. Client 4 lies in every round; before some rounds a client leaves (round -> client)."""
    config = settings(clients=6, colluders=1, trials=0, key_rounds=2)
    with Run.start(small_task(6), config, force=True) as run:
        Liar(run.engine.clients[4], own=own)
        steps = Steps(run, lambda at, round, client: at == "MODEL" and gone.get(round) == client)
        records = list(run.rounds())
    return run, records, steps


def test_wrong_shares_of_a_client_that_left_lose_no_round_and_the_log_names_the_liar(caplog):
    """Before, every such round was lost after it was counted, and the log named the client that had left."""
    gone = {0: 2, 1: 2, 2: 2, 4: 5}
    run, records, steps = lying(own=False, gone=gone)
    assert all(record.stepped for record in records)
    honest, _, _ = trained(
        settings(clients=6, colluders=1, trials=0, key_rounds=2),
        lose=lambda at, round, client: at == "MODEL" and (gone.get(round) == client or (round, client) == (5, 4)),
        task=small_task(6),
    )
    np.testing.assert_array_equal(run.model, honest.model)
    said = [record.getMessage() for record in caplog.records if record.name == "bqsgd.sums"]
    assert "round 0: client 4 lied about secrets it shares with client 2" in said
    assert [line for line in said if "left out" in line] == ["round 4: client 4 is left out from now on"]
    assert not any(line.split("lied")[0].endswith(("client 2 ", "client 5 ")) for line in said)
    # Blamed by more than t others it has no keys any more; by one alone, who may be the liar, it has.
    assert (5, "BATCH", (0, 1, 2, 3, 5)) in steps.asked
    assert (4, "BATCH", tuple(range(6))) in steps.asked


def test_a_client_that_lies_about_its_own_seed_is_opened_from_shares_and_left_out(caplog):
    _, records, steps = lying(own=True, gone={})
    assert all(record.stepped for record in records)
    assert [record.used for record in records] == [6] + [5] * 5
    assert ("SILENT", (0, 1, 2, 3, 4, 5)) in {(step, asked) for _, step, asked in steps.asked}
    assert "round 0: client 4 is left out from now on" in caplog.text
    assert (1, "BATCH", (0, 1, 2, 3, 5)) in steps.asked


class WrongTags:
    """In the place of a client's sums: the tags that it makes for some others are random, or it makes none for them."""

    def __init__(self, client, *, to, left_away=False):
        self.real, self.to, self.left_away, self.number = client.sums, to, left_away, client.sums.number
        client.sums = self

    def __getattr__(self, name):
        return getattr(self.real, name)

    def answer(self, message):
        if self.left_away and message_kind(message) is Kind.KEY_BUNDLE:
            agreed = self.real._state.batch.agreement
            keys = read_parts(message, agreed, Kind.KEY_BUNDLE)
            message = write_parts(keys.header, agreed, {n: k for n, k in keys.parts.items() if n not in self.to})
        said = self.real.answer(message)
        if self.left_away or message_kind(message) is not Kind.KEY_BUNDLE:
            return said
        agreed = self.real._state.batch.agreement
        shares, garbage = read_parts(said, agreed, Kind.SHARES), random.Random(len(said))
        tags = {n: garbage.randbytes(16) if n in self.to else tag for n, tag in shares.parts.items()}
        return write_parts(shares.header, agreed, tags, own=shares.own)


@pytest.mark.parametrize(
    ("to", "left_away"), [((0, 1, 2, 3, 5), False), ((0, 1, 2), False), ((5,), False), ((5,), True)]
)
def test_a_client_that_sends_wrong_tags_is_left_out_and_costs_no_round(to, left_away, caplog):
    """Before, every receiver refused its whole bundle, and there was no sum as long as the client took part."""
    config = settings(clients=6, colluders=1, trials=0, key_rounds=2)
    with Run.start(small_task(6), config, force=True) as run:
        WrongTags(run.engine.clients[4], to=to, left_away=left_away)
        steps = Steps(run)
        records = list(run.rounds())
    assert all(record.stepped and record.used == 5 for record in records)
    honest, _, _ = trained(config, lose=lambda at, round, client: at == "BATCH" and client == 4, task=small_task(6))
    np.testing.assert_array_equal(run.model, honest.model)
    asked = [clients for _, step, clients in steps.asked if step == "BATCH"]
    # Those that more than t others contradict are not asked for keys any more; of two, either may be the liar.
    without = (0, 1, 2, 3, 5)
    everybody = tuple(range(6))
    assert asked == ([everybody, *[without] * 3] if len(to) > 1 else 3 * [everybody, without])
    assert all(4 not in clients for _, step, clients in steps.asked if step == "MODEL")
    assert "round 0: client 4 is left out of the key batch" in caplog.text


def test_more_disputes_than_clients_may_be_missing_end_the_round_before_it_is_counted(tmp_path):
    config = settings(clients=6, colluders=1, rounds=1, seed=None)
    with Run.start(small_task(6), config, folder=tmp_path, force=True) as run:
        WrongTags(run.engine.clients[4], to=(0,))
        WrongTags(run.engine.clients[5], to=(1,))
        steps = Steps(run)
        (record,) = run.rounds()
    assert not record.stepped
    assert {step for _, step, _ in steps.asked} == {"BATCH", "KEY_BUNDLE", "SHARE_BUNDLE"}
    for client in range(6):
        with Ledger(tmp_path / f"ledgers/client-{client:04}.ledger") as ledger:
            assert ledger.spent_rounds == 0


def test_a_run_stops_after_three_sums_that_were_counted_and_lost(tmp_path):
    """Before, after ten."""
    run, records, _ = trained(
        settings(rounds=20, seed=None), tmp_path, lose=lambda at, round, client: at == "SURVIVORS" and round >= 2
    )
    assert [record.stepped for record in records] == [True, True, False, False, False]
    assert run.stalled
    with Ledger(tmp_path / "ledgers/client-0002.ledger") as ledger:
        assert ledger.spent_rounds == 5


def test_a_server_that_sends_one_client_another_model_gets_noise():
    def round_of(change):
        with Run.start(small_task(), settings(trials=0), force=True) as run:
            real = run.engine.exchange

            def exchange(messages, *, round):
                if messages and step_of(next(iter(messages.values()))) == "MODEL":
                    messages = change(dict(messages), run)
                return real(messages, round=round)

            run.engine.exchange = exchange
            next(run.rounds())
            return run.model

    def another(messages, run):
        other = np.nextafter(run.server.model, np.float32(1))
        return messages | {2: write_model(other, round=0)}

    honest, lied = round_of(lambda messages, run: messages), round_of(another)
    # A model that differs in the last bit of each value has nearly the same gradients; without their masks in common
    # the sum would be the same but for rounding.
    assert np.abs(lied - honest).max() > 0.05


def test_a_server_that_sends_the_other_clients_a_tiny_clip_gets_noise():
    """Before, the sum was the gradient of the client that was left with the real one, and the planned noise."""
    task = small_task()

    def round_of(clip, **told):
        with Run.start(task, settings(trials=0), force=True) as run:
            for client in list(run.engine.clients.values())[1:] if clip else ():
                config = client.config.but(clip_norm=clip)
                client.objective = objective_of(config, client.model, task.loss_fn, task.forward)
                client.config = config.but(**told)
            next(run.rounds())
            return run.model

    alone = round_of(1e-9, clip_norm=1.0)
    assert 0 < np.abs(alone).max() < 0.1
    assert np.abs(round_of(1e-9) - alone).max() > 0.1
