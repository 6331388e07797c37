"""Whole models of a pack: whether they equal eager PyTorch, and how fast they decode."""

import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _gpu_eager import EagerModel
from _gpu_weights import unpack_artifact, write_weights

from picompile_runtime import Engine, load, measure
from picompile_runtime.errors import DoesNotFitError

# Of the largest logit. On the CPU, activations are rounded to bytes where weights are: see docs/decisions.md.
LIMIT, LIMIT_OF_BYTES = 1e-3, 1e-2
_PROMPT, _DECODED = 5, 4
# What layers add is much, so that it shows where something of it is wrong.
_CHECKED_ACTIVE, _CHECKED_ADDED = 0.2, 0.5

Result = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How models run: where their weights are made, and how long they decode."""

    pack: Path
    work: Path
    active: float
    threads: int | None
    prompt: int
    tokens: int
    repeats: int


@contextmanager
def made(settings: Settings, entry: Mapping[str, Any], **firing: Any) -> Iterator[Path]:
    """A whole artifact of a pack, for a while. `firing` are options of `write_weights`."""
    folder = settings.work / Path(entry["file"]).stem
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        unpack_artifact(settings.pack / entry["file"], folder)
        write_weights(folder, **firing)
        yield folder
    finally:
        shutil.rmtree(folder)


def check_model(settings: Settings, entry: Mapping[str, Any], torch_device: str) -> Result:
    """A prompt and some tokens after it, against eager PyTorch: the largest difference of a logit."""
    firing = {"active": _CHECKED_ACTIVE, "skew": True, "added": _CHECKED_ADDED}
    with made(settings, entry, **firing) as folder, load(folder, settings.threads) as engine:
        tokens = np.random.default_rng(1).integers(0, engine.vocab, _PROMPT + _DECODED).tolist()
        found = [engine.prefill(tokens[:_PROMPT])]
        found += [engine.decode(token) for token in tokens[_PROMPT:]]
        expected = EagerModel(engine.artifact, entry, torch_device).logits(tokens, _PROMPT)[_PROMPT - 1 :]
        right = expected.cpu().numpy()
        difference = np.abs(np.stack(found) - right).max(axis=1) / np.abs(right).max(axis=1)
        shares = _shares(engine)
    error = float(difference.max()) if np.isfinite(difference).all() else math.inf
    on_host = entry["quant"] != "f16" and entry["variant"] != "gpu"
    limit = LIMIT_OF_BYTES if on_host else LIMIT
    label = f"{entry['model']} {entry['quant']} {entry['variant']}"
    # A model in which nothing or everything fires shows nothing.
    is_right = error <= limit and 0 < shares["all"] < 1
    return {"label": label, "error": error, "limit": limit, "computed": shares, "is_right": is_right}


def measure_model(settings: Settings, entry: Mapping[str, Any], skew: bool) -> Result:
    """Decode and prefill speed of one variant; `reason` where it cannot be had."""
    result = {key: entry[key] for key in ("model", "quant", "variant", "gpu_bytes", "hot", "resident_layers")}
    result |= {"skew": skew, "active": settings.active}
    needed, free = entry["weight_bytes"], shutil.disk_usage(settings.work).free
    if needed > free:
        return result | {"reason": f"weights of {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB free in {settings.work}"}
    try:
        with (
            made(settings, entry, active=settings.active, skew=skew) as folder,
            load(folder, settings.threads) as engine,
        ):
            speed = measure(engine, settings.prompt, settings.tokens, settings.repeats)
            engine.rewind(1)
            is_finite = bool(np.isfinite(engine.decode(1)).all())
            shares = _shares(engine)
    except (DoesNotFitError, MemoryError, OSError) as error:
        return result | {"reason": str(error)}
    decode = speed["decode"]
    return result | {
        "tokens_per_s": decode["tokens_per_s"],
        "stdev": decode["stdev"],
        "prefill_tokens_per_s": speed["prefill"]["tokens_per_s"],
        "computed": shares,
        "is_finite": is_finite,
        "overlap_share": _find(speed, "overlap_share"),
        "bench": speed,
    }


def _shares(engine: Engine) -> dict[str, float]:
    """The mean share of neurons that were computed: of each part, and of all."""
    found: dict[str, list[tuple[float, int]]] = {}
    for row in engine.firing():
        for part in {row.part.part, "all"}:
            found.setdefault(part, []).append((row.computed_share, row.part.neurons))
    return {part: sum(a * n for a, n in rows) / sum(n for _, n in rows) for part, rows in found.items()}


def _find(content: Any, key: str) -> Any:
    """The value under `key`, wherever it is."""
    if not isinstance(content, dict):
        return None
    if key in content:
        return content[key]
    return next((value for value in (_find(each, key) for each in content.values()) if value is not None), None)
