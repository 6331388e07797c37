"""A message of a chat while its text comes: its reasoning, its content, and the tools that it calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from picompile_server.http.progress import FinishName
from picompile_server.reasoning import ReasoningSplitter
from picompile_server.tool_parser import AnswerDelta, ToolCallDelta, ToolCallParser


@dataclass(frozen=True)
class MessageDelta:
    """The part of a message that a piece of text adds, and in the end why the message ended."""

    content: str = ""
    calls: Sequence[ToolCallDelta] = ()
    finish: FinishName | None = None
    reasoning: str = ""

    def pieces(self) -> Iterator[dict[str, Any]]:
        """Yield the members `delta` of the chunks that tell it."""
        if self.reasoning:
            yield {"reasoning_content": self.reasoning}
        if self.content:
            yield {"content": self.content}
        for call in self.calls:
            function: dict[str, Any] = {"arguments": call.arguments}
            if call.name is not None:
                function = {"name": call.name, "arguments": call.arguments}
                yield {"tool_calls": [{"index": call.index, "id": call.id, "type": "function", "function": function}]}
            else:
                yield {"tool_calls": [{"index": call.index, "function": function}]}


class MessageBuilder:
    """Builds one message. Without a parser its text has no calls, without a splitter no reasoning apart from it.

    Attributes:
        reasoning, content, calls: the message so far; calls as OpenAI's API writes them.
        finish: why it ended, None before.
    """

    def __init__(self, parser: ToolCallParser | None = None, splitter: ReasoningSplitter | None = None) -> None:
        self._parser, self._splitter = parser, splitter
        self.reasoning = self.content = ""
        self.calls: list[dict[str, Any]] = []
        self.finish: FinishName | None = None

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends in reasoning."""
        return self._splitter is not None and self._splitter.is_reasoning

    def take(self, text: str, finish: FinishName | None) -> MessageDelta:
        """Add text, the last if there is a finish reason, and return its additions to the message."""
        reasoning, text = self._split(text, finish is not None)
        self.finish = finish
        parts = [AnswerDelta(text)]
        if self._parser is not None:
            parts = [self._parser.feed(text)]
            if finish is not None:
                parts.append(self._parser.finish())
            # A call that was cut off by the limit is no reason.
            self.finish = "tool_calls" if finish == "stop" and self._parser.has_calls else finish
        return self._note(reasoning, parts)

    def _split(self, text: str, is_last: bool) -> tuple[str, str]:
        if self._splitter is None:
            return "", text
        reasoning, answer = self._splitter.feed(text)
        if is_last:
            rest, last = self._splitter.finish()
            return reasoning + rest, answer + last
        return reasoning, answer

    def _note(self, reasoning: str, parts: Sequence[AnswerDelta]) -> MessageDelta:
        content, calls = "".join(part.content for part in parts), [call for part in parts for call in part.calls]
        self.reasoning += reasoning
        self.content += content
        for call in calls:
            if call.name is not None:
                function = {"name": call.name, "arguments": ""}
                self.calls.append({"id": call.id, "type": "function", "function": function})
            self.calls[call.index]["function"]["arguments"] += call.arguments
        return MessageDelta(content, calls, self.finish, reasoning)

    def message(self) -> dict[str, Any]:
        """Return the message so far."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = self.calls
        return message
