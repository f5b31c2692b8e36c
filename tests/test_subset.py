"""Subsets of rotated coordinates: orthogonal, even, unbiased, the same everywhere; what is kept is clipped."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bqsgd._src.codec import Accumulator, decode_frame, encode_frame
from bqsgd._src.errors import InvalidParameter, WrongParameters
from bqsgd._src.noise import seeded_rng
from bqsgd._src.params import Kept, Mechanism
from bqsgd._src.persample import L2, BatchMean, Clamp, Dual, Normalize, PerLayer, Scale, clipped_gradients
from bqsgd._src.subset import Subsets, rotate_rows

LOSS = nn.CrossEntropyLoss(reduction="none")
SHAPES = ((10, 300), (10,), (6, 1, 5, 5), (1,), (3, 7), ())
rounds = st.integers(0, 2**64 - 1)
numbers = st.integers(0, 2**64 - 2)
shapes = st.lists(st.lists(st.integers(1, 40), max_size=3).map(tuple), min_size=1, max_size=4).map(tuple)


def subsets(one_in=4, *, of=SHAPES, rotated=True):
    return Subsets(shapes=of, one_in=one_in, rotated=rotated)


@given(shapes=shapes, round=rounds)
def test_the_rotation_keeps_norms_and_is_undone_by_its_inverse(shapes, round):
    every = subsets(1, of=shapes)
    vector = np.random.default_rng(1).standard_normal(every.dimension)
    rotated = every.drawn(round=round, client=None).keep(vector)
    assert np.linalg.norm(rotated) == pytest.approx(np.linalg.norm(vector), rel=1e-12)
    np.testing.assert_allclose(every.rotated_back(rotated, round=round), vector, rtol=0, atol=1e-12)


@pytest.mark.parametrize("columns", [1, 7, 8, 16, 25, 40, 70, 150, 300, 512])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_row_is_rotated_in_the_stated_order_to_the_last_bit(columns, kind):
    rng = np.random.default_rng(columns)
    rows = (rng.standard_normal((3, columns)) * 10.0 ** rng.integers(-30, 30, (3, columns))).astype(kind)
    signs = rng.choice([-1, 1], columns).astype(kind)
    expected, block = rows * signs, 1 << min(8, columns.bit_length() - 1)
    for at in (*range(0, columns - block + 1, block), *([columns - block] if columns % block else [])):
        part, apart = expected[:, at : at + block], block // 2
        while apart:
            left, right = np.moveaxis(part.reshape(3, -1, 2, apart), 2, 0)
            part, apart = np.stack([left + right, left - right], 2).reshape(3, block), apart // 2
        expected[:, at : at + block] = part * kind(1 / np.sqrt(block))
    rotate_rows(rows, signs, 0, 3)
    np.testing.assert_array_equal(rows, expected)


@given(shapes=shapes, one_in=st.integers(1, 50), round=rounds, client=numbers)
def test_one_of_every_n_neighbours_is_kept(shapes, one_in, round, client):
    some = subsets(one_in, of=shapes)
    drawn = some.drawn(round=round, client=client)
    assert len(drawn.places) == some.kept == -(-some.dimension // one_in)
    np.testing.assert_array_equal(drawn.places // one_in, np.arange(some.kept))
    assert drawn.places[-1] < some.dimension
    assert sum(drawn.counts) == some.kept
    assert int(drawn.sizes.sum()) == some.dimension


def test_every_place_has_the_same_chance():
    some = subsets(7, of=((10, 300),))
    counts = np.zeros(some.dimension)
    for client in range(3000):
        counts[some.drawn(round=0, client=client).places] += 1
    expected = 3000 / 7
    squares = (counts[: 428 * 7] - expected) ** 2 / expected
    # Chi-square with 6 degrees of freedom for each of 428 groups; five deviations beyond the mean is one in 3 million.
    assert abs(squares.sum() - 428 * 6) < 5 * np.sqrt(2 * 428 * 6)


def test_the_estimate_is_unbiased_and_its_variance_is_as_stated():
    some = subsets(4)
    vector = np.random.default_rng(2).standard_normal(some.dimension)
    rotated = subsets(1).drawn(round=5, client=None).keep(vector)
    total = np.zeros(some.dimension)
    for client in range(400):
        drawn = some.drawn(round=5, client=client)
        total += drawn.spread(rotated[drawn.places])
    error = some.rotated_back(total / 400, round=5) - vector
    expected = np.sqrt(3 / 400) * np.linalg.norm(vector)  # (1 - p) / p = 3, over 400 messages
    assert np.linalg.norm(error) == pytest.approx(expected, rel=0.1)


def test_clients_and_rounds_have_subsets_of_their_own_and_all_processes_the_same():
    some = subsets(8)
    drawn = [some.drawn(round=r, client=c).places for r in (0, 1) for c in (0, 1, None)]
    assert len({places.tobytes() for places in drawn}) == 6
    digest = hashlib.sha256()
    for round in (0, 2**40):
        for client in (0, 5, None):
            each = some.drawn(round=round, client=client)
            digest.update(each.places.astype("<i8").tobytes())
            digest.update(np.concatenate(each.signs).astype("<f4").tobytes())
    assert digest.hexdigest()[:16] == GOLDEN, "a run whose clients draw other subsets than its server learns nothing"


GOLDEN = "d74b4ff9cb81daa5"


@pytest.mark.parametrize("one_in", [0, 2**16 + 1, 1.5, True])
def test_settings_that_no_subset_has(one_in):
    with pytest.raises(InvalidParameter, match="one_in"):
        subsets(one_in)


def models():
    torch.manual_seed(0)
    image, words = torch.randn(12, 1, 12, 12), torch.randint(0, 50, (12, 8))
    yield "linear", nn.Linear(300, 10), torch.randn(12, 300)
    yield "conv", nn.Sequential(nn.Conv2d(1, 6, 5), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 64, 10)), image
    yield "table", nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(128, 10)), words
    yield (
        "float64",
        nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 10)).double(),
        torch.randn(12, 20).double(),
    )
    yield (
        "in rows",
        nn.Sequential(nn.Linear(16, 32), nn.Mish(), nn.GroupNorm(2, 32), nn.Linear(32, 10)),
        torch.randn(12, 16),
    )


MODELS = {name: (model, inputs) for name, model, inputs in models()}
CLIPS = [
    L2(0.3), Normalize(0.3, 0.1), Dual(0.3, 0.01), PerLayer(L2(0.3)), PerLayer(Dual(0.3, 0.01)), Clamp(0.01),
    Scale(0.01), BatchMean(0.01),
]  # fmt: skip


@pytest.fixture(params=MODELS)
def case(request):
    model, inputs = MODELS[request.param]
    return model, inputs, torch.arange(12) % 10


def of_model(model, one_in, *, rotated=True):
    return subsets(one_in, of=tuple(tuple(parameter.shape) for parameter in model.parameters()), rotated=rotated)


def gradients(model, inputs, targets):
    for n in range(len(inputs)):
        loss = LOSS(model(inputs[n : n + 1]), targets[n : n + 1])[0]
        parts = torch.autograd.grad(loss, list(model.parameters()))
        yield torch.cat([part.flatten() for part in parts]).double().numpy()


@pytest.mark.parametrize("one_in", [1, 3, 40])
@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: type(clip).__name__)
def test_the_clip_acts_on_the_kept_coordinates_of_the_rotated_gradient(case, clip, one_in):
    model, inputs, targets = case
    drawn = of_model(model, one_in, rotated=clip.euclidean is not None).drawn(round=3, client=7)
    found = clipped_gradients(model, LOSS, (inputs, targets), clip=clip, batch_size=16, subset=drawn)
    kept = [drawn.keep(gradient) for gradient in gradients(model, inputs, targets)]
    if isinstance(clip, BatchMean):
        expected = (np.sum(kept, axis=0) / 16).clip(-clip.bound, clip.bound)
    else:
        expected = np.sum([clip.clipped(each, drawn.counts) for each in kept], axis=0) / 16
    assert found.mean.shape == expected.shape
    np.testing.assert_allclose(found.mean.numpy(), expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    "clip", [L2(0.3), Dual(0.3, 0.01), PerLayer(Normalize(0.3, 0.1)), Clamp(0.01)], ids=lambda clip: type(clip).__name__
)
def test_what_a_sample_adds_is_its_own_and_inside_the_bound_for_every_subset(case, clip):
    """Claim 14: for any round and client, hence for any subset that anybody could choose."""
    model, inputs, targets = case
    rng = np.random.default_rng(4)
    for one_in in (2, 30):
        shrunk = clip.of_share(1 / one_in)
        some = of_model(model, one_in, rotated=not isinstance(clip, Clamp))
        drawn = some.drawn(round=int(rng.integers(2**63)), client=int(rng.integers(2**63)))

        def mean(index, shrunk=shrunk, drawn=drawn):
            batch = inputs[index] * 1e3 if inputs.is_floating_point() else inputs[index], targets[index]
            return clipped_gradients(model, LOSS, batch, clip=shrunk, batch_size=16, subset=drawn).mean.clone()

        alone = [mean(torch.tensor([n])) for n in range(12)]
        stated = shrunk.sensitivity(batch_size=16, range=1.0)
        for own in alone:
            assert own.abs().max() <= stated.linf
            assert stated.l2 is None or own.norm() <= stated.l2
            assert stated.l2 is None or stated.l2 == pytest.approx(0.3 / 16 / np.sqrt(one_in))
        chosen = torch.as_tensor(rng.permutation(12)[:7])
        assert torch.equal(mean(chosen), torch.stack(alone)[chosen].sum(dim=0))


def test_a_subset_of_another_model_is_refused():
    with pytest.raises(InvalidParameter, match="another model"):
        clipped_gradients(
            nn.Linear(4, 2), LOSS, (torch.zeros(1, 4), torch.zeros(1, dtype=torch.long)), clip=L2(1.0),
            batch_size=1, subset=subsets().drawn(round=0, client=0),
        )  # fmt: skip


MECHANISM = Mechanism(levels=100, trials=0)


def test_frames_of_several_subsets_add_up_to_an_estimate_of_all_coordinates():
    some = subsets(3)
    vector = np.random.default_rng(6).uniform(-1, 1, some.dimension)
    total = Accumulator(some.dimension)
    for client in range(200):
        drawn = some.drawn(round=9, client=client)
        frame = encode_frame(
            drawn.keep(vector),
            MECHANISM,
            range=4.0,
            rng=seeded_rng(seed=client),
            client=client,
            round=9,
            kept=some.header,
        )
        header = total.add(frame, range=4.0, client=client, round=9, subset=drawn)
        assert header.kept == Kept(one_in=3, rotated=True, model_dimension=some.dimension)
    error = some.rotated_back(total.mean(), round=9) - vector
    assert np.linalg.norm(error) < 1.3 * np.sqrt(2 / 200) * np.linalg.norm(vector)


def test_a_frame_is_decoded_only_as_the_part_that_it_is():
    some = subsets(3)
    values = np.zeros(some.kept)
    part = encode_frame(values, MECHANISM, range=1.0, rng=seeded_rng(seed=1), client=0, round=0, kept=some.header)
    whole = encode_frame(values, MECHANISM, range=1.0, rng=seeded_rng(seed=1), client=0, round=0)
    assert len(part) == len(whole) + 16
    np.testing.assert_array_equal(
        decode_frame(part, range=1.0, kept=some.header), decode_frame(whole, range=1.0, dimension=some.kept)
    )
    others = [Kept(one_in=3, rotated=False, model_dimension=some.dimension)]
    others += [Kept(one_in=3, rotated=True, model_dimension=some.dimension + 1), None]
    for other in others:
        with pytest.raises(WrongParameters):
            decode_frame(part, range=1.0, kept=other)
    with pytest.raises(WrongParameters):
        decode_frame(whole, range=1.0, kept=some.header)


def test_a_server_that_chooses_the_round_gains_no_sensitivity():
    """A record whose gradient lies in the kept coordinates alone, for the round that suits it best."""
    model, batch = nn.Linear(256, 2, bias=False), 16
    some, clip = of_model(model, 8), L2(1.0).of_share(1 / 8)
    longest = 0.0
    for round in range(40):
        drawn = some.drawn(round=round, client=0)
        best = np.zeros(some.dimension)
        best[drawn.places[drawn.places < 256]] = 1.0
        record = some.rotated_back(best, round=round)[None, :256]
        assert np.linalg.norm(drawn.keep(np.tile(record[0], 2))) > 0.6 * np.sqrt(2) * np.linalg.norm(record)
        data = (torch.from_numpy(record).float() * 1e3, torch.zeros(1, dtype=torch.long))
        found = clipped_gradients(model, LOSS, data, clip=clip, batch_size=batch, subset=drawn).mean
        longest = max(longest, float(found.double().norm()))
    assert 0.999 * clip.norm / batch < longest <= clip.norm / batch
