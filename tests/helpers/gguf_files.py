"""GGUF files of transformers' models, written as llama.cpp's and PowerInfer's converters write them.

What the converters do to tensors stands here once more, forwards: `convert_hf_to_gguf.py` of llama.cpp, `convert.py`
and `convert-hf-to-powerinfer-gguf.py` of PowerInfer. Shared with the reader is only the table of names in `gguf`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

Array = npt.NDArray[Any]
Parts = Iterable[tuple[str, Array]]

VOCABULARY = 300
# What llama.cpp keeps in float32, whatever the type of matrices; and it keeps vectors so.
_PLAIN = ("norm", "ssm", ".bias", "ffn_gate_inp")
_BLOCK = {"F32": 1, "F16": 1, "BF16": 1, "Q4_0": 32, "Q4_1": 32, "Q5_0": 32, "Q5_1": 32, "Q8_0": 32}


@dataclass(frozen=True, eq=False)
class Example:
    """A small model: its class in transformers, its config, the architecture and the metadata of its GGUF file."""

    architecture: str
    model_class: str
    config: Mapping[str, Any]
    metadata: Callable[[Any], Mapping[str, Any]]
    split: Callable[[Any, str, Array], Parts] = lambda config, name, values: [(name, values)]
    powerinfer: bool = False


def build(example: Example, seed: int = 0) -> nn.Module:
    """The model with random weights, whose norms are not 1 and biases not 0."""
    import transformers

    from picompile.frontend.bamboo import BambooConfig, BambooForCausalLM

    bamboo = example.model_class == "BambooForCausalLM"
    model_class = BambooForCausalLM if bamboo else getattr(transformers, example.model_class)
    config_class = BambooConfig if bamboo else model_class.config_class
    torch.manual_seed(seed)
    model: nn.Module = model_class(config_class(**example.config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("A_log"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def save_example(
    folder: Path, name: str = "llama", type_name: str = "F32", powerinfer: bool = False, **more: Any
) -> Path:
    """Write an example with its random weights to model.gguf in a folder, which may be there; see `write_example`."""
    example = (POWERINFER_EXAMPLES if powerinfer else EXAMPLES)[name]
    write_example(folder / "model.gguf", example, build(example), type_name, **more)
    return folder / "model.gguf"


def write_example(
    file: Path, example: Example, model: nn.Module, type_name: str = "F32", without: str = "", **more: Any
) -> None:
    """`model` as a GGUF file whose matrices are of `type_name`, where their rows are whole blocks of it.

    A tensor can be left out. `more` are values of the metadata under full keys, or `tensors`: others by name.
    """
    config = model.config
    tensors: dict[str, Array] = dict(more.pop("tensors", {})) | dict(gguf_tensors(example, model))
    tensors.pop(without, None)
    metadata = {f"{example.architecture}.{key}": value for key, value in example.metadata(config).items()}
    write_file(file, example.architecture, {**metadata, **more}, tensors, type_name)
    if example.powerinfer:
        with file.open("r+b") as opened:
            opened.write(b"PWRI")


def write_file(
    file: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Array],
    type_name: str = "F32",
    blocks: Mapping[str, str] | None = None,
    types: Mapping[str, str] | None = None,
) -> None:
    """A GGUF file of these values and tensors. Lists become arrays, floats float32, whole numbers uint32.

    Tensors in `blocks` are blocks already, uint8 [rows, row bytes], of the types that it has for their names. Others
    are of `type_name`, but for those in `types`.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    writer = GGUFWriter(file, architecture)
    adds = {bool: writer.add_bool, str: writer.add_string, list: writer.add_array, float: writer.add_float32}
    for key, value in metadata.items():
        adds.get(type(value), writer.add_uint32)(key, value)
    for name, values in tensors.items():
        if name in (blocks or {}):
            writer.add_tensor(name, values, raw_dtype=GGMLQuantizationType[blocks[name]])
            continue
        own = (types or {}).get(name, type_name)
        plain = values.ndim < 2 or any(part in name for part in _PLAIN) or values.shape[-1] % _BLOCK.get(own, 32)
        kind = GGMLQuantizationType["F32" if plain else own]
        data = np.ascontiguousarray(values.astype(np.float32))
        if kind.name in ("F32", "F16"):
            writer.add_tensor(name, data if kind.name == "F32" else data.astype(np.float16))
        else:
            writer.add_tensor(name, quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(example: Example, model: nn.Module) -> Parts:
    """Yield the tensors of a model under the names that its GGUF file has for them."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    known = {"bamboo": "llama", "opt": "bert"}.get(example.architecture, example.architecture)
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == known)
    names = get_tensor_name_map(number, 8)
    for name, parameter in model.named_parameters():
        values: Array = parameter.detach().numpy()
        if example.architecture == "opt":
            found = _opt_name(name)
        else:
            # BLOOM's names in the table are those of BloomModel.
            found = names.get_name(name, (".weight", ".bias"))
            found = found or names.get_name(name.removeprefix("transformer."), (".weight", ".bias"))
            if found is None:
                found = names.get_name(name.replace("gate_up_proj", "up_proj"))
                assert found is not None, name
                found = found if found.endswith(("ssm_a", "ssm_d")) else f"{found}.weight"
        if found.endswith("_exps"):
            found = f"{found}.weight"
        for theirs, part in example.split(model.config, found, values):
            if example.powerinfer and ".ffn_down." in theirs:
                yield theirs.replace("ffn_down", "ffn_down_t"), part.T
            else:
                yield theirs, part


def _opt_name(name: str) -> str:
    parts = name.removeprefix("model.decoder.").split(".")
    if parts[0] != "layers":
        table = {"embed_tokens": "token_embd", "embed_positions": "position_embd", "final_layer_norm": "output_norm"}
        return f"{table[parts[0]]}.{parts[-1]}"
    table = {f"{letter}_proj": f"attn_{letter}" for letter in "qkv"} | {"out_proj": "attn_output"}
    table |= {"self_attn_layer_norm": "attn_norm", "final_layer_norm": "ffn_norm", "fc1": "ffn_up", "fc2": "ffn_down"}
    return f"blk.{parts[1]}.{table[parts[-2]]}.{parts[-1]}"


# What converters do to tensors.


def permuted(values: Array, heads: int) -> Array:
    """Llama's rows for rotary embeddings of neighbours: `permute` of convert_hf_to_gguf.py."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _llama_split(config: Any, name: str, values: Array) -> Parts:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    part = name.split(".")[2] if name.startswith("blk.") else ""
    return [(name, permuted(values, heads[part]) if part in heads else values)]


def _falcon_split(config: Any, name: str, values: Array) -> Parts:
    """Queries of all groups first, then keys, then values, as BLOOM's, which has groups of one."""
    if "attn_qkv" not in name:
        return [(name, values)]
    heads, bloom = config.num_attention_heads, hasattr(config, "n_layer")
    kv_heads = heads if bloom else config.num_kv_heads if config.new_decoder_architecture else 1
    rows = (kv_heads, heads // kv_heads + 2, config.hidden_size // heads, *values.shape[1:])
    grouped = values.reshape(rows)
    parts = [grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]]
    return [(name, np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts]))]


def _gpt2_split(config: Any, name: str, values: Array) -> Parts:
    transposed = values.ndim == 2 and name.split(".")[-2] in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    return [(name, values.T if transposed else values)]


def _one_more(config: Any, name: str, values: Array) -> Parts:
    return [(name, values + 1 if name.endswith("norm.weight") else values)]


def _mamba_split(config: Any, name: str, values: Array) -> Parts:
    if name.endswith("ssm_a"):
        return [(name, -np.exp(values))]
    is_filter = name.endswith(("ssm_conv1d.weight", "shortconv.conv.weight"))
    return [(name, values[:, 0] if is_filter else values)]


def _experts_split(config: Any, name: str, values: Array) -> Parts:
    if "ffn_up_exps" in name or "ffn_gate_up_exps" in name:
        stem = name.split(".ffn_")[0]
        gate, up = np.split(values, 2, axis=1)
        return [(f"{stem}.ffn_gate_exps.weight", gate), (f"{stem}.ffn_up_exps.weight", up)]
    return [(name, values[0] if "ffn_gate_inp_shexp" in name else values)]


# The examples.


def _sizes(config: Any, **more: Any) -> dict[str, Any]:
    """The values that most architectures have, by whatever name the config has them."""

    def first(*names: str) -> Any:
        return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)

    values: dict[str, Any] = {
        "context_length": first("max_position_embeddings", "n_positions") or 64,
        "block_count": first("num_hidden_layers", "n_layer"),
        "embedding_length": first("hidden_size", "n_embd"),
        "feed_forward_length": first("ffn_hidden_size", "ffn_dim", "n_inner", "intermediate_size"),
        "attention.head_count": first("num_attention_heads", "n_head"),
        "attention.head_count_kv": first("num_key_value_heads"),
        "vocab_size": config.vocab_size,
        "rope.freq_base": (getattr(config, "rope_parameters", None) or {}).get("rope_theta"),
    } | more
    return {key: value for key, value in values.items() if value is not None}


def _rms(config: Any) -> dict[str, Any]:
    return _sizes(config, **{"attention.layer_norm_rms_epsilon": float(config.rms_norm_eps)})


def _llama_values(config: Any) -> dict[str, Any]:
    return _rms(config) | {"rope.dimension_count": config.head_dim or config.hidden_size // config.num_attention_heads}


def _wide_heads(config: Any) -> dict[str, Any]:
    return _rms(config) | {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}


def _experts(config: Any) -> dict[str, Any]:
    return _rms(config) | {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}


def _falcon_values(config: Any) -> dict[str, Any]:
    kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
    return _layer_norms(config) | {"attention.head_count_kv": kv_heads}


def _layer_norms(config: Any) -> dict[str, Any]:
    values = _sizes(config, **{"attention.layer_norm_epsilon": float(config.layer_norm_epsilon)})
    return {key: value for key, value in values.items() if key not in ("vocab_size", "rope.freq_base")}


def _opt_values(config: Any) -> dict[str, Any]:
    return _sizes(config, context_length=config.max_position_embeddings + 2)


def _norms(key: str, field_name: str, **more: str) -> Callable[[Any], dict[str, Any]]:
    def values(config: Any) -> dict[str, Any]:
        partial = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        found = _sizes(config, **{key: float(getattr(config, field_name))})
        return found | {"rope.dimension_count": int(head_dim * partial)} | more

    return values


def _bloom_values(config: Any) -> dict[str, Any]:
    return _layer_norms(config) | {"feed_forward_length": 4 * config.hidden_size}


def _mamba_values(config: Any) -> dict[str, Any]:
    more = {"ssm.conv_kernel": config.conv_kernel, "ssm.inner_size": config.intermediate_size}
    more |= {"ssm.state_size": config.state_size, "ssm.time_step_rank": config.time_step_rank}
    more |= {"attention.layer_norm_rms_epsilon": float(config.layer_norm_epsilon), "feed_forward_length": 0}
    return _sizes(config) | more | {"attention.head_count": 0}


def _lfm2_values(config: Any) -> dict[str, Any]:
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    more = {"attention.head_count_kv": heads, "shortconv.l_cache": config.conv_L_cache}
    return _sizes(config) | more | {"attention.layer_norm_rms_epsilon": float(config.norm_eps)}


def _gemma3_values(config: Any) -> dict[str, Any]:
    return _wide_heads(config) | {"attention.sliding_window": config.sliding_window, "rope.freq_base": 1000000.0}


def _shared_experts(config: Any) -> dict[str, Any]:
    shared = {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size}
    return _experts(config) | shared | {"expert_feed_forward_length": config.moe_intermediate_size}


def _wide_experts(config: Any) -> dict[str, Any]:
    return _experts(config) | _wide_heads(config) | {"expert_feed_forward_length": config.moe_intermediate_size}


_COMMON = {"vocab_size": VOCABULARY, "hidden_size": 96, "num_hidden_layers": 2}


def _config(heads: int = 4, kv_heads: int = 2, **more: Any) -> dict[str, Any]:
    sizes = {"intermediate_size": 160, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {**_COMMON, **sizes, "max_position_embeddings": 256, "tie_word_embeddings": False, **more}


def _falcon_config(**more: Any) -> dict[str, Any]:
    sizes = {"num_attention_heads": 6, "ffn_hidden_size": 160, "max_position_embeddings": 256}
    return {**_COMMON, **sizes, "alibi": False, "bias": False, **more}


_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160}
_BIASES = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
_GROUPED = _falcon_config(new_decoder_architecture=True, num_kv_heads=2)
_BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 96, "n_layer": 2, "n_head": 4}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 160}
_PARTIAL = {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
_CONV = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
_OPT = {"word_embed_proj_dim": 96, "ffn_dim": 160, "num_attention_heads": 4, "max_position_embeddings": 64}
_RMS, _LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
# llama.cpp takes the size of a head for the scale of attention, as all but the largest of these models do.
_TIED_WIDE = _config(head_dim=32, query_pre_attn_scalar=32, tie_word_embeddings=True)

# By name: the class in transformers without its end, and what `Example` has besides.
_EXAMPLES: dict[str, tuple[Any, ...]] = {
    "llama": ("Llama", _config(), _llama_values, _llama_split),
    "llama-tied": ("Llama", _config(heads=3, kv_heads=3, **_BIASES), _llama_values, _llama_split),
    "qwen2": ("Qwen2", _config(), _rms),
    "qwen3": ("Qwen3", _config(head_dim=32), _wide_heads),
    "qwen2moe": ("Qwen2Moe", _config(shared_expert_intermediate_size=64, **_MOE), _shared_experts, _experts_split),
    "qwen3moe": ("Qwen3Moe", _config(head_dim=32, norm_topk_prob=True, **_MOE), _wide_experts, _experts_split),
    "falcon-7b": ("Falcon", _falcon_config(multi_query=True), _falcon_values, _falcon_split),
    "falcon-40b": ("Falcon", _GROUPED, _falcon_values, _falcon_split),
    "phi3": ("Phi3", _config(pad_token_id=0), _norms(_RMS, "rms_norm_eps")),
    "bloom": ("Bloom", _BLOOM, _bloom_values, _falcon_split),
    "stablelm": ("StableLm", _config(use_qkv_bias=True, **_PARTIAL), _norms(_LAYER, "layer_norm_eps")),
    "gpt2": ("GPT2LMHeadModel", _GPT2, _layer_norms, _gpt2_split),
    "starcoder2": ("Starcoder2", _config(), _norms(_LAYER, "norm_epsilon")),
    "mamba": ("Mamba", {**_COMMON, "state_size": 8, "time_step_rank": 8}, _mamba_values, _mamba_split),
    "nemotron": ("Nemotron", _config(), _norms(_LAYER, "norm_eps"), _one_more),
    "gemma2": ("Gemma2", _TIED_WIDE, _wide_heads, _one_more),
    "gemma3": ("Gemma3", _TIED_WIDE, _gemma3_values, _one_more),
    "lfm2": ("Lfm2", _config(tie_word_embeddings=True, **_CONV), _lfm2_values, _mamba_split),
}
_POWERINFER: dict[str, tuple[Any, ...]] = {
    "llama": ("Llama", _config(hidden_act="relu"), _llama_values, _llama_split),
    "bamboo": ("Bamboo", _config(), _llama_values, _llama_split),
    "falcon": ("Falcon", {**_GROUPED, "activation": "relu"}, _falcon_values, _falcon_split),
    "opt": ("OPT", {**_COMMON, **_OPT}, _opt_values),
}


def _example(name: str, model: str, *rest: Any, powerinfer: bool = False) -> Example:
    model_class = model if model.endswith("Model") else f"{model}ForCausalLM"
    return Example(name.partition("-")[0], model_class, *rest, powerinfer=powerinfer)


EXAMPLES = {name: _example(name, *rest) for name, rest in _EXAMPLES.items()}
POWERINFER_EXAMPLES = {name: _example(name, *rest, powerinfer=True) for name, rest in _POWERINFER.items()}


def quantizable_types() -> Sequence[str]:
    """The types that the `gguf` package can make of numbers, whose blocks divide small rows."""
    return tuple(_BLOCK)


# Tokenizers.


def byte_level_metadata(vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """A vocabulary of all bytes, two merges, `<s>`, `</s>` and `<|eot|>`, and words; ids as `_config` has them."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "he", "ll", "<s>", "</s>", "<|eot|>"]
    tokens += [f"word{number}" for number in range(len(tokens), vocabulary)]
    kinds = [3 if token in ("<s>", "</s>", "<|eot|>") else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["h e", "l l"],
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.ggml.eos_token_id": 259,
        "tokenizer.ggml.eot_token_id": 260,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def sentencepiece_metadata() -> dict[str, Any]:
    """A vocabulary with scores and without merges, as Llama 2 has it."""
    words = ["▁", *"helowrd", "he", "ll", "llo", "hello", "▁hello", "wo", "rld", "world", "▁world"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(number) for number in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


# Damage.


_ODD_NUMBERS = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 18, 31, 64, 255, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40),
    *(2**62, 2**63, 2**64 - 1),
)


def refusal(file: Path) -> str | None:
    """The line that a file is refused with as a model, None for one that is read to its end."""
    from picompile.errors import PicompileError
    from picompile.frontend.gguf.model import open_gguf
    from picompile.frontend.gguf.tokenizer import read_gguf_tokenizer

    try:
        opened = open_gguf(file)
        read_gguf_tokenizer(opened.header)
        opened.fingerprint()
        for name in opened.tensors:
            opened.load(name)
            opened.packed(name, "q8")
    except PicompileError as error:
        return str(error)
    return None


def damaged(file: Path, count: int, seed: int) -> Iterable[tuple[str, bytes]]:
    """`count` changed copies of a GGUF file, each with what was done: most of it in the header."""
    data, (numbers, header_bytes), draw = file.read_bytes(), _numbers(file), np.random.default_rng(seed)
    for number in range(count):
        at = int(draw.integers(4, header_bytes))
        kind = number % 6
        if kind == 0:
            cut = int(draw.integers(0, len(data)))
            yield f"cut to {cut} bytes", data[:cut]
        elif kind == 1:
            bit = int(draw.integers(8))
            yield f"bit {bit} of byte {at}", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        elif kind in (2, 3):
            at, size = numbers[int(draw.integers(len(numbers)))]
            own = int.from_bytes(data[at : at + size], "little")
            choices = (own - 1, own + 1, own + 32, len(data), *_ODD_NUMBERS)
            value = choices[int(draw.integers(len(choices)))] % 2 ** (8 * size)
            yield f"{value} in {size} bytes at {at}", data[:at] + value.to_bytes(size, "little") + data[at + size :]
        elif kind == 4:
            size = int(draw.integers(1, 64))
            yield f"{size} random bytes at {at}", data[:at] + draw.bytes(size) + data[at + size :]
        else:
            size = int(draw.integers(1, 64))
            yield f"without {size} bytes at {at}", data[:at] + data[at + size :]


def _numbers(file: Path) -> tuple[list[tuple[int, int]], int]:
    """Where the header has which numbers of 4 or 8 bytes (or names as long), and its own bytes."""
    from gguf import GGUFReader

    plain = file.with_suffix(".plain")
    plain.write_bytes(b"GGUF" + file.read_bytes()[4:])
    reader = GGUFReader(plain)
    plain.unlink()
    found = []
    for field in (*reader.fields.values(), *(tensor.field for tensor in reader.tensors)):
        at = field.offset
        # Of an array, its first element.
        for part in field.parts[:6]:
            found += [(at, part.nbytes)] * (part.nbytes in (4, 8))
            at += part.nbytes
    return found, reader.data_offset
