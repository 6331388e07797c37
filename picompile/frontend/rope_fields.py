"""Rotary embeddings in a config.json: fields of older forms, brought into the one that transformers reads rightly.

transformers takes `rope_scaling` in place of `rope_parameters` where a file has both, and loses the base that only the
latter has (`convert_rope_params_to_dict` in its modeling_rope_utils.py).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.families import text_config

ROPE_FIELDS = _NEW, _OLD = "rope_parameters", "rope_scaling"
_LENGTH = "original_max_position_embeddings"
# The first name of longrope, in Phi-3's first files.
_FORMER_TYPES = {"su": "longrope"}
# Types of which a class may have another name, or none.
_PLAIN_TYPES = (None, "default", "mrope")


def settled_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json's contents with one object of rotary fields at each level.

    Fields of `rope_scaling` count before those of `rope_parameters`: recipes add it to a file that has the other.
    Raises `UnsupportedModelError` where the two cannot be put together.
    """
    settled = dict(raw)
    old, new = raw.get(_OLD), raw.get(_NEW)
    if old and new and old != new:
        if any(isinstance(value, Mapping) for value in (*old.values(), *new.values())):
            raise UnsupportedModelError(
                f"config.json: has {_OLD} and {_NEW}, of which one is for kinds of layers; take one away"
            )
        settled[_NEW] = _merged(old, new)
        del settled[_OLD]
    for name in (_OLD, _NEW):
        if settled.get(name):
            settled[name] = _with_length(settled[name], raw.get(_LENGTH))
    attention = raw.get("attn_config") if raw.get("model_type") == "dbrx" else None
    has_base = any(raw.get(name) for name in (*ROPE_FIELDS, "rope_theta"))
    if isinstance(attention, Mapping) and "rope_theta" in attention and not has_base:
        # Published files have it there, and transformers reads it at the level above.
        settled["rope_theta"] = attention["rope_theta"]
    if isinstance(raw.get("text_config"), Mapping):
        settled["text_config"] = settled_rope(raw["text_config"])
    return settled


def rope_lines(raw: Mapping[str, Any], config: Any) -> Iterator[str]:
    """Yield lines on rotary fields of a config.json that do not count. `config` is what was made of it."""
    text = raw.get("text_config")
    for name, part in (("", raw), ("text_config.", text)):
        if isinstance(part, Mapping) and part.get(_OLD) and part.get(_NEW) and part[_OLD] != part[_NEW]:
            yield f"config.json: {name}{_OLD} and {name}{_NEW} differ; fields of {_OLD} count before those of the other"
    if not isinstance(text, Mapping):
        return
    counting = getattr(text_config(config), _NEW, None) or {}
    for name in (_OLD, _NEW):
        if isinstance(raw.get(name), Mapping) and not _counts(raw[name], counting):
            yield f"config.json: {name} beside text_config has no effect; it belongs into text_config"


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of both, with the type of the older form, which has two names for it."""
    kept = {key: value for key, value in new.items() if key not in ("type", "rope_type")}
    kind = old.get("rope_type") or old.get("type") or new.get("rope_type") or new.get("type")
    return {**kept, **old, **({} if kind is None else {"rope_type": kind})}


def _with_length(rope: Any, length: Any) -> Any:
    """Return rotary fields with today's name of their type, and the length that longrope's may have beside them."""
    if not isinstance(rope, Mapping):
        return rope
    found = dict(rope)
    for key in ("type", "rope_type"):
        if found.get(key) in _FORMER_TYPES:
            found[key] = _FORMER_TYPES[found[key]]
    if "longrope" in (found.get("type"), found.get("rope_type")) and _LENGTH not in found and length is not None:
        found[_LENGTH] = length
    return found


def _counts(given: Mapping[str, Any], counting: Mapping[str, Any]) -> bool:
    """Return whether all fields that are given are among those that count, whatever name their type has."""
    kind = given.get("rope_type", given.get("type"))
    fields = {key: value for key, value in given.items() if key not in ("type", "rope_type")}
    same_kind = kind in _PLAIN_TYPES or kind == counting.get("rope_type")
    return same_kind and all(key in counting and counting[key] == value for key, value in fields.items())
