from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tokenizers

from helpers.grammars import Maker, allowed, draw_answer, follow, takes
from helpers.toys.toy_tokenizers import EOS, byte_level, metaspace
from picompile_runtime import RequestError, Tokenizer
from picompile_runtime.serving.grammar import GrammarCompiler

VOCAB = 262
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_level(), VOCAB, [EOS])


def fits(maker: Maker, text: str) -> bool:
    return takes(maker, byte_level(), text, EOS)


def test_json_of_a_schema_is_allowed_and_nothing_else(compiler: GrammarCompiler) -> None:
    maker = compiler.json_schema(PERSON)
    for text in ('{"name": "Ada", "age": 36}', '{"name":"Ada","age":36}', '{\n  "name": "é🙂",\n  "age": 0\n}'):
        assert fits(maker, text), text
    for text in (
        '{"name": "Ada"}',
        '{"name": "Ada", "age": -1}',
        '{"name": "Ada", "age": 36.5}',
        '{"name": "far too long", "age": 36}',
        '{"name": "Ada", "age": 36, "more": 1}',
        '{"name": "Ada", "age": 36} ',
        ' {"name": "Ada", "age": 36}',
        "hello",
        "",
    ):
        assert not fits(maker, text), text


def test_an_answer_is_complete_where_nothing_can_follow(compiler: GrammarCompiler) -> None:
    text = '{"name": "Ada", "age": 36}'
    ids = byte_level().encode(text)
    assert follow(compiler.json_schema(PERSON)(), ids) is True
    assert follow(compiler.json_schema(PERSON)(), ids[:-1]) is False


def test_end_tokens_are_allowed_exactly_where_the_grammar_can_end() -> None:
    ends = [EOS, 260]
    compiler = GrammarCompiler(byte_level(), VOCAB, ends)
    grammar = compiler.regex("ab?c?")()
    seen = []
    for token in byte_level().encode("ab"):
        seen.append(set(np.flatnonzero(allowed(grammar))) & set(ends))
        assert not grammar.accept(token)
    seen.append(set(np.flatnonzero(allowed(grammar))) & set(ends))
    assert seen == [set(), set(ends), set(ends)]
    assert grammar.accept(ends[1])


def test_without_end_tokens_an_answer_ends_where_nothing_can_follow() -> None:
    compiler = GrammarCompiler(byte_level(), VOCAB, [])
    ids = byte_level().encode("ab")
    grammar = compiler.regex("ab?")()
    assert [grammar.accept(token) for token in ids] == [False, True]
    # The model has no token for the rest, which need not come.
    few = GrammarCompiler(byte_level(), byte_level().encode("z")[0], [])
    grammar = few.regex("a(z+)?")()
    assert follow(grammar, byte_level().encode("a")) is True


def test_columns_without_a_token_are_never_allowed() -> None:
    compiler = GrammarCompiler(byte_level(), VOCAB + 90, [EOS, VOCAB + 200])
    mask = allowed(compiler.regex("(?s:.*)")())
    assert mask.shape == (VOCAB + 90,)
    assert mask[: VOCAB - 5].sum() > 150 and not mask[VOCAB:].any()


def test_tokens_beyond_the_columns_are_never_allowed() -> None:
    compiler = GrammarCompiler(byte_level(), 100, [EOS])
    mask = allowed(compiler.regex("(?s:.*)")())
    assert mask.shape == (100,) and mask.sum() > 50
    assert follow(compiler.regex("[A-Z]+")(), byte_level().encode("ABC")) is False


def test_special_tokens_are_no_text() -> None:
    tokenizer = metaspace(bos=False)
    compiler = GrammarCompiler(tokenizer, len(tokenizer.vocabulary()), [2])
    mask = allowed(compiler.regex("(?s:.*)")())
    assert set(np.flatnonzero(mask[:3])) == {2}  # the end token, and neither <unk> nor <s>


def test_tokens_of_sentencepiece_are_known_by_their_text() -> None:
    tokenizer = metaspace(bos=False)
    vocabulary = tokenizer.vocabulary()
    compiler = GrammarCompiler(tokenizer, len(vocabulary), [2])
    mask = allowed(compiler.regex("[ab]+ a")())
    assert set(np.flatnonzero(mask)) == {vocabulary[name] for name in ("a", "b", "ab")}  # and not <0x61>
    ids = [vocabulary["ab"], vocabulary["▁a"]]
    assert follow(compiler.regex("[ab]+ a")(), ids) is True
    # A letter without a token of its own is written in bytes.
    letters = [vocabulary[f"<0x{byte:02X}>"] for byte in "ß".encode()]
    assert follow(compiler.regex("ß")(), letters) is True


@pytest.mark.parametrize("seed", range(20))
def test_random_answers_satisfy_the_schema(compiler: GrammarCompiler, seed: int) -> None:
    tokenizer = byte_level()
    closing = np.array([tokenizer.decode([token])[:1] in ('"', "}", "]", "") for token in range(VOCAB)])
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", "b", None, 3]},
            "list": {"type": "array", "items": {"type": "number", "minimum": -3, "maximum": 5.5}, "maxItems": 3},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
        },
        "required": ["list", "kind"],
        "additionalProperties": False,
    }
    ids = draw_answer(compiler.json_schema(schema), np.random.default_rng(seed), 500, closing)
    assert ids is not None
    value = json.loads(tokenizer.decode(ids))
    assert value["kind"] in ("a", "b", None, 3) and next(iter(value)) in ("kind", "list")
    assert len(value["list"]) <= 3 and all(-3 <= number <= 5.5 for number in value["list"])
    assert "code" not in value or re.fullmatch("[A-Z]{2}-[0-9]+", value["code"])


def test_any_object_is_json_mode(compiler: GrammarCompiler) -> None:
    maker = compiler.json_object()
    assert fits(maker, '{"a": [1, {"b": null}], "c": "d"}') and fits(maker, "{}")
    assert not fits(maker, "[]") and not fits(maker, '"a"')


def test_whitespace_between_parts_ends(compiler: GrammarCompiler) -> None:
    """A model that repeats itself must not write spaces until it runs out of tokens."""
    tokenizer = byte_level()
    grammar = compiler.json_object()()
    assert follow(grammar, tokenizer.encode("{\n" + " " * 32)) is False
    assert {tokenizer.decode([token]) for token in np.flatnonzero(allowed(grammar))} == {'"', "}"}
    assert not fits(compiler.json_object(), "{  }") and not fits(compiler.json_object(), "{\n\n}")


def test_keys_and_texts_have_one_spelling(compiler: GrammarCompiler) -> None:
    """A key that is written with an escape could pass for one that the schema does not name."""
    maker = compiler.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert fits(maker, '{"a": 1, "b": "x"}') and fits(maker, '{"a": 1, "\\n": "x"}')
    assert not fits(maker, '{"\\u0061": "x"}') and not fits(maker, '{"b": "x", "a": "y"}')


def test_a_regular_expression_matches_whole_answers(compiler: GrammarCompiler) -> None:
    maker = compiler.regex(r"(yes|no)/[0-9]{2}\.")
    assert fits(maker, "yes/12.") and not fits(maker, "yes/12") and not fits(maker, "maybe/12.")
    assert fits(compiler.regex("a\nb"), "a\nb") and fits(compiler.regex('"\\\\"'), '"\\"')


def test_choices_may_begin_alike(compiler: GrammarCompiler) -> None:
    texts = ["a", "ab", 'c"d', "e\\f", "ü\n", "{x}"]
    maker = compiler.choice(texts)
    assert all(fits(maker, text) for text in texts)
    assert not fits(maker, "b") and not fits(maker, "")


def test_a_grammar_in_larks_syntax(compiler: GrammarCompiler) -> None:
    text = 'start: item ("," item)*\nitem: NUMBER | "(" start ")"\nNUMBER: /[0-9]+/ // digits'
    maker = compiler.lark(text)
    assert fits(maker, "1,(22,(3)),4") and not fits(maker, "1,(2") and not fits(maker, "a")


def test_characters_by_their_numbers_in_gbnf(compiler: GrammarCompiler) -> None:
    maker = compiler.gbnf(r'root ::= "\u00e9\U0001F600\u0041\\u0042" [\u4e00-\u4e10]')
    assert fits(maker, "é😀A\\u0042上") and not fits(maker, "é😀AB上")
    with pytest.raises(RequestError, match="cannot be used"):
        compiler.gbnf(r'root ::= "\ud800"')


def test_a_grammar_in_gbnf(compiler: GrammarCompiler) -> None:
    maker = compiler.gbnf('root ::= "list:" item+\nitem ::= " " [a-z]+ | " -"\n')
    assert fits(maker, "list: a - hello") and not fits(maker, "list:")


def test_answers_do_not_affect_each_other(compiler: GrammarCompiler) -> None:
    maker = compiler.choice(["ab", "cd"])
    first, second = maker(), maker()
    ids = byte_level().encode("abcd")
    first.accept(ids[0])
    assert allowed(first)[ids[1]] and not allowed(first)[ids[2]]
    assert allowed(second)[ids[2]] and not allowed(second)[ids[1]]


def test_a_mask_stays_what_it_was(compiler: GrammarCompiler) -> None:
    grammar = compiler.choice(["ab"])()
    ids = byte_level().encode("ab")
    before = allowed(grammar)
    kept = before.copy()
    grammar.accept(ids[0])
    assert allowed(grammar)[ids[1]] and (before == kept).all()


def test_a_token_that_is_not_allowed_raises(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match="cannot go on with token"):
        compiler.choice(["ab"])().accept(byte_level().encode("x")[0])


REFUSED: dict[str, tuple[Callable[[GrammarCompiler], Any], str]] = {
    "no schema": (lambda made: made.json_schema([]), "a JSON schema is an object, not"),  # type: ignore[arg-type]
    "no JSON": (lambda made: made.json_schema({"const": {1}}), "a JSON schema is JSON, not"),
    "NaN": (lambda made: made.json_schema({"minimum": float("nan")}), "a JSON schema is JSON, not"),
    "not": (lambda made: made.json_schema({"not": {}}), 'keywords that are not supported: "not"'),
    "two": (lambda made: made.json_schema({"if": {}, "then": {}}), 'not supported: "if", "then"'),
    "false": (lambda made: made.json_schema(False), 'not supported: "not"'),
    "nothing fits": (lambda made: made.json_schema({"type": "string", "enum": [1]}), "no value satisfies it"),
    "elsewhere": (lambda made: made.json_schema({"$ref": "http://a.b/c"}), "http://a.b/c is referred to and not in"),
    "one of": (
        lambda made: made.json_schema({"oneOf": [{"type": "number"}, {"type": "integer"}]}),
        "oneOf is supported only where",
    ),
    "least": (lambda made: made.json_schema({"type": "object", "minProperties": 2}), "minProperties of 2 is supported"),
    "patterns": (
        lambda made: made.json_schema(
            {"type": "string", "pattern": "(a.{20}b|c.{30}d)", "minLength": 50, "maxLength": 500}
        ),
        "its patterns are too complex together",
    ),
    "type": (lambda made: made.json_schema({"type": "strin"}), "strin"),
    "itself": (lambda made: made.json_schema({"$ref": "#"}), "no text satisfies it"),
    "look": (lambda made: made.regex("(?=a)b"), "the regular expression cannot be used: look-around"),
    "bracket": (lambda made: made.regex("(a"), "the regular expression cannot be used: unclosed group"),
    "no text": (lambda made: made.regex(b"a"), "a regular expression is a text, not b'a'"),  # type: ignore[arg-type]
    "empty": (lambda made: made.regex(""), "it allows no text"),
    "surrogate": (lambda made: made.regex("\ud83d"), "is not valid Unicode"),
    "no choice": (lambda made: made.choice([]), "choices are a list of texts"),
    "one text": (lambda made: made.choice("ab"), "choices are a list of texts"),
    "empty choice": (lambda made: made.choice(["a", ""]), "choices are a list of texts"),
    "name": (lambda made: made.lark("start: nope"), 'the grammar cannot be used: line 1: unknown name: "nope"'),
    "line": (lambda made: made.lark('start: a\na: "b"\n  "c\n'), "the grammar cannot be used: line 3"),
    "start": (lambda made: made.lark('a: "b"'), "no start rule"),
    "JSON grammar": (lambda made: made.lark('{"grammars": []}'), "a grammar is a text in Lark's syntax"),
    "stop": (lambda made: made.lark('start: a\na[stop="x"]: /.*/'), "cannot have the attribute stop"),
    "heat": (lambda made: made.lark("start: a\na[lazy, temperature=0.3]: /.*/"), "cannot have the attribute temp"),
    "token": (lambda made: made.lark("start: <|nope|>"), "the grammar cannot be used"),
    "no GBNF": (lambda made: made.gbnf("root = a"), "the grammar cannot be used"),
    "empty GBNF": (lambda made: made.gbnf(" "), "a grammar is a text in GBNF"),
    "letters": (lambda made: made.lark("start: /ä/ /ö/ " + '"x" ' * 80_000), "has 320,017 bytes, and may have 262,144"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_in_one_line(compiler: GrammarCompiler, case: str) -> None:
    make, says = REFUSED[case]
    with pytest.raises(RequestError) as caught:
        make(compiler)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value) and "?" not in str(caught.value).replace("(?", "")


def test_what_is_known_is_not_tried_again(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = compiler.regex("known+")
    monkeypatch.setattr(compiler, "_process", None)
    assert fits(compiler.regex("known+"), "knownn") and fits(maker, "known")
    with pytest.raises(AttributeError):
        compiler.regex("unknown+")


def test_the_texts_that_are_known_are_the_latest() -> None:
    compiler = GrammarCompiler(byte_level(), VOCAB, [EOS])
    for number in range(70):
        compiler.choice([f"number {number}"])
        compiler.choice(["often"])
    known = [text.partition("CHOICE: ")[2] for _, text in compiler._tried]
    assert known == [*(f'"number {number}"' for number in range(7, 70)), '"often"']


def test_a_process_that_was_killed_is_started_again() -> None:
    compiler = GrammarCompiler(byte_level(), VOCAB, [EOS])
    compiler.choice(["a"])
    running = compiler._process._running
    assert running is not None
    os.kill(running._process.pid, signal.SIGKILL)
    running._process.wait()
    assert fits(compiler.choice(["b"]), "b")


def test_threads_share_a_compiler(compiler: GrammarCompiler) -> None:
    found = list[bool]()

    def work(number: int) -> None:
        for each in range(5):
            text = f"{number} and {each % 3}"
            found.append(fits(compiler.choice([text]), text))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 20


def test_a_tokenizer_of_words_has_no_json() -> None:
    """Its tokens stand for words behind spaces, so that no answer can begin with a bracket."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "{": 2}, unk_token="a"))
    compiler = GrammarCompiler(Tokenizer(words.to_str()), 3, [])
    with pytest.raises(RequestError, match="no text satisfies it that this model's tokens can write"):
        compiler.json_object()
