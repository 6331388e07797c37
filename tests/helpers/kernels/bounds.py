"""Kernels that note where they write past the end of a local array: on the stack nothing else shows it."""

from dataclasses import replace
from functools import reduce
from typing import Any

import tvm_ffi
from tvm import tirx

from picompile_codegen.cpu.kernel import Kernel
from picompile_codegen.specs import KernelArgument

OUTSIDE = KernelArgument("outside", "int32", (1,), "adds")


def noting_bounds(kernel: Kernel) -> Kernel:
    """Return `kernel` with one more argument, `outside` int32 [1], which it sets to 1 where it writes outside."""
    local: list[Any] = []
    tvm_ffi.structural_walk(kernel.prim_func.body, (tirx.AllocBuffer, lambda each: local.append(each.buffer)))
    assert local, f"{kernel.name} has no local array"
    outside = tirx.decl_buffer((1,), "int32", "outside")

    def note(store: Any) -> Any:
        if not any(store.buffer.same_as(each) for each in local):
            return store
        checks = [
            check
            for index, size in zip(store.indices, store.buffer.shape, strict=True)
            for first, lanes in [(index.base, int(index.lanes)) if isinstance(index, tirx.Ramp) else (index, 1)]
            for check in (first < 0, first + lanes > size)
        ]
        return tirx.SeqStmt([tirx.IfThenElse(reduce(tirx.Or, checks), tirx.BufferStore(outside, 1, [0]), None), store])

    function = kernel.prim_func
    body = tvm_ffi.structural_map(function.body, (tirx.BufferStore, note))
    noting = tirx.PrimFunc([*function.params, outside], body, function.ret_type, attrs=function.attrs)
    name = f"{kernel.name}_noting_bounds"
    noting = noting.with_attr("global_symbol", name)
    return replace(kernel, name=name, prim_func=noting, arguments=(*kernel.arguments, OUTSIDE))
