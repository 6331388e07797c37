"""Small models of several parts, such as a vision tower and a decoder: transformers' classes that read images."""

import copy
import dataclasses
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from helpers.small_models import OF_TYPES, SIZES, config_class

# No text of ours has it.
_IMAGE = 209
_SECTIONS = {"glm4v_moe": [1, 1, 2]}
_TEXTS = ("text_config", "decoder", "thinker_config")


def composite_types() -> dict[str, str]:
    """Return the classes of models that answer to images and text, by their model type, with a config for the text."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    found = {
        name: known if isinstance(known, str) else known[0]
        for name, known in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
    }
    return {
        name: known
        for name, known in found.items()
        if (name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or known.endswith("ForConditionalGeneration"))
        and "text_config" in (getattr(CONFIG_MAPPING[name], "sub_configs", None) or {})
    }


def text_type(model_type: str) -> str:
    """Return the model type of the text's config of a composite. Raises what its config class raises."""
    return str(config_class(model_type)().get_text_config().model_type)


def small_composite(model_type: str, text: Mapping[str, Any] | None = None) -> Any:
    """Return a small config of a composite; `text` has more fields of its text's config.

    Raises what its class raises.
    """
    own = config_class(model_type)
    default = own()
    values: dict[str, Any] = {
        name: _IMAGE
        for name in ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
        if hasattr(default, name)
    }
    for name in getattr(own, "sub_configs", None) or {}:
        part = getattr(default, name)
        if part is None:
            continue
        known = {field.name for field in dataclasses.fields(type(part))}
        fields = {key: copy.copy(value) for key, value in SIZES.items() if key in known and value is not None}
        is_text = name in _TEXTS
        if not is_text:
            fields.pop("vocab_size", None)
        fields.pop("is_decoder", None)
        fields |= OF_TYPES.get(part.model_type, {}) if is_text else {}
        if is_text and "mrope" in _source(type(part)):
            # Sections of the eight pairs of a head, or of the four that are turned.
            sections = _SECTIONS.get(model_type, [2, 3, 3])
            fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
        values[name] = fields | {"model_type": part.model_type} | dict(text or {} if is_text else {})
    return own(**values)


def composite_class(model_type: str) -> Any:
    """Return the class of a composite's model."""
    import transformers

    return getattr(transformers, composite_types()[model_type])


def _source(part: type) -> str:
    name = part.__module__.replace(".configuration_", ".modeling_")
    try:
        return inspect.getsource(importlib.import_module(name))
    except ImportError:
        return ""
