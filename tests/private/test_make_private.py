"""`make_private`: a loop of one's own, what it may contain, and what it comes to."""

import copy

import numpy as np
import pytest
import torch
from private_loops import EXACT, LOSS, recorded
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bqsgd
from bqsgd._src.errors import BudgetExhausted, InvalidParameter, LedgerError
from bqsgd._src.release import Trust
from bqsgd.clips import L2, Clamp, Dual, Normalize, PerLayer, Scale


def epoch(private):
    for batch in private.loader:
        private.step(batch)


def gradient(private, batch):
    """What one backward puts into the model, flat."""
    private.optimizer.zero_grad()
    private.backward(batch)
    return torch.cat([p.grad.flatten() for p in private.model.parameters() if p.requires_grad])


def test_a_loop_spends_what_its_ledger_says_and_names_whom_it_trusts(private, tmp_path):
    made = private(epochs=2)
    assert (len(made.loader), made.rounds, made.guarantee()) == (3, 6, None)
    for _ in range(2):
        epoch(made)
    found = made.guarantee()
    assert made.steps == 6
    assert 0 < found.epsilon <= made.plan.guarantee.epsilon <= 8
    assert found.trust is Trust.TRAINER
    assert "trusted" in str(found)
    assert not found.seeded
    made.close()
    assert recorded(tmp_path / "me.ledger") == 6  # nothing reserved is left over


def test_it_learns(private, points):
    torch.manual_seed(0)
    made = private(seed=1, mechanism=bqsgd.Mechanism(levels=32, trials=200), epochs=8)
    for _ in range(8):
        epoch(made)
    assert (made.model(points[0]).argmax(1) == points[1]).float().mean() > 0.85


def test_the_gradient_is_the_clipped_mean_over_the_public_batch_size(private, points):
    """Without noise, against a batch-of-one oracle; the tolerance is the rounding to a thousandth of the range."""
    model = nn.Linear(4, 2)
    made = private(model, mechanism=EXACT, seed=3, clip=L2(0.7), range=1.0)
    from bqsgd._src.client.draws import Purpose, Sources, draw_batch

    rows = draw_batch("poisson", batch_size=32, dataset_size=96, rng=Sources(seed=3, client=0).at(Purpose.BATCH, 0))
    expected = torch.zeros(10)
    for row in rows:
        model.zero_grad()
        LOSS(model(points[0][row : row + 1]), points[1][row : row + 1]).sum().backward()
        own = torch.cat([p.grad.flatten() for p in model.parameters()])
        expected += own * min(1, 0.7 / own.norm()) / 32
    model.zero_grad()
    batch = next(iter(made.loader))
    assert len(batch) == len(rows)
    assert (gradient(made, batch) - expected).abs().max() <= 1.1e-3


@pytest.mark.parametrize("one_in", [1, 3])
@pytest.mark.parametrize(
    "clip", [PerLayer(L2(0.7)), PerLayer([L2(0.1), Normalize(0.2)]), PerLayer(Dual(0.7, 0.2))], ids=str
)
def test_layers_are_clipped_counted_and_released_by_themselves(private, clip, one_in):
    model = nn.Linear(4, 2)
    made = private(model, mechanism=EXACT, seed=3, clip=clip, range=1.0, one_in=one_in)
    share, rate = clip.of_share(1 / one_in), made.loader.batch_size
    stated = share.sensitivity(batch_size=rate, range=1.0)
    assert made.plan.release.terms.sensitivity == stated
    assert made.plan.release.terms.sensitivity.l2 == pytest.approx(clip.euclidean * one_in**-0.5 / rate)
    for batch in made.loader:
        made.backward(batch)
        break
    drawn = 40 / rate  # of 32 on average
    for own, parameter in zip(share.layers(2), model.parameters(), strict=True):
        assert 0 < float(parameter.grad.norm()) <= own.norm * drawn * one_in + 0.01
    assert str(clip).split("(")[0] in repr(made)


@pytest.mark.parametrize("clip", [Clamp(0.1), Scale(0.1), PerLayer([Clamp(0.1), L2(1.0)]), 1.0, None], ids=str)
def test_a_clip_without_a_norm_is_refused(private, clip):
    with pytest.raises(InvalidParameter, match="clip must bound a norm"):
        private(nn.Linear(4, 2), clip=clip)


def test_clips_for_another_number_of_tensors_are_refused_before_anything_is_spent(private, tmp_path):
    with pytest.raises(InvalidParameter, match="has 3 clips, the model 2"):
        private(nn.Linear(4, 2), clip=PerLayer([L2(1.0)] * 3))
    assert not (tmp_path / "me.ledger").exists()


def test_a_message_of_one_in_three_coordinates_is_clipped_counted_and_decoded_as_such(private, points):
    model = nn.Linear(4, 2)
    made = private(model, mechanism=EXACT, seed=3, clip=L2(0.7), range=1.0, one_in=3)
    whole = private(nn.Linear(4, 2), mechanism=EXACT, seed=3, clip=L2(0.7), range=1.0)
    assert (made.plan.release.terms.dimension, whole.plan.release.terms.dimension) == (4, 10)
    ratio = made.plan.release.terms.sensitivity.l2 / whole.plan.release.terms.sensitivity.l2
    assert ratio == pytest.approx(3**-0.5, rel=1e-6)
    from bqsgd._src.client.draws import Purpose, Sources, draw_batch
    from bqsgd._src.subset import Subsets

    rows = draw_batch("poisson", batch_size=32, dataset_size=96, rng=Sources(seed=3, client=0).at(Purpose.BATCH, 0))
    drawn = Subsets(shapes=((2, 4), (2,)), one_in=3, rotated=True).drawn(round=0, client=0)
    total = 0
    for row in rows:
        parts = torch.autograd.grad(
            LOSS(model(points[0][row : row + 1]), points[1][row : row + 1]).sum(), model.parameters()
        )
        kept = drawn.keep(torch.cat([part.flatten() for part in parts]).double().numpy())
        total += kept * min(1, 0.7 / 3**0.5 / np.linalg.norm(kept)) / 32
    found = gradient(made, next(iter(made.loader))).numpy()
    assert np.abs(found - drawn.estimate(total)).max() <= 5e-3


def test_the_model_is_tried_once_for_samples_of_one_form_however_many_are_drawn(private, monkeypatch):
    from bqsgd._src.persample import program

    tried, real = [], program.traced
    monkeypatch.setattr(program, "traced", lambda *given, **asked: tried.append(1) or real(*given, **asked))
    made = private(seed=1, epochs=3)
    drawn = set()
    for _ in range(3):
        for batch in made.loader:
            drawn.add(len(batch))
            made.step(batch)
    assert len(drawn) > 2
    assert len(tried) == 1


def test_the_mean_does_not_depend_on_micro_batches_or_workers(private):
    found = []
    for how in ({"micro_batch": 7}, {"micro_batch": 512}):
        torch.manual_seed(0)
        made = private(seed=5, **how)
        found.append(gradient(made, next(iter(made.loader))))
    assert torch.equal(*found)


@pytest.mark.slow
def test_worker_processes_read_and_do_not_draw(private, points):
    torch.manual_seed(0)
    here = private(seed=5)
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*points), batch_size=32, shuffle=True, num_workers=2)
    there = private(seed=5, loader=loader, micro_batch=10)
    for one, two in zip(here.loader, there.loader, strict=True):
        assert torch.equal(gradient(here, one), gradient(there, two))


def test_unseeded_draws_and_noise_differ_between_steps_and_objects(private, tmp_path):
    first = private()
    second = private(copy.deepcopy(first.model), ledger=tmp_path / "other.ledger")
    found = [gradient(made, batch) for made in (first, second) for batch in made.loader]
    assert all(not torch.equal(a, b) for n, a in enumerate(found) for b in found[:n])


def test_empty_batches_are_noise_and_are_counted(private, points, tmp_path):
    """Of 96 samples at L = 1 about e^-1 of all batches are empty."""
    made = private(batch_size=1, epochs=1)
    sizes = []
    for batch in made.loader:
        sizes.append(len(batch))
        assert gradient(made, batch).abs().sum() > 0
    assert 0 in sizes and made.steps == 96  # noqa: PT018


def test_a_sample_has_the_same_gradient_to_the_last_bit_in_every_batch(private, points):
    """Claim 8: removing a sample moves the clipped mean by that sample's own clipped gradient, to the last bit."""
    from bqsgd._src.client.objective import Objective
    from bqsgd._src.client.samples import Reader
    from bqsgd._src.persample import L2

    model = nn.Sequential(nn.Linear(4, 33), nn.Tanh(), nn.Linear(33, 2))
    for forward in (None, lambda model, batch: (model(batch[0]), batch[1])):
        objective = Objective(model, LOSS, clip=L2(0.3), batch_size=32, forward=forward)
        reader = Reader(TensorDataset(*points))

        def mean(numbers, objective=objective, reader=reader):
            return objective.mean(reader.read(numbers))[0]

        whole = mean(range(40))
        for one in (0, 13, 39):
            rest, alone = mean([n for n in range(40) if n != one]), mean([one])
            # Means are whole steps over 32, a power of two, so these sums are exact.
            assert np.array_equal(whole, rest + alone)
            assert alone.any()


class Dicts(Dataset):
    """Token ids, a mask and a label, as a dict per sample."""

    def __init__(self, samples=64):
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, 12, (samples, 5), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, number):
        ids = self.ids[number]
        return {"ids": ids, "mask": ids == 0, "label": int(ids[0] % 2)}


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
        self.encoder, self.norm, self.head = nn.TransformerEncoder(layer, 1), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, ids, mask):
        return self.head(self.norm(self.encoder(self.table(ids), src_key_padding_mask=mask)).mean(dim=1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(dim=1))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class Tied(nn.Module):
    """A language model whose output layer is its table."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids):
        return self.out(torch.tanh(self.table(ids)))


class LoRA(nn.Module):
    """A frozen linear layer with a low-rank update that is trained."""

    def __init__(self, frozen, rank):
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / 2)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x):
        return self.frozen(x) + x @ self.down.T @ self.up.T


def sequences(points):
    return TensorDataset(points[0].unsqueeze(1) * torch.ones(1, 3, 1), points[1])


def oracle(model, losses, rows, norm, batch_size):
    """The clipped mean by ordinary autograd, one sample at a time."""
    trained = [p for p in model.parameters() if p.requires_grad]
    total = 0
    for row in rows:
        found = torch.autograd.grad(losses(row).sum(), trained, allow_unused=True)
        own = torch.cat(
            [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(trained, found, strict=True)]
        )
        total = total + own * min(1, norm / own.norm()) / batch_size
    return total


def check_against_oracle(private, model, dataset, losses, **given):
    """One batch of everything (L = n: every sample is drawn) without noise, dropout off."""
    model.eval()
    samples = len(dataset)
    made = private(model, dataset=dataset, batch_size=samples, mechanism=EXACT, seed=0, range=0.5, **given)
    batch = next(iter(made.loader))
    assert len(batch) == samples
    expected = oracle(model, losses, range(samples), 1.0, samples)
    assert (gradient(made, batch) - expected).abs().max() <= 0.6e-3
    assert made.dropped == 0
    assert made.dimension == len(expected)


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.gradients.SlowGradientsWarning")
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_layers(private, points, kind):
    model, dataset = Recurrent(kind), sequences(points)

    def losses(row):
        return LOSS(model(dataset[row][0][None]), dataset[row][1][None])

    check_against_oracle(private, model, dataset, losses)


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.gradients.SlowGradientsWarning")
def test_attention(private, points):
    model, dataset = Attention(), sequences(points)
    check_against_oracle(private, model, dataset, lambda row: LOSS(model(dataset[row][0][None]), dataset[row][1][None]))


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.gradients.SlowGradientsWarning")
def test_a_transformer_on_dict_batches(private):
    model, dataset = Transformer(), Dicts()

    def losses(row):
        one = dataset[row]
        return LOSS(model(one["ids"][None], one["mask"][None]), torch.tensor([one["label"]]))

    def forward(model, batch):
        return model(batch["ids"], batch["mask"]), batch["label"]

    one = {"ids": torch.zeros(5, dtype=torch.int64), "mask": torch.zeros(5, dtype=torch.bool), "label": 0}
    check_against_oracle(private, model, dataset, losses, forward=forward, sample=one)


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.gradients.SlowGradientsWarning")
def test_tied_weights_and_a_token_loss_summed_per_sequence(private):
    ids = Dicts().ids
    model, dataset = Tied(), TensorDataset(ids[:, :-1], ids[:, 1:])

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").sum(dim=1)

    check_against_oracle(
        private, model, dataset, lambda row: loss(model(ids[row : row + 1, :-1]), ids[row : row + 1, 1:]), loss_fn=loss
    )


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.gradients.SlowGradientsWarning")
def test_only_what_requires_a_gradient_is_sent_and_changed(private, points):
    """LoRA on a frozen layer: d counts the adapters, and the backbone stays as it was to the last bit."""
    model = nn.Sequential(LoRA(nn.Linear(4, 6), rank=2), nn.Tanh(), LoRA(nn.Linear(6, 2), rank=2))
    frozen = {name: value.clone() for name, value in model.state_dict().items() if "frozen" in name}
    dataset = TensorDataset(*points)
    check_against_oracle(
        private, model, dataset, lambda row: LOSS(model(points[0][row : row + 1]), points[1][row : row + 1])
    )
    made = private(model, seed=0)
    assert made.dimension == sum(p.numel() for name, p in model.named_parameters() if "frozen" not in name) == 36
    before = model[0].up.clone()
    epoch(made)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in frozen.items())
    assert not torch.equal(model[0].up, before)


def test_several_inputs_and_a_regression_loss(private, points):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 1), nn.Linear(2, 1)

        def forward(self, x, z):
            return (self.a(x) + self.b(z)).squeeze(1)

    x, model = points[0], Sum()
    dataset = TensorDataset(x, x[:, :2], x[:, 0])
    loss = nn.MSELoss(reduction="none")
    check_against_oracle(
        private,
        model,
        dataset,
        lambda row: loss(model(x[row : row + 1], x[row : row + 1, :2]), x[row : row + 1, 0]),
        loss_fn=loss,
    )


def test_any_optimiser_and_scheduler(private):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    made = private(model, optimizer=optimizer)
    epoch(made)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    assert sorted(model.state_dict()) == ["bias", "weight"]


def test_a_logical_batch_of_4096_is_read_a_few_samples_at_a_time(private):
    class Counting(Dataset):
        alive = most = 0

        def __len__(self):
            return 8192

        def __getitem__(self, number):
            return torch.full((4,), number / 8192), number % 2

    asked = []

    def collate(samples):
        asked.append(len(samples))
        return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])

    loader = DataLoader(Counting(), batch_size=4096, collate_fn=collate)
    made = private(loader=loader, micro_batch=256, seed=0)
    batch = next(iter(made.loader))
    assert len(batch) > 3800
    first = len(asked)
    assert first <= 256 + 1  # the piece that was read ahead, and the made-up record
    private_gradient = gradient(made, batch)
    assert len(asked) - first == len(batch) - 256
    assert set(asked) == {1}, "a collate_fn sees one sample at a time"
    assert private_gradient.abs().sum() > 0


def test_padding_to_the_longest_of_a_batch_cannot_mix_samples(private):
    """A collate_fn that pads sees one sample, so sequences of one length go together, whoever else was drawn."""

    class Ragged(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, number):
            return torch.ones(1 + number % 3) * number / 40, number % 2

    def pad(samples):
        longest = max(len(x) for x, _ in samples)
        rows = [torch.nn.functional.pad(x, (0, longest - len(x)), value=9.0) for x, _ in samples]
        return torch.stack(rows), torch.tensor([y for _, y in samples])

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(1, 2)

        def forward(self, x):
            return self.head(x.mean(dim=1, keepdim=True))

    model, dataset = Mean(), Ragged()
    loader = DataLoader(dataset, batch_size=40, collate_fn=pad)
    check_against_oracle(
        private,
        model,
        dataset,
        lambda row: LOSS(model(dataset[row][0][None]), torch.tensor([row % 2])),
        loader=loader,
        sample=(torch.zeros(1), 0),
    )


@pytest.mark.slow
def test_it_is_planned_from_the_budget(private, points):
    made = private(mechanism=None, range=None, epsilon=8.0, epochs=1, batch_size=96, bits=4)
    assert made.plan.guarantee.epsilon <= 8
    assert made.plan.mechanism.bits_per_coordinate <= 4
    assert made.plan.rounds == 1
    epoch(made)
    assert made.guarantee().epsilon == pytest.approx(made.plan.guarantee.epsilon)


def test_the_budget_ends_the_loop_with_an_error(private, tmp_path):
    """Steps beyond the plan go on as long as the ledger has room, then stop; nothing is recorded beyond it."""
    made = private(mechanism=bqsgd.Mechanism(levels=1, trials=20), epsilon=0.5)
    weights = []

    def loop():
        while True:
            for batch in made.loader:
                weights.append(made.model.weight.detach().clone())
                made.step(batch)

    with pytest.raises(BudgetExhausted, match="Nothing was recorded"):
        loop()
    taken = len(weights) - 1
    assert 0 < taken == made.steps
    assert torch.equal(weights[-1], made.model.weight)
    assert made.guarantee().epsilon <= 0.5
    made.close()
    assert recorded(tmp_path / "me.ledger") == taken


def test_resuming_counts_no_step_twice(private, tmp_path):
    made = private(epochs=3)
    for batch in made.loader:
        made.step(batch)
    state = {"model": made.model.state_dict(), "private": made.state_dict()}
    torch.save(state, tmp_path / "checkpoint.pt")
    made.close()
    spent = recorded(tmp_path / "me.ledger")
    found = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    again = private(epochs=3)
    again.model.load_state_dict(found["model"])
    again.load_state_dict(found["private"])
    assert again.steps == spent == 3
    for _ in range(2):
        epoch(again)
    again.close()
    assert recorded(tmp_path / "me.ledger") == 9
    assert again.guarantee().epsilon == pytest.approx(again.plan.guarantee.epsilon)


def test_steps_made_again_after_an_older_checkpoint_are_counted_again(private, tmp_path):
    """New noise on the same data is a new release."""
    made = private(epochs=2)
    state = made.state_dict()
    epoch(made)
    made.close()
    again = private(epochs=2)
    again.load_state_dict(state)
    epoch(again)
    again.close()
    assert recorded(tmp_path / "me.ledger") == 6


def test_a_state_needs_its_ledger_and_its_settings(private, tmp_path):
    made = private(epochs=2)
    epoch(made)
    state = made.state_dict()
    with pytest.raises(LedgerError, match="restore the ledger"):
        private(ledger=tmp_path / "new.ledger").load_state_dict(state)
    with pytest.raises(InvalidParameter, match="another budget, clip"):
        private(ledger=tmp_path / "more.ledger", epochs=5).load_state_dict(state)
    with pytest.raises(InvalidParameter, match="not a state"):
        private(ledger=tmp_path / "third.ledger").load_state_dict({"steps": 3})
    with pytest.raises(InvalidParameter, match="before the first step"):
        made.load_state_dict(state)


def test_a_step_tells_what_is_public_about_it(private, capsys):
    seen = []
    made = private(on_step=seen.append, progress=True)
    reports = [made.step(batch) for batch in made.loader]
    assert seen == reports
    assert [(report.number, report.planned) for report in reports] == [(1, 6), (2, 6), (3, 6)]
    assert reports[-1].epsilon == made.guarantee().epsilon > 0
    assert str(reports[-1]).startswith("step 3 of 6, epsilon ")
    assert "step 1 of 6" in capsys.readouterr().err
    assert "Linear with 10 trained coordinates, step 3 of 6, batches of 32 in 96" in repr(made)


def test_a_step_is_complete_when_its_callback_fails(private):
    def fails(report):
        raise OSError("disk full")

    made = private(on_step=fails)
    before = made.model.weight.detach().clone()
    with pytest.raises(OSError, match="disk full"):
        made.step(next(iter(made.loader)))
    assert made.steps == 1
    assert not torch.equal(made.model.weight, before)


def test_of_a_compiled_model_the_module_itself_is_trained_and_that_is_said(private, caplog):
    model = nn.Linear(4, 2)
    made = private(torch.compile(model, backend="eager"))
    assert made.model is model
    assert "compiled by torch.compile" in caplog.text
    made.step(next(iter(made.loader)))
