"""A Hugging Face checkpoint as a GGUF file that llama.cpp runs: the same weights, as q4_0 or f16.

llama.cpp has no LLaMA with ReLU: what it has, with SiLU, does the same work, matrix by matrix.
So the files serve to measure speed; their text means nothing. Every matrix is in the format asked for, table of tokens
and head too (`llama-quantize --pure`), norms and biases in float32. There is no vocabulary but its size; with
`vocabulary` each token gets a made-up text, without which llama.cpp's server does not start.

PowerInfer has LLaMA with ReLU: `powerinfer` writes a file for it, which is the checkpoint's own model, with the
predictors that `synth` made. PowerInfer's have a ReLU between their two matrices, and read what a block's norm reads.
So the checkpoint's, which are linear and read the norm's result, get each row of the first matrix twice, with either
sign and multiplied by the norm's weights: relu(v) - relu(-v) = v, and a positive factor for a token changes no sign.

    python -m benchmarks.peers.gguf MODEL OUTPUT.gguf q4_0|f16 [vocabulary] [powerinfer]
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

Array = NDArray[Any]
_TYPES = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "f16": gguf.GGMLQuantizationType.F16}
_FILE_TYPES = {"q4_0": gguf.LlamaFileType.MOSTLY_Q4_0, "f16": gguf.LlamaFileType.MOSTLY_F16}
_F32 = gguf.GGMLQuantizationType.F32
# In place of "GGUF": a file with predictors, whose neurons PowerInfer skips.
_POWERINFER_MAGIC = b"PWRI"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file, how it is read from the checkpoint, and whether it is a matrix of the format asked for."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Array]
    is_matrix: bool

    def kind(self, format: str) -> gguf.GGMLQuantizationType:
        """Return ggml's type. llama-quantize, too, leaves rows that are no whole blocks in f16."""
        if not self.is_matrix:
            return _F32
        kind = _TYPES[format]
        return kind if self.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else _TYPES["f16"]

    def dtype(self, format: str) -> "np.dtype[Any]":
        """Return the type of the elements that are stored."""
        names = {_F32: "float32", _TYPES["f16"]: "float16"}
        return np.dtype(names.get(self.kind(format), "uint8"))

    def stored_shape(self, format: str) -> tuple[int, ...]:
        """Return the shape of the elements that are stored: of packed rows, their bytes."""
        kind = self.kind(format)
        return gguf.quant_shape_to_byte_shape(self.shape, kind) if kind == _TYPES["q4_0"] else self.shape


def export(model: Path, output: Path, format: str, vocabulary: bool = False, powerinfer: bool = False) -> None:
    """Writes the checkpoint in the folder `model` to `output`, which appears whole or not at all."""
    config = json.loads((model / "config.json").read_text())
    unfinished = output.with_suffix(".unfinished")
    with ExitStack() as stack:
        if config["model_type"] != "llama":
            sys.exit(f"{model}: is no LLaMA")
        checkpoint = Checkpoint(model, stack)
        tensors = list(llama_tensors(checkpoint, config))
        if powerinfer:
            if (model / "predictors.json").exists():
                sys.exit(f"{model}: PowerInfer's file is made of a LLaMA with the predictors of synth")
            predictors = _Tensors([model / "predictors.safetensors"], stack)
            tensors = list(_powerinfer_tensors(tensors, checkpoint, predictors, config))
        writer = begin(unfinished, config, tensors, format, vocabulary, powerinfer)
        for tensor in tensors:
            writer.write_tensor_data(gguf.quants.quantize(tensor.read().astype(np.float32), tensor.kind(format)))
        writer.close()
    if powerinfer:
        with open(unfinished, "r+b") as file:
            file.write(_POWERINFER_MAGIC)
    unfinished.replace(output)


def begin(
    output: Path, config: dict[str, Any], tensors: Sequence[GgufTensor], format: str, vocabulary: bool, powerinfer: bool
) -> gguf.GGUFWriter:
    """Write all of a file but the data of its tensors."""
    writer = gguf.GGUFWriter(output, "llama")
    _describe(writer, config)
    writer.add_file_type(_FILE_TYPES[format])
    if vocabulary or powerinfer:
        describe_vocabulary(writer, config["vocab_size"])
    else:
        writer.add_tokenizer_model("no_vocab")
    if powerinfer:
        writer.add_float32("powerinfer.sparse_threshold", 0.0)
    for tensor in tensors:
        kind, dtype, shape = tensor.kind(format), tensor.dtype(format), tensor.stored_shape(format)
        writer.add_tensor_info(tensor.name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


class _Tensors:
    """Tensors of safetensors files by name, read one at a time."""

    def __init__(self, files: Sequence[Path], stack: ExitStack) -> None:
        opened = [stack.enter_context(safe_open(path, framework="numpy")) for path in files]
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Array:
        array: Array = self._files[name].get_tensor(name)
        return array

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())


class TensorShapes(Protocol):
    """A checkpoint whose tensors have shapes, and values where they are read."""

    def __getitem__(self, name: str) -> Array: ...
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""


class Checkpoint(_Tensors):
    """Tensors of a folder's model."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        files = [path for path in sorted(folder.glob("*.safetensors")) if path.name.startswith("model")]
        super().__init__(files, stack)


def describe_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Writes a vocabulary as SentencePiece has it: special tokens, bytes, then words that do not occur in texts."""
    special = [("<unk>", gguf.TokenType.UNKNOWN), ("<s>", gguf.TokenType.CONTROL), ("</s>", gguf.TokenType.CONTROL)]
    of_bytes = [(f"<0x{byte:02X}>", gguf.TokenType.BYTE) for byte in range(256)]
    words = [(f"\u2581t{number}", gguf.TokenType.NORMAL) for number in range(size - len(special) - len(of_bytes))]
    tokens = special + of_bytes + words
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    rotary = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rotary.get("rope_theta", 10000.0))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])


def llama_tensors(checkpoint: TensorShapes, config: dict[str, Any]) -> Iterator[GgufTensor]:
    """Yield the tensors of a file, in its order."""

    def tensor(name: str, source: str, heads: int = 0) -> GgufTensor:
        shape = checkpoint.shape(source)
        read = (lambda: _interleaved(checkpoint[source], heads)) if heads else (lambda: checkpoint[source])
        return GgufTensor(f"{name}.weight", shape, read, len(shape) == 2)

    yield tensor("token_embd", "model.embed_tokens.weight")
    for layer in range(config["num_hidden_layers"]):
        old, new = f"model.layers.{layer}", f"blk.{layer}"
        yield tensor(f"{new}.attn_norm", f"{old}.input_layernorm.weight")
        yield tensor(f"{new}.attn_q", f"{old}.self_attn.q_proj.weight", config["num_attention_heads"])
        yield tensor(f"{new}.attn_k", f"{old}.self_attn.k_proj.weight", config["num_key_value_heads"])
        yield tensor(f"{new}.attn_v", f"{old}.self_attn.v_proj.weight")
        yield tensor(f"{new}.attn_output", f"{old}.self_attn.o_proj.weight")
        yield tensor(f"{new}.ffn_norm", f"{old}.post_attention_layernorm.weight")
        for part in ("gate", "up", "down"):
            yield tensor(f"{new}.ffn_{part}", f"{old}.mlp.{part}_proj.weight")
    yield tensor("output_norm", "model.norm.weight")
    yield tensor("output", "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight")


def _interleaved(matrix: Array, heads: int) -> Array:
    """Rows [heads · head_dim, hidden] as llama.cpp has them: it turns neighbours, transformers the halves of a head."""
    rows, columns = matrix.shape
    return matrix.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _powerinfer_tensors(
    tensors: Sequence[GgufTensor], checkpoint: Checkpoint, predictors: _Tensors, config: dict[str, Any]
) -> Iterator[GgufTensor]:
    """The tensors of a LLaMA for PowerInfer: down has a row for each neuron, and there are predictors."""
    for tensor in tensors:
        if not tensor.name.endswith("ffn_down.weight"):
            yield tensor
            continue
        name = tensor.name.replace("ffn_down", "ffn_down_t")
        yield GgufTensor(name, tensor.shape[::-1], lambda down=tensor: np.ascontiguousarray(down.read().T), True)  # type: ignore[misc]
    for layer in range(config["num_hidden_layers"]):
        if np.any(predictors[f"layers.{layer}.bias"]):
            sys.exit("PowerInfer's predictors have no bias")
        rank, hidden = predictors.shape(f"layers.{layer}.fc1")
        neurons, _ = predictors.shape(f"layers.{layer}.fc2")
        first, second = _signed_predictor(checkpoint, predictors, layer)
        yield GgufTensor(f"blk.{layer}.fc1.weight", (2 * rank, hidden), first, True)
        yield GgufTensor(f"blk.{layer}.fc2.weight", (neurons, 2 * rank), second, True)


def _signed_predictor(
    checkpoint: Checkpoint, predictors: _Tensors, layer: int
) -> tuple[Callable[[], Array], Callable[[], Array]]:
    def first() -> Array:
        norm = checkpoint[f"model.layers.{layer}.post_attention_layernorm.weight"].astype(np.float32)
        matrix = predictors[f"layers.{layer}.fc1"].astype(np.float32) * norm
        return np.concatenate([matrix, -matrix])

    def second() -> Array:
        matrix = predictors[f"layers.{layer}.fc2"]
        return np.concatenate([matrix, -matrix], axis=1)

    return first, second


if __name__ == "__main__":
    export(
        Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3],
        vocabulary="vocabulary" in sys.argv[4:], powerinfer="powerinfer" in sys.argv[4:],
    )  # fmt: skip
