"""Both examples in real deployments, as `experiments.assurance.gates` runs them: kill -9 in between, and the end."""

import pytest
from experiments.assurance import gate_runs as gates

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1500)
def test_a_flower_site_that_is_killed_goes_on_with_its_study_and_ends_with_it(tmp_path):
    run = gates.flower("training", tmp_path)
    assert run["killed_after_seconds"]
    assert run["ledgers"][0]["messages"] == 100, "five rounds of 20 steps"
    # The killed site may have missed the round, or lost the step that it was at.
    assert 80 <= run["ledgers"][1]["messages"] <= 100
    assert all(ledger["epsilon"] <= 3 for ledger in run["ledgers"])
    assert any("declined: the privacy budget of this node is spent" in line for line in run["server_log"])


@pytest.mark.timeout(1500)
def test_a_node_with_its_own_gate_counts_an_app_that_has_none(tmp_path):
    run = gates.flower("node", tmp_path)
    assert [ledger["messages"] for ledger in run["ledgers"]] == [5, 5]
    assert all(ledger["epsilon"] <= 8 for ledger in run["ledgers"])


@pytest.mark.timeout(1500)
@pytest.mark.skipif(not gates.PYTHON.exists(), reason="needs NVFlare's environment: `make test` makes it")
def test_an_nvflare_job_that_is_killed_goes_on_with_its_studies_and_ends_with_them(tmp_path):
    run = gates.nvflare("training", tmp_path)
    assert run["killed_after_seconds"]
    assert all(0 < ledger["epsilon"] <= 3 for ledger in run["ledgers"])
    assert any("all are taken" in line for line in run["log"])
