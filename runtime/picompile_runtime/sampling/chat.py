"""A chat with a model: its messages, and answers for which only the new part of the chat is read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from picompile_runtime.engine.engine import Engine
from picompile_runtime.errors import RequestError
from picompile_runtime.sampling.chat_answer import ChatAnswer, ChatMessage, ChatOptions
from picompile_runtime.sampling.tokenizer import Tokenizer

_SEEDS = 2**128
# A single token would be decoded, which may compute fewer neurons than reading it as a part of the prompt.
_LEAST_READ = 2  # tokens
_QUESTION = ChatMessage("user", "?")


class ChatFullError(RequestError):
    """The chat does not fit the context any more."""


class Conversation:
    """A chat in slot 0 of an engine, which nothing else may use meanwhile.

    The engine keeps what it has read. For an answer it reads the chat from the first token on that differs. A model
    without a chat template reads a plain dialogue.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, options: ChatOptions | None = None) -> None:
        """Begin an empty chat."""
        self._options = options or ChatOptions()
        self._engine, self._tokenizer = engine, tokenizer
        self._system = ""
        self._messages: list[ChatMessage] = []
        self._before: list[ChatMessage] = []  # those before the last answer was asked for
        self._answer: ChatAnswer | None = None
        self._answers = 0
        engine.reset()

    @property
    def options(self) -> ChatOptions:
        """Options of future answers. A new seed applies to the next answer."""
        return self._options

    @options.setter
    def options(self, options: ChatOptions) -> None:
        if options.params.seed != self._options.params.seed:
            self._answers = 0
        self._options = options

    @property
    def context(self) -> int:
        """Number of tokens that the chat may have."""
        return self._engine.context

    @property
    def system(self) -> str:
        """The system prompt, empty if there is none."""
        return self._system

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """All messages; the system prompt is the first, if there is one. An answer grows while it is made."""
        return (*self._first(), *self._messages)

    def token_count(self) -> int:
        """Return the number of tokens of the messages."""
        return len(self._encoded(self.messages, add_generation_prompt=False)) if self._messages else 0

    def set_system(self, text: str) -> bool:
        """Set the system prompt of the whole chat, from the next answer on. An empty one removes it.

        Returns:
            Whether the model's chat template uses it.

        Raises:
            RequestError: the chat template rejects system prompts; then the old one stays.
        """
        before, self._system = self._system, ChatMessage("system", text).content
        try:
            with_it = self._encoded([*self._first(), _QUESTION])
        except RequestError:
            self._system = before
            raise
        # Compared with another one: a template may have this very text as its default.
        return not text or with_it != self._encoded([ChatMessage("system", f"{text}!"), _QUESTION])

    def set_messages(self, messages: Sequence[ChatMessage]) -> None:
        """Go on with these messages instead. A system prompt is the first of them.

        Raises RequestError, and changes nothing, if another is one, or the chat template rejects them.
        """
        first = 1 if messages and messages[0].role == "system" else 0
        system, rest = "".join(message.content for message in messages[:first]), list(messages[first:])
        if any(message.role == "system" for message in rest):
            raise RequestError("only the first message of a chat can be a system prompt")
        self._encoded(messages if rest else [*messages, _QUESTION])
        self._system, self._messages, self._answers = system, rest, 0

    def reset(self) -> None:
        """Forget all messages but the system prompt."""
        self._messages, self._answers = [], 0

    def undo(self) -> str:
        """Take back the last question and its answer, and return the question. Raises RequestError if there is none."""
        place = self._last_question()
        question = self._messages[place].content
        del self._messages[place:]
        return question

    def revert(self) -> None:
        """Restore the messages as they were before the last answer was asked for."""
        self._messages = self._before

    def ask(self, text: str) -> ChatAnswer:
        """Add a question, and return its answer; iterate over it for the pieces of text.

        Raises:
            ChatFullError: the chat does not fit the context with the question.
            RequestError: the question alone does not fit it, or the chat template rejects it. Then nothing changes.
        """
        return self._start([*self._messages, ChatMessage("user", text)])

    def answer_again(self) -> ChatAnswer:
        """Forget the last answer, and return another one. Raises RequestError if there is no question."""
        return self._start(self._messages[: self._last_question() + 1])

    def _start(self, messages: list[ChatMessage]) -> ChatAnswer:
        start_s = time.perf_counter()
        ids = self._encoded([*self._first(), *messages])
        if len(ids) >= self.context:
            raise self._full(messages, len(ids))
        held = self._answer.held_tokens if self._answer else []
        common = min(_common(held[: self._engine.position], ids), max(0, len(ids) - _LEAST_READ))
        reused = self._engine.reusable(common)
        params = self.options.params
        if params.seed is not None:
            params = replace(params, seed=(params.seed + self._answers) % _SEEDS)
        options = replace(self.options, params=params)
        answer = ChatAnswer(
            self._engine,
            tokenizer=self._tokenizer,
            messages=messages,
            prompt_tokens=ids,
            reused_tokens=reused,
            options=options,
            start_s=start_s,
        )
        self._before, self._messages, self._answer = self._messages, messages, answer
        self._answers += 1
        return answer

    def _full(self, messages: list[ChatMessage], tokens: int) -> RequestError:
        alone = len(self._encoded([*self._first(), messages[-1]])) if len(messages) > 1 else tokens
        if alone >= self.context:
            size = f"{alone} tokens alone, and the context has {self.context}"
            return RequestError(f"the message is too long: it takes {size}; shorten it")
        size = f"{tokens} tokens, and the context has {self.context}"
        return ChatFullError(f"the chat is full: with this message it would take {size}")

    def _first(self) -> list[ChatMessage]:
        return [ChatMessage("system", self._system)] if self._system else []

    def _last_question(self) -> int:
        """Return the place of the last question, or raise RequestError."""
        places = [place for place, message in enumerate(self._messages) if message.role == "user"]
        if not places:
            raise RequestError("the chat has no question yet")
        return places[-1]

    def _encoded(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> list[int]:
        content: list[Mapping[str, str]] = [vars(message) for message in messages]
        return self._tokenizer.encode_chat(content, add_generation_prompt, plain=True)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common, from their first on."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
