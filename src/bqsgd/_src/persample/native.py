"""A graph of aten operations as one function that runs without Python: no interpreter lock, little time per operation.

The operations and their order are those of the graph, and nothing is optimised or fused: a function runs the same
sequence of kernels every time, from the first call on. So samples run in several threads at once, each with a pass of
its own, and an operation costs about a microsecond beside its work.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

_C: Any = torch._C
_NUMBERS: dict[object, int] = {
    torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3,
    torch.strided: 0, torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5,
    torch.float32: 6, torch.float64: 7, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip
"""What torch's own interpreter writes for types, layouts and memory formats: their place in c10's enumerations."""


class NotNative(Exception):
    """An operation or an argument that the interpreter of torch does not take."""


def native(module: fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
    """What the module computes, as a function of the same tensors; the module itself where that cannot be had."""
    try:
        function = _C._create_function_from_graph("one_pass", _Translation(module).graph)
    except Exception:  # interfaces of torch that are not public may change: then passes are slower, and the same
        return module

    def run(*tensors: Tensor) -> Sequence[Tensor]:
        # Holds for this thread. Otherwise torch watches the first runs and rewrites the graph before later ones, and
        # what a sample adds could depend on how many have run before it.
        _C._set_graph_executor_optimize(False)
        return function(*tensors)  # type: ignore[no-any-return]

    return run


class _Translation:
    """The graph of a module in the form that torch's interpreter takes."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.graph = _C.Graph()
        self._values: dict[fx.Node, Any] = {}
        for node in module.graph.nodes:
            match node.op:
                case "placeholder":
                    self._values[node] = self.graph.addInput(node.name)
                case "get_attr":
                    self._values[node] = self._constant(operator.attrgetter(str(node.target))(module))
                case "output":
                    self.graph.registerOutput(self._list(node.args[0]))
                case _:
                    self._values[node] = self._call(node)
        self.graph.lint()

    def _call(self, node: Any) -> Any:
        if node.target is operator.getitem:
            return self._values[node.args[0]][node.args[1]]
        schema, named = node.target._schema, node.kwargs
        arguments = [
            self._argument(node.args[n] if n < len(node.args) else named.get(kind.name, kind.default_value), kind.type)
            for n, kind in enumerate(schema.arguments)
        ]
        outputs = self._insert(schema.name, arguments, [each.type for each in schema.returns])
        if [str(each.type) for each in schema.returns] == ["List[Tensor]"]:
            count = len(node.meta["val"])
            return self._insert("prim::ListUnpack", outputs, [_C.TensorType.get()] * count)
        return outputs[0] if len(outputs) == 1 else outputs

    def _insert(self, name: str, arguments: Sequence[Any], kinds: Sequence[Any]) -> list[Any]:
        made = self.graph.insertNode(self.graph.create(name, list(arguments), len(kinds)))
        if name.startswith("aten::") and made.schema() == "(no schema)":
            raise NotNative(name)  # as of a number in the place of a tensor, which only Python's side takes
        outputs = list(made.outputs())
        for output, kind in zip(outputs, kinds, strict=True):
            output.setType(kind)
        return outputs

    def _argument(self, value: Any, kind: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._values[value]
        if value == []:  # a constant that is empty would not say of what
            return self._insert("prim::ListConstruct", [], [kind])[0]
        if isinstance(value, (list, tuple)):
            return self._list(value) if any(isinstance(each, fx.Node) for each in value) else self._constant([*value])
        return self._constant(value)

    def _list(self, values: Sequence[Any]) -> Any:
        kind, members = _C.TensorType.get(), [self._argument(value, None) for value in values]
        if any(value is None for value in values):
            kind = _C.OptionalType(kind)
        return self._insert("prim::ListConstruct", members, [_C.ListType(kind)])[0]

    def _constant(self, value: Any) -> Any:
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            if value not in _NUMBERS:
                raise NotNative(str(value))
            value = _NUMBERS[value]
        return self.graph.insertConstant(value)
