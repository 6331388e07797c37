"""The toy artifact with an accelerator, a CPU partition: it runs everything between embedding and head.

Its kernels are those of the toy artifact, so its logits have the same bits. The cache and the counts of neurons are in
the accelerator's memory; the values that are transferred are in shared memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from helpers.toys.toy_artifact import (
    DIM,
    HERE,
    Arena,
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
    most, memory = max(chunk, sequences), Arena(program["buffers"])
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
        memory.place(f"{name}.accelerator", buffer["dtype"], buffer["shape"], "accelerator")
    for name, rows in (("x.accelerator", most), ("y.accelerator", most), ("last.accelerator", 1)):
        memory.place(name, "float32", [rows, DIM], "accelerator")
    for name in ("y", "last"):
        del program["buffers"][name]
    program["state"]["k.0"]["memory"] = "accelerator"
    return {
        **program,
        "accelerator_arena_bytes": memory.ends["accelerator"],
        "shared_arena_bytes": memory.ends["shared"],
        "functions": {name: _split(calls) for name, calls in program["functions"].items()},
    }


_ON_DEVICE = ("step", "positions", "slots", "stats", "stats.batch", "x", "y", "last")
_ABANDONED = {"buffer": "abandoned"}


def _moved(argument: Json) -> Json:
    """Return the argument that the accelerator is given in the place of the host's."""
    name = argument.get("buffer")
    return {**argument, "buffer": f"{name}.accelerator"} if name in _ON_DEVICE else argument


def _flag(number: int) -> Json:
    return {"buffer": "flags", "shape": [16], "offset": 64 * number}


def _call(kernel: str, *args: Json, op: str, **more: str) -> Json:
    return {"kernel": kernel, "args": [*args], "op": op, "layer": None, "weight_bytes": 0, **more}


def _split(calls: list[Json]) -> list[Json]:
    """Return the calls for two sides: what is between embedding and head is the accelerator's."""
    embed, *inner = calls
    head = inner.pop() if inner[-1]["op"] == "head" else None
    step, x, used = {"buffer": "step"}, embed["args"][-1], [argument for call in inner for argument in call["args"]]
    words = [name for name in ("step", "positions", "slots") if name in [argument.get("buffer") for argument in used]]
    split = [embed, _call("toy_signal", step, _flag(0), op="signal")]
    for name in words:
        split.append(_call("toy_words", {"buffer": name}, _moved({"buffer": name}), op="inputs", device="accelerator"))
    received = (_moved(step), x, _flag(0), _ABANDONED, _moved(x))
    split.append(_call("toy_receive", *received, op="receive", device="accelerator"))
    split += [{**call, "device": "accelerator", "args": [*map(_moved, call["args"])]} for call in inner]
    if head is not None:
        _, source, *rest = head["args"]
        sent = {"buffer": "sent", "shape": source.get("shape", [1, DIM])}
        split.append(_call("toy_send", _moved(step), _moved(source), sent, _flag(1), op="send", device="accelerator"))
        split.append(_call("toy_wait", step, _flag(1), _ABANDONED, op="wait"))
        split.append({**head, "args": [step, sent, *rest]})
    return split


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
    accelerator = {"kind": "cpu", "code": [code_entry(file=HOT)]}
    fields = {"sequences": sequences, "accelerator": accelerator, **(manifest or {})}
    write_manifest(folder, context, chunk, {key: value for key, value in fields.items() if value is not None})
    return folder
