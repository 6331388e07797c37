"""Text to tokens and back, with the model's own tokenizer. `tokenizers` is imported when the first one is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Any

from picompile_runtime.artifact.reader import Artifact
from picompile_runtime.errors import ArtifactError, PicompileRuntimeError, RequestError
from picompile_runtime.request_checks import shown, whole_number
from picompile_runtime.sampling.chat_template import PLAIN_STOPS, PLAIN_TEMPLATE, ChatTemplate, named_templates

_REPLACEMENT = "\ufffd"  # the character that invalid or incomplete UTF-8 decodes to


_NO_TOKENS: Mapping[int, str] = MappingProxyType({})
# Tokens that are held back until it is looked at which of them are certain, and the bytes of a character at most.
_HELD, _LONGEST_CHARACTER = 16, 4


class Tokenizer:
    """A model's tokenizer, and its chat templates if it has any."""

    def __init__(self, text: bytes | str, config: Mapping[str, Any] | None = None, chat_template: str = "") -> None:
        """Make a tokenizer.

        Args:
            text: the content of tokenizer.json.
            config: the content of tokenizer_config.json.
            chat_template: a Jinja template, by default the one in `config`, or those that it names.

        Raises:
            ArtifactError: `text` or `config` are not valid.
        """
        from tokenizers import Tokenizer as Implementation

        if not isinstance(text, bytes | str) or not isinstance(config, Mapping | None):
            raise ArtifactError("tokenizer.json is a text, and tokenizer_config.json a JSON object")
        with _named("tokenizer.json cannot be read", ArtifactError, "; compile the model again"):
            # Bytes: as a Python string, a large vocabulary takes another hundred megabytes.
            self._tokenizer = Implementation.from_buffer(text.encode() if isinstance(text, str) else text)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._byte_tokens = _byte_tokens(self._tokenizer)
        made = {
            name: ChatTemplate(text, config or {})
            for name, text in named_templates(config or {}, chat_template).items()
        }
        self._chat = made.get("default")
        self._tool_chat = made.get("tool_use", self._chat)

    @classmethod
    def of(cls, artifact: Artifact) -> Tokenizer:
        """Return the artifact's tokenizer. Raises RequestError if the artifact has none."""
        if "tokenizer.json" not in artifact.texts:
            raise RequestError(f"{artifact.folder}: has no tokenizer.json; give token ids instead of text")
        template = artifact.texts.get("chat_template.jinja", b"").decode(errors="replace")
        return cls(artifact.texts["tokenizer.json"], artifact.json("tokenizer_config.json"), template)

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        Args:
            text: any text.
            special_tokens: whether to add the tokens that the tokenizer puts around a text, such as its bos.

        Raises:
            RequestError: `text` is no str, or no valid Unicode.
        """
        if not isinstance(text, str):
            raise RequestError(f"a text is a str, not {shown(text)}")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # such as half of a surrogate pair
            raise RequestError(f"the text is not valid Unicode ({error.reason})") from error
        with _named("the tokenizer fails on this text", RequestError):
            # Unlike `encode`, this lets other threads run meanwhile.
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=bool(special_tokens))
            return list(encoding.ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Special tokens, and ids that the vocabulary lacks, have no text."""
        with _named("these are no tokens of the tokenizer", RequestError):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def is_open(self, token: int) -> bool:
        """Return whether the text of `token` depends on tokens after it.

        The text of a byte token does: consecutive ones are decoded together, and if one byte is wrong, all are
        replaced. Tokens without a text of their own do not end such a row.
        """
        return bool(self._byte_tokens) and (token in self._byte_tokens or not self.decode([token]))

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of all tokens by their names, as the tokenizer writes them: a space may be another letter."""
        return dict(self._tokenizer.get_vocab(True))

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of the special tokens, which `decode` leaves out, by their names."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return MappingProxyType({str(token.content): int(number) for number, token in added if token.special})

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        """The ids of the tokens that a text is searched for before it is cut, special ones and others, by name."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return MappingProxyType(
            {str(token.content): int(number) for number, token in sorted(added, key=lambda e: e[0])}
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template of its own."""
        return self._chat is not None

    @property
    def chat_stops(self) -> tuple[str, ...]:
        """The texts at which every answer in a chat ends: none with a template of the model's own, which has tokens."""
        return () if self.has_chat_template else PLAIN_STOPS

    def chat_template(self, with_tools: bool = False) -> str:
        """Return the text of the template, of the one for chats `with_tools` if there are two; "" if there is none."""
        chat = self._tool_chat if with_tools else self._chat
        return chat.text if chat is not None else ""

    def fit_messages(self, messages: Sequence[Mapping[str, Any]], with_tools: bool = False) -> list[dict[str, Any]]:
        """Return messages in the form that the model's own template reads, as `render_chat` gives them to it.

        The content is a text, or a list of parts for a template that reads parts alone; the role `developer` is kept
        by a template that knows it, and is `system` elsewhere.
        """
        chat = self._tool_chat if with_tools else self._chat
        return [dict(message) for message in messages] if chat is None else chat.fit(messages)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        plain: bool = False,
    ) -> str:
        """Return the text of a chat, as the model's own template writes it. For the rest see `encode_chat`."""
        chat = self._chat if tools is None else self._tool_chat
        if chat is None and plain:
            chat = self._plain_chat
        if chat is None:
            raise RequestError("the model has no chat template; give a plain prompt")
        return chat.render(messages, add_generation_prompt, tools, arguments)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        plain: bool = False,
    ) -> list[int]:
        """Return the token ids of a chat, as the model's own template writes it.

        Args:
            messages: each has `role` and `content`.
            add_generation_prompt: whether to end with the beginning of the assistant's answer.
            tools: what the model may call, as OpenAI's API describes tools; None if it is offered none.
            arguments: further variables of the template, such as `enable_thinking`.
            plain: whether to write the chat as a plain dialogue if the model has no template. Then the answer ends at
                one of `chat_stops`.

        Raises:
            RequestError: the model has no chat template, or the template rejects these messages.
        """
        text = self.render_chat(messages, add_generation_prompt, tools, arguments, plain)
        return self.encode(text, special_tokens=not self.has_chat_template)  # templates write theirs themselves

    def close(self) -> None:
        """End the processes that render chats; the next chat starts another."""
        for chat in (self._chat, self._tool_chat, self.__dict__.get("_plain_chat")):
            if chat is not None:
                chat.close()

    @cached_property
    def _plain_chat(self) -> ChatTemplate:
        return ChatTemplate(PLAIN_TEMPLATE, {})


@contextmanager
def _named(what: str, kind: type[PicompileRuntimeError], hint: str = "") -> Iterator[None]:
    """Raise errors of the library, plain Exceptions and Rust's panics, as an error of the runtime."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what} ({' '.join(str(error).split())}){hint}") from error


def _byte_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids of the tokens `<0x00>` to `<0xFF>` if the tokenizer writes unknown characters as bytes.

    Such tokenizers have the decoder ByteFallback.
    """
    if tokenizer.decoder is None or b'"ByteFallback"' not in tokenizer.decoder.__getstate__():
        return frozenset()
    ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token for token in ids if token is not None)


class StreamDecoder:
    """A decoder that turns tokens into text as they come. Its pieces, joined, are the text of all tokens.

    A piece ends only where later tokens cannot change the text before: text that ends in a replacement character may
    be the beginning of a character (vLLM and TGI hold it back, too).
    """

    def __init__(self, tokenizer: Tokenizer, shown: Mapping[int, str] = _NO_TOKENS) -> None:
        """Make a decoder; `shown` maps special tokens that get a text to that text."""
        self._tokenizer = tokenizer
        self._shown = shown
        self._silent = frozenset(tokenizer.special_tokens.values()) - shown.keys()
        self._ids: list[int] = []  # the tokens of the last piece, which affect the next one, then newer tokens
        self._known = 0  # how many of them are in returned pieces

    def push(self, token: int) -> str:
        """Add a token, and return the text that is now certain, which is often empty."""
        token = whole_number("a token", token, 0, 2**32 - 1)
        if token in self._shown:
            return self.flush() + self._shown[token]
        if token in self._silent:  # has no text, and changes none
            return ""
        self._ids.append(token)
        if self._tokenizer.is_open(token):
            return ""
        piece = self._pending()
        if piece.endswith(_REPLACEMENT):
            return self._certain()
        if not piece:
            return ""
        del self._ids[: self._known]
        self._known = len(self._ids)
        return piece

    def settle(self) -> None:
        """Take the text of all tokens so far as known: pieces have only what comes behind it."""
        self._known = len(self._ids)

    def _certain(self) -> str:
        """Return the text that is certain though the last character may be incomplete; there is some if bytes that are
        no text go on and on, which are not to be decoded again and again.
        """
        ids = self._ids[self._known :]
        if len(ids) % _HELD:
            return ""
        for cut in range(len(ids) - 1, len(ids) - _LONGEST_CHARACTER, -1):
            place = self._known + cut
            whole, before = self._tokenizer.decode(self._ids), self._tokenizer.decode(self._ids[:place])
            if whole == before + self._tokenizer.decode(self._ids[place:]):  # no character is across the cut
                piece = self._behind_known(before)
                del self._ids[:place]
                self._known = 0
                return piece
        return ""

    def flush(self) -> str:
        """Return the rest of the text, after the last token."""
        piece = self._pending()
        self._ids, self._known = [], 0
        return piece

    def _pending(self) -> str:
        return self._behind_known(self._tokenizer.decode(self._ids))

    def _behind_known(self, text: str) -> str:
        known = self._tokenizer.decode(self._ids[: self._known])
        # Text that was settled may have ended in the middle of a character, which is complete now.
        if not text.startswith(known):
            known = known[: next(place for place, letter in enumerate(known) if text[place : place + 1] != letter)]
        return text[len(known) :]
