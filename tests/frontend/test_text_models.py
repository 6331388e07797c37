"""Models that read images, compiled as their text model: they answer to text as the whole model does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from helpers.greedy import first_difference
from helpers.small_composites import composite_class, small_composite
from helpers.small_models import with_random_weights
from picompile import CompileOptions, UnsupportedModelError, compile_model
from picompile.frontend.build import build_model
from picompile.frontend.config import make_config
from picompile.frontend.config_keys import config_warnings
from picompile.frontend.families import find_family
from picompile.frontend.hf import load_model, open_checkpoint
from picompile.frontend.text_model import left_out_of

_SIDES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}


def _eager(model_type: str, text: dict[str, Any]) -> nn.Module:
    model = composite_class(model_type)._from_config(
        small_composite(model_type, text), attn_implementation="eager", dtype=torch.float32
    )
    return with_random_weights(model.eval())


@pytest.mark.slow("builds a model per class; one is fast", but=("mistral3-",))
@pytest.mark.parametrize(
    ("model_type", "left_out"),
    [
        ("mistral3", ("model.vision_tower", "model.multi_modal_projector")),
        ("gemma3", ("model.vision_tower", "model.multi_modal_projector")),
        ("qwen2_5_vl", ("model.visual",)),
    ],
)
def test_what_text_does_not_need_is_left_out(model_type: str, left_out: tuple[str, ...]) -> None:
    raw = json.loads(small_composite(model_type).to_json_string(use_diff=False))
    raw["architectures"] = [composite_class(model_type).__name__]
    family = find_family(raw)
    model = build_model(family, make_config(family, raw), None)
    assert left_out_of(model) == left_out
    assert not any(name.startswith(left_out) for name, _ in model.named_parameters())


@pytest.mark.slow("compiles and runs a model per class")
@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("mistral3", {"sliding_window": 5}),
        ("mistral3", {"model_type": "ministral3", "sliding_window": None}),
        ("gemma3", _SIDES),
        ("llava", {}),
        ("llava", {"model_type": "qwen2"}),
        ("idefics3", {"tie_word_embeddings": True}),
        ("smolvlm", {}),
        ("internvl", {}),
        ("got_ocr2", {}),
        ("aya_vision", _SIDES),
        # Sections of mrope have the same position where there is text alone.
        ("qwen2_vl", {}),
        ("qwen2_5_vl", {}),
        # A mixture, whose layers attend to a chunk.
        ("llama4", {}),
        ("qwen3_vl", {}),
        ("glm4v", {}),
        ("lighton_ocr", {}),
    ],
)
def test_text_models_equal_the_whole(model_type: str, text: dict[str, Any], tmp_path: Path) -> None:
    model = _eager(model_type, text)
    model.half().save_pretrained(tmp_path / "model")
    model.float()
    opened = open_checkpoint(tmp_path / "model")
    others = {name for name in load_file(tmp_path / "model" / "model.safetensors") if "vis" in name}
    assert others and any("what reads images or sound" in line for line in opened.warnings)
    assert not any("vis" in name for name in opened.weights.names())
    compile_model(tmp_path / "model", tmp_path / "artifact", CompileOptions(quant="f16", context=96))
    assert first_difference(model, tmp_path / "artifact") is None


@pytest.mark.slow("builds a model of many experts")
def test_models_whose_text_is_refused(tmp_path: Path) -> None:
    _eager("llama4", {"num_experts_per_tok": 2}).half().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="num_experts_per_tok is 2; of Llama 4"):
        load_model(tmp_path)


_TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT |= {"num_key_value_heads": 2, "vocab_size": 211, "rope_theta": 1000000.0}
_VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
_VISION |= {"image_size": 56, "patch_size": 14}
_SECTIONS = {"type": "mrope", "mrope_section": [2, 3, 3]}
_TOWER = {"depth": 1, "embed_dim": 64, "mlp_ratio": 2, "num_heads": 4, "hidden_size": 64}
_IMAGES = {"image_token_id": 204, "video_token_id": 205, "vision_start_token_id": 201, "vision_end_token_id": 202}
_OUTSIDE = {"model.language_model.": "language_model.model.", "lm_head": "language_model.lm_head"}
_OUTSIDE |= {f"model.{name}": name for name in ("vision_tower", "multi_modal_projector")}
# As published checkpoints have their fields, and how their tensors differ in name from today's classes.
_PUBLISHED = {
    "Qwen2VLForConditionalGeneration": (
        {"model_type": "qwen2_vl", **_TEXT, "rope_scaling": _SECTIONS, **_IMAGES, "vision_config": _TOWER},
        {"model.language_model.": "model.", "model.visual.": "visual."},
    ),
    "Mistral3ForConditionalGeneration": (
        {
            "model_type": "mistral3",
            "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 16, "sliding_window": None},
            "vision_config": {"model_type": "pixtral", **_VISION, "head_dim": 16, "rope_theta": 10000.0},
        },
        _OUTSIDE,
    ),
    "Gemma3ForConditionalGeneration": (
        {
            "model_type": "gemma3",
            "mm_tokens_per_image": 4,
            "image_token_index": 205,
            "eos_token_id": [1, 106],
            "text_config": {
                "model_type": "gemma3_text",
                **_TEXT,
                "num_hidden_layers": 7,
                "head_dim": 16,
                "sliding_window": 5,
                "sliding_window_pattern": 6,
                "rope_local_base_freq": 10000.0,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
            "vision_config": {"model_type": "siglip_vision_model", **_VISION, "vision_use_head": False},
        },
        _OUTSIDE,
    ),
}


@pytest.mark.slow("compiles and runs a model per class")
@pytest.mark.parametrize("name", _PUBLISHED)
def test_checkpoints_as_they_are_published(name: str, tmp_path: Path) -> None:
    config, renamed = _PUBLISHED[name]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [name], **config}))
    loaded = AutoConfig.from_pretrained(folder)
    model = getattr(transformers, name)._from_config(loaded, attn_implementation="eager", dtype=torch.float32)
    with_random_weights(model.eval())
    tied = {"lm_head.weight"} if loaded.tie_word_embeddings else set()
    tensors = {key: tensor.half().clone() for key, tensor in model.state_dict().items() if key not in tied}
    save_file({_former(key, renamed): tensor for key, tensor in tensors.items()}, folder / "model.safetensors")
    (line,) = open_checkpoint(folder).warnings
    assert "what reads images or sound" in line
    compile_model(folder, tmp_path / "artifact", CompileOptions(quant="f16", context=96))
    assert first_difference(model, tmp_path / "artifact") is None


def _former(name: str, renamed: dict[str, str]) -> str:
    start = next((start for start in renamed if name.startswith(start)), "")
    return renamed.get(start, "") + name.removeprefix(start)


@pytest.mark.parametrize("name", _PUBLISHED)
def test_keys_that_a_class_reads_are_no_unknown_ones(name: str) -> None:
    """They stand in the text's config, or beside it, and some are no fields of its class any more."""
    raw = {"architectures": [name], **_PUBLISHED[name][0]}
    family = find_family(raw)
    assert config_warnings(family, raw, make_config(family, raw)) == ()
    inner = {"text_config": {**raw["text_config"], "speed": 1}} if "text_config" in raw else {"speed": 1}
    (line,) = config_warnings(family, raw | inner, make_config(family, raw | inner))
    assert line.endswith(f"knows {'text_config.' if 'text_config' in raw else ''}speed")
