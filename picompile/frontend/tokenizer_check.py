"""A tokenizer held to a checkpoint's own list of tokens: their ids, their names, their texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ListedTokens:
    """The tokens that a checkpoint lists.

    Attributes:
        ids: the id of each token that the tokenizer has, by name.
        special: the names of the tokens that a text has as a whole, by id.
        control: those of them that have no text.
        texts: the texts of other tokens by id, as bytes, for a token alone may be a part of a character.
        strips_space: whether decoding takes the space before a text, which encoding puts there.
    """

    ids: Mapping[str, int]
    special: Mapping[int, str] = field(default_factory=dict)
    control: frozenset[int] = frozenset()
    texts: Mapping[int, bytes] = field(default_factory=dict)
    strips_space: bool = False


def first_disagreement(tokenizer: Any, listed: ListedTokens) -> str | None:
    """Return how a tokenizer of the tokenizers package disagrees with the list, in one line; None if it does not.

    A special token alone must be its id, and its id its name, or no text where it is a control token. Other ids must
    decode to their texts.
    """
    return (
        _other_ids(tokenizer.get_vocab(with_added_tokens=True), listed.ids)
        or _cut_up(tokenizer, listed.special)
        or _other_texts(tokenizer, listed)
    )


def _other_ids(found: Mapping[str, int], ids: Mapping[str, int]) -> str | None:
    if found == ids:
        return None
    for name, number in ids.items():
        if found.get(name) != number:
            return f"the token {_shown(name)} has the id {number} in the file, and {found.get(name)} in its tokenizer"
    name = next(name for name in found if name not in ids)
    return f"the token {_shown(name)} ({found[name]}) of its tokenizer is not in the file"


def _cut_up(tokenizer: Any, special: Mapping[int, str]) -> str | None:
    encodings = tokenizer.encode_batch(list(special.values()), add_special_tokens=False)
    for (number, name), encoding in zip(special.items(), encodings, strict=True):
        if encoding.ids != [number]:
            return f"the token {_shown(name)} ({number}) is cut into the tokens {_shown(encoding.ids)}"
    return None


def _other_texts(tokenizer: Any, listed: ListedTokens) -> str | None:
    names = {number: name.encode() for number, name in listed.special.items()}
    shown = {number: b"" if number in listed.control else name for number, name in names.items()} | dict(listed.texts)
    for expected, skip in ((names, False), (shown, True)):
        texts = tokenizer.decode_batch([[number] for number in expected], skip_special_tokens=skip)
        for (number, text), found in zip(expected.items(), texts, strict=True):
            if found != _alone(text, listed.strips_space):
                return f"the token {number} decodes to {_shown(found)}, not to {_shown(_alone(text, False))}"
    return None


def _alone(text: bytes, strips_space: bool) -> str:
    """Return what a token alone decodes to: bytes that are no whole character become replacement characters."""
    return text.removeprefix(b" " if strips_space else b"").decode(errors="replace")


def _shown(value: str | Sequence[int]) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
