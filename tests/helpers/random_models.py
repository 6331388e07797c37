"""Models of every supported family, from a random config.json, without a checkpoint on disk."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule

from picompile.frontend.bamboo import FatReLU
from picompile.frontend.build import call_model
from picompile.frontend.families import find_family
from picompile.frontend.hf import capture_config
from picompile.testing.weights import RandomWeights, random_weights

Draw = dict[str, st.SearchStrategy[Any]]

_POSITIONS = 64
_EPS = st.sampled_from([1e-5, 1e-6])

# As config.json names them; see `picompile.frontend.families`.
_ACTIVATIONS = (
    "relu",
    "silu",
    "gelu",
    "relu2",
    "relu6",
    "gelu_accurate",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "gelu_python_tanh",
    "gelu_pytorch_tanh",
    "quick_gelu",
    "sigmoid",
    "swish",
    "tanh",
)

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_PLAIN = {"rope_type": "default", "rope_theta": 100.0}


@dataclass(frozen=True)
class RandomModel:
    """One model: its `config`, its graph at stage captured, random weights for it, and itself with these weights.

    `module` is transformers' own model with its own attention, called as module(tokens int64 [T], positions int64 [T])
    → logits [T, V]. It computes in the dtype of the weights.
    """

    config: Mapping[str, Any]
    graph_module: GraphModule = field(repr=False)
    weights: RandomWeights = field(repr=False)
    module: nn.Module = field(repr=False)


def configurations(family: str | None = None) -> st.SearchStrategy[dict[str, Any]]:
    """Contents of config.json of small models of `family` (`llama`, `mistral`, `bamboo`, `opt`, `falcon` or `qwen2`),
    by default of any of these.
    """
    return _FAMILIES[family]() if family is not None else st.one_of(*(make() for make in _FAMILIES.values()))


def models(family: str | None = None) -> st.SearchStrategy[RandomModel]:
    """Models of `configurations(family)`, captured. Each takes torch.export 0.3 to 1 s."""
    return st.builds(make_model, configurations(family), st.integers(0, 2**16))


def make_model(config: Mapping[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> RandomModel:
    """The model that a config.json of the contents `config` describes, with `random_weights` of `seed` and `dtype`.

    Raises `UnsupportedModelError` for one that cannot be captured.
    """
    # transformers takes seconds to import, and most tests need none of its models.

    graph_module = capture_config(config)
    weights = random_weights(graph_module, seed, dtype)
    return RandomModel(config, graph_module, weights, _Eager(config, weights).to(dtype))


class _Eager(nn.Module):
    """transformers' model of `config` with `weights`. It computes on batches; this is one of its sequences."""

    def __init__(self, config: Mapping[str, Any], weights: RandomWeights) -> None:
        super().__init__()
        self.model = _transformers_model(config)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights.tensors[name])

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens and positions int64 [T] → logits [T, V]."""
        return call_model(self.model, tokens.unsqueeze(0), positions.unsqueeze(0)).squeeze(0)


def _transformers_model(config: Mapping[str, Any]) -> nn.Module:

    family = find_family(config)
    values = dict(config)
    fatrelu = values.get(family.activation) == "fatrelu"
    if fatrelu:
        values[family.activation] = "relu"
    config_class, model_class = map(_resolve, (family.config_class, family.model_class))
    model: nn.Module = model_class._from_config(config_class(**values), attn_implementation="eager").eval()
    for module in model.modules() if fatrelu else ():
        if hasattr(module, "act_fn"):
            module.act_fn = FatReLU(config["hidden_act_param"])
    return model


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _configs(architectures: tuple[str, ...], drawn: Draw, finish: Callable[..., Any] = dict) -> Any:
    """Configs with the fields of `drawn` and those that all families have. `finish` puts the fields right."""
    common: Draw = {
        "architectures": st.sampled_from([[name] for name in architectures]),
        "num_hidden_layers": st.integers(1, 2),
        "vocab_size": st.integers(2, 40),
        "bos_token_id": st.just(0),
        "eos_token_id": st.just(1),
        "max_position_embeddings": st.just(_POSITIONS),
        "tie_word_embeddings": st.booleans(),
        "heads_and_kv": st.sampled_from([(1, 1), (3, 1), (4, 2), (3, 3)]),
        "half_head": st.integers(1, 5),
    }
    return st.fixed_dictionaries(common | drawn).map(_sized).map(finish)


def _sized(values: dict[str, Any]) -> dict[str, Any]:
    heads, kv_heads = values.pop("heads_and_kv")
    hidden = heads * 2 * values.pop("half_head")
    return values | {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads}


def _like_llama(*architectures: str, **drawn: st.SearchStrategy[Any]) -> Any:
    fields: Draw = {
        "intermediate_size": st.integers(1, 45),
        "hidden_act": st.sampled_from(["fatrelu", *_ACTIVATIONS]),
        "hidden_act_param": st.sampled_from([0.01, 0.05, 0.3]),
        "rms_norm_eps": _EPS,
        "rope_parameters": st.sampled_from([_PLAIN, _PLAIN, _LLAMA3, _LINEAR, _YARN]),
        # Heads need not share the hidden size among them.
        "head_dim": st.one_of(st.none(), st.none(), st.integers(1, 5).map(lambda half: 2 * half)),
    }
    return _configs(architectures, fields | drawn, _without_unset)


def _without_unset(values: dict[str, Any]) -> dict[str, Any]:
    unset = ("head_dim",) if values["head_dim"] is None else ()
    unused = ("hidden_act_param",) if values["hidden_act"] != "fatrelu" else ()
    return {name: value for name, value in values.items() if name not in (*unset, *unused)}


def _llama() -> Any:
    return _like_llama("LlamaForCausalLM", attention_bias=st.booleans(), mlp_bias=st.booleans())


def _mistral() -> Any:
    return _like_llama("MistralForCausalLM", sliding_window=st.sampled_from([None, 1, 3, 50]))


def _bamboo() -> Any:
    names = ("BambooForCausalLM", "TurboSparseMistralForCausalLM")
    return _like_llama(*names, hidden_act=st.just("relu"), sliding_window=st.sampled_from([None, 3]))


def _qwen2() -> Any:
    return _like_llama(
        "Qwen2ForCausalLM",
        use_sliding_window=st.booleans(),
        sliding_window=st.sampled_from([1, 3]),
        max_window_layers=st.integers(0, 2),
    )


def _opt() -> Any:
    fields: Draw = {
        "ffn_dim": st.integers(1, 45),
        "activation_function": st.sampled_from(_ACTIVATIONS),
        "do_layer_norm_before": st.booleans(),
        "enable_bias": st.booleans(),
        "layer_norm_elementwise_affine": st.booleans(),
        # Galactica has neither, OPT-350m embeds in another width.
        "word_embed_proj_dim": st.one_of(st.none(), st.integers(1, 20)),
    }
    return _configs(("OPTForCausalLM",), fields, _projected)


def _projected(values: dict[str, Any]) -> dict[str, Any]:
    del values["num_key_value_heads"]
    return values | {"word_embed_proj_dim": values["word_embed_proj_dim"] or values["hidden_size"]}


def _falcon() -> Any:
    fields: Draw = {
        "kind": st.sampled_from(["7b", "40b", "11b", "serial"]),
        "multi_query": st.booleans(),
        "bias": st.booleans(),
        "activation": st.sampled_from(_ACTIVATIONS),
        "ffn_hidden_size": st.integers(1, 45),
        "layer_norm_epsilon": _EPS,
        "alibi": st.just(False),
    }
    return _configs(("FalconForCausalLM",), fields, _falcon_of_kind)


def _falcon_of_kind(values: dict[str, Any]) -> dict[str, Any]:
    """Falcon-7B: one norm for attention and feed-forward block side by side. 40B: grouped heads and two norms; the 11B
    of Falcon 2: the same with one. Serial: Falcon-RW's, one after the other.
    """
    kind, kv_heads = values.pop("kind"), values.pop("num_key_value_heads")
    if kind in ("7b", "serial"):
        return values | {"new_decoder_architecture": False, "parallel_attn": kind == "7b"}
    norms = {"40b": 2, "11b": 1}[kind]
    return values | {
        "new_decoder_architecture": True,
        "parallel_attn": True,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": norms,
    }


_FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "mistral": _mistral,
    "bamboo": _bamboo,
    "opt": _opt,
    "falcon": _falcon,
    "qwen2": _qwen2,
}
