"""Second moments and class sums: the values, and claim 13: what a sample adds is its own, exact and within the clip."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attacks.front_record import front_record, whole_products
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.persample.clips import L2, Dual
from bqsgd._src.persample.moments import CLASS_WEIGHT, clipped_moments, moments_dimension

CLIPS = (L2(1.0), L2(0.3), Dual(0.5, 0.1), Dual(1.0, 0.02))
POWER = 1024
"""A batch size that divides without rounding."""


def moments(inputs, labels, clip=CLIPS[0], classes=3, batch_size=POWER):
    return clipped_moments((inputs, labels), classes=classes, clip=clip, batch_size=batch_size)


def extremes(samples, features, seed):
    """Samples over the whole range of float32, with zeros, infinities, NaN and classes that are none among them."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, features, generator=generator)
    inputs = (inputs * 10.0 ** torch.randint(-44, 38, (samples, 1), generator=generator).double()).float()
    inputs[::7, 0] = math.nan
    inputs[::11, -1] = -math.inf
    inputs[::13] = 0
    labels = torch.randint(0, 3, (samples,), generator=generator)
    labels[::5] = -1
    return inputs, labels


def test_the_moments_are_those_of_the_directions():
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(40, 6, generator=generator), torch.randint(0, 3, (40,), generator=generator)
    found, dropped = moments(inputs, labels, batch_size=40)
    unit = torch.nn.functional.normalize(inputs.double())
    products = unit[:, :, None] * unit[:, None, :]
    rows, columns = torch.triu_indices(6, 6)
    sums = torch.nn.functional.one_hot(labels, 3).double()[:, :, None] * unit[:, None, :] * CLASS_WEIGHT
    each = torch.cat([products[:, rows, columns], sums.flatten(1)], dim=1)
    expected = torch.nn.functional.normalize(each).mean(dim=0)
    assert dropped == 0
    assert len(found) == moments_dimension(6, 3)
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("clip", CLIPS, ids=str)
@given(samples=st.integers(1, 30), features=st.integers(1, 40), seed=st.integers(0, 2**31), data=st.data())
@settings(max_examples=6, deadline=None)
def test_own_moments_add_up_to_the_last_bit(clip, samples, features, seed, data):
    """The sum over a batch, in any order and any company, is the sum of what each sample adds alone."""
    inputs, labels = extremes(samples, features, seed)
    together, dropped = moments(inputs, labels, clip)
    alone = [moments(inputs[row : row + 1], labels[row : row + 1], clip) for row in range(samples)]
    assert torch.equal(together, sum(one.mean for one in alone))
    assert dropped == sum(one.dropped for one in alone)
    order = torch.tensor(data.draw(st.permutations(range(samples))))
    assert torch.equal(moments(inputs[order], labels[order], clip).mean, together)


@pytest.mark.parametrize("clip", CLIPS, ids=str)
@given(features=st.integers(1, 60), seed=st.integers(0, 2**31))
@settings(max_examples=6, deadline=None)
def test_measured_sensitivity_of_moments_never_exceeds_the_stated_one(clip, features, seed):
    inputs, labels = extremes(24, features, seed)
    inputs[1] = inputs[1].sign() * inputs[1].abs().max()  # equal entries: the norm is in many coordinates
    inputs[2, 1:] = 0  # all of it in one
    labels[:3] = 1
    for size in (1, 7, 24):
        stated = clip.sensitivity(batch_size=size, range=1.0)
        whole = moments(inputs, labels, clip, batch_size=size).mean
        for row in range(4):
            rest = torch.arange(24) != row
            moved = whole - moments(inputs[rest], labels[rest], clip, batch_size=size).mean
            assert moved.norm() <= stated.l2
            assert moved.abs().max() <= stated.linf


def test_a_sample_fills_the_norm_whatever_its_size():
    for scale in (1e-40, 1e-3, 1.0, 1e30):
        found, dropped = moments(torch.full((1, 500), scale), torch.tensor([2]), L2(0.5), batch_size=1)
        assert dropped == 0
        assert 0.4998 < found.norm() <= 0.5


def test_a_record_in_front_moves_no_product_but_its_own():
    inputs, labels = front_record(2000, 67)
    last = torch.zeros(67, 67, dtype=torch.bool)
    last[-1, -1] = True
    rows, columns = torch.triu_indices(67, 67)
    mine = torch.cat([last[rows, columns], (torch.arange(67) == 66).repeat(3)])
    moved = moments(inputs, labels).mean - moments(inputs[1:], labels[1:]).mean
    assert torch.equal(moved[~mine], torch.zeros_like(moved[~mine]))
    assert moved[mine].abs().max() > 0
    naive = whole_products(inputs, labels, classes=3, batch_size=POWER)
    naive = (naive - whole_products(inputs[1:], labels[1:], classes=3, batch_size=POWER))[:-3, :-1]
    assert naive.abs().max() > 0  # one product of matrices does move the others


def test_what_cannot_count_counts_as_zero():
    good = torch.ones(1, 4)
    bad = torch.stack([torch.full((4,), math.nan), torch.full((4,), math.inf), torch.zeros(4), torch.ones(4)])
    found, dropped = moments(torch.cat([good, bad]), torch.tensor([0, 0, 0, 0, 3]))
    assert dropped == 4
    assert torch.equal(found, moments(good, torch.tensor([0])).mean)
    assert not moments(torch.empty(0, 4), torch.empty(0, dtype=torch.long)).mean.any()


def test_too_many_features_are_refused_before_anything_is_made():
    with pytest.raises(InvalidParameter, match="features"):
        moments_dimension(15_552, 10)
