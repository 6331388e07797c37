"""Folders to report on: of random figures, in the form that profile, train and compile write."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from picompile_runtime.artifact.manifest import sealed

FINGERPRINT = "5a" * 32


def write_profile(folder: Path, *, seed: int, layers: int = 3, neurons: int = 37, **changes: Any) -> list[np.ndarray]:
    """A profile of random counts, which are returned; the last layer has a neuron that never fired."""
    random = np.random.default_rng(seed)
    tokens, window, hidden, samples = 8 * 24, 24, 5, 7
    counts = [random.binomial(tokens, random.beta(0.4, 2, neurons)).astype(np.int64) for _ in range(layers)]
    counts[-1][neurons // 2] = 0
    (folder / "layers").mkdir(parents=True)
    rows = []
    for layer, values in enumerate(counts):
        tensors = {
            "counts": values,
            "contribution": (values * random.gamma(2, 1, neurons)).astype(np.float32),
            "input": random.normal(size=(samples, hidden)).astype(np.float16),
            "positions": np.arange(samples, dtype=np.int64),
        }
        save_file(tensors, folder / "layers" / f"{layer:03d}.safetensors")
        figures = {"firing_share": 0.1, "neurons_for_80_percent": 0.2, "never_fired": 1, "place": "stream"}
        rows.append({"layer": layer, "neurons": neurons, "threshold": 0.25, **figures})
    tokens_file = {"calibration": np.zeros((8, window), np.int32), "held_out": np.zeros((2, window), np.int32)}
    save_file(tokens_file, folder / "tokens.safetensors")
    calibration = {"sources": ["some prose"], "tokens": tokens, "window": window, "sha256": "00"}
    content = {
        "format": "picompile-profile",
        "schema": 1,
        "model": {"fingerprint": FINGERPRINT, "name": "some-model", "hidden": hidden},
        "calibration": {**calibration, "held_out_source": "its end", "held_out_tokens": 2 * window},
        "samples": samples,
        "thresholds": None,
        "complete": True,
        "layers": rows,
    }
    _write(folder / "profile.json", {**content, **changes})
    return counts


def predictor_row(layer: int, seed: int, *, kind: str = "learned", measured: bool = True) -> dict[str, Any]:
    """An entry of predictors.json with figures that are possible."""
    random = np.random.default_rng((seed, layer))
    learned = kind.startswith("learned")
    row: dict[str, Any] = {"layer": layer, "kind": kind, "threshold": float(random.normal())}
    if learned:
        rank = int(random.integers(2, 9))
        row |= {"input": "stream", "rank": rank, "parameters": rank * 42 + 37, "bytes_f16": 2 * (rank * 42 + 37)}
    if measured:
        firing, ratio, missed = random.uniform(0.05, 0.3), random.uniform(1.1, 1.6), random.uniform(0.001, 0.01)
        row |= {"firing_share": firing, "computed_share": firing * ratio, "skewness": random.uniform(0.4, 0.9)}
        row |= {"recall": 1 - 3 * missed, "weighted_recall": 1 - missed, "precision": (1 - 3 * missed) / ratio}
    return row


def curve(layer: int, rank: int) -> dict[str, Any]:
    """A candidate: the more is computed, the less is missed."""
    ratios = np.linspace(1, 3, 5)
    points = [{"threshold": -float(x), "computed_ratio": float(x), "weighted_recall": 1 - 0.1**x} for x in ratios]
    return {"layer": layer, "rank": rank, "input": "stream", "points": points}


def write_predictors(folder: Path, rows: Sequence[Mapping[str, Any]], **changes: Any) -> None:
    """Predictors with these entries; the weights of learned ones are random."""
    random = np.random.default_rng(0)
    tensors = {}
    for row in rows:
        if row["kind"].startswith("learned"):
            shapes = {"fc1": (row["rank"], 5), "fc2": (37, row["rank"]), "bias": (37,)}
            for part, shape in shapes.items():
                tensors[f"layers.{row['layer']}.{part}"] = random.normal(size=shape).astype(np.float16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "predictors.safetensors")
    model = {"fingerprint": FINGERPRINT, "name": "some-model"}
    content = {
        "format": "picompile-predictors",
        "schema": 1,
        "model": model,
        "accuracy": {},
        "layers": rows,
        "curves": [],
    }
    _write(folder / "predictors.json", {**content, **changes})


def write_artifact(folder: Path, **report: Any) -> None:
    """The small files of an artifact of two layers: one in two parts behind a predictor, one whole."""
    folder.mkdir(parents=True)
    calls = [
        _call("embedding", None, ["table"]),
        _call("predict", 0, ["fc1", "fc2"]),
        _call("ffn", 0, ["hot"], row=0),
        _call("ffn", 0, ["cold"], row=1),
        _call("ffn", 1, ["gate", "rest"], row=2),
        _call("head", None, ["table"]),
    ]
    sizes = {"table": 700, "fc1": 30, "fc2": 40, "hot": 100, "cold": 200, "gate": 150, "rest": 250, "unread": 9}
    parts = [(0, "hot", 11, "learned"), (0, "cold", 26, "learned"), (1, "all", 37, "exact")]
    ffn = [
        {"layer": layer, "part": part, "neurons": neurons, "predictor": predictor, "stats_row": row}
        for row, (layer, part, neurons, predictor) in enumerate(parts)
    ]
    _write(folder / "program.json", {"functions": {"decode": calls}})
    _write(folder / "report.json", {"schema": 1, "ffn": ffn, "weight_bytes": sizes, "weight_formats": {}, **report})
    manifest = {
        "format": "picompile-artifact",
        "schema": 4,
        "abi": 1,
        "target": "cpu",
        "code": [{"isa": "x86-64-v3", "machine": "x86_64", "features": ["avx2"], "file": "kernels/host.so"}],
        "model": {"name": "some-model", "layers": 2, "hidden": 5, "ffn": 37, "activation": "relu"},
        "quant": "q8",
        "predictor": "exact+learned",
        "kv_dtype": "float16",
        "context": 64,
        "sequences": 1,
        "chunk": 8,
        "files": {
            name: {"bytes": 1, "sha256": "0" * 64}
            for name in ("program.json", "report.json", "weights.safetensors", "kernels/host.so")
        },
    }
    (folder / "manifest.json").write_bytes(sealed(manifest))


def _call(operator: str, layer: int | None, weights: Sequence[str], row: int | None = None) -> dict[str, Any]:
    arguments: list[dict[str, Any]] = [{"weight": name} for name in weights]
    if row is not None:
        # An offset of zero is left out.
        arguments.append({"buffer": "stats", "shape": [2], **({"offset": 16 * row} if row else {})})
    return {"kernel": "k", "args": arguments, "op": operator, "layer": layer, "weight_bytes": 0}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
