"""Records: what is written is read back, and what is not a record is refused with its reason."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bqsgd.reports.records import MAX_TEXT, STAGES, ClientRecord, RoundRecord, RunFolderError, Status, number, plain
from bqsgd.reports.summary import Claim, Summary

numbers = st.floats(allow_nan=False) | st.integers(0, 10**6).map(float)
counts = st.integers(0, 2**63 - 1)
records = st.builds(
    RoundRecord,
    round=counts,
    time=numbers,
    test_accuracy=st.none() | numbers,
    test_loss=st.none() | numbers,
    epsilon_max=st.none() | numbers,
    nominal_epsilon=st.none() | numbers,
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


def test_a_guarantee_is_read_with_its_terms_and_needs_a_delta() -> None:
    claim = Claim.from_dict({"epsilon": "inf", "delta": 1e-5, "sampling": {"scheme": "poisson", "rate": 0.1}})
    assert claim.epsilon == math.inf
    assert claim.sampling == "scheme poisson, rate 0.1"
    assert claim.unit == "not stated"
    with pytest.raises(RunFolderError, match="delta"):
        Claim.from_dict({"epsilon": 1.0})


def test_a_summary_fails_closed_on_seeded_noise() -> None:
    claim = {"epsilon": 1.0, "delta": 1e-5}
    assert Summary.from_dict({"guarantee": claim, "seeded": True}).seeded
    assert Summary.from_dict({"guarantee": {**claim, "seeded": True}, "seeded": False}).seeded
    assert not Summary.from_dict({"guarantee": claim, "seeded": False}).seeded
    for hidden in ({"guarantee": claim}, {"guarantee": claim, "seeded": None}, {"guarantee": claim, "seeded": "no"}):
        with pytest.raises(RunFolderError, match="seeded"):
            Summary.from_dict(hidden)


@pytest.mark.parametrize("fields", [{"rounds": -1}, {"bytes_up": 1.5}, {"accuracy": "good"}, {"versions": [1]}, [1]])
def test_what_is_no_summary_is_refused(fields: Any) -> None:
    with pytest.raises(RunFolderError):
        Summary.from_dict(fields)
