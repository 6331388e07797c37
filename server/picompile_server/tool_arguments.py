"""Readers of the arguments in a call, which come piece by piece in the model's format and go on as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from picompile_server.json_types import possible_types, type_name
from picompile_server.tool_format import BracedArguments, TaggedArguments, ToolFormat

Schema = Mapping[str, Any]


class ArgumentReader(Protocol):
    """Reads the arguments of one call."""

    is_complete: bool

    def feed(self, text: str) -> tuple[int, str]:
        """Read text, and return how many letters belong to arguments that are known now, and their JSON.

        The rest is to be given again, with what follows it. JSON of all pieces, joined, is an object.
        """
        ...


def argument_reader(style: ToolFormat, schema: Schema) -> ArgumentReader:
    """Return a reader of the arguments of one call, whose function has the `schema`."""
    if style.arguments is None:
        return JsonReader()
    if isinstance(style.arguments, TaggedArguments):
        return TaggedReader(style.arguments, style.after_arguments, schema)
    if isinstance(style.arguments, BracedArguments):
        return BracedReader(style.arguments)
    return KeywordReader()


@dataclass
class JsonReader:
    """Finds the end of a JSON object, or of whatever stands between two brackets that belong together."""

    is_complete: bool = False
    _depth: int = 0
    _in_text: bool = False
    _is_escaped: bool = field(default=False)

    def feed(self, text: str) -> tuple[int, str]:
        """Return how much of the text belongs to the object, and that text."""
        for place, letter in enumerate(text):
            if self._in_text:
                self._in_text = letter != '"' or self._is_escaped
                self._is_escaped = letter == "\\" and not self._is_escaped
            elif letter == '"':
                self._in_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_complete = True
                    return place + 1, text[: place + 1]
        return len(text), text


class _JsonObject:
    """Writes a JSON object member by member."""

    def __init__(self) -> None:
        self._is_empty = True

    def member(self, name: str, value: str) -> str:
        """Return what a member, whose value is given as JSON, adds to the text."""
        before, self._is_empty = "{" if self._is_empty else ", ", False
        return f"{before}{_json(name)}: {value}"

    def end(self) -> str:
        """Return what ends the text."""
        return "{}" if self._is_empty else "}"


class TaggedReader:
    """Reads arguments between tags. A value is known at its end, since its type may depend on all of it."""

    def __init__(self, tags: TaggedArguments, end: str, schema: Schema) -> None:
        self._tags, self._end, self._schema = tags, end, schema
        self._object = _JsonObject()
        self.is_complete = False

    def feed(self, text: str) -> tuple[int, str]:
        """See ArgumentReader. What is neither an argument nor the beginning of one ends them."""
        place, parts = 0, []
        while not self.is_complete and (found := self._argument(text, place)) is not None:
            place, name, value = found
            parts.append(self._object.member(name, value))
        rest, first = text[place:], self._tags.before_name
        if not rest.startswith(first) and not first.startswith(rest):
            # a text that may yet be the end is not taken for it before it is
            self.is_complete = not self._end.startswith(rest) or rest == self._end
            parts.append(self._object.end() if self.is_complete else "")
        return place, "".join(parts)

    def _argument(self, text: str, place: int) -> tuple[int, str, str] | None:
        """Return where the next argument ends, its name and its value as JSON; None if it is not there as a whole."""
        tags = self._tags
        if not text.startswith(tags.before_name, place):
            return None
        start = place + len(tags.before_name)
        befores = [before for before in (tags.before_value, tags.before_text) if before is not None]
        found = [(text.find(before, start), before) for before in befores]
        middle, before = min((each for each in found if each[0] >= 0), default=(-1, ""))
        begin = middle + len(before)
        end = text.find(tags.after_value, begin) if middle >= 0 else -1
        if end < 0:
            return None
        name, value = text[start:middle], text[begin:end]
        return end + len(tags.after_value), name, self._json(name, value, before)

    def _json(self, name: str, value: str, before: str) -> str:
        """Return the JSON of a value: what the tag before it says that it is, else what the schema allows."""
        if self._tags.before_text is None:
            return tagged_json(value, name, self._schema)
        read = None if before == self._tags.before_text else _read_json(value)
        return _json(value) if read is None else read


_KEY = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*=")
_MAYBE_KEY = re.compile(r"\s*[\w.-]*\s*")
_SPACES = re.compile(r"\s*")


class KeywordReader:
    """Reads arguments as Python writes them, `name=literal, …`, up to the bracket that closes them."""

    def __init__(self) -> None:
        self._object = _JsonObject()
        self._name: str | None = None
        self._literal = _Literal()
        self.is_complete = False

    def feed(self, text: str) -> tuple[int, str]:
        """See ArgumentReader. What is neither an argument nor the beginning of one ends them."""
        place, parts = 0, []
        while place < len(text):
            if self._name is not None:
                place += self._literal.feed(text[place:])
                if self._literal.is_complete:
                    parts.append(self._object.member(self._name, python_json(self._literal.text)))
                    place += text[place] == ","
                    self._name, self._literal = None, _Literal()
            elif (key := _KEY.match(text, place)) is not None:
                self._name, place = key[1], key.end()
            else:
                if _MAYBE_KEY.fullmatch(text, place) is None:
                    self.is_complete = True
                    parts.append(self._object.end())
                    spaces = _SPACES.match(text, place)
                    place = spaces.end() if spaces is not None and text.startswith(")", spaces.end()) else place
                break
        return place, "".join(parts)


class BracedReader:
    """Reads arguments with colons, up to the brace that closes them. A value is known at its end."""

    def __init__(self, arguments: BracedArguments) -> None:
        self._quote = arguments.quote
        # A text in marks, a sign, or what is between them: a name, a number or a word.
        quote = re.escape(self._quote)
        self._pieces = re.compile(rf"{quote}(?s:.*?){quote}|[\[\]{{}},:]|(?:(?!{quote})[^\[\]{{}},:])+")
        self._object = _JsonObject()
        self.is_complete = False

    def feed(self, text: str) -> tuple[int, str]:
        """See ArgumentReader. What is neither an argument nor the beginning of one ends them."""
        place, parts = 0, []
        while not self.is_complete:
            colon = _BRACED_KEY.match(text, place)
            if colon is None:
                if _MAYBE_BRACED_KEY.fullmatch(text, place) is None:
                    self.is_complete = True
                    parts.append(self._object.end())
                break
            end = self._end_of_value(text, colon.end())
            if end is None:
                break
            parts.append(self._object.member(colon[1], self._json(text[colon.end() : end])))
            place = end + (text[end] == ",")
        return place, "".join(parts)

    def _end_of_value(self, text: str, start: int) -> int | None:
        """Return where a comma or brace behind the value at `start` stands; None if it is not there yet."""
        depth, place = 0, start
        while place < len(text):
            if text.startswith(self._quote, place):
                closing = text.find(self._quote, place + len(self._quote))
                if closing < 0:
                    return None
                place = closing + len(self._quote)
                continue
            if self._quote.startswith(text[place:]):  # may yet be a mark
                return None
            if depth == 0 and text[place] in ",}]":
                return place
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(text[place], 0)
            place += 1
        return None

    def _json(self, value: str) -> str:
        """Return the JSON of a value; a text if it is none."""
        pieces = self._pieces.findall(value)
        read = _read_json("".join(map(self._piece_json, pieces, [*pieces[1:], ""])))
        return _json(value.strip()) if read is None else read

    def _piece_json(self, piece: str, following: str) -> str:
        if piece.startswith(self._quote):
            return _json(piece[len(self._quote) : -len(self._quote)])
        return _json(piece.strip()) if following == ":" and piece not in "[]{},:" else piece


_BRACED_KEY = re.compile(r"\s*([^\s:{}\[\],][^:{}\[\],]*?)\s*:")
_MAYBE_BRACED_KEY = re.compile(r"[^:{}\[\],]*")


class _Literal:
    """Finds the end of a Python literal: a comma or a closing bracket outside of its texts and brackets."""

    def __init__(self) -> None:
        self.is_complete = False
        self._parts: list[str] = []
        self._depth, self._quote, self._is_escaped = 0, "", False

    @property
    def text(self) -> str:
        """The literal so far."""
        return "".join(self._parts)

    def feed(self, text: str) -> int:
        """Read text, and return how much of it belongs to the literal."""
        for place, letter in enumerate(text):
            if self._quote:
                if letter == self._quote and not self._is_escaped:
                    self._quote = ""
                self._is_escaped = letter == "\\" and not self._is_escaped
            elif letter in "'\"":
                self._quote = letter
            elif letter in "([{":
                self._depth += 1
            elif letter in ",)]}" and self._depth == 0:
                self.is_complete = True
                self._parts.append(text[:place])
                return place
            elif letter in ")]}":
                self._depth -= 1
        self._parts.append(text)
        return len(text)


def tagged_json(value: str, name: str, schema: Schema) -> str:
    """Return the JSON of an argument's value that stands between tags: a text if the schema wants one.

    JSON is what it says where the schema allows its type, and so are Python's True, False and None, which templates
    write where they write a value as a text.
    """
    properties = schema.get("properties")
    part = properties.get(name) if isinstance(properties, Mapping) else None
    types = possible_types({} if part is None else part, schema)
    if types == {"string"}:
        return _json(value)
    stripped = value.strip()
    read = _read_json(_PYTHON_WORDS.get(stripped, stripped))
    if read is None:
        return _json(value)
    # Where numbers are allowed, "5" is one, as templates write numbers; a text has no quotation marks of its own.
    kind = type_name(json.loads(read))
    return _json(value) if "string" in types and (kind == "string" or kind not in types) else read


_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_PYTHON = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\b(?:True|False|None)\b|[()]|,\s*(?=[\])}])", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|\n|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


def python_json(literal: str) -> str:
    """Return the JSON of a Python or JSON literal, and of any other text as a text."""
    stripped = literal.strip()
    read = _read_json(_PYTHON.sub(_piece_json, stripped))
    return _json(stripped) if read is None else read


def _piece_json(piece: re.Match[str]) -> str:
    text = piece[0]
    if text[0] in "'\"":
        return _json(_ESCAPE.sub(_unescaped, text[1:-1]))
    return {"(": "[", ")": "]"}.get(text, _PYTHON_WORDS.get(text, ""))


def _unescaped(escape: re.Match[str]) -> str:
    text = escape[1]
    if text[0] in "xuU" and len(text) > 1:
        code = int(text[1:], 16)
        return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else escape[0]
    return _ESCAPES.get(text, text if text in "\\'\"/" else escape[0])


def _read_json(text: str) -> str | None:
    """Return the text as JSON in the form of all arguments; None if it is not JSON."""
    try:
        return json.dumps(json.loads(text, parse_constant=_no_constant), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
