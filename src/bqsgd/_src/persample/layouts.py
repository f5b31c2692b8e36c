"""The same program laid out for speed: products and convolutions by the faster library, results where loops read them.

The order of operations stays as it is, and so does what each of them reads.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from bqsgd._src.persample.program import shape_of

aten, mkldnn = torch.ops.aten, torch.ops.mkldnn
LARGE = 1 << 21
"""Multiplications from which on oneDNN computes a product: it fills the vectors of every processor, which the library
behind `mm` does on some only, and needs ten microseconds to begin."""
SMALL = 20480
"""Entries of an image up to which torch does not have oneDNN convolve it."""
ONEDNN = torch._C._has_mkldnn and platform.machine() in ("x86_64", "AMD64")
_ALONE: tuple[Any, ...] = "none", [], ""
"""No operation after a product of oneDNN's."""


def lay_out(prelude: fx.GraphModule, body: fx.GraphModule, shared: int) -> None:
    """Have oneDNN compute the large products and convolutions of the body, and make its outputs contiguous, which the
    loops read in place.

    shared: values that the body has of the prelude; weights that are added to them come after them.
    """
    graph: Any = body.graph
    if ONEDNN:
        _use_onednn(graph)
        _convolve_packed(prelude, graph, shared)
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # entries may lie otherwise than where the program was traced
    returned = graph.output_node()
    with graph.inserting_before(returned):
        returned.args = ([graph.call_function(aten.contiguous.default, (value,)) for value in returned.args[0]],)
    graph.eliminate_dead_code()
    body.recompile()
    prelude.recompile()


def _use_onednn(graph: Any) -> None:
    for node in list(graph.nodes):
        if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
            continue
        *bias, left, right = node.args
        like, (inner, columns) = left.meta["val"], shape_of(right)
        large = len(like) * inner * columns >= LARGE and like.dtype == torch.float32 and like.device.type == "cpu"
        if large and all(shape_of(each) == (columns,) for each in bias):
            with graph.inserting_before(node):
                weight = graph.call_function(aten.t.default, (right,))
            weight.meta["val"] = right.meta["val"].t()
            node.target = mkldnn._linear_pointwise.default
            node.args = (left, weight, bias[0] if bias else None, *_ALONE)


def _convolve_packed(prelude: fx.GraphModule, graph: Any, shared: int) -> None:
    """Weights of large convolutions are laid out by the prelude, once for all samples: doing that for each sample takes
    longer than to convolve a small image."""
    inputs, returned = graph.find_nodes(op="placeholder"), prelude.graph.output_node()
    given: dict[Any, Any] = dict(zip(inputs[:shared], returned.args[0], strict=True))  # type: ignore[arg-type]

    def packed(operation: Any, weight: fx.Node, *how: Any) -> fx.Node:
        with prelude.graph.inserting_before(returned):
            made = prelude.graph.call_function(operation, (given[weight], *how))
        returned.args = ([*returned.args[0], made],)  # type: ignore[misc, list-item]
        with graph.inserting_before(inputs[shared]):
            return graph.placeholder(made.name)  # type: ignore[no-any-return]

    for node in list(graph.nodes):
        if node.target is aten.convolution.default and node.args[1] in given and _is_large(node, *node.args):
            x, weight, bias, *sides = node.args[:6]
            stride, padding, dilation = map(_of_axes, sides)
            how = padding, stride, dilation, 1
            own = packed(mkldnn._reorder_convolution_weight.default, weight, *how, [*shape_of(x)])
            node.target, node.args = mkldnn._convolution_pointwise.default, (x, own, bias, *how, *_ALONE)
        elif node.target is aten.convolution_backward.default and node.args[2] in given and _is_large(*node.args):
            with graph.inserting_before(node):
                parts = _backward(graph, packed, *node.args)
            for user in list(node.users):
                if user.args[1] in parts:
                    parts[user.args[1]].meta = user.meta
                    user.replace_all_uses_with(parts[user.args[1]])
            node.args = *node.args[:-1], [wanted and n not in parts for n, wanted in enumerate(node.args[-1])]


def _is_large(error: fx.Node, x: fx.Node, weight: fx.Node, bias: Any, *how: Any) -> bool:
    """Whether it pays to have oneDNN compute the convolution of an image, which has these errors at its output."""
    axes, like = shape_of(weight)[2:], x.meta["val"]
    taken = how[3:6:2] == (False, 1) and len(axes) == 2 and like.dtype == torch.float32 and like.device.type == "cpu"
    return taken and shape_of(error).numel() * shape_of(weight)[1:].numel() >= LARGE


def _of_axes(values: Sequence[int]) -> list[int]:
    return [*values] * 2 if len(values) == 1 else [*values]


def _backward(graph: Any, packed: Any, error: Any, x: Any, weight: Any, sizes: Any, *how: Any) -> dict[int, fx.Node]:
    """The gradients that oneDNN computes: 0 of the input, 1 of the weight."""
    parts, (of_input, of_weight, _) = {}, how[-1]
    stride, padding, dilation = map(_of_axes, how[:3])
    if of_input:
        ends = zip(shape_of(x)[2:], shape_of(error)[2:], shape_of(weight)[2:], padding, stride, dilation, strict=True)
        beyond = [
            size + 2 * side - gap * (taps - 1) - 1 - (out - 1) * step for size, out, taps, side, step, gap in ends
        ]
        how = padding, beyond, stride, dilation, 1  # beyond: points that no window reads
        own = packed(mkldnn._reorder_convolution_transpose_weight.default, weight, *how, [*shape_of(error)])
        operation = mkldnn._convolution_transpose_pointwise.default
        parts[0] = graph.call_function(operation, (error, own, None, *how, *_ALONE))
    if of_weight and shape_of(x).numel() <= SMALL:  # a product of the errors and of the patches of the input
        patches = graph.call_function(aten.im2col.default, (x, [*shape_of(weight)[2:]], dilation, padding, stride))
        right = graph.call_function(aten.select.int, (patches, 0, 0))
        left = graph.call_function(aten.reshape.default, (error, [shape_of(error)[1], -1]))
        product = graph.call_function(mkldnn._linear_pointwise.default, (left, right, None, *_ALONE))
        parts[1] = graph.call_function(aten.reshape.default, (product, [*shape_of(weight)]))
    return parts
