"""The output of a response while it comes: reasoning, messages and calls of functions, and the events that tell it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from picompile_server.http.message import MessageDelta
from picompile_server.http.response_input import sealed

# The name of an event, and its members.
Event = tuple[str, dict[str, Any]]


class _Text:
    """A message or reasoning, with one text."""

    def __init__(self, kind: Literal["message", "reasoning"], is_sealed: bool = False) -> None:
        self.kind, self._is_sealed = kind, is_sealed
        self.id, self._text = f"{'msg' if kind == 'message' else 'rs'}_{uuid.uuid4().hex}", ""
        self._part_kind = "output_text" if kind == "message" else "reasoning_text"
        # Only texts of messages can have log-probabilities, and those only on request.
        self._more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}

    def begin(self) -> Iterator[Event]:
        yield "content_part.added", {"content_index": 0, "part": self._part()}

    def add(self, text: str) -> Iterator[Event]:
        self._text += text
        yield f"{self._part_kind}.delta", {"content_index": 0, "delta": text, **self._more}

    def end(self) -> Iterator[Event]:
        yield f"{self._part_kind}.done", {"content_index": 0, "text": self._text, **self._more}
        yield "content_part.done", {"content_index": 0, "part": self._part()}

    def whole(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part()]
        if self.kind == "message":
            return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}
        sealed_text = sealed(self._text) if self._is_sealed and content else None
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": content,
            "encrypted_content": sealed_text,
            "status": status,
        }

    def _part(self) -> dict[str, Any]:
        annotations: dict[str, Any] = {"annotations": []} if self.kind == "message" else {}
        return {"type": self._part_kind, "text": self._text, **annotations, **self._more}


class _Call:
    """A call of a function."""

    kind = "function_call"

    def __init__(self, call_id: str, name: str, namespace: str | None) -> None:
        self.id, self._arguments = f"fc_{uuid.uuid4().hex}", ""
        self._named = {"call_id": call_id, "name": name, **({"namespace": namespace} if namespace else {})}

    def begin(self) -> Iterator[Event]:
        yield from ()

    def add(self, text: str) -> Iterator[Event]:
        self._arguments += text
        yield "function_call_arguments.delta", {"delta": text}

    def end(self) -> Iterator[Event]:
        yield "function_call_arguments.done", {"name": self._named["name"], "arguments": self._arguments}

    def whole(self, status: str) -> dict[str, Any]:
        return {"id": self.id, "type": self.kind, "status": status, **self._named, "arguments": self._arguments}


class OutputItems:
    """The items of one response, in order. One is open at a time; its last events come when another begins.

    Attributes:
        items: those that are complete.
    """

    def __init__(self, namespaces: Mapping[str, tuple[str, str]], seals_reasoning: bool = False) -> None:
        """Make an empty output.

        Args:
            namespaces: those of functions, and their names in them, by the names that the model knows.
            seals_reasoning: whether to add reasoning in the form in which clients hand it back.
        """
        self.items: list[dict[str, Any]] = []
        self._namespaces, self._seals_reasoning = namespaces, seals_reasoning
        self._open: _Text | _Call | None = None

    def take(self, delta: MessageDelta) -> Iterator[Event]:
        """Yield the events of additions to the message."""
        if delta.reasoning:
            yield from self._add_text("reasoning", delta.reasoning)
        if delta.content:
            yield from self._add_text("message", delta.content)
        for call in delta.calls:
            if call.name is not None:
                namespace, name = self._namespaces.get(call.name, (None, call.name))
                yield from self._begin(_Call(call.id or "", name, namespace))
            if call.arguments and self._open is not None:
                yield from self._told(self._open.add(call.arguments))

    def close(self, is_complete: bool) -> Iterator[Event]:
        """Yield the last events. An answer without any text has an empty message."""
        if self._open is None and not self.items:
            yield from self._begin(_Text("message"))
        yield from self._end(is_complete)

    def _add_text(self, kind: Literal["message", "reasoning"], text: str) -> Iterator[Event]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(_Text(kind, self._seals_reasoning))
        if self._open is not None:
            yield from self._told(self._open.add(text))

    def _begin(self, item: _Text | _Call) -> Iterator[Event]:
        yield from self._end(True)
        self._open = item
        yield "response.output_item.added", {"output_index": len(self.items), "item": item.whole("in_progress")}
        yield from self._told(item.begin())

    def _end(self, is_complete: bool) -> Iterator[Event]:
        if (item := self._open) is None:
            return
        yield from self._told(item.end())
        whole = item.whole("completed" if is_complete else "incomplete")
        yield "response.output_item.done", {"output_index": len(self.items), "item": whole}
        self.items.append(whole)
        self._open = None

    def _told(self, events: Iterator[Event]) -> Iterator[Event]:
        """Yield events of the open item with its place."""
        for name, members in events:
            place = {"item_id": "" if self._open is None else self._open.id, "output_index": len(self.items)}
            yield f"response.{name}", {**place, **members}
