"""Grammars are strangers' programs: none ends or stops the server, and none takes its memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.grammars import allowed, compiler, fits, new_compiler
from picompile_runtime import RequestError
from picompile_runtime.serving import grammar


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
FOLLOWED = (
    "start: {0}0\n" + "\n".join(f"{{0}}{number}: {{0}}{number + 1}" for number in range(12_000)) + '\n{0}12000: "a"'
)
DOUBLED = "start: T0\n" + "\n".join(f"T{number}: T{number + 1} T{number + 1}" for number in range(40)) + '\nT40: "a"'
PROPERTIES = {f"p{number}": {"type": "string"} for number in range(4_000)}
# By the method of a compiler.
HARD: dict[str, list[Any]] = {
    "lark": [f"start: {'(' * 20_000}{')' * 20_000}", FOLLOWED.format("r"), FOLLOWED.format("T"), DOUBLED],
    "regex": [f"{'(' * 20_000}a{')' * 20_000}"],
    "gbnf": [f"root ::= {'(' * 20_000}'a'{')' * 20_000}"],
    "json_schema": [
        *(chain(7_000), nested(90_000), {"const": nested(90_000)}, nested(80, "object"), crossed(20)),
        *({"type": "object", "properties": PROPERTIES}, {"type": "integer", "multipleOf": 999_999_937}),
        {"description": "x" * 300_000},
    ],
}


@pytest.mark.parametrize("kind", HARD)
def test_grammars_that_take_too_much_are_refused(kind: str) -> None:
    """The next one is compiled as if nothing had been."""
    for hard in HARD[kind]:
        with pytest.raises(RequestError) as caught:
            getattr(compiler(), kind)(hard)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert fits(compiler().choice(["after"]), "after")


@pytest.mark.slow("computes for a second; a small limit of memory is fast", but=("memory",))
@pytest.mark.parametrize(
    ("limits", "named"),
    [({"grammar_bytes": 2**24}, "16 MiB"), ({}, "128 MiB"), ({"grammar_bytes": 2**34, "grammar_cpu_s": 1}, "1 s")],
    ids=["memory", "as they are", "time"],
)
def test_the_limits_of_time_and_memory_are_named(
    limits: dict[str, int], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in limits.items():
        monkeypatch.setitem(grammar.LIMITS, name, value)
    with pytest.raises(RequestError, match=f"the grammar cannot be used: it takes more than {named} to prepare$"):
        new_compiler().lark(SLOW)


def test_an_answer_that_takes_too_much_fails_and_others_go_on() -> None:
    """Some patterns show only on the way how large they are. llguidance counts that for all copies together."""
    pattern, rng = "(([ab]{0,100}a){0,100}b){0,100}", np.random.default_rng(0)
    before, failing = compiler().regex(pattern)(), compiler().regex(pattern)()
    with pytest.raises(RequestError, match=r"the answer cannot go on.*: it is too large or too ambiguous"):
        for _ in range(1000):
            failing.accept(int(rng.choice(np.flatnonzero(allowed(failing))[1:])))
    with pytest.raises(RequestError, match="the answer cannot go on"):
        failing.allowed()
    assert allowed(before).any() and allowed(compiler().regex(pattern)()).any()


def test_ambiguous_grammars_fail_before_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_USUAL_ROWS", 200)  # with more the last tokens take a tenth of a second each
    answer, rng = new_compiler().lark('start: s\ns: s s s s s | "a" | "b" | "" ')(), np.random.default_rng(0)
    with pytest.raises(RequestError, match="too large or too ambiguous"):
        for _ in range(1000):
            answer.accept(int(rng.choice(np.flatnonzero(allowed(answer))[1:])))


def test_large_schemas_of_real_use_are_taken() -> None:
    """Such as 200 optional properties, a union of 50 kinds, or definitions that refer to each other 100 deep."""
    properties = {f"property_{number}": {"type": "string", "description": "x" * 200} for number in range(200)}
    assert fits(compiler().json_schema({"type": "object", "properties": properties}), "{}")
    kinds = [{"kind": {"const": f"k{number}"}, "value": {}} for number in range(50)]
    union = {"oneOf": [{"type": "object", "properties": kind, "required": ["kind"]} for kind in kinds]}
    assert fits(compiler().json_schema(union), '{"kind": "k49", "value": [1]}')
    assert fits(compiler().json_schema(chain(100)), '"text"')
    assert fits(compiler().json_schema(nested(60)), "[" * 60 + '"text"' + "]" * 60)
    assert fits(compiler().json_schema({"enum": [f"value {n}" for n in range(2000)]}), '"value 7"')
