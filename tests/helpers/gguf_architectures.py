"""Small models of the architectures that picompile's own records read, written as llama.cpp's converter writes them.

The rules are those of `conversion/` in llama.cpp at 0c1e57098, forwards. The reader was also held against that
converter's own files, and against llama.cpp's logits for them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from helpers.gguf_files import VOCABULARY, Array, Example, build, permuted, write_file

Values = dict[str, Any]
_RMS, _LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


@dataclass(frozen=True, eq=False)
class Written:
    """How an architecture's files are written beyond sizes: keys by fields of the config, and moved rows.

    `interleaved` and `plus_one` are as in the reader's records, `by_part` is its `rows_by_part`. `table` is the
    architecture of `gguf`'s table with the names that the class's modules have.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Any], Values] = lambda config: {}
    interleaved: bool = False
    plus_one: bool = False
    by_part: bool = False
    table: str = ""


def _first(config: Any, *names: str) -> Any:
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


def _metadata(written: Written) -> Callable[[Any], Values]:
    def values(config: Any) -> Values:
        rope = getattr(config, "rope_parameters", None) or {}
        rope = rope.get("full_attention", rope)
        heads = _first(config, "num_attention_heads", "n_heads")
        head_dim = _first(config, "head_dim") or _first(config, "hidden_size", "d_model") // heads
        found: Values = {
            "context_length": _first(config, "max_position_embeddings", "max_seq_len"),
            "block_count": _first(config, "num_hidden_layers", "n_layers"),
            "embedding_length": _first(config, "hidden_size", "d_model"),
            "feed_forward_length": _first(config, "n_inner", "intermediate_size"),
            "attention.head_count": heads,
            "attention.head_count_kv": _first(config, "num_key_value_heads"),
            "rope.freq_base": rope.get("rope_theta"),
            _RMS: _first(config, "rms_norm_eps"),
            _LAYER: _first(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
        }
        if rope:
            found["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        if _first(config, "head_dim"):
            found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        found |= {key: getattr(config, name) for key, name in written.keys.items()} | written.more(config)
        return {key: value for key, value in found.items() if value is not None}

    return values


def save_architecture(folder: Path, name: str, **more: Any) -> Path:
    """Write an example with its random weights to model.gguf in a folder; see `write_architecture`."""
    example = ARCHITECTURE_EXAMPLES[name]
    write_architecture(folder / "model.gguf", example, build(example), **more)
    return folder / "model.gguf"


def write_architecture(
    file: Path, example: Example, model: nn.Module, fused: bool = False, type_name: str = "F32", **more: Any
) -> None:
    """Write `model` as a GGUF file of an example's architecture; see `write_file`.

    Matrices are of `type_name`. `fused` makes one tensor of queries, keys and values. `more` are values of the metadata
    under full keys.
    """
    written = WRITTEN[example]
    tensors: dict[str, Array] = {}
    listed: dict[str, list[Any]] = {}
    stacked: dict[str, list[Array]] = {}
    for name, parameter in model.named_parameters():
        values: Array = parameter.detach().numpy()
        if match := re.search(r"act_fn\.(alpha_.)", name):
            listed.setdefault(f"xielu.{match[1]}", []).append(float(values[0]))
        elif match := re.search(r"layers\.([0-9]+)\.self_attn\.([qk])_layernorm\.norms", name):
            stacked.setdefault(f"blk.{match[1]}.attn_{match[2]}_norm.weight", []).append(values)
        else:
            theirs = _tensor_name(written.table or example.architecture, name)
            tensors[theirs] = _as_converted(written, model.config, theirs, values)
    if example.architecture == "deepseek2":
        tensors = dict(part for name in tensors for part in _latent_parts(model.config, name, tensors[name]))
    tensors |= {name: np.stack(rows) for name, rows in stacked.items()}
    if example.architecture == "phi3":
        rope = model.config.rope_parameters
        tensors |= {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"]) for kind in ("long", "short")}
    if fused:
        for name in [name for name in tensors if ".attn_q." in name]:
            parts = [tensors.pop(name.replace("attn_q", f"attn_{letter}")) for letter in "qkv"]
            tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    metadata = {f"{example.architecture}.{key}": value for key, value in example.metadata(model.config).items()}
    write_file(file, example.architecture, {**metadata, **listed, **more}, tensors, type_name)


def _latent_parts(config: Any, name: str, values: Array) -> list[tuple[str, Array]]:
    """Split what makes keys and values of a latent vector; the part for keys is transposed for each head."""
    if "attn_kv_b" not in name:
        return [(name, values)]
    heads = values.reshape(config.num_attention_heads, -1, values.shape[-1])
    key, value = heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]
    return [(name.replace("kv_b", "k_b"), key.swapaxes(1, 2)), (name.replace("kv_b", "v_b"), value)]


def _tensor_name(table: str, name: str) -> str:
    """Return the name of a parameter in a file."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(number for number, known in MODEL_ARCH_NAMES.items() if known == table)
    names = get_tensor_name_map(number, 8)
    for given in (name, name.removeprefix("transformer."), name.replace("gate_up_proj", "up_proj")):
        if found := names.get_name(given, (".weight", ".bias")):
            return str(found)
    match = re.fullmatch(r"model\.layers\.([0-9]+)\.(?:self_attn|mlp)\.(\w+)(?:\.weight)?", name)
    assert match is not None, name
    return f"blk.{match[1]}.{ {'sinks': 'attn_sinks'}.get(match[2], match[2]) }.weight"


def _as_converted(written: Written, config: Any, name: str, values: Array) -> Array:
    part = name.split(".")[2] if name.startswith("blk.") else ""
    heads = _first(config, "num_attention_heads", "n_heads", "n_head")
    counts = {"attn_q": heads, "attn_k": _first(config, "num_key_value_heads") or heads}
    if written.interleaved and part in counts:
        values = permuted(values, counts[part])
    if written.by_part and part == "attn_qkv":
        grouped = values.reshape(heads, 3, -1, *values.shape[1:])
        values = np.concatenate([grouped[:, number] for number in range(3)]).reshape(values.shape)
    return values + 1 if written.plus_one and name.endswith("norm.weight") else values


def _windows(config: Any) -> Values:
    pattern = [kind == "sliding_attention" for kind in config.layer_types]
    return {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": pattern}


def _window(config: Any) -> Values:
    return {"attention.sliding_window": config.sliding_window}


def _latent(config: Any) -> Values:
    """Sizes of latent attention, as the converter has them since it writes two parts."""
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    return {
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": width,
        "attention.value_length_mla": config.v_head_dim,
        "attention.head_count_kv": 1,
        "rope.dimension_count": config.qk_rope_head_dim,
    }


def _minicpm3(config: Any) -> Values:
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    ranks = {"attention.q_lora_rank": config.q_lora_rank, "attention.kv_lora_rank": config.kv_lora_rank}
    return ranks | {"attention.key_length": width, "attention.value_length": None}


def _mpt(config: Any) -> Values:
    clip = config.attn_config.clip_qkv
    known = {"attention.max_alibi_bias": 8.0, "feed_forward_length": 4 * config.d_model}
    return known | ({"attention.clamp_kqv": clip} if clip else {})


def _starcoder(config: Any) -> Values:
    return {"attention.head_count_kv": 1 if config.multi_query else config.n_head}


def _yarn(config: Any) -> Values:
    rope = config.rope_parameters
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _long(config: Any) -> Values:
    rope = config.rope_parameters
    original = rope["original_max_position_embeddings"]
    return {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": rope["attention_factor"]}


GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
SCALES = {
    "attention_multiplier": 0.125,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}
_BASE = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 256, "pad_token_id": 0}
_BASE |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
_FREE = {**_BASE, "tie_word_embeddings": False}
_HEADS = {**_FREE, "head_dim": 32}
_FOUR = {**_FREE, "num_hidden_layers": 4, "sliding_window": 5}
_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
_WHOLE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}
_MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0 + 0.125 * index for index in range(8)],
    "long_factor": [4.0] * 8,
    "attention_factor": 1.25,
}
_MLA = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
_MLA |= {"qk_nope_head_dim": 8, "v_head_dim": 16}
_INTERLEAVED, _PLUS_ONE = Written(interleaved=True), Written(plus_one=True)
_COHERE = {"logit_scale": "logit_scale"}

# Name, an architecture and what distinguishes several of its models → class, config, how it is written.
_EXAMPLES: dict[tuple[str, str], tuple[str, Values, Written]] = {
    ("apertus", ""): ("ApertusForCausalLM", {**_FREE, **_WHOLE}, Written()),
    ("arcee", ""): ("ArceeForCausalLM", _FREE, _INTERLEAVED),
    ("bitnet", ""): ("BitNetForCausalLM", {**_BASE, "hidden_act": "silu", "tie_word_embeddings": True}, Written()),
    ("chatglm", ""): ("GlmForCausalLM", {**_FREE, "head_dim": 16, "attention_bias": True, **_HALF}, Written()),
    ("codeshell", ""): ("Starcoder2ForCausalLM", {**_FREE, "sliding_window": None}, Written()),
    ("cohere2", ""): ("Cohere2ForCausalLM", {**_FOUR, "tie_word_embeddings": True}, Written(_COHERE, _window)),
    ("command-r", ""): ("CohereForCausalLM", {**_BASE, "logit_scale": 0.25, "use_qk_norm": True}, Written(_COHERE)),
    ("deepseek2", ""): (
        "YoutuForCausalLM",
        {**_BASE, **_MLA, "v_head_dim": 12, "tie_word_embeddings": True},
        Written({}, _latent),
    ),
    ("ernie4_5", ""): ("Ernie4_5ForCausalLM", {**_HEADS, "use_bias": True}, Written()),
    ("exaone", ""): ("LlamaForCausalLM", _FREE, Written()),
    ("exaone4", ""): ("Exaone4ForCausalLM", {**_FOUR, "sliding_window_pattern": 4}, Written({}, _windows)),
    ("gemma", ""): ("GemmaForCausalLM", {**_HEADS, "tie_word_embeddings": True}, _PLUS_ONE),
    ("glm4", ""): ("Glm4ForCausalLM", {**_HEADS, "attention_bias": True, **_HALF}, Written()),
    ("gptneox", ""): (
        "GPTNeoXForCausalLM",
        {**_FREE, **_HALF, "use_parallel_residual": False},
        Written({"use_parallel_residual": "use_parallel_residual"}, by_part=True),
    ),
    ("granite", ""): ("GraniteForCausalLM", {**_FREE, **SCALES}, Written(GRANITE, interleaved=True)),
    ("granite_swa", ""): ("GraniteSWAForCausalLM", {**_FOUR, **SCALES}, Written(GRANITE, _windows, interleaved=True)),
    ("hunyuan-dense", ""): ("HunYuanDenseV1ForCausalLM", _HEADS, Written()),
    ("internlm2", ""): ("LlamaForCausalLM", _FREE, _INTERLEAVED),
    ("jais2", ""): ("Jais2ForCausalLM", {**_FREE, "num_key_value_heads": 4}, Written()),
    ("llama", "q/k/v biases"): ("Qwen2ForCausalLM", _FREE, _INTERLEAVED),
    ("minicpm", ""): (
        "GraniteForCausalLM",
        {**_FREE, **SCALES, "attention_multiplier": 0.25},
        Written({key: name for key, name in GRANITE.items() if key != "attention.scale"}, interleaved=True),
    ),
    ("minicpm3", ""): (
        "MiniCPM3ForCausalLM",
        {**_BASE, **_MLA, "tie_word_embeddings": True},
        Written({}, _minicpm3),
    ),
    ("mistral3", ""): (
        "Ministral3ForCausalLM",
        {**_HEADS, "rope_parameters": _MINISTRAL},
        Written({}, _yarn, interleaved=True),
    ),
    ("mpt", ""): (
        "MptForCausalLM",
        {"vocab_size": VOCABULARY, "d_model": 72, "n_heads": 6, "n_layers": 2, "attn_config": {"clip_qkv": 1.5}},
        Written({}, _mpt),
    ),
    ("olmo", ""): (
        "OlmoForCausalLM",
        {**_FREE, "clip_qkv": 1.5},
        Written({"attention.clamp_kqv": "clip_qkv"}, lambda config: {_LAYER: 1e-5}, interleaved=True),
    ),
    ("olmo2", ""): ("Olmo2ForCausalLM", _FREE, Written()),
    ("olmo2", "windows"): ("Olmo3ForCausalLM", _FOUR, Written({}, _windows)),
    ("orion", ""): ("StableLmForCausalLM", {**_FREE, **_WHOLE}, Written()),
    ("pangu-embedded", ""): ("LlamaForCausalLM", {**_FREE, "attention_bias": True}, Written()),
    ("phi2", ""): ("PhiForCausalLM", {**_FREE, "num_key_value_heads": 4, **_HALF}, Written()),
    ("phi3", "longrope"): (
        "Phi3ForCausalLM",
        {**_FREE, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 128},
        Written({}, _long),
    ),
    ("qwen", ""): (
        "Qwen2ForCausalLM",
        {**_FREE, "num_key_value_heads": 4},
        Written({}, lambda config: {"feed_forward_length": 192}),
    ),
    ("qwen2vl", ""): ("Qwen2ForCausalLM", _FREE, Written()),
    ("qwen3vl", ""): ("Qwen3ForCausalLM", _HEADS, Written()),
    ("seed_oss", ""): ("SeedOssForCausalLM", _HEADS, Written()),
    ("smollm3", ""): ("SmolLM3ForCausalLM", {**_FREE, "num_hidden_layers": 5}, _INTERLEAVED),
    ("stablelm", "norms of heads"): (
        "StableLmForCausalLM",
        {**_FREE, "qk_layernorm": True, "use_parallel_residual": True},
        Written(),
    ),
    ("starcoder", ""): (
        "GPTBigCodeForCausalLM",
        {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 96},
        Written({}, _starcoder),
    ),
    ("xverse", ""): ("LlamaForCausalLM", _FREE, _INTERLEAVED),
}

# The tables of names that hold for classes of other architectures.
_TABLES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
_TABLES |= {"Starcoder2ForCausalLM": "starcoder2", "StableLmForCausalLM": "stablelm", "Ministral3ForCausalLM": "llama"}
_TABLES |= {"GraniteForCausalLM": "granite", "GraniteSWAForCausalLM": "granite"}

ARCHITECTURE_EXAMPLES = {
    f"{architecture} with {what}" if what else architecture: Example(
        architecture, model_class, config, _metadata(written)
    )
    for (architecture, what), (model_class, config, written) in _EXAMPLES.items()
}
WRITTEN = {
    example: replace(written, table=_TABLES.get(model_class, ""))
    for example, (model_class, _, written) in zip(ARCHITECTURE_EXAMPLES.values(), _EXAMPLES.values(), strict=True)
}
# Written as one tensor in some files: queries, keys and values one after the other.
FUSED = ("chatglm", "codeshell", "phi2", "qwen")
