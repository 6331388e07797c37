"""Causal attention over the cached keys and values on a GPU: its arguments, and which launches it is made of.

The kernel of single tokens is in `attention_decode.py`, that of chunks of a prompt in `attention_chunk.py`. Where one
block would have too many positions to go through, blocks share them, and a launch of `attention_merge.py` follows.
"""

from picompile_codegen.cuda.attention_arguments import Tensors, padded_width
from picompile_codegen.cuda.attention_chunk import attend_chunk, chunk_parts
from picompile_codegen.cuda.attention_decode import attend_rows, decode_parts
from picompile_codegen.cuda.attention_merge import merge_parts
from picompile_codegen.cuda.function import CudaFunction, CudaKernel
from picompile_codegen.cuda.step_rows import step_rows
from picompile_codegen.errors import CodegenError
from picompile_codegen.kernels.attention_arguments import Shape
from picompile_codegen.kernels.cache import cache_argument
from picompile_codegen.kernels.rotary import angles_argument
from picompile_codegen.kernels.step_rows import Mode, mode_name


def attention(
    *, heads: int, kv_heads: int, head_dim: int, value_dim: int, context: int, rows: int, kv_dtype: str, scale: float,
    window: int, mode: Mode, sequences: int, extend: bool = False, turn: bool = False,
) -> CudaKernel:  # fmt: skip
    """softmax(q · kᵀ · scale) · v for each query head, over the cached positions that a token may see.

    A row at position p (see `step_rows`) sees positions max(0, p - window + 1) … p of its sequence, or all up to p when
    `window` is 0. q float32 [rows, heads · head_dim], k_cache and v_cache as in `kernels.cache.Cache`, of head_dim and
    value_dim → y float32 [rows, heads · value_dim].

    With `extend`, k float32 [rows, kv_heads · head_dim] and v float32 [rows, kv_heads · value_dim] are first written to
    the caches; with `turn` as well, q and k are turned by cos and sin (see `rotary.rotary`) before. Raises
    `CodegenError` if a chunk is to do that.
    """
    shape = Shape(heads, kv_heads, head_dim, value_dim, context, rows, scale, window)
    dims = f"{head_dim}" if head_dim == value_dim else f"{head_dim}v{value_dim}"
    function = CudaFunction(
        "attention", kv_dtype, f"{heads}h{kv_heads}x{dims}", mode_name(mode, rows), f"c{context}", f"s{sequences}",
        scale, f"w{window}" if window else "", "extend" if extend else "", "turn" if turn else "",
    )  # fmt: skip
    if mode == "chunk" and extend:
        raise CodegenError(f"kernel {function.name}: chunks do not extend caches; use cache_write before")
    parts = chunk_parts(shape) if mode == "chunk" else decode_parts(shape)
    with function:
        q = function.floats("q", rows, heads * head_dim)
        new_keys = function.floats("k", rows, kv_heads * head_dim) if extend else None
        new_values = function.floats("v", rows, kv_heads * value_dim) if extend else None
        angles = angles_argument(function, context, head_dim // 2) if turn else None
        keys = cache_argument(function, "k_cache", kv_dtype, sequences, kv_heads, context, head_dim)
        values = cache_argument(function, "v_cache", kv_dtype, sequences, kv_heads, context, value_dim)
        y = function.floats("y", rows, heads * value_dim)
        outputs = extremes = None
        if parts.count > 1:
            outputs = function.scratch("outputs", "float32", rows, heads, parts.count, padded_width(value_dim))
            extremes = function.scratch("extremes", "float32", rows, heads, parts.count, 2)
        tensors = Tensors(q, keys, values, y, new_keys, new_values, angles, outputs, extremes)
        read_step = step_rows(function, mode, rows, context, sequences)
        attend = attend_chunk if mode == "chunk" else attend_rows
        attend(function, shape, parts, tensors, read_step)
        if parts.count > 1:
            merge_parts(function, shape, parts, tensors, read_step)
    return function.cuda_kernel()
