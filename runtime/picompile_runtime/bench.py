"""Speed of an engine, in tokens and as a share of what the machine's memory can deliver.

Decoding reads each weight that it uses once a token, so the memory's bandwidth is the limit; `bandwidth_share` says how
much of it the engine draws: bytes per token · tokens per second / bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from picompile_runtime.engine import Engine, Firing, mean_shares
from picompile_runtime.errors import RequestError
from picompile_runtime.program import STATS_ROW_BYTES, Call

_BANDWIDTH_BYTES = 2**29  # sixteen times a large last-level cache


def memory_bandwidth(threads: int, size_bytes: int = _BANDWIDTH_BYTES, repeats: int = 5) -> float:
    """Bytes per second that `threads` threads read: the best of `repeats` passes of numpy's sum over int64.

    The sum runs without Python's lock and is vectorized; one core reaches what its memory gives with it.
    """
    parts = np.array_split(np.ones(size_bytes // 8, np.int64), threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))
            seconds.append(time.perf_counter() - start)
    return size_bytes / min(seconds)


def measure(
    engine: Engine,
    prompt_tokens: int = 512,
    decode_tokens: int = 128,
    repeats: int = 5,
    ids: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Prefill and decode `repeats` times after one round that does not count; the result is that of `bench --json`.

    `ids` is the text to read (repeated or cut to length); random tokens of the vocabulary, always the same, without it.
    Which neurons fire depends on the text, and so does the speed of decoding. Every round decodes the same tokens.
    """
    if prompt_tokens < 1 or decode_tokens < 1 or repeats < 1:
        raise RequestError("a benchmark needs at least one prompt token, one decoded token and one repetition")
    if prompt_tokens + decode_tokens > engine.context:
        what = f"{prompt_tokens} prompt tokens and {decode_tokens} decoded ones"
        raise RequestError(f"{what} do not fit the context of {engine.context}; measure fewer")
    if ids is None:
        ids = np.random.Generator(np.random.PCG64(0)).integers(0, engine.vocab, prompt_tokens + decode_tokens).tolist()
    text = np.resize(np.asarray(ids), prompt_tokens + decode_tokens).tolist()
    prefill, decode = [], []
    for round_number in range(repeats + 1):
        engine.reset()
        if round_number == 1:
            engine.reset_firing()
        start = time.perf_counter()
        engine.prefill(text[:prompt_tokens])
        middle = time.perf_counter()
        for token in text[prompt_tokens:]:
            engine.decode(token)
        prefill.append(middle - start)
        decode.append(time.perf_counter() - middle)
        if progress:
            progress(round_number + 1, repeats + 1)
    bandwidth = memory_bandwidth(engine.threads)
    speed = Speed.of(decode_tokens, decode[1:])
    firing = engine.firing()
    computed_share, firing_share = mean_shares(firing)
    token_bytes = bytes_per_token(engine, firing, prompt_tokens + (decode_tokens + 1) / 2)
    return {
        "prefill": vars(Speed.of(prompt_tokens, prefill[1:])),
        "decode": {
            **vars(speed),
            "bytes_per_token": round(token_bytes),
            "bandwidth_share": token_bytes * speed.tokens_per_s / bandwidth,
            "firing_share": firing_share,
            "computed_share": computed_share,
        },
        "bandwidth_bytes_per_s": bandwidth,
        "threads": engine.threads,
    }


@dataclass(frozen=True)
class Speed:
    """Mean speed of several rounds, and the standard deviation between them (0.0 for a single one)."""

    tokens_per_s: float
    stdev: float

    @classmethod
    def of(cls, tokens: int, seconds: Sequence[float]) -> Speed:
        """The speed of rounds of `tokens` tokens each."""
        speeds = [tokens / second for second in seconds]
        return cls(float(np.mean(speeds)), float(np.std(speeds, ddof=1)) if len(speeds) > 1 else 0.0)


def bytes_per_token(engine: Engine, firing: Sequence[Firing], tokens: float) -> float:
    """Bytes of weights and of KV cache that one decode step reads when `tokens` tokens are in the cache."""
    program = engine.artifact.program
    cache_bytes = sum(tensor.size_bytes for tensor in program.state.values()) * tokens / program.context
    shares = {row.part.stats_row: row.computed_share for row in firing}
    weights = (call.weight_bytes - _idle_bytes(engine, call, shares) for call in program.functions["decode"])
    return cache_bytes + sum(weights)


def _idle_bytes(engine: Engine, call: Call, shares: dict[int, float]) -> float:
    """What a feed-forward call leaves unread: of its last matrix argument, the rows that it does not need."""
    rows = [arg.view.offset // STATS_ROW_BYTES for arg in call.args if (arg.kind, arg.name) == ("buffer", "stats")]
    matrices = [arg.name for arg in call.args if arg.kind == "weight" and len(arg.view.shape) == 2]
    if not rows or not matrices:
        return 0.0
    return engine.artifact.tensors[matrices[-1]].size_bytes * (1 - shares.get(rows[0], 1.0))
