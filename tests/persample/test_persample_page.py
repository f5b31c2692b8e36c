"""The figures of the page are those of the committed run, and rivals are given the models that we are given."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.persample import PAGE, RESULTS, TIMES_PLAIN, page_table, page_with, verdicts
from benchmarks.persample_language import Bert, Gpt, LowRank
from benchmarks.persample_models import MODELS, padded
from benchmarks.persample_rivals import OPACUS, VMAP, rivals_of, trained

from bqsgd._src.persample import L2, clipped_gradients
from bqsgd._src.persample.gradients import road_of
from bqsgd._src.persample.passes import PassesRoad
from bqsgd._src.persample.program import Form


def made_up_run() -> dict[str, Any]:
    """A run in which plain takes a second, ours one and a quarter and every other rival two."""
    speed: dict[str, Any] = {"1": {}, "2": {}}
    for models in speed.values():
        for label, case in MODELS.items():
            seconds = {name: 2.0 if name in (*OPACUS, VMAP) else 1.25 for name in rivals_of(case)}
            found = {"seconds": seconds | {"plain": 1.0}, "failed": {}, "distance_from_ours": {}}
            models[label] = found | {"date": "2026-01-02", "load": 0.1}
    memory = {"plain": 2**20, "L2": 2**20, "Clamp": 2**20}
    return {"speed": speed, "memory_bytes": memory}


def test_the_table_of_the_page_is_that_of_the_committed_run() -> None:
    assert page_with(page_table(json.loads(RESULTS.read_text()))) == PAGE.read_text()


def test_the_table_has_a_row_for_every_model_and_says_what_failed(tmp_path: Path) -> None:
    run = made_up_run()
    lstm = run["speed"]["1"]["LSTM"]
    del lstm["seconds"]["opacus ew"]
    lstm["failed"]["opacus ew"] = "RuntimeError: no rule"
    run["targets"] = verdicts(run["speed"], run["memory_bytes"])
    page = tmp_path / "persample.md"
    page.write_text(page_with(page_table(run)))
    assert page_with(page_table(run), page) == page.read_text()
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ") and ", batch " in line]
    assert len(rows) == 2 * len(MODELS)
    assert {line.count("|") for line in rows} == {13}
    assert "| LeNet-5, batch 256 | 1000.0 | 1.25 | 1.25 | 1.25 | 1.25 | - | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 |" in rows
    assert "| LSTM, batch 64 | 1000.0 | 1.25 | - | - | 1.25 | 1.25 | 2.00 | 2.00 | fails | 2.00 | 2.00 |" in rows
    assert "LSTM, opacus ew fails: RuntimeError: no rule" in page.read_text()
    assert "Targets missed: none." in page.read_text()
    assert f"2026-01-02, 2 core(s), load averages 0.1 to 0.1: {', '.join(MODELS)}." in " ".join(
        page.read_text().split()
    )


def test_every_model_must_be_as_fast_as_the_best_opacus_mode() -> None:
    run = made_up_run()
    for models in run["speed"].values():
        for found in models.values():
            found["seconds"]["opacus ew"] = 1.2
    missed = {row["target"] for row in verdicts(run["speed"], run["memory_bytes"]) if not row["met"]}
    for cores in run["speed"]:
        assert {f"{label}, L2, {cores} core(s): at most the best opacus mode" for label in MODELS} <= missed


def test_ours_must_stay_below_one_and_a_half_times_plain_where_that_is_promised() -> None:
    run = made_up_run()
    for models in run["speed"].values():
        for found in models.values():
            found["seconds"]["L2"] = 1.6
    missed = {row["target"] for row in verdicts(run["speed"], run["memory_bytes"]) if not row["met"]}
    promised = [label for label in TIMES_PLAIN if TIMES_PLAIN[label]["L2"] == 1.5]
    assert set(promised) == {"Linear 3969-10", "Linear 1280-10", "LeNet-5", "Transformer", "LoRA"}
    assert missed == {f"{label}, L2, {cores} core(s): <= 1.5x plain" for label in promised for cores in ("1", "2")}


def test_a_step_of_ours_that_fails_misses_its_targets() -> None:
    run = made_up_run()
    del run["speed"]["2"]["LoRA"]["seconds"]["L2"]
    missed = [row["target"] for row in verdicts(run["speed"], run["memory_bytes"]) if not row["met"]]
    assert missed == ["LoRA, L2, 2 core(s): at most the best opacus mode", "LoRA, L2, 2 core(s): <= 1.5x plain"]


@pytest.mark.parametrize("rival", [*OPACUS, VMAP])
@pytest.mark.parametrize("label", ["Transformer", "LSTM", "BERT 2x128"])
def test_a_rival_is_given_the_same_function_of_the_same_parameters(label: str, rival: str) -> None:
    pytest.importorskip("opacus")
    torch.manual_seed(0)
    case = MODELS[label]
    model = case.build()
    theirs = case.model_for(rival, model)
    inputs, _ = case.batch(3)
    assert torch.allclose(theirs(inputs), model(inputs), atol=1e-6)
    assert {name: p.shape for name, p in trained(theirs).items()} == {
        name: p.shape for name, p in trained(model).items()
    }


def test_a_low_rank_fine_tune_trains_its_updates_and_its_head_alone() -> None:
    names = list(trained(MODELS["LoRA"].build()))
    assert len(names) == 2 * 2 * 2 + 2
    assert all(".down." in name or ".up." in name or name.startswith("out.") for name in names)


def low_rank_gpt(**size: int) -> torch.nn.Module:
    model = Gpt(**size).requires_grad_(False)
    for layer in model.layers:
        layer.qkv = LowRank(layer.qkv, 2)
    model.out.requires_grad_(True)
    return model


@pytest.mark.parametrize("build", [Bert, Gpt, low_rank_gpt])
def test_masks_position_ids_and_conv1d_stay_on_the_fast_road(build: Callable[..., torch.nn.Module]) -> None:
    torch.manual_seed(0)
    model, loss = build(width=16, heads=2, layers=1, kinds=20, tokens=8), torch.nn.CrossEntropyLoss(reduction="none")
    batch = padded(8, 20)(5, torch.Generator().manual_seed(1)), torch.tensor([0, 1, 1, 0, 1])
    road = road_of(model, loss, None, Form.of(batch), batch_size=5, packed=False)
    assert isinstance(road, PassesRoad)
    parameters, expected = list(trained(model).values()), torch.zeros(0)
    for sample in range(5):
        each = torch.autograd.grad(
            loss(model(batch[0][sample : sample + 1]), batch[1][sample : sample + 1]), parameters
        )
        flat = torch.cat([gradient.flatten() for gradient in each]).double()
        expected = flat if sample == 0 else expected + flat
    mean = clipped_gradients(model, loss, batch, clip=L2(8.0), batch_size=1).mean  # bites nobody
    assert float((mean - expected).norm() / expected.norm()) < 1e-4


def test_the_table_of_memory_is_that_of_the_committed_run() -> None:
    from benchmarks import memory

    shown = memory.PAGE.read_text().split(memory.TABLE_STARTS)[1].split(memory.TABLE_ENDS)[0]
    result = json.loads((memory.benchmarks.RESULTS / "memory.json").read_text())
    assert shown == memory.table(result)
    assert [(row["model"], row["batch_size"]) for row in result["rows"]] == [
        (label, size) for label in memory.LABELS for size in memory.BATCHES
    ]
