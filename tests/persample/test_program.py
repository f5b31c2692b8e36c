"""The program of one sample: pure, traced without data, traced again when the model changes, and kept once."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from persample_oracle import LOSS, Case, gradients_one_by_one, mean_of
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

import persample_models as models
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.persample import L2, clipped_gradients
from bqsgd._src.persample import program as programs
from bqsgd._src.persample.gradients import road_of
from bqsgd._src.persample.lanes import LanesRoad
from bqsgd._src.persample.passes import PassesRoad
from bqsgd._src.persample.program import (
    Convolution,
    Form,
    Gradient,
    NotTraceable,
    Product,
    Program,
    Table,
    Whole,
    program_of,
    traced,
)
from persample_models import LANES, ROWS, Build, case_of

CLIP = L2(0.1)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same'"),
    pytest.mark.filterwarnings("ignore::bqsgd._src.persample.SlowGradientsWarning"),
]


def program_for(case: Case) -> Program:
    return program_of(case.model, case.loss, case.forward, Form.of(case.batch))


def mean(case: Case) -> Tensor:
    return clipped_gradients(case.model, case.loss, case.batch, clip=CLIP, batch_size=64, forward=case.forward).mean


def agrees(case: Case) -> bool:
    """Whether the clipped gradients are those of the model as it stands."""
    exact = mean_of(gradients_one_by_one(case), CLIP, case.sizes, 64)
    return torch.allclose(mean(case), exact, rtol=1e-4, atol=1e-7)


def small_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(6, 4, generator=generator), torch.arange(6) % 3


# The graph.


def draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


@pytest.mark.parametrize("build", [*LANES, *ROWS], ids=lambda build: build.__name__)
def test_a_program_is_pure_and_computes_once_what_reads_no_sample(build: Build) -> None:
    program = program_for(case_of(build, 0))
    outputs = [gradient.node for gradient in program.gradients if gradient is not None]
    prelude, body = program.prelude(), program.body(outputs)
    for module in (program.module, prelude, body):
        for node in module.graph.nodes:
            assert node.op in ("placeholder", "get_attr", "call_function", "output")
            assert not (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable), node
    placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
    assert len(placeholders) == len(program.shared) + len(program.leaves)
    of_samples = set(placeholders[len(program.shared) :])
    for node in body.graph.nodes:
        if of_samples.intersection(node.all_input_nodes) or draws(node):
            of_samples.add(node)
        assert node in of_samples or node.op in ("placeholder", "get_attr", "output"), node


def test_products_of_frozen_matrices_are_computed_before_the_samples() -> None:
    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("left", torch.randn(5, 2))
            self.register_buffer("right", torch.randn(2, 4))
            self.out = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(nn.functional.linear(x, self.left @ self.right))

    case = Case(LowRank(), small_batch())
    program = program_for(case)
    made = [node for node in program.shared if node.target is torch.ops.aten.t.default]
    assert any(source.target is torch.ops.aten.mm.default for node in made for source in node.all_input_nodes)
    assert agrees(case)


def test_a_program_that_draws_says_so() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    assert program_of(model, LOSS, None, Form.of(small_batch())).draws
    assert not program_of(model.eval(), LOSS, None, Form.of(small_batch())).draws


@pytest.mark.parametrize(
    ("build", "kinds"),
    [
        (lambda: nn.Linear(4, 3), (Product, Gradient)),
        (lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 4), nn.Flatten()), (Convolution, Gradient)),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, bias=False)), (Product, Gradient, Gradient)),
    ],
    ids=["linear", "convolution", "norm"],
)
def test_gradients_that_are_products_are_known_as_such(build: Callable[[], nn.Module], kinds: tuple[type, ...]) -> None:
    program = program_of(build(), LOSS, None, Form.of(small_batch()))
    assert tuple(type(gradient) for gradient in program.gradients) == kinds


def test_tied_weights_have_a_pair_for_each_use_and_tables_their_rows() -> None:
    tied = program_for(case_of(models.tied_linear, 0)).gradients[0]
    assert isinstance(tied, Product)
    assert len(tied.pairs) == 2
    table = program_for(case_of(models.wide_table, 0)).gradients[0]
    assert isinstance(table, Table)
    assert table.rows == 3000


def test_a_parameter_that_the_loss_does_not_use_has_no_gradient() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(4, 3)})
    program = program_of(model, LOSS, lambda model, batch: (model["used"](batch[0]), batch[1]), Form.of(small_batch()))
    assert [gradient is None for gradient in program.gradients] == [False, False, True, True]


def test_a_form_is_structure_shapes_and_types_alone() -> None:
    batch = {"x": torch.randn(7, 2, 3), "y": [torch.zeros(7, dtype=torch.long)]}
    form = Form.of(batch)
    other = Form.of({"x": torch.randn(2, 2, 3), "y": [torch.ones(2, dtype=torch.long)]})
    assert form == other
    assert hash(form) == hash(other)
    assert [leaf.shape for leaf in form.zeros(5)] == [(5, 2, 3), (5,)]
    assert form != Form.of({"x": torch.randn(7, 2, 3).double(), "y": batch["y"]})
    assert form != Form.of({"x": torch.randn(7, 2, 4), "y": batch["y"]})
    assert form != Form.of({"z": batch["x"], "y": batch["y"]})


# What the user's code sees.

SEEN: list[Any] = []


class Watching(nn.Module):
    """Keeps everything that it can lay its hands on."""

    def __init__(self, *, rows: bool, branches: bool = False) -> None:
        super().__init__()
        self.inner, self.out, self.rows, self.branches = nn.Linear(4, 5), nn.Linear(5, 3), rows, branches
        self.register_buffer("shift", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        SEEN.extend([x, *self.parameters(), *self.buffers()])
        hidden = self.inner(x) + self.shift
        if self.branches and float(hidden.sum()) > 1e30:
            return self.out(hidden)
        hidden = torch.special.entr(hidden.sigmoid()) if self.rows else torch.tanh(hidden)
        SEEN.append(hidden)
        return self.out(hidden)


def watching_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    SEEN.extend([outputs, targets])
    return LOSS(outputs, targets)


def watching_forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    SEEN.extend(batch)
    return model(batch[0]), batch[1]


@pytest.mark.parametrize("rows", [False, True], ids=["lanes", "rows"])
def test_the_users_code_never_meets_a_value(rows: bool) -> None:
    model, batch = Watching(rows=rows), small_batch()
    for name, layer in model.named_modules():
        layer.register_forward_hook(lambda _, inputs, outputs, name=name: SEEN.extend([*inputs, outputs]))
    SEEN.clear()
    road = road_of(model, watching_loss, watching_forward, Form.of(batch), batch_size=64, packed=False)
    assert isinstance(road, PassesRoad if rows else LanesRoad)
    found = clipped_gradients(model, watching_loss, batch, clip=CLIP, batch_size=64, forward=watching_forward)
    assert found.mean.abs().max() > 0
    assert len(SEEN) > 10
    for tensor in SEEN:
        inner = tensor if isinstance(tensor, FakeTensor) else torch._from_functional_tensor(tensor)
        assert isinstance(inner, FakeTensor)
    before = len(SEEN)
    clipped_gradients(
        model, watching_loss, (batch[0] * 2, batch[1]), clip=CLIP, batch_size=64,
        forward=watching_forward,
    )  # fmt: skip
    assert len(SEEN) == before  # and it is not called again
    SEEN.clear()


def test_code_that_cannot_be_traced_meets_one_sample_at_a_time_and_copies_alone() -> None:
    model, batch = Watching(rows=False, branches=True), small_batch()
    SEEN.clear()
    clipped_gradients(model, watching_loss, batch, clip=CLIP, batch_size=64, forward=watching_forward)
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers(), *batch)}
    real = [tensor for tensor in SEEN if type(tensor) in (Tensor, nn.Parameter)]
    assert real
    for tensor in real:
        assert tensor.data_ptr() not in own
        assert tensor.dim() == 0 or len(tensor) == 1 or tensor.shape in {p.shape for p in model.parameters()}
    SEEN.clear()


# What is left behind.


class Careless(nn.Module):
    """Writes to everything that it has, in ways that leave its outputs a function of one sample."""

    def __init__(self, *, rows: bool = False, branches: bool = False) -> None:
        super().__init__()
        self.inner, self.out, self.rows, self.branches = nn.Linear(4, 5), nn.Linear(5, 3), rows, branches
        self.register_buffer("count", torch.zeros(1))
        self.top = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)
        self.calls, self.kept = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x
        self.kept.append(x)
        self.register_forward_hook(lambda *_: None)
        random.shuffle(list(range(3)) if self.branches else [])
        with torch.no_grad():
            self.count += x.sum()
            self.top.copy_(torch.maximum(self.top, x.max()))
            self.inner.weight.mul_(2)
        self.out.bias.grad = torch.ones_like(self.out.bias)
        if self.branches and float(x.sum()) > 1e30:
            return self.out(self.inner(x))
        hidden = self.inner(x / self.top) + self.count
        return self.out(torch.special.entr(hidden.sigmoid()) if self.rows else torch.tanh(hidden))


def state_of(model: nn.Module) -> object:
    layers = [
        (name, layer.training, sorted(vars(layer)), len(layer._forward_hooks), len(layer._backward_hooks))
        for name, layer in model.named_modules()
    ]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = [(name, id(t), t.data_ptr(), t.grad, t.tolist(), t.requires_grad) for name, t in tensors.items()]
    return layers, values, model.calls, list(model.kept)


each_way = pytest.mark.parametrize("settings", [{}, {"rows": True}, {"branches": True}], ids=["lanes", "rows", "alone"])


@each_way
def test_the_model_and_the_generators_are_left_as_they_were(settings: dict[str, bool]) -> None:
    model = Careless(**settings)
    before, numpy_state = state_of(model), np.random.get_state()[1].tolist()  # noqa: NPY002
    states = torch.get_rng_state(), random.getstate()
    case = Case(model, small_batch())
    mean(case)
    mean(case)
    assert state_of(model) == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == numpy_state  # noqa: NPY002
    if not settings.get("branches"):  # that one draws from Python's generator for every sample
        assert random.getstate() == states[1]


@each_way
def test_what_a_forward_writes_counts_for_its_own_sample_alone(settings: dict[str, bool]) -> None:
    """Every sample begins with the model as it stands, as a copy of it would."""
    torch.manual_seed(7)
    model = Careless(**settings)
    inputs, targets = small_batch()
    parts = []
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        own = copy.deepcopy(model).double()
        parameters = [parameter for parameter in own.parameters() if parameter.requires_grad]
        parts.append(_own_gradient(own, x.double(), y, parameters))
    case = Case(model, (inputs, targets))
    exact = mean_of(torch.stack(parts), CLIP, case.sizes, 64)
    assert torch.allclose(mean(case), exact, rtol=1e-4, atol=1e-7)


def _own_gradient(model: nn.Module, x: Tensor, y: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    found = torch.autograd.grad(LOSS(model(x), y).sum(), parameters)
    return torch.cat([gradient.flatten() for gradient in found])


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    for attribute in (threading.Lock(), (number for number in range(3)), torch.ones(1, requires_grad=True) * 2):
        model = nn.Linear(4, 3)
        model.held = attribute
        with pytest.raises(InvalidParameter, match="cannot be copied, and its forward must run on a copy"):
            mean(Case(model, small_batch()))


# Traced again, and only then.


class Changeable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.out = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 3)
        self.factor, self.factors, self.config, self.mode = 1.0, [1.0], SimpleNamespace(factor=1.0), "plain"
        self.constant = torch.ones(4)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor * self.factors[0] * self.config.factor
        hidden = self.drop(self.inner(x)) * factor * self.constant + self.shift
        return self.out(torch.tanh(hidden) if self.mode == "plain" else torch.relu(hidden))


def train_only_the_last(model: Changeable) -> None:
    model.inner.requires_grad_(False)


def replace_forward(model: Changeable) -> None:
    model.drop.forward = lambda x: x * 3


def replace_layer(model: Changeable) -> None:
    model.drop = nn.Hardtanh()


def add_hook(model: Changeable) -> None:
    model.inner.register_forward_hook(lambda _, inputs, outputs: outputs * 2)


def add_pre_hook(model: Changeable) -> None:
    model.out.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))


def set_number(model: Changeable) -> None:
    model.factor = 3.0


def set_text(model: Changeable) -> None:
    model.mode = "other"


def set_constant(model: Changeable) -> None:
    model.constant = torch.full((4,), 2.0)


def write_constant(model: Changeable) -> None:
    model.constant.mul_(2)


def set_in_list(model: Changeable) -> None:
    model.factors[0] = 3.0


def set_in_config(model: Changeable) -> None:
    model.config.factor = 3.0


CHANGES = [
    train_only_the_last, replace_forward, replace_layer, add_hook, add_pre_hook, set_number, set_text, set_constant,
    write_constant, set_in_list, set_in_config,
]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    CHANGES,
    ids=lambda change: change.__name__,
)
def test_a_changed_model_is_traced_again(change: Callable[[Changeable], None]) -> None:
    torch.manual_seed(8)
    case = Case(Changeable(), small_batch())
    first, before = program_for(case), mean(case)
    assert program_for(case) is first
    change(case.model)
    assert program_for(case) is not first
    assert agrees(case)
    assert len(mean(case)) < len(before) or not torch.allclose(mean(case), before, rtol=1e-2, atol=0)


def test_a_removed_hook_and_another_at_the_same_address_are_noticed() -> None:
    case = Case(Changeable(), small_batch())
    for factor in (1.0, 2.0, 3.0):
        handle = case.model.inner.register_forward_hook(lambda _, inputs, outputs, factor=factor: outputs * factor)
        assert agrees(case)
        handle.remove()
    assert agrees(case)


def test_modes_are_noticed_and_remembered() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    form = Form.of(small_batch())
    training, evaluating = (program_of(model.train(mode), LOSS, None, form) for mode in (True, False))
    assert (training.draws, evaluating.draws) == (True, False)
    assert program_of(model.train(), LOSS, None, form) is training
    assert program_of(model.eval(), LOSS, None, form) is evaluating
    model[1].train()
    assert program_of(model, LOSS, None, form).draws


def test_values_of_parameters_and_buffers_are_no_part_of_a_program() -> None:
    torch.manual_seed(9)
    case = Case(Changeable(), small_batch())
    first = program_for(case)
    for _ in range(2):
        with torch.no_grad():
            for tensor in (*case.model.parameters(), case.model.shift):
                tensor.add_(torch.randn_like(tensor))
        case.model.shift = torch.randn(4)  # a buffer that is replaced
        assert program_for(case) is first
        assert agrees(case)


def test_a_loss_with_settings_of_its_own_is_noticed() -> None:
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]), reduction="none")
    case = Case(nn.Linear(4, 3), small_batch(), loss)
    assert agrees(case)
    loss.label_smoothing = 0.3
    assert agrees(case)


def test_every_form_loss_and_forward_has_a_program_of_its_own() -> None:
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(1, 4))
    form = Form.of(small_batch())
    first = program_of(model, LOSS, None, form)
    assert program_of(model, nn.CrossEntropyLoss(reduction="none"), None, form) is not first
    assert program_of(model, LOSS, lambda model, batch: (model(batch[0]), batch[1]), form) is not first
    assert program_of(model, LOSS, None, Form.of((torch.zeros(1, 2, 2), torch.zeros(1, dtype=torch.long)))) is not first
    assert program_of(model, LOSS, None, form) is first


def test_only_so_many_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_MOST_PROGRAMS", 3)
    model = nn.AdaptiveAvgPool1d(4)
    model = nn.Sequential(model, nn.Linear(4, 3))
    forms = [Form.of((torch.zeros(1, 4 + length), torch.zeros(1, dtype=torch.long))) for length in range(5)]
    for form in forms:
        program_of(model, LOSS, None, form)
    assert len(programs._programs[model]) <= 3
    kept = program_of(model, LOSS, None, forms[-1])
    assert program_of(model, LOSS, None, forms[-1]) is kept


def test_that_a_model_cannot_be_traced_is_found_once() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            SEEN.append(x)
            return self.out(x if x.sum() > 0 else -x)

    model, form = Branching(), Form.of(small_batch())
    SEEN.clear()
    reasons = []
    for _ in range(3):
        with pytest.raises(NotTraceable, match="a value decides what is computed") as found:
            program_of(model, LOSS, None, form)
        reasons.append(found.value)
    assert len(SEEN) == 1
    assert reasons[0] is reasons[2]
    SEEN.clear()


def test_a_model_that_nobody_uses_is_forgotten() -> None:
    model = nn.Linear(4, 3)
    mean(Case(model, small_batch()))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


# Constants.


class WithConstants(nn.Module):
    """Tensors that are neither parameters nor buffers: an attribute, one of a list, and made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.scale, self.more = nn.Linear(4, 3), torch.tensor([1.0, 2.0, 3.0, 4.0]), [torch.tensor(0.5)]

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x * self.scale + self.more[0] * torch.tensor(2.0)) * CLOSED.to(x.dtype) + torch.arange(4))


CLOSED = torch.tensor(1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_that_a_forward_brings_along_are_constants_of_the_program(dtype: torch.dtype) -> None:
    torch.manual_seed(10)
    model = WithConstants()
    case = Case(model, small_batch())
    case = case.double() if dtype == torch.float64 else case
    program = program_for(case)
    assert any(node.op == "get_attr" for node in program.module.graph.nodes)
    assert agrees(case)
    assert mean(case).abs().max() > 0


def test_tracing_takes_a_model_on_its_own() -> None:
    whole = Whole(nn.Linear(4, 3), LOSS, None)
    program = traced(whole, Form.of(small_batch()))
    assert len(program.given) == 2
    assert len(program.leaves) == 2
    assert program.dimension == 15
    with pytest.raises(InvalidParameter, match="no parameter that requires a gradient"):
        traced(Whole(nn.Linear(4, 3).requires_grad_(False), LOSS, None), Form.of(small_batch()))
    with pytest.raises(InvalidParameter, match="does not depend on a trainable parameter"):
        traced(Whole(nn.Linear(4, 3), lambda outputs, targets: targets * 1.0, None), Form.of(small_batch()))


class Pictures(nn.Module):
    """A convolution and attention, in passes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.relu(self.convolution(x)).flatten(2).unsqueeze(1)
        return self.head(nn.functional.scaled_dot_product_attention(z, z, z).flatten(1))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("traced_before", [False, True])
def test_the_layout_of_weights_changes_no_gradient(traced_before: bool, packed: bool) -> None:
    torch.manual_seed(0)
    batch, loss = (torch.randn(3, 3, 6, 6), torch.tensor([0, 1, 2])), nn.CrossEntropyLoss(reduction="none")
    plain, model = Pictures(), Pictures()
    model.load_state_dict(plain.state_dict())

    def mean(of: nn.Module) -> Tensor:
        return clipped_gradients(of, loss, batch, clip=L2(1.0), batch_size=1, packed=packed).mean.clone()

    if traced_before:
        mean(model)
    model.to(memory_format=torch.channels_last)
    assert torch.equal(mean(model), mean(plain))
