"""Random configs against eager transformers: the captured model gives the same logits, or is refused.

    python tests/attack/configs.py [--number 80] [--seconds 600] [--seed 0]

A config.json is drawn over all families and what they can ask for, some with a class and a type that contradict each
other or with fields that nobody knows. transformers' auto classes make the model and save it with random weights; what
they load from the folder is the reference.
"""

import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.attacks import Report, attack, options

VOCABULARY = 61
POSITIONS = 96
PROMPTS = (1, 6, 70)
# float32 in another order of sums. The largest seen in 260 cases is 7e-7.
TOLERANCE = 2e-5

_ACTIVATIONS = ("relu", "silu", "gelu", "gelu_new", "relu2", "quick_gelu", "sigmoid", "tanh", "gelu_pytorch_tanh")
# transformers has them, the dialect has not.
_OTHER_ACTIVATIONS = ("mish", "leaky_relu", "gelu_10", "laplace", "elu", "linear")
_EPS = (1e-6, 1e-5, 1e-3, 0.1)
_WIDTHS = range(1, 46)
_SELDOM = (True, False, False)
_NAMES = {"llama": "Llama", "mistral": "Mistral", "ministral": "Ministral", "qwen2": "Qwen2", "opt": "OPT"}
_CLASSES = {kind: f"{name}ForCausalLM" for kind, name in (_NAMES | {"falcon": "Falcon"}).items()}
# Types whose weights have the names that Llama's have, so that only the numbers show the difference.
_LOOKALIKES = ("gemma", "granite", "qwen2", "mistral", "olmo", "cohere", "starcoder2", "stablelm", "helium", "qwen3")


@dataclass(frozen=True)
class Outcome:
    """How a case ended: `equal`, `refused`, `different` or `taken`, and with what error or reason."""

    way: str
    text: str
    error: float = 0.0


def draw_config(draw: random.Random) -> dict[str, Any]:
    """The contents of a config.json."""
    family = draw.choice(("llama", "llama", "mistral", "mistral", "ministral", "qwen2", "qwen2", "opt", "falcon"))
    config = {
        "model_type": family,
        "architectures": [_CLASSES[family]],
        "num_hidden_layers": draw.randint(1, 3),
        "vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": draw.random() < 0.4,
        "bos_token_id": 0,
        "eos_token_id": draw.choice((1, [1, 2], None)),
        "pad_token_id": draw.choice((None, 1, 5)),
    }
    make = {"opt": _opt, "falcon": _falcon}.get(family, _like_llama)
    config |= make(draw, family, config["num_hidden_layers"])
    for change in (_contradict, _odd_key):
        if draw.random() < 0.15:
            change(draw, config)
    return {key: value for key, value in config.items() if value is not ...}


def _some(draw: random.Random, **choices: Sequence[Any]) -> dict[str, Any]:
    return {key: draw.choice(values) for key, values in choices.items()}


def _heads(draw: random.Random) -> dict[str, Any]:
    heads, kv_heads = draw.choice(((1, 1), (2, 1), (3, 1), (4, 2), (3, 3), (6, 2), (4, None)))
    hidden = heads * 2 * draw.randint(1, 6)
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": hidden}


def _activation(draw: random.Random) -> str:
    return draw.choice(_OTHER_ACTIVATIONS if draw.random() < 0.08 else _ACTIVATIONS)


def _like_llama(draw: random.Random, family: str, layers: int) -> dict[str, Any]:
    fields = _heads(draw) | _some(draw, intermediate_size=_WIDTHS, rms_norm_eps=_EPS) | _rope(draw)
    fields["hidden_act"] = _activation(draw)
    if family in ("mistral", "ministral") and fields["num_key_value_heads"] is None:
        fields |= {"num_key_value_heads": ..., "num_attention_heads": 8, "hidden_size": 32}
    if draw.random() < 0.3:
        fields["head_dim"] = 2 * draw.randint(1, 6)
    if family == "llama":
        return fields | _some(draw, attention_bias=_SELDOM, mlp_bias=_SELDOM)
    fields["sliding_window"] = draw.choice((None, 1, 3, 7, 50, 1000))
    if family == "qwen2":
        fields |= _some(draw, use_sliding_window=(True, True, False), max_window_layers=range(layers + 1))
    if draw.random() < {"mistral": 0.4, "ministral": 0.7, "qwen2": 0.3}[family]:
        kinds = ("sliding_attention", "full_attention", "sliding_attention", "full_attention", "chunked_attention")
        fields["layer_types"] = [draw.choice(kinds[: 5 if draw.random() < 0.1 else 4]) for _ in range(layers)]
    if family == "ministral" or "layer_types" in fields:
        # transformers' Ministral has no head size unless it is given.
        fields["head_dim"] = ... if draw.random() < 0.05 else 2 * draw.randint(1, 6)
    return fields


def _rope(draw: random.Random) -> dict[str, Any]:
    """Rotary embeddings as old and as new checkpoints describe them."""
    theta, factor, original = draw.choice((100.0, 1e4, 5e5)), draw.choice((1.0, 2.0, 4.5)), draw.choice((16, 32))
    llama3 = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    yarn = {"factor": factor, **draw.choice(({}, {"attention_factor": 0.7}, {"beta_fast": 16, "beta_slow": 2}))}
    yarn |= draw.choice(({}, {"truncate": False}, {"mscale": 1.0, "mscale_all_dim": 0.5}))
    halved = {"partial_rotary_factor": 0.5} if draw.random() < 0.2 else {}
    kinds = [("default", {}), ("default", halved), ("linear", {"factor": factor}), ("linear", {"factor": 8})]
    kinds += [("llama3", {**llama3, "original_max_position_embeddings": length}) for length in (48, original)]
    kinds += [("yarn", {**yarn, "original_max_position_embeddings": original}), ("dynamic", {"factor": factor})]
    kind, more = draw.choice(kinds)
    way = draw.random()
    if way < 0.5:
        return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}
    if kind == "default":
        return {"rope_theta": theta, **more}
    return {"rope_theta": theta, "rope_scaling": {"rope_type" if way < 0.8 else "type": kind, **more}}


def _opt(draw: random.Random, family: str, layers: int) -> dict[str, Any]:
    fields = _heads(draw)
    del fields["num_key_value_heads"]
    often = (True, True, False)
    fields |= _some(draw, ffn_dim=_WIDTHS, do_layer_norm_before=often, enable_bias=often, layerdrop=(0.0, 0.3))
    fields |= _some(draw, layer_norm_elementwise_affine=often, _remove_final_layer_norm=_SELDOM)
    projected = draw.choice((None, fields["hidden_size"], draw.randint(1, 20)))
    return fields | {"activation_function": _activation(draw), "word_embed_proj_dim": projected}


def _falcon(draw: random.Random, family: str, layers: int) -> dict[str, Any]:
    fields = _heads(draw)
    kv_heads = fields.pop("num_key_value_heads")
    if draw.random() < 0.1:
        fields |= {"n_embed": fields["hidden_size"], "hidden_size": ...}
    either = (True, False)
    fields |= _some(draw, new_decoder_architecture=either, parallel_attn=either, multi_query=either, bias=either)
    fields |= _some(draw, num_kv_heads=(None, kv_heads), num_ln_in_parallel_attn=(None, None, 1, 2))
    fields |= _some(draw, ffn_hidden_size=(None, *_WIDTHS), layer_norm_epsilon=_EPS, alibi=(True, *[False] * 11))
    return fields | {"activation": _activation(draw), **_rope(draw)}


def _contradict(draw: random.Random, config: dict[str, Any]) -> None:
    """Another type than the class's, another class than the type's, or one of both alone."""
    other = draw.choice(sorted(_CLASSES.values()))
    changes = (
        {"model_type": draw.choice(_LOOKALIKES)},
        *({"architectures": names} for names in ([other], [*config["architectures"], other], ...)),
        {"architectures": ["SparseLlamaForCausalLM"]},
    )
    config |= draw.choice(changes)


def _odd_key(draw: random.Random, config: dict[str, Any]) -> None:
    """A field that another model has, or that changes what transformers computes."""
    odd: dict[str, Any] = {
        "is_causal": False, "logit_scale": 3.0, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 99,
        "qk_layernorm": True, "attention_multiplier": 0.3, "rope_interleaved": True, "is_decoder": False,
        "attention_bias": True, "per_layer_config": {"0": {"intermediate_size": 7}}, "num_experts": 4,
        "scale_embedding": True, "use_sliding_window": True, "chunk_size_feed_forward": 2,
        "sliding_window": draw.choice((3, 7)), "head_dim": 2 * draw.randint(1, 6),
        "layer_types": ["sliding_attention"] * config["num_hidden_layers"],
    }  # fmt: skip
    key = draw.choice(sorted(odd))
    config[key] = odd[key]


def run_case(seed: int) -> Outcome:
    """One case."""
    from picompile.frontend.config import quiet_transformers

    draw = random.Random(seed)
    config = draw_config(draw)
    with tempfile.TemporaryDirectory() as name, quiet_transformers():
        folder = Path(name) / "model"
        try:
            eager = _reference(folder, config, draw, seed)
            expected = [_eager_logits(eager, ids) for ids in _prompts(seed)]
        except Exception as error:
            eager, expected = None, f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
        (folder).mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return _compare(folder, expected, seed)


def _reference(folder: Path, config: dict[str, Any], draw: random.Random, seed: int) -> nn.Module:
    """transformers' own model of the folder, after its weights were saved there."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    # A config without a type: the one of its class.
    typed = {"model_type": _typeof(config)} | config
    (folder / "config.json").write_text(json.dumps(typed))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms start as ones and biases as zeros, which would hide that one is forgotten.
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * parameter.shape[1] ** -0.5 if parameter.ndim > 1 else parameter + 0.3 * noise)
            parameter.copy_(parameter.half())
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(typed))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _typeof(config: dict[str, Any]) -> str:
    named = (config.get("architectures") or ["LlamaForCausalLM"])[0]
    return next((kind for kind, name in _CLASSES.items() if name == named), "llama")


def _prompts(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in PROMPTS]


@torch.no_grad()
def _eager_logits(model: nn.Module, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float()
    if not torch.isfinite(logits).all():
        raise ValueError("eager logits that are no finite numbers")
    return logits


def _compare(folder: Path, expected: list[Tensor] | str, seed: int) -> Outcome:
    from picompile.errors import UnsupportedModelError
    from picompile.frontend.hf import capture_config, load_model
    from picompile_passes.graph.materialize import materialize
    from picompile_passes.passes.canonicalize import canonicalize

    try:
        if isinstance(expected, str):
            # There may be no weights, without which a folder is refused for that alone.
            capture_config(json.loads((folder / "config.json").read_text()))
            return Outcome("taken", f"transformers refuses it: {expected}")
        captured = load_model(folder)
    except UnsupportedModelError as error:
        way = "refused by both" if isinstance(expected, str) else "refused"
        return Outcome(way, str(error).replace(f"{folder}", "MODEL"))
    canonical = canonicalize(captured.graph_module)
    worst = 0.0
    for graph in (captured.graph_module, canonical):
        module = materialize(graph, captured.weights)
        for ids, logits in zip(_prompts(seed), expected, strict=True):
            with torch.no_grad():
                worst = max(worst, _error(module(ids, torch.arange(len(ids))), logits))
    return Outcome("equal" if worst < TOLERANCE else "different", f"off by {worst:.1e}", worst)


def _error(measured: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest expected logit; infinite where one is NaN."""
    error = float((measured - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    return error if error == error else float("inf")


def run(number: int | None, seconds: float | None, seed: int) -> Report:
    """Run cases until `number` or the time is up."""
    worst = 0.0

    def case(seed: int) -> tuple[str, str | None]:
        nonlocal worst
        outcome = run_case(seed)
        worst = max(worst, outcome.error)
        if outcome.way.startswith("refused"):
            print(f"seed {seed}: {outcome.way}: {outcome.text[:150]}", flush=True)
        wrong = outcome.way in ("different", "taken")
        return outcome.way, f"{outcome.way}: {outcome.text}: {draw_config(random.Random(seed))}" if wrong else None

    report = attack(case, number, seconds, seed)
    print(f"the largest difference is {worst:.1e} of the largest logit")
    return report


def main() -> int:
    found = options(__doc__, 300)
    # Another process may be at work on the user's.
    os.environ.setdefault("PICOMPILE_CACHE", os.path.join(tempfile.gettempdir(), "picompile-attack-cache"))
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    return 1 if run(found.number, found.seconds, found.seed).failures else 0


if __name__ == "__main__":
    sys.exit(main())
