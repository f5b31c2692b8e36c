"""IDX parsing: round trips, and every kind of hostile header."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bqsgd._src.data.dataset import parse_idx
from bqsgd._src.errors import InvalidParameter


def written(array):
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=3, max_side=5)))
def test_round_trip(array):
    np.testing.assert_array_equal(parse_idx(written(array), dimensions=array.ndim), array)


@given(st.binary(max_size=64))
def test_random_bytes_raise_or_parse_to_their_own_length(raw):
    try:
        array = parse_idx(raw, dimensions=2)
    except InvalidParameter:
        return
    assert array.size == len(raw) - 12


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "header alone"),
        (b"\x00\x00\x08\x01", "header alone"),
        (b"\x00\x00\x0d\x01" + bytes(4), "unsigned bytes"),
        (b"\x00\x00\x08\x02" + bytes(8), "1 axes"),
        (b"\x00\x00\x08\x01\xff\xff\xff\xff", "0 bytes of data follow"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x02\x01", "1 bytes of data follow"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x02\x01\x02\x03", "3 bytes of data follow"),
    ],
)
def test_hostile_headers_are_refused_before_any_allocation(raw, message):
    with pytest.raises(InvalidParameter, match=message):
        parse_idx(raw, dimensions=1)


def test_sizes_whose_product_overflows_64_bits_are_refused():
    with pytest.raises(InvalidParameter, match="bytes of data follow"):
        parse_idx(b"\x00\x00\x08\x03" + b"\xff" * 12, dimensions=3)
