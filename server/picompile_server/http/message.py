"""A message of a chat while its text comes: its content, and the tools that it calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from picompile_server.http.progress import FinishName
from picompile_server.tool_parser import AnswerDelta, ToolCallDelta, ToolCallParser


@dataclass(frozen=True)
class MessageDelta:
    """The part of a message that a piece of text adds, and in the end why the message ended."""

    content: str = ""
    calls: Sequence[ToolCallDelta] = ()
    finish: FinishName | None = None

    def pieces(self) -> Iterator[dict[str, Any]]:
        """Yield the members `delta` of the chunks that tell it."""
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
    """Builds one message. Without a parser, its text is its content."""

    def __init__(self, parser: ToolCallParser | None = None) -> None:
        self._parser = parser
        self._content = ""
        self._calls: list[dict[str, Any]] = []
        self.finish: FinishName | None = None

    def take(self, text: str, finish: FinishName | None) -> MessageDelta:
        """Add text, the last if there is a finish reason, and return its additions to the message."""
        if self._parser is None:
            self._content += text
            self.finish = finish
            return MessageDelta(text, (), finish)
        parts = [self._parser.feed(text)]
        if finish is not None:
            parts.append(self._parser.finish())
            # A call that was cut off by the limit is no reason.
            self.finish = "tool_calls" if finish == "stop" and self._parser.has_calls else finish
        return self._note(parts)

    def _note(self, parts: Sequence[AnswerDelta]) -> MessageDelta:
        content, calls = "".join(part.content for part in parts), [call for part in parts for call in part.calls]
        self._content += content
        for call in calls:
            if call.name is not None:
                function = {"name": call.name, "arguments": ""}
                self._calls.append({"id": call.id, "type": "function", "function": function})
            self._calls[call.index]["function"]["arguments"] += call.arguments
        return MessageDelta(content, calls, self.finish)

    def message(self) -> dict[str, Any]:
        """Return the message so far."""
        message: dict[str, Any] = {"role": "assistant", "content": self._content, "refusal": None}
        if self._calls:
            message["content"] = self._content or None
            message["tool_calls"] = self._calls
        return message
