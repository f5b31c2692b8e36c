"""Records: what is written is read back, and what is not a record is refused with its reason."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bqsgd._src.records.record import (
    MAX_TEXT,
    STAGES,
    ClientRecord,
    RoundRecord,
    RunFolderError,
    Status,
    Summary,
    number,
    plain,
)

numbers = st.floats(allow_nan=False) | st.integers(0, 10**6).map(float)
counts = st.integers(0, 2**63 - 1)
records = st.builds(
    RoundRecord,
    round=counts,
    time=numbers,
    test_accuracy=st.none() | numbers,
    test_loss=st.none() | numbers,
    epsilon_max=st.none() | numbers,
    bytes_up=counts,
    bytes_down=counts,
    bytes_up_float32=counts,
    clients=st.lists(
        st.builds(
            ClientRecord,
            client=counts,
            status=st.sampled_from(Status),
            reason=st.none() | st.text(max_size=50),
            frame_bytes=counts,
            levels=counts,
            trials=counts,
        ),
        max_size=4,
    ).map(tuple),
    seconds=st.dictionaries(st.sampled_from(STAGES), numbers),
)


@given(records)
def test_a_round_survives_strict_json(record: RoundRecord) -> None:
    line = json.dumps(record.to_dict(), allow_nan=False)
    assert RoundRecord.from_dict(json.loads(line)) == record


def test_numbers_json_cannot_carry_become_words() -> None:
    assert plain([math.inf, -math.inf, math.nan, None, 1.5]) == ["inf", "-inf", "nan", None, 1.5]
    assert plain({"a": np.float32(0.5), "b": np.int64(3)}) == {"a": 0.5, "b": 3}
    assert number("epsilon", "inf") == math.inf
    assert math.isnan(number("loss", "nan"))
    assert RoundRecord(round=1, test_loss=math.nan).to_dict()["test_loss"] == "nan"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "round"),
        ({"round": -1}, "round"),
        ({"round": True}, "round"),
        ({"round": 1.5}, "round"),
        ({"round": 10**5000}, "more than 30 digits"),
        ({"round": 1, "test_accuracy": "high"}, "test_accuracy"),
        ({"round": 1, "test_loss": 10**400}, "too large"),
        ({"round": 1, "bytes_up": None}, "bytes_up"),
        ({"round": 1, "clients": {}}, None),
        ({"round": 1, "clients": "all"}, "clients"),
        ({"round": 1, "clients": [{"client": 1}]}, "status"),
        ({"round": 1, "clients": [{"client": 1, "status": "late"}]}, "ok, declined, refused, missing"),
        ({"round": 1, "clients": [{"client": 1, "status": ["ok"]}]}, "status"),
        ({"round": 1, "clients": [{"client": 1, "status": "ok", "reason": 3}]}, "reason"),
        ({"round": 1, "seconds": [1]}, "seconds"),
        ({"round": 1, "seconds": {str(i): 1 for i in range(17)}}, "stages"),
        ([], "table"),
    ],
)
def test_what_is_no_round_is_refused_by_name(fields: Any, word: str | None) -> None:
    if word is None:
        assert RoundRecord.from_dict(fields).clients == ()
        return
    with pytest.raises(RunFolderError, match=word):
        RoundRecord.from_dict(fields)


def test_unknown_fields_are_ignored_and_long_reasons_are_cut() -> None:
    entry = {"client": 1, "status": "refused", "reason": "x" * 10_000, "colour": "red"}
    record = RoundRecord.from_dict({"round": 1, "newer": 1, "clients": [entry]})
    assert len(record.clients[0].reason or "") == MAX_TEXT


def test_a_summary_fails_closed_on_seeded_noise(stated_guarantee) -> None:
    claim = stated_guarantee
    assert Summary.from_dict({"guarantee": claim, "seeded": True}).seeded
    assert Summary.from_dict({"guarantee": {**claim, "seeded": True}, "seeded": False}).seeded
    assert not Summary.from_dict({"guarantee": claim, "seeded": False}).seeded
    for hidden in ({"guarantee": claim}, {"guarantee": claim, "seeded": None}, {"guarantee": claim, "seeded": "no"}):
        with pytest.raises(RunFolderError, match="seeded"):
            Summary.from_dict(hidden)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 10**400}, "epsilon must be a number"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"epsilon": "2"}, "epsilon must be a number"),
        ({"delta": 2.0}, "delta"),
        ({"relation": "kinship"}, "kinship"),
        ({"unit": ["sample"]}, "not a guarantee"),
        ({"method": "x" * 5000}, "method must be text"),
        ({"sampling": {"rate": 1}}, "sampling must be text"),
        ({"colour": "red"}, "the field 'colour' is unknown"),
    ],
)
def test_a_stranger_s_guarantee_is_checked_field_by_field(stated_guarantee, change, message) -> None:
    with pytest.raises(RunFolderError, match=message):
        Summary.from_dict({"guarantee": {**stated_guarantee, **change}, "seeded": False})
    for missing in stated_guarantee:
        rest = {name: value for name, value in stated_guarantee.items() if name != missing}
        with pytest.raises(RunFolderError, match=missing):
            Summary.from_dict({"guarantee": rest, "seeded": False})


def test_a_summary_is_read_back_as_it_was_written(stated_guarantee) -> None:
    summary = Summary.from_dict(
        {"accuracy": 0.5, "guarantee": {**stated_guarantee, "epsilon": "inf"}, "seeded": False, "bytes_up": 8}
    )
    assert summary.guarantee is not None
    assert summary.guarantee.epsilon == math.inf
    assert Summary.from_dict(summary.to_dict()) == summary


@pytest.mark.parametrize("fields", [{"rounds": -1}, {"bytes_up": 1.5}, {"accuracy": "good"}, {"versions": [1]}, [1]])
def test_what_is_no_summary_is_refused(fields: Any) -> None:
    with pytest.raises(RunFolderError):
        Summary.from_dict(fields)
