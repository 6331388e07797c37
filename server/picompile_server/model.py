"""A served model: its engine, its tokenizer and its scheduler, under the name that requests give."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from picompile_runtime.artifact.program import Program
from picompile_runtime.artifact.reader import open_artifact
from picompile_runtime.devices.machine import check_threads
from picompile_runtime.engine.engine import Engine
from picompile_runtime.errors import PicompileRuntimeError, RequestError
from picompile_runtime.sampling.model_defaults import artifact_defaults
from picompile_runtime.sampling.tokenizer import Tokenizer
from picompile_server.mailbox import Answers, Mailbox
from picompile_server.reasoning_formats import ReasoningFormat, find_reasoning_format
from picompile_server.request import ServingRequest
from picompile_server.scheduler import Scheduler, SchedulerOptions
from picompile_server.text import TokenTexts, text_of_bytes
from picompile_server.workers import Workers

if TYPE_CHECKING:
    from picompile_server.grammar import GrammarCompiler
    from picompile_server.reasoning_grammar import ReasoningTokens
    from picompile_server.tool_use import ToolUse

# Shorter texts are cut into tokens sooner than another thread could begin.
_SHORT_LETTERS = 256
# More than the text has with which a prompt begins the model's reasoning, a byte each at worst.
_LAST_TOKENS = 40


class ServedModel:
    """A model that answers requests.

    Attributes:
        name: what requests call it.
        engine, tokenizer, scheduler: what it runs on.
        texts: the texts of single tokens.
        text_workers, grammar_workers: threads for work on texts, and for compiling grammars.
        defaults: how tokens are chosen where a request does not say, as `picompile chat` chooses them.
        created_s: when it was loaded, in seconds since 1970.
        most_letters: number of characters that a prompt can have at most. No token has more than the longest one, and
            twice that is far more than a tokenizer's normalization takes away.
    """

    def __init__(self, name: str, engine: Engine, tokenizer: Tokenizer, scheduler: Scheduler) -> None:
        self.name, self.engine, self.tokenizer, self.scheduler = name, engine, tokenizer, scheduler
        self.texts = TokenTexts(tokenizer)
        self.defaults = artifact_defaults(engine.artifact)
        self.created_s = int(time.time())
        self.most_letters = 2 * engine.context * max(map(len, tokenizer.vocabulary()), default=1)
        self._mailbox: Mailbox | None = None
        # Grammars take turns, and seconds each at worst; texts do not wait for them.
        most_waiting = scheduler.options.max_waiting + engine.sequences
        self.text_workers = Workers("texts", 2, most_waiting)
        self.grammar_workers = Workers("grammars", 1, most_waiting)

    @cached_property
    def fingerprint(self) -> str:
        """A text that differs for other artifacts, as OpenAI's `system_fingerprint` does for other builds."""
        return f"b{self.engine.artifact.manifest.sha256[:16]}"

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The compiler of grammars for the model's tokens. Making it takes a moment: not for the loop."""
        from picompile_server.grammar import GrammarCompiler

        return GrammarCompiler(self.tokenizer, self.engine.vocab, self.end_tokens)

    @cached_property
    def tool_use(self) -> ToolUse:
        """The way in which the model is told of tools and calls them."""
        from picompile_server.tool_use import ToolUse

        return ToolUse(self.tokenizer)

    @cached_property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of the model's reasoning; None if its chat template does not say that it reasons."""
        template = self.tokenizer.chat_template
        return find_reasoning_format(template() + template(with_tools=True))

    @cached_property
    def reasoning_tokens(self) -> ReasoningTokens | None:
        """The model's tokens for its reasoning, for grammars. Their first use takes a moment: not for the loop."""
        from picompile_server.reasoning_grammar import ReasoningTokens

        if self.reasoning is None:
            return None
        return ReasoningTokens(self.reasoning, self.tokenizer, self.engine.vocab, self.end_tokens)

    def end_of(self, ids: Sequence[int]) -> str:
        """Return the text of the last tokens of a prompt, with the names of special tokens."""
        return text_of_bytes(b"".join(map(self.texts.bytes_of, ids[-_LAST_TOKENS:])))

    def tool_note(self) -> str | None:
        """Return a line for whoever starts the server if calls of tools come as text; None if they do not.

        It may render chats, which takes a moment: not for the loop.
        """
        with suppress(PicompileRuntimeError):  # a request that needs it says so
            if self.tool_use.is_described and self.tool_use.style is None:
                return (
                    f"{self.name}: the chat template describes tools, in a format of calls that picompile does not "
                    "know: calls come as the content of answers"
                )
        return None

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self.engine.artifact.eos_token_ids

    def start(self, requests: Sequence[ServingRequest]) -> Answers:
        """Ask for answers, on the event loop that takes their events.

        Raises:
            RequestError: a request makes no sense or does not fit the model.
            QueueFullError: too many requests wait.
            ClosedError: the model takes no requests any more.
        """
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        return Answers(self.scheduler.submit, requests, self._mailbox)

    async def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; a long one is cut in another thread.

        Raises QueueFullError if too many wait for that, and what `Tokenizer.encode` raises.
        """
        if len(text) <= _SHORT_LETTERS:
            return self.tokenizer.encode(text, special_tokens)
        return await self.text_workers.run(self.tokenizer.encode, text, special_tokens)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a chat, rendered in another thread: a plain dialogue if the model has no template.

        Raises RequestError if the model's chat template rejects it, and QueueFullError; for the arguments see
        `Tokenizer.encode_chat`.
        """
        encode = self.tokenizer.encode_chat
        return await self.text_workers.run(encode, messages, add_generation_prompt, tools, arguments, True)

    def close(self, drain: bool) -> None:
        """End all answers, after they are complete if `drain`, and free the engine and all processes."""
        self.text_workers.close()
        self.grammar_workers.close()
        self.scheduler.close(drain)
        self.engine.close()
        self.tokenizer.close()
        if (grammars := self.__dict__.get("grammars")) is not None:
            grammars.close()


def load_model(
    name: str,
    folder: str | os.PathLike[str],
    threads: int | None = None,
    replan: bool = False,
    options: SchedulerOptions | None = None,
    kv_bytes: int | None = None,
) -> ServedModel:
    """Load an artifact, and start to schedule requests on it.

    Args:
        name: what requests call the model.
        folder: the artifact.
        threads, replan: as for `picompile_runtime.load`.
        options: how requests are scheduled.
        kv_bytes: how much of the KV cache may be in use; None for all of it.

    Raises:
        PicompileRuntimeError: the artifact cannot be loaded or has no tokenizer, or an argument makes no sense.
    """
    options = options or SchedulerOptions()
    if threads is not None:
        check_threads(threads)
    artifact = open_artifact(folder)
    try:
        artifact_defaults(artifact)  # before anything takes long
        if kv_bytes is not None:
            options = replace(options, kv_tokens=kv_tokens(artifact.program, kv_bytes))
        engine = Engine(artifact, threads, replan, options.kv_tokens)
    except BaseException:
        artifact.close()
        raise
    try:
        tokenizer = Tokenizer.of(engine.artifact)
        return ServedModel(name, engine, tokenizer, Scheduler(engine, options))
    except BaseException:
        engine.close()
        raise


def kv_tokens(program: Program, size_bytes: int) -> int:
    """Return how many tokens of the model's KV cache `size_bytes` of memory hold. Raises RequestError if none."""
    if not program.token_bytes:
        raise RequestError("--kv-memory: the model has no KV cache")
    tokens = size_bytes // program.token_bytes
    if tokens < 1:
        raise RequestError(f"--kv-memory: {size_bytes} bytes hold no token; give more")
    return tokens
