"""Speed of an engine, in tokens and as a share of what the machine's memory can deliver.

Decoding reads each weight that it uses once a token, so the memory's bandwidth sets a floor to its time: the bytes that
a token must move / bandwidth. The bandwidth is measured before and after each round, since it moves: other work on the
machine, or on the host of a virtual one, takes its part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from picompile_runtime.engine import Engine
from picompile_runtime.errors import RequestError
from picompile_runtime.firing import mean_shares
from picompile_runtime.floor import KINDS, KernelTime, kind, step_bytes
from picompile_runtime.rounds import Lengths, Round, Rounds


@dataclass(frozen=True)
class Speed:
    """Median speed of several rounds, and the standard deviation between them (0.0 for a single one)."""

    tokens_per_s: float
    stdev: float

    @classmethod
    def of(cls, tokens: int, seconds: Sequence[float]) -> Speed:
        """The speed of rounds of `tokens` tokens each."""
        speeds = [tokens / second for second in seconds]
        return cls(float(np.median(speeds)), float(np.std(speeds, ddof=1)) if len(speeds) > 1 else 0.0)


def measure(
    engine: Engine,
    prompt_tokens: int = 512,
    decode_tokens: int = 128,
    repeats: int = 5,
    ids: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    depth: int | None = None,
    batch: int = 1,
) -> dict[str, Any]:
    """Prefill and decode `repeats` times after one round that does not count; the result is that of `bench --json`.

    `ids` is the text to read (repeated or cut to length); random tokens of the vocabulary, always the same, without it.
    Which neurons fire depends on the text, and so does the speed of decoding. Every round decodes the same tokens.
    `depth` and `batch`: see `Lengths`. Raises RequestError for what does not fit.
    """
    lengths = Lengths(prompt_tokens, decode_tokens, depth, batch)
    if repeats < 1:
        raise RequestError("a benchmark needs at least one prompt token, one decoded token and one repetition")
    runner, rounds = Rounds(engine, lengths, ids), []
    for number in range(repeats + 1):
        if number == 1:
            engine.reset_firing()
        rounds.append(runner.run())
        if progress:
            progress(number + 1, repeats + 1)
    return _result(engine, lengths, rounds[1:])


def _result(engine: Engine, lengths: Lengths, rounds: Sequence[Round]) -> dict[str, Any]:
    """The medians of the rounds."""
    bandwidths = [float(np.median(each.bytes_per_s)) for each in rounds]
    return {
        "prefill": asdict(Speed.of(lengths.prompt, [each.prefill_s for each in rounds])),
        "decode": _decode(engine, lengths, rounds, bandwidths),
        "bandwidth_bytes_per_s": float(np.median(bandwidths)),
        "bandwidth_best_bytes_per_s": float(max(each.bytes_per_s.max() for each in rounds)),
        "threads": engine.threads,
    }


def _decode(
    engine: Engine, lengths: Lengths, rounds: Sequence[Round], bandwidths: Sequence[float]
) -> dict[str, Any]:  # fmt: skip
    counted = engine.firing(lengths.function)
    # Kernels that compute every neuron of a batch do not count them.
    is_counted = lengths.batch == 1 or any(row.computed_share for row in counted)
    firing = counted if is_counted else [replace(row, computed_share=1.0) for row in counted]
    computed_share, firing_share = mean_shares(firing)
    # What several sequences read of a block is at most what each of them reads, and no more than all of it.
    read = [replace(row, computed_share=min(1.0, row.computed_share * lengths.batch)) for row in firing]
    cached = lengths.decode_depth + (lengths.decode + 1) / 2
    of_calls = np.array(step_bytes(engine.artifact, lengths.function, read, cached, lengths.batch)) / lengths.batch
    token_bytes, tokens = float(of_calls.sum()), lengths.batch * lengths.decode
    pairs = zip(rounds, bandwidths, strict=True)
    kinds = np.array([kind(call) for call in engine.artifact.program.functions[lengths.function]])
    kernels = []
    for name in (name for name in KINDS if name in kinds):
        of_kind = kinds == name
        seconds = float(np.median([each.call_s[of_kind].sum() / tokens for each in rounds]))
        moved = float(of_calls[of_kind].sum())
        kernels.append(KernelTime(name, int(of_kind.sum()), moved, seconds, moved / float(np.median(bandwidths))))
    return {
        **asdict(Speed.of(tokens, [each.decode_s for each in rounds])),
        "depth": lengths.decode_depth,
        "batch": lengths.batch,
        "bytes_per_token": round(token_bytes),
        "floor_tokens_per_s": float(np.median(bandwidths)) / token_bytes,
        "bandwidth_share": float(np.median([token_bytes / speed * tokens / each.decode_s for each, speed in pairs])),
        "firing_share": firing_share if is_counted else None,
        "computed_share": computed_share,
        "kernels": [kernel.to_json() for kernel in kernels],
    }
