"""A parser that splits an answer's text into content and tool calls, at once or piece by piece."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from picompile_server.reasoning import beginning_length
from picompile_server.tool_arguments import ArgumentReader, JsonReader, argument_reader
from picompile_server.tool_format import ToolFormat

_NAME = re.compile("[a-zA-Z0-9_.-]+")
_NUMBER = re.compile(":[0-9]*")
_SHORT_ID_LETTERS = 9
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolCallDelta:
    """The part of the call at `index` that a piece of text adds. The first of a call has the `id` and the `name`."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class AnswerDelta:
    """The parts of an answer that a piece of text adds: to its content, and then to its calls."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class ToolCallParser:
    """Reads an answer piece by piece, however it is cut.

    Text that may be the beginning of a call is held back until it is known not to be. What begins like a call and is
    none is content, too.
    """

    def __init__(self, style: ToolFormat, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Make a parser of calls in the format `style`; `schemas` are those of the functions' arguments, by name."""
        self._style, self._schemas = style, schemas or {}
        self._opening = style.begin + style.before_name
        self._held = self._spaces = ""  # what is held back, and spaces before it
        self._calls = 0  # that have a name
        self._arguments: ArgumentReader = JsonReader()
        self._read: Callable[[], bool] = self._read_content
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun, up to the function's name."""
        return self._calls > 0

    def feed(self, text: str) -> AnswerDelta:
        """Add text, and return the part that is now certain."""
        self._held += text
        while self._held and self._read():
            pass
        return self._taken()

    def finish(self) -> AnswerDelta:
        """Return the rest, after the last piece. A call that was cut before its name has no part in the answer."""
        if self._read in (self._read_content, self._read_text):
            self._content.append(self._held)
        self._held = ""
        return self._taken()

    def _taken(self) -> AnswerDelta:
        delta = AnswerDelta("".join(self._content), tuple(self._deltas))
        self._content, self._deltas = [], []
        return delta

    # Each of these reads a part of what is held, and returns whether the next may read on. They are what comes next.

    def _read_content(self) -> bool:
        trigger = self._style.trigger
        place = self._held.find(trigger)
        if self._style.is_whole and place != 0 and not trigger.startswith(self._held):
            self._read = self._read_text
            return True
        if place < 0:
            shown = len(self._held) - beginning_length(self._held, trigger)
            shown = len(self._held[:shown].rstrip())  # spaces before a call are not content
            self._content.append(self._held[:shown])
            self._held = self._held[shown:]
            return False
        content = self._held[:place].rstrip()
        self._content.append(content)
        self._spaces, self._held = self._held[len(content) : place], self._held[place:]
        self._read = self._read_name
        return True

    def _read_text(self) -> bool:
        self._content.append(self._held)
        self._held = ""
        return False

    def _read_name(self) -> bool:
        opening, behind = self._opening, self._style.before_arguments
        if not self._held.startswith(opening):
            return self._wait_for(opening, self._held)
        name_end = _end_of(_NAME, self._held, len(opening))
        end = name_end if not self._style.is_numbered else _end_of(_NUMBER, self._held, name_end)
        if end == len(self._held) or not self._held.startswith(behind, end):
            is_named = len(opening) < name_end and (end > name_end or not self._style.is_numbered)
            return self._wait_for(behind if is_named else "", self._held[end:])
        if name_end == len(opening):  # a call has a name
            return self._wait_for("", self._held)
        name, written_id = self._held[len(opening) : name_end], self._held[len(opening) : end]
        self._deltas.append(ToolCallDelta(self._calls, id=self._new_id(written_id), name=name))
        self._held = self._held[end + len(behind) :]
        self._calls += 1
        self._arguments = argument_reader(self._style, self._schemas.get(name, {}))
        self._read = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        length, written = self._arguments.feed(self._held)
        if written:
            self._deltas.append(ToolCallDelta(self._calls - 1, written))
        self._held = self._held[length:]
        if self._arguments.is_complete:
            self._read = self._read_end
        return self._arguments.is_complete

    def _read_end(self) -> bool:
        """Read the text after the arguments: the end of the call, and the beginning of the next one or the last end."""
        after, between = self._style.after_arguments, self._style.between + self._style.before_name
        if self._held.startswith(after + between):
            self._held = self._held[len(after) :]
            self._opening, self._spaces = between, ""
            self._read = self._read_name
            return True
        if (after + between).startswith(self._held) or (after + self._style.end).startswith(self._held):
            return False
        self._held = self._held.removeprefix(after + self._style.end)
        self._read = self._read_rest
        return True

    def _read_rest(self) -> bool:
        """Read the text after the last call. Spaces there are not content."""
        self._held = self._held.lstrip()
        if self._held:
            self._read = self._read_text
        return bool(self._held)

    def _wait_for(self, text: str, given: str) -> bool:
        """Wait for the rest of `text`, part of which has come, or pass on text that is no call as content."""
        if text.startswith(given):
            return False
        self._held = self._spaces + self._held
        self._read = self._read_text
        return True

    def _new_id(self, written: str) -> str:
        if self._style.is_numbered:
            return f"functions.{written}"
        if self._style.has_short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(_SHORT_ID_LETTERS))
        return f"call_{secrets.token_hex(12)}"


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Return where what matches a pattern at `start` ends."""
    found = pattern.match(text, start)
    return start if found is None else found.end()
