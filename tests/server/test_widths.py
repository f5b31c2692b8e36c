"""The width of secure sums follows the sums that were released: within rounds, and whatever the server says."""

import dataclasses
import json
import math

import numpy as np
import pytest
from test_secure_runs import CLIENTS, settings, small_task, trained

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import Ledger
from bqsgd._src.params import Mechanism
from bqsgd._src.planner.sums import SumPlan, width_of
from bqsgd._src.release import Release
from bqsgd._src.run import Run
from bqsgd._src.secure.graph import thresholds
from bqsgd._src.secure.opening import Total
from bqsgd._src.server.widths import Widths
from bqsgd._src.settings.client_plan import client_terms, sum_plan
from bqsgd._src.settings.config import Config

RULE = thresholds(clients=10, dropouts=1, colluders=0)
LEVELS, TRIALS, DIMENSION = 20_000, 400, 500
PLAN = SumPlan(rule=RULE, levels=LEVELS, trials=TRIALS, width=width_of(RULE, LEVELS, TRIALS))
DEVIATION = math.sqrt(PLAN.variance() + PLAN.rounding)
ADAPTIVE = {"window": None, "range": None, "key_rounds": 3}


def terms_of(config):
    return client_terms(config, dimension=8, dataset_size=40)


def spent(folder):
    """What each client's ledger has counted: (release, rounds)."""
    counted = []
    for client in range(CLIENTS):
        with Ledger(folder / f"ledgers/client-{client:04}.ledger") as ledger:
            counted.append(tuple(ledger.released.items()))
    return counted


def rounds_of(widths, signals, *, key_rounds=10, seed=0):
    """Simulated rounds without masks: signal in deviations of the noise -> width, and the error of the decoded mean."""
    rng, last, seen = np.random.default_rng(seed), -1, []
    for round, signal in enumerate(signals):
        if round > min(last, widths.last_round):
            width, rounds = widths.batch(round, most=key_rounds)
            last = round + rounds - 1
        truth = signal * DEVIATION * rng.uniform(-1, 1, DIMENSION) * RULE.clients * LEVELS
        codes = RULE.clients * LEVELS + np.rint(truth).astype(np.int64) + rng.binomial(TRIALS, 0.5, DIMENSION)
        lanes = (codes % (1 << width)).astype(np.uint32)
        total = Total(lanes=lanes, width=width, survivors=tuple(range(RULE.clients)), trials=TRIALS, seeded=True)
        widths.observe(total, round=round)
        mean = PLAN.mean(lanes, survivors=RULE.clients, width=width)
        seen.append((width, np.abs(mean * RULE.clients * LEVELS - truth).max() / (DEVIATION * RULE.clients * LEVELS)))
    return seen


def test_the_first_round_is_the_widest_and_the_second_has_room_for_what_it_showed():
    for signal, width in ((0.0, 8), (3.0, 8), (30.0, 11), (3000.0, 17)):
        seen = rounds_of(Widths(PLAN, dimension=DIMENSION), [signal] * 40)
        assert seen[0][0] == PLAN.width
        assert {bits for bits, _ in seen[1:]} <= {width, width + 1} if signal == 3.0 else {width}
        assert max(error for _, error in seen) < 6  # nothing wraps
        least = math.log2(2 * (signal + 3) * DEVIATION * RULE.clients * LEVELS)
        assert seen[1][0] <= least + 2.5


def test_noise_alone_ends_no_key_batch():
    widths = Widths(PLAN, dimension=DIMENSION)
    seen = rounds_of(widths, [0.0] * 400)
    assert [bits for bits, _ in seen[1:]] == [PLAN.least_width] * 399


def test_it_recovers_when_the_signal_grows_fifty_times_and_shrinks_again():
    calm, storm = [2.0] * 15, [100.0] * 30
    seen = rounds_of(Widths(PLAN, dimension=DIMENSION), [*calm, *storm, *calm, *calm])
    wrong = [round for round, (_, error) in enumerate(seen) if error > 6]
    assert wrong == [15]  # the round in which it grew wraps, and is the only one
    assert seen[16][0] == PLAN.width
    assert {bits for bits, _ in seen[17:45]} <= {12, 13}
    assert seen[-1][0] <= PLAN.least_width + 1  # no later than two key batches after the storm


def test_a_signal_that_grows_steadily_never_wraps():
    seen = rounds_of(Widths(PLAN, dimension=DIMENSION), [1.03**round for round in range(200)])
    assert max(error for _, error in seen) < 6
    assert seen[1][0] < seen[-1][0] < PLAN.width


def test_a_window_fixes_the_width():
    fixed = dataclasses.replace(PLAN, window=0.5, width=width_of(RULE, LEVELS, TRIALS, window=0.5))
    widths = Widths(fixed, dimension=DIMENSION)
    assert {bits for bits, _ in rounds_of(widths, [1.0] * 25)} == {fixed.width}
    widths.restore({"width": 2})
    assert widths.batch(40, most=7) == (fixed.width, 7)


def test_a_state_is_restored_and_what_is_none_is_refused():
    widths, again = Widths(PLAN, dimension=DIMENSION), Widths(PLAN, dimension=DIMENSION)
    rounds_of(widths, [5.0] * 14)
    again.restore(json.loads(json.dumps(widths.state())))
    assert again.state() == widths.state()
    assert [again.batch(round, most=10) for round in (14, 20, 21)] == [
        widths.batch(round, most=10) for round in (14, 20, 21)
    ]
    good = widths.state()
    for bad in (
        [], {}, good | {"width": PLAN.width + 1}, good | {"width": 1}, good | {"last_round": "x"},
        good | {"signals": [math.nan]}, good | {"signals": [-1.0]}, good | {"signals": [0.0] * 11},
        good | {"signals": 3}, good | {"signals": ["x"]},
    ):  # fmt: skip
        with pytest.raises(InvalidParameter):
            again.restore(bad)
    again.restore(None)


def test_a_run_without_range_or_window_narrows_its_sums(tmp_path):
    config = settings(**ADAPTIVE, levels=None, trials=None, rounds=8, epsilon=4.0)
    run, records, steps = trained(config, tmp_path)
    plan = run.server.sums[0]
    assert records[0].sum_width == plan.width
    assert all(plan.least_width <= record.sum_width < plan.width for record in records[1:])
    for record in records:
        kept = 8  # coordinates of the model
        sizes = {entry.frame_bytes for entry in record.clients}
        assert sizes == {48 + -(-kept * record.sum_width // 8)}
    assert [round for round, step, _ in steps.asked if step == "BATCH"] == [0, 1, 4, 7]
    stored = [json.loads(line)["sum_width"] for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert stored == [record.sum_width for record in records]
    assert f"secure sums in {min(stored)} to {max(stored)} bits" in (tmp_path / "report.html").read_text()


WITHOUT_RANGE = ADAPTIVE | {"levels": None, "trials": None, "one_in": 4}


def test_the_range_of_sums_is_the_clip_s():
    config = settings(**WITHOUT_RANGE)
    assert config.range == 0.5  # the clip norm 1, of a quarter of the coordinates
    terms = client_terms(config, dimension=8, dataset_size=40)
    assert terms.sensitivity.linf == pytest.approx(1 / 8)
    assert config.but(range=0.125).range == 0.125
    dual = Config.of(secure=True, clip="dual", clip_norm=0.5, clip_bound=0.1, rate=0.1)
    assert dual.range == 0.1


@pytest.mark.slow
def test_without_a_range_sums_have_the_levels_that_the_noise_needs():
    config = settings(**WITHOUT_RANGE)
    wide, given = sum_plan(config, dimension=8), sum_plan(config.but(range=0.5), dimension=8)
    assert wide.levels <= given.levels
    assert wide.least_width <= given.least_width


def test_a_server_that_chooses_widths_to_do_harm_changes_no_ledger_and_gets_no_other_sum(tmp_path):
    """Too narrow, too wide, another in every round: clients mask in what they accept, and count the same."""
    config = settings(**ADAPTIVE | {"key_rounds": 1}, rounds=7, seed=None)  # noise that counts, so there is a ledger
    run = Run.start(small_task(), config, folder=tmp_path, force=True)
    widest, asked = run.server.sums[0].width, []

    def hostile(round, *, most):
        asked.append((2, 3, widest, 5, widest - 1, 2, 4)[round])
        return asked[-1], 1

    run._sums[0].widths.batch = hostile
    with run:
        records = list(run.rounds())
    assert [record.sum_width for record in records] == asked
    planned = Release(mechanism=Mechanism(levels=20, trials=120), terms=terms_of(config))
    assert spent(tmp_path) == [((planned, 7),)] * CLIENTS


def test_a_width_beyond_the_plan_s_ends_before_any_client_masks_a_vector(tmp_path):
    config = settings(**ADAPTIVE, rounds=2, seed=None)
    run = Run.start(small_task(), config, folder=tmp_path, force=True)
    widest = run.server.sums[0].width
    run._sums[0]._server.agreement = dataclasses.replace(run._sums[0].agreement, width=widest + 1, widest=widest + 1)
    run._sums[0].widths.batch = lambda round, *, most: (widest + 1, 1)
    with run:
        records = list(run.rounds())
    assert not any(record.stepped for record in records)
    assert spent(tmp_path) == [()] * CLIENTS


@pytest.mark.parametrize("stops", [(3,), pytest.param((1, 5), marks=pytest.mark.slow)], ids=str)
def test_a_resumed_run_has_the_widths_and_the_model_of_one_that_went_on(tmp_path, stops):
    config = settings(**ADAPTIVE, rounds=9)
    whole, records, _ = trained(config, tmp_path / "whole")
    assert len({record.sum_width for record in records}) > 1
    for stop in stops:
        folder = tmp_path / str(stop)
        killed = Run.start(small_task(), config, folder=folder, force=True)
        assert next(record for record in killed.rounds() if record.round == stop).stepped
        killed.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)  # before the checkpoint of this round
        with Run.resume(small_task(), folder=folder) as run:
            again = list(run.rounds())
        assert [record.sum_width for record in again] == [record.sum_width for record in records[stop:]]
        np.testing.assert_array_equal(run.model, whole.model)
