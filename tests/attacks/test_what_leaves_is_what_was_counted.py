"""Between the spend and the bytes: interrupts, settings that change, sums with other noise, a log that fails."""

import os
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bqsgd._src.client.sums import check_noise
from bqsgd._src.codec import encode_frame
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import Ledger
from bqsgd._src.models import to_vector
from bqsgd._src.noise import privacy_rng
from bqsgd._src.params import Mechanism
from bqsgd._src.persample import L2
from bqsgd._src.planner.sums import in_sums
from bqsgd._src.release import Release
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.graph import thresholds
from bqsgd._src.secure.roster import Roster, public_key
from bqsgd.distributed import BQHookState, PrivateSteps
from tiny_task import linear

LOSS = torch.nn.CrossEntropyLoss(reduction="none")
BATCH = torch.rand(3, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(3, dtype=torch.long)
NUMBERS = torch.tensor([0, 1, 7])


def press(times=1):
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def hook(tmp_path):
    """A hook's state with a ledger, and what asks it for the frame of its one bucket."""
    with Ledger.open(tmp_path / "a", client=0, budget_epsilon=1e4, budget_delta=1e-5) as ledger:
        private = PrivateSteps(
            model=linear(), loss_fn=LOSS, clip=L2(1.0), batch_size=4, dataset_size=8, ledger=ledger, run="a"
        )
        state = BQHookState(Mechanism(levels=2, trials=400), range=1.0, rng=privacy_rng(), private=private)

        def frame():
            outlet = partial(encode_frame, client=0, range=state.range)
            return private.frame(list(private.model.parameters()), 0, state, outlet, round=0)

        yield state, frame, ledger


@pytest.mark.parametrize("change", [{"mechanism": Mechanism(levels=1000, trials=1)}, {"range": 0.01}])
def test_a_hook_whose_settings_change_after_the_spend_sends_nothing(hook, change):
    state, frame, ledger = hook
    state.supply(BATCH, indices=NUMBERS)
    before = {name: getattr(state, name) for name in change}
    vars(state).update(change)
    with pytest.raises(InvalidParameter, match="nothing was sent"):
        frame()
    vars(state).update(before)
    assert frame() == frame()
    assert ledger.spent_rounds == 1


def test_one_ctrl_c_while_a_step_is_supplied_leaves_a_step_that_can_be_sent(hook, monkeypatch):
    state, frame, ledger = hook
    mean = state.private._objective.mean

    def interrupted(*given, **asked):
        press()
        return mean(*given, **asked)

    monkeypatch.setattr(state.private._objective, "mean", interrupted)
    with pytest.raises(KeyboardInterrupt):
        state.supply(BATCH, indices=NUMBERS)
    assert frame() == frame()
    assert ledger.spent_rounds == 1


def test_two_ctrl_c_while_the_ledger_writes_leave_a_step_that_can_be_supplied_again(hook, monkeypatch):
    """The spend is durable and no mean was computed: the step is taken again, and counted again."""
    state, frame, ledger = hook
    reserve = ledger.reserve

    def interrupted(*given, **asked):
        reserve(*given, **asked)
        press(2)

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "reserve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            state.supply(BATCH, indices=NUMBERS)
    state.supply(BATCH, indices=NUMBERS)
    assert frame() == frame()
    assert ledger.spent_rounds == 2


def test_ctrl_c_while_a_bucket_is_encoded_is_raised_when_its_bytes_are_kept(hook):
    state, frame, ledger = hook
    state.supply(BATCH, indices=NUMBERS)
    drawn = []

    def interrupting(*given, **asked):
        press()
        drawn.append(encode_frame(*given, client=0, range=state.range, **asked))
        return drawn[-1]

    with pytest.raises(KeyboardInterrupt):
        state.private.frame(list(state.private.model.parameters()), 0, state, interrupting, round=0)
    assert [frame()] == drawn
    assert ledger.spent_rounds == 1


def test_a_private_log_that_fails_on_some_data_does_not_decide_whether_there_is_a_frame(settings, make_client):
    """A label out of range leaves no training loss, and no loss cannot be formatted."""
    lines = []
    config = settings(private_metrics=True)
    client = make_client(config, private_log=lambda figures: lines.append(f"{figures['training_loss']:.3f}"))
    assert client.update(to_vector(client.model), 0).frame is not None
    assert len(lines) == 1
    client.samples.targets[:] = 7
    assert client.update(to_vector(client.model), 1).frame is not None
    assert len(lines) == 1


@pytest.fixture
def sums(settings, make_client):
    """(trials, seed) -> the sums of a client with so many trials, and the release with 3,000 of them."""
    rule = thresholds(clients=3, dropouts=0, colluders=0)
    keys = [Ed25519PrivateKey.generate() for _ in range(3)]
    roster = Roster({number: public_key(key) for number, key in enumerate(keys)})
    terms = in_sums(make_client(settings()).terms, rule)

    def of(trials, seed=None):
        seeded = seed is not None
        agreed = Agreement(roster=roster, run="a", rule=rule, dimension=6, width=16, trials=trials, seeded=seeded)
        client = SumClient(agreed, identity=keys[0], number=0, seed=seed)
        return client, Release(mechanism=Mechanism(levels=4, trials=3000), terms=terms)

    return of


def test_a_sum_with_the_noise_that_is_counted_is_taken(sums):
    for seed, seeded in ((None, False), (None, True), (1, True)):
        client, release = sums(3000, seed)
        check_noise(client, release, rule=client.agreement.rule, seeded=seeded)


def test_a_sum_with_less_noise_than_the_ledger_would_count_is_refused(sums):
    client, release = sums(30)
    with pytest.raises(InvalidParameter, match=r"agreed on 30 trials .* would count 3000"):
        check_noise(client, release, rule=client.agreement.rule, seeded=False)


def test_a_sum_with_seeded_noise_that_the_ledger_would_count_as_private_is_refused(sums):
    client, release = sums(3000, 1)
    with pytest.raises(InvalidParameter, match="are seeded"):
        check_noise(client, release, rule=client.agreement.rule, seeded=False)


def test_a_sum_over_fewer_clients_than_the_ledger_would_count_is_refused(sums):
    client, release = sums(3000)
    with pytest.raises(InvalidParameter, match="over 3 to 3 clients, client 0 would count one over 4 to 4"):
        check_noise(client, release, rule=thresholds(clients=4, dropouts=0, colluders=0), seeded=False)
    of_five = replace(release, terms=replace(release.terms, group=5))
    with pytest.raises(InvalidParameter, match="nothing is sent"):
        check_noise(client, of_five, rule=client.agreement.rule, seeded=False)
