"""The other end of `benchmarks.peers`: a process that keeps one model loaded and measures what it is asked for.

A request is a line of JSON on standard input, a reply one on standard output:

    {"op": "decode", "context": 128, "batch": 1, "threads": 2, "tokens": 64}  →  {"seconds": 2.31, "facts": {…}}

`decode` reads `tokens` tokens one by one in each of `batch` sequences that have `context` tokens in the cache;
`prefill` reads `context` tokens into an empty one. Between requests a worker waits for the next line.

Only the standard library is needed: llama.cpp and OpenVINO may live in a Python that has nothing else of ours.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

# Steps before a measurement that do not count: threads wake up, caches fill.
WARM_TOKENS = 2
# Tokens that a session has room for behind its context.
STEPS = 96
# Exit code of a worker whose library is not installed.
MISSING = 3

Request = dict[str, Any]


class Session(Protocol):
    """A loaded model with room for `batch` sequences of `context` tokens and some more."""

    def fill(self) -> None:
        """Empties the cache and reads `context` tokens into every sequence."""

    def decode(self, steps: int) -> None:
        """Reads `steps` tokens in every sequence, one by one, computing logits for each."""

    def rewind(self) -> None:
        """Leaves the first `context` tokens in the cache."""

    def facts(self, op: str) -> dict[str, float]:
        """Return figures of the last measurement: bytes of a token, shares of neurons, the memory's bandwidth."""

    def close(self) -> None:
        """Gives the memory back."""


def text(vocab: int, tokens: int) -> list[int]:
    """Random tokens, always the same; the first ids, which are special ones, left out."""
    return random.Random(0).choices(range(4, vocab), k=tokens)


def next_tokens(tokens: list[int], position: int, batch: int) -> list[int]:
    """Return the next token of each sequence. They differ, so that other neurons fire in each."""
    return [tokens[(position + 17 * sequence) % len(tokens)] for sequence in range(batch)]


def serve(about: dict[str, Any], open_session: Callable[[Request], Session]) -> None:
    """Answers requests until standard input ends. One session is kept, for requests of the same sizes."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print do not come between the replies
    print(json.dumps({"about": about}), file=replies, flush=True)
    opened: dict[tuple[int, ...], Session] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = _measure(_session(opened, request, open_session), request)
        except Exception as error:  # the benchmark goes on without this figure, and says why
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        print(json.dumps(reply), file=replies, flush=True)


def _session(
    opened: dict[tuple[int, ...], Session], request: Request, open_session: Callable[[Request], Session]
) -> Session:
    key = tuple(request[name] for name in ("context", "batch", "threads"))
    if key not in opened:
        for session in opened.values():
            session.close()
        opened.clear()
        session = open_session(request)
        session.fill()
        opened[key] = session
    return opened[key]


def _measure(session: Session, request: Request) -> dict[str, Any]:
    if request["op"] == "prefill":
        start = time.perf_counter()
        session.fill()
    else:
        session.rewind()
        session.decode(WARM_TOKENS)
        start = time.perf_counter()
        session.decode(request["tokens"])
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "facts": session.facts(request["op"])}


def missing(package: str, how: str) -> None:
    """Ends a worker whose library is not there."""
    print(f"{sys.executable} has no {package}; {how}", file=sys.stderr)
    sys.exit(MISSING)
