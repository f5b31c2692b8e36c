"""The same program with its tensors laid out for speed: fewer views, and factors as torch's products read them fastest.

Values and the order of operations stay as they are. What moves is memory alone, and a view is a view of a sample's own
tensor still.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from bqsgd._src.persample.program import Program, shape_of
from bqsgd._src.runtime.threads import in_own_threads

aten = torch.ops.aten
_RESHAPES = (aten.view.default, aten._unsafe_view.default)
_VIEWS = {
    *_RESHAPES, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.select.int,
    aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
}  # fmt: skip
"""Operations that return a part of their input as it lies in memory."""
SMALL = 1 << 18
"""Entries up to which a transposed weight is laid out anew for each batch, which takes less time than one product."""

NARROW = 16
"""Columns of a product below which it is computed transposed: the kernels fill a vector along a column, and run two to
four times as fast where the columns are long. Adapters of low rank are such products."""


def prelude_of(program: Program) -> fx.GraphModule:
    """(given) -> shared, with small transposed matrices contiguous: products with few rows are up to three times as
    fast with them."""
    module = program.prelude()
    graph: Any = module.graph
    output = next(iter(reversed(graph.nodes)))

    def laid_out(node: fx.Node) -> fx.Node:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dim() != 2 or value.is_contiguous() or value.numel() > SMALL:
            return node
        return graph.call_function(aten.contiguous.default, (node,))  # type: ignore[no-any-return]

    with graph.inserting_before(output):
        output.args = ([laid_out(node) for node in output.args[0]],)
    module.recompile()
    return module


def with_fewer_views(body: fx.GraphModule, shared: int, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The body with one view in the place of a chain of them, with contiguous second factors of products by groups, and
    with contiguous outputs, which the loops read in place.

    inputs: of a made-up sample, the `shared` values first. They show how operations lay out what they return, which
    follows from shapes alone.
    """
    graph: Any = body.graph
    _transpose_narrow_products(graph)
    seen = _Layouts(body)
    in_own_threads(lambda _: seen.run(*inputs), 1)
    for node in graph.find_nodes(op="placeholder")[:shared]:
        seen.layouts.pop(node, None)  # the model's own tensors may lie elsewhere next time
    found: dict[fx.Node, tuple[fx.Node, Any]] = {}
    nothing: Any = (None, None)
    views: dict[object, fx.Node] = {}

    def read(node: fx.Node) -> fx.Node:
        """The value of a node in one view of what it is a part of."""
        base, value = found.get(node, (node, None))
        if base is node:
            return node
        how = list(value.shape), list(value.stride()), value.storage_offset()
        if (base, str(how)) not in views:
            with graph.inserting_after(base):
                views[base, str(how)] = graph.call_function(aten.as_strided.default, (base, *how))
                views[base, str(how)].meta = {"val": value}
        return views[base, str(how)]

    def contiguous(node: fx.Node) -> fx.Node:
        return graph.call_function(aten.contiguous.default, (node,))  # type: ignore[no-any-return]

    for node in list(graph.nodes):
        base, value = found.get(node.args[0], nothing) if node.args and isinstance(node.args[0], fx.Node) else nothing
        if value is not None and node.target in _VIEWS:
            try:
                found[node] = base, node.target(value, *node.args[1:], **node.kwargs)
                continue
            except RuntimeError:  # entries that a transposed product does not have beside each other
                node.target = aten.reshape.default
        if isinstance(value, (list, tuple)):
            found[node] = base, value[node.args[1]]
            continue
        node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), read)
        if node in seen.layouts:
            found[node] = node, seen.layouts[node]
        with graph.inserting_before(node):
            if node.op == "output":
                node.args = ([contiguous(value) for value in node.args[0]],)
            elif node.target is aten.bmm.default and node.args[1].meta["val"].stride(-1) != 1:
                node.args = node.args[0], contiguous(node.args[1])
    graph.eliminate_dead_code()
    body.recompile()
    return body


def _transpose_narrow_products(graph: Any) -> None:
    for node in list(graph.find_nodes(op="call_function", target=aten.mm.default)):
        rows, columns = shape_of(node)
        if columns >= NARROW or rows < NARROW:
            continue
        with graph.inserting_before(node):
            sides = [graph.call_function(aten.t.default, (side,)) for side in reversed(node.args)]
            product = graph.call_function(aten.mm.default, tuple(sides))
            turned = graph.call_function(aten.t.default, (product,))
        for new, like in zip((*sides, product), (*reversed(node.args), node), strict=True):
            new.meta["val"] = like.meta["val"].t()
        turned.meta = node.meta
        node.replace_all_uses_with(turned)
        graph.erase_node(node)


class _Layouts(fx.Interpreter):
    """Runs a body, and notes the layout of every tensor that starts where its memory starts."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__(body)
        self.layouts: dict[fx.Node, Tensor] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(aten.reshape.default if target in _RESHAPES else target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and n.target not in _VIEWS and value.storage_offset() == 0:
            self.layouts[n] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return value
