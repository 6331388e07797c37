"""A tokenizer beside the model: tokens that the model has no row for."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from picompile.errors import UnsupportedModelError
from picompile.frontend.messages import shown_text
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
    if others >= vocabulary or not beyond:
        raise UnsupportedModelError(
            f"{model}: the tokenizer has token ids up to {highest}, the model only {vocabulary} tokens: "
            "it belongs to another model"
        )
    named = files.tokenizer_config.items()
    config = {name: value for name, value in named if not (isinstance(value, str) and value in names)}
    first = min(beyond, key=lambda token: int(token["id"]))
    more = f" and {len(beyond) - 1} others" if len(beyond) > 1 else ""
    shown = f"{shown_text(first['content'])} ({first['id']}){more}"
    note = f"{model}: the model has no row for the added token {shown}: it is text"
    text = json.dumps(content, ensure_ascii=False)
    return replace(files, tokenizer_json=text, tokenizer_config=config, notes=(*files.notes, note))
