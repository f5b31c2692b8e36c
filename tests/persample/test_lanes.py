"""The rules of `lanes`: the values of torch, and the same bits in every lane, company and number of lanes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from persample_oracle import LOSS
from torch import Tensor, nn

from bqsgd._src.persample import L2, BatchMean, clipped_gradients
from bqsgd._src.persample._kernels import lanes as kernels
from bqsgd._src.persample.gradients import road_of
from bqsgd._src.persample.lanes import LanesRoad
from bqsgd._src.persample.program import Form
from bqsgd._src.persample.rules import READ_LEAVES, RULES, Leaf, NotLanes, rule_of
from bqsgd._src.runtime.vectors import LANES

aten = torch.ops.aten
TOLERANCE = 1e-5
"""Of the largest entry of a result, between float32 here and torch in float64."""
MANY = 3 * LANES


@dataclass(frozen=True)
class Each:
    """An argument that differs by sample: how one sample's is drawn."""

    draw: Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """A call of an operation; `call` gets a function that finds the rule, or torch's own, of an operation."""

    target: Any
    arguments: tuple[Any, ...]
    call: Callable[..., Any]

    @property
    def name(self) -> str:
        return str(self.target).removeprefix("aten.")


def case(target: Any, *arguments: Any, **named: Any) -> Case:
    return Case(target, arguments, lambda find, *given: find(target)(*given, **named))


def normal(*shape: int) -> Each:
    return Each(lambda: torch.randn(shape))


def positive(*shape: int) -> Each:
    return Each(lambda: torch.rand(shape) + 0.1)


def whole(most: int, *shape: int) -> Each:
    return Each(lambda: torch.randint(0, most, shape))


def flags(*shape: int) -> Each:
    return Each(lambda: torch.rand(shape) < 0.5)


def fixed(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def rule(target: Any) -> Callable[..., Any]:
    found = rule_of(target)
    assert found is not None
    return found


WINDOWS = [2, 2], [2, 1], [0, 0]


def pool_backward(find: Callable[[Any], Any], error: Any, x: Any) -> Any:
    """Rules keep the place in the window where torch keeps the place in the plane, so both come from the forward."""
    chosen = find(aten.max_pool2d_with_indices.default)(x, *WINDOWS, [1, 1], False)[1]
    return find(aten.max_pool2d_with_indices_backward.default)(error, x, *WINDOWS, [1, 1], False, chosen)


def first_output(target: Any, *arguments: Any) -> Case:
    return Case(target, arguments, lambda find, *given: find(target)(*given)[0])


x34, y34 = normal(3, 4), normal(3, 4)
COMPARISONS = [aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge]
CASES = [
    *(case(target, x34, [2, 6]) for target in (aten.view.default, aten._unsafe_view.default)),
    case(aten.clone.default, x34),
    case(aten._to_copy.default, x34, dtype=torch.float32),
    case(aten._to_copy.default, whole(9, 3), dtype=torch.float32),
    case(aten._to_copy.default, flags(3), dtype=torch.float32),
    case(aten._to_copy.default, x34, dtype=torch.bool),
    case(aten.t.default, x34),
    case(aten.t.default, normal(3)),
    case(aten.transpose.int, normal(2, 3, 4), -1, 0),
    case(aten.permute.default, normal(2, 3, 4), [2, 0, -2]),
    case(aten.unsqueeze.default, x34, 1),
    case(aten.unsqueeze.default, x34, -1),
    case(aten.squeeze.dim, normal(3, 1, 4), 1),
    case(aten.squeeze.dim, normal(3, 1, 4), 0),
    case(aten.squeeze.dims, normal(1, 3, 1), [0, -1]),
    case(aten.expand.default, normal(3, 1), [2, -1, 4]),
    case(aten.select.int, x34, 1, -1),
    case(aten.slice.Tensor, x34, 1, 1, 9223372036854775807, 2),
    case(aten.select_backward.default, normal(3), [3, 4], 1, -2),
    case(aten.slice_backward.default, normal(3, 2), [3, 5], 1, 1, 5, 2),
    case(aten.split.Tensor, normal(3, 5), 2, 1),
    case(aten.unsafe_split.Tensor, normal(5, 3), 2),
    case(aten.split_with_sizes.default, normal(3, 5), [1, 4], -1),
    case(aten.unbind.int, x34, 1),
    case(aten.cat.default, [x34, fixed(3, 2), normal(3, 1)], -1),
    case(aten.stack.default, [x34, fixed(3, 4), y34], -1),
    case(aten.stack.default, [x34, y34], 1),
    case(aten.constant_pad_nd.default, x34, [1, 2, 0, 3], 0.5),
    case(aten.full_like.default, x34, 2.5),
    case(aten.new_full.default, x34, [2, 2], 2.5),
    case(aten.ones_like.default, x34),
    case(aten.zeros_like.default, x34),
    case(aten.new_zeros.default, x34, [5]),
    case(aten.add.Tensor, x34, fixed(4)),
    case(aten.add.Tensor, normal(2, 3, 4), y34),
    case(aten.add.Tensor, whole(9, 3, 4), y34),
    case(aten.add.Scalar, x34, 1.5),
    case(aten.sub.Tensor, fixed(3, 1), y34),
    case(aten.sub.Scalar, x34, 2),
    case(aten.mul.Tensor, x34, y34),
    case(aten.mul.Tensor, x34, flags(3, 4)),
    case(aten.mul.Scalar, whole(9, 3), 0.5),
    case(aten.div.Tensor, x34, positive(3, 4)),
    case(aten.div.Tensor, x34, 3),
    case(aten.div.Tensor, whole(9, 3), 2),
    case(aten.div.Scalar, x34, 7.0),
    *(case(comparison.Tensor, whole(3, 3, 4), fixed(3, 4).round()) for comparison in COMPARISONS),
    *(case(comparison.Scalar, whole(3, 4), 1) for comparison in COMPARISONS),
    case(aten.maximum.default, x34, y34),
    case(aten.minimum.default, x34, fixed(3, 4)),
    case(aten.logical_and.default, flags(3, 4), flags(4)),
    case(aten.logical_or.default, flags(3), flags(3)),
    case(aten.logical_not.default, flags(3)),
    case(aten.rsub.Scalar, x34, 2.5),
    case(aten.neg.default, x34),
    case(aten.abs.default, x34),
    case(aten.sign.default, x34),
    case(aten.sgn.default, x34),
    case(aten.relu.default, x34),
    case(aten.tanh.default, x34),
    case(aten.exp.default, x34),
    case(aten.erf.default, x34),
    case(aten.sigmoid.default, x34),
    *(case(function, positive(3, 4)) for function in (aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default)),
    *(case(function, positive(3, 4)) for function in (aten.log.default, aten.log1p.default)),
    case(aten.sigmoid_backward.default, x34, positive(3, 4)),
    case(aten.tanh_backward.default, x34, positive(3, 4)),
    case(aten.threshold_backward.default, x34, y34, 0.25),
    *(case(aten.pow.Tensor_Scalar, positive(3), power) for power in (1, 2, 3, 0.5, -0.5, -1)),
    case(aten.where.self, flags(4), x34, fixed(3, 1)),
    case(aten.clamp.default, x34, -0.5, 0.25),
    case(aten.clamp.default, x34, None, 0.25),
    case(aten.clamp_min.default, x34, 0.25),
    case(aten.sum.default, x34),
    case(aten.sum.dim_IntList, normal(2, 3, 4), [0, -1], True),
    case(aten.sum.dim_IntList, normal(2, 3, 4), [1]),
    case(aten.mean.default, x34),
    case(aten.mean.dim, normal(2, 3, 4), [-1, 1], False),
    case(aten.amax.default, x34, [1], True),
    case(aten.amax.default, x34),
    case(aten.var_mean.correction, normal(2, 3, 4), [1, 2], correction=0, keepdim=True),
    case(aten.var_mean.correction, normal(2, 5), [1], correction=1),
    case(aten._log_softmax.default, x34, 1, False),
    case(aten._log_softmax_backward_data.default, x34, y34, -1, torch.float32),
    case(aten._softmax.default, x34, 0, False),
    case(aten._softmax_backward_data.default, x34, positive(3, 4), 1, torch.float32),
    case(aten.gather.default, x34, 1, whole(4, 3, 2)),
    case(aten.gather.default, x34, 0, whole(3, 5, 2)),
    case(aten.gather.default, fixed(3, 4), 1, whole(4, 1, 2)),
    first_output(aten.nll_loss_forward.default, normal(1, 5), whole(5, 1), None, 0, -100),
    first_output(aten.nll_loss_forward.default, normal(1, 5), whole(5, 1), fixed(5), 0, 2),
    case(aten.nll_loss_backward.default, normal(1), normal(1, 5), whole(5, 1), None, 0, -100, torch.zeros(())),
    case(aten.nll_loss_backward.default, normal(1), normal(1, 5), whole(5, 1), fixed(5), 0, 2, torch.zeros(())),
    case(aten.embedding.default, fixed(5, 3), whole(5, 2, 2)),
    case(aten.native_dropout_backward.default, x34, flags(3, 4), 2.0),
    case(aten.mm.default, x34, fixed(4, 5)),
    case(aten.mm.default, fixed(5, 3), x34),
    case(aten.mm.default, normal(1, 600), fixed(600, 70)),
    case(aten.addmm.default, fixed(5), x34, fixed(4, 5)),
    case(aten.convolution.default, normal(1, 4, 7), fixed(6, 2, 3), fixed(6), [2], [1], [1], False, [0], 2),
    case(aten.convolution_backward.default, normal(1, 6, 4), normal(1, 4, 7), fixed(6, 2, 3), [6], [2], [1], [1],
         False, [0], 2, [True, False, True]),
    case(aten.avg_pool2d.default, normal(1, 3, 7, 5), *WINDOWS),
    case(aten.avg_pool2d.default, normal(2, 3, 6, 6), [2]),
    case(aten.avg_pool2d_backward.default, normal(2, 3, 3, 4), normal(2, 3, 7, 5), *WINDOWS, False, True, None),
    first_output(aten.max_pool2d_with_indices.default, normal(2, 3, 7, 5), *WINDOWS),
    Case(aten.max_pool2d_with_indices_backward.default, (normal(2, 3, 3, 4), normal(2, 3, 7, 5)), pool_backward),
]  # fmt: skip
RANDOM = {aten.native_dropout.default, aten.bernoulli.p, aten.empty_like.default}
"""These have no values to compare: their distributions are tested below."""
each_case = pytest.mark.parametrize("tried", CASES, ids=lambda tried: tried.name)


def test_every_rule_has_a_case() -> None:
    assert {tried.target for tried in CASES} | RANDOM == {*RULES, *READ_LEAVES}


def leaves_of(arguments: Any) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, list):
            yield from leaves_of(argument)
        else:
            yield argument


def filled(arguments: Any, fill: Callable[[Any], Any]) -> list[Any]:
    return [filled(each, fill) if isinstance(each, list) else fill(each) for each in arguments]


Samples = dict[int, list[Tensor]]
"""For each argument that differs by sample, by its identity: the values of all samples."""


def drawn(tried: Case, count: int) -> Samples:
    torch.manual_seed(5)
    found = [argument for argument in leaves_of(tried.arguments) if isinstance(argument, Each)]
    return {id(argument): [argument.draw() for _ in range(count)] for argument in found}


def in_lanes(values: list[Tensor]) -> Any:
    return np.stack([value.numpy() for value in values], -1)


def by_rule(tried: Case, samples: Samples) -> list[Any]:
    """The results of all lanes; an argument with a single value has one lane."""

    def fill(argument: Any) -> Any:
        if isinstance(argument, Each):
            return in_lanes(samples[id(argument)])
        return argument.numpy()[..., None] if isinstance(argument, Tensor) else argument

    with np.errstate(all="ignore"):
        found = tried.call(rule, *filled(tried.arguments, fill))
    return [each for each in (found if isinstance(found, (list, tuple)) else [found]) if each is not None]


def by_torch(tried: Case, samples: Samples, number: int) -> list[Tensor]:
    """Torch's result for one sample, in float64."""

    def fill(argument: Any) -> Any:
        value = samples[id(argument)][number] if isinstance(argument, Each) else argument
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    found = tried.call(lambda target: target, *filled(tried.arguments, fill))
    return [each for each in (found if isinstance(found, (list, tuple)) else [found]) if each is not None]


def lane(value: Any, number: int) -> Any:
    return value[..., number if value.shape[-1] > 1 else 0]


def same_bits(left: Any, right: Any) -> bool:
    kinds = left.shape == right.shape and left.dtype == right.dtype
    return bool(kinds and np.ascontiguousarray(left).tobytes() == np.ascontiguousarray(right).tobytes())


@each_case
def test_a_rule_has_the_values_of_torch(tried: Case) -> None:
    samples = drawn(tried, LANES)
    found = by_rule(tried, samples)
    for number in (0, 7, LANES - 1):
        for value, right in zip(found, by_torch(tried, samples, number), strict=True):
            own = lane(value, number)
            assert own.shape == tuple(right.shape)
            assert own.dtype in (np.float32, np.int64, np.bool_)
            scale = float(right.abs().max()) if right.is_floating_point() else 0.0
            assert np.allclose(own, right.numpy(), rtol=0, atol=TOLERANCE * scale)


@each_case
@pytest.mark.parametrize("company", [1.0, 1e30, float("nan")])
def test_a_sample_has_the_same_bits_in_every_lane_and_company(tried: Case, company: float) -> None:
    samples, others = drawn(tried, LANES), drawn(tried, MANY)
    places = torch.randperm(MANY, generator=torch.Generator().manual_seed(1))[:LANES].tolist()
    for name, values in others.items():
        for number in range(MANY):
            if values[number].is_floating_point():
                values[number] = values[number] * company
        for number, place in enumerate(places):
            values[place] = samples[name][number]
    for value, again in zip(by_rule(tried, samples), by_rule(tried, others), strict=True):
        for number, place in enumerate(places):
            assert same_bits(lane(value, number), lane(again, place))


@each_case
def test_arguments_that_are_the_same_for_all_samples_may_have_one_lane(tried: Case) -> None:
    """As the errors of a loss that is linear in its outputs have: they read no sample."""
    samples = drawn(tried, LANES)
    for count in range(1, len(samples) + 1):
        for alike in combinations(samples, count):
            repeated = samples | {name: samples[name][:1] * LANES for name in alike}
            try:
                found = by_rule(tried, repeated | {name: samples[name][:1] for name in alike})
            except NotLanes:
                continue  # torch's kernels take it
            for value, right in zip(found, by_rule(tried, repeated), strict=True):
                for number in range(LANES):
                    assert same_bits(lane(value, number), lane(right, number))


# What the rules do with values that are not ordinary.

SPECIAL = torch.tensor(
    [0.0, -0.0, 1.0, -1.5, 1e-45, -1e-40, 1.1754944e-38, 3.4e38, -3.4e38, torch.inf, -torch.inf, torch.nan, 0.25, 2.5]
)
EXACT = [
    *(case(target.Tensor, normal(), normal()) for target in (aten.add, aten.sub, aten.mul, aten.div)),
    *(case(target.Tensor, normal(), normal()) for target in COMPARISONS),
    case(aten.maximum.default, normal(), normal()),
    case(aten.minimum.default, normal(), normal()),
    case(aten.threshold_backward.default, normal(), normal(), 0.25),
    case(aten.where.self, Each(lambda: torch.tensor(True)), normal(), normal()),
    *(case(target, normal()) for target in (aten.neg.default, aten.abs.default, aten.sqrt.default, aten.relu.default)),
    case(aten.clamp.default, normal(), -1.0, 2.0),
    case(aten.clamp_min.default, normal(), 0.5),
    case(aten.reciprocal.default, normal()),
    case(aten._to_copy.default, normal(), dtype=torch.bool),
]


@pytest.mark.parametrize("tried", EXACT, ids=lambda tried: tried.name)
def test_ieee_operations_are_those_of_torch_for_every_special_value(tried: Case) -> None:
    pairs = torch.cartesian_prod(SPECIAL, SPECIAL)
    given = [argument for argument in tried.arguments if isinstance(argument, Each)]
    columns = {id(argument): list(pairs[:, n % 2]) for n, argument in enumerate(given)}
    for argument in given:
        if argument.draw().dtype == torch.bool:
            columns[id(argument)] = [value > 0 for value in pairs[:, 0]]
    (found,) = by_rule(tried, columns)
    for number in range(len(pairs)):
        whole_arguments = (columns[id(each)][number] if isinstance(each, Each) else each for each in tried.arguments)
        right = tried.call(lambda target: target, *whole_arguments)
        assert np.array_equal(lane(found, number), right.numpy(), equal_nan=right.is_floating_point()), pairs[number]


UNITS = {kernels.exp: (torch.exp, 1), kernels.log: (torch.log, 1), kernels.log1p: (torch.log1p, 1),
         kernels.erf: (torch.erf, 1), kernels.tanh: (torch.tanh, 7)}  # fmt: skip
"""The stated error of each function in units in the last place of a float32."""


@pytest.mark.parametrize(("function", "stated"), UNITS.items(), ids=["exp", "log", "log1p", "erf", "tanh"])
def test_functions_are_within_a_few_units_in_the_last_place(
    function: Callable[[Any], Any], stated: tuple[Callable[[Tensor], Tensor], int]
) -> None:
    exact, units = stated
    sizes = torch.cat([torch.logspace(-45, 38.5, 20_001), torch.linspace(0, 90, 20_001), torch.linspace(0, 8, 100_001)])
    tried = torch.cat([sizes, -sizes, SPECIAL]).float()
    found, right = torch.from_numpy(function(tried.numpy())).double(), exact(tried.double())
    if exact is torch.exp:  # zero a little before it underflows, infinity a little before it overflows
        kept = (tried >= -87.3) & (tried <= 88.72)
        assert bool((found[tried < -87.3] == 0).all())
        assert bool((found[tried > 88.72] == torch.inf).all())
        found, right = found[kept | tried.isnan()], right[kept | tried.isnan()]
    odd = right.isnan() | right.isinf()
    assert torch.equal(found[right.isnan()].isnan(), right[right.isnan()].isnan())
    assert not found[~right.isnan()].isnan().any()
    assert torch.equal(found[right.isinf()], right[right.isinf()])
    unit = torch.from_numpy(np.spacing(right[~odd].abs().float().numpy())).double()
    assert float(((found - right)[~odd].abs() / unit).max()) <= units


@pytest.mark.parametrize("function", [kernels.exp, kernels.log, kernels.log1p, kernels.erf, kernels.tanh])
def test_functions_give_an_entry_the_same_bits_at_every_place(function: Callable[[Any], Any]) -> None:
    """Vectors of a loop and what is left after the last one must not differ."""
    values = np.abs(np.random.default_rng(3).standard_normal(67).astype(np.float32)) * 3
    for length in range(1, 68):
        assert same_bits(function(values[:length]), function(values)[:length])
        assert same_bits(function(values[-length:]), function(values)[-length:])


# Rules that read a sample's tensor as it was given.


@pytest.mark.parametrize("outputs", [5, 65])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_contiguous_samples_have_the_values_of_torch_and_bits_of_their_own(
    outputs: int, bias: bool
) -> None:
    torch.manual_seed(2)
    weight, shift = torch.randn(37, outputs), torch.randn(outputs)
    rows = torch.randn(33, 37)

    def product(rows: Tensor) -> Any:
        leaf = Leaf(rows, (1, 37), -(-len(rows) // LANES) * LANES)
        target, ahead = (aten.addmm.default, [shift.numpy()[:, None]]) if bias else (aten.mm.default, [])
        return rule(target)(*ahead, leaf, weight.numpy()[..., None])[0]

    found = product(rows)
    right = rows.double() @ weight.double() + (shift if bias else 0)
    assert np.allclose(found[:, :33].T, right.numpy(), atol=TOLERANCE * float(right.abs().max()))
    for low, high in ((0, 1), (7, 29), (32, 33)):
        assert same_bits(product(rows[low:high])[:, : high - low], found[:, low:high])


def test_views_and_copies_of_contiguous_samples_stay_contiguous() -> None:
    leaf = Leaf(torch.arange(24.0).reshape(2, 12), (1, 12), LANES)
    viewed = rule(aten.clone.default)(rule(aten.view.default)(leaf, [1, 3, 4]))
    assert isinstance(viewed, Leaf)
    assert viewed.array().shape == (1, 3, 4, LANES)
    assert viewed.array()[0, 1, 2, 1] == 18
    assert not viewed.array()[..., 2:].any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32])
def test_samples_of_every_type_are_spread_over_the_lanes(dtype: torch.dtype) -> None:
    rows = torch.randint(0, 2, (5, 6)).to(dtype)
    spread = Leaf(rows, (1, 2, 3), LANES).array()
    assert np.array_equal(spread[..., :5], rows.numpy().T.reshape(1, 2, 3, 5))
    assert not spread[..., 5:].any()


# Shapes at random.


@pytest.mark.parametrize("seed", range(30))
def test_convolutions_of_all_shapes_have_the_values_of_torch(seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    axes, groups = draw.randint(1, 3), draw.randint(1, 3)
    kernel, stride, dilation = ([draw.randint(1, 3) for _ in range(axes)] for _ in range(3))
    padding = [draw.randint(0, 2) for _ in range(axes)]
    space = [d * (k - 1) + 1 + draw.randint(0, 5) for k, d in zip(kernel, dilation, strict=True)]
    channels, outputs = (groups * draw.randint(1, 7) for _ in range(2))
    weight, bias = fixed(outputs, channels // groups, *kernel), fixed(outputs) if draw.random() < 0.5 else None
    rest = stride, padding, dilation, False, [0] * axes, groups
    forward = case(aten.convolution.default, normal(1, channels, *space), weight, bias, *rest)
    test_a_rule_has_the_values_of_torch(forward)
    test_a_sample_has_the_same_bits_in_every_lane_and_company(forward, 1e30)
    size = by_torch(forward, drawn(forward, 1), 0)[0].shape
    mask = [True, False, bias is not None]
    backward = case(
        aten.convolution_backward.default, normal(*size), normal(1, channels, *space), weight, [outputs], *rest, mask
    )
    backward = Case(backward.target, backward.arguments, lambda find, *given: _known(find(backward.target)(*given)))
    test_a_rule_has_the_values_of_torch(backward)
    test_a_sample_has_the_same_bits_in_every_lane_and_company(backward, float("nan"))


def _known(found: Any) -> list[Any]:
    """The error at the input, and that of the bias if there is one: torch gives other entries a shape of nothing."""
    return [each for each in found if each is not None]


@pytest.mark.parametrize("seed", range(20))
def test_pooling_of_all_shapes_has_the_values_of_torch(seed: int) -> None:
    draw = random.Random(seed)
    kernel, stride = ([draw.randint(1, 3) for _ in range(2)] for _ in range(2))
    shape = draw.randint(1, 2), draw.randint(1, 3), *(size + draw.randint(0, 5) for size in kernel)
    rest = kernel, stride, [0, 0]
    mean = case(aten.avg_pool2d.default, normal(*shape), *rest)
    size = by_torch(mean, drawn(mean, 1), 0)[0].shape
    test_a_rule_has_the_values_of_torch(mean)
    test_a_rule_has_the_values_of_torch(
        case(aten.avg_pool2d_backward.default, normal(*size), normal(*shape), *rest, False, True, None)
    )

    def largest(find: Callable[[Any], Any], error: Any, x: Any) -> Any:
        found, chosen = find(aten.max_pool2d_with_indices.default)(x, *rest, [1, 1], False)
        back = find(aten.max_pool2d_with_indices_backward.default)
        return [found, back(error, x, *rest, [1, 1], False, chosen)]

    target = aten.max_pool2d_with_indices_backward.default
    test_a_rule_has_the_values_of_torch(Case(target, (normal(*size), normal(*shape)), largest))


# What the rules leave to torch's kernels.


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten.mm.default, (x34, normal(4, 5))),
        (aten.addmm.default, (normal(5), x34, fixed(4, 5))),
        (aten.add.Tensor, (x34, y34, {"alpha": 3})),
        (aten.div.Tensor, (x34, y34, {"rounding_mode": "floor"})),
        (aten.pow.Tensor_Scalar, (x34, 1.5)),
        (aten.sum.default, (whole(9, 3),)),
        (aten.gather.default, (whole(9, 3), 0, whole(3, 2))),
        (aten._to_copy.default, (x34, {"dtype": torch.float64})),
        (aten.constant_pad_nd.default, (x34, [-1, 0])),
        (aten.embedding.default, (normal(5, 3), whole(5, 2))),
        (aten.avg_pool2d.default, (normal(1, 1, 4, 4), [2, 2], [2, 2], [1, 1])),
        (aten.avg_pool2d.default, (normal(1, 1, 4, 4), [2, 2], [2, 2], [0, 0], False, True, 3)),
        (aten.max_pool2d_with_indices.default, (normal(1, 1, 5, 5), [2, 2], [2, 2], [0, 0], [2, 2])),
        (aten.max_pool2d_with_indices.default, (normal(1, 1, 5, 5), [2, 2], [2, 2], [0, 0], [1, 1], True)),
        (aten.nll_loss_forward.default, (normal(1, 5), whole(5, 1), None, 1, -100)),
        (aten.convolution.default, (normal(1, 4, 7), fixed(4, 2, 3), None, [1], [0], [1], True, [0], 1)),
        (aten.native_dropout.default, (fixed(3), 0.5, True)),
        (aten.native_dropout.default, (normal(3), 1.0, True)),
        (aten.bernoulli.p, (fixed(3), 0.5)),
    ],
)
def test_what_has_no_loop_is_refused_by_name(target: Any, arguments: tuple[Any, ...]) -> None:
    named = arguments[-1] if isinstance(arguments[-1], dict) else {}
    tried = case(target, *(arguments[:-1] if named else arguments), **named)
    with pytest.raises(NotLanes):
        by_rule(tried, drawn(tried, LANES))


# Random numbers.


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.8])
def test_masks_are_drawn_for_every_entry_of_every_lane(keep: float) -> None:
    torch.manual_seed(8)
    x = np.ones((40, 30, MANY), np.float32)
    found, mask = rule(aten.native_dropout.default)(x, 1 - keep, True)
    other = rule(aten.bernoulli.p)(rule(aten.empty_like.default)(x), keep)
    assert np.array_equal(found, mask * np.float32(1 / keep))
    for drawn_mask in (mask, other.astype(np.bool_)):
        for axes in ((0, 1), (1, 2), (0, 2)):  # no entry, row or lane is drawn more often than the others
            assert np.abs(drawn_mask.mean(axes) - keep).max() < 6 * np.sqrt(keep * (1 - keep) / 1200)
        assert len({drawn_mask[..., n].tobytes() for n in range(MANY)}) == MANY


# Samples that do not fit.


def lost_in_company(model: nn.Module, loss: Any, batch: tuple[Tensor, ...], bad: int) -> None:
    """The sample `bad` counts as zero and changes nothing of the others, in whatever lane it stands."""
    asked: dict[str, Any] = {"clip": L2(1.0), "batch_size": 16}
    road = road_of(model, loss, None, Form.of(batch), batch_size=16, packed=False)
    assert isinstance(road, LanesRoad)
    numbers = torch.arange(len(batch[0]))
    kept = numbers[numbers != bad]
    everybody = clipped_gradients(model, loss, batch, **asked)
    others = clipped_gradients(model, loss, tuple(leaf[kept] for leaf in batch), **asked)
    own = clipped_gradients(model, loss, tuple(leaf[bad : bad + 1] for leaf in batch), **asked)
    assert (everybody.dropped, others.dropped, own.dropped) == (1, 0, 1)
    assert torch.equal(everybody.mean, others.mean)
    assert others.mean.abs().max() > 0
    assert own.mean.abs().max() == 0


@pytest.mark.parametrize("label", [3, -1, -2, 100, 2**40])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_label_out_of_range_costs_its_sample_alone(label: int, weighted: bool) -> None:
    torch.manual_seed(1)
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]), reduction="none") if weighted else LOSS
    model, inputs = nn.Linear(4, 3), torch.randn(9, 4)
    for bad in (0, 4, 8):
        targets = torch.arange(9) % 3
        targets[bad] = label
        lost_in_company(model, loss, (inputs, targets), bad)


class Words(nn.Module):
    """A table, and the mean of what was looked up; words that are not in the table may be masked."""

    def __init__(self, padding: int | None, *, masked: bool) -> None:
        super().__init__()
        self.table, self.out, self.masked = nn.Embedding(6, 5, padding_idx=padding), nn.Linear(5, 3), masked

    def forward(self, x: Tensor) -> Tensor:
        found = self.table(x)
        if self.masked:
            found = torch.where((x < 6)[..., None], found, torch.zeros(()))
        return self.out(found.mean(1))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("padding", [None, 0, 2])
def test_a_word_out_of_range_costs_its_sample_alone(padding: int | None, masked: bool) -> None:
    """A table with the rows of all samples one after another would give it to a neighbour."""
    torch.manual_seed(2)
    model = Words(padding, masked=masked)
    for bad in (0, 4, 8):
        for word in (6, 7, 1000, 2**40) if masked else (6, 7, -1, -3, 1000, 2**40):
            words = torch.arange(36).reshape(9, 4) % 6
            words[bad, 1] = word
            lost_in_company(model, LOSS, (words, torch.arange(9) % 3), bad)


@pytest.mark.parametrize("chosen", [4, -1, 2**40])
def test_a_choice_out_of_range_costs_its_sample_alone(chosen: int) -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(2, 3)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            return self.out(x.gather(1, index))

    torch.manual_seed(3)
    model, inputs, targets = Choosing(), torch.randn(9, 4), torch.arange(9) % 3
    for bad in (0, 8):
        index = torch.arange(18).reshape(9, 2) % 4
        index[bad, 1] = chosen
        lost_in_company(model, LOSS, (inputs, index, targets), bad)


# Whole models.


def check_mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """Against autograd on the whole batch; these models are made of operations that have a loop."""
    assert isinstance(road_of(model, LOSS, None, Form.of(batch), batch_size=16, packed=False), LanesRoad)
    found = clipped_gradients(model, LOSS, batch, clip=BatchMean(1e3), batch_size=16).mean
    exact = torch.autograd.grad(LOSS(model(batch[0]), batch[1]).sum() / 16, list(model.parameters()))
    assert torch.allclose(found, torch.cat([part.flatten() for part in exact]).double(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("samples", [1, 5, 16, 17, 40])
def test_lanes_without_a_sample_are_left_out(samples: int) -> None:
    """Layers as wide as a vector has lanes: what is left out must be lanes, not coordinates."""
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Linear(LANES, LANES), nn.ReLU(), nn.Unflatten(1, (1, LANES)), nn.Linear(LANES, LANES),
        nn.Conv1d(1, LANES, 3), nn.Flatten(), nn.Linear(LANES * (LANES - 2), 3),
    )  # fmt: skip
    check_mean(model, (torch.randn(samples, LANES), torch.randint(0, 3, (samples,))))


class Merging(nn.Module):
    """Views its batch together with another dimension, as code for sequences does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 5), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(x)).view(len(x), 4, 5).transpose(1, 2).reshape(len(x), 20))


class Flattening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(4, 2, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.conv(x)).view(-1, 4).tanh().view(len(x), 8))


@pytest.mark.parametrize("make", [Merging, Flattening])
def test_views_of_any_kind_are_taken(make: Callable[[], nn.Module]) -> None:
    """Memory has the samples last where a model may expect them first."""
    torch.manual_seed(5)
    check_mean(make(), (torch.randn(21, 4, 6), torch.randint(0, 3, (21,))))


class OfNothing(nn.Module):
    """A hidden state that starts from zeros, and so reads no sample in its first product and convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.conv, self.out = nn.Linear(4, 4), nn.Conv1d(1, 2, 2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.tanh(self.step(x.new_zeros(len(x), 4)))
        state = torch.tanh(self.step(state) + x)
        return self.out(self.conv(state[:, None]).flatten(1))


def test_products_that_read_no_sample_are_taken() -> None:
    torch.manual_seed(6)
    check_mean(OfNothing(), (torch.randn(21, 4), torch.randint(0, 3, (21,))))


def test_a_loss_whose_errors_are_the_same_for_all_samples_is_taken() -> None:
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.Conv2d(2, 3, 2), nn.AvgPool2d(2, 1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3, 3)
    )
    batch = torch.randn(20, 1, 6, 6), torch.zeros(20)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0] - targets

    assert isinstance(road_of(model, loss, None, Form.of(batch), batch_size=16, packed=False), LanesRoad)
    found = clipped_gradients(model, loss, batch, clip=BatchMean(1e3), batch_size=16).mean
    exact = torch.autograd.grad(model(batch[0])[:, 0].sum() / 16, list(model.parameters()))
    assert torch.allclose(found, torch.cat([part.flatten() for part in exact]).double(), rtol=1e-4, atol=1e-5)


def test_images_of_one_sample_are_pooled_each() -> None:
    class Set(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(2 * 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            images = x.flatten(0, 1)
            pooled = F.max_pool2d(images, 2) + F.avg_pool2d(images, 2)
            return self.out(pooled.reshape(len(x), -1, 8).sum(1))

    torch.manual_seed(8)
    check_mean(Set(), (torch.randn(7, 5, 2, 4, 4), torch.randint(0, 3, (7,))))
