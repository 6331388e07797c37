"""Rotary fields of a config.json in forms that transformers reads otherwise, or not."""

from typing import Any

import pytest

from picompile.errors import UnsupportedModelError
from picompile.frontend.config import make_config
from picompile.frontend.config_keys import config_warnings
from picompile.frontend.families import find_family
from picompile.frontend.rope_fields import settled_rope

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def _lines(raw: dict[str, Any]) -> tuple[str, ...]:
    family = find_family(raw)
    return config_warnings(family, raw, make_config(family, raw))


def test_a_recipe_beside_the_new_form_keeps_the_base() -> None:
    raw = {**_LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": _YARN}
    assert make_config(find_family(raw), raw).rope_parameters == {**_YARN, "rope_theta": 5e5}
    (line,) = _lines(raw)
    assert "fields of rope_scaling count before those of the other" in line
    assert not _lines({**raw, "rope_scaling": raw["rope_parameters"]})
    by_kind = {"full_attention": {"rope_theta": 1e4}}
    with pytest.raises(UnsupportedModelError, match="of which one is for kinds of layers; take one away"):
        settled_rope({"rope_parameters": by_kind, "rope_scaling": _YARN})


def test_the_first_name_of_longrope_and_its_length_beside_it() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    raw = {"original_max_position_embeddings": 64, "rope_scaling": {"type": "su", **factors}}
    expected = {"type": "longrope", "original_max_position_embeddings": 64, **factors}
    assert settled_rope({"text_config": raw})["text_config"]["rope_scaling"] == expected


def test_fields_beside_a_config_of_the_text_are_named() -> None:
    text = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4}
    raw = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
    assert not _lines(raw)
    (line,) = _lines({**raw, "rope_scaling": _YARN})
    assert line == "config.json: rope_scaling beside text_config has no effect; it belongs into text_config"
    assert not _lines({**raw, "rope_scaling": _YARN, "text_config": {**text, "rope_scaling": _YARN}})


def test_a_part_of_each_head_that_no_code_reads_is_named() -> None:
    assert "knows partial_rotary_factor" in _lines({**_LLAMA, "partial_rotary_factor": 0.5})[0]
    assert not _lines({**_LLAMA, "partial_rotary_factor": 1.0})
    assert not _lines({**_LLAMA, "partial_rotary_factor": 0.5, "rope_scaling": _YARN})
    names = {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm"}
    assert not _lines({**_LLAMA, **names, "partial_rotary_factor": 0.5})


def test_keys_that_the_code_of_one_class_reads() -> None:
    hunyuan = {"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "head_dim": 16}
    rope = {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}
    assert not any("alpha" in line for line in _lines({**_LLAMA, **hunyuan, **rope}))
    assert "rope_scaling.alpha" in _lines({**_LLAMA, "rope_scaling": {**_YARN, "alpha": 1.0}})[0]
    mpt = {"architectures": ["MptForCausalLM"], "model_type": "mpt", "d_model": 64, "n_heads": 4}
    assert not _lines({**mpt, "logit_scale": None, "norm_type": "low_precision_layernorm"})
    assert "knows logit_scale" in _lines({**mpt, "logit_scale": 0.5})[0]
