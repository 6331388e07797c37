"""The pass over kernels that keeps floats and vectors on the stack."""

import tvm
from tvm.script import tirx as T

from picompile_codegen.build.kernel_objects import keep_on_stack


def test_floats_and_vectors_are_stored_and_whole_numbers_stay() -> None:
    @T.prim_func
    def before(x: T.Buffer((16,), "float32"), y: T.Buffer((16,), "float32")) -> None:
        for i in range(2):
            first: T.let[T.int32] = i * 8
            values: T.let[T.float32x8] = x[T.Ramp(first, 1, 8)]
            lowest: T.let[T.float32] = x[first]
            y[T.Ramp(first, 1, 8)] = values * values + T.Broadcast(lowest, 8)

    @T.prim_func
    def expected(x: T.Buffer((16,), "float32"), y: T.Buffer((16,), "float32")) -> None:
        for i in range(2):
            first: T.let[T.int32] = i * 8
            values = T.alloc_buffer((1,), "float32x8", annotations={"disable_lower_builtin": True})
            values[0] = x[T.Ramp(first, 1, 8)]
            lowest = T.alloc_buffer((1,), "float32", annotations={"disable_lower_builtin": True})
            lowest[0] = x[first]
            y[T.Ramp(first, 1, 8)] = values[0] * values[0] + T.Broadcast(lowest[0], 8)

    found = keep_on_stack(before.without_attr("global_symbol"))
    tvm.ir.assert_structural_equal(found, expected.without_attr("global_symbol"))
