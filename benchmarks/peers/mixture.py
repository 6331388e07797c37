"""A GGUF file of a mixture of experts with random weights in q4_0, which picompile, llama.cpp and ik_llama.cpp read.

    python -m benchmarks.peers.mixture olmoe-1b-7b build/bench/olmoe.gguf
    picompile compile build/bench/olmoe.gguf -o build/bench/olmoe --target native
    picompile bench build/bench/olmoe -p 512 -n 128
    llama-bench -m build/bench/olmoe.gguf -t 2 -p 512 -n 0
    llama-bench -m build/bench/olmoe.gguf -t 2 -p 0 -n 64 -d 128

The file serves to measure speed; its text means nothing. Routers and norms are float32, all other matrices q4_0. A
shape may be a smaller one: `olmoe-1b-7b:3` has three of its layers.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.gguf import describe_vocabulary

_Q4_0 = gguf.GGMLQuantizationType.Q4_0
_BLOCK, _BLOCK_BYTES = gguf.GGML_QUANT_SIZES[_Q4_0]
# Weights of such a scale have a standard deviation of 0.02, as initial ones have.
_SCALE = np.float16(0.0043)


@dataclass(frozen=True)
class MixtureShape:
    """Sizes of a mixture, by the names of GGUF's keys. `head_norms`: whether queries are normalized head by head."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    experts: int
    chosen: int
    neurons: int
    vocabulary: int
    head_norms: bool


SHAPES = {
    "olmoe-1b-7b": MixtureShape("olmoe", 16, 2048, 16, 16, 128, 64, 8, 1024, 50304, False),
    "qwen3-30b-a3b": MixtureShape("qwen3moe", 48, 2048, 32, 4, 128, 128, 8, 768, 151936, True),
}


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    packed: bool = True


def write(shape: MixtureShape, output: Path) -> None:
    """Write a file of `shape` to `output`, which appears whole or not at all."""
    unfinished, tensors, rng = output.with_suffix(".unfinished"), list(_tensors(shape)), np.random.default_rng(0)
    output.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(unfinished, shape.architecture)
    _describe(writer, shape)
    for tensor in tensors:
        stored = gguf.quant_shape_to_byte_shape(tensor.shape, _Q4_0) if tensor.packed else tensor.shape
        dtype = np.dtype(np.uint8 if tensor.packed else np.float32)
        kind = _Q4_0 if tensor.packed else None
        writer.add_tensor_info(tensor.name, stored, dtype, int(np.prod(stored)) * dtype.itemsize, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(_values(tensor, rng))
    writer.close()
    unfinished.replace(output)


def _values(tensor: _Tensor, rng: np.random.Generator) -> NDArray[Any]:
    if not tensor.packed:
        is_norm = len(tensor.shape) == 1
        values = rng.standard_normal(tensor.shape, dtype=np.float32)
        return np.ones(tensor.shape, np.float32) if is_norm else values * np.float32(0.02)
    blocks = int(np.prod(tensor.shape)) // _BLOCK
    data = np.frombuffer(rng.bytes(blocks * _BLOCK_BYTES), np.uint8).reshape(blocks, _BLOCK_BYTES).copy()
    data[:, :2] = np.array([_SCALE]).view(np.uint8)
    return data.reshape(gguf.quant_shape_to_byte_shape(tensor.shape, _Q4_0))


def _tensors(shape: MixtureShape) -> Iterator[_Tensor]:
    hidden, wide, narrow = shape.hidden, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    yield _Tensor("token_embd.weight", (shape.vocabulary, hidden))
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        yield _Tensor(f"{block}.attn_norm.weight", (hidden,), packed=False)
        for name, rows in (("q", wide), ("k", narrow), ("v", narrow)):
            yield _Tensor(f"{block}.attn_{name}.weight", (rows, hidden))
        yield _Tensor(f"{block}.attn_output.weight", (hidden, wide))
        for name, rows in (("q", wide), ("k", narrow)):
            size = shape.head_size if shape.head_norms else rows
            yield _Tensor(f"{block}.attn_{name}_norm.weight", (size,), packed=False)
        yield _Tensor(f"{block}.ffn_norm.weight", (hidden,), packed=False)
        yield _Tensor(f"{block}.ffn_gate_inp.weight", (shape.experts, hidden), packed=False)
        for name in ("gate", "up"):
            yield _Tensor(f"{block}.ffn_{name}_exps.weight", (shape.experts, shape.neurons, hidden))
        yield _Tensor(f"{block}.ffn_down_exps.weight", (shape.experts, hidden, shape.neurons))
    yield _Tensor("output_norm.weight", (hidden,), packed=False)
    yield _Tensor("output.weight", (shape.vocabulary, hidden))


def _describe(writer: gguf.GGUFWriter, shape: MixtureShape) -> None:
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.neurons)
    if shape.architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(shape.neurons)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_freq_base(1e6 if shape.head_norms else 1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_block_count(shape.layers)
    writer.add_context_length(32768)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.chosen)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    describe_vocabulary(writer, shape.vocabulary)


def main() -> None:
    """Write the file that the command line names."""
    if len(sys.argv) != 3 or sys.argv[1].partition(":")[0] not in SHAPES:
        sys.exit(f"usage: python -m benchmarks.peers.mixture {'|'.join(SHAPES)}[:LAYERS] OUTPUT.gguf")
    name, _, layers = sys.argv[1].partition(":")
    shape = SHAPES[name]
    write(replace(shape, layers=int(layers)) if layers else shape, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
