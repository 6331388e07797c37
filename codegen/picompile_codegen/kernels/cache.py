"""Writing this step's keys or values into a layer's cache."""

from picompile_codegen.kernels.kernel import Kernel, KernelFunction
from picompile_codegen.kernels.tensor import Expr, bind, loop, parallel
from picompile_codegen.kernels.vector import blocks, load, store


def cache_write(*, kv_heads: int, head_dim: int, context: int, rows: int, kv_dtype: str) -> Kernel:
    """cache[h, step[1] + t] = x[t, h]. x float32 [rows, kv_heads · d], cache kv_dtype [kv_heads, context, d]."""
    function = KernelFunction("cache_write", kv_dtype, f"{kv_heads}x{head_dim}", f"r{rows}", f"c{context}")
    with function:
        x = function.floats("x", rows, kv_heads * head_dim)
        cache = function.argument("cache", kv_dtype, kv_heads, context, head_dim)
        first_position = function.position()
        with parallel(function.tokens(rows), when_worth=rows > 1) as t:
            position = bind(first_position + t)
            with loop(0, kv_heads) as head:

                def copy(c: Expr, valid: int) -> None:
                    value = load(x, t, head * head_dim + c, valid=valid)
                    store(cache, head, position, c, value=value, valid=valid)

                blocks(head_dim, copy)
    return function.kernel()
