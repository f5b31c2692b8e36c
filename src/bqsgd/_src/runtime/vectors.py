"""Vector operations emitted as LLVM, because numba's loop vectoriser stops at half the width of the processor.

Nothing here is tied to one processor: LLVM splits the vectors where they are too wide. The one exception, a symmetric
clamp in a single instruction (AVX-512 `vrangeps`), is used where the processor has it.

numba's cache does not watch this file: after a change here, change the files that use it too or clear the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

LANES = 16
WIDE = "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2]
"""Whether the processor has 32 registers that each hold a whole vector, instead of 16 that hold half of one."""
FLOAT, WORD, INT32 = ir.FloatType(), ir.IntType(64), ir.IntType(32)
VECTOR = ir.VectorType(FLOAT, LANES)
DOUBLES = ir.VectorType(ir.DoubleType(), LANES)
WHOLE = ir.VectorType(INT32, LANES)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)


class Emit:
    """The few vector operations a tile needs."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context, self.builder = context, builder
        self.has_range = "+avx512dq" in context.codegen().magic_tuple()[2]

    def at(self, pointer: Any, offset: Any, times: int = 1) -> Any:
        """The place offset * times behind a pointer."""
        offset = ir.Constant(WORD, offset) if isinstance(offset, int) else offset
        return self.builder.gep(pointer, [offset if times == 1 else self.builder.mul(offset, ir.Constant(WORD, times))])

    def load(self, pointer: Any, offset: Any = 0, kind: ir.VectorType = VECTOR) -> Any:
        return self.builder.load(self.builder.bitcast(self.at(pointer, offset), kind.as_pointer()), align=4)

    def store(self, value: Any, pointer: Any, offset: Any = 0) -> None:
        self.builder.store(value, self.builder.bitcast(self.at(pointer, offset), value.type.as_pointer()), align=4)

    def broadcast(self, scalar: Any) -> Any:
        undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(INT32, 0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(WHOLE, [0] * LANES))

    def intrinsic(self, name: str, *arguments: Any) -> Any:
        """A function of LLVM whose result is of the type of its first argument."""
        kind = ir.FunctionType(arguments[0].type, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)  # type: ignore[no-untyped-call]
        return self.builder.call(function, arguments)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.intrinsic("llvm.fma.v16f32" if x.type == VECTOR else "llvm.fma.v16f64", x, y, z)

    def smaller(self, x: Any, y: Any) -> Any:
        """The smaller of both; y if one of them is NaN."""
        return self.builder.select(self.builder.fcmp_ordered("<", x, y), x, y)

    def clamp(self, x: Any, high: Any) -> Any:
        """x held to [-high, high]."""
        if self.has_range:  # the smaller magnitude with the sign of x
            every, plain = ir.Constant(ir.IntType(16), -1), ir.Constant(INT32, 4)
            return self.intrinsic(
                "llvm.x86.avx512.mask.range.ps.512", x, high, ir.Constant(INT32, 2), ZERO, every, plain
            )
        held, low = self.smaller(x, high), self.builder.fsub(ZERO, high)
        return self.builder.select(self.builder.fcmp_ordered(">", held, low), held, low)

    def registers(self, rows: int, vectors: int, kind: ir.VectorType = VECTOR) -> list[list[Any]]:
        one = cgutils.alloca_once
        return [[one(self.builder, kind) for _ in range(vectors)] for _ in range(rows)]  # type: ignore[no-untyped-call]

    def count(self, items: Any) -> Any:
        """A loop over 0 .. items - 1."""
        return cgutils.for_range(self.builder, items, intp=WORD)


def tile(body: Callable[..., None]) -> Callable[..., None]:
    """A function for compiled loops, of what body(emit, ...) emits; an array comes as a pointer to its first entry."""

    def function(typing: Any, *kinds: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, typed: Any, arguments: Any) -> Any:
            given = [
                context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
                for kind, value in zip(typed.args, arguments, strict=True)
            ]
            body(Emit(context, builder), *given)
            return context.get_dummy_value()

        return types.void(*kinds), generate

    function.__signature__ = signature(body)  # type: ignore[attr-defined]  # numba asks for the number of arguments
    return intrinsic(function)  # type: ignore[no-any-return]
