"""The program of one sample, run over lanes: many samples at once, with loops in which no operation crosses a lane.

Every node of the program has a rule (`rules`) that does to all lanes what the node does to one sample. So what a sample
adds does not depend on its lane, on the others or on how many there are; nothing is assumed of torch's kernels. A
program with an operation that has no rule is run by `rows` instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from bqsgd._src.persample import program as programs
from bqsgd._src.persample.factors import SCRATCH_BYTES, Piece, factor_of, nodes_of
from bqsgd._src.persample.program import Program, Whole, shape_of
from bqsgd._src.persample.rules import KEEP_LEAVES, READ_LEAVES, Array, Leaf, NotLanes, array_of, rule_of
from bqsgd._src.runtime.generators import generators_kept
from bqsgd._src.runtime.vectors import LANES

FEWEST_LANES, MOST_LANES = 272, 4112
"""Samples at a time: as many as keep a layer's activations in the caches, and not a multiple of 128 (below)."""
ENTRIES = 1 << 19
"""Numbers that a layer's activations come to, about."""


class LanesRoad:
    """Runs a program over lanes.

    Raises:
        NotLanes: an operation has no rule, or a value is not float32 on the CPU.
    """

    def __init__(self, program: Program) -> None:
        self._gradients, self.draws, self.assumes = program.gradients, program.draws, ""
        self._prelude = program.prelude()
        wanted = [node for gradient in program.gradients if gradient is not None for node in nodes_of(gradient)]
        body = _decomposed(program.body(wanted))
        _check_sizes(program)
        largest = max((shape_of(node).numel() for node in wanted if node not in program.leaves), default=1)
        self._most = max(FEWEST_LANES, min(MOST_LANES, ENTRIES // max(1, largest)))
        constants = [node for node in body.graph.nodes if node.op == "get_attr"]
        self._constants = [_fixed(operator.attrgetter(str(node.target))(body)) for node in constants]
        self._function = _in_rules(body, len(program.leaves), constants)
        shared, leaves = (
            [torch.zeros(shape_of(node), dtype=node.meta["val"].dtype) for node in nodes]
            for nodes in (program.shared, program.leaves)
        )
        if any(node.meta["val"].device.type != "cpu" for node in (*program.shared, *program.leaves)):
            raise NotLanes("the loops run on the CPU")
        try:  # what a rule cannot take it refuses here, whatever the data are
            with generators_kept():
                self._run(shared, leaves)
        except NotLanes:
            raise
        except Exception as error:  # a form of arguments that no rule foresees
            raise NotLanes(f"{type(error).__name__}: {error}") from error

    def passes(self, whole: Whole, leaves: Sequence[Tensor]) -> Iterator[tuple[int, int, list[Piece]]]:
        """(samples, how many of them were lost, pieces of their gradients), some hundred samples at a time."""
        with torch.no_grad():
            shared = self._prelude(*whole.given())
        for part in _parts(len(leaves[0]), self._most):
            outputs = iter(self._run(shared, [leaf[part] for leaf in leaves]))
            pieces = [
                Piece(slice(n, n + 1), factor_of(gradient, outputs))
                for n, gradient in enumerate(self._gradients)
                if gradient is not None
            ]
            yield part.stop - part.start, 0, pieces

    def _run(self, shared: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Any]:
        samples = len(leaves[0])
        lanes = _lanes_for(samples)
        rows = [Leaf(leaf.detach().contiguous().flatten(1) if leaf.dim() > 1 else leaf[:, None].contiguous(),
                     (1, *leaf.shape[1:]), lanes) for leaf in leaves]  # fmt: skip
        with np.errstate(all="ignore"):
            values = self._function(*self._constants, *map(_fixed, shared), *rows)
        return [_samples_first(value, samples, lanes) for value in values]


def _in_rules(body: fx.GraphModule, leaves: int, constants: Sequence[fx.Node]) -> Callable[..., list[Any]]:
    """(constants, shared values, leaves) -> outputs: the body with the rule of each operation in its place.

    torch writes it as one Python function, which lets go of every value after its last use.
    """
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in constants}
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    copies |= {node: graph.placeholder(node.name) for node in inputs}
    as_given = set(inputs[len(inputs) - leaves :])  # nodes whose value may be a leaf
    arrays: dict[fx.Node, fx.Node] = {}

    def array(node: fx.Node) -> fx.Node:
        if node not in as_given:
            return copies[node]
        if node not in arrays:  # a leaf is spread over lanes once, however often it is read
            arrays[node] = graph.call_function(array_of, (copies[node],))
        return arrays[node]

    for node in body.graph.nodes:
        if node.op == "output":
            graph.output([copies[output] for output in node.args[0]])
        elif node.op == "call_function":
            reads_leaves = node.target in READ_LEAVES
            arguments, named = (
                fx.node.map_arg(argument, copies.__getitem__ if reads_leaves else array)
                for argument in (node.args, node.kwargs)
            )
            copies[node] = graph.call_function(rule_of(node.target) or node.target, arguments, named)
            if node.target in KEEP_LEAVES and node.args[0] in as_given:
                as_given.add(node)
    return fx.GraphModule(nn.Module(), graph).forward  # type: ignore[return-value]


def _lanes_for(samples: int) -> int:
    """Whole vectors; entries a multiple of 512 bytes apart would share a few lines of a core's nearest cache."""
    lanes = -(-samples // LANES) * LANES
    return lanes + LANES if lanes % 128 == 0 else lanes


def _parts(samples: int, most: int) -> list[slice]:
    count = -(-samples // most)
    edges = [samples * n // count for n in range(count + 1)] if count else [0]
    return [slice(low, high) for low, high in pairwise(edges)]


def _fixed(tensor: Tensor) -> Array:
    """A value that is the same for all samples, in one lane."""
    if tensor.is_floating_point() and tensor.dtype != torch.float32:
        raise NotLanes(f"the loops take float32, not {tensor.dtype}")
    return tensor.detach().numpy()[..., None]


def _samples_first(value: Any, samples: int, lanes: int) -> Tensor:
    """(samples, ...) of an array, without a copy; contiguous rows stay as they are."""
    if isinstance(value, Leaf):
        return value.rows.view(samples, *value.shape)
    spread = np.broadcast_to(value, (*value.shape[:-1], lanes)) if value.shape[-1] != lanes else value
    if not spread.flags.writeable or spread.dtype == np.bool_:
        spread = spread.copy()
    return torch.from_numpy(spread).movedim(-1, 0)[:samples]


def _check_sizes(program: Program) -> None:
    """Gradients that are sums over positions are built for a vector of samples at a time, which must fit."""
    for gradient in program.gradients:
        summed = isinstance(gradient, programs.Convolution) or (
            isinstance(gradient, programs.Product) and gradient.positions > 1
        )
        if gradient is not None and summed and 4 * LANES * shape_of(gradient.node).numel() > SCRATCH_BYTES:
            raise NotLanes("a layer's gradients of 16 samples do not fit into the scratch memory")


def _decomposed(module: fx.GraphModule) -> fx.GraphModule:
    """The same program with operations that have no rule replaced by simpler ones, as torch defines them."""
    missing = _without_rule(module)
    if missing:
        inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
        simpler: Any = get_decompositions([target for target in missing if isinstance(target, torch._ops.OpOverload)])
        if all(target in simpler for target in missing):
            module = make_fx(module, decomposition_table=simpler, tracing_mode="real")(*inputs)
            module.graph.eliminate_dead_code()
            missing = _without_rule(module)
    if missing:
        raise NotLanes(f"{missing[0]} has no rule")
    return module


def _without_rule(module: fx.GraphModule) -> list[Any]:
    called = [node.target for node in module.graph.nodes if node.op == "call_function"]
    return [target for target in called if target is not operator.getitem and rule_of(target) is None]
