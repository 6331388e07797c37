"""Whole models of a pack: whether they equal eager PyTorch, and how fast they decode."""

import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _gpu_eager import EagerModel
from _gpu_weights import Array, write_artifact

from picompile_runtime import DoesNotFitError, Engine, load, measure
from picompile_runtime.firing import mean_shares

# Of the largest logit. On the CPU, activations are rounded to bytes where weights are: see docs/decisions.md.
LIMIT, LIMIT_OF_BYTES = 1e-3, 1e-2
_PROMPT, _DECODED = 5, 16
_CHECKED_ACTIVE = 0.2
# What layers add is much, so that it shows where something of it is wrong. Where the CPU rounds activations to bytes it
# is less: else predictors decide otherwise about neurons whose logits are near 0.
_CHECKED_ADDED, _CHECKED_ADDED_OF_BYTES = 0.5, 0.05
# Steps in which the hot and the cold neurons are counted apart.
_COUNTED = 16

Result = dict[str, Any]


@contextmanager
def made(archive: Path, work: Path, **firing: Any) -> Iterator[Path]:
    """A whole artifact of a pack in the folder `work`, for a while. `firing` are options of `write_artifact`."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        write_artifact(archive, work, **firing)
        yield work
    finally:
        shutil.rmtree(work)


def check_model(pack: Path, work: Path, entry: Mapping[str, Any], threads: int | None, torch_device: str) -> Result:
    """A prompt and some tokens after it, against eager PyTorch: logits, and which token each of them chooses."""
    on_host = entry["quant"] != "f16" and entry["variant"] != "gpu"
    limit, added = (LIMIT_OF_BYTES, _CHECKED_ADDED_OF_BYTES) if on_host else (LIMIT, _CHECKED_ADDED)
    firing = {"active": _CHECKED_ACTIVE, "skew": True, "added": added}
    with made(pack / entry["file"], work, **firing) as folder, load(folder, threads) as engine:
        tokens = np.random.default_rng(1).integers(0, engine.vocab, _PROMPT + _DECODED).tolist()
        logits = [engine.prefill(tokens[:_PROMPT]), *(engine.decode(token) for token in tokens[_PROMPT:])]
        expected = EagerModel(engine.artifact, entry, torch_device).logits(tokens, _PROMPT)[_PROMPT - 1 :]
        shares = _shares(engine)
    error, same, decided = compare_logits(np.stack(logits), expected.cpu().numpy(), limit)
    # A model in which nothing or everything fires shows nothing.
    is_right = error <= limit and same == decided and 0 < shares["all"] < 1
    tokens_of = {"rows": len(logits), "decided": decided, "same": same}
    return {"error": error, "limit": limit, "computed": shares, "tokens": tokens_of, "is_right": is_right}


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


def measure_model(
    pack: Path,
    work: Path,
    entry: Mapping[str, Any],
    threads: int | None,
    firing: Mapping[str, Any],
    lengths: tuple[int, int, int],
) -> Result:
    """Decode and prefill speed of one variant. `lengths`: tokens of the prompt, decoded ones, rounds."""
    needed, free = entry["weight_bytes"], shutil.disk_usage(work.parent).free
    if needed > free:
        raise DoesNotFitError(f"weights of {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free in {work.parent}")
    with made(pack / entry["file"], work, **firing) as folder:
        before = _free_bytes()
        with load(folder, threads) as engine:
            taken = None if before is None else before - (_free_bytes() or 0)
            speed = measure(engine, *lengths)
            engine.rewind(1)
            engine.reset_firing()
            tokens = np.random.default_rng(2).integers(0, engine.vocab, _COUNTED).tolist()
            is_finite = all(np.isfinite(engine.decode(token)).all() for token in tokens)
            shares = _shares(engine) | {"all": speed["decode"]["computed_share"]}
    return {
        "tokens_per_s": speed["decode"]["tokens_per_s"],
        "stdev": speed["decode"]["stdev"],
        "prefill_tokens_per_s": speed["prefill"]["tokens_per_s"],
        "computed": shares,
        "taken_bytes": taken,
        "overlap": overlaps(speed),
        "is_right": bool(is_finite),
        "bench": speed,
    }


def overlaps(speed: Mapping[str, Any]) -> list[float] | None:
    """Two figures for the overlap of both sides, as a share of the shorter one; None where there is one side.

    The first is of steps whose calls were stamped. There each kernel of the GPU is launched by itself, so that the gaps
    between them count as computing. The second is what a step saves that was not stamped: of the time that both sides
    compute in turn what it falls short of.
    """
    hybrid = speed["hybrid"]
    if hybrid is None or not min(hybrid["host_s_per_token"], hybrid["device_s_per_token"]):
        return None
    host, device = hybrid["host_s_per_token"], hybrid["device_s_per_token"]
    saved = host + device - 1 / speed["decode"]["tokens_per_s"]
    return [hybrid["overlap_share"], max(0.0, saved / min(host, device))]


def _free_bytes() -> int | None:
    """Of the GPU's memory."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def _shares(engine: Engine) -> dict[str, float]:
    """The mean share of neurons that were computed: of each part, and of all."""
    rows = engine.firing()
    parts = {row.part.part: [other for other in rows if other.part.part == row.part.part] for row in rows}
    return {name: mean_shares(of_part)[0] for name, of_part in (parts | {"all": rows}).items()}
