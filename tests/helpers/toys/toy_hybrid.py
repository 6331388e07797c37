"""The toy model for a host and a CPU partition as its accelerator, which meet in the middle of a token.

Both sides work at the same time in `toy_meet`: neither returns before the other has come, and NAP_NS after that.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from helpers.toys.toy_artifact import DIM, NEURONS, Toy, code_entry, toy_program, write_artifact, write_manifest

NAP_NS = 2_000_000  # toy_kernels.c
FLAGS = 5


def write_hybrid(
    folder: Path, library: Path, toy: Toy, ffn: str = "toy_ffn", kind: str = "cpu", sequences: int = 1
) -> Path:
    """Write an artifact whose accelerator is of `kind`; the kernel `ffn` computes the host's block."""
    program = toy_program(toy, 40, 8, sequences)
    write_artifact(folder, library, toy, sequences=sequences, program=_split(program, ffn))
    shutil.copyfile(library, folder / "kernels" / "hot.so")
    device: Mapping[str, Any] = {"kind": "cpu", "code": [code_entry(file="kernels/hot.so")]}
    if kind == "cuda":
        names = {"cubin": "kernels/hot.cubin", "ptx": "kernels/hot.ptx", "launches": "kernels/hot.json"}
        for name in names.values():
            (folder / name).write_text("unread")
        device = {"kind": "cuda", "sm": 89, **names}
    write_manifest(folder, 40, 8, {"hot_device": device, "sequences": sequences})
    return folder


def _split(program: dict[str, Any], ffn: str) -> dict[str, Any]:
    """`decode` for both devices, and `batch`, in which the device only answers. Each device has memory of its own; what
    the runtime writes lies in what they share.
    """
    buffers, ends = program["buffers"], {"device": 0, "shared": 0}

    def place(name: str, dtype: str, shape: list[int], memory: str) -> None:
        buffers[name] = {"dtype": dtype, "shape": shape, "offset": ends[memory], "memory": memory}
        ends[memory] = -(-(ends[memory] + int(np.prod(shape)) * np.dtype(dtype).itemsize) // 64) * 64

    for name in ("step", "tokens", "positions", "slots"):
        place(name, "int32", buffers[name]["shape"], "shared")
    place("flags", "int32", [FLAGS, 16], "shared")
    place("abandoned", "int32", [16], "shared")
    place("mask.sent", "uint8", [1, NEURONS], "shared")
    place("mask", "uint8", [1, NEURONS], "device")
    place("count", "int32", [1], "device")
    for name in ("x.device", "y.device"):
        place(name, "float32", [1, DIM], "device")
    for name in (name for name in ("stats", "stats.batch") if name in buffers):
        place(f"{name}.device", "int64", buffers[name]["shape"], "device")
    embed, cache, mix, block, head = program["functions"]["decode"]
    block = {**block, "kernel": ffn, "args": [*block["args"], {"buffer": "mask.sent"}]}
    flags = [{"buffer": "flags", "offset": 64 * number, "shape": [16]} for number in range(FLAGS)]
    count, mask, sent, abandoned = ({"buffer": name} for name in ("count", "mask", "mask.sent", "abandoned"))
    hot_stats = {"buffer": "stats.device", "offset": 0, "shape": [2]}
    hot = [{"buffer": "x.device"}, {"weight": "neurons"}, hot_stats, {"buffer": "y.device"}, mask]
    program["ffn"].append({**program["ffn"][0], "part": "hot", "stats_row": 0})
    program["functions"]["decode"] = [
        _call("toy_wait", flags[0], abandoned, op="receive", device="device"),
        _call("toy_signal", flags[4], mask, count, sent, op="send", device="device"),
        _call("toy_idle_ffn", *hot, op="ffn", device="device"),
        embed,
        _call("toy_signal", flags[0], op="signal"),
        cache,
        mix,
        _call("toy_wait", flags[4], abandoned, op="wait"),
        block,
        _call("toy_meet", flags[1], flags[2], abandoned, op="linear"),
        _call("toy_meet", flags[2], flags[1], abandoned, op="linear", device="device"),
        _call("toy_wait", flags[1], abandoned, count, op="receive", device="device"),
        _call("toy_signal", flags[3], op="send", device="device"),
        _call("toy_wait", flags[3], abandoned, op="wait"),
        head,
    ]
    if "batch" in program["functions"]:
        answer = [_call("toy_wait", flags[0], abandoned, op="receive", device="device")]
        answer.append(_call("toy_signal", flags[1], op="send", device="device"))
        ask = _call("toy_signal", flags[0], op="signal")
        program["functions"]["batch"] += [*answer, ask, _call("toy_wait", flags[1], abandoned, op="wait")]
    return {**program, "device_arena_bytes": ends["device"], "shared_arena_bytes": ends["shared"]}


def _call(kernel: str, *args: Mapping[str, Any], op: str, device: str = "host") -> dict[str, Any]:
    call = {"kernel": kernel, "args": [{"buffer": "step"}, *args], "op": op, "layer": 0, "weight_bytes": 0}
    return call if device == "host" else {**call, "device": device}
