import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from helpers.random_models import configurations, make_model, models
from picompile.frontend.families import ACTIVATIONS, find_family
from picompile.frontend.hf import capture_config
from picompile.testing import assert_equivalent
from picompile_passes.base import Stage
from picompile_passes.verify import verify


def draw_until(strategy, look, wanted):
    """Draw from `strategy` until `look`, which gives several things, has seen all that is `wanted`."""
    seen = set()

    def enough(drawn):
        seen.update(look(drawn))
        return set(wanted) <= seen

    find(strategy, enough, settings=settings(max_examples=2000, phases=[Phase.generate], database=None))


def words(config):
    """Yield the fields of a configuration with their values, and in which way heads and sizes differ."""
    yield from (f"{name} {value}" for name, value in config.items() if not isinstance(value, (dict, list)))
    yield f"rope {config.get('rope_parameters', {}).get('rope_type')}"
    if config.get("word_embed_proj_dim", config["hidden_size"]) != config["hidden_size"]:
        yield "projected embedding"
    kv_heads = config.get("num_key_value_heads", config.get("num_kv_heads", config["num_attention_heads"]))
    yield "shared heads" if kv_heads < config["num_attention_heads"] else "own heads"


FAMILIES = {
    "llama": [
        *("attention_bias True", "mlp_bias True", "rope llama3", "rope yarn", "rope linear"),
        *(f"hidden_act {name}" for name in ACTIVATIONS),
    ],
    "mistral": ["sliding_window None", "sliding_window 3", "shared heads", "own heads"],
    "bamboo": ["hidden_act relu", "tie_word_embeddings True", "tie_word_embeddings False"],
    "opt": [
        *("do_layer_norm_before True", "do_layer_norm_before False", "enable_bias False", "projected embedding"),
        *("layer_norm_elementwise_affine False", "layer_norm_elementwise_affine True"),
        *(f"activation_function {name}" for name in ACTIVATIONS),
    ],
    "falcon": [
        *("parallel_attn True", "parallel_attn False", "new_decoder_architecture True", "multi_query True"),
        *("multi_query False", "bias True", "shared heads"),
    ],
    "qwen2": ["use_sliding_window True", "use_sliding_window False", "hidden_act silu"],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_variant_of_a_family_appears(family):
    def look(config):
        assert find_family(config).name == family
        assert 2 <= config["vocab_size"] <= 40
        assert config["hidden_size"] <= 40
        assert config["num_hidden_layers"] in (1, 2)
        return words(config)

    draw_until(configurations(family), look, FAMILIES[family])


def test_every_family_appears():
    draw_until(configurations(), lambda config: [find_family(config).name], FAMILIES)
    with pytest.raises(KeyError):
        configurations("gpt2")


@pytest.mark.slow("draws and exports models per family; one family is fast", but=("llama",))
@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_captured_as_transformers_computes_them(family):
    @settings(max_examples=2 if settings.default.derandomize else settings.default.max_examples)
    @given(model=models(family), seed=st.integers(0, 100))
    def check(model, seed):
        verify(model.graph_module, Stage.CAPTURED)
        assert_equivalent(model.module, model.graph_module, weights=model.weights, seed=seed)
        assert repr(model) == f"RandomModel(config={model.config!r})"

    check()


@pytest.mark.slow("captures models")
def test_a_model_may_compute_in_another_dtype():
    """A different model is not equivalent in it either."""
    dtype = torch.bfloat16
    model = make_model(LLAMA, seed=0, dtype=dtype)
    assert {parameter.dtype for parameter in model.module.parameters()} == {dtype}
    assert_equivalent(model.module, model.graph_module, weights=model.weights, dtype=dtype)
    with pytest.raises(AssertionError, match="tolerance 2e-05"):
        assert_equivalent(model.module, model.graph_module, weights=model.weights)
    with pytest.raises(AssertionError, match=r"module .* differ"):
        other = capture_config({**LLAMA, "hidden_act": "silu"})
        assert_equivalent(model.module, other, weights=model.weights, dtype=dtype)


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
