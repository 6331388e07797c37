"""Metadata of GGUF files as the contents of a config.json."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.gguf_files import EXAMPLES, POWERINFER_EXAMPLES, build, byte_level_metadata, save_example, write_file
from picompile.errors import UnsupportedModelError
from picompile.frontend.config import make_config
from picompile.frontend.config_keys import unknown_keys
from picompile.frontend.families import find_family
from picompile.frontend.gguf.header import read_header
from picompile.frontend.gguf.model_config import model_config


def config_of(folder: Path, name: str = "llama", powerinfer: bool = False, **more: Any) -> dict[str, Any]:
    return model_config(read_header(save_example(folder, name, powerinfer=powerinfer, **more)))


def test_a_config_says_what_was_written(tmp_path: Path) -> None:
    config = config_of(tmp_path, **byte_level_metadata())
    assert json.loads(json.dumps(config)) == {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 256,
        "num_hidden_layers": 2, "intermediate_size": 160, "hidden_size": 96, "head_dim": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "vocab_size": 300,
        "bos_token_id": 258, "eos_token_id": 259, "pad_token_id": None, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False,
    }  # fmt: skip


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
    file = save_example(tmp_path, "qwen2")
    file.write_bytes(b"PWRI" + file.read_bytes()[4:])
    with pytest.raises(UnsupportedModelError, match="qwen2 are not supported; supported are bamboo, falcon, llama, op"):
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
        ({"attn_factor": 0.5}, "llama.rope.scaling.attn_factor is 0.5, which only yarn and longrope have"),
        ({"type": "longrope", "factor": 4.0}, "of type longrope"),
        ({"type": "linear"}, "with a factor"),
    ],
)
def test_rope_scaling(tmp_path: Path, values: dict[str, Any], expected: dict[str, Any] | str | None) -> None:
    more = {f"llama.rope.scaling.{key}": value for key, value in values.items()}
    if not isinstance(expected, str):
        found = config_of(tmp_path, **more)["rope_parameters"]
        assert found == {"rope_theta": 10000.0, **(expected or {"rope_type": "default"})}
        return
    with pytest.raises(UnsupportedModelError, match=expected):
        config_of(tmp_path, **more)


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 64)])
def test_llama3_is_told_by_its_frequencies(tmp_path: Path, factor: float, original: int) -> None:
    """transformers' frequencies with and without the scaling give the divisors that llama.cpp keeps."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theta, head_dim = 500000.0, 24
    scaling = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"factor": factor, "original_max_position_embeddings": original}
    made = LlamaConfig(hidden_size=96, num_attention_heads=4, rope_parameters={"rope_theta": theta, **scaling})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](made, "cpu")
    plain = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    divisors = (plain / scaled).numpy().round(4)
    config = config_of(tmp_path, **{"llama.rope.freq_base": theta, "tensors": {"rope_freqs.weight": divisors}})
    found = make_config(find_family(config), config)
    again, _ = ROPE_INIT_FUNCTIONS["llama3"](found, "cpu")
    torch.testing.assert_close(again, scaled, rtol=1e-6, atol=0)
    assert config["rope_parameters"]["factor"] == factor
    plain = config_of(tmp_path, tensors={"rope_freqs.weight": np.ones(12)})["rope_parameters"]
    assert plain["rope_type"] == "default"


def test_heads_and_parts_of_them(tmp_path: Path) -> None:
    for name, more, part in (("stablelm", {}, 0.5), ("nemotron", {"nemotron.rope.dimension_count": 24}, 1.0)):
        assert config_of(tmp_path, name, **more)["rope_parameters"]["partial_rotary_factor"] == part
    assert config_of(tmp_path, "qwen3")["head_dim"] == 32
    assert "head_dim" not in config_of(tmp_path, "qwen2")


@pytest.mark.parametrize("same", [True, False])
def test_falcon_has_head_and_embedding(tmp_path: Path, same: bool) -> None:
    """Converters write both matrices, which are one in most models: transformers ties them, whatever they hold."""
    model = build(EXAMPLES["falcon-7b"])
    head = model.get_parameter("transformer.word_embeddings.weight").detach().numpy().copy()
    head[-1, -1] += 0 if same else 1
    assert config_of(tmp_path, "falcon-7b", tensors={"output.weight": head})["tie_word_embeddings"] is same
    other_type = {"output.weight": head[:, :64]}
    assert config_of(tmp_path, "falcon-7b", tensors=other_type)["tie_word_embeddings"] is False


def test_values_in_other_forms(tmp_path: Path) -> None:
    config = config_of(tmp_path, **{"tokenizer.ggml.eos_token_id": 2**32 - 1, "tokenizer.ggml.bos_token_id": 7})
    assert (config["bos_token_id"], config["eos_token_id"]) == (7, None), "a token that is not there"
    config = config_of(tmp_path, **{"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [160, 160]})
    assert (config["num_key_value_heads"], config["intermediate_size"]) == (2, 160), "one value for each layer"
    assert config_of(tmp_path, **{"general.name": "mistral"}) == config_of(tmp_path), "a name is no class"


@pytest.mark.parametrize(
    ("name", "key", "value", "read"),
    [
        ("llama", "attention.scale", 0.5, False),
        ("llama", "attention.causal", False, False),
        ("llama", "attention.causal", True, True),
        ("llama", "rope.scaling.yarn_log_multiplier", 0.125, False),
        ("llama", "logit_scale", 0.25, False),
        ("llama", "logit_scale", 1.0, True),
        ("llama", "attention.sliding_window_pattern", 2, False),
        ("llama", "rope.freq_base_swa", 50000.0, False),
        ("llama", "attention.temperature_scale", 0.1, False),
        ("llama", "final_logit_softcapping", 30.0, False),
        ("llama", "rope.freq_base_swa", 10000.0, True),
        ("llama", "attention.key_length_swa", 48, False),
        ("llama", "nextn_predict_layers", 1, False),
        ("llama", "hidden_activation", "gelu", False),
        ("lfm2", "attention.sliding_window", 16, False),
        ("gemma3", "attention.sliding_window_pattern", 6, True),
        ("gemma3", "rope.freq_base_swa", 10000.0, True),
        ("gemma3", "attn_logit_softcapping", 0.0, False),
    ],
)
def test_keys_that_are_not_read_must_change_nothing(
    tmp_path: Path, name: str, key: str, value: object, read: bool
) -> None:
    if read:
        assert config_of(tmp_path, name, **{f"{name}.{key}": value}) == config_of(tmp_path, name)
        return
    with pytest.raises(UnsupportedModelError, match=f"{name}.{key} is .*(which is not read|must be above it)"):
        config_of(tmp_path, name, **{f"{name}.{key}": value})


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"llama.expert_count": 8}, "llama.expert_used_count is None, of 8 experts"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 9}, "llama.expert_used_count is 9, of 8 experts"),
        ({"llama.rope.freq_base": "many"}, "llama.rope.freq_base is not a number"),
        ({"llama.feed_forward_length": [1.0, 2.0]}, "is not a list of at most 16384 whole numbers"),
        ({"llama.feed_forward_length": [-1, -1]}, "is not a list of at most 16384 whole numbers"),
        (
            {"tensors": {f"rope_factors_{name}.weight": np.ones(11) for name in ("long", "short")}},
            r"rope_factors_long.weight is F32 \[11\], not F32 \[12\]",
        ),
        ({"tensors": {"rope_freqs.weight": np.linspace(1, 3, 12)}}, "not those of Llama 3's scaling"),
        ({"tensors": {"rope_freqs.weight": np.ones(11)}}, r"F32 \[11\], not F32 \[12\]"),
    ],
)
def test_metadata_that_are_refused(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        config_of(tmp_path, **more)


def test_incomplete_metadata(tmp_path: Path) -> None:
    write_file(tmp_path / "model.gguf", "lfm2", {"lfm2.block_count": 1}, {"token_embd.weight": np.ones((3, 32))})
    with pytest.raises(UnsupportedModelError, match="metadata of lfm2 is incomplete"):
        model_config(read_header(tmp_path / "model.gguf"))
    file = save_example(tmp_path)
    file.write_bytes(file.read_bytes().replace(b"general.architecture", b"general.architectura"))
    with pytest.raises(UnsupportedModelError, match="no name of an architecture in it"):
        model_config(read_header(file))


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_of_gemma_scale_otherwise(tmp_path: Path, name: str, layers: int) -> None:
    tensors = {f"blk.{layer}.ffn_norm.weight": np.ones(96) for layer in range(2, layers)}
    more = {f"{name}.block_count": layers, f"{name}.final_logit_softcapping": 30.0, "tensors": tensors}
    config = config_of(tmp_path, name, **more)
    assert config["query_pre_attn_scalar"] == 24 and config["final_logit_softcapping"] == 30.0
    assert config_of(tmp_path, name)["query_pre_attn_scalar"] == 32
