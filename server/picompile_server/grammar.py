"""Grammars restrict the next token, so that an answer is JSON of a schema, matches a pattern, or calls tools.

llguidance computes the allowed tokens. Grammars are tried in a separate process before they are used in this one:
some take minutes, gigabytes or all of the stack (grammar_worker.py).
"""

from __future__ import annotations

import json
import platform
import re
import resource
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, regex_to_lark
from numpy.typing import NDArray

from picompile_runtime.errors import RequestError
from picompile_runtime.limited_process import LimitedProcess
from picompile_runtime.request_checks import shown
from picompile_runtime.sampling.tokenizer import Tokenizer
from picompile_server.grammar_worker import make_tokenizer, pack, parser_limits
from picompile_server.json_schema import json_rule
from picompile_server.request import Grammar
from picompile_server.vocabulary import token_bytes

_WORKER = Path(__file__).with_name("grammar_worker.py")
_MOST_BYTES = 2**18  # of a grammar's text
_MOST_TRIED = 64  # texts that are known to be harmless

# A grammar takes some milliseconds and a few megabytes. `cpu_s` and `memory_bytes` are for the vocabulary, too, of
# which Gemma's is the largest.
LIMITS = {"cpu_s": 20, "memory_bytes": 2**31, "grammar_cpu_s": 2, "grammar_bytes": 2**27}
# llguidance's limits of the work for one token, whose parts are rows of items. A schema's object with 250 optional
# properties has 1,000 in a row. Ambiguous grammars take half a second for a token where rows have 2,000, and a tenth of
# that where they have 1,000; schemas are not ambiguous.
_ROWS = {"JSON schema": 2000, "list of tools": 2000}
_USUAL_ROWS = 1000
# The model chooses how a text is cut into tokens, even where the text is forced: llguidance would ask a tokenizer then,
# which takes the names of special tokens in a text for the tokens, and may put spaces in front.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'

# An escaped backslash, or a character by its number.
_GBNF_ESCAPE = re.compile(r"\\(?:\\|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")
_PLACE = re.compile(r"^(at )?(?P<line>\d+)\(\d+\): ")
# Attributes of rules in Lark's syntax that a mask of tokens cannot have an effect on.
_NO_MASK = re.compile(r"^[ \t]*[?!]?\w[\w-]*[ \t]*\[[^\]\n]*\b(?P<name>temperature|stop)[ \t]*=", re.MULTILINE)
# What llguidance says, and what that means to whoever sent the grammar.
_MEANINGS = (
    (re.compile(r'Unimplemented keys: \[(.*)\]'), r"keywords that are not supported: \1"),
    (re.compile(r"oneOf constraints are not supported.*"), "oneOf is supported only where it is plain that no two "
     "alternatives can hold; use anyOf"),
    (re.compile(r"Resource '(.*?)' is not present.*"), r"\1 is referred to and not in the schema"),
    (re.compile(r"Unsatisfiable schema: (.*)"), r"no value satisfies it (\1)"),
    (re.compile(r".*(too big|schema too large|fuel exhausted|Too many items|too many (states|expressions)|"
                r"Current row has).*"), "it is too large or too ambiguous"),
    (re.compile(r"Unable to determine if regex is empty.*"), "its patterns are too complex together"),
    (re.compile(r".*recursion limit exceeded.*"), "it is nested too deeply"),
    (re.compile(r"panic: .*"), "llguidance fails on it"),
    (re.compile(r"NoExtensionBias"), "no text satisfies it that this model's tokens can write"),
)  # fmt: skip


class GrammarCompiler:
    """Makes grammars for one model's tokens. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_tokens: Collection[int]) -> None:
        """Prepare the model's tokens, which takes a tenth of a second or more.

        Args:
            tokenizer: the model's tokenizer.
            vocab: how many columns the model's logits have; those without a token are never allowed.
            end_tokens: tokens that end an answer. They are allowed exactly where the grammar can end.
        """
        tokens = token_bytes(tokenizer, vocab, end_tokens)
        ends = sorted(end for end in end_tokens if 0 <= end < vocab)
        self._vocab, self.has_end = vocab, bool(ends)
        self._tokenizer = make_tokenizer(tokens, ends)
        start = {"tokens": pack(tokens), "end_tokens": ends}
        # Half of it, so that what passes there cannot overflow it here.
        limits = {**LIMITS, "stack_bytes": _thread_stack_bytes() // 2}
        self._process = LimitedProcess("a grammar", _WORKER, start, limits)
        self._tried: OrderedDict[tuple[str, str], str] = OrderedDict()  # as Lark's syntax has them
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the process that tries grammars; the next grammar starts another."""
        self._process.close()

    def json_schema(self, schema: Mapping[str, Any] | bool) -> Callable[[], Grammar]:
        """Return a maker of the grammar of JSON that satisfies a schema.

        Raises RequestError, in one line, if it is not a schema or asks for something that cannot be enforced.
        """
        return self.grammar("JSON schema", f"start: {json_rule(schema)}")

    def json_object(self) -> Callable[[], Grammar]:
        """Return a maker of the grammar of any JSON object."""
        return self.json_schema({"type": "object"})

    def regex(self, pattern: str) -> Callable[[], Grammar]:
        """Return a maker of the grammar of texts that a regular expression matches from beginning to end.

        Its syntax is that of Rust's crate `regex`, which has no look-around. Raises RequestError.
        """
        if not isinstance(pattern, str):
            raise RequestError(f"a regular expression is a text, not {shown(pattern)}")
        _check_size("regular expression", pattern)
        return self.grammar("regular expression", f"start: /{regex_to_lark(pattern, '')}/")

    def choice(self, texts: Sequence[str]) -> Callable[[], Grammar]:
        """Return a maker of a grammar whose answer is one of some texts. Raises RequestError."""
        if isinstance(texts, str) or not all(isinstance(text, str) and text for text in texts) or not texts:
            raise RequestError(f"choices are a list of texts that are not empty, not {shown(texts)}")
        return self.grammar("list of choices", f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, texts))}")

    def lark(self, text: str) -> Callable[[], Grammar]:
        """Return a maker of a grammar in llguidance's variant of Lark's syntax. Raises RequestError."""
        if not isinstance(text, str) or text.lstrip()[:1] in ("", "{"):
            raise RequestError(f"a grammar is a text in Lark's syntax, not {shown(text)}")
        if (found := _NO_MASK.search(text)) is not None:
            raise RequestError(f"the grammar cannot be used: rules cannot have the attribute {found['name']}")
        return self.grammar("grammar", text)

    def gbnf(self, text: str) -> Callable[[], Grammar]:
        """Return a maker of a grammar in llama.cpp's GBNF. Raises RequestError."""
        if not isinstance(text, str) or not text.strip():
            raise RequestError(f"a grammar is a text in GBNF, not {shown(text)}")
        return self.grammar("grammar", _GBNF_ESCAPE.sub(_unescaped, text), "gbnf")

    def grammar(self, what: str, text: str, kind: str = "lark") -> Callable[[], Grammar]:
        """Return a maker of the grammar of a text in the syntax `kind`; errors call it `what`. Raises RequestError.

        The grammars that it makes share what they learn of the text, and its limits: they are for one request. Grammars
        of another one are not affected, so that an answer does not depend on those of others.
        """
        _check_size(what, text)
        rows = _ROWS.get(what, _USUAL_ROWS)
        with self._lock:
            lark = self._tried.pop((kind, text), None)
        if lark is None:
            answer = self._process.ask({"kind": kind, "grammar": text, "options": _OPTIONS, "rows": rows})
            if "error" in answer:
                raise RequestError(f"the {what} cannot be used: {_readable(answer['error'], what == 'grammar')}")
            lark = str(answer["lark"])
        matcher = LLMatcher(self._tokenizer, lark + _OPTIONS, log_level=0, limits=parser_limits(rows))
        if matcher.is_error():
            raise RequestError(f"the {what} cannot be used: {_readable(matcher.get_error(), what == 'grammar')}")
        with self._lock:
            self._tried[kind, text] = lark
            while len(self._tried) > _MOST_TRIED:
                self._tried.popitem(last=False)
        return partial(_copied, matcher, self._vocab, self.has_end)


def _unescaped(escape: re.Match[str]) -> str:
    """Return the character of `\\u00e9` or `\\U0001F600` in GBNF, which llguidance does not read."""
    code = int(escape[1] or escape[2] or "0", 16)
    if not code or code > sys.maxunicode or 0xD800 <= code < 0xE000:
        return escape[0]
    return f"\\x{code:02X}" if code < 0x80 else chr(code)  # where a letter may mean something else


def _check_size(what: str, text: str) -> None:
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"the {what} is not valid Unicode ({error.reason})") from error
    if size_bytes > _MOST_BYTES:
        raise RequestError(f"the {what} has {size_bytes:,} bytes, and may have {_MOST_BYTES:,}")


def _thread_stack_bytes() -> int:
    """Return how large the stack of a thread is here: as glibc sizes it; other C libraries make it smaller."""
    if threading.stack_size():
        return threading.stack_size()
    if platform.libc_ver()[0] != "glibc":
        return 2**20  # Python's own choice then
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return 2**21 if soft == resource.RLIM_INFINITY else soft


def _copied(matcher: LLMatcher, vocab: int, has_end: bool) -> Grammar:
    return TokenGrammar(matcher.deep_copy(), vocab, has_end)


class TokenGrammar:
    """Follows the tokens of one answer; the `Grammar` of a request."""

    def __init__(self, matcher: LLMatcher, vocab: int, has_end: bool) -> None:
        self._matcher, self._vocab, self._has_end = matcher, vocab, has_end
        self._next: NDArray[np.bool_] | None = None  # what may come next, if it is known already

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, bool [vocab]; at least one may.

        Raises RequestError if the grammar needs too much work to go on, or no token can.
        """
        mask, self._next = self._mask() if self._next is None else self._next, None
        if not mask.any():
            raise RequestError("the answer cannot go on: no token of this model continues the grammar")
        return mask

    def accept(self, token: int) -> bool:
        """Note that `token` was chosen, and return whether the answer is complete: it is at an end token, and where
        nothing can follow.

        Raises RequestError if the grammar does not allow the token, or needs too much work to go on.
        """
        self._next = None
        if not self._matcher.consume_token(token):
            raise RequestError(f"the answer cannot go on with token {token}: {_readable(self._matcher.get_error())}")
        if self._matcher.is_stopped():
            return True
        if self._has_end or not self._matcher.is_accepting():
            return False
        self._next = self._mask()  # no token ends the answer, so it ends where none can follow
        return not self._next.any()

    def _mask(self) -> NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise RequestError(f"the answer cannot go on: {_readable(self._matcher.get_error())}")
        return np.unpackbits(bits, count=self._vocab, bitorder="little").view(np.bool_)


def _readable(error: str, with_line: bool = False) -> str:
    """Return llguidance's error as one line, in the terms of the client's grammar."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["it fails"]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    place = _PLACE.match(lines[0])
    reason = _PLACE.sub("", reason).removeprefix("failed to compile JSON schema: ")
    for pattern, meaning in _MEANINGS:
        reason = pattern.sub(meaning, reason)
    return f"line {place['line']}: {reason}" if place is not None and with_line else reason
