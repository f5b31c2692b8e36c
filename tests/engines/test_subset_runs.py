"""Runs whose messages carry one in three coordinates."""

import numpy as np
import pytest

from bqsgd._src.run import Run
from bqsgd._src.settings.client_plan import client_terms


@pytest.mark.parametrize(
    "changes",
    [
        {"clip": "dual", "clip_norm": 1.0},
        pytest.param({"clip": "clamp"}, marks=pytest.mark.slow),
        pytest.param({"clip": "dual", "aggregation": "median"}, marks=pytest.mark.slow),
        {"clip": "dual", "secure": True, "levels": 60, "trials": 400, "rate": 0.2, "weights": "equal"},
        {"clip": "l2", "unit": "client", "local_steps": 2, "clip_norm": 0.5, "trials": 0, "levels": 100},
    ],
    ids=["each message", "single coordinates", "robust", "sums", "whole clients"],
)
def test_a_run_with_subsets_learns_and_its_ledgers_count_the_kept_coordinates(task, settings, changes):
    changes = {"range": None, "rounds": 40, "one_in": 3, **changes}
    with Run.start(task, settings(**changes)) as run:
        records = list(run.rounds())
    assert records[-1].test_accuracy > 0.7
    whole = run.server.model.size
    assert run.server.dimension == -(-whole // 3)
    client = run.engine.clients[0]
    assert client.terms.dimension == run.server.dimension
    if changes["clip"] != "clamp":
        # Sensitivities are fractions of the range, which follows the clip in sums: compare them as lengths.
        all_sent = settings(**{**changes, "one_in": 1})
        length = client_terms(all_sent, dimension=whole, dataset_size=100).sensitivity.l2 * all_sent.range
        assert client.terms.sensitivity.l2 * run.config.range == pytest.approx(length / np.sqrt(3), rel=1e-6)


def test_clients_send_different_coordinates_unless_their_messages_are_aligned(settings):
    assert not settings(one_in=3).shares_subset
    assert settings(one_in=3, aggregation="krum", byzantine=0).shares_subset
    assert settings(one_in=3, secure=True, weights="equal").shares_subset
