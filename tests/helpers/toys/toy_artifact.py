"""Artifacts of a toy model whose kernels are plain C: the runtime is tested whole, without the compiler.

The model adds up what it has seen, each token's row of a table weighted by the cosine of its distance, so that every
token at every position matters; `reference_logits` is the same in numpy. A *script* makes it say what a test wants.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np

from helpers.compiled import compile_once
from picompile_runtime.artifact.manifest import sealed
from picompile_runtime.devices.machine import cpu_features

HERE = Path(__file__).parent
NATIVE = HERE.parents[2] / "codegen" / "picompile_codegen" / "build" / "native"
HOST_C = NATIVE / "host.c"
DIM, NEURONS = 16, 32


def build_library(output: Path, *definitions: str, also: Sequence[Path] = ()) -> Path:
    """Build one library of the toy kernels and the code that every library has. A definition is `NAME=value`."""
    flags = ["-O2", "-g", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-shared", "-fPIC"]
    sources = [HOST_C, NATIVE / "read.c", HERE / "toy_kernels.c", *also]
    link = ["-lpthread", "-lm", "-Wl,-Bsymbolic", "-Wl,--build-id=none"]
    defined = [f"-D{definition}" for definition in definitions]

    def compile_library(library: Path) -> None:
        subprocess.run(["gcc", *flags, *defined, "-o", str(library), *map(str, sources), *link], check=True)

    compile_once(output, [*flags, *defined, *sources, NATIVE, *sorted(HERE.glob("*.[ch]"))], compile_library)
    return output


@dataclass(frozen=True)
class Toy:
    """The parts of the toy model: `table` and `head` [vocab, DIM], `script` [context] (-1 where it says nothing)."""

    table: np.ndarray
    head: np.ndarray
    script: np.ndarray

    @property
    def vocab(self) -> int:
        return len(self.table)


def make_toy(vocab: int = 50, context: int = 40, script: Mapping[int, int] | None = None) -> Toy:
    """A random model; `script` maps a position to the token that shall follow it."""
    random = np.random.default_rng(vocab)
    wanted = np.full(-(-context // 16) * 16, -1, np.int32)
    for position, token in (script or {}).items():
        wanted[position] = token
    table, head = random.normal(size=(2, vocab, DIM)).astype(np.float32)
    return Toy(table, head, wanted)


def reference_logits(toy: Toy, ids: Sequence[int]) -> np.ndarray:
    """[tokens, vocab], computed in float64."""
    distance = np.arange(len(ids))[:, None] - np.arange(len(ids))[None, :]
    mixed = np.where(distance >= 0, np.cos(distance), 0) @ toy.table[list(ids)].astype(np.float64)
    logits = mixed @ toy.head.T.astype(np.float64)
    for position, wanted in enumerate(toy.script[: len(ids)]):
        if wanted >= 0:
            logits[position, wanted] += 100
    return logits


def safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Return a safetensors file as the compiler writes it: every tensor starts at a multiple of 64 bytes."""
    names = {"float32": "F32", "int32": "I32", "uint8": "U8", "float16": "F16"}
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        span = [len(data), len(data) + tensor.nbytes]
        header[name] = {"dtype": names[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": span}
        data += tensor.tobytes()
        assert len(data) % 64 == 0
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text + data


class Arena:
    """Buffers one behind the other in each memory."""

    def __init__(self, buffers: dict[str, Any]) -> None:
        self.buffers, self.ends = buffers, {"host": 0, "accelerator": 0, "shared": 0}

    def place(self, name: str, dtype: str, shape: list[int], memory: str = "host") -> None:
        offset = self.ends[memory]
        self.buffers[name] = {"dtype": dtype, "shape": shape, "offset": offset, "memory": memory}
        self.ends[memory] = -(-(offset + int(np.prod(shape)) * np.dtype(dtype).itemsize) // 64) * 64


def toy_program(toy: Toy, context: int, chunk: int, sequences: int = 1) -> dict[str, Any]:
    """The program.json of the toy model."""
    arena = Arena({})
    buffer = arena.place
    buffer("step", "int32", [8])
    most = max(chunk, sequences)
    for name in ("tokens", "positions", "slots"):
        buffer(name, "int32", [most])
    buffer("stats", "int64", [2, 2])
    buffer("logits", "float32", [1, toy.vocab])
    buffer("logits.score", "float32", [chunk, toy.vocab])
    if sequences > 1:
        buffer("stats.batch", "int64", [2, 2])
        buffer("logits.batch", "float32", [sequences, toy.vocab])
    for name in ("x", "y"):
        buffer(name, "float32", [most, DIM])
    buffer("last", "float32", [1, DIM])

    def call(kernel: str, *args: dict[str, Any], op: str = "toy", weight_bytes: int = 0) -> dict[str, Any]:
        all_args = [{"buffer": "step"}, *args]
        return {"kernel": kernel, "args": all_args, "op": op, "layer": None, "weight_bytes": weight_bytes}

    def body(rows: int) -> list[dict[str, Any]]:
        x, y = ({"buffer": name, "shape": [rows, DIM]} for name in "xy")
        ids, positions = ({"buffer": name, "shape": [rows]} for name in ("tokens", "positions"))
        return [
            call("toy_embed", ids, {"weight": "table"}, x, op="embedding", weight_bytes=4 * DIM),
            call("toy_cache", x, {"state": "k.0"}, op="cache"),
            call("toy_mix", positions, {"state": "k.0"}, y, op="attention"),
        ]

    def batch() -> list[dict[str, Any]]:
        x, y = ({"buffer": name, "shape": [sequences, DIM]} for name in "xy")
        ids, positions, slots = ({"buffer": name, "shape": [sequences]} for name in ("tokens", "positions", "slots"))
        cache, stats = {"state": "k.0"}, {"buffer": "stats.batch", "offset": 16, "shape": [2]}
        row, last = {"buffer": "y", "shape": [1, DIM]}, {"buffer": "last"}
        return [
            call("toy_embed", ids, {"weight": "table"}, x, op="embedding", weight_bytes=4 * DIM * sequences),
            call("toy_cache_batch", x, cache, positions, slots, op="cache"),
            call("toy_mix_batch", positions, slots, cache, y, op="attention"),
            call("toy_ffn", row, {"weight": "neurons"}, stats, last, op="ffn", weight_bytes=4 * DIM * NEURONS),
            head(y, "logits.batch"),
        ]

    def head(source: dict[str, Any], logits: str) -> dict[str, Any]:
        weights = [{"weight": "head"}, {"weight": "script"}]
        return call("toy_head", source, *weights, {"buffer": logits}, op="head", weight_bytes=4 * DIM * toy.vocab)

    one, rows = {"buffer": "last"}, {"buffer": "y", "shape": [chunk, DIM]}
    y = {"buffer": "y", "shape": [1, DIM]}
    stats = {"buffer": "stats", "offset": 16, "shape": [2]}
    ffn = call("toy_ffn", y, {"weight": "neurons"}, stats, one, op="ffn", weight_bytes=4 * DIM * NEURONS)
    return {
        "schema": 4,
        "context": context,
        "chunk": chunk,
        "vocab": toy.vocab,
        "layers": 1,
        "sequences": sequences,
        "arena_bytes": arena.ends["host"],
        "accelerator_arena_bytes": 0,
        "shared_arena_bytes": 0,
        "buffers": arena.buffers,
        "state": {"k.0": {"layer": 0, "dtype": "float32", "shape": [1, context, DIM], "grows": 1}},
        "functions": {
            "decode": [*body(1), ffn, head(one, "logits")],
            "prefill": body(chunk)[:2],
            "prefill_last": [*body(chunk), call("toy_last", rows, one), head(one, "logits")],
            "score": [*body(chunk), head(rows, "logits.score")],
            **({"batch": batch()} if sequences > 1 else {}),
        },
        "logits": {
            "decode": "logits",
            "prefill_last": "logits",
            "score": "logits.score",
            **({"batch": "logits.batch"} if sequences > 1 else {}),
        },
        "streamed": [],
        "ffn": [{"layer": 0, "part": "all", "neurons": NEURONS, "predictor": "exact", "stats_row": 1}],
    }


def set_at(*path: Any) -> Callable[[Any], None]:
    """Return a change of JSON: it sets the value that comes last in `path` at the keys before it."""

    def change(content: Any) -> None:
        *keys, last, value = path
        reduce(getitem, keys, content)[last] = value

    return change


def write_artifact(
    folder: Path,
    library: Path,
    toy: Toy | None = None,
    context: int = 40,
    chunk: int = 8,
    sequences: int = 1,
    program: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
    manifest: Mapping[str, Any] | None = None,
    weights: bytes | None = None,
) -> Path:
    """Write the artifact of `toy`; `program` replaces fields of program.json, `manifest` those of manifest.json."""
    toy = toy or make_toy(context=context)
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels" / "host.so").write_bytes(library.read_bytes())
    table = {"table": toy.table, "head": toy.head, "script": toy.script}
    tensors = {**table, "neurons": np.zeros((NEURONS, DIM), np.float32)}
    (folder / "weights.safetensors").write_bytes(weights if weights is not None else safetensors(tensors))
    (folder / "program.json").write_text(json.dumps({**toy_program(toy, context, chunk, sequences), **(program or {})}))
    for name, text in (texts or {}).items():
        (folder / name).write_text(text)
    write_manifest(folder, context, chunk, {"sequences": sequences, **(manifest or {})})
    return folder


def code_entry(
    isa: str = "toy",
    file: str = "kernels/host.so",
    machine: str | None = None,
    features: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the manifest's entry for one variant of the code; by default it runs on this machine."""
    needed = sorted(cpu_features())[:3] if features is None else [*features]
    return {"isa": isa, "machine": machine or platform.machine(), "features": needed, "file": file}


def write_manifest(folder: Path, context: int = 40, chunk: int = 8, changes: Mapping[str, Any] | None = None) -> None:
    """A manifest for whatever is in the folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "manifest.json"]
    listed = {
        str(path.relative_to(folder)): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
    }
    manifest = {
        "format": "picompile-artifact",
        "schema": 4,
        "picompile": "0.1.0",
        "abi": 1,
        "target": "cpu",
        "code": [code_entry()],
        "files": listed,
        "model": {"name": "toy", "eos_token_ids": [0]},
        "quant": "f32",
        "predictor": "none",
        "kv_dtype": "float32",
        "context": context,
        "chunk": chunk,
        "sequences": 1,
    }
    (folder / "manifest.json").write_bytes(sealed({**manifest, **(changes or {})}))
