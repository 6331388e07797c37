"""Values and patterns of JSON schemas that llguidance would change: each is enforced as it is, or refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.grammars import takes
from helpers.toys.toy_tokenizers import EOS, byte_level
from picompile_runtime import RequestError
from picompile_runtime.serving import json_disjoint
from picompile_runtime.serving.grammar import GrammarCompiler
from picompile_runtime.serving.json_disjoint import Exclusion
from picompile_runtime.serving.json_schema import json_rule
from picompile_runtime.serving.json_values import safe_pattern

TOKENIZER = byte_level()
COMPILER = GrammarCompiler(TOKENIZER, 262, [EOS])

PIECES = [*'"aé', r"\\", r"\n", r"\]", r"\-", r"\x00-\x1f", r"\x08-\x0d", r"\x1f-\x7e", r" -~", "0-9"]
PIECES += [r"\s", r"\S", r"\d", r"\D", r"\w", r"\W"]
CHARACTERS = ['"', "\\", "\n", "\t", "\r", "\b", "\f", "a", "z", "0", " ", "é", "-", "]", "\x01", "\x1f"]


def fits(schema: Any, value: Any) -> bool:
    return takes(COMPILER.json_schema(schema), TOKENIZER, json.dumps(value, ensure_ascii=False), EOS)


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=3, unique=True), negated=st.booleans())
def test_a_class_has_the_characters_that_it_names(pieces: list[str], negated: bool) -> None:
    pattern = f"^[{'^' * negated}{''.join(pieces)}]$"
    expected = [letter for letter in CHARACTERS if re.fullmatch(pattern[1:-1], letter, re.ASCII)]
    writable = [letter for letter in expected if letter >= " " or letter in "\n\t\r\b\f"]
    try:
        found = [letter for letter in CHARACTERS if fits({"type": "string", "pattern": pattern}, letter)]
    except RequestError:  # no character of it can be written
        found = []
    assert found == writable


@pytest.mark.parametrize("pattern", [r"a\[b", "[a-z]+", "(?:x|[0-9])", "[]", "[^]", "[a", r"\\"])
def test_other_patterns_stay_as_they_are(pattern: str) -> None:
    assert safe_pattern(pattern) == pattern


def test_names_of_properties_may_be_patterns() -> None:
    schema = {"type": "object", "patternProperties": {'^[^"]$': {"type": "integer"}}, "additionalProperties": False}
    assert fits(schema, {"a": 1}) and not fits(schema, {'"': 1})


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"const": "a\x7fb"}, r"U\+007F is not supported in const and enum"),
        ({"enum": ["a", {"b": ["\x00"]}]}, r"U\+0000"),
        ({"const": {"\x01": 1}}, r"U\+0001"),
        ({"enum": [2**53 + 1]}, "beyond 2\\^53 are not supported; let them be texts"),
        ({"const": [-(2**60)]}, "beyond 2\\^53"),
        ({"type": "integer", "minimum": 2**53 + 1}, "beyond 2\\^53"),
        ({"type": "number", "maximum": -1e20}, "beyond 2\\^53"),
        ({"type": "string", "maxLength": 2**40}, "maxLength may be 2147483647 at most"),
    ],
)
def test_what_would_be_changed_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        COMPILER.json_schema({"type": "object", "properties": {"inner": schema}})


@pytest.mark.parametrize("value", [2**53, -(2**53), 0.1, "a\n\t\b", {"a": [1.5]}, ""])
def test_a_constant_is_itself(value: Any) -> None:
    assert fits({"const": value}, value) and fits({"enum": [value, "other"]}, value)


def test_a_host_name_is_no_longer_than_names_of_hosts() -> None:
    schema = {"type": "string", "format": "hostname"}
    assert fits(schema, ".".join(["a" * 61] * 4)) and not fits(schema, ".".join(["a" * 61] * 5))
    assert not fits({**schema, "maxLength": 3}, "a.bc")


def test_recursive_alternatives_are_not_followed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have exponentially many pairs of parts: nine levels of ten names each."""
    looked_at = 0

    def work(parts: list[Any]) -> int:
        nonlocal looked_at
        looked_at += 1
        return work_of(parts)

    work_of = json_disjoint._work
    monkeypatch.setattr(json_disjoint, "_work", work)
    names = [f"p{number}" for number in range(10)]

    def tree(name: str) -> Any:
        part = {"$ref": f"#/$defs/{name}"}
        return {"type": "object", "required": names, "properties": dict.fromkeys(names, part)}

    root = {"$defs": {"a": tree("a"), "b": tree("b")}, "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    assert not Exclusion(root).of_each_other(root["oneOf"])
    assert json_rule(root).count("oneOf") == 1
    assert looked_at < 10**6
