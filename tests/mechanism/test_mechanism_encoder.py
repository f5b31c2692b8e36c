"""BQ encode and decode: bit for bit against a slow exact model, whatever the chunks, threads, dtypes and memory."""

import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bqsgd._src.errors import InvalidParameter, NonFiniteInput, OutOfRange
from bqsgd._src.mechanism.encoder import CHUNK, Encoding, decode, encode
from bqsgd._src.noise import NOISE_BITS, REFINE_BITS, ROUND_BITS, alias_table, privacy_rng, seeded_rng
from bqsgd._src.params import MAX_LEVELS, MAX_TRIALS, Mechanism, code_dtype

PAPER = [(1, 251), (2, 251), (5, 245), (8, 4079), (26, 4043), (52, 16279)]
EDGES = [(1, 0), (1, 1), (MAX_LEVELS, 0), (MAX_LEVELS, MAX_TRIALS), (3, 64)]


def slow_codes(values, mechanism, limit, seed):  # type: ignore[no-untyped-def]
    """The encoder once more, one coordinate at a time, in Python's integers."""
    d, s, table = len(values), mechanism.levels, alias_table(mechanism.law)
    source = seeded_rng(seed=seed)
    words, refinements = np.empty(d, np.uint64), np.empty(2 * d, np.uint64)
    source.fill(words, block=0)
    source.fill(refinements, block=(d + 1) // 2)
    rest_bits = NOISE_BITS - table.index_bits
    for value, c, word, refinement in zip(
        values, np.broadcast_to(limit, d), words.tolist(), refinements[::2].tolist(), strict=True
    ):
        x = min(max(float(value), -c), c)
        per_unit = s * 2.0**24 / c
        # One C: values times a common factor. One C_j each: division first. Both stay within the stated slack.
        scaled = x * per_unit if np.ndim(limit) == 0 else x / c * (s * 2.0**24)
        whole, fraction = divmod(int(scaled + (s * 2.0**24 + 0.5)), 1 << ROUND_BITS)
        draw, noise = word % (1 << ROUND_BITS), word >> ROUND_BITS
        index, rest = noise >> rest_bits, noise % (1 << rest_bits)
        keep = (int(table.threshold[index]) << REFINE_BITS) + int(table.refine[index])
        kept = (rest << REFINE_BITS) + refinement < keep
        yield whole + (draw < fraction) + table.first + (index if kept else int(table.alias[index]))


@pytest.mark.parametrize(("levels", "trials"), PAPER + EDGES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("per_coordinate", [False, True])
def test_codes_equal_the_slow_model(levels: int, trials: int, dtype: type, per_coordinate: bool) -> None:
    mechanism, d = Mechanism(levels=levels, trials=trials), 1501
    draws = np.random.default_rng(levels + trials)
    values = draws.normal(0, 0.001, d).astype(dtype)
    limit = draws.uniform(0.0005, 0.003, d) if per_coordinate else 0.0015
    codes = encode(values, mechanism, range=limit, rng=seeded_rng(seed=5), clamp=True)
    assert codes.dtype == code_dtype(mechanism.code_count)
    assert codes.tolist() == list(slow_codes(values, mechanism, limit, 5))


@pytest.mark.parametrize("d", [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_codes_do_not_depend_on_slices(d: int) -> None:
    mechanism = Mechanism(levels=2, trials=251)
    values = np.random.default_rng(d).uniform(-1, 1, d)
    alone = encode(values, mechanism, range=1.0, rng=seeded_rng(seed=1))
    encoding = Encoding(values, mechanism, range=1.0, rng=seeded_rng(seed=1))
    pieces = np.zeros(d, alone.dtype)
    cuts = sorted({0, min(2, d), d // 2 // 2 * 2, d})
    for start, stop in reversed(list(itertools.pairwise(cuts))):
        encoding.write(start, stop, pieces[start:stop])
    assert np.array_equal(alone, pieces)


def test_a_source_gives_every_call_fresh_noise() -> None:
    mechanism, values, rng = Mechanism(levels=1, trials=1003), np.zeros(1001), seeded_rng(seed=1)
    first, second = (encode(values, mechanism, range=1.0, rng=rng) for _ in range(2))
    assert np.mean(first == second) < 0.1  # two draws of Bin(1003, 1/2) agree with probability 0.018
    private = encode(values, mechanism, range=1.0, rng=privacy_rng())
    assert np.mean(first == private) < 0.1


def test_a_tensor_is_read_in_place_and_gives_the_same_codes() -> None:
    mechanism = Mechanism(levels=2, trials=251)
    tensor = torch.linspace(-1, 1, 10_001)
    expected = encode(tensor.numpy(), mechanism, range=1.0, rng=seeded_rng(seed=1))
    for variant in (tensor, tensor.clone().requires_grad_(), torch.nn.Parameter(tensor)):
        encoding = Encoding(variant, mechanism, range=1.0, rng=seeded_rng(seed=1))
        assert encoding.values.ctypes.data == variant.data_ptr()
        assert np.array_equal(encoding.codes(), expected)


def test_read_only_input_and_given_output_are_used_as_they_are() -> None:
    mechanism, values = Mechanism(levels=2, trials=251), np.linspace(-1, 1, 999)
    values.flags.writeable = False
    out = np.zeros(999, np.uint8)
    Encoding(values, mechanism, range=1.0, rng=seeded_rng(seed=1)).write(0, 999, out)
    assert np.array_equal(out, encode(values, mechanism, range=1.0, rng=seeded_rng(seed=1)))
    assert out.any()


def test_extra_memory_does_not_grow_with_the_dimension() -> None:
    mechanism, extra = Mechanism(levels=52, trials=16279), []
    for d in (10**5, 4 * 10**6):
        values, out, limit = np.zeros(d, np.float32), np.empty(d, np.uint16), np.ones(d)
        encode(values[:10], mechanism, range=limit[:10], rng=privacy_rng())
        tracemalloc.start()
        Encoding(values, mechanism, range=limit, rng=privacy_rng()).write(0, d, out)
        extra.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(extra) < 1 << 20


@given(st.integers(1, MAX_LEVELS), st.floats(1e-30, 1e30), st.booleans())
@settings(max_examples=200)
def test_the_ends_of_the_range_are_exact(levels: int, limit: float, vector: bool) -> None:
    mechanism = Mechanism(levels=levels, trials=0)
    ends = np.array([-limit, 0.0, limit])
    codes = encode(ends, mechanism, range=np.full(3, limit) if vector else limit, rng=privacy_rng())
    assert codes.tolist() == [0, levels, 2 * levels]


@given(st.integers(1, 1000), st.integers(0, 300), st.lists(st.floats(-1, 1), min_size=1, max_size=50))
@settings(max_examples=200)
def test_codes_stay_within_the_noise_around_the_value(levels: int, trials: int, values: list[float]) -> None:
    mechanism, x = Mechanism(levels=levels, trials=trials), np.array(values)
    codes = encode(x, mechanism, range=1.0, rng=privacy_rng()).astype(np.int64)
    slack = 2.0**-24
    assert np.all(codes >= np.floor(levels * (x + 1) - slack))
    assert np.all(codes <= np.ceil(levels * (x + 1) + slack) + trials)
    assert codes.max() < mechanism.code_count


def test_clamping_at_encode_is_clamping_before() -> None:
    mechanism, values = Mechanism(levels=5, trials=245), np.linspace(-3, 3, 5001).astype(np.float32)
    limits = np.linspace(0.01, 2, 5001)
    for limit in (0.1, limits):
        at_once = encode(values, mechanism, range=limit, rng=seeded_rng(seed=1), clamp=True)
        # float32 has no exact 0.1: cut at the float32 just below the range, so that nothing lies beyond it.
        bound = np.nextafter(np.asarray(limit, dtype=np.float32), np.float32(0))
        before = encode(np.clip(values, -bound, bound), mechanism, range=limit, rng=seeded_rng(seed=1))
        # The float32 just below C may round to C on the 2^-24 grid or next to it: one rounding draw in 2^23 differs.
        assert np.array_equal(at_once, before)


def test_a_float32_clamped_at_the_nearest_float32_of_the_range_is_in_range() -> None:
    assert float(np.float32(0.1)) > 0.1
    ends = np.array([-0.1, 0.1], dtype=np.float32)
    for limit in (0.1, np.full(2, 0.1)):
        assert encode(ends, Mechanism(levels=3, trials=0), range=limit, rng=privacy_rng()).tolist() == [0, 6]


@pytest.mark.parametrize("at", [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nan_and_infinity_are_refused_even_with_the_clamp(at: int, bad: float, clamped: bool, dtype: type) -> None:
    values = np.zeros(2 * CHUNK + 5, dtype)
    values[at] = bad
    for limit in (1.0, np.ones(values.size)):
        with pytest.raises(NonFiniteInput, match=rf"values\[{at}\] is"):
            encode(values, Mechanism(levels=2, trials=251), range=limit, rng=privacy_rng(), clamp=clamped)


@pytest.mark.parametrize("at", [0, CHUNK, CHUNK + 4])
@pytest.mark.parametrize("beyond", [1.0000001, -1.0000001, 1e300, -1e300])
def test_values_beyond_the_range_are_refused_unless_clamped(at: int, beyond: float) -> None:
    values = np.zeros(CHUNK + 5)
    values[at] = beyond
    mechanism = Mechanism(levels=2, trials=0)
    for limit in (1.0, np.ones(values.size)):
        with pytest.raises(OutOfRange, match=rf"values\[{at}\].*clamp=True"):
            encode(values, mechanism, range=limit, rng=privacy_rng())
        codes = encode(values, mechanism, range=limit, rng=privacy_rng(), clamp=True)
        assert codes[at] == (4 if beyond > 0 else 0)


def test_a_refused_vector_leaves_no_code_without_noise_behind() -> None:
    values, out = np.full(1000, 0.5), np.full(1000, 77, np.uint8)
    values[999] = np.nan
    with pytest.raises(NonFiniteInput):
        Encoding(values, Mechanism(levels=2, trials=251), range=1.0, rng=privacy_rng()).write(0, 1000, out)
    assert not out.any()


def test_only_the_coordinate_beyond_its_own_range_is_named() -> None:
    with pytest.raises(OutOfRange, match=r"values\[1\] is 0\.5, beyond the range 0\.25"):
        encode(np.array([0.5, 0.5]), Mechanism(levels=2, trials=2), range=np.array([1.0, 0.25]), rng=privacy_rng())


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.zeros(10)[::2], "contiguous"),
        (np.zeros((2, 5)), "1-D"),
        (np.zeros(0), "at least one"),
        (np.zeros(5, np.float16), "float32 or float64"),
        (np.zeros(5, np.int64), "float32 or float64"),
        (np.zeros(5, ">f4"), "native byte order"),
        ([0.0, 1.0], "NumPy array or a CPU tensor"),
        (torch.zeros(10)[::2], "contiguous"),
        (torch.zeros(5, dtype=torch.bfloat16), "in place"),
        (torch.zeros(5, device="meta"), "in place"),
        (torch._neg_view(torch.ones(5)), "negated"),
        (np.ma.masked_array(np.zeros(5), mask=[1, 0, 0, 0, 0]), "masked"),
    ],
)
def test_what_cannot_be_read_in_place_is_refused(values: object, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason):
        encode(values, Mechanism(levels=2, trials=251), range=1.0, rng=privacy_rng())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"range": 0.0}, "range"),
        ({"range": float("nan")}, "range"),
        ({"range": -1.0}, "range"),
        ({"range": 1e-300}, "2\\^-900"),
        ({"range": 1e300}, "2\\^900"),
        ({"range": np.ones(4)}, "one entry per coordinate"),
        ({"range": np.array([1.0, 1.0, 0.0, 1.0, 1.0])}, "positive"),
        ({"range": np.array([1.0, np.nan, 1.0, 1.0, 1.0])}, "positive"),
    ],
)
def test_bad_arguments_are_refused(options: dict, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason):
        encode(np.zeros(5), Mechanism(levels=2, trials=251), rng=privacy_rng(), **options)


def test_noise_must_be_asked_for_by_name() -> None:
    with pytest.raises(TypeError, match="rng"):
        encode(np.zeros(5), Mechanism(levels=2, trials=251), range=1.0)  # type: ignore[call-arg]


def test_decode_by_hand() -> None:
    mechanism = Mechanism(levels=2, trials=5)  # centre 4.5, step C/2
    codes = np.array([0, 4, 5, 9], np.uint8)
    assert decode(codes, mechanism, range=1.0).tolist() == [-2.25, -0.25, 0.25, 2.25]
    assert decode(codes, mechanism, range=np.array([1.0, 2.0, 4.0, 2.0])).tolist() == [-2.25, -0.5, 1.0, 4.5]


@pytest.mark.parametrize(
    "codes", [np.array([256], np.uint16), np.array([-1]), np.array([1.0]), np.zeros((2, 2), np.uint8)]
)
def test_decode_refuses_what_is_no_code(codes: np.ndarray) -> None:
    with pytest.raises(InvalidParameter, match="codes must be"):
        decode(codes, Mechanism(levels=2, trials=251), range=1.0)
