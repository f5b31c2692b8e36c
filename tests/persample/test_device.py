"""Clipped gradients on the device of the model: a simulated one, and the same road on the processor for values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from persample_oracle import LOSS, Case, clip_each, clips_for, gradients_one_by_one, mean_of
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bqsgd import InvalidParameter
from bqsgd._src.persample import L2, BatchMean, Clamp, Clip, Dual, PerLayer, Scale, clipped_gradients, device
from bqsgd._src.persample.gradients import road_of
from bqsgd._src.persample.passes import PassesRoad
from bqsgd._src.persample.program import Form
from bqsgd._src.persample.rows import RowsRoad
from bqsgd._src.subset import Subsets

SIZE = 8


@pytest.fixture(params=["processor", "sim"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device whose gradients are clipped where they are: the simulated one, or the processor on the same road."""
    if request.param == "sim":
        return torch.device(request.getfixturevalue("sim").DEVICE)
    monkeypatch.setattr(device, "forced", True)
    return torch.device("cpu")


def image_case(kind: torch.dtype = torch.float32) -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)).to(kind)
    scale = 10 ** torch.linspace(-2, 2, SIZE)[:, None, None, None]
    return Case(model, (torch.randn(SIZE, 1, 5, 5).to(kind) * scale.to(kind), torch.arange(SIZE) % 3))


class Words(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, width, padding_idx=2), nn.Linear(width, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words).mean(1).tanh())  # type: ignore[no-any-return]


def word_case(width: int = 4) -> Case:
    torch.manual_seed(0)
    return Case(Words(width), (torch.randint(0, 11, (SIZE, 6)), torch.arange(SIZE) % 3))


def placed(case: Case, where: torch.device) -> Case:
    batch = tree_map(lambda leaf: leaf.to(where), case.batch)
    return Case(copy.deepcopy(case.model).to(where), batch, case.loss, case.forward)


def mean(case: Case, clip: Clip, index: Any = slice(None), **more: Any) -> Tensor:
    return clipped_gradients(case.model, case.loss, case.taken(index), clip=clip, batch_size=SIZE, **more).mean


@pytest.mark.parametrize("make", [image_case, word_case])
def test_the_device_gives_what_the_oracle_gives_and_only_the_sum_leaves_it(make: Any, where: torch.device) -> None:
    case, exact = make(), gradients_one_by_one(make())
    there = placed(case, where)
    for clip in clips_for(exact, 0.7, case.sizes):
        if where.type == "sim":
            mean(there, clip)
            left = __import__("sim_device").left
            left.clear()
        found = mean(there, clip)
        terms = clip_each(exact, clip, case.sizes).abs().sum(dim=0).max() / SIZE
        margin = device.MARGIN if isinstance(clip, (L2, PerLayer)) else 0
        assert (found - mean_of(exact, clip, case.sizes, SIZE)).abs().max() <= (1e-5 + margin) * terms, clip
        if where.type == "sim":
            assert left == [torch.Size([len(found) + 1])]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_sample_adds_is_its_own_and_within_the_bound_in_every_type(
    kind: torch.dtype, where: torch.device
) -> None:
    case = placed(image_case(kind), where)
    for clip in (L2(0.3), Dual(0.3, 0.05), Clamp(0.01), Scale(0.01)):
        whole = mean(case, clip)
        singles = [mean(case, clip, slice(n, n + 1)) for n in range(SIZE)]
        assert torch.equal(whole, torch.stack(singles).sum(dim=0))  # whole steps over a power of two: no rounding
        for own in singles:
            stated = clip.sensitivity(batch_size=SIZE)
            reach = clip.norm if stated.l2 is not None and not isinstance(clip, Dual) else clip.bound
            assert own.abs().max() / reach <= stated.linf
            assert stated.l2 is None or own.norm() / reach <= stated.l2
    assert mean(case, L2(1e-3)).norm() > 1e-4  # every sample is cut to its bound, and none is lost


def test_half_precision_on_the_processor_is_clipped_in_single_precision() -> None:
    for kind in (torch.bfloat16, torch.float16):
        case = image_case(kind)
        own = mean(case, L2(0.3), slice(7, 8)) * SIZE
        assert 0.3 * (1 - 2**-18) < own.norm() <= 0.3


def test_an_overflow_in_float16_costs_that_sample_alone(where: torch.device) -> None:
    case = placed(image_case(torch.float16), where)
    others = mean(case, L2(0.3), slice(1, None))
    found = clipped_gradients(
        case.model, lambda outputs, targets: LOSS(outputs * 1e6, targets), case.batch, clip=L2(0.3), batch_size=SIZE
    )
    assert found.dropped == SIZE
    assert not found.mean.any()
    case.batch[0][0] = torch.inf
    found = clipped_gradients(case.model, LOSS, case.batch, clip=L2(0.3), batch_size=SIZE)
    assert found.dropped == 1
    assert torch.equal(found.mean, others)


def test_subsets_are_rotated_on_the_device_as_on_the_processor(
    where: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = image_case()
    subsets = Subsets.of(list(case.model.parameters()), one_in=4, rotated=True)
    assert subsets is not None
    subset = subsets.drawn(round=3, client=1)
    found = mean(placed(case, where), L2(0.1), subset=subset)
    monkeypatch.setattr(device, "forced", False)
    assert torch.allclose(found, mean(case, L2(0.1), subset=subset), rtol=1e-3, atol=1e-5)


def road(case: Case) -> Any:
    form = Form.of(case.batch)
    return road_of(case.model, case.loss, case.forward, form, batch_size=SIZE, packed=False)


def by_columns(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product whose rows have the same bits on every processor; what a BLAS gives a row, it may not."""
    total = torch.zeros(*left.shape[:-1], right.shape[-1], dtype=left.dtype)
    for place in range(left.shape[-1]):
        total = total + left[..., place, None] * right[..., place, None, :]
    return total


def test_rows_are_packed_where_the_kernels_keep_them_apart_and_the_guarantee_names_the_device(sim: Any) -> None:
    def plus(bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return by_columns(left, right) + bias

    aten = torch.ops.aten
    with (
        sim.lies(aten.mm.default, by_columns),
        sim.lies(aten.bmm.default, by_columns),
        sim.lies(aten.addmm.default, plus),
    ):
        check_roads(sim)


def check_roads(sim: Any) -> None:
    packed = road(placed(word_case(), sim.DEVICE))
    assert isinstance(packed, RowsRoad)
    assert packed.rows == SIZE
    assert "sim" in packed.assumes
    assert "other rows do not change" in packed.assumes

    def mixing(x: Tensor, *more: Any) -> Tensor:
        return torch.ops.aten.tanh.default(x) + 1e-7 * x.sum()

    with sim.lies(torch.ops.aten.tanh.default, mixing):
        alone = road(placed(word_case(width=5), sim.DEVICE))  # a model whose road is not yet chosen
    assert isinstance(alone, PassesRoad)
    assert "sim" in alone.assumes


@pytest.mark.parametrize("clip", [L2(1e-3), Dual(1e-3, 2e-4), Dual(1e-3, 1.2e-4), PerLayer(L2(1e-3))], ids=str)
@pytest.mark.parametrize("kernel", [torch.ops.aten.square.default, torch.ops.aten.pow.Tensor_Scalar])
def test_a_device_whose_norms_are_too_small_moves_the_sum_by_no_more_than_stated(
    sim: Any, kernel: Any, clip: Clip
) -> None:
    case = placed(image_case(), sim.DEVICE)
    whole = mean(case, clip)

    def too_small(x: Tensor, *more: Any) -> Tensor:
        found = kernel(x, *more)
        return found * 0.25 if x.is_floating_point() else found

    with sim.lies(kernel, too_small):
        found = clipped_gradients(case.model, LOSS, case.batch, clip=clip, batch_size=SIZE)
        singles = [mean(case, clip, [n]) for n in range(SIZE)]
    assert all(float(own.norm()) * SIZE <= clip.euclidean for own in singles)
    assert torch.equal(found.mean, whole) or found.dropped == sum(not own.any() for own in singles) > SIZE // 2


def test_a_device_that_adds_whole_numbers_wrongly_is_refused_before_anything_is_spent(sim: Any) -> None:
    def rounded(x: Tensor, *more: Any, **named: Any) -> Tensor:
        found = torch.ops.aten.sum.dim_IntList(x, *more, **named)
        return found.float().to(found.dtype)

    device.check_device.cache_clear()
    with (
        sim.lies(torch.ops.aten.sum.dim_IntList, rounded),
        pytest.raises(InvalidParameter, match="whole-number arithmetic of sim"),
    ):
        mean(placed(image_case(), sim.DEVICE), L2(1.0))
    device.check_device.cache_clear()


def test_a_batch_mean_on_the_device_is_clamped_whatever_the_gradients_are(where: torch.device) -> None:
    case = placed(image_case(), where)
    case.batch[0][0] = torch.inf
    found = clipped_gradients(case.model, LOSS, case.batch, clip=BatchMean(0.01), batch_size=SIZE)
    assert found.dropped == 1
    assert found.mean.abs().max() == 0.01


def test_a_model_on_two_devices_is_refused(sim: Any) -> None:
    case = image_case()
    case.model[3].to(sim.DEVICE)
    with pytest.raises(InvalidParameter, match=r"several devices \(cpu, sim:0\)"):
        mean(case, L2(1.0))


def test_autocast_around_the_call_becomes_a_part_of_the_program(where: torch.device) -> None:
    case, clip = placed(image_case(), where), Clamp(0.5)
    plain = mean(case, clip)
    with torch.autocast(where.type, dtype=torch.bfloat16):
        cast = mean(case, clip)
        off = clipped_gradients(
            case.model, LOSS, case.batch, clip=clip, batch_size=SIZE, autocast=device_off(where)
        ).mean
    assert torch.equal(off, plain)
    assert not torch.equal(cast, plain)
    assert torch.allclose(cast, plain, rtol=0.1, atol=0.02)


def device_off(where: torch.device) -> Any:
    from bqsgd._src.runtime.modes import Autocast

    return Autocast(where.type)
