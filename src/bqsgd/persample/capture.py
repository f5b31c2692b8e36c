"""One forward and one backward that stops at layer outputs: what every layer saw and the error at its output.

Hooks live only inside the call. The autograd graph is then searched for the parameters: a parameter that the graph uses
in any other way than through the recorded layers is not guessed at, the model goes through `torch.func` instead.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from bqsgd.errors import InvalidParameter
from bqsgd.persample.factors import Factor
from bqsgd.persample.functional import LossFunction, check_losses
from bqsgd.persample.rowwise import NotRowWise, Pass, RowWise, Unseeing
from bqsgd.persample.rules import RULES, has_batch_first, merge


class NoRule(Exception):
    """A model, or its use in this forward, that the fast rules do not cover; the text says why."""


@dataclass(frozen=True)
class Use:
    """One call of one layer."""

    layer: nn.Module
    input: Tensor
    version: int
    edge: GradientEdge
    shape: torch.Size


def ruled_layers(model: nn.Module) -> list[nn.Module]:
    """Layers with trainable parameters of their own, all of which have a rule; otherwise NoRule."""
    layers = []
    for layer in model.modules():
        own = {name for name, parameter in layer.named_parameters(recurse=False) if parameter.requires_grad}
        if not own:
            continue
        plain = own <= {"weight", "bias"} and "forward" not in vars(layer)
        if type(layer) not in RULES or not plain:
            raise NoRule(f"{type(layer).__name__} has no fast rule")
        layers.append(layer)
    return layers


@contextmanager
def _recording(layers: list[nn.Module]) -> Iterator[list[Use]]:
    uses: list[Use] = []
    trouble: list[str] = []

    def record(layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        given = [*arguments, *named.values()]
        if len(given) != 1 or not isinstance(given[0], Tensor) or not isinstance(output, Tensor):
            trouble.append(f"{type(layer).__name__} was called with more than one tensor")
        elif output.requires_grad:
            uses.append(Use(layer, given[0].detach(), given[0]._version, _edge(output), output.shape))

    hooks = [layer.register_forward_hook(record, prepend=True, with_kwargs=True) for layer in layers]
    try:
        yield uses
    finally:
        for hook in hooks:
            hook.remove()
    if trouble:
        raise NoRule(trouble[0])


def _edge(output: Tensor) -> GradientEdge:
    """Where the error arrives: the edge, not the tensor, because an activation in place would move the tensor.

    A linear layer over sequences returns a view of its product, and a change in place bypasses the view: take the base.
    """
    base = output._base
    whole = base is not None and base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous()
    return get_gradient_edge(base if base is not None and whole else output)


def capture(
    model: nn.Module, loss_fn: LossFunction, inputs: Tensor, targets: Tensor, parameters: list[nn.Parameter]
) -> list[Factor | None]:
    """The per-sample gradients of each parameter, None for one the loss does not depend on.

    Raises:
        NoRule: the fast rules do not cover this model.
    """
    with torch.enable_grad():
        try:
            with _recording(ruled_layers(model)) as uses, Unseeing():  # type: ignore[no-untyped-call]
                losses = check_losses(loss_fn(model(inputs), targets), len(inputs))
        except NotRowWise as reason:
            raise NoRule(str(reason)) from reason
        uses = _account_for(parameters, uses, _graph(losses), len(inputs))
        errors = torch.autograd.grad(losses, [use.edge for use in uses], torch.ones_like(losses), allow_unused=True)
    with torch.no_grad():
        return _factors(parameters, uses, errors, len(inputs))


def capture_row_wise(
    model: nn.Module,
    inputs: Tensor,
    parameters: list[nn.Parameter],
    errors_at: Callable[[Tensor], Tensor],
    *,
    live: int | None = None,
) -> list[Factor | None]:
    """The same with row-wise operations alone, from the errors at the model's outputs that `errors_at` returns.

    live: the first rows, which hold samples; the others are filled up and need not be computed.

    Raises:
        NoRule: the fast rules do not cover this model.
        NotRowWise: the model needs other operations.
    """
    weights = {values.untyped_storage().data_ptr() for values in (*model.parameters(), *model.buffers())}
    known = Pass(len(inputs), live, weights)
    with torch.enable_grad():
        with _recording(ruled_layers(model)) as uses, RowWise(known):
            outputs = model(inputs)
        if not isinstance(outputs, Tensor) or outputs.dim() == 0 or len(outputs) != len(inputs):
            raise NotRowWise("the model's output is not one tensor with a row per sample")
        if outputs.grad_fn is None:
            raise NotRowWise("the model's output depends on no trainable parameter")
        uses = _account_for(parameters, uses, outputs.grad_fn, len(inputs))
        start = errors_at(outputs.detach())
        with RowWise(known):
            errors = torch.autograd.grad(outputs, [use.edge for use in uses], start, allow_unused=True)
    with torch.no_grad():
        return _factors(parameters, uses, errors, len(inputs))


def loss_errors(loss_fn: LossFunction, outputs: Tensor, targets: Tensor) -> Tensor:
    """The gradient of each sample's loss with respect to its row of outputs.

    Raises:
        NotRowWise: the loss uses parameters of its own, or looks at values.
    """
    with torch.enable_grad():
        outputs = outputs.detach().requires_grad_()
        with Unseeing():  # type: ignore[no-untyped-call]
            losses = check_losses(loss_fn(outputs, targets), len(outputs))
        leaves = _leaves(_graph(losses))[0]
        if set(leaves) - {id(outputs)}:
            raise NotRowWise("the loss uses parameters beside the model's outputs")
        (errors,) = torch.autograd.grad(losses, outputs, torch.ones_like(losses), allow_unused=True)
    return torch.zeros_like(outputs) if errors is None else errors


def _graph(values: Tensor) -> Node:
    if values.grad_fn is None:
        raise InvalidParameter("the loss does not depend on a trainable parameter")
    return values.grad_fn


def _leaves(root: Node) -> tuple[Counter[int], set[Node]]:
    """How often each leaf tensor, by its id, is used in a graph, and all nodes of the graph."""
    seen, stack, found = {root}, [root], Counter[int]()
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None:
                continue
            if (leaf := getattr(node, "variable", None)) is not None:
                found[id(leaf)] += 1
            if node not in seen:
                seen.add(node)
                stack.append(node)
    return found, seen


def _account_for(parameters: list[nn.Parameter], uses: list[Use], root: Node, batch: int) -> list[Use]:
    """The uses that reach the loss, after checking that they are all the graph's uses of the parameters."""
    found, seen = _leaves(root)
    uses = [use for use in uses if use.edge.node in seen]
    if any(use.input._version != use.version for use in uses):
        raise NoRule("the input of a layer was changed in place")
    recorded = Counter(id(p) for use in uses for p in use.layer.parameters(recurse=False))
    if any(found[id(p)] != recorded[id(p)] for p in parameters):
        raise NoRule("a parameter is used outside the layer that holds it")
    for use in uses:
        if not has_batch_first(use.layer, use.input, batch):
            shape = tuple(use.input.shape)
            raise NoRule(f"{type(use.layer).__name__} saw {shape}, which is not {batch} samples")
    return uses


def _factors(
    parameters: list[nn.Parameter], uses: list[Use], errors: tuple[Tensor | None, ...], batch: int
) -> list[Factor | None]:
    made: dict[int, list[Factor]] = defaultdict(list)
    for use, error in zip(uses, errors, strict=True):
        if error is None:
            continue
        seen = use.input if not use.input.is_floating_point() else working(use.input)
        for parameter, factor in RULES[type(use.layer)](use.layer, seen, working(error).reshape(use.shape)):
            if parameter is not None and parameter.requires_grad:
                made[id(parameter)].append(factor())
    return [merge(made[id(p)], batch=batch, coordinates=p.numel()) if id(p) in made else None for p in parameters]


def working(values: Tensor) -> Tensor:
    """float64 as it is, everything narrower as float32."""
    return values if values.dtype == torch.float64 else values.float()
