"""Claim 10, step by step: the pair that dominates every shift vector of an L2 bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
from enumeration import hockey_stick, product, value_law
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import fft

from bqsgd._src.errors import AccountingError
from bqsgd._src.laws import Binomial
from bqsgd._src.privacy import _shapes
from bqsgd._src.privacy._message import coordinate_atoms, message_pair
from bqsgd._src.privacy._shapes import shaped_pair


def curve(pair, log_z):
    """H at z for z >= 1 and H - (1 - z) below: neither is a difference of numbers near 1."""
    z = np.exp(log_z)[:, None]
    above = pair.p_only + np.maximum(pair.p - z * pair.q, 0).sum(axis=1)
    below = z[:, 0] * pair.q_only + np.maximum(z * pair.q - pair.p, 0).sum(axis=1)
    return np.where(log_z >= 0, above, below)


def direct_log_moment(trials, u, order, s):
    """log E_Q[r^s] of one coordinate, summed outcome by outcome."""
    law = Binomial(trials).pmf
    ratio = 1 + u * (np.concatenate([[0.0], law[:-1] / law[1:]]) - 1)
    return np.log(np.sum(law * ratio ** (s if order == 0 else 1 - s)))


@pytest.mark.parametrize(("trials", "dimension", "largest", "length"), [(40, 1, 2.3, 2.3), (30, 2, 1.5, 1.8)])
def test_never_below_full_enumeration_of_random_data(trials, dimension, largest, length):
    """Any two inputs within the bounds, at any offset from the grid of codes: every outcome listed, every z."""
    rng = np.random.default_rng(8)
    pair = shaped_pair(Binomial(trials), largest, length, dimension)
    for _ in range(60):
        shift = rng.normal(size=dimension)
        shift *= length / np.linalg.norm(shift)
        shift *= min(1.0, largest / np.abs(shift).max()) * rng.choice([1.0, rng.uniform()])
        x = rng.choice([0.0, rng.uniform()], size=dimension)
        support = range(-6, trials + 8)
        laws = [
            (value_law(trials, a, support), value_law(trials, a + b, support)) for a, b in zip(x, shift, strict=True)
        ]
        p, q = product(*laws)
        for log_z in np.linspace(-3, 3, 25):
            bound = curve(pair, np.array([log_z]))[0] + max(0.0, -math.expm1(log_z))
            assert hockey_stick((p, q), log_z) <= bound + 1e-12


def test_never_below_enumeration_in_three_dimensions():
    trials, length = 24, 1.2
    pair = shaped_pair(Binomial(trials), length, length, 3)
    support = range(-1, trials + 3)
    rng = np.random.default_rng(3)
    for _ in range(12):
        shift = np.abs(rng.normal(size=3))
        shift *= length / np.linalg.norm(shift)
        still = value_law(trials, 0.0, support)
        laws = [(value_law(trials, u, support), still) for u in shift]
        laws = [pair if rng.random() < 0.5 else pair[::-1] for pair in laws]
        joint = product(*laws)
        for log_z in np.linspace(0, 2.5, 9):
            assert hockey_stick(joint, log_z) <= curve(pair, np.array([log_z]))[0] + 1e-12


def composed_shape(trials, parts, step, points):
    """P- and Q-mass of a message with parts (copies in order A, copies in order B, shift), by transforms."""
    logs = {"p": np.zeros(points // 2 + 1, dtype=complex), "q": np.zeros(points // 2 + 1, dtype=complex)}
    p_only = q_only = 0.0
    for in_a, in_b, u in parts:
        one = coordinate_atoms(Binomial(trials), u).on_grid(step)
        for copies, pair in ((in_a, one), (in_b, one.reversed())):
            if copies:
                index = (pair.first + np.arange(pair.major.size)) % points
                for name in logs:
                    dense = np.zeros(points)
                    np.add.at(dense, index, getattr(pair, name))
                    logs[name] += copies * np.log(fft.rfft(dense))
                p_only, q_only = p_only + copies * pair.p_only, q_only + copies * pair.q_only
    p, q = (np.roll(np.maximum(fft.irfft(np.exp(logs[name]), points), 0), points // 2) for name in ("p", "q"))
    loss = (np.arange(points) - points // 2) * step
    p, q = (
        np.where(loss < 0, q * np.exp(np.minimum(loss, 0)), p),
        np.where(loss < 0, q, p * np.exp(-np.maximum(loss, 0))),
    )
    return p, q, p_only, q_only


@pytest.mark.parametrize(("trials", "largest", "length"), [(70, 3.0, 3.0), (141, 1.0, 4.0), (800, 4.0, 4.0)])
def test_no_mixed_shape_lies_above(trials, largest, length):
    """Two or three shifts, copies in both orders: composed as a loss distribution, below the pair at every z."""
    rng = np.random.default_rng(trials)
    pair = shaped_pair(Binomial(trials), largest, length, 10_000)
    mu = length / math.sqrt(trials / 4)
    log_z = np.linspace(-7, 7, 57) * mu
    bound = curve(pair, log_z)
    points = 1 << 14
    step = (24 * mu + 2 * mu**2) / points
    for _ in range(25):
        parts = []
        for share in rng.dirichlet(np.ones(rng.integers(1, 4))):
            longest = min(largest, math.sqrt(share) * length)
            copies = math.ceil(share * length**2 / longest**2 - 1e-12) * int(rng.integers(1, 6))
            in_a = int(rng.choice([0, copies, rng.integers(0, copies + 1)]))
            parts.append((in_a, copies - in_a, math.sqrt(share * length**2 / copies)))
        p, q, p_only, q_only = composed_shape(trials, parts, step, points)
        for k, z in enumerate(np.exp(log_z)):
            height = p_only + np.maximum(p - z * q, 0).sum() if z >= 1 else z * q_only + np.maximum(z * q - p, 0).sum()
            assert height <= bound[k] + 2e-12 * max(1.0, z), parts


@pytest.mark.parametrize(("trials", "largest", "length"), [(141, 3.0, 3.0), (189, 1.0, 6.0), (14_400, 3.0, 3.0)])
def test_close_to_the_worst_homogeneous_shape(trials, largest, length):
    """Within 2 % where the curve is not small, within a factor of 2 at seven deviations."""
    pair = shaped_pair(Binomial(trials), largest, length, 26_010)
    fewest = math.ceil(length**2 / largest**2)
    mu = length / math.sqrt(trials / 4)
    log_z = np.array([0.0, 1.0, 5.0]) * mu
    alike = [message_pair(Binomial(trials), length / math.sqrt(n), n, attained=True) for n in (fewest, 4 * fewest)]
    ratio = curve(pair, log_z) / np.max([curve(shape, log_z) for shape in alike], axis=0)
    assert np.all(ratio >= 1)
    assert np.all(ratio < [1.02, 1.02, 2.0])


@given(st.integers(8, 3000), st.floats(0.05, 8.0), st.sampled_from([0, 1]), st.floats(1e-14, 1e-6))
@settings(max_examples=40, deadline=None)
def test_a_capped_pair_with_the_moved_mass_dominates(trials, shift, order, allowed):
    pair = _shapes._orders(Binomial(trials), shift)[order]
    excess, q, moved = _shapes._capped(pair, allowed)
    lost = float(pair.p[pair.q == 0].sum())
    assert moved <= max(allowed, lost)
    assert float(q @ excess) == pytest.approx(0.0, abs=1e-12)
    for z in np.exp(np.linspace(-2, 4, 13)):
        truth = float(np.maximum(pair.p - z * pair.q, 0).sum())
        assert truth <= moved + float(np.maximum(1 + excess - z, 0) @ q) + 1e-13


@pytest.mark.parametrize(("trials", "largest", "length"), [(20, 6.0, 6.0), (63, 9.3, 20.0), (70, 30.0, 30.0)])
def test_the_caps_pay_for_the_norm_that_the_grid_adds(trials, largest, length):
    """A shift between two of the grid spends more than its square, and its caps move as much more (step 3)."""
    corners = _shapes._corners(Binomial(trials), largest, length, 40)
    lost = coordinate_atoms(Binomial(trials), largest).p_only
    assert corners.spent > length**2
    assert corners.moved >= corners.spent * lost / largest**2


@given(st.integers(4, 63), st.floats(0.0, 1.0), st.floats(0.02, 1.0))
@settings(max_examples=40, deadline=None)
def test_below_the_grid_the_caps_pay_in_both_orders(trials, cap, part):
    """P(u) against the law with the capped score: it lacks at most u t, or a factor 1 - u t / (1 - u) (step 3)."""
    u = 0.5 * part
    pair = _shapes._orders(Binomial(trials), 1.0)[0]
    score, q, t = _shapes._capped(pair, cap)
    still = pair.q > 0
    moved = pair.q[still] * (1 + u * pair.excess[still])
    order = np.argsort(pair.excess[still], kind="stable")
    law = q * (1 + u * score)
    assert law.sum() == pytest.approx(1.0, abs=1e-12)
    lost = u * float(pair.p[~still].sum())
    assert lost + np.maximum(moved[order] - law, 0).sum() <= u * t + 1e-15
    assert np.all(moved[order] >= (1 - u * t / (1 - u)) * law - 1e-15)


@given(st.integers(64, 5000), st.floats(0.1, 12.0), st.floats(0.0, 1.0), st.floats(0.5, 6.0), st.floats(0.0, 6.0))
@settings(max_examples=60, deadline=None)
def test_the_series_bounds_small_shifts(trials, length, part, tilt, height):
    """log M / u^2 of a shift below the grid lies on the segment, up to the error that is stated."""
    corners = _shapes._corners(Binomial(trials), min(1.0, length), length, 10**6)
    mu = length / math.sqrt(trials / 4)
    s = np.array([1 + tilt / mu + 1j * height / mu])
    ends, error = _shapes._series(corners, s)
    u = corners.first * max(part, 0.02)
    for order in (0, 1):
        direct = direct_log_moment(trials, u, order, s[0]) / u**2
        low, high = ends[2 * order, 0], ends[2 * order + 1, 0]
        on_segment = low + (u / corners.first) * (high - low)
        assert abs(direct - on_segment) <= error[0] + 1e-9 * abs(direct)


@given(st.integers(64, 2000), st.floats(0.3, 6.0), st.floats(0.0, 1.0), st.floats(0.5, 6.0), st.floats(0.0, 3.0))
@example(64, 1.9999999999999991, 0.5, 1.0, 1.0)  # a shift just below a whole number: P/Q - 1 rounds to -1
@settings(max_examples=30, deadline=None)
def test_a_mixture_of_two_shifts_is_within_the_stated_error(trials, length, weight, tilt, height):
    corners = _shapes._corners(Binomial(trials), length, length, 1000)
    variance = trials / 4
    mu = math.sqrt(corners.spent / variance)
    t = np.array([0.0, max(height, 0.1) / mu])
    log = _shapes._log_moments(corners, np.array([1 + tilt / mu]), t)[0]
    line = _shapes._line(corners, 1 + tilt / mu + 1j * t, log, variance)
    squares = np.repeat(corners.shifts**2, 2)[:, None]
    one, two = np.exp(log[:-2]), np.exp(log[2:])
    budget = weight * squares[:-2] + (1 - weight) * squares[2:]
    mixture = weight * one + (1 - weight) * two
    logs = line.corners[: log.shape[0]] * squares
    mean = weight * logs[:-2] + (1 - weight) * logs[2:]
    difference = np.log(mixture / np.exp(mean / corners.spent)) * corners.spent / budget
    assert np.all(np.abs(difference).max(axis=0) <= line.error + 1e-7)
    assert np.all((np.log(np.abs(mixture)) * corners.spent / budget).max(axis=0) <= line.top + 1e-7)


def test_the_sum_over_a_line_is_on_or_above_the_curve():
    """Step 4 alone: one pair, no smoothing needed; the sum exceeds the curve by the terms n != 0 only."""
    atoms = coordinate_atoms(Binomial(300), 2.5)
    a, eta = 9.0, 1.5
    k = np.arange(-4000, 4001)
    s = a + 1j * eta * k
    moments = np.exp(np.outer(s, atoms.loss)) @ atoms.q * np.exp(1e-4 * s * (s - 1) / 2) / (s * (s - 1))
    for log_z in (0.0, 0.2, 0.5, 1.0):
        total = float((moments * np.exp((1 - s) * log_z)).sum().real) * eta / (2 * np.pi)
        truth = float(np.maximum(atoms.p - math.exp(log_z) * atoms.q, 0).sum())
        assert truth <= total + 1e-12
        assert total == pytest.approx(truth, rel=1e-2)


@given(st.lists(st.floats(0.0, 1.0), min_size=4, max_size=30), st.floats(0.01, 0.3))
@settings(max_examples=100, deadline=None)
def test_the_hull_is_a_symmetric_pair_below_the_points_and_above_convex_curves(raw, step):
    heights = np.minimum.accumulate(np.array(raw))
    pair = _shapes._symmetric(step, heights.copy())
    assert pair.p.sum() + pair.p_only == pytest.approx(1.0, abs=1e-9)
    assert pair.q.sum() + pair.q_only == pytest.approx(1.0, abs=1e-9)
    assert np.array_equal(pair.major, pair.major[::-1])
    log_z = step * np.arange(heights.size)
    found = curve(pair, log_z)
    assert np.all(found <= heights + 1e-9)
    # The highest convex curve below the points and their mirror images, by brute force over chords.
    z = np.exp(log_z)
    x, y = np.concatenate([1 / z[:0:-1], z]), np.concatenate([(1 - 1 / z + heights / z)[:0:-1], heights])
    for i in range(z.size):
        chords = [
            y[j] + (y[k] - y[j]) * (z[i] - x[j]) / (x[k] - x[j])
            for j in range(x.size)
            for k in range(x.size)
            if x[j] <= z[i] < x[k]
        ]
        assert found[i] == pytest.approx(min([*chords, heights[i]]), abs=1e-9)


def test_what_it_cannot_account_is_refused():
    with pytest.raises(AccountingError):
        shaped_pair(Binomial(10**6), 601.0, 1000.0, 100)
    with pytest.raises(AccountingError):
        shaped_pair(Binomial(64), 80.0, 80.0, 100)
    with pytest.raises(AccountingError):  # 2^-12 at the edge of each of a million coordinates
        shaped_pair(Binomial(12), 0.5, 2.0, 10**6)
