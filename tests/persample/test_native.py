"""Passes without Python: the operations of the graph, with the same bits every time, in any number of threads."""

import threading

import pytest
import torch
from persample_oracle import Case, gradients_one_by_one
from persample_oracle import mean_of as mean_of_exact
from torch import nn

from bqsgd._src.persample import L2, clipped_gradients
from bqsgd._src.persample.gradients import road_of
from bqsgd._src.persample.layouts import ONEDNN, lay_out
from bqsgd._src.persample.native import native
from bqsgd._src.persample.passes import PassesRoad
from bqsgd._src.persample.program import Form, Whole, program_of, side_by_side
from bqsgd._src.runtime.threads import in_own_threads
from persample_models import case_of, wide_attention

aten = torch.ops.aten
LOSS = nn.CrossEntropyLoss(reduction="none")


class Attention(nn.Module):
    """An operation that lanes have no rule for, and enough numbers for passes of one sample."""

    def __init__(self):
        super().__init__()
        self.inside, self.norm, self.outside = nn.Linear(64, 192), nn.LayerNorm(64), nn.Linear(64, 5)

    def forward(self, x):
        q, k, v = self.inside(self.norm(x)).chunk(3, -1)
        return self.outside((((q @ k.transpose(-1, -2)) / 8.0).softmax(-1) @ v).mean(1))


@pytest.fixture(autouse=True)
def threads_kept():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def case():
    torch.manual_seed(3)
    return Attention(), (torch.randn(24, 64, 64), torch.randint(0, 5, (24,)))


def mean_of(model, batch, batch_size=None):
    size = batch_size or len(batch[0])
    return clipped_gradients(model, LOSS, tuple(batch), clip=L2(0.1), batch_size=size).mean.clone()


def test_the_mean_is_the_same_on_any_number_of_threads(case):
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(mean_of(*case))
        assert torch.get_num_threads() == threads
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert found[0].norm() > 0


def test_modes_of_the_calling_thread_do_not_reach_a_pass(case):
    expected = mean_of(*case)
    with torch.inference_mode():
        assert torch.equal(mean_of(*case), expected)


def test_a_native_pass_computes_what_its_graph_says_and_the_same_every_time(case):
    model, batch = case
    program = program_of(model, LOSS, None, Form.of(batch))
    body = program.body([gradient.node for gradient in program.gradients])
    run = native(body)
    assert run is not body
    with torch.no_grad():
        given = *program.prelude()(*Whole(model, LOSS, None).given()), *(leaf[:1] for leaf in batch)
        expected, found = body(*given), [run(*given) for _ in range(5)]
    for values in found:
        for value, first, right in zip(values, found[0], expected, strict=True):
            assert torch.equal(value, first)
            torch.testing.assert_close(value, right)


def test_this_model_goes_in_passes_of_one_sample(case):
    model, batch = case
    road = road_of(model, LOSS, None, Form.of(batch), batch_size=24, packed=False)
    assert isinstance(road, PassesRoad)
    assert road.assumes == ""


def test_side_by_side_a_sample_that_raises_costs_itself_alone(case):
    model, (inputs, targets) = case
    torch.set_num_threads(1)  # all passes of one sample in groups of several
    wrong = targets.clone()
    wrong[[2, 3, 17]] = 9  # a label that the loss refuses
    others = [n for n in range(len(inputs)) if n not in {2, 3, 17}]
    told = clipped_gradients(model, LOSS, (inputs, wrong), clip=L2(0.1), batch_size=24)
    left_out = clipped_gradients(model, LOSS, (inputs[others], targets[others]), clip=L2(0.1), batch_size=24)
    assert told.dropped == 3
    assert torch.equal(told.mean, left_out.mean)
    assert told.mean.norm() > 0


def test_side_by_side_every_operation_is_called_for_one_sample_at_a_time(case):
    model, batch = case
    program = program_of(model, LOSS, None, Form.of(batch))
    body = program.body([gradient.node for gradient in program.gradients if gradient is not None])
    several = side_by_side(body, len(program.shared), 3)
    once, often = ([node for node in module.graph.nodes if node.op == "call_function"] for module in (body, several))
    assert len(often) == 3 * len(once)
    for n, node in enumerate(often):
        assert node.target is once[n // 3].target
    # No operation reads values of two samples: everything before an output is of one sample, or shared.
    inputs = {node: node.name.rpartition("_of_")[2] for node in several.graph.nodes if "_of_" in node.name}
    samples = {}
    for node in several.graph.nodes:
        if node.op == "placeholder":
            samples[node] = {inputs[node]} if node in inputs else set()
        elif node.op == "call_function":
            samples[node] = set().union(*(samples[read] for read in node.all_input_nodes if read in samples))
            assert len(samples[node]) <= 1


def test_a_graph_that_torch_cannot_run_by_itself_runs_in_python():
    def whole_division(x):
        return [torch.ops.aten.div.Tensor_mode(7, x, rounding_mode="floor")]

    module = torch.fx.symbolic_trace(whole_division)
    assert native(module) is module


def test_own_threads_have_modes_of_their_own():
    torch.set_num_threads(2)
    seen = []
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        in_own_threads(
            lambda _: seen.append(
                (torch.get_num_threads(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
            ),
            8,
        )
    assert seen == [(1, False, False)] * 8
    assert torch.get_num_threads() == 2


def test_own_threads_do_items_in_order_where_they_must():
    torch.set_num_threads(4)
    done = []
    in_own_threads(done.append, 50, in_order=True)
    assert done == list(range(50))


def test_an_error_in_an_own_thread_is_raised():
    def work(item):
        raise ZeroDivisionError(str(item))

    with pytest.raises(ZeroDivisionError):
        in_own_threads(work, 3)


def test_work_in_our_threads_may_ask_for_our_threads_again():
    """A helper that waited for the pool it runs in would wait for ever."""
    torch.set_num_threads(2)
    inner: list[tuple[str, int]] = []

    def outer(item: int) -> None:
        in_own_threads(lambda part: inner.append((threading.current_thread().name, item * 3 + part)), 3)

    in_own_threads(outer, 4)
    assert sorted(item for _, item in inner) == list(range(12))
    assert all(name.startswith("bqsgd-") for name, _ in inner)


def test_a_view_of_the_models_own_tensors_follows_them_where_they_lie(case):
    """A parameter that starts in the middle of its memory: only what an operation returns is read by its place."""
    model, batch = case
    expected = mean_of(model, batch)
    with torch.no_grad():
        for parameter in model.parameters():
            apart = torch.full((2, *parameter.shape), float("nan"))
            apart[1] = parameter
            parameter.data = apart[1]
    assert torch.equal(mean_of(model, batch), expected)


def test_large_products_go_through_onednn_without_python_and_values_stay():
    case = case_of(wide_attention, 0)
    program = program_of(case.model, LOSS, None, Form.of(case.batch))
    given = *program.prelude()(*Whole(case.model, LOSS, None).given()), *(leaf[:1] for leaf in case.batch)
    given = [value.detach() for value in given]
    outputs = [gradient.node for gradient in program.gradients]
    body = program.body(outputs)
    lay_out(program.prelude(), body, len(program.shared))
    products = body.graph.find_nodes(op="call_function", target=torch.ops.mkldnn._linear_pointwise.default)
    assert len(products) == 2 * ONEDNN  # forward, and the gradient of the weight
    without_python = native(body)
    assert without_python is not body
    for found, right in zip(without_python(*given), program.body(outputs)(*given), strict=True):
        torch.testing.assert_close(found, right)


CONVOLUTIONS = [
    ((96, 12, 12), {"out_channels": 40, "kernel_size": 3, "padding": 1}),
    ((96, 13, 9), {"out_channels": 200, "kernel_size": (3, 2), "stride": (2, 3), "padding": (2, 0), "bias": False}),
    ((200, 10, 8), {"out_channels": 190, "kernel_size": 1, "stride": 1, "padding": 1}),
    ((200, 17, 16), {"out_channels": 190, "kernel_size": 1, "stride": 2, "bias": False}),
    ((64, 20, 20), {"out_channels": 80, "kernel_size": 3, "dilation": 2, "stride": 2, "padding": "valid"}),
    ((64, 20, 20), {"out_channels": 48, "kernel_size": 5, "padding": 3, "stride": 4}),
]


@pytest.mark.parametrize(("image", "how"), CONVOLUTIONS)
def test_large_convolutions_go_through_onednn_with_weights_laid_out_once(image, how):
    """And the gradients of their inputs, at points that no window reads too."""
    torch.manual_seed(3)
    convolutions = nn.Conv2d(image[0], image[0], 3, padding=1), nn.Conv2d(image[0], **how)
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.LazyLinear(2))
    x, y = torch.randn(1, *image), torch.tensor([1])
    model(x)
    program = program_of(model, LOSS, None, Form.of((x, y)))
    outputs = [gradient.node for gradient in program.gradients]
    given = [value.detach() for value in program.prelude()(*Whole(model, LOSS, None).given())]
    expected = program.body(outputs)(*given, x, y)
    prelude, body = program.prelude(), program.body(outputs)
    lay_out(prelude, body, len(given))
    with torch.no_grad():
        shared = prelude(*Whole(model, LOSS, None).given())
        found = native(body)(*shared, x, y)
    kinds = torch.ops.mkldnn._convolution_pointwise.default, torch.ops.mkldnn._convolution_transpose_pointwise.default
    counts = [len(body.graph.find_nodes(op="call_function", target=kind)) for kind in kinds]
    assert counts == [2 * ONEDNN, 1 * ONEDNN]
    assert len(shared) - len(given) == sum(counts)
    for each, right in zip(found, expected, strict=True):
        assert each.is_contiguous()
        torch.testing.assert_close(each, right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))


class Attending(nn.Module):
    """Attention with a mask of the sample's own, of which one row sees nothing."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 2)

    def forward(self, x):
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        seen = (x[:, :, 0] > 0)[:, None, None] & (torch.arange(6) > 0)[:, None]
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)[:, 0].mean(1))


@pytest.mark.parametrize("packed", [False, True])
def test_attention_is_one_operation_where_a_pass_has_one_sample(packed):
    torch.manual_seed(7)
    case = Case(Attending(), (torch.randn(9, 6, 8), torch.arange(9) % 2))
    program = program_of(case.model, LOSS, None, Form.of(case.batch), fused=not packed)
    fused = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert bool(program.module.graph.find_nodes(op="call_function", target=fused)) is not packed
    expected = mean_of_exact(gradients_one_by_one(case), L2(0.2), case.sizes, 16)
    found = clipped_gradients(case.model, LOSS, case.batch, clip=L2(0.2), batch_size=16, packed=packed).mean
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7)


class Heads(nn.Module):
    """Attention of two heads beside a narrow product, with a mask of the sample's own or none."""

    def __init__(self, width, mask):
        super().__init__()
        self.mask, self.qkv, self.out = mask, nn.Linear(width, 3 * width), nn.Linear(width, 3)
        self.down, self.up = nn.Linear(width, 5, bias=False), nn.Linear(5, width, bias=False)

    def forward(self, x):
        q, k, v = (part.reshape(*x.shape[:2], 2, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        seen = torch.where(x[:, None, None, :, 0] > 0, 0.0, -torch.inf).to(x.dtype) if self.mask == "own" else None
        z = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=self.mask == "causal")
        z = z.transpose(1, 2).flatten(2)
        return self.out((z + self.up(self.down(z))).mean(1))


@pytest.mark.parametrize(
    ("width", "tokens", "mask", "dtype"),
    [(66, 7, "own", torch.float32), (10, 65, "causal", torch.float64), (10, 1, "none", torch.bfloat16)],
)
def test_attention_of_a_sample_is_its_own_beside_samples_that_overflow(width, tokens, mask, dtype):
    """In any place, beside any others and whatever earlier passes left in memory."""
    torch.manual_seed(width + tokens)
    model, x = Heads(width, mask).to(dtype), torch.randn(11, tokens, width) * 10 ** (torch.rand(11, 1, 1) * 6 - 3)
    x[4], x[5] = float("inf"), 1e30
    batch = x.to(dtype), torch.arange(11) % 3

    def mean(rows):
        for size in (10, 14, 18, 20):
            torch.full((1 << size,), float("nan"))
        return mean_of(model, [part[rows] for part in batch], 64)

    alone = torch.stack([mean([row]) for row in range(11)])
    assert alone.norm(dim=1).max() <= 0.1 / 64
    for threads in (1, 2):
        torch.set_num_threads(threads)
        rows = torch.randperm(11)
        assert torch.equal(mean(rows), alone[rows].sum(dim=0))
