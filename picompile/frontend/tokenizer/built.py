"""A tokenizer as it was built of a folder's files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Built:
    """A tokenizer, its text, the names of its special tokens, and lines for the user.

    Attributes:
        backend: the tokenizer of the tokenizers package.
        text: its tokenizer.json.
        special: the special tokens by name, such as `bos_token`.
        notes: what was not taken, and why, a line for each.
        listed: the added tokens of tokenizer.json, with the ids that it lists.
    """

    backend: Any
    text: str
    special: Mapping[str, str]
    notes: tuple[str, ...] = ()
    listed: tuple[tuple[str, int], ...] = ()


def known_special(special: Mapping[str, str], backend: Any) -> dict[str, str]:
    """Return the special tokens that a vocabulary has: classes add others of their own, without a row in the model."""
    return {name: text for name, text in special.items() if backend.token_to_id(text) is not None}
