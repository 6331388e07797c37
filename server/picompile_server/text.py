"""Text of an answer's tokens, up to the first stop text; and the text of single tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.sampling.generate import StopFinder
from picompile_runtime.sampling.tokenizer import StreamDecoder, Tokenizer

# Tokens of a prompt that can change the text of the first token behind it.
_TOKENS_BEFORE = 8
_BYTE = re.compile("<0x([0-9A-F]{2})>")


class TextAssembler:
    """Turns the tokens of one answer into pieces of text. The pieces joined are the text of all tokens decoded at once.

    Attributes:
        decoded: number of characters that the tokens so far have, as far as they are certain.
        shown: how many of them are in the pieces that were returned; none behind a stop text ever is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: str | Sequence[str] = (),
        before: Sequence[int] | NDArray[np.int32] = (),
        shown: Mapping[int, str] | None = None,
    ) -> None:
        """Make an assembler.

        Args:
            tokenizer: the model's tokenizer.
            stops: texts at which the answer ends, or names of special tokens.
            before: the tokens that the answer continues: some tokenizers write a space between two tokens, but none
                at the beginning of a text.
            shown: special tokens that are to have a text, and what it is.

        Raises:
            RequestError: `stops` are no texts, or one of them is empty.
        """
        self._decoder = StreamDecoder(tokenizer, shown or {})
        for token in before[-_TOKENS_BEFORE:]:
            self._decoder.push(token)
        self._decoder.settle()
        self._stop = StopFinder(stops, tokenizer.special_tokens)
        self.decoded = self.shown = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop text or a stop token was found: the answer ends there."""
        return self._stop.found

    @property
    def stop(self) -> str | None:
        """The stop text that was found, None before."""
        return self._stop.stop

    def push(self, token: int) -> str:
        """Add a token, and return the text that can now be shown, which is often empty."""
        return "" if self._stop.ends_at(token) else self._show(self._decoder.push(token))

    def finish(self) -> str:
        """Return the rest of the text, after the last token."""
        piece = self._show(self._decoder.flush())
        rest = self._stop.rest()
        self.shown += len(rest)
        return piece + rest

    def _show(self, piece: str) -> str:
        self.decoded += len(piece)
        shown = self._stop.feed(piece)
        self.shown += len(shown)
        return shown


class TokenTexts:
    """The text of each single token, for log-probabilities. Special tokens have a text, too."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: Any = tokenizer._tokenizer
        self._special = {number: name for name, number in tokenizer.special_tokens.items()}
        decoder = self._vocabulary.decoder
        is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        self._byte_of = _byte_of_letter() if is_byte_level else None
        # In front of another token, so that this one does not stand at the beginning of a text.
        self._before = [] if is_byte_level else tokenizer.encode("a", special_tokens=False)
        self._text_before = tokenizer.decode(self._before)
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token in the middle of a text; they may be a part of a character."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._find(token)
        return found

    def bytes_at_start(self, token: int) -> bytes:
        """Return the bytes of a token that begins a text, where some tokenizers leave out its space."""
        found = self.bytes_of(token)
        if self._byte_of is not None or token in self._special or not found.startswith(b" "):
            return found
        return self._tokenizer.decode([token]).encode()

    def text_of(self, token: int) -> str:
        r"""Return the text of a token; bytes that are no whole character are written as `\xf0`."""
        return text_of_bytes(self.bytes_of(token))

    def _find(self, token: int) -> bytes:
        if token in self._special:
            return self._special[token].encode()
        written = self._vocabulary.id_to_token(token)
        if written is None:  # models may have more tokens than their tokenizers
            return b""
        if self._byte_of is not None:
            if all(letter in self._byte_of for letter in written):
                return bytes(self._byte_of[letter] for letter in written)
            return str(written).encode()
        if (byte := _BYTE.fullmatch(written)) is not None:
            return bytes((int(byte[1], 16),))
        return self._tokenizer.decode([*self._before, token])[len(self._text_before) :].encode()


def text_of_bytes(content: bytes) -> str:
    r"""Return the text of a token's bytes; those that are no whole character are written as `\xf0`."""
    return content.decode(errors="backslashreplace")


def _byte_of_letter() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for: GPT-2's table (openai/gpt-2, encoder.py).

    Printable characters of Latin-1 stand for themselves, and letters from U+0100 on for the other bytes.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}
