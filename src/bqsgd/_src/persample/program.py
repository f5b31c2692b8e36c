"""One sample's program: the gradient of one sample's loss, traced once into a pure graph of aten operations.

The program is a function of copies of the parameters and buffers and of one sample (a batch of one). It is traced on a
made-up sample of the same form, in torch's fake mode, where tensors have shapes and no values. So the user's code never
meets data: what it writes (parameters, buffers, `.grad`, attributes) it writes to copies, once, and of made-up values.
What is left is a graph in which nothing is written and nothing but one sample is read. Running it for many samples
cannot mix them, because the graph has no second sample to name: claim 8 of `docs/accounting.md`.

A program that cannot be traced (it looks at values, draws from Python's own generators) is run by `alone` instead.
"""

from __future__ import annotations

import copy
import logging
import operator
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.models import device_of
from bqsgd._src.runtime.generators import alone, generators_kept, states
from bqsgd._src.runtime.modes import Autocast, full_precision

aten = torch.ops.aten
LossFunction = Callable[[Any, Any], Tensor]
"""loss_fn(outputs, targets) -> one loss per sample, shape (batch,)."""
Forward = Callable[[nn.Module, Any], tuple[Any, Any]]
"""(model, batch as the collate_fn made it) -> (outputs, targets), which the loss takes."""


class NotTraceable(Exception):
    """A program that torch cannot trace; the text says why."""


@dataclass(frozen=True)
class Form:
    """Structure, shapes and types of one sample, without its values. Shapes leave out the sample dimension."""

    structure: TreeSpec
    leaves: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]

    @classmethod
    def of(cls, batch: Any, device: torch.device | None = None) -> Form:
        """The form of the samples of a batch, whose tensors all have the sample dimension first; on another device,
        if one is given."""
        leaves, structure = tree_flatten(batch)
        return cls(structure, tuple((leaf.shape[1:], leaf.dtype, device or leaf.device) for leaf in leaves))

    @property
    def shapes(self) -> list[torch.Size]:
        """Of each leaf."""
        return [shape for shape, _, _ in self.leaves]

    def zeros(self, rows: int) -> list[Tensor]:
        """The leaves of `rows` made-up samples."""
        return [torch.zeros((rows, *shape), dtype=dtype, device=device) for shape, dtype, device in self.leaves]

    def __hash__(self) -> int:
        return hash((str(self.structure), self.leaves))


def _in_order(tensor: Tensor) -> Tensor:
    return tensor.contiguous() if tensor.layout is torch.strided else tensor


class Whole(nn.Module):
    """Model, forward and loss of a batch of one as one module, so that its parameters and buffers can be swapped."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, forward: Forward | None, autocast: Autocast | None = None
    ) -> None:
        super().__init__()
        self.model = model
        # Kept in a tuple so that nn.Module does not register a loss module's parameters as ours.
        self._how = (loss_fn, forward or inputs_then_target)
        self._autocast = autocast or Autocast(device_of(model).type)
        self._known = {id(parameter) for parameter in model.parameters()}

    def forward(self, *leaves: Tensor, structure: TreeSpec, trained: list[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradient of the sum of the losses for each trained tensor."""
        loss_fn, forward = self._how
        with self._autocast.entered():  # gradients are taken outside of it, as torch advises
            outputs, targets = forward(self.model, tree_unflatten(list(leaves), structure))
            losses = check_losses(loss_fn(outputs, targets), len(leaves[0]))
        if losses.grad_fn is None:
            raise InvalidParameter("the loss does not depend on a trainable parameter")
        if (_leaves(losses.grad_fn) - {id(value) for value in trained}) & self._known:
            raise InvalidParameter(
                "the model reaches a trained parameter through a function or a list that holds it, past the module, "
                "and would not train it: write self.layer(x) or self.weight in a forward, and no lambda that holds self"
            )
        return torch.autograd.grad(losses.sum(), trained, allow_unused=True)

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The trainable parameters by name, and all other parameters and buffers. Contiguous, however the model keeps
        them (channels_last): a program is laid out for one layout."""
        trained = {name: _in_order(p.detach()) for name, p in self.named_parameters() if p.requires_grad}
        held = {name: _in_order(p.detach()) for name, p in self.named_parameters() if not p.requires_grad}
        return trained, held | {name: _in_order(buffer) for name, buffer in self.named_buffers()}

    def given(self) -> list[Tensor]:
        """All of them, in the order in which a program takes them."""
        trained, held = self.tensors()
        return [*trained.values(), *held.values()]

    def randomised(self) -> list[Tensor]:
        """The same with random parameters: weights that hide a difference, such as zeros, must pass no test."""
        buffers, generator = dict(self.named_buffers()), torch.Generator().manual_seed(0)
        trained, held = self.tensors()
        values = []
        for name, tensor in (trained | held).items():
            if name not in buffers and tensor.is_floating_point():
                scale = max(1, tensor[0].numel() if tensor.dim() > 1 else 1) ** -0.5
                tensor = (torch.randn(tensor.shape, generator=generator) * scale).to(tensor.device, tensor.dtype)
            values.append(tensor)
        return values

    def copied(self) -> Whole:
        """A copy that shares nothing with the model: whatever is written to it, whenever, stays in it."""
        try:
            twin = copy.deepcopy(self)
            twin._known |= {id(parameter) for parameter in twin.parameters()}
            return twin
        except Exception as error:
            raise InvalidParameter(
                f"the model cannot be copied, and its forward must run on a copy: {type(error).__name__}: {error}"
            ) from error

    def gradients(
        self, trained: dict[str, Tensor], held: dict[str, Tensor], leaves: Sequence[Tensor], structure: TreeSpec
    ) -> tuple[Tensor | None, ...]:
        """The gradient of the sum of the losses for each trained tensor; None where the loss does not use it.

        Code of the user's may run while gradients are computed (a hook, a function with its own backward), so the
        tensors stay swapped until then.
        """
        values = {name: tensor.detach().requires_grad_() for name, tensor in trained.items()}
        named = {"structure": structure, "trained": list(values.values())}
        with torch.enable_grad():
            gradients: tuple[Tensor | None, ...] = functional_call(self, {**held, **values}, tuple(leaves), named)
        return gradients


def _leaves(root: Any) -> set[int]:
    """The ids of the tensors at which the gradients of a graph arrive."""
    seen, waiting, found = {root}, [root], set[int]()
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
                if hasattr(node, "variable"):
                    found.add(id(node.variable))
    return found


def inputs_then_target(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """model(every input in turn), and the last element of the batch."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        kind = "Tensor" if isinstance(batch, Tensor) else type(batch).__name__
        raise InvalidParameter(
            f"a batch is a {kind}, not (inputs..., targets): say what the loss takes, for example "
            'forward=lambda model, batch: (model(batch["ids"], batch["mask"]), batch["labels"])'
        )
    return model(*batch[:-1]), batch[-1]


def check_losses(losses: Any, batch: int) -> Tensor:
    """The losses, if there is exactly one per sample."""
    if not isinstance(losses, Tensor) or losses.shape != (batch,):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise InvalidParameter(
            f"loss_fn must return one loss per sample, shape ({batch},), got {got}; use reduction='none', sum or "
            "average what is left of each sample; write .squeeze(1) for .squeeze(), which drops a batch of one too"
        )
    return losses


def fails_on_made_up(error: BaseException, shapes: Iterable[Sequence[int]]) -> InvalidParameter:
    """What to raise where model or loss fail on a made-up sample: then no sample of these shapes could go through."""
    return InvalidParameter(
        f"the model or the loss fails on samples of the shapes {', '.join(str(tuple(shape)) for shape in shapes)}, so "
        f"nothing was spent: {type(error).__name__}: {' '.join(str(error).split())[:500]}. (Samples go through one "
        "at a time, as batches of one: a .squeeze() in the model or the loss then drops the batch dimension as well; "
        "write .squeeze(1) or .flatten(1).)"
    )


def refuse_mixing(model: nn.Module) -> None:
    """Raise for a layer that is meant to see a whole batch: fed one sample at a time it would learn something else."""
    for name, layer in model.named_modules():
        reason = None
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None):
            reason = (
                f"use nn.GroupNorm(num_groups, {layer.num_features}) instead; in a frozen backbone keep it in "
                "evaluation mode, with .eval() after every model.train()"
            )
        elif isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats:
            reason = "set track_running_stats=False or use nn.GroupNorm"
        elif isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.scale_grad_by_freq:
            reason = "set scale_grad_by_freq=False: it counts over the whole batch"
        elif isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            reason = "set max_norm=None: it rewrites the rows that the batch looks up"
        if reason:
            raise InvalidParameter(f"layer {name or 'model'!r} ({type(layer).__name__}) mixes samples; {reason}")


# How one parameter's gradient leaves the program. Every gradient has a dense node; some are also known as products of
# smaller tensors, from which norms and clipped sums can be had without building the gradient.


@dataclass(frozen=True, eq=False)
class Gradient:
    """The gradient as the program computes it."""

    node: fx.Node


@dataclass(frozen=True, eq=False)
class Product(Gradient):
    """gradient[o, i] = sum over positions p of e[p, o] a[p, i]; one pair of nodes for each use of the parameter."""

    pairs: tuple[tuple[fx.Node, fx.Node], ...]

    @property
    def positions(self) -> int:
        """Positions of all uses together."""
        return sum(int(shape_of(e)[0]) for e, _ in self.pairs)


@dataclass(frozen=True)
class Geometry:
    """Of a convolution; `padding` is zeros on both sides of every axis, last axis first, as `F.pad` wants them."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int

    def padded(self, space: Sequence[int]) -> list[int]:
        sides = list(reversed(self.padding))
        return [size + sides[2 * axis] + sides[2 * axis + 1] for axis, size in enumerate(space)]


@dataclass(frozen=True, eq=False)
class Convolution(Gradient):
    """The weights of a convolution of `a` whose outputs have the errors `e`, both with the batch of one in front."""

    a: fx.Node
    e: fx.Node
    geometry: Geometry


@dataclass(frozen=True, eq=False)
class Table(Gradient):
    """Row index[p] of a table of `rows` rows gets e[p]; look-ups of row `padding` count for nothing."""

    index: fx.Node
    e: fx.Node
    rows: int
    padding: int


def shape_of(node: fx.Node) -> torch.Size:
    """The shape of a node's value in the program of one sample."""
    return node.meta["val"].shape  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Program:
    """The traced program of one sample.

    module: its whole graph.
    given: placeholders of the trained tensors and of the tensors held fixed.
    leaves: placeholders of the sample's tensors, each with a batch dimension of 1.
    shared: nodes that depend on no sample and are read by nodes that do; computed once for all samples.
    gradients: of each trained tensor; None where the loss does not use it.
    draws: whether it draws random numbers.
    """

    module: fx.GraphModule
    given: list[fx.Node]
    leaves: list[fx.Node]
    shared: list[fx.Node]
    gradients: list[Gradient | None]
    draws: bool

    def prelude(self) -> fx.GraphModule:
        """(given) -> shared."""
        return extracted(self.module, self.given, self.shared)

    def body(self, outputs: Sequence[fx.Node]) -> fx.GraphModule:
        """(shared, leaves) -> outputs."""
        return extracted(self.module, [*self.shared, *self.leaves], outputs)

    @property
    def dimension(self) -> int:
        """Coordinates of a gradient that the loss uses."""
        return sum(shape_of(gradient.node).numel() for gradient in self.gradients if gradient is not None)


def extracted(module: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.GraphModule:
    """The part of a graph that computes `outputs` from `inputs`, with the inputs as its placeholders."""
    needed, stack = set(inputs), list(outputs)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    graph, copies = fx.Graph(), {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = node.meta
    for node in module.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in outputs])
    return fx.GraphModule(module, graph)


def side_by_side(module: fx.GraphModule, shared: int, samples: int) -> fx.GraphModule:
    """A body for several samples: (shared, leaves of each sample) -> the outputs of each sample.

    Every operation stays an operation on one sample and is called once for each of them before the next operation is.
    So no operation sees two samples, and the weights it reads are still in the cache for the second one.
    """
    graph = fx.Graph()
    copies: list[dict[fx.Node, fx.Node]] = [{} for _ in range(samples)]
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]

    common = {node: graph.placeholder(node.name) for node in placeholders[:shared]}
    for number, own in enumerate(copies):
        own.update(common)
        own.update({node: graph.placeholder(f"{node.name}_of_{number}") for node in placeholders[shared:]})
    outputs: list[fx.Node] = []
    for node in module.graph.nodes:
        for own in copies:
            if node.op == "output":
                outputs += [own[output] for output in node.args[0]]
            elif node.op != "placeholder":
                own[node] = graph.node_copy(node, own.__getitem__)
    graph.output(outputs)
    return fx.GraphModule(module, graph)


_programs: WeakKeyDictionary[nn.Module, dict[object, Program | NotTraceable]] = WeakKeyDictionary()
_MOST_PROGRAMS = 256
"""Programs kept for one model: a data set with more forms than this is traced again."""


def program_of(
    model: nn.Module,
    loss_fn: LossFunction,
    forward: Forward | None,
    form: Form,
    autocast: Autocast | None = None,
    *,
    fused: bool = False,
) -> Program:
    """The program of one sample of this form, traced when it is first asked for and after the model has changed.

    fused: attention as one operation of the processor's, for passes of one sample: `vmap` and other devices have none.

    Raises:
        NotTraceable: torch cannot trace it.
        InvalidParameter: the model mixes samples by design, or the loss is not one per sample.
    """
    refuse_mixing(model)
    kept = _programs.setdefault(model, {})
    parts = (part for part in (model, loss_fn, forward) if isinstance(part, nn.Module))
    question = (_same(loss_fn), _same(forward), form, autocast, fused, *map(made_of, parts))
    if question not in kept:
        if len(kept) >= _MOST_PROGRAMS:
            kept.clear()
        try:
            kept[question] = traced(Whole(model, loss_fn, forward, autocast), form, fused=fused)
        except NotTraceable as reason:
            kept[question] = reason
    found = kept[question]
    if isinstance(found, NotTraceable):
        raise found
    return found


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_REGISTERED = ("_parameters", "_buffers", "_modules", *_HOOKS)


def made_of(model: nn.Module) -> object:
    """What a program can change of a model in mid-training, and tracing would miss: layers, modes, hooks, attributes.

    Nothing private rests on this: a stale program is still a program of one sample. It keeps the model that is trained
    the model that the user sees.
    """
    return tuple(
        (
            id(layer),
            type(layer),
            tuple(_same(hook) for kind in _HOOKS for hook in getattr(layer, kind, {}).values()),
            tuple((name, _content(value)) for name, value in vars(layer).items() if name not in _REGISTERED),
            tuple(value.requires_grad for value in layer._parameters.values() if value is not None),
        )
        for layer in model.modules()
    )


def _content(value: Any, depth: int = 4) -> object:
    """What an attribute holds, as far as a program could be made of it; a tensor in it is a constant of the program."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, dict) and depth:
        return tuple((str(name), _content(each, depth - 1)) for name, each in value.items())
    if isinstance(value, (list, tuple, set)) and depth:
        return tuple(_content(each, depth - 1) for each in value)
    if callable(value) or not hasattr(value, "__dict__") or not depth:
        return _same(value)
    return type(value), _content(vars(value), depth - 1)


def _same(thing: Any) -> object:
    """What tells this object from others, and does not keep it alive: it may hold the model itself."""
    try:
        found: object = weakref.ref(thing)
        hash(found)
    except TypeError:
        found = id(thing)
    return found


def traced(whole: Whole, form: Form, *, fused: bool = False) -> Program:
    """Trace the program of one sample.

    Raises:
        NotTraceable: torch cannot trace it.
        InvalidParameter: the loss is not one per sample, or uses no trainable parameter.
    """
    trained, held = whole.tensors()
    if not trained:
        raise InvalidParameter("model has no parameter that requires a gradient")
    own = whole.copied()

    def gradients(values: list[Tensor], others: list[Tensor], leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
        named = dict(zip(trained, values, strict=True)), dict(zip(held, others, strict=True))
        return own.gradients(*named, leaves, form.structure)

    arguments = list(trained.values()), list(held.values()), form.zeros(1)
    with alone, generators_kept():
        # Other threads draw too, such as Flower's heartbeat. A model that draws does so in every attempt.
        for _ in range(_ATTEMPTS):
            before = states()
            try:
                with full_precision(), plain_operations(own, fused=fused):
                    module = _pure(_graph_of(gradients, *arguments), arguments)
            except InvalidParameter:
                raise
            except Exception as error:
                reason = _INSTEAD if "DataDependent" in type(error).__name__ else " ".join(str(error).split())[:300]
                raise NotTraceable(f"{_line_of(error)}{type(error).__name__}: {reason}") from error
            if states() == before:
                break
        else:
            raise NotTraceable("it draws from the generators of Python or NumPy; draw with torch.rand, torch.randn")
    return _program(module, len(trained) + len(held))


_ATTEMPTS = 3
_INSTEAD = "a value decides what is computed; write torch.where, or a product with a mask, for if, .item() and x[mask]"
"""What to change in a model that looks at values."""


def _line_of(error: BaseException) -> str:
    """The last line of code on the way to an error that is neither Python's, nor torch's, nor ours."""
    apart = tuple(str(Path(file).parent) for file in (torch.__file__, __file__))
    python = str(Path(warnings.__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(apart) and ("-packages" in frame.filename or python not in frame.filename):
            return f"`{frame.line}`, line {frame.lineno} of {Path(frame.filename).name}: "
    return ""


def _graph_of(function: Callable[..., Any], *arguments: Any) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)


@contextmanager
def plain_operations(model: nn.Module, *, fused: bool = False) -> Iterator[None]:
    """Trace layers as ordinary operations: no fused recurrent layers or encoder kernels, which choose what they compute
    by looking at values or have no derivative of one sample; and no fused attention unless asked for."""
    logger, fast = logging.getLogger("torch._subclasses.fake_tensor"), torch.backends.mha.get_fastpath_enabled()
    level = logger.level
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # These switches hold for the whole process, and other threads would take other kernels meanwhile.
        if any(isinstance(layer, nn.RNNBase) for layer in model.modules()):
            for flags in (torch.backends.mkldnn.flags, torch.backends.cudnn.flags):
                stack.enter_context(flags(enabled=False))  # type: ignore[operator]
        stack.enter_context(sdpa_kernel([SDPBackend.MATH, *[SDPBackend.FLASH_ATTENTION] * fused]))
        try:
            logger.setLevel(logging.CRITICAL)  # a model that cannot be traced is no news to the user
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            logger.setLevel(level)


def _is_change(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _pure(module: fx.GraphModule, arguments: tuple[Any, ...]) -> fx.GraphModule:
    """The same program without operations in place; what it would write to its own arguments is thrown away."""
    node: Any  # the arguments of a node may be anything
    if any(_is_change(node) for node in module.graph.nodes):
        flat = tree_flatten(arguments)[0]

        def unchanged(*values: Tensor) -> Any:
            return module(*tree_unflatten(list(values), tree_flatten(arguments)[1]))

        module = _graph_of(functionalize(unchanged), *flat)
        for node in reversed(list(module.graph.nodes)):
            if node.target is aten.copy_.default and node.args[0].op == "placeholder" and not node.users:
                module.graph.erase_node(node)
    if any(_is_change(node) for node in module.graph.nodes):
        raise NotTraceable("the model writes to memory that is not its own")
    for node in list(module.graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif node.target in _UNWRITTEN:  # what it would hold may be another sample's
            node.target = _UNWRITTEN[node.target]
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "memory_format"}
    return module


_UNWRITTEN = {
    aten.empty.memory_format: aten.zeros.default,
    aten.empty_like.default: aten.zeros_like.default,
    aten.new_empty.default: aten.new_zeros.default,
}
"""Operations that return memory as they find it, and what is run instead."""


_TURNS = (aten.t.default, aten.transpose.int)


def _program(module: fx.GraphModule, given: int) -> Program:
    nodes = list(module.graph.nodes)
    for node in nodes:
        if _has_symbols(node.meta.get("val")):
            raise NotTraceable(f"{node.target} reads a number or a length out of a tensor: {_INSTEAD}")
        _check_own(node)
    inputs = [node for node in nodes if node.op == "placeholder"]
    output = tree_flatten(nodes[-1].args[0], is_leaf=lambda value: value is None)[0]
    gradients = [None if node is None else _gradient(module.graph, node) for node in output]
    fixed = _fixed(module, inputs[:given])
    readers = [node for node in module.graph.nodes if node not in fixed]
    read = {source for node in readers for source in node.all_input_nodes if source in fixed}
    shared = [node for node in module.graph.nodes if node in read and isinstance(node.meta.get("val"), Tensor)]
    draws = any(_draws(node) for node in module.graph.nodes)
    return Program(module, inputs[:given], inputs[given:], shared, gradients, draws)


def _check_own(node: fx.Node) -> None:
    """Raise for an operation that may keep state from one sample to the next."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims"):
        raise NotTraceable(f"{node.target} may keep state: write it with torch's own operations")
    if node.kwargs.get("generator") is not None:
        raise NotTraceable(f"{node.target} draws from a generator of the model's own")


def _has_symbols(value: Any) -> bool:
    if isinstance(value, Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _draws(node: fx.Node) -> bool:
    if node.target is aten._scaled_dot_product_flash_attention_for_cpu.default:
        return any(node.args[3:4])  # the share that its dropout leaves out
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _fixed(module: fx.GraphModule, given: list[fx.Node]) -> set[fx.Node]:
    """The nodes whose values are the same for every sample."""
    found = set(given)
    for node in module.graph.nodes:
        source = node.op in ("call_function", "get_attr") and not _draws(node)
        if source and all(each in found for each in node.all_input_nodes):
            if node.op == "get_attr" and "val" not in node.meta:
                node.meta["val"] = operator.attrgetter(str(node.target))(module)
            found.add(node)
    return found


# Recognising products in the graph. A gradient that is not recognised stays dense: nothing rests on the list below but
# speed.


def _gradient(graph: fx.Graph, node: Any) -> Gradient:
    if (weights := _convolution(node)) is not None:
        return weights
    if node.target is aten.embedding_dense_backward.default:
        errors, index, rows, padding, scaled = node.args
        if not scaled:
            return Table(node, index, errors, int(rows), int(padding))
    pairs = _products(graph, node, False)
    return Gradient(node) if pairs is None else Product(node, tuple(pairs))


def _products(graph: fx.Graph, node: Any, turned: bool) -> list[tuple[fx.Node, fx.Node]] | None:
    """The pairs (e, a) whose products add up to a matrix, or to its transpose; None for anything else."""
    if shape_of(node).numel() == 0 or len(shape_of(node)) != 2:
        return None
    if node.target in _TURNS and (node.target is aten.t.default or {*node.args[1:]} in ({0, 1}, {-1, -2})):
        return _products(graph, node.args[0], not turned)
    if node.target is aten.add.Tensor and not node.kwargs and all(isinstance(each, fx.Node) for each in node.args):
        if any(shape_of(each) != shape_of(node) for each in node.args):
            return None
        left, right = (_products(graph, each, turned) for each in node.args)
        return None if left is None or right is None else left + right
    if node.target is not aten.mm.default:
        return None
    left, right = node.args
    with graph.inserting_before(node):
        across = graph.call_function(aten.t.default, (left,))
        across.meta["val"] = left.meta["val"].t()
    return [(right, across)] if turned else [(across, right)]


def _convolution(node: Any) -> Convolution | None:
    if node.target is not operator.getitem or node.args[1] != 1:
        return None
    whole = node.args[0]
    if whole.target is not aten.convolution_backward.default:
        return None
    error, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = whole.args
    if transposed or len(shape_of(x)) != len(shape_of(weight)):
        return None
    kernel = tuple(shape_of(weight)[2:])
    each = [tuple(values) * len(kernel) if len(values) == 1 else tuple(values) for values in (stride, dilation)]
    around = tuple(padding) * len(kernel) if len(padding) == 1 else tuple(padding)
    sides = tuple(side for size in reversed(around) for side in (size, size))
    return Convolution(node, x, error, Geometry(kernel, each[0], each[1], sides, int(groups)))
