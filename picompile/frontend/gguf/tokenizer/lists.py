"""The vocabulary in a GGUF file's metadata: its lists, its numbers and its flags, checked against each other."""

from collections.abc import Mapping, Sequence
from typing import Any

from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.header import GgufHeader
from picompile.frontend.gguf.metadata import is_array_of, read_array, read_text
from picompile.frontend.messages import shown
from picompile.frontend.vocabulary.merges import MOST_MERGES
from picompile.frontend.vocabulary.vocabulary import CONTROL, NORMAL, USER_DEFINED, Vocabulary

PREFIX = "tokenizer.ggml."
# Names of token ids, without `_token_id`.
IDS = (
    *("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "mask"),
    *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
)
_LISTS: dict[str, type] = {"tokens": str, "merges": str, "scores": float, "token_type": int}
# Gemma has 262,144 tokens, 6,414 of them of no text.
_MOST_TOKENS, _MOST_SPECIAL_TOKENS = 1 << 19, 1 << 16
_MOST_CHARSMAP_BYTES = 4 << 20


def read_vocabulary(header: GgufHeader) -> Vocabulary | None:
    """Return the vocabulary of `header`, None where the file has none.

    Raises `UnsupportedModelError`, in one line, for lists that contradict each other or cannot be read.
    """
    lists = {name: _read_list(header, name) for name in _LISTS}
    tokens, model = lists["tokens"], read_text(header, f"{PREFIX}model")
    if tokens is None or model is None:
        return None
    _check_lists(header, lists)
    vocabulary = Vocabulary(
        file=header.file,
        model=model,
        pre=read_text(header, f"{PREFIX}pre"),
        architecture=read_text(header, "general.architecture") or "",
        name=read_text(header, "general.name") or "",
        tokens=tokens,
        types=lists["token_type"] or [NORMAL] * len(tokens),
        scores=lists["scores"],
        merges=_pairs(header, lists["merges"]),
        ids=read_ids(header, len(tokens)),
        flags=_read_flags(header),
        charsmap=_read_charsmap(header),
    )
    _check_names(vocabulary)
    return vocabulary


def read_ids(header: GgufHeader, count: int) -> dict[str, int]:
    """Return the token ids that `header` has by name, of those that are below `count`."""
    numbers = {name: header.values.get(f"{PREFIX}{name}_token_id", -1) for name in IDS}
    return {name: int(number) for name, number in numbers.items() if type(number) is int and 0 <= number < count}


def _read_list(header: GgufHeader, name: str) -> list[Any] | None:
    key = PREFIX + name
    if key not in header.arrays:
        return None
    if not is_array_of(header, key, _LISTS[name]):
        raise UnsupportedModelError(f"{header.file}: {key} has elements of another type than {_LISTS[name].__name__}")
    return read_array(header, key)


def _read_flags(header: GgufHeader) -> dict[str, bool]:
    names = ("add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces")
    found = {name: header.values.get(PREFIX + name) for name in names}
    return {name: bool(value) for name, value in found.items() if value is not None}


def _read_charsmap(header: GgufHeader) -> bytes:
    key = f"{PREFIX}precompiled_charsmap"
    if key not in header.arrays:
        return b""
    if not is_array_of(header, key, int) or header.arrays[key].count > _MOST_CHARSMAP_BYTES:
        raise UnsupportedModelError(f"{header.file}: {key} is no list of bytes, or too long")
    table = bytes(number & 255 for number in read_array(header, key) or ())
    # The tokenizers package takes the length of the table from its first four bytes, and memory for that much.
    if table and (len(table) < 4 or (size := int.from_bytes(table[:4], "little")) % 4 or size + 4 > len(table)):
        raise UnsupportedModelError(f"{header.file}: {key} is longer by its own count than in the file")
    return table


def _pairs(header: GgufHeader, merges: Sequence[str] | None) -> list[tuple[str, str]] | None:
    if merges is None:
        return None
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise UnsupportedModelError(f"{header.file}: {PREFIX}merges has {shown(merge)}, not two tokens")
        pairs.append((left, right))
    return pairs


def _check_lists(header: GgufHeader, lists: Mapping[str, list[Any] | None]) -> None:
    tokens = lists["tokens"] or []
    for name in ("scores", "token_type"):
        values = lists[name]
        if values is not None and len(values) != len(tokens):
            raise UnsupportedModelError(f"{header.file}: {len(tokens)} tokens, but {len(values)} {PREFIX}{name}")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and len(tokens) > embedding.shape[0]:
        raise UnsupportedModelError(
            f"{header.file}: the tokenizer has {len(tokens):,} tokens, the model only {embedding.shape[0]:,}"
        )
    special = sum(kind in (CONTROL, USER_DEFINED) for kind in lists["token_type"] or ())
    for what, count, most in (
        ("tokens", len(tokens), _MOST_TOKENS),
        ("merges", len(lists["merges"] or ()), MOST_MERGES),
        ("special tokens", special, _MOST_SPECIAL_TOKENS),
    ):
        if count > most:
            raise UnsupportedModelError(f"{header.file}: {count:,} {what} in its vocabulary; at most {most:,} are read")


def _check_names(vocabulary: Vocabulary) -> None:
    """Refuse two tokens of one name, as llama.cpp does: a text that has it could be either."""
    known: dict[str, int] = {}
    for number, name in enumerate(vocabulary.tokens):
        first = known.setdefault(name, number)
        if first != number and vocabulary.is_used(number) and vocabulary.is_used(first):
            raise UnsupportedModelError(
                f"{vocabulary.file}: its vocabulary has {shown(name)} twice, as tokens {first} and {number}"
            )
