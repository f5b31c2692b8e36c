"""The audit catches every planted fault and passes honest clients.

Seeds are fixed, so the runs are the same each time; with fresh noise an honest client is accused in at most 1 % of
audits, because the confidence is 0.99. A run of a client is a whole message, so the quick test gives each fault of a
client only runs enough for the audit to see it at this seed; `make test-all` uses 4,000 a side, as the page does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from experiments.assurance import audit_faults as planted  # noqa: E402

from bqsgd._src.audit.client import (  # noqa: E402
    FINEST_LEVELS,
    MakeClient,
    full_batch_inputs,
    linear_client,
)
from bqsgd._src.privacy.accountant import Accountant  # noqa: E402
from bqsgd._src.settings.config import Config  # noqa: E402
from long_suite import others_slow  # noqa: E402

torch.set_num_threads(1)
RESULTS: dict[str, Any] = json.loads(planted.RESULTS.read_text(encoding="utf-8"))


ENOUGH_RUNS = {
    "no clip": 250,
    "batch-mean clip": 250,
    "realised batch size": 500,
    "halved noise": 1500,
    "understated sampling rate": 1500,
}


LONG = {"halved noise", "understated sampling rate"}
"""Faults that show only in many runs of whole clients."""


@pytest.mark.parametrize("fault", others_slow(planted.FAULTS, planted.FAULTS.keys() - LONG))
def test_the_audit_catches_the_fault(fault: str) -> None:
    check_that_the_audit_catches_it(fault, runs=ENOUGH_RUNS.get(fault, 4000))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ENOUGH_RUNS)
def test_the_audit_catches_the_fault_with_the_runs_of_the_page(fault: str) -> None:
    check_that_the_audit_catches_it(fault, runs=4000)


def check_that_the_audit_catches_it(fault: str, *, runs: int) -> None:
    result = planted.run(planted.FAULTS[fault], seed=1, runs=runs)
    assert result.samples == runs
    assert result.violated
    lower = result.curve.lower
    assert lower.epsilon > result.curve.claimed_epsilon
    assert lower.likely - np.exp(result.curve.claimed_epsilon) * lower.unlikely > lower.delta


QUICK_CLIENTS = {"dual clip, no sampling": 300, "secure sum, nobody missing": 1000}


@pytest.mark.parametrize(
    "client", others_slow([name for name in planted.HONEST if name != "clamp, no sampling"], QUICK_CLIENTS)
)
def test_the_audit_passes_an_honest_client(client: str) -> None:
    result = planted.run(planted.HONEST[client], seed=2, runs=QUICK_CLIENTS.get(client, 1000))
    assert not result.violated
    assert result.lower.epsilon <= result.claimed.epsilon


@pytest.mark.slow
def test_an_honest_client_passes_at_as_many_runs_and_shows_a_good_part_of_what_it_claims() -> None:
    result = planted.run(planted.HONEST["clamp, no sampling"], seed=2)
    assert result.samples == 4000
    assert not result.violated
    assert 0.3 * result.claimed.epsilon < result.lower.epsilon <= result.claimed.epsilon


def test_float32_sums_move_the_mean_beyond_its_bound_and_exact_sums_do_not() -> None:
    addends = planted.chosen_addends().astype(np.float64)
    assert addends.sum() - addends[1:].sum() == pytest.approx(1)
    moves = planted.FAULTS["float32 sums"].moves
    assert moves is not None
    assert moves() > 200


def test_the_cancelling_weights_leave_nothing_but_rounding_error() -> None:
    weights, records = planted.cancelling_attack()
    exact = records.astype(np.float64) @ weights.astype(np.float64)
    terms = np.abs(records.astype(np.float64) * weights).sum(axis=1)
    assert np.all(np.abs(exact) < 2.0**-23 * terms)
    moves = planted.FAULTS["row dependence"].moves
    assert moves is not None
    assert moves() > 60


def test_the_results_hold_every_case_with_its_own_claim() -> None:
    assert (RESULTS["runs"], RESULTS["delta"], RESULTS["confidence"]) == (4000, planted.DELTA, planted.CONFIDENCE)
    for group, cases in (("faults", planted.FAULTS), ("honest", planted.HONEST)):
        assert list(RESULTS[group]) == list(cases)
        for name, case in cases.items():
            row = RESULTS[group][name]
            assert row["violated"] == (group == "faults")
            claim = case.claim()
            assert row["release"] == json.loads(json.dumps(claim.to_dict()))
            # What was claimed when the case was audited. Today's accountant may prove less, and the verdict must stand.
            today = Accountant().compose(claim).epsilon(planted.DELTA)
            assert 0.99 * row["claimed_epsilon"] <= today <= 1.001 * row["claimed_epsilon"]
            assert row["violated"] or row["epsilon_lower"] <= today
    alarms = RESULTS["false_alarms"]
    assert alarms["alarms"] <= alarms["audits"] * (1 - alarms["confidence"])


# The real path on the same data: a null record or the canary in the first row, nothing else changed.


def test_a_real_client_adds_the_chosen_data_up_within_its_bound() -> None:
    addends = planted.chosen_addends()
    inputs = np.repeat(-2 * addends[:, None], planted.SUM_DIMENSION, axis=1)
    without = inputs.copy()
    without[0] = 0
    config = planted.FULL.but(batch_size=planted.SUMMED, levels=8192, trials=20, seed=1)
    finest = planted.SUMMED / FINEST_LEVELS  # the frames round each mean to a step of the finest quantiser
    model = np.zeros(planted.SUM_DIMENSION, np.float32)
    assert moved(linear_client, config, without, inputs, model) <= 1 + 2 * finest


def test_a_real_client_gives_a_record_the_same_logit_in_every_batch() -> None:
    weights, records = planted.cancelling_attack()
    without = np.concatenate([np.zeros((1, planted.FEATURES), np.float32), records])
    inputs = np.concatenate([np.full((1, planted.FEATURES), -1e3, np.float32), records])
    config = planted.FULL.but(batch_size=planted.OTHERS, clip_bound=planted.ROW_BOUND, seed=1)
    assert moved(linear_client, config, without, inputs, weights) <= 1 + 1e-3


def moved(make: MakeClient, config: Config, without: Any, with_record: Any, model: Any) -> float:
    """By how many times the stated bound the first record moves the mean, read from the client's own frames."""
    labels = np.ones(len(without), np.float32)
    worlds = {False: (without, labels), True: (with_record, labels)}
    pair = full_batch_inputs(make, config, worlds=worlds, model=model)
    stated = make(config, worlds[True]).terms.sensitivity.linf
    return float(np.abs(pair.with_record - pair.without).max() / stated)
