"""Many clients at once: a check that each gets the same text as alone, and the times that they wait.

    python -m benchmarks.cpu.serve_load ARTIFACT [--streams 64] [--minutes 10] [--requests 60] [--out FILE.json]

Starts `picompile serve ARTIFACT` and asks for each of some requests alone: prompts of 5 to 900 tokens, greedy and drawn
with a seed. Then as many clients as there are streams ask for requests at random times; of those some close their
connection in the middle of the answer. Every text that was finished must be the one that the request got alone. At the
end no slot may be in use, and the server's memory must be flat: it goes up and down with what the slots hold, so the
mean of the last tenth of the time is compared with that of the second tenth (of ten minutes: the second minute).

Prints the times to the first token and between tokens, tokens/s of all clients, and the memory. Exits with 1 if a text
differs, a slot leaks or memory grows by more than 5 %.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.script import argument_parser
from benchmarks.serving import ServedArtifact, stream
from picompile_runtime import Tokenizer, open_artifact

_TEXT = (
    "The compiler reads the graph of a model and rewrites it step by step. Each pass is small, and all are checked. "
    "A neuron that does not fire costs nothing, if one knows beforehand that it will not. "
)
_ABORTED_SHARE = 0.2
_LARGEST_GROWTH = 1.05


@dataclass
class Measured:
    """Records of all clients: seconds to the first token and between tokens, and counts."""

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    tokens: int = 0
    finished: int = 0
    aborted: int = 0
    wrong: list[str] = field(default_factory=list)


def requests_of(artifact: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """Return requests that differ in everything, for prompts of 5 to 900 tokens."""
    rng = random.Random(seed)
    opened = open_artifact(artifact)
    tokenizer, context = Tokenizer.of(opened), opened.program.context
    opened.close()
    ids = tokenizer.encode(_TEXT * 60)
    found = []
    for number in range(count):
        length = min(round(5 * 180 ** rng.random()), context - 128)
        start = rng.randrange(len(ids) - length)
        request: dict[str, Any] = {
            "prompt": ids[start : start + length],
            "max_tokens": rng.randint(16, 96),
            "stream": True,
        }
        request |= {"temperature": 0} if number % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": number}
        found.append(request)
    return found


async def ask(
    client: httpx.AsyncClient, request: dict[str, Any], measured: Measured | None = None, pieces: int | None = None
) -> str | None:
    """Return the text of an answer; None if the connection was closed after so many `pieces` of it."""
    start, before, text, seen = time.perf_counter(), None, "", 0
    async with aclosing(stream(client, request)) as chunks:
        async for chunk in chunks:
            now = time.perf_counter()
            if measured is not None:
                (measured.first_s if before is None else measured.between_s).append(now - (before or start))
                measured.tokens += 1
            before = now
            text += "".join(choice["text"] for choice in chunk["choices"])
            seen += 1
            if pieces is not None and seen >= pieces:
                return None
    return text


async def client_of(
    number: int, client: httpx.AsyncClient, cases: list[tuple[dict[str, Any], str]], end: float, measured: Measured
) -> None:
    """Ask for requests at random times until `end`."""
    rng = random.Random(number)
    while time.monotonic() < end:
        await asyncio.sleep(rng.expovariate(2.0))
        request, expected = rng.choice(cases)
        pieces = rng.randint(1, 20) if rng.random() < _ABORTED_SHARE else None
        text = await ask(client, request, measured, pieces)
        if text is None:
            measured.aborted += 1
            continue
        measured.finished += 1
        if text != expected:
            measured.wrong.append(f"{len(request['prompt'])} tokens: {text!r} instead of {expected!r}")


async def watch(server: ServedArtifact, end: float) -> list[tuple[float, int]]:
    """Return the server's resident memory in bytes, with the time of each sample in s."""
    samples, start = [], time.monotonic()
    while time.monotonic() < end:
        samples.append((time.monotonic() - start, server.resident_bytes()))
        await asyncio.sleep(min(1.0, (end - start) / 100))
    return samples


async def measure(options: argparse.Namespace, server: ServedArtifact) -> dict[str, Any]:
    """Run the load and return the figures."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        requests = requests_of(options.artifact, options.requests, options.seed)
        cases = []
        for request in requests:
            cases.append((request, str(await ask(client, request))))
        measured, seconds = Measured(), 60 * options.minutes
        start = time.monotonic()
        clients = [client_of(number, client, cases, start + seconds, measured) for number in range(options.streams)]
        watching = asyncio.ensure_future(watch(server, start + seconds))
        await asyncio.gather(watching, *clients)
        samples = watching.result()
        lasted_s = time.monotonic() - start
        await asyncio.sleep(1)
        slots = (await client.get("/slots")).json()
    tenths = [
        round(statistics.mean(size for second, size in samples if tenth <= 10 * second / seconds < tenth + 1))
        for tenth in range(10)
    ]
    return {
        "streams": options.streams,
        "slots": len(slots),
        "seconds": lasted_s,
        "finished": measured.finished,
        "aborted": measured.aborted,
        "wrong": measured.wrong[:10],
        "slots_in_use_at_the_end": sum(bool(slot["is_processing"]) for slot in slots),
        "tokens_per_s": measured.tokens / lasted_s,
        "first_token_s": percentiles(measured.first_s),
        "between_tokens_s": percentiles(measured.between_s),
        "resident_bytes": {"mean_of_each_tenth": tenths, "highest": max(size for _, size in samples)},
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the largest value."""
    cuts = statistics.quantiles(values, n=100)
    return {"p50": cuts[49], "p99": cuts[98], "most": max(values)}


def main() -> int:
    parser = argument_parser(__doc__, "artifact", "--threads", streams=64, minutes=10.0, seed=0)
    parser.add_argument("--requests", type=int, default=60, help="requests that differ; each is asked for alone first")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with ServedArtifact(options.artifact, threads=options.threads) as server:
        result = asyncio.run(measure(options, server))
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    _, second, *_, last = result["resident_bytes"]["mean_of_each_tenth"]
    grew = last > _LARGEST_GROWTH * second
    return int(bool(result["wrong"]) or result["slots_in_use_at_the_end"] > 0 or grew)


if __name__ == "__main__":
    sys.exit(main())
