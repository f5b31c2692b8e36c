"""The same program laid out for speed: fewer views, and products of matrices by the faster library.

The order of operations stays as it is, and a view is a view of a sample's own tensor still.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from bqsgd._src.persample.program import shape_of
from bqsgd._src.runtime.threads import in_own_threads

aten = torch.ops.aten
_RESHAPES = (aten.view.default, aten._unsafe_view.default)
_VIEWS = {
    *_RESHAPES, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.select.int,
    aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
}  # fmt: skip
"""Operations that return a part of their input as it lies in memory."""
LARGE = 1 << 21
"""Multiplications from which on oneDNN computes a product: it fills the vectors of every processor, which the library
behind `mm` does on some only, and needs ten microseconds to begin."""
ONEDNN = torch._C._has_mkldnn and platform.machine() in ("x86_64", "AMD64")


def with_fewer_views(body: fx.GraphModule, shared: int, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The body with one view in the place of a chain of them, with large products by oneDNN, with contiguous second
    factors of products by groups, and with contiguous outputs, which the loops read in place.

    inputs: of a made-up sample, the `shared` values first. They show how operations lay out what they return, which
    follows from shapes alone.
    """
    graph: Any = body.graph
    _use_onednn(graph)
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


def _use_onednn(graph: Any) -> None:
    for node in list(graph.nodes) if ONEDNN else ():
        if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
            continue
        *bias, left, right = node.args
        like, (inner, columns) = left.meta["val"], shape_of(right)
        large = len(like) * inner * columns >= LARGE and like.dtype == torch.float32 and like.device.type == "cpu"
        if large and all(shape_of(each) == (columns,) for each in bias):
            with graph.inserting_before(node):
                weight = graph.call_function(aten.t.default, (right,))
            weight.meta["val"] = right.meta["val"].t()
            node.target = torch.ops.mkldnn._linear_pointwise.default
            node.args = (left, weight, bias[0] if bias else None, "none", [], "")


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
