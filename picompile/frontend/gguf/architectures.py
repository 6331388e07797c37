"""The architectures of GGUF files whose models are read by records of our own: one record each.

A record says which class of transformers computes the same, which keys of the metadata are which fields of its config,
and what llama.cpp's converter does to its tensors. The facts are from llama.cpp at 0c1e57098: `conversion/` for what a
file holds, `src/models/` for what is computed from it. Several architectures share a class: InternLM 2 differs from
Llama in the names of its original checkpoint alone, which are gone in a GGUF file.
"""

from collections.abc import Mapping
from typing import Any

from picompile.frontend.gguf.architecture import GRANITE_SCALES, LATENT, ROPE_ALWAYS, Architecture
from picompile.frontend.gguf.architecture_fields import (
    apertus,
    baichuan,
    bias_without_output,
    exaone4,
    gemma3,
    gemma_scale,
    granite,
    granite_window,
    minicpm,
    minicpm3,
    mistral3,
    mpt,
    normed_heads,
    olmo2,
    phi3,
    qwen,
    starcoder,
    windows,
    youtu,
)

_LOGIT_SCALE = {"logit_scale": "logit_scale"}
_MINICPM_SCALES = {key: name for key, name in GRANITE_SCALES.items() if key != "attention.scale"}
_SOFT_CAPS = {key: key for key in ("attn_logit_softcapping", "final_logit_softcapping")}
_PATTERN = ("attention.sliding_window_pattern",)


def _llama(**more: Any) -> Architecture:
    """Return the record of a model that Llama's class computes."""
    return Architecture("LlamaForCausalLM", "llama", **{"names": "llama", **more})


def _qwen2(**more: Any) -> Architecture:
    return Architecture("Qwen2ForCausalLM", "qwen2", **{"names": "qwen2", **more})


def _qwen3(**more: Any) -> Architecture:
    return Architecture("Qwen3ForCausalLM", "qwen3", **{"names": "qwen3", **more})


ARCHITECTURES: Mapping[str, Architecture] = {
    "apertus": Architecture("ApertusForCausalLM", "apertus", add=(apertus,)),
    "arcee": Architecture("ArceeForCausalLM", "arcee", interleaved=True),
    "baichuan": _llama(interleaved=True, add=(baichuan,)),
    # The class of Microsoft's model, with the activation of the model that llama.cpp has under this name.
    "bitnet": Architecture(
        "BitNetForCausalLM",
        "bitnet",
        constants={"hidden_act": "silu"},
        modules={"self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm"},
    ),
    "chatglm": Architecture("GlmForCausalLM", "glm"),
    "codeshell": Architecture("Starcoder2ForCausalLM", "starcoder2", names="starcoder2"),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        "cohere2",
        fields=_LOGIT_SCALE,
        constants={"logit_scale": 1.0},
        add=(windows(4),),
        read=_PATTERN,
    ),
    "command-r": Architecture(
        "CohereForCausalLM",
        "cohere",
        fields=_LOGIT_SCALE,
        constants={"logit_scale": 1.0},
        add=(normed_heads("use_qk_norm"),),
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5"),
    "exaone": _llama(),
    "exaone4": Architecture("Exaone4ForCausalLM", "exaone4", add=(exaone4,), read=_PATTERN),
    "gemma": Architecture("GemmaForCausalLM", "gemma", plus_one=True),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        "gemma2",
        fields=_SOFT_CAPS,
        add=(windows(2, usual=4096), gemma_scale(46)),
        read=_PATTERN,
        plus_one=True,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        fields=_SOFT_CAPS,
        add=(windows(6), gemma_scale(62), gemma3),
        read=(*_PATTERN, "rope.freq_base_swa"),
        plus_one=True,
    ),
    # Youtu, the one model of DeepSeek's shape without experts.
    "deepseek2": Architecture(
        "YoutuForCausalLM", "youtu", fields=LATENT, constants={"q_lora_rank": None}, add=(youtu,)
    ),
    "glm4": Architecture("Glm4ForCausalLM", "glm4"),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM", "gpt_neox", fields={"use_parallel_residual": "use_parallel_residual"}, rows_by_part=True
    ),
    "granite": Architecture(
        "GraniteForCausalLM", "granite", fields=GRANITE_SCALES, fixed=ROPE_ALWAYS, add=(granite,), interleaved=True
    ),
    "granite_swa": Architecture(
        "GraniteSWAForCausalLM",
        "granite_swa",
        fields=GRANITE_SCALES,
        add=(granite, granite_window),
        read=_PATTERN,
        names="granite",
        modules={"self_attn.sinks": "attn_sinks"},
        interleaved=True,
    ),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "internlm2": _llama(interleaved=True),
    "jais2": Architecture("Jais2ForCausalLM", "jais2"),
    "llama": _llama(interleaved=True, add=(bias_without_output,)),
    "minicpm": Architecture(
        "GraniteForCausalLM", "granite", fields=_MINICPM_SCALES, add=(minicpm,), names="granite", interleaved=True
    ),
    "minicpm3": Architecture(
        "MiniCPM3ForCausalLM",
        "minicpm3",
        fields=LATENT,
        # llama.cpp has these numbers in its code, and files do not.
        constants={"q_lora_rank": None, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        add=(minicpm3,),
    ),
    "mistral3": _llama(
        interleaved=True,
        add=(mistral3,),
        read=("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
    ),
    "mpt": Architecture(
        "MptForCausalLM",
        "mpt",
        read=("attention.clamp_kqv",),
        fixed={"attention.max_alibi_bias": (8.0,)},
        add=(mpt,),
        has_rope=False,
    ),
    "nemotron": Architecture("NemotronForCausalLM", "nemotron", plus_one=True),
    "olmo": Architecture(
        "OlmoForCausalLM",
        "olmo",
        fields={"attention.clamp_kqv": "clip_qkv"},
        fixed={"attention.layer_norm_epsilon": (1e-5,)},
        interleaved=True,
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", add=(olmo2,), read=_PATTERN),
    "orion": Architecture("StableLmForCausalLM", "stablelm", names="stablelm"),
    "pangu-embedded": _llama(add=(bias_without_output,)),
    "phi2": Architecture("PhiForCausalLM", "phi"),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", add=(phi3,)),
    "qwen": _qwen2(add=(qwen,)),
    "qwen2": _qwen2(),
    "qwen2vl": _qwen2(),
    "qwen3": _qwen3(),
    "qwen3vl": _qwen3(),
    "seed_oss": Architecture("SeedOssForCausalLM", "seed_oss"),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", constants={"no_rope_layer_interval": 4}, interleaved=True),
    "stablelm": Architecture("StableLmForCausalLM", "stablelm", add=(normed_heads("qk_layernorm"),)),
    "starcoder": Architecture("GPTBigCodeForCausalLM", "gpt_bigcode", add=(starcoder,), has_rope=False),
    "starcoder2": Architecture("Starcoder2ForCausalLM", "starcoder2"),
    "xverse": _llama(interleaved=True),
}
