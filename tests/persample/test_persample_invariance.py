"""Bit for bit: a batch gives the sum of what its samples give alone, whatever rows, sizes, weights and processor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from persample_models import CLASSES, FAST, SLOW, Case
from persample_oracle import LOSS
from test_persample_battery import relaxed
from torch import Tensor, nn

from attacks.cancelling_weights import cancelling_weights
from attacks.chosen_sums import PLATEAU, chosen_sums
from attacks.mitigation_off import float32_sums, rows_as_they_come
from bqsgd.errors import InvalidParameter
from bqsgd.models import AlexNet28, LeNet5
from bqsgd.persample import L2, Clamp, Clip, ClippedGradients, Dual, Scale, check_samples_apart, clipped_gradients
from bqsgd.persample.rows import plan_chunks, rows_for

SAMPLES = 20
CLIPS: list[Clip] = [Scale(0.01), Clamp(0.003), L2(0.2), Dual(0.1, 0.01), Dual(0.01, 0.1)]


def check_adds_up(model: nn.Module, inputs: Tensor, targets: Tensor, clip: Clip, seed: int) -> None:
    """Random batches of these samples against the samples alone; a power of two as batch size keeps sums exact."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randperm(1000, generator=generator)[: len(inputs)]
    alone = [
        clipped_gradients(
            model, LOSS, (inputs[i : i + 1], targets[i : i + 1]), indices=numbers[i : i + 1], clip=clip, batch_size=64
        ).mean
        for i in range(len(inputs))
    ]
    stated = clip.sensitivity(batch_size=64, range=1.0)
    for own in alone:
        assert own.abs().max() <= stated.linf
        assert stated.l2 is None or own.norm() <= stated.l2
    for _ in range(3):
        size = int(torch.randint(1, len(inputs) + 1, (1,), generator=generator))
        chosen = torch.randperm(len(inputs), generator=generator)[:size]
        batch = inputs[chosen], targets[chosen]
        found = clipped_gradients(model, LOSS, batch, indices=numbers[chosen], clip=clip, batch_size=64).mean
        assert torch.equal(found, torch.stack(alone)[chosen].sum(dim=0))


@pytest.mark.filterwarnings("ignore:Using padding='same'", "ignore::bqsgd.persample.SlowGradientsWarning")
@pytest.mark.parametrize("build", FAST + SLOW, ids=lambda build: build.__name__)
def test_own_gradients_add_up_for_every_rule(build: Callable[[st.DrawFn], Case]) -> None:
    @settings(relaxed, max_examples=3)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        seed = data.draw(st.integers(0, 2**31), label="seed")
        torch.manual_seed(seed)
        model, like = build(data.draw)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= data.draw(st.sampled_from([1.0, 1.0, 1e4, 1e12]), label="scale")
        shape = (SAMPLES, *like.shape[1:])
        inputs = torch.randn(shape) if like.is_floating_point() else torch.randint(0, 2, shape)
        check_adds_up(model, inputs, torch.randint(0, CLASSES, (SAMPLES,)), data.draw(st.sampled_from(CLIPS)), seed)

    check()


@pytest.mark.parametrize("make", [LeNet5, AlexNet28], ids=lambda make: make.__name__)
@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_own_gradients_add_up_for_real_models(make: Callable[[], nn.Module], scale: float) -> None:
    torch.manual_seed(1)
    model, inputs, targets = make(), torch.rand(6, 1, 28, 28), torch.randint(0, 10, (6,))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= scale if parameter.dim() > 1 else 1
    check_adds_up(model, inputs, targets, Dual(0.5, 0.01), 1)


def test_own_gradients_add_up_where_weights_cancel() -> None:
    attack = cancelling_weights(sizes=(15,))
    for clip in CLIPS:
        check_adds_up(attack.model, attack.inputs, attack.targets, clip, 2)


def test_own_gradients_stay_inside_where_positions_cancel() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(7, 5, bias=False), nn.Flatten(), nn.Linear(20, 3))
    half = torch.randn(9, 1, 7) * 1e12
    inputs = torch.cat([half, -half, half * 3, -half * 3], dim=1)
    with torch.no_grad():
        model[2].weight.copy_(torch.randn(3, 5).repeat(1, 4) * 1e-3)
    for clip in CLIPS:
        check_adds_up(model, inputs, torch.randint(0, 3, (9,)), clip, 3)


OTHER_PATHS = {
    "oldest": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "mixed": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
SLOW_PATHS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "generic numba": {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
    "two threads": {},
}
HERE = Path(__file__).parent
FEATURES = "test_the_features_of_an_image_depend_on_nothing_but_that_image"


@pytest.mark.parametrize("path", [*OTHER_PATHS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_PATHS)])
def test_the_same_on_other_code_paths(path: str) -> None:
    """The tests above and that of the scattering features, in a process that takes other kernels."""
    environment = {**os.environ, **{**OTHER_PATHS, **SLOW_PATHS}[path], "OMP_NUM_THREADS": "1"}
    if path == "two threads":
        environment["BQSGD_TEST_THREADS"] = "2"
    scattering = HERE.parent / "data" / "test_scattering.py"
    chosen = [str(Path(__file__)), f"{scattering}::{FEATURES}", "-k", f"own_gradients or {FEATURES}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *chosen, "-q", "-n", "0", "-p", "no:cacheprovider"],
        env=environment,
        capture_output=True,
        text=True,
        cwd=HERE.parent.parent,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout or "[100%]" in done.stdout


def moved(
    method: Callable[..., ClippedGradients],
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    record: int,
    clip: Clip,
    size: int,
) -> tuple[float, float]:
    """How far one record moves the mean, in times of what the clip states: max-norm, and norm where one is stated."""
    numbers = torch.arange(len(batch[0]))
    kept = numbers != record
    means = [
        method(model, LOSS, (batch[0][rows], batch[1][rows]), indices=numbers[rows], clip=clip, batch_size=size).mean
        for rows in (numbers, numbers[kept])
    ]
    move, stated = means[0] - means[1], clip.sensitivity(batch_size=size, range=1.0)
    return float(move.abs().max() / stated.linf), float(move.norm() / stated.l2) if stated.l2 else 0.0


def test_a_record_in_front_moves_nobody_else_under_cancelling_weights() -> None:
    attack = cancelling_weights()
    batch, size = (attack.inputs, attack.targets), len(attack.inputs)
    for clip in (Clamp(0.01), L2(1.0), Dual(0.5, 0.01), Scale(0.01)):
        assert max(moved(clipped_gradients, attack.model, batch, 0, clip, size)) <= 1
    if attack.flipped > 1:  # on this machine the place or the number of rows matters
        assert moved(rows_as_they_come, attack.model, batch, 0, Clamp(0.01), size)[0] > attack.flipped / 2


def test_chosen_data_move_the_mean_by_no_more_than_stated_at_120_000_samples() -> None:
    model, inputs, targets = chosen_sums(120_000)
    assert moved(clipped_gradients, model, (inputs, targets), PLATEAU, Clamp(1.0), 2**17)[0] <= 1
    assert moved(float32_sums, model, (inputs, targets), PLATEAU, Clamp(1.0), 2**17)[0] > 200


@given(count=st.integers(0, 300), rows=st.sampled_from([16, 32, 64]), seed=st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_every_sample_has_its_own_row_in_exactly_one_pass(count: int, rows: int, seed: int) -> None:
    numbers = torch.randint(0, 10**6, (count,), generator=torch.Generator().manual_seed(seed))
    chunks = plan_chunks(count, numbers, rows)
    members = torch.cat([chunk.members for chunk in chunks]) if chunks else torch.empty(0, dtype=torch.long)
    assert sorted(members.tolist()) == list(range(count))
    for chunk in chunks:
        assert len(set(chunk.rows.tolist())) == len(chunk.rows)
        assert torch.equal(chunk.rows, numbers[chunk.members] % rows)
    assert len(plan_chunks(count, None, rows)) == -(-count // rows)


def test_rows_follow_from_the_public_batch_size() -> None:
    assert [rows_for(size) for size in (1, 32, 64, 127, 128, 255, 256, 10**6)] == [16, 16, 16, 16, 32, 32, 64, 64]


class Touching(nn.Module):
    """Rows that feel each other, or their own place, in the last bits only."""

    def __init__(self, *, by_row: bool) -> None:
        super().__init__()
        self.out, self.by_row = nn.Linear(4, 3), by_row

    def forward(self, x: Tensor) -> Tensor:
        touch = torch.arange(len(x))[:, None] if self.by_row else x.mean(dim=0)
        return self.out(x * (1 + 1e-6 * touch))


def test_a_model_that_touches_other_rows_in_the_last_bits_is_found() -> None:
    batch = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    with pytest.raises(InvalidParameter, match="with the other samples of its batch"):
        check_samples_apart(Touching(by_row=False), LOSS, batch, batch_size=256)
    check_samples_apart(Touching(by_row=True), LOSS, batch, batch_size=256)
    with pytest.raises(InvalidParameter, match="with its row in the batch"):
        check_samples_apart(Touching(by_row=True), LOSS, batch, batch_size=256, packed=True)


@pytest.mark.parametrize("bad", [torch.arange(3), torch.tensor([-1, 0]), torch.tensor([0.0, 1.0])])
def test_indices_out_of_place_are_refused(bad: Tensor) -> None:
    batch = torch.randn(2, 4), torch.tensor([0, 1])
    with pytest.raises(InvalidParameter, match="indices must be 2 non-negative integers"):
        clipped_gradients(nn.Linear(4, 3), LOSS, batch, indices=bad, clip=L2(1.0), batch_size=2)
