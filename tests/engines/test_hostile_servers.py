"""Once a round is counted there is a frame: no model that a server sends lets it see anything of the data but codes."""

import contextlib
import json
import logging
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile_servers import (
    BASE,
    LOSS,
    NETWORKS,
    NOT_FINITE,
    SAMPLES,
    UNITS_AND_CLIPS,
    Watch,
    any_finite,
    data_sets,
    dimension,
    few_data_sets,
    finite_models,
    message,
    seen,
    settings,
    shared_network,
)
from torch import nn

from bqsgd._src.client.objective import Objective
from bqsgd._src.client.samples import Part
from bqsgd._src.codec import decode_frame, encode_frame
from bqsgd._src.engines.in_process import InProcess
from bqsgd._src.errors import InvalidParameter, ModelMessageError, NonFiniteInput
from bqsgd._src.ledger import Ledger
from bqsgd._src.noise import privacy_rng, seeded_rng
from bqsgd._src.params import Mechanism
from bqsgd._src.persample import L2, BatchMean, Clamp, Dual, Normalize, PerLayer, Scale, clipped_gradients
from bqsgd._src.tasks.task import Task
from bqsgd._src.wire.reply import Reply
from bqsgd.distributed import BQHookState, PrivateSteps
from distributed_processes import run_ranks
from long_suite import others_slow
from tiny_task import client_of

every_unit_and_clip = pytest.mark.parametrize(("unit", "clip"), UNITS_AND_CLIPS)
WORKER = Path(__file__).parent / "hostile_server_worker.py"


def make_client(network, unit, clip, data, *, ledger=None, model=None, **changes):
    config = settings(unit, clip, **changes)
    model = shared_network(network) if model is None else model
    return client_of(config, model, LOSS, data, ledger=ledger)


def told_apart(network, unit, clip, models, capfd, caplog):
    """(model, data) whose answer, warnings, log or output differ from those with ordinary data."""
    found, first = [], {}
    for name, data in data_sets().items():
        client = make_client(network, unit, clip, data)
        with Watch():
            client.answer(message(np.zeros(dimension(network)), round=999))  # what is said once is said here
        for round, (label, model) in enumerate(models.items()):
            caplog.clear()
            capfd.readouterr()
            with Watch() as watch:
                answer = client.answer(message(model, round=round))
            visible = (seen(answer), watch.warnings, caplog.text, capfd.readouterr())
            assert visible[0][0] == "frame", (label, name, visible)
            if first.setdefault(label, visible) != visible:
                found.append((label, name, visible))
    return found


@pytest.mark.parametrize(
    ("network", "unit", "clip"),
    [
        *others_slow([("linear", unit, clip) for unit, clip in UNITS_AND_CLIPS], [("linear", "sample", "clamp")]),
        *((network, *how) for network in ("picky", "odd") for how in (("sample", "dual"), ("client", "l2"))),
    ],
)
def test_no_model_tells_data_apart(network, unit, clip, capfd, caplog):
    caplog.set_level(logging.DEBUG)
    assert told_apart(network, unit, clip, finite_models(dimension(network)), capfd, caplog) == []


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
@every_unit_and_clip
def test_no_model_of_many_tells_data_apart(network, unit, clip, capfd, caplog):
    rng = np.random.default_rng(len(network))
    size = dimension(network)
    models = {**finite_models(size), **{number: any_finite(rng, size) for number in range(100)}}
    assert told_apart(network, unit, clip, models, capfd, caplog) == []


@every_unit_and_clip
def test_a_model_that_is_not_finite_is_refused_before_anything_is_read_or_spent(unit, clip, tmp_path):
    model = np.zeros(dimension("linear"), np.float32)
    for number, data in enumerate(data_sets().values()):
        with Ledger.open(tmp_path / str(number), client=0, budget_epsilon=1e9, budget_delta=1e-5) as ledger:
            client = make_client("linear", unit, clip, data, ledger=ledger, seed=None)
            for poison in NOT_FINITE.values():
                model[1] = poison
                with pytest.raises(ModelMessageError, match="holds NaN or infinity"):
                    client.answer(message(model, round=0))
                with pytest.raises(NonFiniteInput, match="the model vector holds NaN"):
                    client.update(model, 0)
                with pytest.raises(InvalidParameter, match="takes a vector of 8"):
                    client.update(model[1:], 0)
                assert ledger.spent_rounds == 0


@pytest.mark.parametrize(("unit", "clip"), [("sample", "dual"), ("client", "dual")])
def test_what_is_wrong_with_the_model_or_the_loss_is_raised_before_the_spend(unit, clip, tmp_path):
    data = data_sets()["ordinary"]
    mean_loss = nn.CrossEntropyLoss()
    with Ledger.open(tmp_path / "a", client=0, budget_epsilon=1e9, budget_delta=1e-5) as ledger:
        mixing = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        client = make_client("linear", unit, clip, data, ledger=ledger, model=mixing, seed=None)
        model = np.zeros(sum(p.numel() for p in mixing.parameters()), np.float32)
        before = mixing[1].running_var.clone()
        if unit == "sample":
            with pytest.raises(InvalidParameter, match="BatchNorm"):
                client.update(model, 0)
        else:
            client._prepare(model, 0)
        assert torch.equal(mixing[1].running_var, before), "the trial leaves no trace"
        wide = make_client("linear", unit, clip, data, ledger=ledger, model=nn.Linear(5, 2), seed=None)
        with pytest.raises(InvalidParameter, match="cannot be multiplied"):
            wide.update(np.zeros(12, np.float32), 0)
        if unit == "sample":
            reduced = make_client("linear", unit, clip, data, ledger=ledger, seed=None)
            reduced.objective.loss_fn = mean_loss
            with pytest.raises(InvalidParameter, match="one loss per sample"):
                reduced.update(np.zeros(8, np.float32), 0)
        assert ledger.spent_rounds == 0


def test_the_trial_changes_no_random_draw():
    data = data_sets()["ordinary"]
    dropping = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2))
    client = make_client("linear", "sample", "dual", data, model=dropping)
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    client._prepare(np.zeros(8, np.float32), 0)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(
    "clip",
    [
        Dual(norm=0.5, bound=0.1), Clamp(0.1), PerLayer(L2(0.5)), PerLayer((L2(0.1), Clamp(0.3))), Normalize(0.5),
        L2(0.5), Scale(0.1), BatchMean(0.1),
    ],
    ids=str,
)  # fmt: skip
def test_a_sample_that_raises_counts_as_zero_and_the_others_count(clip):
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2), data_sets()
    inputs, wrong = (torch.as_tensor(part) for part in data["a label beyond"])
    part = Part(numbers=np.arange(SAMPLES), data=(inputs, wrong))
    mean, dropped = Objective(model, LOSS, clip=clip, batch_size=4).mean([part])
    others = torch.arange(SAMPLES) != 3
    expected = clipped_gradients(model, LOSS, (inputs[others], wrong[others]), clip=clip, batch_size=4).mean.numpy()
    assert dropped == 1
    assert np.abs(expected).max() > 0.01
    if isinstance(clip, BatchMean):
        assert np.abs(mean).max() <= SAMPLES * 0.1 / 4  # within what the encoder clamps; its sensitivity is the range
    else:
        np.testing.assert_array_equal(mean, expected)  # to the last bit: the others must not move at all


@every_unit_and_clip
def test_what_cannot_be_computed_is_sent_as_zero(unit, clip):
    client = make_client("linear", unit, clip, data_sets()["all nan"], levels=1000, trials=0)
    frame = client.answer(message(np.ones(8, np.float32), round=0)).frame
    assert not decode_frame(frame, range=client.range).any()


def test_private_figures_are_written_whatever_the_data(tmp_path):
    for name, data in data_sets().items():
        kept = []
        config = settings("sample", "dual", private_metrics=True)
        client = client_of(config, nn.Linear(3, 2), LOSS, data, private_log=kept.append)
        assert seen(client.answer(message(np.full(8, 3e38), round=0)))[0] == "frame"
        assert kept[0]["outside_the_guarantee"] is True, name


@every_unit_and_clip
def test_the_in_process_engine_carries_a_frame(unit, clip):
    for data in few_data_sets().values():
        with contextlib.closing(InProcess({0: make_client("linear", unit, clip, data)})) as engine:
            for round, model in enumerate(finite_models(8).values()):
                (answer,) = engine.exchange({0: message(model, round=round)}, round=round)
                assert (answer.declined, answer.reason, seen(answer)[0]) == (False, None, "frame")


@pytest.mark.parametrize("clip", [Dual(norm=0.5, bound=0.1), Clamp(0.1), L2(0.5), Scale(0.1), BatchMean(0.1)], ids=str)
@pytest.mark.parametrize("network", ["linear", "picky", "odd"])
def test_the_ddp_hook_has_a_frame_for_every_step(clip, network):
    mechanism = Mechanism(levels=20, trials=200)
    for inputs, targets in few_data_sets().values():
        model = shared_network(network)
        private = PrivateSteps(
            model=model, loss_fn=LOSS, clip=clip, batch_size=SAMPLES, dataset_size=100, ledger=None, run="hook"
        )
        state = BQHookState(mechanism, range=0.1, rng=seeded_rng(seed=1), private=private)
        for vector in finite_models(dimension(network)).values():
            nn.utils.vector_to_parameters(torch.as_tensor(vector), model.parameters())
            batch = (torch.as_tensor(inputs), torch.as_tensor(targets))
            with Watch():
                state.supply(batch, indices=np.arange(len(batch[0])))
            outlet = partial(encode_frame, client=0, range=0.1)
            frame = private.frame(list(model.parameters()), 0, state, outlet, round=state.step)
            private.used()
            state.step += 1
            assert seen(Reply(client=0, frame=frame))[2].dimension == dimension(network)


def test_the_ddp_hook_refuses_a_batch_that_does_not_pair_up_before_the_spend(tmp_path):
    with Ledger.open(tmp_path / "a", client=0, budget_epsilon=1e9, budget_delta=1e-5) as ledger:
        private = PrivateSteps(
            model=nn.Linear(3, 2), loss_fn=LOSS, clip=Clamp(0.1), batch_size=4, dataset_size=100, ledger=ledger, run="x"
        )
        state = BQHookState(Mechanism(levels=20, trials=200), range=0.1, rng=privacy_rng(), private=private)
        with pytest.raises(InvalidParameter, match="do not pair up"):
            state.supply((torch.zeros(4, 3), torch.zeros(3, dtype=torch.long)), indices=np.arange(4))
        assert ledger.spent_rounds == 0


@pytest.mark.parametrize(("unit", "clip"), others_slow(UNITS_AND_CLIPS, UNITS_AND_CLIPS[::4]))
def test_flower_carries_a_frame(unit, clip, tmp_path):
    pytest.importorskip("flwr", reason="needs the extra `flower`")
    from flwr.app import Message, MessageType

    from bqsgd._src.flower.messages import FRAME, MODEL, data_of, field_of, pack
    from bqsgd.flower import client_app
    from loop_grid import LoopGrid

    sets = few_data_sets()
    names = list(sets)
    app = client_app(
        lambda config, node, options: Task(
            make_model=lambda: shared_network("linear"), shares=[sets[names[node.client]]], loss_fn=LOSS
        )
    )
    config = settings(unit, clip, clients=len(sets), seed=None)
    run_config = {name: value for name, value in config.flat().items() if name != "budgets" and value is not None}
    allowed = {
        "epsilon": 1e4,
        "units": "sample,client",
        "samplings": "none",
        "clips": clip,
        "largest-parameter": 3.5e38,
    }
    nodes = [{"client": number, "ledger-folder": str(tmp_path / str(number)), **allowed} for number in range(len(sets))]
    grid = LoopGrid(app, run_config, nodes)
    models = {**finite_models(8), **{name: np.full(8, value) for name, value in NOT_FINITE.items()}}
    for round, (label, model) in enumerate(models.items()):
        content = pack(message(model, round=round), kind=MODEL, run="r", report=False)
        asked = [Message(content, node, MessageType.TRAIN, ttl=60.0, group_id=str(round)) for node in grid.contexts]
        answers = grid.send_and_receive(asked)
        assert len(answers) == len(sets)
        if label in NOT_FINITE:  # a property of the model: declined by all, with one reason
            assert {field_of(reply, "declined", str) for reply in answers} == {
                "the client could not answer; its own log says why"
            }
            continue
        assert [field_of(reply, "declined", str) for reply in answers] == [None] * len(sets)
        frames = [seen(Reply(client=0, frame=data_of(reply, kind=FRAME))) for reply in answers]
        assert len({(kind, length) for kind, length, _ in frames}) == 1
        assert len({str(reply.content.config_records) for reply in answers}) == 1
    for number in range(len(sets)):
        with Ledger(tmp_path / str(number) / f"client-{number:04}.ledger") as ledger:
            assert ledger.spent_rounds == len(finite_models(8))


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["few clips", "all clips"])
def test_torch_distributed_carries_a_frame(tmp_path, few):
    ended = run_ranks(tmp_path, {**BASE, "clients": 2, "few": few}, script=WORKER)
    assert [code for code, _ in ended] == [0, 0], ended
    kind, reason = json.loads((tmp_path / "declined.json").read_text())
    assert kind == "REFUSAL"
    assert reason == "the run asks for unit client, this node allows units='sample'"
    found = json.loads((tmp_path / "seen.json").read_text())
    assert len(found) == len(UNITS_AND_CLIPS[::4] if few else UNITS_AND_CLIPS) * len(few_data_sets())
    finite, refused = len(finite_models(8)), len(NOT_FINITE)
    frame = found[0]["answers"][0]
    assert frame[0] == "FRAME"
    for case in found:
        assert case["answers"] == [frame] * finite + [["DECLINED", "the model message arrived damaged"]] * refused, case
        assert case["spent"] == finite
