"""Loops over samples that lie one after another: the same bits in every place, among all neighbours, on any threads.

Samples that lie beside each other are copied first and must give the same bits: nothing may depend on the layout.
"""

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bqsgd._src.persample._kernels import loops
from bqsgd._src.persample._kernels.contiguous import LARGEST_RATIO, PANEL, SUM_BLOCK, rows_product
from bqsgd._src.persample._kernels.grid import Grid, held_to
from bqsgd._src.persample._kernels.pairs import Pairs, Side, in_lanes, lanes_of

FEATURES = [1, 2, 15, 16, 17, 31, 33, 64, 100, PANEL * 33 + 5, 1280, 3969]


@pytest.fixture(autouse=True)
def one_thread_after_each_test():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def always_threads(monkeypatch):
    """Few numbers go to helpers as well."""
    monkeypatch.setattr("bqsgd._src.runtime.threads.FEW", 1)


def samples(count, size, *, seed=0, spread=4.0):
    """Normal numbers; samples and entries differ in size by many powers of two."""
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.uniform(-spread, spread, (count, 1)) + rng.uniform(-spread, spread, (count, size)))
    return torch.from_numpy((rng.standard_normal((count, size)) * sizes).astype(np.float32))


def beside_each_other(values):
    """The same values with the samples of an entry beside each other in memory."""
    return values.t().contiguous().t()


def bits(values):
    found = np.ascontiguousarray(values)
    return found.view({4: np.uint32, 8: np.uint64}[found.itemsize])


def same(left, right):
    return np.array_equal(bits(left), bits(right))


def in_other_places(values, seed=1):
    """The samples among strangers of very different size, and where each of them then stands."""
    rng = np.random.default_rng(seed)
    count = len(values)
    places = np.sort(rng.choice(3 * count, count, replace=False))
    among = samples(3 * count, values.shape[1], seed=seed + 1, spread=40.0)
    among[::7] = math.inf
    among[1::11] = math.nan
    among[places] = values
    return among, places


# products


def product_as_documented(w, x, bias):
    """Lane l adds the features l, l + 16, ... by fma; the lanes are added in halves; the bias comes last."""
    rows, features = w.shape
    found = np.empty((rows, len(x)), np.float32)
    for row in range(rows):
        for sample in range(len(x)):
            lanes = [np.float32(0)] * 16
            for at in range(-(-features // 16) * 16):
                a, b = (w[row, at], x[sample, at]) if at < features else (np.float32(0), np.float32(0))
                exact = np.longdouble(a) * np.longdouble(b) + np.longdouble(lanes[at % 16])
                lanes[at % 16] = np.float32(exact)
            apart = 8
            while apart:
                lanes = [np.float32(lanes[lane] + lanes[lane + apart]) for lane in range(apart)]
                apart //= 2
            found[row, sample] = np.float32(lanes[0] + bias[row])
    return found


@pytest.mark.parametrize("features", [1, 16, 33, 100])
def test_a_product_is_the_documented_sequence_of_operations(features):
    # Few significant bits, so that the exact sum fits in a long double and is rounded to float32 once, as by fma.
    rng = np.random.default_rng(features)
    w, x = (rng.integers(-(2**10), 2**10, (4, features)).astype(np.float32) / 2**9 for _ in range(2))
    w[0] *= np.float32(2**14)
    bias = rng.standard_normal(4).astype(np.float32)
    assert same(rows_product(w, torch.from_numpy(x), bias), product_as_documented(w, x, bias))


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("rows", [1, 2, 3, 10, 17, 64])
def test_a_product_is_that_of_float64(features, rows):
    x, w = samples(9, features), samples(rows, features, seed=3).numpy()
    bias = samples(1, rows, seed=4)[0].numpy()
    exact = w.astype(np.float64) @ x.numpy().T.astype(np.float64) + bias[:, None].astype(np.float64)
    size = np.abs(w).astype(np.float64) @ np.abs(x.numpy()).T.astype(np.float64) + np.abs(bias)[:, None]
    assert (np.abs(rows_product(w, x, bias) - exact) <= (features / 16 + 6) * 2.0**-24 * size).all()
    assert same(rows_product(w, x, None), rows_product(w, x, np.zeros(rows, np.float32)))


@pytest.mark.parametrize("features", FEATURES)
def test_a_product_does_not_change_with_place_neighbours_or_rows(features):
    x, w = samples(35, features), samples(13, features, seed=3).numpy()
    bias = samples(1, 13, seed=4)[0].numpy()
    alone = np.concatenate([rows_product(w, x[n : n + 1], bias) for n in range(len(x))], axis=1)
    among, places = in_other_places(x)
    assert same(rows_product(w, among, bias)[:, places], alone)
    assert same(rows_product(w[3:5], among, bias[3:5])[:, places], alone[3:5])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_product_does_not_change_with_threads(threads, always_threads):
    x, w = samples(101, 333), samples(10, 333, seed=3).numpy()
    torch.set_num_threads(1)
    expected = rows_product(w, x, None)
    torch.set_num_threads(threads)
    assert same(rows_product(w, x, None), expected)


def test_a_product_of_no_samples_is_empty():
    assert rows_product(np.zeros((3, 5), np.float32), torch.zeros(0, 5), None).shape == (3, 0)


def test_a_product_refuses_samples_that_lie_otherwise():
    with pytest.raises(ValueError, match="contiguous"):
        rows_product(np.zeros((3, 5), np.float32), torch.zeros(5, 4).t(), None)
    with pytest.raises(ValueError, match="float64"):
        rows_product(np.zeros((3, 5), np.float32), torch.zeros(4, 5).double(), None)


# norms


@pytest.mark.parametrize("features", [*FEATURES, SUM_BLOCK, 2 * SUM_BLOCK + 19])
@pytest.mark.parametrize("bound", [None, 0.37, 1e-3])
def test_norms_are_those_of_float64_in_both_layouts(features, bound):
    x = samples(21 if features < SUM_BLOCK else 5, features)
    held = x.double().abs() if bound is None else x.double().abs().clamp(max=bound)
    found = loops.squared_norms(x, bound)
    exact = held.square().sum(1)
    assert torch.allclose(found, exact, rtol=features * 2.0**-54 + 2.0**-52, atol=0)
    assert same(loops.squared_norms(beside_each_other(x), bound), found)
    assert torch.equal(loops.largest(x), x.double().abs().amax(1))
    assert torch.equal(loops.largest(beside_each_other(x)), loops.largest(x))
    assert same(loops.norms(x)[1], loops.squared_norms(x))
    assert torch.equal(loops.norms(x)[0], loops.largest(x))
    assert same(loops.norms(beside_each_other(x))[1], loops.squared_norms(x))


@pytest.mark.parametrize("features", [33, 3969, SUM_BLOCK + 100])
def test_norms_do_not_change_with_place_or_neighbours(features):
    x = samples(7, features)
    alone = [loops.norms(x[n : n + 1]) for n in range(len(x))]
    among, places = in_other_places(x)
    most, squares = loops.norms(among)
    assert same(most[places], torch.cat([most for most, _ in alone]))
    assert same(squares[places], torch.cat([squares for _, squares in alone]))
    assert same(loops.squared_norms(among, 0.1)[places], loops.squared_norms(x, 0.1))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("count", "features"), [(1, 20 * SUM_BLOCK + 7), (101, 100)])
def test_norms_do_not_change_with_threads(threads, count, features, always_threads):
    x = samples(count, features)
    torch.set_num_threads(1)
    expected, clamped = loops.norms(x), loops.squared_norms(x, 0.2)
    torch.set_num_threads(threads)
    assert all(same(found, known) for found, known in zip(loops.norms(x), expected, strict=True))
    assert same(loops.squared_norms(x, 0.2), clamped)


def test_what_is_not_finite_shows_in_the_largest_magnitude():
    x = samples(6, 40)
    x[1, 39], x[2, 3], x[3, 17] = math.nan, -math.inf, -math.nan
    x[4, 3], x[4, 9] = math.nan, math.inf
    found = loops.largest(x)
    assert found[[1, 3, 4]].isnan().all()
    assert found[2] == math.inf
    assert found[[0, 5]].isfinite().all()


def test_denormal_numbers_count():
    x = torch.full((3, 50), 2.0**-149)
    assert (loops.largest(x) == 2.0**-149).all()
    assert torch.allclose(loops.squared_norms(x), torch.full((3,), 50 * 2.0**-298, dtype=torch.float64))
    product = rows_product(np.full((2, 50), 1.5, np.float32), x, None)
    assert (product > 0).all()
    assert product[0, 0] == np.float32(2.0**-149) * 100  # each of 50 products is rounded to 2^-148


@pytest.mark.parametrize("rows", [1, 3, 10, 64, 65])
def test_squares_of_clamped_products_are_those_of_float64(rows):
    a, e = samples(9, 117), samples(9, rows, seed=5)
    a[3], e[4], e[5, 0] = 0, 0, 0
    exact = (e.double().abs()[:, :, None] * a.double().abs()[:, None]).clamp(max=0.3).square().sum((1, 2))
    found = loops.clamped_outer_squares(a, e, 0.3)
    assert torch.allclose(found, exact, rtol=1e-12, atol=0)
    assert same(loops.clamped_outer_squares(beside_each_other(a), beside_each_other(e), 0.3), found)
    among, places = in_other_places(a)
    errors = samples(len(among), rows, seed=9)
    errors[places] = e
    finite = among.isfinite().all(1)
    chosen = loops.clamped_outer_squares(among[finite], errors[finite], 0.3)
    assert same(chosen[np.isin(np.flatnonzero(finite), places)], found)


# sums of steps of outer products


def own_weights(a, e):
    """What scales each sample's outer product to a norm just below 1."""
    return 0.99 / (loops.squared_norms(a) * loops.squared_norms(e)).sqrt()


def outer(a, e, weights, *, bound, grid):
    out = torch.zeros(e.shape[1], a.shape[1], dtype=torch.float64)
    loops.outer_steps(a, e, grid, weights, out, bound=bound, most=loops.largest(a))
    return out


CLAMPS = [None, 0.01]


def clip(a, e, bound):
    """Weights and the grid of an L2 clip, or of a clamp."""
    if bound is None:
        return own_weights(a, e), Grid(1.0)
    return torch.ones(len(a), dtype=torch.float64), Grid(bound)


@pytest.mark.parametrize("bound", CLAMPS)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 10, 13, 32, 33, 100])
@pytest.mark.parametrize("features", [1, 17, 32, 100, PANEL * 33 + 5])
def test_outer_steps_are_the_same_in_both_layouts_and_near_float64(bound, rows, features):
    a, e = samples(37, features), samples(37, rows, seed=5)
    weights, grid = clip(a, e, bound)
    found = outer(a, e, weights, bound=bound, grid=grid)
    assert torch.equal(outer(beside_each_other(a), e, weights, bound=bound, grid=grid), found)
    assert torch.equal(outer(a, beside_each_other(e), weights, bound=bound, grid=grid), found)
    products = e.double()[:, :, None] * a.double()[:, None]
    held = products if bound is None else products.clamp(-held_to(bound), held_to(bound))
    exact = (held * weights[:, None, None] / grid.step).sum(0)
    assert float((found - exact).abs().max()) <= 37 * (0.5 + 2.0**22 * 2.0**-22)
    assert torch.equal(found, found.round())


@pytest.mark.parametrize("bound", CLAMPS)
@pytest.mark.parametrize("rows", [10, 40])
def test_outer_steps_add_up_to_the_last_bit(bound, rows):
    a, e = samples(600, 77), samples(600, rows, seed=5)
    weights, grid = clip(a, e, bound)
    alone = [outer(a[n : n + 1], e[n : n + 1], weights[n : n + 1], bound=bound, grid=grid) for n in range(600)]
    assert torch.equal(outer(a, e, weights, bound=bound, grid=grid), torch.stack(alone).sum(0))
    kept = torch.randperm(600)[:299]
    some = outer(a[kept], e[kept], weights[kept], bound=bound, grid=grid)
    assert torch.equal(some, torch.stack(alone)[kept].sum(0))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [10, 40])
def test_outer_steps_do_not_change_with_threads(threads, rows, always_threads):
    a, e = samples(301, 777), samples(301, rows, seed=5)
    weights, grid = clip(a, e, None)
    torch.set_num_threads(1)
    expected = outer(a, e, weights, bound=None, grid=grid)
    torch.set_num_threads(threads)
    assert torch.equal(outer(a, e, weights, bound=None, grid=grid), expected)


@pytest.mark.parametrize("bound", [None, 1e-12, 1e12])
@pytest.mark.parametrize("rows", [10, 40])
def test_outer_steps_hold_over_the_whole_range_of_float32(bound, rows):
    """Inputs from the smallest denormal number to 2^127, with errors that keep their products below 2^126."""
    exponents = np.concatenate([np.arange(-149, 127, 3), [127]])
    a = torch.from_numpy(np.ldexp(np.ones((len(exponents), 50), np.float32), exponents[:, None]))
    a *= torch.rand(a.shape, generator=torch.Generator().manual_seed(0)) * 0.49 + 0.5
    a[:, 3:7] = 2.0**-149
    a[:, 11] = 0
    e = samples(len(exponents), rows, seed=5, spread=1.0)
    e *= torch.from_numpy(np.exp2(np.clip(110.0 - exponents, -120, 110)).astype(np.float32))[:, None]
    weights, grid = clip(a, e, bound)
    weights = weights.clamp(max=1.0)
    found = outer(a, e, weights, bound=bound, grid=grid)
    assert torch.equal(outer(beside_each_other(a), e, weights, bound=bound, grid=grid), found)
    reach, limit = grid.bound / grid.step, held_to(bound) / grid.step
    alone = [outer(a[n : n + 1], e[n : n + 1], weights[n : n + 1], bound=bound, grid=grid) for n in range(len(a))]
    assert torch.equal(torch.stack(alone).sum(0), found)
    for n, own in enumerate(alone):
        assert float(own.abs().max()) <= reach - 1
        exact = e[n].double()[:, None] * a[n].double() * weights[n] / grid.step
        near = exact.abs().amax(1) <= limit * LARGEST_RATIO  # rows beyond are taken for so many times the bound
        error = (own - exact.clamp(-limit, limit))[near]
        assert not error.numel() or float(error.abs().max()) <= 0.5 + reach * 2.0**-22


@pytest.mark.parametrize("bound", CLAMPS)
def test_zero_inputs_add_no_steps_beside_any_error(bound):
    a, e = torch.zeros(40, 70), torch.full((40, 10), 1e37)
    a[7, 3], e[7] = 0.5, 1.0
    found = outer(a, e, torch.ones(40, dtype=torch.float64), bound=bound, grid=Grid(bound or 1.0))
    assert found[:, 3].all()
    found[:, 3] = 0
    assert not found.any()


# sums of steps of gradients as they are


def dense_clip(values, bound):
    if bound is None:
        return 0.99 / loops.squared_norms(values).sqrt(), Grid(1.0)
    return torch.ones(len(values), dtype=torch.float64), Grid(bound)


def added(values, weights, grid, *, bound):
    held = loops.Steps(values.shape[1])
    held.add(values, weights, grid, bound=bound, at=0)
    return held.total()


@pytest.mark.parametrize("bound", CLAMPS)
@pytest.mark.parametrize("size", [1, 10, 63, 64, 65, 1000, SUM_BLOCK + 70])
@pytest.mark.parametrize("count", [1, 2, 9, 300])
def test_steps_are_the_same_in_both_layouts_and_as_in_float64(bound, size, count):
    values = samples(count, size)
    weights, grid = dense_clip(values, bound)
    found = added(values, weights, grid, bound=bound)
    assert torch.equal(added(beside_each_other(values), weights, grid, bound=bound), found)
    assert torch.equal(loops.in_steps(values, grid, weights, bound=bound).sum(0), found)
    held = values.double() if bound is None else values.double().clamp(-held_to(bound), held_to(bound))
    exact = (held * weights[:, None] / grid.step).sum(0)
    assert float((found - exact).abs().max()) <= count * (0.5 + 2.0**22 * 2.0**-22)


@pytest.mark.parametrize("bound", CLAMPS)
def test_steps_add_up_to_the_last_bit(bound):
    values = samples(600, 333)
    weights, grid = dense_clip(values, bound)
    alone = torch.stack([added(values[n : n + 1], weights[n : n + 1], grid, bound=bound) for n in range(600)])
    assert torch.equal(added(values, weights, grid, bound=bound), alone.sum(0))
    kept = torch.randperm(600)[:299]
    assert torch.equal(added(values[kept], weights[kept], grid, bound=bound), alone[kept].sum(0))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_steps_do_not_change_with_threads(threads, always_threads):
    values = samples(7, 9 * SUM_BLOCK + 5)
    weights, grid = dense_clip(values, None)
    torch.set_num_threads(1)
    expected = added(values, weights, grid, bound=None)
    torch.set_num_threads(threads)
    assert torch.equal(added(values, weights, grid, bound=None), expected)


@pytest.mark.parametrize("bound", [1e-12, 1.0, 1e12])
def test_steps_stay_inside_the_bound_over_the_whole_range_of_float32(bound):
    exponents = np.arange(-149, 128, 2)
    values = torch.from_numpy(np.ldexp(np.float32(1), exponents).astype(np.float32))[:, None].repeat(1, 70)
    values[:, ::2] *= -1
    clamp, grid = bound, Grid(bound)
    reach = grid.bound / grid.step
    found = added(values, torch.ones(len(values), dtype=torch.float64), grid, bound=clamp)
    each = loops.in_steps(values, grid, torch.ones(len(values), dtype=torch.float64), bound=clamp)
    assert torch.equal(found, each.sum(0))
    assert float(each.abs().max()) <= reach - 1
    scaled, _ = dense_clip(values, None)
    scaled = (bound * scaled).clamp(max=1.0)
    assert torch.equal(added(values, scaled, grid, bound=None), loops.in_steps(values, grid, scaled, bound=None).sum(0))
    assert float(loops.in_steps(values, grid, scaled, bound=None).abs().max()) <= reach


# sums that are held over many calls


def test_a_held_sum_is_that_of_all_calls():
    sizes, grids = [500, 70, 3], [Grid(1.0), Grid(0.25), Grid(3.0)]
    starts = np.cumsum([0, *sizes])
    held = loops.Steps(int(starts[-1]))
    total = torch.zeros(int(starts[-1]), dtype=torch.float64)
    for call, count in enumerate([1, 200, 55, 1, 256, 700, 3]):
        for size, at, grid in zip(sizes, starts, grids, strict=False):
            values = samples(count, size, seed=call)
            weights = dense_clip(values, None)[0] * grid.bound
            values = beside_each_other(values) if call == 3 else values
            held.add(values, weights, grid, bound=None, at=int(at))
            total[at : at + size] += added(values, weights, grid, bound=None)
        if call == 4:
            assert torch.equal(held.total(), total)
    assert torch.equal(held.total(), total)


def test_a_held_sum_does_not_overflow_at_the_largest_steps():
    held, grid = loops.Steps(80), Grid(1.0)
    values, ones = torch.full((100, 80), 5.0), torch.ones(100, dtype=torch.float64)
    for _ in range(30):
        held.add(values, ones, grid, bound=1.0, at=0)
        held.add(values[:, :40], ones, grid, bound=1.0, at=20)  # overlaps: counted with the other
    own = float(loops.in_steps(values[:1, :1], grid, ones[:1], bound=1.0))
    assert own == 2**22 - 4
    expected = torch.full((80,), 3000 * own, dtype=torch.float64)
    expected[20:60] *= 2
    assert torch.equal(held.total(), expected)


def test_a_held_sum_of_nothing_is_zero():
    held = loops.Steps(5)
    held.add(torch.zeros(0, 5), torch.zeros(0, dtype=torch.float64), Grid(1.0), bound=None, at=0)
    assert torch.equal(held.total(), torch.zeros(5, dtype=torch.float64))


def test_sums_and_norms_of_float64_leave_the_values_as_they_are():
    values = samples(5, 40).double()
    before = values.clone()
    most, squares = loops.norms(values, 0.3)
    assert torch.equal(most, before.abs().amax(1))
    assert torch.allclose(squares, before.abs().clamp(max=0.3).square().sum(1), rtol=1e-14, atol=0)
    weights, grid = dense_clip(values, None)
    found = added(values, weights, grid, bound=None)
    assert torch.equal(found, loops.in_steps(before, grid, weights, bound=None).sum(0))
    assert torch.equal(values, before)


# layouts


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 3), (15, 17), (16, 16), (37, 100), (64, 333)])
def test_samples_are_turned_into_lanes_and_back(count, size, threads, always_threads):
    torch.set_num_threads(threads)
    values = samples(count, size)
    lanes = in_lanes(values, count + 5)
    assert torch.equal(lanes[:count], values)
    assert not lanes[count:].any()
    assert lanes.stride(0) == 1
    back = loops.rows_first(lanes[:count])
    assert back.is_contiguous()
    assert torch.equal(back, values)
    cube = loops.rows_first(in_lanes(values.view(count, size, 1).expand(-1, -1, 2), count))
    assert torch.equal(cube, values[:, :, None].expand(-1, -1, 2))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("positions", "inputs", "outputs"), [(1, 1, 1), (3, 5, 7), (20, 33, 6), (2, 16, 4)])
def test_gradients_over_positions_are_the_documented_sums_in_every_place(positions, inputs, outputs, threads):
    torch.set_num_threads(threads)

    def gradients(a, e):
        steps = np.arange(positions)
        sides = [
            Side(values, np.arange(positions * size), positions * size, np.arange(size), steps * size)
            for values, size in ((e, outputs), (a, inputs))
        ]
        return Pairs(*sides).gradients(slice(0, len(a)))

    a, e = samples(21, positions * inputs), samples(21, positions * outputs, seed=5)
    found = gradients(a, e)
    assert found.is_contiguous()
    wide_a, wide_e = a.view(21, positions, inputs).double(), e.view(21, positions, outputs).double()
    exact, size = wide_e.mT @ wide_a, wide_e.abs().mT @ wide_a.abs()
    assert ((found.view_as(exact) - exact).abs() <= positions * 2.0**-24 * size).all()
    assert same(gradients(beside_each_other(a), beside_each_other(e)), found)
    among, places = in_other_places(a)
    errors = samples(len(among), positions * outputs, seed=9)
    errors[places] = e
    assert same(gradients(among, errors)[places], found)
    assert same(torch.cat([gradients(a[n : n + 1], e[n : n + 1]) for n in range(21)]), found)


def test_a_single_sample_or_entry_has_no_lanes_to_read():
    assert lanes_of(torch.zeros(1, 5)) is None
    assert lanes_of(torch.zeros(5, 1)) is None
    assert lanes_of(torch.zeros(5, 4)) is None
    assert lanes_of(torch.zeros(4, 5).t()) is not None


# other processors


def digest():
    """Of everything the loops find for a few samples."""
    found = hashlib.sha256()
    for features in (1, 33, 3969, SUM_BLOCK + 100):
        a, e = samples(35, features), samples(35, 10, seed=5)
        values = [rows_product(samples(13, features, seed=8).numpy(), a, None)]
        values += [*loops.norms(a), loops.squared_norms(a, 0.1), loops.clamped_outer_squares(a, e, 0.3)]
        for bound in CLAMPS:
            weights, grid = clip(a, e, bound)
            values.append(outer(a, e, weights, bound=bound, grid=grid))
            weights, grid = dense_clip(a, bound)
            values.append(added(a, weights, grid, bound=bound))
        for value in values:
            found.update(np.ascontiguousarray(value).tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("features", [pytest.param("", marks=pytest.mark.slow), "+avx2,+fma"])
def test_the_same_bits_with_narrower_vectors(features, tmp_path):
    """With the loops compiled for another processor: without fma it is a function of the C library."""
    settings = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path)}
    program = f"import {Path(__file__).stem} as tests; print(tests.digest())"
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=os.environ | settings, cwd=Path(__file__).parent, check=True, capture_output=True, text=True
    )
    assert done.stdout.split()[-1] == digest()
