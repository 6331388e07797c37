"""Time to the first token of a long chat's next question, with and without reuse of its slot's tokens.

    python -m benchmarks.cpu.serve_prefix ARTIFACT [--tokens 2000] [--question 32] [--answer 64] [--threads N]

A chat of random tokens: a first question that fills it, an answer, and a second question. Measures the time from asking
to the first token, in seconds (medians of the rounds; each has a chat of its own):

- first: of the first question;
- next: of the second one, asked when the server had read its answer again (`--pause` s later);
- at once: of the second one, asked as soon as the first answer has ended, so that the answer is read with it;
- without: of the second one where nothing of it is in the cache: the same length, and another first token.
"""

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

import httpx

from benchmarks.script import argument_parser
from benchmarks.serving import ServedArtifact


def ask(client: httpx.Client, prompt: list[int], most: int) -> tuple[float, list[int], int]:
    """Return the seconds to the first token, the tokens of the answer, and how many of the prompt were cached."""
    body = {
        "prompt": prompt,
        "max_tokens": most,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    start, first_s, tokens, cached = time.perf_counter(), 0.0, list[int](), 0
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            first_s = first_s or time.perf_counter() - start
            for choice in chunk["choices"]:
                tokens += choice["token_ids"]
            if chunk.get("usage"):
                cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
    return first_s, tokens, cached


def measure(options: argparse.Namespace, client: httpx.Client) -> dict[str, Any]:
    """Return the medians, and what was cached."""
    rng = random.Random(options.seed)

    def drawn(count: int) -> list[int]:
        return [rng.randrange(10, options.vocab) for _ in range(count)]

    found: dict[str, list[tuple[float, int]]] = {"first": [], "next": [], "at once": [], "without": []}
    for _ in range(options.rounds):
        for name, pause in (("next", options.pause), ("at once", 0.0)):
            chat = drawn(options.tokens)
            first_s, answer, cached = ask(client, chat, options.answer)
            found["first"].append((first_s, cached))
            time.sleep(pause)
            chat += answer + drawn(options.question)
            first_s, _, cached = ask(client, chat, options.answer)
            found[name].append((first_s, cached))
        first_s, _, cached = ask(client, [chat[0] - 1, *chat[1:]], options.answer)
        found["without"].append((first_s, cached))
    result: dict[str, Any] = {"prompt_tokens": {"first": options.tokens, "second": len(chat)}}
    for name, measured in found.items():
        result[name] = {
            "first_token_s": round(statistics.median(seconds for seconds, _ in measured), 4),
            "cached_tokens": [cached for _, cached in measured],
        }
    for name in ("next", "at once"):
        result[name]["sooner"] = round(result["without"]["first_token_s"] / result[name]["first_token_s"], 1)
    return result


def main() -> int:
    parser = argument_parser(
        __doc__, "artifact", "--threads", tokens=2000, question=32, answer=64, pause=3.0, vocab=32000, rounds=3, seed=0
    )
    options = parser.parse_args()
    with (
        ServedArtifact(options.artifact, threads=options.threads) as server,
        httpx.Client(base_url=server.url, timeout=600) as client,
    ):
        print(json.dumps(measure(options, client), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
