"""Where everything of a program lies: in the host's memory, in the hot device's, and in what they share."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.artifact.program import Argument, Call, Program
from picompile_runtime.devices.base import Accelerator, View
from picompile_runtime.devices.memory import ALIGNMENT, Tensor, anonymous_map, array_at, in_units
from picompile_runtime.errors import DoesNotFitError

# What an upload takes at a time: so much of a mapped file is in memory, and given back after.
_PART_BYTES = 2**25


@dataclass(frozen=True)
class HostPlaces:
    """The host's memory: tensors by kind and name, each with the memory that holds it and the offset there."""

    places: Mapping[tuple[str, str], tuple[Any, int]]

    def array(self, argument: Argument) -> NDArray[Any]:
        """What a call on the host is given."""
        memory, offset = self.places[argument.kind, argument.name]
        array = array_at(memory, replace(argument.view, offset=offset + argument.view.offset))
        array.flags.writeable = array.flags.writeable and argument.kind != "weight"
        return array


@dataclass(frozen=True)
class DevicePlaces:
    """The hot device's memory, in the same way."""

    places: Mapping[tuple[str, str], tuple[Any, int]]

    def view(self, argument: Argument) -> View:
        """What a call on the device is given."""
        memory, offset = self.places[argument.kind, argument.name]
        return View(memory, replace(argument.view, offset=offset + argument.view.offset))


def host_places(program: Program, weights: Mapping[str, tuple[Any, int]]) -> HostPlaces:
    """Zeroed arena and caches, and the `weights` by name. Raises DoesNotFitError."""
    arena = anonymous_map(program.arena_bytes, "the model's workspace")
    places = {("weight", name): place for name, place in weights.items()}
    for name, tensor in program.buffers.items():
        if program.memories["buffer", name] == "host":
            places["buffer", name] = (arena, tensor.offset)
    for name, tensor in program.state.items():
        if program.memories["state", name] == "host":
            places["state", name] = (anonymous_map(tensor.size_bytes, f"the cache {name}"), 0)
    return HostPlaces(places)


def device_places(
    program: Program,
    device: Accelerator,
    mapped: mmap.mmap,
    tensors: Mapping[str, Tensor],
    of_host: Mapping[str, tuple[Any, int]],
) -> tuple[DevicePlaces, NDArray[np.uint8]]:
    """Memory of the device for all that its calls use, its weights copied from the `mapped` file but for those that it
    reads where the host has them; and the memory that it shares with the host. Raises DoesNotFitError.
    """
    shared, array = device.share(program.shared_arena_bytes, "what host and device exchange")
    arenas = {"shared": shared, "device": device.allocate(program.device_arena_bytes, "the model's workspace")}
    places: dict[tuple[str, str], tuple[Any, int]] = {}
    for name, tensor in program.buffers.items():
        if (memory := program.memories["buffer", name]) in arenas:
            places["buffer", name] = (arenas[memory], tensor.offset)
    for name, tensor in program.state.items():
        if program.memories["state", name] == "device":
            places["state", name] = (device.allocate(tensor.size_bytes, f"the cache {name}"), 0)
    used = weights_of(program, "device")
    places |= _upload(device, mapped, {name: tensors[name] for name in used if name not in program.streamed})
    if streamed := [name for name in used if name in program.streamed]:
        adopted = device.adopt(of_host[streamed[0]][0])
        places |= {("weight", name): (adopted, of_host[name][1]) for name in streamed}
    return DevicePlaces(places), array


def weights_of(program: Program, device: str) -> list[str]:
    """The names of the weights that calls on a device use, in order of use; on the host also of those it keeps."""
    calls = (call for function in program.functions for call in program.calls(function, device))
    used = [arg.name for call in calls for arg in call.args if arg.kind == "weight"]
    return list(dict.fromkeys([*used, *(sorted(program.streamed) if device == "host" else ())]))


def _upload(
    device: Accelerator, mapped: mmap.mmap, tensors: Mapping[str, Tensor]
) -> dict[tuple[str, str], tuple[Any, int]]:
    offsets, end = {}, 0
    for name, tensor in tensors.items():
        offsets[name] = end
        end += -(-tensor.size_bytes // ALIGNMENT) * ALIGNMENT
    memory = device.allocate(end, "the weights of the hot device")
    source = np.frombuffer(mapped, np.uint8)
    for name, tensor in tensors.items():
        for start, size in _parts(tensor.size_bytes):
            first = tensor.offset + start
            device.write(memory, offsets[name] + start, source[first : first + size])
    device.protect(memory)
    return {("weight", name): (memory, offset) for name, offset in offsets.items()}


def _parts(size_bytes: int) -> Sequence[tuple[int, int]]:
    return [(start, min(_PART_BYTES, size_bytes - start)) for start in range(0, size_bytes, _PART_BYTES)]


# What a program takes of the hot device's memory, and what stays with the host where less of it is free.


# What is left free for the driver at least: it keeps something for each graph and for the code. An estimate.
_SPARED_BYTES = 2**26
# Large pieces of a GPU's memory are multiples of this.
_PIECE_BYTES = 2**21
# Of the neurons of a sparse block, so many are read in a step, as against all of a dense matrix. Which weights leave
# the device depends on the order alone, so that this need not be exact.
_SPARSE_SHARE = 0.5


@dataclass(frozen=True)
class DeviceNeed:
    """Bytes of the hot device's memory; `driver` is what is left free for the driver."""

    weights: int
    kv_cache: int
    workspace: int
    driver: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.workspace + self.driver

    def __str__(self) -> str:
        """In words, for errors."""
        parts = {"weights": self.weights, "KV cache": self.kv_cache, "workspace": self.workspace, "driver": self.driver}
        return ", ".join(f"{name} {in_units(size)[0]}" for name, size in parts.items())


def device_need(program: Program, tensors: Mapping[str, Tensor], graph_bytes: int = 0) -> DeviceNeed:
    """Return what `program` takes, whose weights are `tensors`; the driver keeps `graph_bytes` for its graphs."""
    caches = (tensor for name, tensor in program.state.items() if program.memories["state", name] == "device")
    return DeviceNeed(
        weights=_pieces(_packed(tensors[name] for name in _own_weights(program))),
        kv_cache=sum(_pieces(tensor.size_bytes) for tensor in caches),
        workspace=_pieces(program.device_arena_bytes),
        driver=max(_SPARED_BYTES, graph_bytes),
    )


def fit_device(
    program: Program, tensors: Mapping[str, Tensor], free_bytes: int, may_move: bool, graph_bytes: int = 0
) -> Program:
    """`program`, if so much memory of the device is enough for it.

    If not, and weights `may_move`: a program that computes the same, and leaves as many weights as it must with the
    host, from where the device reads them over the bus. Those go first of which a step reads least. Raises
    DoesNotFitError, before anything is loaded.
    """
    need = device_need(program, tensors, graph_bytes)
    if need.total <= free_bytes:
        return program
    if not may_move:
        needed, free = in_units(need.total, free_bytes)
        raise DoesNotFitError(
            f"the model needs {needed} of GPU memory ({need}) and {free} are free; close what "
            "uses the GPU, leave weights with the host (--replan), or compile with a smaller --vram-budget"
        )
    moved = _moved(program, tensors, need.total - free_bytes)
    smaller = replace(program, streamed=program.streamed | moved)
    if (least := device_need(smaller, tensors, graph_bytes)).total > free_bytes:
        needed, free = in_units(least.total, free_bytes)
        raise DoesNotFitError(
            f"the model needs {needed} of GPU memory ({least}) even if its weights stay with the host, and "
            f"{free} are free; close what uses the GPU, or compile for a smaller --context"
        )
    return smaller


def _moved(program: Program, tensors: Mapping[str, Tensor], wanted_bytes: int) -> frozenset[str]:
    """Weights of the device that have so many bytes together, or all."""
    read = _read_bytes(program, tensors)
    # Of equal ones the last: the first layers begin a step.
    names = _own_weights(program)[::-1]
    order = sorted(names, key=lambda name: read.get(name, 0.0) / max(1, tensors[name].size_bytes))
    moved: set[str] = set()
    for name in order:
        if _packed(tensors[each] for each in moved) >= wanted_bytes:
            break
        moved.add(name)
    return frozenset(moved)


def _read_bytes(program: Program, tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """About how much a step of decoding reads of each weight on the device."""
    read: dict[str, float] = {}
    for call in program.calls("decode", "device"):
        names = {arg.name for arg in call.args if arg.kind == "weight"}
        stored = sum(tensors[name].size_bytes for name in names)
        for name in names:
            share = call.weight_bytes / stored if stored else 0.0
            read[name] = read.get(name, 0.0) + tensors[name].size_bytes * share * _density(call, program)
    return read


def _density(call: Call, program: Program) -> float:
    sparse = {row.layer for row in program.ffn if row.predictor != "none"}
    return _SPARSE_SHARE if call.op == "ffn" and call.layer in sparse else 1.0


def _own_weights(program: Program) -> list[str]:
    return [name for name in weights_of(program, "device") if name not in program.streamed]


def _pieces(size_bytes: int) -> int:
    return -(-size_bytes // _PIECE_BYTES) * _PIECE_BYTES


def _packed(tensors: Iterable[Tensor]) -> int:
    return sum(-(-tensor.size_bytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
