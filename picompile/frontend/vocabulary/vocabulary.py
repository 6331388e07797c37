"""A vocabulary of tokens, whatever file it is from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Types of tokens: sentencepiece's, which GGUF files have too (`TokenType` in ggml's gguf-py/gguf/constants.py).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary as its file has it. Its parts have the names of GGUF's keys, which cover those of other files.

    Attributes:
        file: the file.
        model: what kind it is, as `tokenizer.ggml.model` names kinds.
        pre: the name of the split into pieces, None where the file has none.
        architecture: the model's architecture; "" where the file has none.
        name: the model's name; "" where the file has none.
        tokens: the names of the tokens; the id is the place.
        types: the type of each.
        scores: the score of each, None where the file has none.
        merges: the pairs that are merged, in order, None where the file lists none.
        ids: token ids by name, without `_token_id`, those that the file has.
        flags: numbers that stand for yes or no, by key without the prefix.
        charsmap: the normalizer of sentencepiece, compiled; empty for none.
        prefix_once: whether the space before a text is only before its beginning, and not before the text behind each
            special token.
    """

    file: Path
    model: str
    pre: str | None
    architecture: str
    name: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float] | None
    merges: Sequence[tuple[str, str]] | None
    ids: Mapping[str, int]
    flags: Mapping[str, bool]
    charsmap: bytes = b""
    prefix_once: bool = False

    def is_used(self, number: int) -> bool:
        """Return whether a token is more than a filler: converters fill unused rows of the model with `[PAD7]`."""
        name = self.tokens[number]
        return bool(name) and self.types[number] != UNUSED and name != f"[PAD{number}]"
