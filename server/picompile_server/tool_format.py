"""The record of a format in which a model writes tool calls: the texts around a function's name and its arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TaggedArguments:
    """Arguments one by one, each name and each value between two texts. A text stands as it is, all else as JSON.

    A format that says whether a value is a text has `before_text` before texts, and `before_value` before all else.
    """

    before_name: str
    before_value: str
    after_value: str
    before_text: str | None = None

    def write(self, arguments: str) -> str:
        """Return the text of arguments, given as JSON."""
        return "".join(
            f"{self.before_name}{name}{self._before(value)}{value if isinstance(value, str) else _json(value)}"
            f"{self.after_value}"
            for name, value in json.loads(arguments).items()
        )

    def _before(self, value: object) -> str:
        return self.before_value if self.before_text is None or not isinstance(value, str) else self.before_text


@dataclass(frozen=True)
class KeywordArguments:
    """Arguments as Python writes them: names and literals. `is_json` if true, false and null are JSON's."""

    is_json: bool = False

    def write(self, arguments: str) -> str:
        """Return the text of arguments, given as JSON."""
        return ", ".join(f"{name}={self.literal(value)}" for name, value in json.loads(arguments).items())

    def literal(self, value: object) -> str:
        """Return the text of one value."""
        if self.is_json or not (value is None or isinstance(value, bool)):
            return _json(value)
        return repr(value)


@dataclass(frozen=True)
class BracedArguments:
    """Arguments as names and values with colons, in order of their names, and so are objects in them.

    Names have no quotation marks, and texts have the mark `quote` on both sides, which no text has in it.
    """

    quote: str

    def write(self, arguments: str) -> str:
        """Return the text of arguments, given as JSON."""
        return self._members(json.loads(arguments))

    def literal(self, value: object) -> str:
        """Return the text of one value."""
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, dict):
            return f"{{{self._members(value)}}}"
        return f"[{','.join(map(self.literal, value))}]" if isinstance(value, list) else _json(value)

    def _members(self, members: dict[str, object]) -> str:
        return ",".join(f"{name}:{self.literal(members[name])}" for name in sorted(members))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


Arguments = TaggedArguments | KeywordArguments | BracedArguments


@dataclass(frozen=True)
class ToolFormat:
    """The texts around the calls that a model writes.

    An answer with two calls is: begin, before_name, name, before_arguments, arguments, after_arguments, between,
    before_name, …, after_arguments, end.

    Attributes:
        name: what it is known as.
        trigger: the beginning of a first call. In an answer that may call or not, a call is what begins with it.
        arguments: how arguments are written, None for a JSON object.
        is_whole: whether a call is the whole answer, with no text before it: the trigger is one at the beginning only.
        before: a token that may come before a call, which has no text.
        before_text: what may stand before an answer that is text, which is no part of it.
        is_numbered: whether a colon and the call's number stand behind the name. The id of a call is then the text from
            `functions.` on, which a template writes for calls of earlier turns.
        most_calls: how many calls an answer may have.
        has_short_ids: whether the template wants ids of nine letters and digits.
        proof: what a template's text of a call `f` with the arguments {"needle": 1} has, if the format is the model's.
    """

    name: str
    trigger: str
    before_name: str = '{"name": "'
    before_arguments: str = '", "arguments": '
    after_arguments: str = "}"
    begin: str = ""
    between: str = ""
    end: str = ""
    arguments: Arguments | None = None
    is_whole: bool = False
    before: str = ""
    before_text: str = ""
    is_numbered: bool = False
    # A model that cannot stop must not call for ever.
    most_calls: int = 32
    has_short_ids: bool = False
    proof: str = '"needle": 1'

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of some calls, each of a function's name and its arguments as JSON."""
        texts = (
            f"{self.before_name}{name}{f':{number}' if self.is_numbered else ''}{self.before_arguments}"
            f"{arguments if self.arguments is None else self.arguments.write(arguments)}{self.after_arguments}"
            for number, (name, arguments) in enumerate(calls)
        )
        return f"{self.begin}{self.between.join(texts)}{self.end}"

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts in calls besides names and arguments."""
        tags = self.arguments
        tagged: tuple[str, ...] = ()
        if isinstance(tags, TaggedArguments):
            tagged = (tags.before_name, tags.before_value, tags.before_text or "", tags.after_value)
        elif isinstance(tags, BracedArguments):
            tagged = (tags.quote,)
        around = (self.begin, self.before_name, self.before_arguments, self.after_arguments, self.between, self.end)
        return *around, *tagged, self.before_text
