"""A GGUF file of a mixture of experts with random weights in q4_0, to measure picompile and other engines with.

    python -m benchmarks.peers.mixture olmoe-1b-7b build/bench/olmoe.gguf
    picompile compile build/bench/olmoe.gguf -o build/bench/olmoe --target native
    picompile bench build/bench/olmoe -p 512 -n 128
    llama-bench -m build/bench/olmoe.gguf -t 2 -p 512 -n 0
    llama-bench -m build/bench/olmoe.gguf -t 2 -p 0 -n 64 -d 128

The file serves to measure speed; its text means nothing. Routers and norms are float32, all other matrices q4_0. A
shape may be a smaller one: `olmoe-1b-7b:3` has three of its layers. ik_llama.cpp reads no `olmoe-1b-7b`, and llama.cpp
alone reads `relu2-moe-1b-5b`.
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
# llama.cpp runs a file of Nemotron's architecture only with a recurrent layer: a small one, 0.3 MB of the weights.
_CONV, _INNER, _STATE = 4, 64, 16
# Weights of such a scale have a standard deviation of 0.02, as initial ones have.
_SCALE = np.float16(0.0043)


@dataclass(frozen=True)
class MixtureShape:
    """Sizes of a mixture, by the names of GGUF's keys. `head_norms`: whether queries are normalized head by head.

    Without a gate, a layer is two of Nemotron's: attention, and experts with a shared one of `shared` neurons.
    """

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
    shared: int = 0

    @property
    def is_gated(self) -> bool:
        """Whether experts have a gate."""
        return self.architecture != "nemotron_h_moe"


_OLMOE = MixtureShape("olmoe", 16, 2048, 16, 16, 128, 64, 8, 1024, 50304, False)

SHAPES = {
    "olmoe-1b-7b": _OLMOE,
    # ik_llama.cpp does not know OLMoE's architecture, and reads the same sizes in this one.
    "olmoe-as-qwen3": replace(_OLMOE, architecture="qwen3moe", head_norms=True),
    # `picompile synth` makes this shape too.
    "relu2-moe-1b-5b": replace(_OLMOE, architecture="nemotron_h_moe", shared=32),
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
        # Nemotron counts attention and experts as layers of their own.
        attention, experts = (f"blk.{layer}",) * 2 if shape.is_gated else (f"blk.{2 * layer}", f"blk.{2 * layer + 1}")
        yield _Tensor(f"{attention}.attn_norm.weight", (hidden,), packed=False)
        for name, rows in (("q", wide), ("k", narrow), ("v", narrow)):
            yield _Tensor(f"{attention}.attn_{name}.weight", (rows, hidden))
        yield _Tensor(f"{attention}.attn_output.weight", (hidden, wide))
        for name, rows in (("q", wide), ("k", narrow)) if shape.is_gated else ():
            size = shape.head_size if shape.head_norms else rows
            yield _Tensor(f"{attention}.attn_{name}_norm.weight", (size,), packed=False)
        norm = "ffn_norm" if shape.is_gated else "attn_norm"
        yield _Tensor(f"{experts}.{norm}.weight", (hidden,), packed=False)
        yield _Tensor(f"{experts}.ffn_gate_inp.weight", (shape.experts, hidden), packed=False)
        for name in ("gate", "up") if shape.is_gated else ("up",):
            yield _Tensor(f"{experts}.ffn_{name}_exps.weight", (shape.experts, shape.neurons, hidden))
        yield _Tensor(f"{experts}.ffn_down_exps.weight", (shape.experts, hidden, shape.neurons))
        if shape.shared:
            yield _Tensor(f"{experts}.exp_probs_b.bias", (shape.experts,), packed=False)
            yield _Tensor(f"{experts}.ffn_up_shexp.weight", (shape.shared, hidden))
            yield _Tensor(f"{experts}.ffn_down_shexp.weight", (hidden, shape.shared))
    if not shape.is_gated:
        yield from _recurrent_tensors(f"blk.{2 * shape.layers}", hidden)
    yield _Tensor("output_norm.weight", (hidden,), packed=False)
    yield _Tensor("output.weight", (shape.vocabulary, hidden))


def _recurrent_tensors(layer: str, hidden: int) -> Iterator[_Tensor]:
    convolved = _INNER + 2 * _STATE
    yield _Tensor(f"{layer}.attn_norm.weight", (hidden,), packed=False)
    yield _Tensor(f"{layer}.ssm_in.weight", (_INNER + convolved + 1, hidden))
    yield _Tensor(f"{layer}.ssm_conv1d.weight", (convolved, _CONV), packed=False)
    yield _Tensor(f"{layer}.ssm_conv1d.bias", (convolved,), packed=False)
    yield _Tensor(f"{layer}.ssm_dt.bias", (1,), packed=False)
    yield _Tensor(f"{layer}.ssm_a", (1, 1), packed=False)
    yield _Tensor(f"{layer}.ssm_d", (1, 1), packed=False)
    yield _Tensor(f"{layer}.ssm_norm.weight", (1, _INNER), packed=False)
    yield _Tensor(f"{layer}.ssm_out.weight", (hidden, _INNER))


def _describe(writer: gguf.GGUFWriter, shape: MixtureShape) -> None:
    writer.add_embedding_length(shape.hidden)
    if shape.is_gated:
        writer.add_feed_forward_length(shape.neurons)
        writer.add_head_count_kv(shape.kv_heads)
        writer.add_block_count(shape.layers)
    else:
        _describe_nemotron(writer, shape)
    if shape.architecture != "olmoe":
        writer.add_expert_feed_forward_length(shape.neurons)
    writer.add_head_count(shape.heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_freq_base(1e6 if shape.head_norms else 1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_context_length(32768)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.chosen)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    describe_vocabulary(writer, shape.vocabulary)


def _describe_nemotron(writer: gguf.GGUFWriter, shape: MixtureShape) -> None:
    """Add the keys that only Nemotron has. The last layer is the recurrent one."""
    writer.add_block_count(2 * shape.layers + 1)
    writer.add_head_count_kv([shape.kv_heads, 0] * shape.layers + [0])
    writer.add_feed_forward_length([0, shape.neurons] * shape.layers + [0])
    writer.add_layer_norm_eps(1e-5)
    writer.add_expert_shared_feed_forward_length(shape.shared)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_ssm_conv_kernel(_CONV)
    writer.add_ssm_inner_size(_INNER)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_time_step_rank(1)
    writer.add_ssm_group_count(1)


def main() -> None:
    """Write the file that the command line names."""
    if len(sys.argv) != 3 or sys.argv[1].partition(":")[0] not in SHAPES:
        sys.exit(f"usage: python -m benchmarks.peers.mixture {'|'.join(SHAPES)}[:LAYERS] OUTPUT.gguf")
    name, _, layers = sys.argv[1].partition(":")
    shape = SHAPES[name]
    write(replace(shape, layers=int(layers)) if layers else shape, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
