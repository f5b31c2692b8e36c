"""The client: what it sends, what it records first, when it declines."""

import numpy as np
import pytest
import torch

from bqsgd._src.client.draws import Purpose
from bqsgd._src.client.values import clip_update
from bqsgd._src.codec import decode_frame
from bqsgd._src.errors import InvalidParameter, LedgerError, ModelMessageError
from bqsgd._src.ledger import Ledger
from bqsgd._src.persample import L2, BatchMean, Clamp, Dual, Normalize, PerLayer, Scale
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.release import Assumption, Relation, Release, Scheme, Unit
from bqsgd._src.settings.groups import BudgetChange
from bqsgd._src.wire.frame import read_frame
from bqsgd._src.wire.model_message import write_model
from tiny_task import client_of

MODEL = np.array([0.1, -0.2, 0.3, 0.0, 0.0, 0.0], np.float32)


def oracle_mean(client, rows, bound, batch_size):
    """Batch-of-one gradients, clamped one by one, summed and divided by the public batch size."""
    total = torch.zeros(6)
    for x, y in zip(client.samples.inputs[rows], client.samples.targets[rows], strict=True):
        client.model.zero_grad()
        client.objective.loss_fn(client.model(x[None]), y[None]).sum().backward()
        total += torch.cat([p.grad.flatten() for p in client.model.parameters()]).clamp(-bound, bound)
    return (total / batch_size).numpy()


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "none"])
def test_the_frame_carries_the_clipped_mean_of_the_drawn_batch(settings, make_client, sampling):
    config = settings(sampling=sampling, levels=100_000)
    client = make_client(config)
    values = decode_frame(client.update(MODEL, 2).frame, range=0.5, dimension=6, client=0, round=2)
    from bqsgd._src.client.draws import draw_batch

    rng = client.sources.at(Purpose.BATCH, 2)
    rows = draw_batch(client.terms.sampling.scheme, batch_size=20, dataset_size=60, rng=rng)
    expected = np.clip(oracle_mean(client, rows, 0.5, 20), -0.5, 0.5)
    np.testing.assert_allclose(values, expected, atol=1.01 * 0.5 / 100_000)
    assert np.abs(expected).max() > 0.01


def test_a_batch_beyond_the_public_size_is_clamped_to_the_range(settings, make_client):
    config = settings(sampling="none", batch_size=1, levels=100_000, clip_bound=0.2)
    values = decode_frame(make_client(config).update(MODEL, 0).frame, range=0.2)
    assert np.abs(values).max() == pytest.approx(0.2)


def test_seeded_frames_repeat_and_differ_by_client_and_round(settings, make_client):
    config = settings(trials=50)
    frames = [make_client(config, client).update(MODEL, round_).frame for client in (0, 1) for round_ in (0, 1)]
    assert len({bytes(frame) for frame in frames}) == 4
    late = make_client(config)
    late.update(MODEL, 0)
    assert late.update(MODEL, 1).frame == frames[1]  # not a matter of what was drawn before
    assert read_frame(frames[0]).header.seeded


def test_unseeded_noise_is_fresh_and_needs_a_ledger(settings, make_client, tmp_path):
    config = settings(seed=None, trials=2000, levels=20, epsilon=50.0)
    with pytest.raises(InvalidParameter, match="needs a ledger"):
        make_client(config).update(MODEL, 0)
    with Ledger.open(tmp_path / "a", client=0, budget_epsilon=50.0, budget_delta=1e-5) as ledger:
        client = make_client(config, ledger=ledger)
        first = client.update(MODEL, 0).frame
        assert not read_frame(first).header.seeded
        assert client.update(MODEL, 0).frame is first  # asked again for the same: the same bytes
        with pytest.raises(LedgerError, match="already recorded"):
            client.update(MODEL + 1, 0)  # new noise for a recorded round must be asked for


def test_the_spend_is_durable_before_the_frame_exists(settings, make_client, tmp_path):
    config = settings(seed=None, trials=2000, levels=20, epsilon=50.0)
    with Ledger.open(tmp_path / "a", client=0, budget_epsilon=50.0, budget_delta=1e-5) as ledger:
        client = make_client(config, ledger=ledger)
        with Ledger(tmp_path / "a") as other:
            assert other.spent_rounds == 0
            assert isinstance(client.update(MODEL, 0).frame, bytearray)
            assert other.spent_rounds == 4  # reserved ahead: over, never under
            for round_ in range(1, 6):
                client.update(MODEL, round_)
            assert other.spent_rounds == 8
        assert client.spending.sent.total() == 6
    with Ledger(tmp_path / "a") as again:
        assert again.spent_rounds == 6  # a clean end gives back what was not sent
        release = Release(mechanism=config.privacy.mechanism, terms=client.terms)
        assert again.guarantee().epsilon == Accountant().compose(release, 6).epsilon(1e-5)
        assert client.spending.guarantee(delta=1e-5) == again.guarantee()


def test_a_spent_budget_declines_and_records_nothing(settings, make_client, tmp_path):
    config = settings(trials=2000, levels=20, epsilon=50.0, seed=None)
    release = Release(mechanism=config.privacy.mechanism, terms=make_client(config).terms)
    enough_for_three = Accountant().compose(release, 3).epsilon(1e-5) * 1.0001
    config = settings(trials=2000, levels=20, epsilon=enough_for_three, seed=None)
    with Ledger.open(tmp_path / "a", client=0, budget_epsilon=enough_for_three, budget_delta=1e-5) as ledger:
        client = make_client(config, ledger=ledger)
        answers = [client.update(MODEL, round_) for round_ in range(5)]
        assert [answer.declined for answer in answers] == [False, False, False, True, True]
        assert "budget is spent" in answers[3].reason
        assert ledger.spent_rounds == 3


def test_infeasible_budgets_and_rounds_beyond_the_plan_decline(settings, make_client):
    change = BudgetChange(client=0, from_round=2, epsilon=1.0)
    config = settings(levels=None, trials=None, epsilon=10.0, rounds=6, budgets=(change,))
    client = make_client(config)
    assert isinstance(client.update(MODEL, 1).frame, bytearray)
    assert "no plan for the budget: earlier rounds have spent" in client.update(MODEL, 2).reason
    assert "beyond the 10" in make_client(settings()).update(MODEL, 10).reason


def test_a_changed_budget_makes_a_new_plan_and_is_noted_in_the_ledger(settings, make_client, tmp_path):
    change = BudgetChange(client=1, from_round=3, epsilon=14.0)
    config = settings(levels=None, trials=None, epsilon=10.0, rounds=6, budgets=(change,), seed=None)
    with Ledger.open(tmp_path / "a", client=1, budget_epsilon=10.0, budget_delta=1e-5) as ledger:
        client = make_client(config, 1, ledger=ledger)
        mechanisms = [read_frame(client.update(MODEL, round_).frame).header.mechanism for round_ in range(6)]
        assert len(set(mechanisms[:3])) == len(set(mechanisms[3:])) == 1
        assert mechanisms[0] != mechanisms[3]
        assert [entry.budget.epsilon for entry in ledger.entries if entry.budget] == [10.0, 14.0]
        assert 10.0 < ledger.guarantee().epsilon <= 14.0


def test_damaged_messages_cost_nothing(settings, make_client, tmp_path):
    config = settings(trials=2000, levels=20, epsilon=50.0, seed=None)
    with Ledger.open(tmp_path / "a", client=0, budget_epsilon=50.0, budget_delta=1e-5) as ledger:
        client = make_client(config, ledger=ledger)
        message = bytearray(write_model(MODEL, round=0))
        message[-1] ^= 1
        with pytest.raises(ModelMessageError):
            client.answer(message)
        assert ledger.spent_rounds == 0
        assert read_frame(client.answer(write_model(MODEL, round=3)).frame).header.round == 3


def test_several_local_steps_are_clipped_whole_and_hide_the_client(settings, make_client):
    changes = {"unit": "client", "local_steps": 3, "local_learning_rate": 0.5, "sampling": "none", "batch_size": 60}
    config = settings(**changes, clip="l2", clip_norm=0.1, range=0.1, levels=100_000)
    client = make_client(config)
    terms = client.terms
    assert (terms.unit, terms.sensitivity.relation) == (Unit.CLIENT, Relation.REPLACE)
    assert terms.sensitivity.l2 == pytest.approx(2.0)
    assert terms.sampling.scheme is Scheme.NONE
    values = decode_frame(client.update(MODEL, 0).frame, range=0.1)
    oracle = torch.nn.Linear(2, 2)
    oracle.load_state_dict({"weight": torch.tensor(MODEL[:4]).view(2, 2), "bias": torch.tensor(MODEL[4:])})
    optimiser = torch.optim.SGD(oracle.parameters(), lr=0.5)
    for _ in range(3):
        optimiser.zero_grad()
        client.objective.loss_fn(oracle(client.samples.inputs), client.samples.targets).mean().backward()
        optimiser.step()
    moved = MODEL - torch.cat([p.detach().flatten() for p in oracle.parameters()]).numpy()
    assert np.linalg.norm(moved) > 0.1
    np.testing.assert_allclose(values, moved * 0.1 / np.linalg.norm(moved), atol=1e-5)


@pytest.mark.parametrize("clip", [Clamp(0.3), Scale(0.3), L2(0.7), Dual(norm=0.7, bound=0.3)])
def test_clip_update_keeps_every_bound_and_leaves_small_updates_alone(clip):
    rng = np.random.default_rng(0)
    for size in (1e-3, 1.0, 1e6):
        update = (rng.normal(size=30) * size).astype(np.float32)
        clipped = clip_update(update, clip)
        if size == 1e-3:
            np.testing.assert_array_equal(clipped, update)
        bound, norm = getattr(clip, "bound", np.inf), getattr(clip, "norm", np.inf)
        assert np.abs(clipped.astype(np.float64)).max() <= bound
        assert np.linalg.norm(clipped.astype(np.float64)) <= norm
    with pytest.raises(InvalidParameter, match="by a clip of one sample"):
        clip_update(update, BatchMean(0.3))


def test_a_whole_update_is_clipped_layer_by_layer():
    update, sizes = np.array([3.0, -4.0, 0.1, 0.2, 5.0]), [2, 0, 2, 1]
    clipped = clip_update(update, PerLayer([L2(1.0), L2(9.0), L2(1.0), Clamp(2.0)]), sizes)
    np.testing.assert_allclose(clipped, [0.6, -0.8, 0.1, 0.2, 2.0], rtol=1e-5)
    assert np.linalg.norm(clipped[:2]) <= 1
    assert np.linalg.norm(clip_update(update * 1e9, PerLayer(L2(1.0)), sizes)) <= 1
    assert np.linalg.norm(clip_update(update * 1e9, Normalize(1.0))) == pytest.approx(1.0, rel=1e-5)
    assert not clip_update(update * np.nan, PerLayer(L2(1.0)), sizes).any()
    with pytest.raises(InvalidParameter, match="has 2 clips, the model 4"):
        clip_update(update, PerLayer([L2(1.0), L2(1.0)]), sizes)


def test_what_was_clipped_is_no_longer_the_callers_array():
    """A site whose training goes on in another thread writes to the array that it has handed over."""
    held = np.array([0.3, -0.2])
    clipped = clip_update(held, L2(norm=1.0))
    held += 1e9
    assert clipped.tolist() == [0.3, -0.2]


def test_private_figures_stay_off_unless_asked_for(settings, make_client):
    seen = []
    make_client(settings(), private_log=seen.append).update(MODEL, 0)
    assert not seen
    make_client(settings(private_metrics=True), private_log=seen.append).update(MODEL, 0)
    assert seen[0]["outside_the_guarantee"] is True
    assert {"batch_size", "training_loss", "dropped_samples", "clamped_fraction"} < set(seen[0])
    with pytest.raises(InvalidParameter, match="private_log"):
        make_client(settings(private_metrics=True))


def test_misfits_are_refused(settings, make_client):
    with pytest.raises(InvalidParameter, match="more than the 10 samples"):
        make_client(settings(sampling="fixed"), samples=10)


def test_packed_rows_are_checked_and_stated_in_the_guarantee(settings, make_client, tmp_path):
    config = settings(trials=50, epsilon=1e6, packed_rows=True)
    client = make_client(config, ledger=Ledger.open(tmp_path / "a", client=0, budget_epsilon=1e6, budget_delta=1e-5))
    frame = client.update(MODEL, 0).frame
    own = make_client(settings(trials=50)).update(MODEL, 0).frame
    assert len(frame) == len(own)
    guarantee = client.spending.guarantee(delta=1e-5)
    assert guarantee.assumption == str(Assumption.PACKED_ROWS)
    assert f"assuming that {Assumption.PACKED_ROWS}" in str(guarantee)
    assert Guarantee.from_dict(guarantee.to_dict()) == guarantee
    client.spending.ledger.close()
    with Ledger(tmp_path / "a") as ledger:
        assert ledger.guarantee().assumption == guarantee.assumption, "the ledger keeps what its figure rests on"
    plain = make_client(settings(trials=50))
    plain.update(MODEL, 0)
    assert plain.spending.guarantee(delta=1e-5).assumption == ""
    assert "assumption" not in plain.spending.guarantee(delta=1e-5).to_dict()


def test_packed_rows_do_not_matter_to_a_whole_client_s_update(settings, make_client):
    client = make_client(settings(unit="client", local_steps=2, packed_rows=True, trials=50))
    client.update(MODEL, 0)
    assert client.spending.guarantee(delta=1e-5).assumption == ""


class Remembering(torch.nn.Module):
    """Draws at random, and keeps what it saw last in a buffer, in a frozen parameter and in a list."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2))
        self.largest = torch.nn.Parameter(torch.zeros(()), requires_grad=False)
        self.kept = []

    def forward(self, x):
        self.seen = x[0].detach().clone()
        self.largest.data = torch.maximum(self.largest.data, x.detach().max())
        self.kept.append(x)
        return self.head(torch.nn.functional.dropout(x, 0.5))


@pytest.mark.parametrize("unit", ["sample", "client"])
def test_nothing_of_the_data_stays_in_the_model_and_known_seeds_tell_no_masks(settings, unit):
    """Without noise and with every sample in each round, only masks make two rounds differ by more than rounding."""
    config = settings(seed=None, trials=0, levels=100_000, unit=unit, sampling="none", batch_size=60)
    model, share = Remembering(), (torch.rand(60, 2), torch.arange(60) % 2)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    client, found = client_of(config, model, loss, share), []
    for round in range(2):
        torch.manual_seed(0)
        found.append(decode_frame(client.update(MODEL, round).frame, range=0.5))
    assert np.abs(found[0] - found[1]).max() > 100 * 0.5 / 100_000
    assert torch.equal(model.seen, torch.zeros(2))
    assert model.largest == 0
    assert model.kept == []
