"""Whole models of a pack: whether they equal eager PyTorch, and how fast they decode."""

import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.eager import EagerModel
from benchmarks.gpu.prepared import prepared
from benchmarks.gpu.weights import Array
from picompile_runtime import DoesNotFitError, Engine, load, measure
from picompile_runtime.artifact.manifest import WEIGHTS
from picompile_runtime.engine.timing import mean_shares

# The limit of errors, as a share of the largest logit.
LIMIT = 1e-3
_PROMPT, _DECODED = 5, 16
_CHECKED_ACTIVE = 0.2
# What layers add is much, so that it shows where something of it is wrong. Where the CPU rounds activations to bytes it
# is less (ADR 13): else predictors decide otherwise about neurons whose logits are near 0.
_CHECKED_ADDED, _CHECKED_ADDED_OF_BYTES = 0.5, 0.05
# Between a predictor's logit and its threshold, so that rounding decides about no neuron: such logits were within 4e-4
# where a right engine decided otherwise.
MARGIN = 2e-3
# Steps in which the hot and the cold neurons are counted apart.
_COUNTED = 16
# No prompt is read, and no context filled, that takes longer; no round of decoding takes longer, if it has as many
# tokens as must be. Where the CPU computes most of a large model a prompt takes minutes.
_PROMPT_S, _ROUND_S, _FEWEST_DECODED = 20.0, 4.0, 8
# The tokens of the first run of a large model.
_SMOKE_PROMPT, _SMOKE_DECODED = 64, 8
# So many are decoded to see how long one takes.
_STEPS = 2

Result = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The measurements of a variant: prompts of these lengths, and `repeats` rounds of `tokens` decoded tokens behind
    `depth` others.
    """

    prompts: tuple[int, ...]
    depth: int
    tokens: int
    repeats: int

    def within(self, context: int) -> "Plan":
        """Return this plan, shortened so that it fits a context."""
        prompts = (min(self.prompts[0], context // 2), *self.prompts[1:])
        return replace(self, prompts=prompts, tokens=min(self.tokens, context // 4))


def check_model(pack: Path, work: Path, entry: Mapping[str, Any], threads: int) -> Result:
    """A prompt and some tokens after it, against eager PyTorch: logits, and which token each of them chooses."""
    rounds_to_bytes = entry["quant"] != "f16" and entry["variant"] != "gpu"
    added = _CHECKED_ADDED_OF_BYTES if rounds_to_bytes else _CHECKED_ADDED
    firing = {"active": _CHECKED_ACTIVE, "added": added}
    with prepared(pack / entry["file"], work, **firing) as (folder, _), load(folder, threads) as engine:
        eager = EagerModel(engine.artifact, entry)
        tokens = eager.draw(np.random.default_rng(1), _PROMPT, _DECODED, MARGIN)
        logits = [engine.prefill(tokens[:_PROMPT]), *(engine.decode(token) for token in tokens[_PROMPT:])]
        expected = eager.logits(tokens, _PROMPT)[_PROMPT - 1 :]
        shares = _shares(engine)
    error, same, decided = compare_logits(np.stack(logits), expected.numpy(), LIMIT)
    # A model in which nothing or everything fires shows nothing.
    is_right = error <= LIMIT and same == decided and 0 < shares["all"] < 1
    tokens_of = {"rows": len(logits), "decided": decided, "same": same}
    return {"error": error, "limit": LIMIT, "computed": shares, "tokens": tokens_of, "is_right": is_right}


def compare_logits(found: Array, right: Array, limit: float) -> tuple[float, int, int]:
    """The largest difference as a share of the row's largest logit; same tokens; rows that decide about theirs.

    A row [vocab] decides where its two highest logits are further apart than two errors within `limit` may come to.
    """
    scale = np.abs(right).max(axis=1)
    difference = np.abs(found - right).max(axis=1) / scale
    error = float(difference.max()) if np.isfinite(difference).all() else math.inf
    second, first = np.sort(right, axis=1)[:, -2:].T
    decides = first - second > 2 * limit * scale
    same = decides & (found.argmax(axis=1) == right.argmax(axis=1))
    return error, int(same.sum()), int(decides.sum())


def smoke(pack: Path, work: Path, entry: Mapping[str, Any], threads: int, firing: Mapping[str, Any]) -> Result:
    """Read one prompt and decode some tokens: whether a large model works at all, before anything of it is measured."""
    _check_room(work, entry["weight_bytes"])
    with prepared(pack / entry["file"], work, **firing) as (folder, write_s):
        begin = time.perf_counter()
        with load(folder, threads) as engine:
            load_s = time.perf_counter() - begin
            length = min(_SMOKE_PROMPT, engine.context // 2)
            tokens = np.random.default_rng(1).integers(0, engine.vocab, length + _SMOKE_DECODED).tolist()
            engine.reset_firing()
            logits = [engine.prefill(tokens[:length])]
            begin = time.perf_counter()
            logits += [engine.decode(token) for token in tokens[length:]]
            decode_s = time.perf_counter() - begin
            shares = _shares(engine)
    is_right = all(np.isfinite(each).all() for each in logits) and 0 < shares["all"] < 1
    times = {"write_s": write_s, "load_s": load_s, "tokens_per_s": _SMOKE_DECODED / decode_s}
    return {"is_right": bool(is_right), "computed": shares, "threads": threads, **times}


def measure_model(
    pack: Path, work: Path, entry: Mapping[str, Any], threads: int, firing: Mapping[str, Any], plan: Plan
) -> Iterator[Result]:
    """Speed of one variant. A `partial` row comes as soon as decoding is measured, the whole one behind the prompts."""
    _check_room(work, entry["weight_bytes"])
    with prepared(pack / entry["file"], work, **firing) as (folder, write_s):
        for row in _measured(folder, threads, plan.within(entry["context"])):
            yield {"threads": threads, "write_s": write_s, **row}


def _check_room(work: Path, needed: int) -> None:
    """Raise DoesNotFitError if weights do not fit in the folder, where earlier ones may be that are written over."""
    kept = work / WEIGHTS
    free = shutil.disk_usage(work.parent).free + (kept.stat().st_size if kept.exists() else 0)
    if needed > free:
        raise DoesNotFitError(f"weights of {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free in {work.parent}")


def _measured(folder: Path, threads: int, plan: Plan) -> Iterator[Result]:
    before, begin = _free_bytes(), time.perf_counter()
    with load(folder, threads) as engine:
        load_s = time.perf_counter() - begin
        taken = None if before is None else before - (_free_bytes() or 0)
        # The context is filled to the depth by the second one at most; longer prompts wait until decoding is measured.
        prompts = prompt_speeds(engine, plan.prompts[:2])
        depth, tokens = _lengths(engine, plan, prompts)
        speed = measure(engine, plan.prompts[0], tokens, plan.repeats, depth=depth)
        engine.rewind(1)
        engine.reset_firing()
        counted = np.random.default_rng(2).integers(0, engine.vocab, _COUNTED).tolist()
        is_finite = all(np.isfinite(engine.decode(token)).all() for token in counted)
        row = {
            "tokens_per_s": speed["decode"]["tokens_per_s"],
            "stdev": speed["decode"]["stdev"],
            "depth": depth,
            "prompts": prompts,
            "host_bytes_per_s": speed["bandwidth_bytes_per_s"],
            "computed": _shares(engine) | {"all": speed["decode"]["computed_share"]},
            "taken_bytes": taken,
            "load_s": load_s,
            "step": step_of(speed),
            "is_right": bool(is_finite),
            "bench": speed,
        }
        if longer := plan.prompts[2:]:
            yield row | {"partial": True}
            row["prompts"] = prompts | prompt_speeds(engine, longer, [value for value in prompts.values() if value])
    yield row


def prompt_speeds(engine: Engine, lengths: Sequence[int], known: Sequence[float] = ()) -> dict[str, float | None]:
    """Tokens per second of prompts by their length as text, None where the context or `_PROMPT_S` is too short for one.

    If no speeds are `known`, the first is read twice, since what comes first takes longer.
    """
    rng, speeds = np.random.default_rng(3), dict[str, float | None]()
    last = known[-1] if known else None
    for length in lengths:
        # The length before tells how long this one will take.
        if length > engine.context - _STEPS or (last is not None and length / last > _PROMPT_S):
            speeds[str(length)] = None
            continue
        ids = rng.integers(0, engine.vocab, length).tolist()
        for _ in range(2 if last is None else 1):
            engine.rewind(0)
            start = time.perf_counter()
            engine.read(ids)
            last = length / (time.perf_counter() - start)
        speeds[str(length)] = last
    return speeds


def _lengths(engine: Engine, plan: Plan, prompts: Mapping[str, float | None]) -> tuple[int, int]:
    """Behind how many tokens how many are decoded: fewer of both where an engine is slow."""
    speed = [value for value in prompts.values() if value is not None][-1]
    first = plan.prompts[0]
    depth = plan.depth if plan.depth / speed <= _PROMPT_S else first
    times = []
    for token in range(_STEPS):
        start = time.perf_counter()
        engine.read([token])
        times.append(time.perf_counter() - start)
    tokens = max(_FEWEST_DECODED, min(plan.tokens, int(_ROUND_S / min(times))))
    return min(depth, engine.context - max(first, tokens)), tokens


def step_of(speed: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the parts of a decoded token's time, as `bench` has them; None where the GPU has no part in it."""
    step: dict[str, float] | None = (speed["hybrid"] or {}).get("step")
    return step


def _free_bytes() -> int | None:
    """Return the free bytes of the GPU's memory; None without a GPU."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def _shares(engine: Engine) -> dict[str, float]:
    """The mean share of neurons that were computed: of each part, and of all."""
    rows = engine.firing()
    parts = {row.part.part: [other for other in rows if other.part.part == row.part.part] for row in rows}
    return {name: mean_shares(of_part)[0] for name, of_part in (parts | {"all": rows}).items()}
