"""A tokenizer beside the model: tokens that the model has no row for."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.tokenizer.library import parsed
from picompile.frontend.tokenizer_files import TokenizerFiles


def fitted(files: TokenizerFiles, ids: Mapping[str, int], model: Path, vocabulary: int) -> TokenizerFiles:
    """Return the tokenizer without added tokens for which the model has no row.

    Args:
        files: the tokenizer, with a `tokenizer_json`.
        ids: the ids of all its tokens, by name.
        model: the checkpoint.
        vocabulary: the number of tokens that the model has rows for.

    Raises `UnsupportedModelError` where it has other tokens without a row.
    """
    highest = max(ids.values(), default=-1)
    if highest < vocabulary:
        return files
    content = json.loads(files.tokenizer_json or "")
    beyond = [token for token in content["added_tokens"] if token["id"] >= vocabulary]
    names = {token["content"] for token in beyond}
    others = max((number for name, number in ids.items() if name not in names), default=-1)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < vocabulary]
    if others >= vocabulary or not beyond or _around(content, vocabulary):
        raise UnsupportedModelError(
            f"{model}: the tokenizer has token ids up to {highest}, the model only {vocabulary} tokens: "
            "it belongs to another model"
        )
    config = {name: value for name, value in files.tokenizer_config.items() if value not in names}
    first = min(beyond, key=lambda token: int(token["id"]))
    more = f" and {len(beyond) - 1} others" if len(beyond) > 1 else ""
    note = f"{model}: the model has no row for the added token {first['content']!r} ({first['id']}){more}: it is text"
    text = json.dumps(content, ensure_ascii=False)
    return replace(files, tokenizer_json=text, tokenizer_config=config, notes=(*files.notes, note))


def _around(content: Any, vocabulary: int) -> bool:
    """Return whether a tokenizer puts tokens around a text that the model has no row for."""
    ids = parsed(json.dumps(content), "tokenizer.json").encode("", add_special_tokens=True).ids
    return any(number >= vocabulary for number in ids)
