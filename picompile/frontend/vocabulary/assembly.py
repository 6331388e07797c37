"""The parts of a tokenizer.json that all kinds of vocabularies have, put together."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.messages import shown
from picompile.frontend.vocabulary.special import SpecialTokens
from picompile.frontend.vocabulary.vocabulary import Vocabulary

Part = dict[str, Any]


@dataclass(frozen=True)
class MadeTokenizer:
    """A tokenizer.json that was made of a vocabulary.

    Attributes:
        text: its text.
        ids: the ids of its tokens by name.
        special: its special tokens.
        byte_level: whether the names of other tokens are letters for bytes; else they are pieces of text.
        strips_space: whether decoding takes the space before a text.
        notes: lines for the user.
    """

    text: str
    ids: Mapping[str, int]
    special: SpecialTokens
    byte_level: bool = False
    strips_space: bool = False
    notes: tuple[str, ...] = ()


def kept_ids(vocabulary: Vocabulary, merges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Return the ids of the tokens by name, without fillers that no merge has."""
    named = {part for pair in merges for part in pair}
    return {
        name: number for number, name in enumerate(vocabulary.tokens) if vocabulary.is_used(number) or name in named
    }


def tokenizer_json(
    vocabulary: Vocabulary, special: SpecialTokens, model: Part, around: tuple[bool, bool], **parts: Part | None
) -> str:
    """Return the text of a tokenizer.json.

    Args:
        vocabulary: the vocabulary.
        special: its special tokens.
        model: the model, with its vocabulary and merges.
        around: whether a text begins with the bos token, and ends with the eos token.
        parts: `normalizer`, `pre_tokenizer` and `decoder`; None for none.
    """
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special.to_json(),
        "normalizer": parts.get("normalizer"),
        "pre_tokenizer": parts.get("pre_tokenizer"),
        "post_processor": _around(vocabulary, around),
        "decoder": parts.get("decoder"),
        "model": model,
    }
    return json.dumps(content, ensure_ascii=False)


def bpe(vocabulary: Vocabulary, ids: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> Part:
    """Return a BPE model with the token ids by name and the merges, best first.

    Raises `UnsupportedModelError` for merges of tokens, or to a token, that the vocabulary lacks.
    """
    for left, right in merges:
        if not (left in ids and right in ids and left + right in ids):
            strange = next(name for name in (left, right, left + right) if name not in ids)
            raise UnsupportedModelError(
                f"{vocabulary.file}: its merges have {shown(strange)}, which is no token of its vocabulary"
            )
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": ids,
        "merges": [list(pair) for pair in merges],
    }


def sequence(kind: str, parts: Sequence[Part]) -> Part | None:
    """Return several normalizers, or decoders (`kind` is the key that lists them), as one; None for none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return {"type": "Sequence", kind: list(parts)}


def whole_token(name: str, content: str) -> Part:
    """Return a decoder that writes the token `name` as `content`, and leaves all others."""
    return {"type": "Replace", "pattern": {"Regex": rf"\A{re.escape(name)}\z"}, "content": content}


def _around(vocabulary: Vocabulary, around: tuple[bool, bool]) -> Part | None:
    first = vocabulary.ids.get("bos") if around[0] else None
    last = vocabulary.ids.get("eos") if around[1] else None
    numbers = [number for number in (first, last) if number is not None]
    if not numbers:
        return None
    named = {number: vocabulary.tokens[number] for number in numbers}

    def text(letter: str, place: int) -> list[Part]:
        ends: list[list[Part]] = [
            [] if number is None else [{"SpecialToken": {"id": named[number], "type_id": place}}]
            for number in (first, last)
        ]
        return [*ends[0], {"Sequence": {"id": letter, "type_id": place}}, *ends[1]]

    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]} for number, name in sorted(named.items())
        },
    }
