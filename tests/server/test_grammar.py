from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tokenizers

from helpers.grammars import VOCAB, allowed, compiler, encode, fits, follow, new_compiler
from helpers.toys.toy_tokenizers import EOS, byte_level, metaspace
from picompile_runtime import RequestError, Tokenizer
from picompile_server import grammar
from picompile_server.grammar import GrammarCompiler

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_json_of_a_schema_is_allowed_and_nothing_else() -> None:
    maker = compiler().json_schema(PERSON)
    for text in ('{"name": "Ada", "age": 36}', '{"name":"Ada","age":36}', '{\n  "name": "é🙂",\n  "age": 0\n}'):
        assert fits(maker, text), text
    wrong = [
        '"name": "Ada"',
        '"name": "Ada", "age": -1',
        '"name": "Ada", "age": 36.5',
        '"name": "far too long", "age": 1',
    ]
    wrong = [f"{{{text}}}" for text in (*wrong, '"name": "Ada", "age": 36, "more": 1')]
    for text in (*wrong, '{"name": "Ada", "age": 36} ', ' {"name": "Ada", "age": 36}', "hello", ""):
        assert not fits(maker, text), text
    # An answer is complete where nothing can follow.
    ids = encode('{"name": "Ada", "age": 36}')
    assert follow(maker(), ids) is True and follow(maker(), ids[:-1]) is False


def test_end_tokens_are_allowed_exactly_where_the_grammar_can_end() -> None:
    ends = [EOS, 260]
    found = GrammarCompiler(byte_level(), VOCAB, ends)
    grammar = found.regex("ab?c?")()
    seen = []
    for token in encode("ab"):
        seen.append(set(np.flatnonzero(allowed(grammar))) & set(ends))
        assert not grammar.accept(token)
    seen.append(set(np.flatnonzero(allowed(grammar))) & set(ends))
    assert seen == [set(), set(ends), set(ends)]
    assert grammar.accept(ends[1])


def test_without_end_tokens_an_answer_ends_where_nothing_can_follow() -> None:
    found = GrammarCompiler(byte_level(), VOCAB, [])
    ids = encode("ab")
    grammar = found.regex("ab?")()
    assert [grammar.accept(token) for token in ids] == [False, True]
    # The model has no token for the rest, which need not come.
    few = GrammarCompiler(byte_level(), encode("z")[0], [])
    grammar = few.regex("a(z+)?")()
    assert follow(grammar, encode("a")) is True


def test_tokens_without_a_column_and_columns_without_a_token_are_never_allowed() -> None:
    mask = allowed(GrammarCompiler(byte_level(), VOCAB + 90, [EOS, VOCAB + 200]).regex("(?s:.*)")())
    assert mask.shape == (VOCAB + 90,)
    assert mask[: VOCAB - 5].sum() > 150 and not mask[VOCAB:].any()
    few = GrammarCompiler(byte_level(), 100, [EOS])
    mask = allowed(few.regex("(?s:.*)")())
    assert mask.shape == (100,) and mask.sum() > 50
    assert follow(few.regex("[A-Z]+")(), encode("ABC")) is False


def test_tokens_of_sentencepiece_are_known_by_their_text() -> None:
    tokenizer = metaspace(bos=False)
    vocabulary = tokenizer.vocabulary()
    found = GrammarCompiler(tokenizer, len(vocabulary), [2])
    mask = allowed(found.regex("(?s:.*)")())
    assert set(np.flatnonzero(mask[:3])) == {2}  # the end token, and neither <unk> nor <s>
    mask = allowed(found.regex("[ab]+ a")())
    assert set(np.flatnonzero(mask)) == {vocabulary[name] for name in ("a", "b", "ab")}  # and not <0x61>
    assert follow(found.regex("[ab]+ a")(), [vocabulary["ab"], vocabulary["▁a"]]) is True
    # A letter without a token of its own is written in bytes.
    letters = [vocabulary[f"<0x{byte:02X}>"] for byte in "ß".encode()]
    assert follow(found.regex("ß")(), letters) is True


def test_any_object_is_json_mode() -> None:
    maker = compiler().json_object()
    assert fits(maker, '{"a": [1, {"b": null}], "c": "d"}') and fits(maker, "{}")
    assert not fits(maker, "[]") and not fits(maker, '"a"')
    # Whitespace ends: a model that repeats itself must not write spaces until it runs out of tokens.
    grammar = maker()
    assert follow(grammar, encode("{\n" + " " * 32)) is False
    assert {byte_level().decode([token]) for token in np.flatnonzero(allowed(grammar))} == {'"', "}"}
    assert not fits(maker, "{  }") and not fits(maker, "{\n\n}")
    # A key that is written with an escape could pass for one that the schema does not name.
    maker = compiler().json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert fits(maker, '{"a": 1, "b": "x"}') and fits(maker, '{"a": 1, "\\n": "x"}')
    assert not fits(maker, '{"\\u0061": "x"}') and not fits(maker, '{"b": "x", "a": "y"}')


def test_other_kinds_of_grammars() -> None:
    maker = compiler().regex(r"(yes|no)/[0-9]{2}\.")
    assert fits(maker, "yes/12.") and not fits(maker, "yes/12") and not fits(maker, "maybe/12.")
    assert fits(compiler().regex("a\nb"), "a\nb") and fits(compiler().regex('"\\\\"'), '"\\"')
    # Choices may begin alike.
    texts = ["a", "ab", 'c"d', "e\\f", "ü\n", "{x}"]
    maker = compiler().choice(texts)
    assert all(fits(maker, text) for text in texts)
    assert not fits(maker, "b") and not fits(maker, "")
    # Lark's syntax, and GBNF, with characters by their numbers.
    maker = compiler().lark('start: item ("," item)*\nitem: NUMBER | "(" start ")"\nNUMBER: /[0-9]+/ // digits')
    assert fits(maker, "1,(22,(3)),4") and not fits(maker, "1,(2") and not fits(maker, "a")
    maker = compiler().gbnf('root ::= "list:" item+\nitem ::= " " [a-z]+ | " -"\n')
    assert fits(maker, "list: a - hello") and not fits(maker, "list:")
    maker = compiler().gbnf(r'root ::= "\u00e9\U0001F600\u0041\\u0042" [\u4e00-\u4e10]')
    assert fits(maker, "é😀A\\u0042上") and not fits(maker, "é😀AB上")


def test_answers_do_not_affect_each_other() -> None:
    maker, ids = compiler().choice(["ab", "cd"]), encode("abcd")
    first, second = maker(), maker()
    before = allowed(first)
    kept = before.copy()
    first.accept(ids[0])
    assert allowed(first)[ids[1]] and not allowed(first)[ids[2]]
    assert allowed(second)[ids[2]] and not allowed(second)[ids[1]]
    assert (before == kept).all()  # a mask stays what it was
    with pytest.raises(RequestError, match="cannot go on with token"):
        second.accept(encode("x")[0])


# By the method of a compiler: arguments that it refuses, each with what the error tells.
REFUSED: dict[str, list[tuple[Any, str]]] = {
    "json_schema": [
        ([], "a JSON schema is an object, not"),
        ({"const": {1}}, "a JSON schema is JSON, not"),
        ({"minimum": float("nan")}, "a JSON schema is JSON, not"),
        ({"not": {}}, 'keywords that are not supported: "not"'),
        ({"if": {}, "then": {}}, 'not supported: "if", "then"'),
        (False, 'not supported: "not"'),
        ({"type": "string", "enum": [1]}, "no value satisfies it"),
        ({"$ref": "http://a.b/c"}, "http://a.b/c is referred to and not in"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf is supported only where"),
        ({"type": "string", "pattern": "(a.{20}b|c.{30}d)", "minLength": 50, "maxLength": 500}, "too complex together"),
        ({"type": "strin"}, "strin"),
        ({"$ref": "#"}, "no text satisfies it"),
    ],
    "regex": [
        ("(?=a)b", "the regular expression cannot be used: look-around"),
        ("(a", "the regular expression cannot be used: unclosed group"),
        (b"a", "a regular expression is a text, not b'a'"),
        ("", "it allows no text"),
        ("\ud83d", "is not valid Unicode"),
    ],
    "choice": [(wrong, "choices are a list of texts") for wrong in ([], "ab", ["a", ""])],
    "lark": [
        ("start: nope", 'the grammar cannot be used: line 1: unknown name: "nope"'),
        ('start: a\na: "b"\n  "c\n', "the grammar cannot be used: line 3"),
        ('a: "b"', "no start rule"),
        ('{"grammars": []}', "a grammar is a text in Lark's syntax"),
        ('start: a\na[stop="x"]: /.*/', "cannot have the attribute stop"),
        ("start: a\na[lazy, temperature=0.3]: /.*/", "cannot have the attribute temp"),
        ("start: <|nope|>", "the grammar cannot be used"),
        ("start: /ä/ /ö/ " + '"x" ' * 80_000, "has 320,017 bytes, and may have 262,144"),
        (f'start: %json {{"enum": ["{"x" * 300_000}"]}}', "bytes, and may have 262,144"),
    ],
    "gbnf": [
        ("root = a", "the grammar cannot be used"),
        (" ", "a grammar is a text in GBNF"),
        (r'root ::= "\ud800"', "cannot be used"),
    ],
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_used_is_refused_in_one_line(kind: str) -> None:
    for wrong, says in REFUSED[kind]:
        with pytest.raises(RequestError) as caught:
            getattr(compiler(), kind)(wrong)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value) and "?" not in str(caught.value).replace("(?", "")


def test_what_is_known_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = new_compiler()
    maker = found.regex("known+")
    monkeypatch.setattr(found, "_process", None)
    assert fits(found.regex("known+"), "knownn") and fits(maker, "known")
    with pytest.raises(AttributeError):
        found.regex("unknown+")


def test_the_texts_that_are_known_are_the_latest() -> None:
    found = new_compiler()
    for number in range(70):
        found.choice([f"number {number}"])
        found.choice(["often"])
    known = [text.partition("CHOICE: ")[2] for _, text in found._tried]
    assert known == [*(f'"number {number}"' for number in range(7, 70)), '"often"']


def test_a_process_that_was_killed_is_started_again() -> None:
    found = new_compiler()
    found.choice(["a"])
    running = found._process._running
    assert running is not None
    os.kill(running._process.pid, signal.SIGKILL)
    running._process.wait()
    assert fits(found.choice(["b"]), "b")


def test_threads_share_a_compiler() -> None:
    texts = [f"{number % 4} and {number % 3}" for number in range(20)]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda text: fits(compiler().choice([text]), text), texts))


def test_a_tokenizer_of_words_has_no_json() -> None:
    """Its tokens stand for words behind spaces, so that no answer can begin with a bracket."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "{": 2}, unk_token="a"))
    found = GrammarCompiler(Tokenizer(words.to_str()), 3, [])
    with pytest.raises(RequestError, match="no text satisfies it that this model's tokens can write"):
        found.json_object()


# Grammars are strangers' programs: none ends or stops the server, and none takes its memory.


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
