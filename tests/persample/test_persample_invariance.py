"""Bit for bit: a batch gives the sum of what its samples give alone, whatever rows, sizes, weights and processor."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from persample_oracle import LOSS, Case, gradients_one_by_one, mean_of
from torch import Tensor, nn

import persample_models as models
from attacks.cancelling_weights import cancelling_weights
from attacks.chosen_sums import PLATEAU, chosen_sums
from attacks.mitigation_off import float32_sums, rows_as_they_come
from bqsgd._src.client.objective import Objective
from bqsgd._src.client.samples import Part
from bqsgd._src.models import build
from bqsgd._src.persample import L2, Clamp, Clip, ClippedGradients, Dual, Scale, clipped_gradients
from bqsgd._src.persample.rows import rows_are_apart, rows_for
from persample_models import EVERY, Build, Centred, case_of

CLIPS: list[Clip] = [Scale(0.01), Clamp(0.003), L2(0.2), Dual(0.1, 0.01), Dual(0.01, 0.1)]
TELLING: list[tuple[Build, torch.dtype]] = [
    *((getattr(models, name), torch.float32) for name in (
        "linear", "wide_linear", "linear_sequence", "conv2d", "pooling", "embedding_mean", "layer_norm", "gelu",
        "lstm", "dictionary", "linear_loss",  # over lanes
        "group_norm", "padded_pooling", "transposed_conv", "attention", "wide_attention", "encoder",
        "wide_convolutions", "loss_of_positions",  # in passes
        "branches_on_values",  # alone
    )),
    *((getattr(models, name), torch.float64) for name in ("wide_linear", "conv2d", "wide_table", "layer_norm")),
]  # fmt: skip
"""A few models that tell kernels apart; in float64 the factors of wide layers come from torch's kernels."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same'"),
    pytest.mark.filterwarnings("ignore::bqsgd._src.persample.SlowGradientsWarning"),
]


def check_adds_up(case: Case, clip: Clip, seed: int, *, batch_size: int = 64, packed: bool = False) -> None:
    """Random batches of these samples against the samples alone; a power of two as batch size keeps sums exact."""
    generator = torch.Generator().manual_seed(seed)

    def mean(index: Any) -> Tensor:
        return clipped_gradients(
            case.model,
            case.loss,
            case.taken(index),
            packed=packed,
            clip=clip,
            batch_size=batch_size,
            forward=case.forward,
        ).mean

    alone = [mean(slice(number, number + 1)) for number in range(case.samples)]
    stated = clip.sensitivity(batch_size=batch_size, range=1.0)
    for own in alone:
        assert own.abs().max() <= stated.linf
        assert stated.l2 is None or own.norm() <= stated.l2
    for _ in range(3):
        size = int(torch.randint(1, case.samples + 1, (1,), generator=generator))
        chosen = torch.randperm(case.samples, generator=generator)[:size]
        assert torch.equal(mean(chosen), torch.stack(alone)[chosen].sum(dim=0))


@contextmanager
def scaled(model: nn.Module, seed: int) -> Iterator[None]:
    """Parameters of other sizes for a while; the program of a model does not depend on its values."""
    draw, before = random.Random(seed), [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= draw.choice([1.0, 1.0, 1e4, 1e12])
        try:
            yield
        finally:
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)


@pytest.mark.parametrize("build", EVERY, ids=lambda build: build.__name__)
def test_gradients_of_every_model_add_up(build: Build) -> None:
    case, number = case_of(build, 0), EVERY.index(build)
    with scaled(case.model, number):
        check_adds_up(case, CLIPS[number % len(CLIPS)], number)


@pytest.mark.parametrize(("build", "dtype"), TELLING, ids=lambda value: getattr(value, "__name__", str(value)[6:]))
def test_own_gradients_add_up_for_telling_models(build: Build, dtype: torch.dtype) -> None:
    case = case_of(build, 1, dtype)
    for number, clip in enumerate(CLIPS[:3]):
        with scaled(case.model, number):
            check_adds_up(case, clip, number)


@pytest.mark.parametrize("name", ["linear", "attention", "group_norm", "padded_pooling"])
def test_own_gradients_add_up_in_packed_rows_on_this_machine(name: str) -> None:
    """What is assumed of kernels where a pass has several samples."""
    check_adds_up(case_of(getattr(models, name), 1), Dual(0.1, 0.01), 1, packed=True)


@pytest.mark.parametrize("name", ["lenet5", "alexnet28"])
def test_own_gradients_add_up_for_real_models(name: str) -> None:
    torch.manual_seed(1)
    model = build(name, input_shape=(1, 28, 28), classes=10, seed=1)
    case = Case(model, (torch.rand(6, 1, 28, 28), torch.randint(0, 10, (6,))))
    for scale in (1.0, 1e6):
        with torch.no_grad():
            for parameter in case.model.parameters():
                parameter *= scale if parameter.dim() > 1 else 1
        check_adds_up(case, Dual(0.5, 0.01), 1)


def test_own_gradients_add_up_where_weights_cancel() -> None:
    attack = cancelling_weights(sizes=(15,))
    for clip in CLIPS:
        check_adds_up(Case(attack.model, (attack.inputs, attack.targets)), clip, 2)


def test_own_gradients_stay_inside_where_positions_cancel() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(7, 5, bias=False), nn.Flatten(), nn.Linear(20, 3))
    half = torch.randn(9, 1, 7) * 1e12
    inputs = torch.cat([half, -half, half * 3, -half * 3], dim=1)
    with torch.no_grad():
        model[2].weight.copy_(torch.randn(3, 5).repeat(1, 4) * 1e-3)
    for clip in CLIPS:
        check_adds_up(Case(model, (inputs, torch.randint(0, 3, (9,)))), clip, 3)


OTHER_PATHS = {
    "oldest": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "mixed": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "generic numba": {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
    "two threads": {},
}
HERE = Path(__file__).parent
FEATURES = "test_the_features_of_an_image_depend_on_nothing_but_that_image"
QUICK = "cancel or group_norm or padded_pooling or attention or wide_conv"
"""One model of each sort of torch's kernels; the loops of lanes are ours and heed none of these variables."""


@pytest.mark.parametrize(
    ("path", "models"),
    [("oldest", QUICK), *(pytest.param(name, "test", marks=pytest.mark.slow) for name in OTHER_PATHS)],
)
def test_the_same_on_other_code_paths(path: str, models: str) -> None:
    """The tests of own gradients and that of the scattering features, in a process that takes other kernels."""
    environment = {**os.environ, **OTHER_PATHS[path], "OMP_NUM_THREADS": "1"}
    if path == "two threads":
        environment["BQSGD_TEST_THREADS"] = "2"
    scattering = HERE.parent / "data" / "test_scattering.py"
    chosen = [str(Path(__file__)), f"{scattering}::{FEATURES}", "-k", f"own_gradients and ({models}) or {FEATURES}"]
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
        method(model, LOSS, (batch[0][rows], batch[1][rows]), clip=clip, batch_size=size).mean
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


# Rows of passes on torch's kernels.


def test_packed_rows_follow_from_the_public_batch_size_and_the_size_of_the_model() -> None:
    assert [rows_for(size, 1) for size in (1, 16, 31, 32, 64, 255, 10**6)] == [1, 16, 16, 32, 64, 64, 64]
    assert [rows_for(64, dimension) for dimension in (10**6, 10**7, 10**9)] == [16, 1, 1]
    for size in range(1, 3000):  # sums over several parts divide by the power of two
        assert rows_for(size, 100) == rows_for(1 << (size.bit_length() - 1), 100)


def test_rows_that_touch_each_other_in_the_last_bits_are_found() -> None:
    torch.manual_seed(3)
    shared, leaves = [torch.randn(4, 3)], [torch.randn(8, 1, 4), torch.zeros(8, 1, dtype=torch.long)]

    def apart(weight: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        return [x[:, 0, :1] * weight[0], x[:, 0] + y]

    def touching(weight: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        return [x[:, 0, :1] * weight[0], x[:, 0] * (1 + 1e-6 * x.mean())]

    def by_neighbour(weight: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        return [x[:, 0] * (1 + 1e-6 * x[:, 0].roll(1, 0))]

    def by_place(weight: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        return [x[:, 0] * (1 + 1e-6 * torch.arange(8)[:, None])]

    def drawing(weight: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        return [x[:, 0] * torch.rand(8, 4)]

    before = torch.get_rng_state()
    assert rows_are_apart(apart, shared, leaves, any_row=True)
    assert rows_are_apart(drawing, shared, leaves, any_row=False)
    for function in (touching, by_neighbour):
        assert not rows_are_apart(function, shared, leaves, any_row=False)
    assert rows_are_apart(by_place, shared, leaves, any_row=False)
    assert not rows_are_apart(by_place, shared, leaves, any_row=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_with_masks_share_passes() -> None:
    """`attention` with a mask would otherwise run one sample a pass."""
    leaves = [torch.randn(8, 1, 4), torch.zeros(8, 1, 4, dtype=torch.bool)]
    assert rows_are_apart(lambda x, mask: [(x * mask)[:, 0]], [], leaves, any_row=False)


# Models that would mix samples if they ever saw more than one.


class Touching(nn.Module):
    """Rows that would feel each other, or their own place, in the last bits only."""

    def __init__(self, *, by_row: bool) -> None:
        super().__init__()
        self.out, self.by_row = nn.Linear(4, 3), by_row

    def forward(self, x: Tensor) -> Tensor:
        touch = torch.arange(len(x))[:, None] if self.by_row else x.mean(dim=0)
        return self.out(x * (1 + 1e-6 * touch))


class RowTable(nn.Module):
    """A table with a line for each row of a pass."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.register_buffer("table", torch.randn(rows, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + (self.table if len(x) == len(self.table) else self.table[0]))


class Moody(nn.Module):
    """A forward that takes other operations after its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.calls = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.out(x if self.calls == 1 else torch.sigmoid(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Touching(by_row=False),
        lambda: Touching(by_row=True),
        *(lambda rows=rows: RowTable(rows) for rows in (4, 16, 20)),
        Moody,
        Centred,
    ],
    ids=["others", "row", "four lines", "sixteen lines", "twenty lines", "moods", "centred"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_that_would_see_other_samples_never_sees_one(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    case = Case(make(), (torch.randn(20, 4), torch.randint(0, 3, (20,))))
    case = case.double() if dtype == torch.float64 else case
    check_adds_up(case, L2(0.2), 5)
    found = clipped_gradients(case.model, LOSS, case.batch, clip=L2(0.2), batch_size=64, forward=case.forward)
    case.model.calls = 0
    exact = gradients_one_by_one(case) if not isinstance(case.model, Moody) else _of_the_first_mood(case)
    assert torch.allclose(found.mean, mean_of(exact, L2(0.2), case.sizes, 64), rtol=0, atol=1e-6)


def _of_the_first_mood(case: Case) -> Tensor:
    return gradients_one_by_one(Case(nn.Sequential(case.model.out), case.batch))


class FromItsOwnTable(nn.Module):
    """Looks words up in a table that is made of the sample, or wipes lines of it."""

    def __init__(self, *, wipes: bool) -> None:
        super().__init__()
        self.inner, self.out, self.wipes = nn.Linear(4, 5), nn.Linear(5, 3), wipes

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        table = self.inner(x[0])
        found = table.index_fill(0, words[0], 0.0) if self.wipes else nn.functional.embedding(words[0], table)
        return self.out(found.mean(0, keepdim=True))


@pytest.mark.parametrize("wipes", [False, True], ids=["reads", "wipes"])
def test_a_word_out_of_range_does_not_reach_the_table_of_another_row(wipes: bool) -> None:
    torch.manual_seed(5)
    words = torch.arange(36).reshape(9, 4) % 6
    for number in range(8):
        words[number, 1] = 6 + number % 2
    words[8, 1] = -1
    case = Case(FromItsOwnTable(wipes=wipes), (torch.randn(9, 6, 4), words, torch.arange(9) % 3))
    check_adds_up(case, L2(0.2), 6, batch_size=1024)


# Training.


class Counting(nn.Module):
    """Remembers how often it was called."""

    def __init__(self, *, smooth: bool) -> None:
        super().__init__()
        self.out, self.smooth = nn.Linear(4, 3), smooth

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(len(x))
        return self.out(torch.special.entr(x.sigmoid()) if self.smooth else x)


CALLS: list[int] = []


@pytest.mark.parametrize("batch_size", [100, 256, 1000])
@pytest.mark.parametrize("smooth", [False, True], ids=["lanes", "rows"])
@pytest.mark.parametrize("packed", [False, True])
def test_training_runs_the_program_that_was_checked(batch_size: int, smooth: bool, packed: bool) -> None:
    """Also where the batch size is no power of two, which sums over several parts divide by."""
    data, clip = (torch.randn(40, 4), torch.arange(40) % 3), Clamp(0.01)
    objective = Objective(Counting(smooth=smooth), LOSS, clip=clip, batch_size=batch_size, packed=packed)
    CALLS.clear()
    objective.check(data)
    assert set(CALLS) == {1}
    CALLS.clear()
    mean, _ = objective.mean([Part(numbers=np.arange(40), data=data)])
    assert CALLS == []
    alone = clipped_gradients(objective.model, LOSS, data, packed=packed, clip=clip, batch_size=batch_size)
    assert np.allclose(mean, alone.mean.numpy(), rtol=1e-15)
