"""Vector operations emitted as LLVM, because numba's loop vectoriser stops at half the width of the processor.

Nothing here is tied to one processor: LLVM splits the vectors where they are too wide. The one exception, a symmetric
clamp in a single instruction (AVX-512 `vrangeps`), is used where the processor has it.

numba's cache does not watch this file: after a change here, change `tiles.py` too or clear the cache.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils

LANES = 16
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

    def pointer(self, kind: Any, value: Any, offset: Any) -> Any:
        return self.builder.gep(self.context.make_array(kind)(self.context, self.builder, value).data, [offset])

    def at(self, pointer: Any, offset: Any) -> Any:
        return self.builder.gep(pointer, [ir.Constant(WORD, offset) if isinstance(offset, int) else offset])

    def load(self, pointer: Any, offset: Any, kind: ir.VectorType = VECTOR) -> Any:
        return self.builder.load(self.builder.bitcast(self.at(pointer, offset), kind.as_pointer()), align=4)

    def store(self, value: Any, pointer: Any, offset: Any) -> None:
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

    def prefetch(self, pointer: Any, offset: Any) -> None:
        """Bring the line at `offset` near; an address outside the array does no harm."""
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0i8")  # type: ignore[no-untyped-call]
        read, near, data = (ir.Constant(INT32, value) for value in (0, 3, 1))
        self.builder.call(function, [self.builder.bitcast(self.at(pointer, offset), byte), read, near, data])

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.intrinsic("llvm.fma.v16f32" if x.type == VECTOR else "llvm.fma.v16f64", x, y, z)

    def smaller(self, x: Any, y: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered("<", x, y), x, y)

    def maximum(self, x: Any, y: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", x, y), x, y)

    def clamp(self, x: Any, high: Any, low: Any) -> Any:
        """x held to [low, high], with low = -high."""
        if self.has_range:  # the smaller magnitude with the sign of x
            every, plain = ir.Constant(ir.IntType(16), -1), ir.Constant(INT32, 4)
            return self.intrinsic(
                "llvm.x86.avx512.mask.range.ps.512", x, high, ir.Constant(INT32, 2), ZERO, every, plain
            )
        return self.maximum(self.smaller(x, high), low)

    def total(self, whole: Any) -> Any:
        """The sum of 16 int32, which may wrap."""
        kind = ir.FunctionType(INT32, [WHOLE])
        name = "llvm.vector.reduce.add.v16i32"
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)  # type: ignore[no-untyped-call]
        return self.builder.call(function, [whole])

    def registers(self, rows: int, vectors: int, kind: ir.VectorType = VECTOR) -> list[list[Any]]:
        one = cgutils.alloca_once
        return [[one(self.builder, kind) for _ in range(vectors)] for _ in range(rows)]  # type: ignore[no-untyped-call]
