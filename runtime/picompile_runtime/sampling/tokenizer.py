"""Text to tokens and back, with the tokenizer that came with the model; `tokenizers` is imported when one is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from picompile_runtime.artifact.reader import Artifact
from picompile_runtime.errors import ArtifactError, PicompileRuntimeError, RequestError
from picompile_runtime.request_checks import shown, whole_number
from picompile_runtime.sampling.chat_template import ChatTemplate

_REPLACEMENT = "\ufffd"  # what bytes decode to that are no UTF-8, or not all of a character yet


class Tokenizer:
    """A tokenizer.json, and what tokenizer_config.json and chat_template.jinja say about chats."""

    def __init__(self, text: bytes | str, config: Mapping[str, Any] | None = None, chat_template: str = "") -> None:
        from tokenizers import Tokenizer as Implementation

        if not isinstance(text, bytes | str) or not isinstance(config, Mapping | None):
            raise ArtifactError("tokenizer.json is a text, and tokenizer_config.json a JSON object")
        with _named("tokenizer.json cannot be read", ArtifactError, "; compile the model again"):
            # Bytes: as a Python string, a large vocabulary takes another hundred megabytes.
            self._tokenizer = Implementation.from_buffer(text.encode() if isinstance(text, str) else text)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._byte_tokens = _byte_tokens(self._tokenizer)
        template = chat_template or (config or {}).get("chat_template")
        self._chat = ChatTemplate(template, config or {}) if template and isinstance(template, str) else None

    @classmethod
    def of(cls, artifact: Artifact) -> Tokenizer:
        """The artifact's tokenizer; RequestError if it has none."""
        if "tokenizer.json" not in artifact.texts:
            raise RequestError(f"{artifact.folder}: has no tokenizer.json; give token ids instead of text")
        template = artifact.texts.get("chat_template.jinja", b"").decode(errors="replace")
        return cls(artifact.texts["tokenizer.json"], artifact.json("tokenizer_config.json"), template)

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """The ids of `text`; `special_tokens` adds what the tokenizer itself puts around a text, such as its bos."""
        if not isinstance(text, str):
            raise RequestError(f"a text is a str, not {shown(text)}")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # such as half of a surrogate pair
            raise RequestError(f"the text is not valid Unicode ({error.reason})") from error
        with _named("the tokenizer fails on this text", RequestError):
            return list(self._tokenizer.encode(text, add_special_tokens=bool(special_tokens)).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens; those that the vocabulary lacks have no text."""
        with _named("these are no tokens of the tokenizer", RequestError):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def is_open(self, token: int) -> bool:
        """Whether the text of `token` depends on tokens after it.

        So it is with a byte token: a row of them is decoded together, and if one byte is wrong, all are replaced.
        Tokens without a text of their own do not end the row.
        """
        return bool(self._byte_tokens) and (token in self._byte_tokens or not self.decode([token]))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """The ids of a chat as the model's own template writes it, ready for the assistant's answer.

        Messages have `role` and `content`. Raises RequestError if the model has no template, or refuses these.
        """
        if self._chat is None:
            raise RequestError("the model has no chat template; give a plain prompt")
        return self.encode(self._chat.render(messages, add_generation_prompt), special_tokens=False)


@contextmanager
def _named(what: str, kind: type[PicompileRuntimeError], hint: str = "") -> Iterator[None]:
    """Turn errors of the library, which are plain Exceptions or Rust's panics, into one of ours."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what} ({' '.join(str(error).split())}){hint}") from error


def _byte_tokens(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens `<0x00>` to `<0xFF>` of a tokenizer that writes unknown characters as bytes (ByteFallback)."""
    if tokenizer.decoder is None or b'"ByteFallback"' not in tokenizer.decoder.__getstate__():
        return frozenset()
    ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token for token in ids if token is not None)


class StreamDecoder:
    """Turns tokens into text as they come, such that the pieces joined are the text of all tokens decoded at once.

    A piece ends only where later tokens cannot change what is before it: text that ends in a replacement character may
    be the beginning of a character (vLLM and TGI do the same).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the tokens of the last piece, for their effect on the next one, then newer ones
        self._known = 0  # how many of them were given out

    def push(self, token: int) -> str:
        """The text that is certain with this token, often empty."""
        self._ids.append(whole_number("a token", token, 0, 2**32 - 1))
        if self._tokenizer.is_open(token):
            return ""
        piece = self._pending()
        if not piece or piece.endswith(_REPLACEMENT):
            return ""
        del self._ids[: self._known]
        self._known = len(self._ids)
        return piece

    def flush(self) -> str:
        """The rest, when no more tokens will come."""
        piece = self._pending()
        self._ids, self._known = [], 0
        return piece

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._known])
        return self._tokenizer.decode(self._ids)[len(before) :]
