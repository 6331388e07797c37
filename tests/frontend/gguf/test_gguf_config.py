"""Metadata of GGUF files as the contents of a config.json."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.gguf_files import EXAMPLES, POWERINFER_EXAMPLES, build, byte_level_metadata, write_example
from picompile.errors import UnsupportedModelError
from picompile.frontend.config import make_config, unknown_keys
from picompile.frontend.families import find_family
from picompile.frontend.gguf import read_header
from picompile.frontend.gguf.model_config import model_config

LLAMA = EXAMPLES["llama"]


def config_of(folder: Path, name: str = "llama", powerinfer: bool = False, **more: Any) -> dict[str, Any]:
    example, file = (POWERINFER_EXAMPLES if powerinfer else EXAMPLES)[name], folder / "model.gguf"
    write_example(file, example, build(example), **more)
    return model_config(read_header(file))


def test_a_config_says_what_was_written(tmp_path: Path) -> None:
    config = config_of(tmp_path, **byte_level_metadata())
    assert json.loads(json.dumps(config)) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 256,
        "num_hidden_layers": 2,
        "intermediate_size": 160,
        "hidden_size": 96,
        "head_dim": 24,
        "rope_theta": 10000.0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "vocab_size": 300,
        "bos_token_id": 258,
        "eos_token_id": 259,
        "pad_token_id": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "falcon-7b", "falcon-40b"])
def test_families_take_them(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path, name)
    family = find_family(config)
    made = make_config(family, config)
    expected = build(EXAMPLES[name]).config
    fields = {"hidden_size", "num_attention_heads", "vocab_size", "rope_parameters", "tie_word_embeddings"}
    fields |= {"new_decoder_architecture", "parallel_attn"} if "falcon" in name else {"num_key_value_heads"}
    for key in fields:
        assert getattr(made, key) == getattr(expected, key)
    assert unknown_keys(family, config) is None


@pytest.mark.parametrize("name", POWERINFER_EXAMPLES)
def test_powerinfer_has_relu(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path, name, powerinfer=True)
    family = find_family(config)
    made = make_config(family, config)
    assert family.fixed_activation == "relu" or getattr(made, family.activation) == "relu"
    neurons = {"opt": "ffn_dim", "falcon": "ffn_hidden_size"}.get(name, "intermediate_size")
    assert getattr(made, neurons) == 160
    assert made.max_position_embeddings == (64 if name == "opt" else 256)
    assert unknown_keys(family, config) is None


def test_other_architectures_of_powerinfer(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_example(file, EXAMPLES["qwen2"], build(EXAMPLES["qwen2"]))
    file.write_bytes(b"PWRI" + file.read_bytes()[4:])
    with pytest.raises(
        UnsupportedModelError, match="qwen2 are not supported; supported are bamboo, falcon, llama, opt"
    ):
        model_config(read_header(file))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, None),
        ({"type": "none", "factor": 4.0}, None),
        ({"factor": 1.0}, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 2.5, "original_context_length": 128, "yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 128, "beta_fast": 16.0},
        ),
        ({"type": "yarn", "factor": 2.0, "attn_factor": 1.0}, {"rope_type": "yarn", "factor": 2.0}),
        (
            {"type": "yarn", "factor": 2.0, "attn_factor": 0.5},
            {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.5 * (1.0 + 0.1 * math.log(2.0))},
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, values: dict[str, Any], expected: dict[str, Any] | None) -> None:
    more = {f"llama.rope.scaling.{key}": value for key, value in values.items()}
    assert config_of(tmp_path, **more).get("rope_scaling") == expected


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "of type longrope"),
        ({"llama.rope.scaling.type": "linear"}, "with a factor"),
        ({"tensors": {"rope_factors_long.weight": np.ones(12)}}, "of type longrope"),
        ({"tensors": {"rope_freqs.weight": np.linspace(1, 3, 12)}}, "not those of Llama 3's scaling"),
        ({"tensors": {"rope_freqs.weight": np.ones(11)}}, r"F32 \[11\], not F32 \[12\]"),
    ],
)
def test_rope_scalings_that_are_refused(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        config_of(tmp_path, **more)


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 64)])
def test_llama3_is_told_by_its_frequencies(tmp_path: Path, factor: float, original: int) -> None:
    """transformers' frequencies with and without the scaling give the divisors that llama.cpp keeps."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theta, head_dim = 500000.0, 24
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    made = LlamaConfig(hidden_size=96, num_attention_heads=4, rope_parameters={"rope_theta": theta, **scaling})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](made, "cpu")
    plain = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    divisors = (plain / scaled).numpy().round(4)
    config = config_of(tmp_path, **{"llama.rope.freq_base": theta, "tensors": {"rope_freqs.weight": divisors}})
    found = make_config(find_family(config), config)
    again, _ = ROPE_INIT_FUNCTIONS["llama3"](found, "cpu")
    torch.testing.assert_close(again, scaled, rtol=1e-6, atol=0)
    assert config["rope_scaling"]["factor"] == factor
    assert config_of(tmp_path, tensors={"rope_freqs.weight": np.ones(12)}).get("rope_scaling") is None


def test_heads_and_parts_of_them(tmp_path: Path) -> None:
    assert config_of(tmp_path, "stablelm")["partial_rotary_factor"] == 0.5
    assert config_of(tmp_path, "nemotron", **{"nemotron.rope.dimension_count": 24})["partial_rotary_factor"] == 1.0
    assert config_of(tmp_path, "qwen3")["head_dim"] == 32
    assert "head_dim" not in config_of(tmp_path, "qwen2")


def test_tokens_that_are_not_there(tmp_path: Path) -> None:
    config = config_of(tmp_path, **{"tokenizer.ggml.eos_token_id": 2**32 - 1, "tokenizer.ggml.bos_token_id": 7})
    assert (config["bos_token_id"], config["eos_token_id"]) == (7, None)


@pytest.mark.parametrize("same", [True, False])
def test_falcon_has_head_and_embedding(tmp_path: Path, same: bool) -> None:
    """Converters write both matrices, which are one in most models: transformers ties them, whatever they hold."""
    model = build(EXAMPLES["falcon-7b"])
    head = model.get_parameter("transformer.word_embeddings.weight").detach().numpy().copy()
    head[-1, -1] += 0 if same else 1
    assert config_of(tmp_path, "falcon-7b", tensors={"output.weight": head})["tie_word_embeddings"] is same
    other_type = {"output.weight": head[:, :64]}
    assert config_of(tmp_path, "falcon-7b", tensors=other_type)["tie_word_embeddings"] is False


def test_lists_of_one_value_for_each_layer(tmp_path: Path) -> None:
    config = config_of(tmp_path, **{"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [160, 160]})
    assert (config["num_key_value_heads"], config["intermediate_size"]) == (2, 160)


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("attention.scale", 0.5, False),
        ("attention.causal", False, False),
        ("attention.causal", True, True),
        ("rope.scaling.yarn_log_multiplier", 0.125, False),
        ("logit_scale", 0.25, False),
        ("logit_scale", 1.0, True),
        ("attention.sliding_window_pattern", 2, False),
        ("rope.freq_base_swa", 50000.0, False),
    ],
)
def test_keys_that_are_not_read_must_change_nothing(tmp_path: Path, key: str, value: object, read: bool) -> None:
    if read:
        assert config_of(tmp_path, **{f"llama.{key}": value}) == config_of(tmp_path)
        return
    with pytest.raises(UnsupportedModelError, match=f"llama.{key} is {value}, which is not read"):
        config_of(tmp_path, **{f"llama.{key}": value})


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("attention.sliding_window_pattern", 6, True),
        ("attention.sliding_window_pattern", 2, False),
        ("attention.sliding_window_pattern", [True, False], False),
        ("rope.freq_base_swa", 10000.0, True),
        ("rope.freq_base_swa", 50000.0, False),
        ("attn_logit_softcapping", 0.0, False),
    ],
)
def test_windows_of_gemma3_are_its_classes(tmp_path: Path, key: str, value: object, read: bool) -> None:
    if read:
        assert config_of(tmp_path, "gemma3", **{f"gemma3.{key}": value}) == config_of(tmp_path, "gemma3")
        return
    with pytest.raises(UnsupportedModelError, match=f"gemma3.{key} is .*(which is not read|must be above it)"):
        config_of(tmp_path, "gemma3", **{f"gemma3.{key}": value})


def test_a_file_without_an_architecture(tmp_path: Path) -> None:
    write_example(tmp_path / "model.gguf", EXAMPLES["llama"], build(EXAMPLES["llama"]))
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data.replace(b"general.architecture", b"general.architectura"))
    with pytest.raises(UnsupportedModelError, match="no name of an architecture in it"):
        model_config(read_header(tmp_path / "model.gguf"))


def test_a_name_says_nothing_of_the_class(tmp_path: Path) -> None:
    assert config_of(tmp_path, **{"general.name": "mistral"}) == config_of(tmp_path)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"llama.rope.freq_base": "many"}, "llama.rope.freq_base is not a number"),
        ({"llama.feed_forward_length": [1.0, 2.0]}, "is not a list of at most 16384 whole numbers"),
        ({"llama.feed_forward_length": [-1, -1]}, "is not a list of at most 16384 whole numbers"),
    ],
)
def test_values_of_other_kinds(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        config_of(tmp_path, **more)
    assert says in str(caught.value)


def test_incomplete_metadata_of_lfm2(tmp_path: Path) -> None:
    from helpers.gguf_files import write_file

    write_file(tmp_path / "model.gguf", "lfm2", {"lfm2.block_count": 1}, {"token_embd.weight": np.ones((3, 32))})
    with pytest.raises(UnsupportedModelError, match="metadata of lfm2 is incomplete"):
        model_config(read_header(tmp_path / "model.gguf"))


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_of_gemma_scale_otherwise(tmp_path: Path, name: str, layers: int) -> None:
    names = [f"blk.{layer}.ffn_norm.weight" for layer in range(2, layers)]
    tensors = {tensor: np.ones(96) for tensor in names}
    more = {f"{name}.block_count": layers, f"{name}.final_logit_softcapping": 30.0, "tensors": tensors}
    config = config_of(tmp_path, name, **more)
    assert config["query_pre_attn_scalar"] == 24 and config["final_logit_softcapping"] == 30.0
    assert "query_pre_attn_scalar" not in config_of(tmp_path, name)
