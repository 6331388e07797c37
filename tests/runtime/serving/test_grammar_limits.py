"""Grammars are strangers' programs: none ends or stops the server, and none takes its memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helpers.grammars import allowed, takes
from helpers.toys.toy_tokenizers import EOS, byte_level
from picompile_runtime import RequestError
from picompile_runtime.serving import grammar
from picompile_runtime.serving.grammar import GrammarCompiler

VOCAB = 262


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_level(), VOCAB, [EOS])


def chain(length: int) -> dict[str, Any]:
    """A schema of references to references."""
    links = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(length)}
    return {"$defs": {**links, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def nested(depth: int, kind: str = "array") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        parts = {"items": schema} if kind == "array" else {"properties": {"a": schema}}
        schema = {"type": kind, **parts}
    return schema


def crossed(width: int) -> dict[str, Any]:
    """A schema whose unions have to be multiplied."""

    def either(number: int) -> dict[str, Any]:
        return {"anyOf": [{"type": "object", "required": [f"p{number}{letter}"]} for letter in "abcd"]}

    return {"allOf": [either(number) for number in range(width)]}


# Intersections of these take minutes and gigabytes.
SLOW = r"start: T" + "\n" + r"T: /(.*a.{20}.*)/ & /(.*b.{21}.*)/ & ~/(.*c.{22}.*)/"
HARD: dict[str, Callable[[GrammarCompiler], Any]] = {
    "brackets": lambda made: made.lark(f"start: {'(' * 20_000}{')' * 20_000}"),
    "brackets of a pattern": lambda made: made.regex(f"{'(' * 20_000}a{')' * 20_000}"),
    "brackets in GBNF": lambda made: made.gbnf(f"root ::= {'(' * 20_000}'a'{')' * 20_000}"),
    "rules": lambda made: made.lark(
        "start: r0\n" + "\n".join(f"r{number}: r{number + 1}" for number in range(12_000)) + '\nr12000: "a"'
    ),
    "terminals": lambda made: made.lark(
        "start: T0\n" + "\n".join(f"T{number}: T{number + 1}" for number in range(12_000)) + '\nT12000: "a"'
    ),
    "references": lambda made: made.json_schema(chain(7_000)),
    "schema": lambda made: made.json_schema(nested(90_000)),
    "constant": lambda made: made.json_schema({"const": nested(90_000)}),
    "objects": lambda made: made.json_schema(nested(80, "object")),
    "unions": lambda made: made.json_schema(crossed(20)),
    "doubled": lambda made: made.lark(
        "start: T0\n" + "\n".join(f"T{number}: T{number + 1} T{number + 1}" for number in range(40)) + '\nT40: "a"'
    ),
    "properties": lambda made: made.json_schema(
        {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(4_000)}}
    ),
    "multiples": lambda made: made.json_schema({"type": "integer", "multipleOf": 999_999_937}),
    "intersection": lambda made: made.lark(SLOW),
}


@pytest.mark.parametrize("case", HARD)
def test_grammars_that_take_too_much_are_refused(compiler: GrammarCompiler, case: str) -> None:
    """The next one is compiled as if nothing had been."""
    with pytest.raises(RequestError) as caught:
        HARD[case](compiler)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert takes(compiler.choice(["after"]), byte_level(), "after", EOS)


def test_the_limits_of_time_and_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grammar.LIMITS, "grammar_bytes", 2**24)
    with pytest.raises(RequestError, match=r"the grammar cannot be used: it takes more than 16 MiB to prepare$"):
        GrammarCompiler(byte_level(), VOCAB, [EOS]).lark(SLOW)
    monkeypatch.setitem(grammar.LIMITS, "grammar_bytes", 2**34)
    monkeypatch.setitem(grammar.LIMITS, "grammar_cpu_s", 1)
    with pytest.raises(RequestError, match=r"the grammar cannot be used: it takes more than 1 s to prepare$"):
        GrammarCompiler(byte_level(), VOCAB, [EOS]).lark(SLOW)


def test_an_answer_that_takes_too_much_fails_and_others_go_on(compiler: GrammarCompiler) -> None:
    """Some patterns show only on the way how large they are. llguidance counts that for all copies together."""
    pattern, rng = "(([ab]{0,100}a){0,100}b){0,100}", np.random.default_rng(0)
    before, failing = compiler.regex(pattern)(), compiler.regex(pattern)()
    with pytest.raises(RequestError, match=r"the answer cannot go on.*: it is too large or too ambiguous"):
        for _ in range(1000):
            failing.accept(int(rng.choice(np.flatnonzero(allowed(failing))[1:])))
    with pytest.raises(RequestError, match="the answer cannot go on"):
        failing.allowed()
    assert allowed(before).any() and allowed(compiler.regex(pattern)()).any()


def test_ambiguous_grammars_fail_before_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_USUAL_ROWS", 200)  # with more the last tokens take a tenth of a second each
    compiler = GrammarCompiler(byte_level(), VOCAB, [EOS])
    answer, rng = compiler.lark('start: s\ns: s s s s s | "a" | "b" | "" ')(), np.random.default_rng(0)
    with pytest.raises(RequestError, match="too large or too ambiguous"):
        for _ in range(1000):
            answer.accept(int(rng.choice(np.flatnonzero(allowed(answer))[1:])))


def test_large_schemas_of_real_use_are_taken(compiler: GrammarCompiler) -> None:
    """Such as 200 optional properties, a union of 50 kinds, or definitions that refer to each other 100 deep."""
    properties = {f"property_{number}": {"type": "string", "description": "x" * 200} for number in range(200)}
    assert takes(compiler.json_schema({"type": "object", "properties": properties}), byte_level(), "{}", EOS)
    kinds = [
        {"type": "object", "properties": {"kind": {"const": f"k{number}"}, "value": {}}, "required": ["kind"]}
        for number in range(50)
    ]
    assert takes(compiler.json_schema({"oneOf": kinds}), byte_level(), '{"kind": "k49", "value": [1]}', EOS)
    assert takes(compiler.json_schema(chain(100)), byte_level(), '"text"', EOS)
    assert takes(compiler.json_schema(nested(60)), byte_level(), "[" * 60 + '"text"' + "]" * 60, EOS)
    assert takes(compiler.json_schema({"enum": [f"value {n}" for n in range(2000)]}), byte_level(), '"value 7"', EOS)


def test_the_text_of_a_grammar_is_bounded(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match=r"the JSON schema has .* bytes, and may have 262,144"):
        compiler.json_schema({"description": "x" * 300_000})
    schema = json.dumps({"enum": ["x" * 300_000]})
    with pytest.raises(RequestError, match=r"the grammar has .* bytes, and may have 262,144"):
        compiler.lark(f"start: %json {schema}")
