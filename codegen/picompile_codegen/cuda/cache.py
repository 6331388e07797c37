"""Writing the KV cache on a GPU. What it looks like: see `picompile_codegen.kernels.cache`."""

from collections.abc import Callable

from tvm import tirx

from picompile_codegen.cuda.function import WARP, CudaFunction, CudaKernel, blocks_for
from picompile_codegen.cuda.memory import warp_max
from picompile_codegen.cuda.step_rows import step_rows
from picompile_codegen.kernels.cache import Cache, cache_argument
from picompile_codegen.kernels.step_rows import Mode, mode_name
from picompile_codegen.kernels.tensor import Expr, bind, maximum, minimum, when
from picompile_passes.dialect.formats import GROUP

_THREADS = 128
_LARGEST_BYTE = 127.0
_F16_MAX = 65504.0


def cache_write(
    *, kv_heads: int, head_dim: int, context: int, rows: int, kv_dtype: str, mode: Mode, sequences: int
) -> CudaKernel:
    """cache[slot, h, position] = x[t, h] for each row t; positions and slots: see `step_rows`.

    x float32 [rows, kv_heads · d], cache as in `kernels.cache.Cache`.
    """
    shape = (f"{kv_heads}x{head_dim}", mode_name(mode, rows), f"c{context}", f"s{sequences}")
    function = CudaFunction("cache_write", kv_dtype, *shape)
    with function:
        x = function.floats("x", rows, kv_heads * head_dim)
        cache = cache_argument(function, "cache", kv_dtype, sequences, kv_heads, context, head_dim)
        read_step = step_rows(function, mode, rows, context, sequences)
        with function.launch(grid=(blocks_for(kv_heads * WARP, _THREADS), rows), block=_THREADS) as place:
            tokens, row = read_step(), place.block_y
            head = bind(place.block * (_THREADS // WARP) + place.warp)
            with when(tirx.And(row < tokens.count, head < kv_heads)):
                index = (bind(tokens.slot(row)), head, bind(tokens.position(row)))
                write_row(cache, index, lambda column: x[row, head * head_dim + column], place.lane)
    return function.cuda_kernel()


def write_row(cache: Cache, row: tuple[Expr, Expr, Expr], source: Callable[[Expr], Expr], lane: Expr) -> None:
    """A warp writes row (slot, head, position) of a cache; `source(column)` gives its elements. All lanes must come."""
    for group in range(blocks_for(cache.dim, GROUP)):
        column = bind(group * GROUP + lane)
        inside = column < cache.dim
        value = bind(tirx.if_then_else(inside, source(column), _float(0.0)))
        stored = value if cache.scales is None else _in_bytes(cache, (*row, group), value, lane)
        with when(inside):
            cache.data[(*row, column)] = tirx.Cast(cache.data.dtype, stored)


def _in_bytes(cache: Cache, group: tuple[Expr, ...], value: Expr, lane: Expr) -> Expr:
    """Writes the scale of 32 elements, a lane has each of them, and gives the nearest multiple of it, an int32."""
    largest = warp_max(tirx.abs(value))
    scale = bind(tirx.Cast("float16", minimum(largest / _float(_LARGEST_BYTE), _float(_F16_MAX))))
    with when(lane == 0):
        cache.scales[group] = scale  # type: ignore[index]
    kept = bind(tirx.Cast("float32", scale))
    inverse = tirx.if_then_else(kept > _float(0.0), _float(1.0) / kept, _float(0.0))
    near = tirx.nearbyint(value * bind(inverse))
    return tirx.Cast("int32", maximum(minimum(near, _float(_LARGEST_BYTE)), _float(-_LARGEST_BYTE)))


def _float(value: float) -> Expr:
    return tirx.FloatImm("float32", value)
