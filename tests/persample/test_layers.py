"""Layers that are clipped by themselves: attacks on their bounds, with models, records and subsets chosen for it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.models import trainable
from bqsgd._src.persample import L2, Clamp, Clip, Dual, Normalize, PerLayer, Scale, clipped_gradients, device
from bqsgd._src.subset import Subset, Subsets
from persample_models import ALONE, LANES, ROWS, Build, case_of

ROUGH = [L2(1e-9), Dual(1e9, 1e-3), L2(1e9), Normalize(1e-3, 1e-10), L2(1.0), Normalize(1e4)]
"""Bounds that are eighteen orders of magnitude apart."""
BUILDS = [*LANES[::9], *ROWS[::4], *ALONE[:2]]


def apart(model: nn.Module) -> PerLayer:
    """A clip for each tensor of the model, as different from its neighbours as can be."""
    return PerLayer([ROUGH[n % len(ROUGH)] for n in range(len(trainable(model)))])


def check_within(mean: Tensor, clip: Clip, sizes: list[int]) -> None:
    """No layer, and not the whole, is beyond its norm; coordinates are within what is stated for them."""
    for own, values in zip(clip.layers(len(sizes)), mean.split(sizes), strict=True):
        assert own.euclidean is None or float(values.norm()) <= own.euclidean
        assert not len(values) or float(values.abs().max()) <= own.largest
    assert clip.euclidean is None or float(mean.norm()) <= clip.euclidean


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.SlowGradientsWarning")
@pytest.mark.parametrize("way", ["as it is", "packed", "on a device", "one in 3"])
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_no_layer_passes_its_own_bound_whatever_the_model_is(
    build: Build, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(build, 0)
    monkeypatch.setattr(device, "forced", way == "on a device")
    shapes = tuple(tuple(each.shape) for each in trainable(case.model))
    subset = Subsets(shapes=shapes, one_in=3, rotated=True).drawn(round=1, client=0) if way == "one in 3" else None
    sizes = case.sizes if subset is None else subset.counts
    for whole in (apart(case.model), PerLayer(L2(1e-4)), PerLayer(Normalize(1e-4)), PerLayer(Dual(1e-4, 1e-5))):
        clip = whole if subset is None else whole.of_share(1 / 3)

        def mean(index: slice, clip: Clip = clip) -> Tensor:
            return clipped_gradients(
                case.model, case.loss, case.taken(index), clip=clip, batch_size=1, forward=case.forward, subset=subset,
                packed=way == "packed",
            ).mean.clone()  # fmt: skip

        singles = [mean(slice(n, n + 1)) for n in range(case.samples)]
        for single in singles:
            check_within(single, clip, sizes)
        assert any(single.any() for single in singles)
        assert torch.equal(mean(slice(None)), torch.stack(singles).sum(dim=0))  # the grid of each layer is its own


class TwoParts(nn.Module):
    """a gets the record as its gradient, b what the record's first number is without bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.empty, self.b = (
            nn.Parameter(torch.zeros(3)),
            nn.Parameter(torch.zeros(0)),
            nn.Parameter(torch.zeros(1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a + self.empty.sum() + self.b * (x[:, 0] * 1e30 * 1e30)


def clipped(model: nn.Module, inputs: Tensor, clip: Clip, subset: Subset | None = None) -> tuple[Tensor, int]:
    batch = inputs, torch.zeros(len(inputs))
    mean, dropped = clipped_gradients(model, lambda out, _: out, batch, clip=clip, batch_size=1, subset=subset)
    return mean.clone(), dropped


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("bad", [1.0, math.nan, math.inf])
def test_a_sample_that_is_not_finite_in_one_layer_is_left_out_of_all(
    forced: bool, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "forced", forced)
    inputs = torch.tensor([[0.0, 3.0, 4.0], [bad, 1.0, 1.0], [0.0, 0.0, 0.2]])
    for clip in (PerLayer([L2(1.0), L2(1.0), Clamp(1.0)]), PerLayer([Scale(1.0), Clamp(1.0), L2(1.0)])):
        mean, dropped = clipped(TwoParts(), inputs, clip)
        others, _ = clipped(TwoParts(), inputs[[0, 2]], clip)
        assert dropped == 1
        assert mean.any()
        assert torch.equal(mean, others)


def test_a_tensor_without_coordinates_has_a_clip_of_its_own_and_adds_nothing() -> None:
    inputs = torch.tensor([[0.0, 3.0, 4.0]])
    mean, _ = clipped(TwoParts(), inputs, PerLayer([L2(1.0), L2(1e9), L2(1.0)]))
    assert mean.tolist() == pytest.approx([0, 0.6, 0.8, 0], abs=1e-5)
    shared, _ = clipped(TwoParts(), inputs, PerLayer(L2(math.sqrt(3))))  # the three tensors share it
    assert shared.tolist() == pytest.approx([0, 0.6, 0.8, 0], abs=1e-5)
    with pytest.raises(InvalidParameter, match="has 2 clips, the model 3"):
        clipped(TwoParts(), inputs, PerLayer([L2(1.0), L2(1.0)]))


class Lines(nn.Module):
    """As many coordinates as tensors, one of which has none."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(size) for size in (0, 1, 1, 2)])

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat(list(self.parts))


@pytest.mark.parametrize(
    "clip", [PerLayer(L2(1.0)), PerLayer(Dual(1.0, 0.5)), PerLayer([L2(1e-6), L2(1e-3), L2(1.0), L2(1e3)])], ids=str
)
def test_in_units_of_its_ranges_a_record_moves_the_sum_by_no_more_than_stated(clip: PerLayer) -> None:
    model = Lines()
    reach = torch.from_numpy(clip.ranges(model))
    moved = clipped(model, torch.full((1, 4), 1e9), clip)[0] / reach
    for stated in (clip.sensitivity(batch_size=1), clip.sensitivity(batch_size=1, range=reach.numpy())):
        assert stated.l2 is not None
        assert float(moved.norm()) <= stated.l2
        assert float(moved.abs().max()) <= stated.linf


def test_frozen_layers_have_no_clip() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    batch, loss = (torch.randn(1, 3), torch.tensor([1])), nn.CrossEntropyLoss(reduction="none")
    mean, _ = clipped_gradients(model, loss, batch, clip=PerLayer([L2(1e-3), L2(1e-6)]), batch_size=1)
    assert [float(part.norm()) for part in mean.split([4, 2])] == pytest.approx([1e-3, 1e-6], rel=1e-5)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("clip", [Normalize(1.0), PerLayer(Normalize(1.0)), PerLayer([Normalize(1.0)] * 3)], ids=str)
def test_a_gradient_of_any_length_is_normalised_and_zero_stays_zero(
    clip: Clip, forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "forced", forced)
    most = clip.layers(3)[0].euclidean
    for size in (1e-44, 1e-30, 1e-19, 1e-6, 0.01, 1.0, 1e17):
        mean, dropped = clipped(TwoParts(), torch.tensor([[0.0, 0.6 * size, -0.8 * size]]), clip)
        expected = most * size / (size + 0.01)
        assert dropped == 0
        assert float(mean.norm()) <= most
        assert float(mean.norm()) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert not clipped(TwoParts(), torch.zeros(2, 3), clip)[0].any()


@pytest.mark.parametrize("forced", [False, True])
def test_a_gamma_near_nothing_blows_no_gradient_up_beyond_the_bound(
    forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Squares of what is below 1e-23 are lost in float32: then gamma alone decides the weight."""
    monkeypatch.setattr(device, "forced", forced)
    for size in (1e-40, 1e-25, 1e-22, 1e-13, 1e-12, 1e-11):
        mean, _ = clipped(TwoParts(), torch.tensor([[0.0, size, size]]), Normalize(1.0, 1e-12))
        assert float(mean.norm()) <= 1.0


@pytest.mark.parametrize("seed", range(12))
def test_a_layer_of_which_a_subset_keeps_little_or_nothing_is_within_its_share(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2), nn.Linear(2, 1))
    shapes = tuple(tuple(each.shape) for each in model.parameters())
    subset = Subsets(shapes=shapes, one_in=7, rotated=True).drawn(round=seed, client=seed)
    inputs = torch.randn(3, 5) * 10.0 ** torch.tensor([[-2], [0], [3]])
    loss = nn.MSELoss(reduction="none")

    def out(x: Tensor, y: Tensor) -> Tensor:
        return loss(x[:, 0], y)

    for whole in (apart(model), PerLayer(L2(0.5)), PerLayer(Dual(0.5, 0.1))):
        clip = whole.of_share(1 / 7)
        for row in inputs:
            batch = row[None], torch.ones(1)
            mean, dropped = clipped_gradients(model, out, batch, clip=clip, batch_size=1, subset=subset)
            assert dropped == 0
            check_within(mean, clip, subset.counts)
    assert 0 in subset.counts
