"""Attention on a GPU: which launches it is made of, and how parts of the positions are put together in order.

Single tokens are in `attention_decode.py`, chunks of a prompt in `attention_chunk.py`. Where one block would have too
many positions to go through, blocks share them; of a chunk, the launch of `merge_parts` follows.
"""

from tvm import tirx

from picompile_codegen.cpu.attention_work import LOWEST, first_position
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, when
from picompile_codegen.cpu.token_ops import step_rows
from picompile_codegen.cuda.attention_chunk import attend_chunk, chunk_parts
from picompile_codegen.cuda.attention_common import CudaAttentionTensors, Parts, padded_width
from picompile_codegen.cuda.attention_decode import attend_rows, decode_parts
from picompile_codegen.cuda.function import CudaFunction, ThreadIndex
from picompile_codegen.cuda.memory import barrier, block_max, block_sum, registers, shared
from picompile_codegen.specs import AttentionSpec

_THREADS = 256
_LANES = 4


def merge_parts(function: CudaFunction, spec: AttentionSpec, parts: Parts, tensors: CudaAttentionTensors) -> None:
    """y = Σ exp(m_p - m) · outputs_p / Σ exp(m_p - m) · sum_p over parts p, with the largest m of their maxima m_p.

    A block has a head of a row.
    """
    with function.launch(grid=(spec.heads, spec.rows), block=_THREADS) as place:
        tokens, row, head = (
            step_rows(function, spec.mode, spec.rows, spec.context, spec.sequences),
            place.block_y,
            place.block,
        )
        with when(row < tokens.count):
            position = bind(tokens.position(row))
            begin = bind(first_position(spec, position) // parts.positions)
            end = bind(position // parts.positions + 1)
            weights = shared(parts.count)
            total = _weigh(tensors, (row, head), (begin, end), weights, place)
            _mix(spec, tensors, (row, head), (begin, end), weights, total, place)


def _weigh(
    tensors: CudaAttentionTensors,
    of: tuple[Expr, Expr],
    span: tuple[Expr, Expr],
    weights: KernelTensor,
    place: ThreadIndex,
) -> Expr:
    """Compute the weights of the parts from `span`[0] up to `span`[1]; return the sum of the weights of all
    positions."""
    assert tensors.extremes is not None
    part, (begin, end) = place.thread, span
    inside = bind(tirx.And(part >= begin, part < end))
    highest = bind(tirx.if_then_else(inside, tensors.extremes[(*of, part, 0)], LOWEST))
    of_all = block_max(highest, place.thread, _THREADS)
    weight = bind(tirx.if_then_else(inside, tirx.exp(highest - of_all), 0.0))
    # TVM gives memory that nobody uses any more, here that of the maximum, to what comes next.
    barrier()
    with when(inside):
        weights[part] = weight
    own = bind(tirx.if_then_else(inside, weight * tensors.extremes[(*of, part, 1)], 0.0))
    # It has barriers, behind which all see the weights.
    return block_sum(own, place.thread, _THREADS)


def _mix(
    spec: AttentionSpec, tensors: CudaAttentionTensors, of: tuple[Expr, Expr],
    span: tuple[Expr, Expr], weights: KernelTensor, total: Expr,
    place: ThreadIndex,
) -> None:  # fmt: skip
    """Mix the outputs of the parts. Adjacent threads have four columns each; sets of them take different parts."""
    assert tensors.outputs is not None
    width = padded_width(spec.value_dim)
    units, (begin, end) = width // _LANES, span
    sets = _THREADS // units
    mine, column = bind(place.thread // units), bind(place.thread % units * _LANES)
    sums, mixed = registers(_LANES), shared(sets, width)
    for i in range(_LANES):
        sums[i] = 0.0
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
    for start in range(0, spec.value_dim, _THREADS):
        c = bind(start + place.thread)
        with when(c < spec.value_dim):
            sums[0] = 0.0
            with loop(0, sets) as each:
                sums[0] = sums[0] + mixed[each, c]
            tensors.y[row, head * spec.value_dim + c] = sums[0] / total


def attention(spec: AttentionSpec, function: CudaFunction) -> None:
    """Write the launches of an `AttentionSpec`."""
    is_chunk = spec.mode == "chunk"
    parts = chunk_parts(spec) if is_chunk else decode_parts(spec)
    tensors = CudaAttentionTensors.of(spec, function, parts.count, padded_width(spec.value_dim))
    if not is_chunk:
        attend_rows(function, spec, parts, tensors)
        return
    attend_chunk(function, spec, parts, tensors)
    if parts.count > 1:
        merge_parts(function, spec, parts, tensors)
