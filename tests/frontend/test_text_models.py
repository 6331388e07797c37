"""Models that read images, compiled as their text model: they answer to text as the whole model does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from helpers.greedy import first_difference
from helpers.small_composites import composite_class, small_composite
from helpers.small_models import with_random_weights
from picompile import CompileOptions, UnsupportedModelError, compile_model
from picompile.frontend.build import build_model
from picompile.frontend.config import make_config
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
    _eager("llama4", {}).half().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="mixtures of experts"):
        load_model(tmp_path)
