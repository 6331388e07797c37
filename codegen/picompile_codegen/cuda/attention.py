"""What parts of the positions come to, put together in their order."""

from collections.abc import Callable

from tvm import tirx

from picompile_codegen.cpu.attention_work import AttentionShape, first_position
from picompile_codegen.cpu.cache import cache_argument
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, when
from picompile_codegen.cpu.token_ops import Mode, StepRows, angles_argument, mode_name
from picompile_codegen.cuda.attention_chunk import attend_chunk, chunk_parts
from picompile_codegen.cuda.attention_common import LOWEST, CudaAttentionTensors, Parts, number, padded_width
from picompile_codegen.cuda.attention_decode import attend_rows, decode_parts
from picompile_codegen.cuda.function import CudaFunction, CudaKernel, ThreadIndex
from picompile_codegen.cuda.memory import barrier, block_max, block_sum, registers, shared
from picompile_codegen.cuda.token_ops import step_rows
from picompile_codegen.errors import CodegenError

_THREADS = 256
_LANES = 4


def merge_parts(
    function: CudaFunction,
    shape: AttentionShape,
    parts: Parts,
    tensors: CudaAttentionTensors,
    read_step: Callable[[], StepRows],
) -> None:
    """y = Σ exp(m_p - m) · outputs_p / Σ exp(m_p - m) · sum_p over parts p, with the largest m of their maxima m_p.

    A block has a head of a row.
    """
    with function.launch(grid=(shape.heads, shape.rows), block=_THREADS) as place:
        tokens, row, head = read_step(), place.block_y, place.block
        with when(row < tokens.count):
            position = bind(tokens.position(row))
            begin = bind(first_position(shape, position) // parts.positions)
            end = bind(position // parts.positions + 1)
            weights = shared(parts.count)
            total = _weigh(tensors, (row, head), (begin, end), weights, place)
            _mix(shape, tensors, (row, head), (begin, end), weights, total, place)


def _weigh(
    tensors: CudaAttentionTensors,
    of: tuple[Expr, Expr],
    span: tuple[Expr, Expr],
    weights: KernelTensor,
    place: ThreadIndex,
) -> Expr:
    """Weights of the parts from `span`[0] up to `span`[1], and the sum of those of all positions."""
    assert tensors.extremes is not None
    part, (begin, end) = place.thread, span
    inside = bind(tirx.And(part >= begin, part < end))
    highest = bind(tirx.if_then_else(inside, tensors.extremes[(*of, part, 0)], number(LOWEST)))
    of_all = block_max(highest, place.thread, _THREADS)
    weight = bind(tirx.if_then_else(inside, tirx.exp(highest - of_all), number(0.0)))
    # TVM gives memory that nobody uses any more, here that of the maximum, to what comes next.
    barrier()
    with when(inside):
        weights[part] = weight
    own = bind(tirx.if_then_else(inside, weight * tensors.extremes[(*of, part, 1)], number(0.0)))
    # It has barriers, behind which all see the weights.
    return block_sum(own, place.thread, _THREADS)


def _mix(
    shape: AttentionShape, tensors: CudaAttentionTensors, of: tuple[Expr, Expr],
    span: tuple[Expr, Expr], weights: KernelTensor, total: Expr,
    place: ThreadIndex,
) -> None:  # fmt: skip
    """Threads side by side have four columns each; sets of them take different parts."""
    assert tensors.outputs is not None
    width = padded_width(shape.value_dim)
    units, (begin, end) = width // _LANES, span
    sets = _THREADS // units
    mine, column = bind(place.thread // units), bind(place.thread % units * _LANES)
    sums, mixed = registers(_LANES), shared(sets, width)
    for i in range(_LANES):
        sums[i] = number(0.0)
    with when(mine < sets):
        with loop(0, (end - begin + (sets - 1 - mine)) // sets) as turn:
            part = bind(begin + mine + turn * sets)
            weight, four = bind(weights[part]), bind(tensors.outputs[(*of, part, tirx.Ramp(column, 1, _LANES))])
            for i in range(_LANES):
                sums[i] = sums[i] + weight * tirx.Shuffle([four], [i])
        for i in range(_LANES):
            mixed[mine, column + i] = sums[i]
    barrier()
    row, head = of
    for start in range(0, shape.value_dim, _THREADS):
        c = bind(start + place.thread)
        with when(c < shape.value_dim):
            sums[0] = number(0.0)
            with loop(0, sets) as each:
                sums[0] = sums[0] + mixed[each, c]
            tensors.y[row, head * shape.value_dim + c] = sums[0] / total


# Causal attention over the cached keys and values on a GPU: its arguments, and which launches it is made of.
#
# The kernel of single tokens is in `attention_decode.py`, that of chunks of a prompt in `attention_chunk.py`. Where one
# block would have too many positions to go through, blocks share them, and a launch of `attention_merge.py` follows.


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
    shape = AttentionShape(heads, kv_heads, head_dim, value_dim, context, rows, scale, window)
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
        tensors = CudaAttentionTensors(q, keys, values, y, new_keys, new_values, angles, outputs, extremes)
        read_step = step_rows(function, mode, rows, context, sequences)
        attend = attend_chunk if mode == "chunk" else attend_rows
        attend(function, shape, parts, tensors, read_step)
        if parts.count > 1:
            merge_parts(function, shape, parts, tensors, read_step)
    return function.cuda_kernel()
