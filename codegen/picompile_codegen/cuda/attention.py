"""Attention on a GPU: the choice of its launches.

Single tokens are in `attention_decode.py`, chunks of a prompt in `attention_chunk.py`. If one block would have too many
positions, several blocks share them, and `attention_merge.py` combines their results: for a single token, in the last
block of a head; for a chunk, in a launch of its own.
"""

from picompile_codegen.backend import body
from picompile_codegen.cpu.attention_work import first_position
from picompile_codegen.cpu.tensor import bind, when
from picompile_codegen.cpu.token_ops import step_rows
from picompile_codegen.cuda.attention_chunk import attend_chunk, chunk_parts
from picompile_codegen.cuda.attention_common import THREADS, CudaAttentionTensors, Parts, padded_width
from picompile_codegen.cuda.attention_decode import attend_rows, decode_parts
from picompile_codegen.cuda.attention_merge import MergedHeads, merge_parts
from picompile_codegen.cuda.function import CudaFunction
from picompile_codegen.specs import AttentionSpec


@body(AttentionSpec)
def attention(spec: AttentionSpec, function: CudaFunction) -> None:
    """Write the launches of an `AttentionSpec`."""
    is_chunk = spec.mode == "chunk"
    parts = chunk_parts(spec) if is_chunk else decode_parts(spec)
    tensors = CudaAttentionTensors.of(spec, function, parts.count, padded_width(spec.value_dim))
    if not is_chunk:
        attend_rows(function, parts, tensors)
        return
    attend_chunk(function, parts, tensors)
    if parts.count > 1:
        _merge_chunk(function, parts, tensors)


def _merge_chunk(function: CudaFunction, parts: Parts, tensors: CudaAttentionTensors) -> None:
    """Write the launch that merges the parts of a chunk: a block has a head of a row."""
    spec = tensors.spec
    with function.launch(grid=(spec.heads, spec.rows), block=THREADS) as place:
        tokens = step_rows(function, spec)
        with when(place.block_y < tokens.count):
            position = bind(tokens.position(place.block_y))
            span = parts.seen(first_position(spec, position), position)
            merge_parts(tensors, MergedHeads(place.block_y, place.block, 1, 1), span, parts, place=place)
