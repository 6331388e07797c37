"""Rules for a config.json: which class goes with which type, which values make a model, which fields have no effect."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from picompile import UnsupportedModelError
from picompile.frontend.config import make_config
from picompile.frontend.config_keys import unknown_keys
from picompile.frontend.families import FAMILIES, find_family
from picompile.frontend.hf import capture_config, open_checkpoint, raw_activation
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ATTENTION
from picompile_passes.passes.canonicalize import canonicalize

_SIZES = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "vocab_size": 30, "head_dim": 6}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def _kind(architecture: str | None, model_type: str | None, **more: Any) -> dict[str, Any]:
    named = {"architectures": None if architecture is None else [architecture], "model_type": model_type}
    return {key: value for key, value in named.items() if value is not None} | more


@pytest.mark.parametrize(
    ("architecture", "model_type", "family"),
    [
        # As published: ReluLLaMA, ProSparse, SparseLM, Bamboo, TurboSparse.
        ("LlamaForCausalLM", "llama", "llama"),
        ("SparseLlamaForCausalLM", "sparsellama", "llama"),
        ("SparseLlamaForCausalLM", "llama_sparse_relu", "llama"),
        ("BambooForCausalLM", "bamboo", "bamboo"),
        ("TurboSparseMistralForCausalLM", "turbosparsemistral", "bamboo"),
        ("SmallThinkerForCausalLM", "smallthinker", "smallthinker"),
        ("TurboSparseMixtralForCausalLM", "turbosparsemixtral", "turbosparse-mixtral"),
        ("MistralForCausalLM", None, "mistral"),
        (None, "turbosparsemistral", "bamboo"),
        (None, "llama", "llama"),
    ],
)
def test_classes_and_their_types(architecture: str | None, model_type: str | None, family: str) -> None:
    assert find_family(_kind(architecture, model_type)).name == family


def test_types_that_transformers_has_are_of_the_class_that_its_auto_class_takes() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for architecture, types in FAMILIES.items():
        for model_type, family in types.items():
            # Of these two the classes are no others' than the checkpoints' own, and the models are Llamas.
            if model_type in CONFIG_MAPPING_NAMES and architecture != "SparseLlamaForCausalLM":
                assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] == architecture
            if model_type in CONFIG_MAPPING_NAMES:
                assert family.config_class == f"transformers:{CONFIG_MAPPING_NAMES[model_type]}"
                assert family.model_class == f"transformers:{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]}"


def test_classes_and_types_that_are_none() -> None:
    lists, name = "architectures must be a list of names", "model_type must be a name"
    for config, message in (
        ({"architectures": ["LlamaForCausalLM", "OPTForCausalLM"]}, "names LlamaForCausalLM, OPTForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, lists),
        ({"architectures": [["LlamaForCausalLM"]]}, lists),
        ({"architectures": {"a": 1}}, lists),
        ({"model_type": ["llama"]}, rf"{name}, not \['llama'\]"),
        ({"model_type": {}}, name),
        ({"architectures": ["LlamaForCausalLM"], "model_type": ""}, f"{name}, not ''"),
        ({"model_type": "llama_sparse", "architectures": []}, "kind llama_sparse are not supported"),
        ({"architectures": ["SwinModel"]}, "kind SwinModel are not supported"),
        # transformers goes by the type: Llama's class with Gemma's type is Gemma, which was compiled as Llama.
        *(
            (_kind("LlamaForCausalLM", other), f"LlamaForCausalLM and the model_type {other} are different")
            for other in ("gemma", "granite", "mistral", "qwen2", "cohere", "sparsellama", "bamboo", "x")
        ),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            find_family(config)


@pytest.mark.parametrize(
    ("model_type", "fields", "activation"),
    [
        ("sparsellama", {"hidden_act": "relu"}, "relu"),
        ("sparsellama", {"hidden_act": "fatrelu", "hidden_act_param": 0.01}, "fatrelu(0.01)"),
        ("llama_sparse_relu", {"hidden_act": "relu"}, "relu"),
        ("sparsellama", {"hidden_act": "silu"}, None),
        ("sparsellama", {}, None),
        # As published; its code is ReLU.
        ("llama_sparse_relu", {"hidden_act": "silu"}, None),
        ("llama_sparse_relu", {"hidden_act": "fatrelu", "hidden_act_param": 0.01}, None),
    ],
)
def test_activations_of_sparse_llamas(model_type: str, fields: dict[str, Any], activation: str | None) -> None:
    config = _kind("SparseLlamaForCausalLM", model_type, **fields)
    if activation is not None:
        assert raw_activation(find_family(config), config) == activation
        return
    with pytest.raises(UnsupportedModelError, match="SparseLlamaForCausalLM has its activation in its own code"):
        raw_activation(find_family(config), config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("num_hidden_layers", value) for value in (0, -1, 10_000, 10**6, 10**400, 2.0, True, "2", [], {})),
        *(("hidden_size", value) for value in (0, -24, 24.0, [24], 2**40)),
        *(("vocab_size", value) for value in (0, 2**31, math.nan)),
        *(("num_key_value_heads", value) for value in (0, -2, 2.0, True)),
        *(("head_dim", value) for value in (0, 24.0, 10**6)),
        *(("sliding_window", value) for value in (0, -1, 3.5)),
        *(("rms_norm_eps", value) for value in (math.nan, -1e-6, math.inf, "x", True, 10**400, 1e39)),
        *(("rope_theta", value) for value in (math.nan, 0, -1.0, math.inf, "x", True, [])),
        *(("partial_rotary_factor", value) for value in (0, 1.5, 1e300)),
        *(("eos_token_id", value) for value in ("2", [["2"]], [2.0], -1, True, 2**40, {})),
        *(("bos_token_id", value) for value in ("2", -1, 1.0)),
        *(("rope_scaling", value) for value in ([1], "linear", 3)),
        *(("rope_parameters", {"rope_type": value}) for value in ([], 3, {})),
        *(("rope_parameters", {"rope_type": "linear", "factor": value}) for value in (0, -1.0, math.nan, "x", True)),
        ("rope_parameters", {"full_attention": {"rope_type": "linear", "factor": math.nan}}),
        *(("attn_logit_softcapping", value) for value in (0, -5.0, "x")),
        ("text_config", {"rms_norm_eps": -1.0, "text_config": 3}),
        ("is_causal", False),
        ("is_causal", None),
        ("per_layer_config", {"0": {"intermediate_size": 7}}),
        ("configuration_files", ["config.4.0.0.json"]),
        ("configuration_files", None),
        ("tie_word_embeddings", 1),
    ],
)
def test_values_that_make_no_model(key: str, value: object) -> None:
    config = _kind("MistralForCausalLM", "mistral", **_SIZES, hidden_act="relu")
    make_config(find_family(config), config)
    with pytest.raises(UnsupportedModelError, match=r"^config\.json: ") as caught:
        make_config(find_family(config), config | {key: value})
    assert key.split("_")[0] in str(caught.value)


def test_activations_that_are_none() -> None:
    for value in (math.nan, -1, -0.01, math.inf, True, "0.1", [], 1e300, 10**400):
        config = _kind("LlamaForCausalLM", "llama", hidden_act="fatrelu", hidden_act_param=value)
        with pytest.raises(UnsupportedModelError, match="hidden_act_param, the threshold of fatrelu"):
            raw_activation(find_family(config), config)
    for value in ([], {}, ["relu"], 3, True):
        config = _kind("LlamaForCausalLM", "llama", hidden_act=value)
        with pytest.raises(UnsupportedModelError, match=r"the activation .* is not supported"):
            raw_activation(find_family(config), config)


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 1e-300}, {"rope_theta": 1e-300}])
def test_rotary_frequencies_that_are_no_numbers(rope: dict[str, Any]) -> None:
    config = _kind("LlamaForCausalLM", "llama", **_SIZES, hidden_act="relu")
    with pytest.raises(UnsupportedModelError, match="rotary frequencies that are no finite numbers"):
        capture_config(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **rope}})


def _windows(config: dict[str, Any]) -> list[int]:
    return [arguments(call)["window"] for call in calls(canonicalize(capture_config(config)).graph, ATTENTION)]


@pytest.mark.slow("exports five models")
def test_windows_of_single_layers() -> None:
    """Mistral has one window for all layers, whatever `layer_types` says; transformers' auto class takes Ministral."""
    mixed = {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
    assert _windows(_kind("MistralForCausalLM", "mistral", **_SIZES, sliding_window=5)) == [5, 5]
    assert _windows(_kind("MistralForCausalLM", "mistral", **_SIZES, **mixed)) == [0, 5]
    qwen2 = _kind("Qwen2ForCausalLM", "qwen2", **_SIZES, sliding_window=5, max_window_layers=1)
    assert _windows(qwen2) == [0, 0], "use_sliding_window is off unless it is said"
    assert _windows(qwen2 | {"use_sliding_window": True}) == [0, 5]
    # Llama has no windows; the keys have no effect, in transformers either.
    assert _windows(_kind("LlamaForCausalLM", "llama", **_SIZES, **mixed)) == [0, 0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers with a sliding window, but"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "names chunked_attention"),
        ({"layer_types": ["full_attention"]}, "num_hidden_layers"),
    ],
)
def test_kinds_of_layers_that_transformers_refuses(more: dict[str, Any], message: str) -> None:
    config = _kind("Qwen2ForCausalLM", "qwen2", **_SIZES, use_sliding_window=False, **more)
    with pytest.raises(UnsupportedModelError, match=message):
        capture_config(config)


def test_keys_without_effect_are_named_in_one_line() -> None:
    config = _kind("LlamaForCausalLM", "llama", **_SIZES, rope_theta=1e4, torch_dtype="float16", use_cache=True)
    family = find_family(config)
    assert unknown_keys(family, config) is None
    assert unknown_keys(family, LlamaConfig(**_SIZES).to_dict()) is None
    code = {"AutoModelForCausalLM": "modeling_x.X"}
    line = unknown_keys(family, config | {"sliding_window": 3, "a\nb": 1, "auto_map": code})
    assert line is not None and "\n" not in line
    assert "knows sliding_window, a?b; auto_map names code" in line
    many = unknown_keys(family, config | {f"key{number}": 1 for number in range(20)})
    assert many is not None and many.endswith("key7 and 12 more")
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "speed": 3}}
    assert "rope_parameters.speed" in str(unknown_keys(family, config | rope))
    bamboo = _kind("BambooForCausalLM", "bamboo", hidden_act="silu")
    assert "hidden_act has no effect on models of the family bamboo" in str(unknown_keys(find_family(bamboo), bamboo))


def test_keys_that_would_take_the_place_of_methods_or_all_memory() -> None:
    config = _kind("LlamaForCausalLM", "llama", **_SIZES, hidden_act="relu")
    expected = str(capture_config(config).graph)
    odd = dict.fromkeys(("to_dict", "__class__", "__dict__", "num_labels", "id2label", "validate"), 10**9)
    assert str(capture_config(config | odd).graph) == expected


def test_warnings_of_transformers_are_not_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    LlamaForCausalLM(LlamaConfig(**_SIZES)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    rope = {"rope_type": "linear", "factor": 0.5, "rope_theta": 1e4, "speed": 3}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": rope}))
    capfd.readouterr()
    opened = open_checkpoint(tmp_path)
    assert capfd.readouterr().err == ""
    assert opened.warnings == ("config.json: neither transformers nor picompile knows rope_parameters.speed",)
