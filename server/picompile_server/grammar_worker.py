"""Try grammars in a process under limits, before the server uses them; see grammar.py and limited_worker.py.

llguidance limits its own work only roughly: some grammars take minutes and gigabytes, and deep ones overflow the stack,
which ends the process. So each is tried in a fork, which may end.
"""

import base64
import json
import os
import resource
import signal
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Tokens that a grammar is tried with. In many the first is forced, and what is too large comes behind it.
_STEPS = 6


def handler(start: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return a function that tries a grammar: a request has the `grammar` in the syntax `kind`, its answer the `lark`.

    `start` has the `tokens` as `pack` writes them, the `end_tokens`, and limits of the fork: `grammar_cpu_s`,
    `grammar_bytes` beyond what the process has, and `stack_bytes`.
    """
    tokenizer = make_tokenizer(unpack(start["tokens"]), start["end_tokens"])
    limits = start["limits"]

    def attempt(request: Mapping[str, Any]) -> Mapping[str, Any]:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _limit_fork(limits)
            with open(writer, "wb") as pipe:
                pipe.write(json.dumps(_try(request, tokenizer)).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            answer = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            return dict(json.loads(answer))
        if code == -signal.SIGXCPU:
            return {"error": f"it takes more than {limits['grammar_cpu_s']} s to prepare"}
        deep = code == -signal.SIGSEGV
        most = (
            "it is nested too deeply" if deep else f"it takes more than {limits['grammar_bytes'] >> 20} MiB to prepare"
        )
        return {"error": most}

    return attempt


def _limit_fork(limits: Mapping[str, int]) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, most in (
        (resource.RLIMIT_CPU, limits["grammar_cpu_s"]),
        (resource.RLIMIT_AS, used + limits["grammar_bytes"]),
        (resource.RLIMIT_STACK, limits["stack_bytes"]),
    ):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _try(request: Mapping[str, Any], tokenizer: Any) -> Mapping[str, Any]:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    lark = str(request["grammar"])
    try:
        lark = gbnf_to_lark(lark) if request["kind"] == "gbnf" else lark
        matcher = LLMatcher(tokenizer, lark + request["options"], log_level=0, limits=parser_limits(request["rows"]))
        for step in range(_STEPS):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            for end in tokenizer.eos_tokens:
                mask &= ~(1 << end)
            if matcher.is_error():
                return {"error": matcher.get_error()}
            if not mask:
                return {"lark": lark} if step else {"error": "it allows no text"}
            matcher.consume_token((mask & -mask).bit_length() - 1)
        return {"lark": lark}
    except Exception as error:  # llguidance's converter raises its own, and RecursionError
        return {"error": str(error) or type(error).__name__}


def parser_limits(rows: int) -> Any:
    """Return llguidance's limits of the work for one token; `rows` are the most items in a row of its parser."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=rows, max_lexer_states=50_000, verbose_errors=False)


class _Vocabulary:
    """The tokens as llguidance takes them (its TokenizerWrapper, which would need a tokenizer)."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokens: list[bytes], end_token: int | None) -> None:
        self.tokens, self.eos_token_id = tokens, end_token

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("grammars force no tokens")


def make_tokenizer(tokens: list[bytes], end_tokens: list[int]) -> Any:
    """Return llguidance's tokenizer of these tokens.

    Without end tokens it has one more, whose id is beyond those of the model.
    """
    from llguidance import LLTokenizer

    vocabulary: Any = _Vocabulary(tokens, end_tokens[0] if end_tokens else None)
    made = LLTokenizer(vocabulary, eos_token=list(end_tokens) or None)
    vocabulary.tokens = []  # it keeps the object, and has copied them
    return made


def pack(tokens: list[bytes]) -> str:
    """Return tokens as a text of a few hundred kilobytes."""
    written = json.dumps([token.decode("latin-1") for token in tokens])
    return base64.b64encode(zlib.compress(written.encode(), 1)).decode()


def unpack(packed: str) -> list[bytes]:
    """Return the tokens that `pack` has packed."""
    return [token.encode("latin-1") for token in json.loads(zlib.decompress(base64.b64decode(packed)))]
