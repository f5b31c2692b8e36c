"""Runs whose clients are split into groups, with a secure sum for each group and a rule over the sums."""

import json
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from test_secure_runs import Liar, settings, small_task, step_of, trained

from bqsgd._src.client.sums import SumSetup
from bqsgd._src.errors import Infeasible, InvalidParameter
from bqsgd._src.ledger import Ledger
from bqsgd._src.params import Mechanism
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.release import Release
from bqsgd._src.run import Run
from bqsgd._src.secure.messages import HEADER_BYTES
from bqsgd._src.server.server import Server
from bqsgd._src.settings.client_plan import client_terms
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.fit import Sizes, fit
from bqsgd._src.settings.node_limits import NodeLimits

CLIENTS = 11


def grouped(groups=3, **changes):
    """Groups {0, 3, 6, 9}, {1, 4, 7, 10} and {2, 5, 8}: of 4, 4 and 3 clients."""
    return settings(**{"clients": CLIENTS, "groups": groups, "aggregation": "mean", "rounds": 3} | changes)


@pytest.fixture(scope="module")
def task():
    return small_task(CLIENTS)


def test_the_mean_over_groups_is_that_over_all_clients_although_groups_differ_in_size(task):
    whole, _, _ = trained(grouped(1, trials=0), task=task)
    apart, records, _ = trained(grouped(trials=0), task=task)
    np.testing.assert_allclose(apart.model, whole.model, rtol=0, atol=1e-6)
    assert all(record.used == CLIENTS for record in records)


def test_a_round_takes_as_many_exchanges_as_one_sum_and_keys_of_a_batch(task):
    _, records, steps = trained(grouped(), task=task)
    each = ["MODEL", "SURVIVORS", "CERTIFICATE"]
    assert [step for _, step, _ in steps.asked] == ["BATCH", "KEY_BUNDLE", "SHARE_BUNDLE", *3 * each]
    assert all(clients == tuple(range(CLIENTS)) for _, _, clients in steps.asked)
    assert all(record.bytes_up > sum(entry.frame_bytes for entry in record.clients) for record in records)


def test_every_sum_has_all_the_noise_that_the_ledgers_count(tmp_path, task):
    run, _, _ = trained(grouped(seed=None), tmp_path, task=task)
    assert [plan.trials for plan in run.server.sums] == [120] * 3
    assert [plan.noise.in_sum(n) for plan, n in zip(run.server.sums, (4, 4, 3), strict=True)] == [120] * 3
    for client in range(CLIENTS):
        with Ledger(tmp_path / f"ledgers/client-{client:04}.ledger") as ledger:
            ((release, count),) = ledger.released.items()
            stated = str(ledger.guarantee(delta=1e-5))
        assert (release.mechanism.trials, release.terms.group, count) == (120, 3, 3)
        assert "server sees sums over groups of 3; no client colludes with it" in stated
    # The same noise as in one sum over all clients, so the same epsilon.
    one = Release(
        mechanism=Mechanism(levels=20, trials=120), terms=client_terms(grouped(1), dimension=8, dataset_size=40)
    )
    assert run.summary.guarantee.epsilon == Accountant().compose(one, 3).epsilon(1e-5)
    assert run.summary.guarantee.group == 3
    assert json.loads((tmp_path / "summary.json").read_text())["guarantee"]["group"] == 3
    assert "server sees sums over groups of 3" in (tmp_path / "report.html").read_text()


def test_the_trust_line_says_where_colluders_may_be():
    terms = replace(client_terms(grouped(colluders=1, dropouts=0), dimension=8, dataset_size=40))
    release = Release(mechanism=Mechanism(levels=20, trials=120), terms=terms)
    guarantee = Accountant().compose(release, 1).guarantee(delta=1e-5)
    assert guarantee.trust_text == (
        "server sees sums over groups of 3; at most 1 clients, perhaps all of one group, collude with it"
    )
    assert Guarantee.from_dict(guarantee.to_dict()) == guarantee
    assert Release.from_dict(release.to_dict()) == release
    whole = Release(mechanism=release.mechanism, terms=replace(terms, group=0))
    assert Accountant().compose(whole, 1).compose(release, 1).guarantee(delta=1e-5).group == 3
    assert "group" not in whole.to_dict()
    with pytest.raises(InvalidParameter, match="2 or more clients"):
        replace(terms, group=1)


def test_the_median_withstands_a_group_with_a_liar_and_one_sum_does_not(task):
    def lied(groups, aggregation):
        config = grouped(groups, trials=0, aggregation=aggregation)
        with Run.start(task, config, force=True) as run:
            client = run.engine.clients[4]
            client._values = lambda round: np.full(8, 0.3, np.float32)
            # Encoded without noise or checks: any codes whatever.
            client.sums.mask = Counted(client.sums.mask, most=(1 << run.server.sums[0].width) - 1)
            list(run.rounds())
        return run.model

    class Counted:
        def __init__(self, real, most):
            self.real, self.most = real, most

        def __call__(self, round, codes, *, model):
            return self.real(round, np.full_like(codes, self.most // 2), model=model)

    honest, _, _ = trained(grouped(trials=0), task=task)
    spoilt, robust = lied(1, "mean"), lied(3, "median")
    assert np.abs(robust - honest.model).max() < 0.15 < np.abs(spoilt - honest.model).max()


def test_a_group_that_loses_its_sum_loses_no_other_and_is_given_up_after_three(tmp_path, task, caplog):
    config = grouped(rounds=6, seed=None, aggregation="median", key_rounds=2)
    silent = {4, 7}  # two of the four clients of group 1, which bears one
    run, records, _ = trained(
        config, tmp_path, lose=lambda step, round, client: step == "MODEL" and client in silent, task=task
    )
    assert all(record.stepped and record.used == 7 for record in records)
    reasons = {entry.client: entry.reason for entry in records[0].trouble}
    assert set(reasons) == {1, 4, 7, 10}
    assert "no sum of group 1: 2 clients sent masked vectors, a sum needs 3" in reasons[10]
    assert "is not asked any more" in records[-1].clients[10].reason
    for client, rounds in ((0, 6), (2, 6), (10, 3), (4, 3)):
        with Ledger(tmp_path / f"ledgers/client-{client:04}.ledger") as ledger:
            assert ledger.spent_rounds == rounds
    assert not run.stalled


def test_a_run_whose_rule_has_too_few_sums_left_stops(tmp_path, task):
    config = grouped(rounds=9, seed=None, aggregation="median", byzantine=1)
    run, records, _ = trained(
        config, tmp_path, lose=lambda step, round, client: step == "MODEL" and client in (4, 7), task=task
    )
    assert not any(record.stepped for record in records)
    assert len(records) == 3
    assert run.stalled


def test_new_keys_of_one_group_do_not_disturb_the_others(task):
    """Client 4 lies about its own seed, so group 1 alone exchanges keys again, while the others take their sums."""
    config = grouped(trials=0, rounds=4, key_rounds=4)
    with Run.start(task, config, force=True) as run:
        Liar(run.engine.clients[4], own=True)
        kinds = []
        real = run.engine.exchange

        def exchange(messages, *, round):
            kinds.append((round, Counter(step_of(message) for message in messages.values())))
            return real(messages, round=round)

        run.engine.exchange = exchange
        records = list(run.rounds())
    assert [record.used for record in records] == [11, 10, 10, 10]
    assert (1, Counter({"MODEL": 7, "BATCH": 3})) in kinds
    assert (1, Counter({"MODEL": 3})) in kinds


def test_same_seed_same_model_and_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path, task):
    config = grouped(aggregation="median", window=None, key_rounds=1)
    one, _, _ = trained(config, tmp_path / "one", task=task)
    two, _, _ = trained(config.but(workers=1), task=task)
    np.testing.assert_array_equal(one.model, two.model)
    killed = Run.start(task, config, folder=tmp_path / "two", force=True)
    next(iter(killed.rounds()))
    killed.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    with Run.resume(task, folder=tmp_path / "two") as again:
        assert [record.stepped for record in again.rounds()] == [True] * 3
    assert len(again._sums) == 3


def test_clients_repeat_the_steps_of_a_robust_rule_over_groups(task):
    whole, thin = (grouped(aggregation="median", one_in=one_in, rounds=4) for one_in in (1, 2))
    assert not whole.repeats_steps
    assert thin.repeats_steps
    run, records, _ = trained(thin, task=task)
    assert all(record.stepped for record in records)
    assert run.engine.clients[5].held.round == 3


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"groups": 6}, Infeasible, "a group needs 2 clients or more; at most 5 groups are possible"),
        ({"groups": 4}, Infeasible, "4 groups of 11 clients: 2 clients with 0 colluders need 2 survivors"),
        ({"colluders": 1, "dropouts": 0}, None, ""),
        ({"colluders": 1}, Infeasible, "3 groups of 11 clients: 3 clients with 1 colluders"),
        ({"secure": None, "dropouts": None, "window": None}, InvalidParameter, "groups is a setting of secure sums"),
        ({"cohort": 6}, InvalidParameter, "leave out cohort, or groups"),
        ({"aggregation": "krum"}, None, ""),
        ({"aggregation": "krum", "byzantine": 1}, InvalidParameter, "11 clients in 3 groups can never meet"),
        ({"groups": 1, "aggregation": "median"}, InvalidParameter, "groups = 3 or more"),
    ],
)
def test_groups_that_no_run_can_have(changes, error, reason):
    if error is None:
        grouped(**changes)
        return
    with pytest.raises(error, match=reason):
        grouped(**changes)


def test_a_node_counts_the_clients_of_its_group():
    limits = NodeLimits.unlimited()
    refusal = replace(limits, fewest_in_sum=3).refusal(grouped(), client=4)
    assert refusal is not None
    assert "over as few as 2 clients, this node allows 3" in refusal
    assert replace(limits, fewest_in_sum=2).refusal(grouped(), client=4) is None


def test_settings_that_are_fitted_have_a_median_and_noise_for_every_group():
    sizes = Sizes(samples=60_000, dimension=40_000, parameters=40_000)
    one, five = (fit({"secure": True, "clients": 50, "groups": groups}, sizes) for groups in (1, 5))
    assert (one.server.aggregation, five.server.aggregation) == ("mean", "median")
    assert five.server.learning_rate < one.server.learning_rate
    assert fit({"secure": True, "groups": 2, "aggregation": "mean"}, sizes).server.aggregation == "mean"
    assert Config().secure.groups == 1


def test_the_harm_of_a_liar_is_half_the_modulus_and_is_stated_in_deviations_of_the_noise(task):
    """120 trials have a deviation of sqrt(30) = 5.48 codes: 128 codes of 8 bits are 23.4 of it, 16 of 5 bits 2.93."""
    config = grouped(rounds=1)
    server = Server(model=np.zeros(8, np.float32), weights=dict.fromkeys(range(CLIENTS), 1.0), config=config)
    assert server.sums[0].width == 8
    said = server.one_liar(5)
    assert "23.4 standard deviations of the noise in a sum, and 2.93 in the 5 bits of the last round" in said
    assert "of the mean by up to 0.582 R when all 11 clients answer" in said  # 128 / 20 / 11
    median = replace_rule(server, aggregation="median")
    assert "of the mean of its group by up to 2.14 R when all 3 clients answer" in median  # 128 / 20 / 3
    assert "In a round with sums of 3 groups or more, the median of their means follows it not beyond" in median
    assert "follows it" not in replace_rule(server, aggregation="trimmed-mean")
    assert "follows it no further than they differ" in replace_rule(server, aggregation="krum")


def replace_rule(server, **changes):
    config = server.config.but(**changes)
    return Server(model=server.model, weights=server.weights, config=config).one_liar()


# A server that does not keep to the groups, and clients that do not.


def test_clients_of_two_groups_refuse_each_others_messages(task):
    setup = SumSetup.of(grouped(), run="a", dimension=8)
    sessions = {agreement.session for agreement in setup.agreements}
    assert len(sessions) == 3
    assert [agreement.roster.clients for agreement in setup.agreements] == [(0, 3, 6, 9), (1, 4, 7, 10), (2, 5, 8)]
    # Whatever number of groups a client is told, its session differs, even if its group has the same clients.
    for other in (1, 2, 5):
        others = SumSetup.of(grouped(other, dropouts=0), run="a", dimension=8)
        assert not sessions & {agreement.session for agreement in others.agreements}
    roster, groups = setup.roster, {(g, n) for g in (2, 3, 5) for n in range(g)}
    assert len({roster.group(number, groups=count).digest for count, number in groups}) == len(groups)


def test_a_server_that_tells_clients_different_groups_gets_no_sum_of_them(tmp_path, task):
    """Client 0 is in group 0 of 3 and of 2 groups, but agrees on nothing with clients that were told otherwise."""
    with Run.start(task, grouped(seed=None, rounds=1), folder=tmp_path, force=True) as run:
        told = SumSetup.of(run.config.but(groups=2), run=run.config.run.name, dimension=8)
        real = run.engine.clients[0].sums
        run.engine.clients[0].sums = _with_key(told, real)
        (record,) = run.rounds()
    assert [entry.client for entry in record.trouble] == [0]
    assert "WrongSession" in record.clients[0].reason
    with Ledger(tmp_path / "ledgers/client-0000.ledger") as ledger:
        assert ledger.spent_rounds == 0


def _with_key(setup, real):
    """A client's side of another setup, under its real identity."""
    roster = replace(setup.roster, keys={**setup.roster.keys, real.number: real.agreement.roster.keys[real.number]})
    agreement = replace(setup.agreement_of(real.number), roster=roster.group(0, groups=len(setup.agreements)))
    return type(real)(agreement, identity=real._identity, number=real.number)


def test_a_client_sends_nothing_into_another_group_than_its_ledger_counts(tmp_path, task):
    """The server would have client 2, of a group of three, take part in the sum of another group."""
    with Run.start(task, grouped(seed=None), folder=tmp_path, force=True) as run:
        client = run.engine.clients[2]
        client.sums.agreement = run.engine.clients[0].sums.agreement
        client.sums.ready = lambda round: True
        with pytest.raises(InvalidParameter, match="over 3 to 4 clients, client 2 would count one over 2 to 3"):
            client.update(np.zeros(8, np.float32), 0)
        assert not client.spending.sent


def test_messages_of_one_group_replayed_to_another_are_refused(task):
    """Every message that a server takes from one group is refused by the clients of the others, whatever its step."""
    with Run.start(task, grouped(rounds=1), force=True) as run:
        refused = Counter()
        real = run.engine.exchange

        def exchange(messages, *, round):
            for client, message in messages.items():
                kind = step_of(message)
                if kind != "MODEL":
                    stranger = run.engine.clients[(client + 1) % CLIENTS]
                    reply = stranger.answer(message)
                    assert reply.frame is None, kind
                    refused[kind, reply.reason.split(":")[0]] += 1
            return real(messages, round=round)

        run.engine.exchange = exchange
        (record,) = run.rounds()
    assert record.used == CLIENTS
    assert {kind for kind, _ in refused} == {"BATCH", "KEY_BUNDLE", "SHARE_BUNDLE", "SURVIVORS", "CERTIFICATE"}
    assert {reason for _, reason in refused} <= {"WrongSession", "ForeignClient"}


def test_a_client_that_claims_another_group_is_refused_and_spoils_no_sum(task):
    """Client 4 answers with the messages of a client of another group, or with its own, changed to look like them."""
    with Run.start(task, grouped(trials=0, rounds=1), force=True) as run:
        sums = run.engine.clients[4].sums
        stranger = run.engine.clients[3].sums

        class Claims:
            number = 4

            def __getattr__(self, name):
                return getattr(sums, name)

            def answer(self, message):
                said = bytearray(sums.answer(message))
                if len(said) >= HEADER_BYTES:
                    said[8:24] = stranger.agreement.session[:16]
                return bytes(said)

        run.engine.clients[4].sums = Claims()
        (record,) = run.rounds()
    assert [entry.client for entry in record.trouble] == [4]
    assert "WrongSession" in record.clients[4].reason
    assert record.used == CLIENTS - 1


def test_a_reply_that_carries_another_clients_number_reaches_no_sum(task):
    with Run.start(task, grouped(trials=0, rounds=1), force=True) as run:
        real, rng = run.engine.exchange, random.Random(1)

        def exchange(messages, *, round):
            for reply in real(messages, round=round):
                yield reply
                if reply.frame is not None and rng.random() < 0.5:
                    yield replace(reply, client=(reply.client + 1) % CLIENTS)

        run.engine.exchange = exchange
        (record,) = run.rounds()
    honest, _, _ = trained(grouped(trials=0, rounds=1), task=task)
    assert record.used == CLIENTS
    np.testing.assert_array_equal(run.model, honest.model)
