from collections import Counter

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from picompile.frontend import capture_config
from picompile.frontend.families import ACTIVATIONS, find_family
from picompile.testing import assert_equivalent, configurations, make_model, models
from picompile_passes.base import Stage
from picompile_passes.verify import verify

FAMILIES = ("llama", "mistral", "bamboo", "opt", "falcon", "qwen2")


def few(count):
    """As many examples where they are the same at every run; `make fuzz` draws more."""
    return settings(max_examples=count) if settings.default.derandomize else settings()


def draw_until(strategy, look, wanted):
    """Draws from `strategy` until `look`, which gives several things, has seen all that is `wanted`."""
    seen = Counter()

    def enough(drawn):
        seen.update(look(drawn))
        return set(wanted) <= seen.keys()

    find(strategy, enough, settings=settings(max_examples=2000, phases=[Phase.generate], database=None))


def test_every_family_appears():
    assert {family.name for family in map(find_family, all_architectures())} == set(FAMILIES)
    draw_until(configurations(), lambda config: [find_family(config).name], FAMILIES)


def all_architectures():
    names = set()
    for family in FAMILIES:
        draw_until(configurations(family), lambda config: names.update(config["architectures"]) or [1], [1])
    return [{"architectures": [name]} for name in names]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_can_be_asked_for(family):
    @few(20)
    @given(config=configurations(family))
    def check(config):
        assert find_family(config).name == family
        assert 2 <= config["vocab_size"] <= 40
        assert config["hidden_size"] <= 40
        assert config["num_hidden_layers"] in (1, 2)

    check()


def test_unknown_families_raise():
    with pytest.raises(KeyError):
        configurations("gpt2")


def words(config):
    """Yield the fields in which configurations of models differ."""
    for name in ("hidden_act", "activation", "activation_function", "sliding_window", "use_sliding_window"):
        if name in config:
            yield f"{name} {config[name]}"
    for name in ("tie_word_embeddings", "bias", "enable_bias", "attention_bias", "mlp_bias", "do_layer_norm_before"):
        if name in config:
            yield f"{name} {config[name]}"
    for name in ("multi_query", "parallel_attn", "new_decoder_architecture", "layer_norm_elementwise_affine"):
        if name in config:
            yield f"{name} {config[name]}"
    if "rope_parameters" in config:
        yield f"rope {config['rope_parameters']['rope_type']}"
    if "head_dim" in config:
        yield "head_dim"
    if config.get("word_embed_proj_dim", config["hidden_size"]) != config["hidden_size"]:
        yield "projected embedding"
    kv_heads = config.get("num_key_value_heads", config.get("num_kv_heads", config["num_attention_heads"]))
    yield "shared heads" if kv_heads < config["num_attention_heads"] else "own heads"


VARIANTS = {
    "llama": ["hidden_act fatrelu", "attention_bias True", "mlp_bias True", "rope llama3", "rope yarn", "rope linear"],
    "mistral": ["sliding_window None", "sliding_window 3", "head_dim", "shared heads", "own heads"],
    "bamboo": ["hidden_act relu", "tie_word_embeddings True", "tie_word_embeddings False"],
    "opt": [
        *("do_layer_norm_before True", "do_layer_norm_before False", "enable_bias False", "projected embedding"),
        *("layer_norm_elementwise_affine False", "layer_norm_elementwise_affine True"),
    ],
    "falcon": [
        *("parallel_attn True", "parallel_attn False", "new_decoder_architecture True", "multi_query True"),
        *("multi_query False", "bias True", "shared heads"),
    ],
    "qwen2": ["use_sliding_window True", "use_sliding_window False", "hidden_act silu"],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_variants_of_a_family_appear(family):
    draw_until(configurations(family), words, VARIANTS[family])


@pytest.mark.parametrize(("family", "option"), [("llama", "hidden_act"), ("opt", "activation_function")])
def test_every_activation_appears(family, option):
    draw_until(configurations(family), words, [f"{option} {name}" for name in ACTIVATIONS])


@pytest.mark.slow("draws and exports models per family; one family is fast", but=("llama",))
@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_captured_as_transformers_computes_them(family):
    @few(2)
    @given(model=models(family), seed=st.integers(0, 100))
    def check(model, seed):
        verify(model.graph_module, Stage.CAPTURED)
        assert_equivalent(model.module, model.graph_module, weights=model.weights, seed=seed)
        assert repr(model) == f"TestModel(config={model.config!r})"

    check()


def test_a_model_may_compute_in_another_dtype():
    dtype = torch.bfloat16
    model = make_model(LLAMA, seed=0, dtype=dtype)
    assert {parameter.dtype for parameter in model.module.parameters()} == {dtype}
    assert_equivalent(model.module, model.graph_module, weights=model.weights, dtype=dtype)
    with pytest.raises(AssertionError, match="tolerance 2e-05"):
        assert_equivalent(model.module, model.graph_module, weights=model.weights)


def test_a_different_model_is_not_equivalent():
    model = make_model(LLAMA, seed=0)
    other = capture_config({**LLAMA, "hidden_act": "silu"})
    with pytest.raises(AssertionError, match=r"module .* differ"):
        assert_equivalent(model.module, other, weights=model.weights)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 30,
    "max_position_embeddings": 64,
    "hidden_act": "relu",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
