"""What a job, a site and a server may do to the filters; test_nvflare.py runs this in NVFlare's own environment."""

import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.utils.task_utils import apply_filters
from nvflare.apis.workspace import Workspace
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from nvflare.private.privacy_manager import PrivacyManager, PrivacyService, Scope

import bqsgd
from bqsgd.integrations.nvflare import OpenUpdatesFilter, PrivateUpdatesFilter, ThinUpdatesFilter

SECRET = "patient 17"


def gate(tmp_path, **changed):
    settings = {"study": "t", "rounds": 2, "epsilon": 30.0, "delta": 1e-5, "clip_norm": 1.0}
    return PrivateUpdatesFilter(**{"ledger": str(tmp_path / "site.ledger")} | settings | changed)


def update(values=0.5, kind=DataKind.WEIGHT_DIFF):
    data = {"w": np.full((2, 3), values, np.float32), "b": np.zeros(2, np.float32), "steps": np.array(5)}
    return DXO(kind, data=data, meta={"NUM_STEPS_CURRENT_ROUND": 512, "initial_metrics": SECRET}).to_shareable()


def counted(tmp_path):
    with bqsgd.Ledger(tmp_path / "site.ledger") as ledger:
        return ledger.spent_rounds


def test_nothing_but_the_frame_and_the_form_leaves(tmp_path):
    result = update()
    result["beside"] = SECRET
    result.set_header("header", SECRET)
    left = gate(tmp_path).process(result, FLContext())
    assert SECRET not in str(dict(left))
    dxo = from_shareable(left)
    assert sorted(dxo.data) == ["bqsgd.frame"]
    assert dxo.meta["NUM_STEPS_CURRENT_ROUND"] == 1
    assert counted(tmp_path) == 1


def test_the_server_gets_a_difference_of_weights(tmp_path):
    opened = from_shareable(OpenUpdatesFilter(1.0).process(gate(tmp_path).process(update(), FLContext()), FLContext()))
    assert opened.data_kind == DataKind.WEIGHT_DIFF
    assert {name: values.shape for name, values in opened.data.items()} == {"w": (2, 3), "b": (2,)}
    assert {values.dtype for values in opened.data.values()} == {np.dtype(np.float32)}


def test_a_thin_update_comes_back_nearly_as_it_was():
    opened = from_shareable(
        OpenUpdatesFilter(1.0).process(ThinUpdatesFilter(bits=4).process(update(), FLContext()), FLContext())
    )
    assert np.abs(opened.data["w"] - 0.5).max() <= 0.5 / 7
    assert not opened.data["b"].any()


def test_a_failed_task_leaves_without_what_the_job_put_beside_it(tmp_path):
    failed = make_reply(ReturnCode.TASK_ABORTED)
    failed["beside"] = SECRET
    failed.set_header("header", SECRET)
    assert SECRET not in str(dict(gate(tmp_path).process(failed, FLContext())))


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.METRICS, DataKind.ANALYTIC, DataKind.COLLECTION])
def test_other_results_are_refused_where_nvflares_own_filters_let_them_pass(tmp_path, kind):
    with pytest.raises(Exception, match=r"DIFF|DXO"):
        gate(tmp_path).process(update(kind=kind), FLContext())
    with pytest.raises(ValueError, match="DXO"):
        gate(tmp_path).process(Shareable({"weights": SECRET}), FLContext())


@pytest.mark.parametrize("values", [np.nan, np.inf, 1e30])
def test_extreme_updates_are_counted_and_clipped(tmp_path, values):
    left = gate(tmp_path).process(update(values), FLContext())
    opened = from_shareable(OpenUpdatesFilter(1.0).process(left, FLContext()))
    assert np.isfinite(opened.data["w"]).all()
    assert counted(tmp_path) == 1


def test_the_budget_ends_where_the_plan_said(tmp_path):
    site = gate(tmp_path)
    for _ in range(2):
        site.process(update(), FLContext())
    with pytest.raises(bqsgd.BudgetExhausted):
        gate(tmp_path).process(update(), FLContext())
    assert counted(tmp_path) == 2


def test_another_model_in_the_same_study_is_refused(tmp_path):
    gate(tmp_path).process(update(), FLContext())
    other = DXO(DataKind.WEIGHT_DIFF, data={"w": np.zeros(99, np.float32)})
    with pytest.raises(bqsgd.InvalidParameter, match="dimension 8 then, 99 now"):
        gate(tmp_path).process(other.to_shareable(), FLContext())


@pytest.mark.parametrize("site", ["../up", "a/b", "", "x" * 80])
def test_the_name_of_a_site_is_safe_in_a_path(tmp_path, site):
    context = FLContext()
    context.set_prop("__identity_name__", site, private=False, sticky=False)
    with pytest.raises(bqsgd.InvalidParameter, match="site must be"):
        gate(tmp_path, ledger=str(tmp_path / "{site}.ledger")).process(update(), context)


@pytest.mark.parametrize(
    "changed",
    [
        {"data": {}},
        {"data": {"bqsgd.frame": "text"}},
        {"data": {"bqsgd.frame": np.zeros(3)}},
        {"data": {"bqsgd.frame": np.zeros(100, np.uint8)}},
        {"ranges": [1e9]},
        {"ranges": "x"},
        {"ranges": [float("nan")]},
        {"arrays": [["w", [2**62]]]},
        {"arrays": [["w", [-1, -8]]]},
        {"arrays": [["w", [2.0, 4]]]},
        {"arrays": [["w", [True, 8]]]},
        {"arrays": "x"},
        {"arrays": []},
        {"arrays": [["w"]]},
        {"arrays": [["w", [9]]]},
    ],
    ids=str,
)
def test_a_hostile_site_is_refused(tmp_path, changed):
    dxo = from_shareable(gate(tmp_path).process(update(), FLContext()))
    meta = dxo.meta | {f"bqsgd.{name}": value for name, value in changed.items() if name != "data"}
    hostile = DXO(DataKind.WEIGHT_DIFF, data=changed.get("data", dxo.data) or {"x": 1}, meta=meta)
    with pytest.raises(bqsgd.FrameError):
        OpenUpdatesFilter(1.0).process(hostile.to_shareable(), FLContext())


def test_a_job_cannot_leave_out_the_filter_of_the_sites_scope(tmp_path):
    """NVFlare applies the scope's filters to every job, whatever filters the job has itself."""
    scope = Scope()
    scope.set_name("private")
    scope.add_task_result_filter(gate(tmp_path), FilterKey.OUT)
    manager = PrivacyManager([scope], "private", None)
    context = FLContext()
    context.set_prop(FLContextKey.SCOPE_OBJECT, manager.get_scope(None), private=True, sticky=False)
    left = apply_filters(Scope.TASK_RESULT_FILTERS_NAME, update(), context, {}, "train", FilterKey.OUT)
    assert sorted(from_shareable(left).data) == ["bqsgd.frame"]
    assert counted(tmp_path) == 1


def page_policy():
    """The policy that the page prints."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "gate.md").read_text(encoding="utf-8")
    return json.loads(page.split("```json\n")[1].split("```")[0])


def test_the_policy_of_the_page_is_read_by_nvflare_and_is_the_sites_only_scope(tmp_path):
    policy = page_policy()
    policy["scopes"][0]["task_result_filters"][0]["args"]["ledger"] = str(tmp_path / "site.ledger")
    for name in ("local", "startup"):
        (tmp_path / name).mkdir()
    (tmp_path / "local" / "privacy.json").write_text(json.dumps(policy))
    PrivacyService.initialize(create_privacy_manager(Workspace(str(tmp_path), "site-1"), names_only=False))
    assert PrivacyService.is_scope_allowed("")
    assert not PrivacyService.is_scope_allowed("public"), "a job cannot choose another scope"
    context = FLContext()
    context.set_prop(FLContextKey.SCOPE_OBJECT, PrivacyService.get_scope(""), private=True, sticky=False)
    job = {"train-out": [ExcludeVars("w")]}
    left = apply_filters(Scope.TASK_RESULT_FILTERS_NAME, update(), context, job, "train", FilterKey.OUT)
    assert sorted(from_shareable(left).data) == ["bqsgd.frame"], "a filter of the job comes after the site's"
    assert counted(tmp_path) == 1
    for task in ("validate", "submit_model", "anything"):
        with pytest.raises(Exception, match="DIFF"):
            apply_filters(
                Scope.TASK_RESULT_FILTERS_NAME, update(kind=DataKind.WEIGHTS), context, {}, task, FilterKey.OUT
            )


def test_two_jobs_at_once_never_count_one_update_for_two(tmp_path):
    one, other = gate(tmp_path), gate(tmp_path)
    frames = []
    for site in (one, other):
        frames.append(from_shareable(site.process(update(), FLContext())).data["bqsgd.frame"].tobytes())
    assert counted(tmp_path) == 2
    assert len(set(frames)) == 2
    with pytest.raises((bqsgd.BudgetExhausted, bqsgd.Infeasible)):
        gate(tmp_path, study="another", rounds=1).process(update(), FLContext())


def test_a_replayed_result_is_no_new_release_and_cannot_be_opened_as_another(tmp_path):
    """What the server has, it has: opening a frame twice gives the same values, and counts nothing."""
    left = gate(tmp_path).process(update(), FLContext())
    first, again = (from_shareable(OpenUpdatesFilter(1.0).process(deepcopy(left), FLContext())) for _ in range(2))
    assert np.array_equal(first.data["w"], again.data["w"])
    assert counted(tmp_path) == 1


def test_nvflares_own_filters_do_what_the_page_says():
    """The table of docs/gate.md: SVTPrivacy counts and does not stop, and PercentilePrivacy adds no noise."""
    svt = SVTPrivacy()
    for _ in range(30):
        left = from_shareable(svt.process(plain(1000), FLContext()))
    assert svt.get_privacy_spent() == pytest.approx(30 * (0.1 + 0.1 * 100)), "0.1, and 0.1 for each of 100 numbers"
    assert left.data["steps"] == 5, "a single number passes as it is"
    svt.handle_event(EventType.START_RUN, FLContext())
    assert svt.get_privacy_spent() == 0.0
    metrics = update(kind=DataKind.METRICS)
    assert from_shareable(svt.process(metrics, FLContext())).meta["initial_metrics"] == SECRET
    one, other = (from_shareable(PercentilePrivacy().process(plain(1000), FLContext())).data for _ in range(2))
    assert np.array_equal(one["w"], other["w"])


def plain(size):
    data = {"w": np.linspace(-1, 1, size - 1).astype(np.float32), "steps": np.array(5.0)}
    return DXO(DataKind.WEIGHT_DIFF, data=data, meta={"NUM_STEPS_CURRENT_ROUND": 1}).to_shareable()


def test_arguments_are_plain_for_the_files_of_a_job(tmp_path):
    given = {
        name: value
        for name, value in vars(gate(tmp_path)).items()
        if name in PrivateUpdatesFilter.__init__.__code__.co_varnames
    }
    assert json.loads(json.dumps(given))["rounds"] == 2
