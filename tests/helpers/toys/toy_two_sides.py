"""The toy artifact with an accelerator, a CPU partition: it runs everything between embedding and head.

Its kernels are those of the toy artifact, so its logits have the same bits. The cache and the counts of neurons are in
the accelerator's memory; the values that are transferred are in shared memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from helpers.toys.toy_artifact import (
    DIM,
    HERE,
    NEURONS,
    Toy,
    build_library,
    code_entry,
    toy_program,
    write_artifact,
    write_manifest,
)

HOT = "kernels/hot.toy.so"

Json = dict[str, Any]


def build_hybrid_library(output: Path, *definitions: str) -> Path:
    """The toy kernels with those that exchange something. A definition is `NAME=value`, of host.c."""
    return build_library(output, *definitions, also=[HERE / "toy_exchange.c"])


def hybrid_program(toy: Toy, context: int, chunk: int, sequences: int) -> Json:
    """The program.json. `last`, `x` and `y` have a place on both sides, the inputs and statistics two."""
    program = toy_program(toy, context, chunk, sequences)
    most, memory = max(chunk, sequences), _Memory(program["buffers"])
    for name, dtype, shape in (
        *((name, "int32", [most]) for name in ("tokens", "positions", "slots")),
        ("step", "int32", [8]),
        ("x", "float32", [most, DIM]),
        ("sent", "float32", [most, DIM]),
        ("flags", "int32", [2, 16]),
        ("abandoned", "int32", [16]),
    ):
        memory.place(name, dtype, shape, "shared")
    twins = {name: program["buffers"][name] for name in ("step", "positions", "slots", "stats", "stats.batch")}
    for name, buffer in twins.items():
        memory.place(f"{name}.device", buffer["dtype"], buffer["shape"], "device")
    for name, rows in (("x.device", most), ("y.device", most), ("last.device", 1)):
        memory.place(name, "float32", [rows, DIM], "device")
    for name in ("y", "last"):
        del program["buffers"][name]
    program["state"]["k.0"]["memory"] = "device"
    return {
        **program,
        "device_arena_bytes": memory.ends["device"],
        "shared_arena_bytes": memory.ends["shared"],
        "functions": _functions(chunk, sequences),
    }


class _Memory:
    """Buffers one behind the other."""

    def __init__(self, buffers: Json) -> None:
        self._buffers, self.ends = buffers, {"device": 0, "shared": 0}

    def place(self, name: str, dtype: str, shape: list[int], memory: str) -> None:
        offset = self.ends[memory]
        self._buffers[name] = {"dtype": dtype, "shape": shape, "offset": offset, "memory": memory}
        self.ends[memory] = -(-(offset + int(np.prod(shape)) * np.dtype(dtype).itemsize) // 64) * 64


def _functions(chunk: int, sequences: int) -> dict[str, list[Json]]:
    prompt = [*_coming(chunk, ("positions",)), _device("toy_cache", _rows("x.device", chunk), _CACHE, op="cache")]
    mixed = [*prompt, _device("toy_mix", _rows("positions.device", chunk), _CACHE, _rows("y.device", chunk))]
    last, y = {"buffer": "last.device"}, _rows("y.device", 1)
    one = [
        *_coming(1, ("positions",)),
        _device("toy_cache", _rows("x.device", 1), _CACHE, op="cache"),
        _device("toy_mix", _rows("positions.device", 1), _CACHE, y, op="attention"),
        _ffn(y, "stats.device", last),
    ]
    return {
        "decode": [*one, *_going(last, 1, "logits")],
        "prefill": prompt,
        "prefill_last": [*mixed, _device("toy_last", _rows("y.device", chunk), last), *_going(last, 1, "logits")],
        "score": [*mixed, *_going(_rows("y.device", chunk), chunk, "logits.score")],
        "batch": _batch(sequences),
    }


_CACHE = {"state": "k.0"}
_ABANDONED = {"buffer": "abandoned"}


def _rows(name: str, rows: int) -> Json:
    words = name.startswith(("tokens", "positions", "slots"))
    return {"buffer": name, "shape": [rows] if words else [rows, DIM]}


def _flag(number: int) -> Json:
    return {"buffer": "flags", "shape": [16], "offset": 64 * number}


def _host(kernel: str, *args: Json, op: str = "toy", weight_bytes: int = 0) -> Json:
    all_args = [{"buffer": "step"}, *args]
    return {"kernel": kernel, "args": all_args, "op": op, "layer": None, "weight_bytes": weight_bytes}


def _device(kernel: str, *args: Json, op: str = "toy", weight_bytes: int = 0) -> Json:
    all_args = [{"buffer": "step.device"}, *args]
    return {**_host(kernel, op=op, weight_bytes=weight_bytes), "args": all_args, "device": "device"}


def _coming(rows: int, words: tuple[str, ...]) -> list[Json]:
    """Return the calls that transfer the embedding and the inputs to the accelerator."""
    copies = [
        {**_device("toy_words", op="inputs"), "args": [{"buffer": name}, {"buffer": f"{name}.device"}]}
        for name in ("step", *words)
    ]
    return [
        _host("toy_embed", _rows("tokens", rows), {"weight": "table"}, _rows("x", rows), op="embedding"),
        _host("toy_signal", _flag(0), op="signal"),
        *copies,
        _device("toy_receive", _rows("x", rows), _flag(0), _ABANDONED, _rows("x.device", rows), op="receive"),
    ]


def _going(source: Json, rows: int, logits: str) -> list[Json]:
    """Return the calls that transfer the accelerator's result to the head."""
    return [
        _device("toy_send", source, _rows("sent", rows), _flag(1), op="send"),
        _host("toy_wait", _flag(1), _ABANDONED, op="wait"),
        _host("toy_head", _rows("sent", rows), {"weight": "head"}, {"weight": "script"}, {"buffer": logits}, op="head"),
    ]


def _ffn(source: Json, stats: str, y: Json) -> Json:
    counts = {"buffer": stats, "offset": 16, "shape": [2]}
    return _device("toy_ffn", source, {"weight": "neurons"}, counts, y, op="ffn", weight_bytes=4 * DIM * NEURONS)


def _batch(sequences: int) -> list[Json]:
    y, places = _rows("y.device", sequences), [_rows(f"{name}.device", sequences) for name in ("positions", "slots")]
    return [
        *_coming(sequences, ("positions", "slots")),
        _device("toy_cache_batch", _rows("x.device", sequences), _CACHE, *places, op="cache"),
        _device("toy_mix_batch", *places, _CACHE, y, op="attention"),
        _ffn(_rows("y.device", 1), "stats.batch.device", {"buffer": "last.device"}),
        *_going(y, sequences, "logits.batch"),
    ]


def write_hybrid(
    folder: Path,
    library: Path,
    toy: Toy,
    *,
    context: int = 40,
    chunk: int = 8,
    sequences: int = 3,
    change: Callable[[Json], object] = lambda program: None,
    manifest: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the artifact. `change` changes the program, `manifest` replaces fields of manifest.json."""
    program = hybrid_program(toy, context, chunk, sequences)
    change(program)
    write_artifact(folder, library, toy, context, chunk, sequences, program)
    shutil.copyfile(library, folder / HOT)
    hot_device = {"kind": "cpu", "code": [code_entry(file=HOT)]}
    fields = {"sequences": sequences, "hot_device": hot_device, **(manifest or {})}
    write_manifest(folder, context, chunk, {key: value for key, value in fields.items() if value is not None})
    return folder
