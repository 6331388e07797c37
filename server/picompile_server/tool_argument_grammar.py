"""The grammar of a call's arguments in the formats that are not JSON, in llguidance's variant of Lark's syntax.

Where a value is JSON in such a format, its own schema restricts it. A text without quotation marks can be one of an
`enum`, or any text; a schema that asks for more of it, or for more of the object than its properties, is not enforced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from picompile_runtime.errors import RequestError
from picompile_server.json_disjoint import resolved
from picompile_server.json_schema import json_rule
from picompile_server.json_types import possible_types
from picompile_server.tool_format import Arguments, BracedArguments, KeywordArguments, TaggedArguments
from picompile_server.tools import ToolFunction

Schema = Mapping[str, Any]
# What the grammar of a text's characters is.
TextRule = Callable[[str], str]

_TEXT = "/(?s:.*)/"
_NAME = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
# A text of Python between single quotation marks; between double ones it is JSON.
_QUOTED = r"""/'([^'\\\n]|\\['"\\nrt])*'/"""
# What the schema of an object may have for its properties to be all that it asks for.
_NOTES = frozenset(("title", "description", "default", "examples", "$schema", "$id", "$defs", "definitions"))
_OBJECT = _NOTES | {"type", "properties", "required", "additionalProperties", "strict"}
# What asks nothing of a text, or is enforced.
_TEXT_KEYS = _NOTES | {"type", "enum", "const", "$ref", "anyOf", "oneOf"}
_MOST_OTHERS = 32


@dataclass(frozen=True)
class ArgumentRules:
    """The grammar of the arguments of one function: an expression, and the rules that it uses."""

    expression: str
    rules: Sequence[str]


def argument_rules(
    arguments: Arguments | None,
    function: ToolFunction,
    name: str,
    text: TextRule,
    special_tokens: Mapping[str, int],
) -> ArgumentRules:
    """Return the grammar of a function's arguments; names of its rules begin with `name`.

    Raises RequestError if the function is strict and its schema cannot be enforced.
    """
    schema = function.arguments_schema
    if arguments is None:
        return ArgumentRules(json_rule(schema), ())
    properties = schema.get("properties")
    named = properties if isinstance(properties, Mapping) else {}
    if function.is_strict and (not _is_closed(schema) or schema.keys() - _OBJECT):
        raise RequestError(
            f"the parameters of {function.name} cannot be enforced in the format in which this model writes calls: "
            "strict ones are properties alone, with additionalProperties false"
        )
    shared = (schema, name, text, special_tokens, function)
    made: _Tagged | _Keyword | _Braced
    if isinstance(arguments, TaggedArguments):
        made = _Tagged(arguments, *shared)
    elif isinstance(arguments, KeywordArguments):
        made = _Keyword(arguments, *shared)
    else:
        made, named = _Braced(arguments, *shared), dict(sorted(named.items()))
    required = schema["required"] if isinstance(schema.get("required"), list) else []
    parts = [(made.argument(key, part), key in required) for key, part in named.items()]
    others = None if _is_closed(schema) else made.other()
    return ArgumentRules(made.joined(parts, others), made.rules)


def _is_closed(schema: Schema) -> bool:
    return schema.get("additionalProperties") is False


class _Rules:
    """The rules of one function's arguments."""

    def __init__(
        self,
        schema: Schema,
        name: str,
        text: TextRule,
        special_tokens: Mapping[str, int],
        function: ToolFunction,
    ) -> None:
        self.rules: list[str] = []
        self._schema, self._name, self.text, self._special, self._function = (
            schema,
            name,
            text,
            special_tokens,
            function,
        )

    def add(self, expression: str, attributes: str = "") -> str:
        """Add a rule, and return its name."""
        name = f"{self._name}x{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {expression}")
        return name

    def json(self, part: object) -> str:
        """Return the rule of JSON that satisfies a part of the schema, with the definitions to which it may refer."""
        if not isinstance(part, Mapping):
            return self.add(json_rule(part))
        definitions = {key: self._schema[key] for key in ("$defs", "definitions") if key in self._schema}
        return self.add(json_rule({**definitions, **part}))

    def types(self, part: object) -> frozenset[str]:
        """Return the types that a part of the schema allows."""
        return possible_types(part, self._schema)

    def text_up_to(self, tag: str) -> str:
        """Return the expression of any text up to the tag that ends it."""
        names = [name for name in self._special if name in tag]
        if names:  # the token of the tag is in no text; what is before it in the tag is read as the end of the text
            return f"{_TEXT} {self.text(tag[min(map(tag.index, names)) :])}"
        return self.add(f"/(?s:.*)/ {json.dumps(tag)}", "[lazy]")

    def listed(self, parts: Sequence[tuple[str, bool]], others: str | None, comma: str) -> str:
        """Return the expression of arguments in their order with a `comma` between, required ones and others."""
        named = [(self.add(part), required) for part, required in parts]
        if others is not None:
            other = self.add(others)
            named.append((f"{other} ({comma} {other}){{0,{_MOST_OTHERS - 1}}}", False))
        behind = [f"{comma} {part}" if required else f"({comma} {part})?" for part, required in named]
        firsts = []
        for place, (part, required) in enumerate(named):
            firsts.append(" ".join((part, *behind[place + 1 :])))
            if required:
                break
        if not firsts:
            return ""
        start = self.add(" | ".join(firsts))
        return start if any(required for _, required in named) else f"({start})?"

    def choices(self, part: object) -> list[str] | None:
        """Return the texts that the schema of a text lists; None for any text.

        Raises RequestError if it asks for more and the function is strict.
        """
        if not isinstance(part, Mapping):
            return None
        values = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(values, list):
            return [value for value in values if isinstance(value, str)]
        if self._function.is_strict and (more := sorted(part.keys() - _TEXT_KEYS)):
            raise RequestError(
                f"the parameters of {self._function.name}: {', '.join(more)} of a text cannot be enforced in the "
                "format in which this model writes calls"
            )
        return None


class _Tagged(_Rules):
    """Arguments between tags, one after the other."""

    def __init__(self, tags: TaggedArguments, *more: Any) -> None:
        super().__init__(*more)
        self._tags = tags

    def argument(self, key: str, part: object) -> str:
        """Return the expression of the argument `key`."""
        return f"{self.text(f'{self._tags.before_name}{key}')} {self._value(part)}"

    def _value(self, part: object) -> str:
        """Return the expression of the tag before a value, the value, and the tag behind it."""
        tags, types = self._tags, self.types(part)
        before, close = self.text(tags.before_value), self.text(tags.after_value)
        if "string" not in types:
            return f"{before} {self.json(part)} {close}"
        before_text = self.text(tags.before_text or tags.before_value)
        choices = self.choices(part) if types == {"string"} else None
        if choices:
            return f"{before_text} {self.add(' | '.join(map(self.text, choices)))} {close}"
        any_text = f"{before_text} {self.text_up_to(tags.after_value)}"
        if tags.before_text is None or types == {"string"}:
            return any_text
        return self.add(f"{any_text} | {before} {self.json(part)} {close}")

    def other(self) -> str:
        """Return the expression of an argument of any name."""
        return f"{self.text(self._tags.before_name)} {_NAME} {self._value({})}"

    def joined(self, parts: Sequence[tuple[str, bool]], others: str | None) -> str:
        """Return the expression of arguments in their order, those that are not required left out or not."""
        all_parts = [f"{self.add(part)}{'' if required else '?'}" for part, required in parts]
        more = [f"({self.add(others)}){{0,{_MOST_OTHERS}}}"] if others is not None else []
        return " ".join((*all_parts, *more))


class _Keyword(_Rules):
    """Arguments as Python writes them, with commas between."""

    def __init__(self, keywords: KeywordArguments, *more: Any) -> None:
        super().__init__(*more)
        self._keywords = keywords

    def argument(self, key: str, part: object) -> str:
        """Return the expression of the argument `key`."""
        return f"{self.text(f'{key}=')} {self._value(part)}"

    def _value(self, part: object) -> str:
        types, ways = self.types(part), [self.json(part)]
        if not self._keywords.is_json:
            ways += [json.dumps(word) for word, kind in _WORDS if kind in types and _may_be(part, word)]
            if types == {"string"}:
                choices = self.choices(part)
                ways += [_QUOTED] if choices is None and not _asks_for_more(part) else []
                ways += [json.dumps(f"'{choice}'") for choice in choices or () if not set(choice) & set("'\\\n")]
        return self.add(" | ".join(ways))

    def other(self) -> str:
        """Return the expression of an argument of any name."""
        return f'{_NAME} "=" {self._value({})}'

    def joined(self, parts: Sequence[tuple[str, bool]], others: str | None) -> str:
        """Return the expression of arguments in their order, those that are not required left out or not."""
        return self.listed(parts, others, '", "')


class _Braced(_Rules):
    """Arguments with colons, commas between and names in order, in which objects are written alike."""

    def __init__(self, arguments: BracedArguments, *more: Any) -> None:
        super().__init__(*more)
        self._arguments, self._any = arguments, ""

    def argument(self, key: str, part: object, depth: int = 0) -> str:
        """Return the expression of the argument `key`."""
        return f"{self.text(f'{key}:')} {self._value(part, depth)}"

    def other(self) -> str:
        """Return the expression of an argument of any name."""
        return f'{_NAME} ":" {self._any_value()}'

    def joined(self, parts: Sequence[tuple[str, bool]], others: str | None) -> str:
        """Return the expression of arguments in their order, those that are not required left out or not."""
        return self.listed(parts, others, '","')

    def _value(self, part: object, depth: int) -> str:
        """Return the expression of a value; any value where the schema is too deep, too large or says nothing."""
        if isinstance(part, Mapping) and "$ref" in part:
            part = resolved(part["$ref"], self._schema)
        if not isinstance(part, Mapping) or not part or depth > _MOST_DEEP or len(self.rules) > _MOST_RULES:
            return self._any_value()
        values = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(values, list) and values:
            return self.add(" | ".join(self.text(self._arguments.literal(value)) for value in values))
        for key in ("anyOf", "oneOf"):
            if isinstance(part.get(key), list) and part[key]:
                return self.add(" | ".join(self._value(each, depth + 1) for each in part[key]))
        self._check_strict(part)
        types = self.types(part)
        ways = [f"{self.text(self._arguments.quote)} {self._any_text()}"] if "string" in types else []
        if types & _SCALARS:
            named = part["type"] if isinstance(part.get("type"), list) else [part.get("type")]
            kept = [name for name in named if name == "integer" or name in types & _SCALARS] or sorted(types & _SCALARS)
            ways.append(self.json({**{key: part[key] for key in _NUMBER_KEYS & part.keys()}, "type": kept}))
        if "array" in types:
            item = self.add(self._value(part.get("items"), depth + 1))
            ways.append(f'"[" ({item} ("," {item})*)? "]"')
        if "object" in types:
            ways.append(f'"{{" {self._members(part, depth)} "}}"')
        return self.add(" | ".join(ways)) if ways else self._any_value()

    def _members(self, part: Schema, depth: int) -> str:
        properties = part.get("properties")
        named = properties if isinstance(properties, Mapping) else {}
        required = part["required"] if isinstance(part.get("required"), list) else []
        parts = [(self.argument(key, named[key], depth + 1), key in required) for key in sorted(named)]
        return self.joined(parts, None if _is_closed(part) else self.other())

    def _any_text(self) -> str:
        return self.text_up_to(self._arguments.quote)

    def _any_value(self) -> str:
        """Return the name of the rule of any value, which has values in it."""
        if not self._any:
            self._any = name = f"{self._name}any"
            text = f"{self.text(self._arguments.quote)} {self._any_text()}"
            member = f'{_NAME} ":" {name}'
            lists = f'"[" ({name} ("," {name})*)? "]" | "{{" ({member} ("," {member})*)? "}}"'
            self.rules.append(f"{name}: {text} | {json_rule({'type': sorted(_SCALARS)})} | {lists}")
        return self._any

    def _check_strict(self, part: Schema) -> None:
        """Raise RequestError if a part asks for more than its grammar holds and the function is strict."""
        known = _OBJECT | _NUMBER_KEYS | {"items"}
        if self._function.is_strict and (more := sorted(part.keys() - known)):
            raise RequestError(
                f"the parameters of {self._function.name}: {', '.join(more)} cannot be enforced in the format in which "
                "this model writes calls"
            )


_SCALARS = frozenset(("number", "boolean", "null"))
_NUMBER_KEYS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_MOST_DEEP, _MOST_RULES = 6, 1000
_WORDS = (("True", "boolean"), ("False", "boolean"), ("None", "null"))
_VALUES: Mapping[str, object] = {"True": True, "False": False, "None": None}


def _may_be(part: object, word: str) -> bool:
    """Return whether a schema that allows the type of Python's `word` allows the value, where it lists values."""
    if not isinstance(part, Mapping):
        return True
    values = [part["const"]] if "const" in part else part.get("enum")
    return not isinstance(values, list) or any(value is _VALUES[word] for value in values)


def _asks_for_more(part: object) -> bool:
    """Return whether a schema asks for more of a text than to be one; JSON that satisfies it is still possible."""
    return isinstance(part, Mapping) and bool(part.keys() - _TEXT_KEYS | part.keys() & {"$ref", "anyOf", "oneOf"})
