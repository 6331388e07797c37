"""Tokens/s of all streams together, from our server and from llama.cpp's, on the same shape and machine.

    python -m benchmarks.peers.serving ARTIFACT --llama-server PROGRAM --gguf FILE [--streams 1 8 32] [--rounds 3]

So many clients ask at the same moment for an answer of some tokens, each with a prompt of its own of random tokens, and
read it as a stream. Both servers get the same token ids by `/v1/completions`, greedy, and must not end before. They run
one after the other, in turns; each is started anew for every round, with as many threads. FILE is the same model for
llama.cpp, as `python -m benchmarks.peers.gguf … vocabulary` writes it.

Prints for each number of streams the medians: tokens/s from asking to the end of the last answer, tokens/s
between the moment when all have their first token and the end of the first answer, and the time to the first token.
"""

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.script import argument_parser, heading, row
from benchmarks.serving import ServedArtifact, stream


async def ask(client: httpx.AsyncClient, request: dict[str, Any]) -> list[float]:
    """Return when each piece of the answer came."""
    return [
        time.perf_counter()
        async for chunk in stream(client, request)
        if chunk["choices"] and chunk["choices"][0].get("finish_reason") is None
    ]


async def together(url: str, streams: int, prompt: int, tokens: int, vocab: int, seed: int) -> dict[str, float]:
    """Ask for `streams` answers at once, and return the speeds."""
    rng = random.Random(seed)
    requests = [
        {
            "prompt": [rng.randrange(10, vocab) for _ in range(prompt)],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        for _ in range(streams)
    ]
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        start = time.perf_counter()
        answers = await asyncio.gather(*(ask(client, request) for request in requests))
    end = max(times[-1] for times in answers)
    # Pieces without a visible text are not sent by every server: what was asked for counts.
    all_begun, first_end = max(times[0] for times in answers), min(times[-1] for times in answers)
    between = sum(sum(all_begun < moment <= first_end for moment in times) for times in answers)
    return {
        "tokens_per_s": streams * tokens / (end - start),
        "decode_tokens_per_s": between / (first_end - all_begun) if first_end > all_begun else 0.0,
        "first_token_s": statistics.median(times[0] for times in answers) - start,
        "pieces_share": sum(len(times) for times in answers) / (streams * tokens),
    }


@contextmanager
def llama_server(options: argparse.Namespace, streams: int) -> Iterator[str]:
    """Run llama.cpp's server, and yield its address when it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = streams * options.context
    command = [options.llama_server, "-m", options.gguf, "--port", port, "-np", streams, "-c", context]
    command += ["-t", options.threads, "-tb", options.threads, "--no-webui", *options.llama_options.split()]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise RuntimeError(f"llama.cpp's server ended with {process.returncode}")
            try:
                if httpx.get(f"{url}/health").status_code == httpx.codes.OK:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians by server and number of streams."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for turn in range(options.rounds):
        for streams in options.streams:
            seed = 1000 * turn + streams

            def run(name: str, url: str, streams: int = streams, seed: int = seed) -> None:
                asyncio.run(together(url, streams, options.prompt, 8, options.vocab, seed + 1))  # warms up
                result = asyncio.run(together(url, streams, options.prompt, options.tokens, options.vocab, seed))
                found.setdefault((name, streams), []).append(result)

            with ServedArtifact(options.artifact, threads=options.threads) as server:
                run("picompile", server.url)
            with llama_server(options, streams) as url:
                run("llama.cpp", url)
    return {
        f"{name}, {streams}": {key: statistics.median(each[key] for each in results) for key in results[0]}
        for (name, streams), results in found.items()
    }


def main() -> int:
    parser = argument_parser(__doc__, "artifact", streams=[1, 8, 32], vocab=32000, threads=2, rounds=3)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--context", type=int, default=512, help="tokens of a slot of llama.cpp's server")
    parser.add_argument("--llama-options", default="", help="more options of llama.cpp's server, in one text")
    options = parser.parse_args()
    result = measure(options)
    print(heading("streams", "picompile", "llama.cpp", "ratio", "decoding alone", "first token"))
    for streams in options.streams:
        ours, theirs = result[f"picompile, {streams}"], result[f"llama.cpp, {streams}"]
        ratio = ours["tokens_per_s"] / theirs["tokens_per_s"]
        decoding = f"{ours['decode_tokens_per_s']:.1f} and {theirs['decode_tokens_per_s']:.1f}"
        first = f"{ours['first_token_s']:.2f} and {theirs['first_token_s']:.2f} s"
        speeds = (f"{ours['tokens_per_s']:.1f}", f"{theirs['tokens_per_s']:.1f}", f"{ratio:.2f} ×")
        print(row(streams, *speeds, decoding, first))
    print(json.dumps(result, indent=2), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
