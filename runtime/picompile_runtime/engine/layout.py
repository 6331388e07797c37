"""Where everything of a program lies: in the host's memory, in the hot device's, and in what they share."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.artifact.program import Argument, Program
from picompile_runtime.devices.accelerator import Accelerator, ArgumentView
from picompile_runtime.devices.memory import ALIGNMENT, Tensor, anonymous_map, array_at

# What an upload takes at a time: so much of a mapped file is in memory, and given back after.
_PART_BYTES = 2**25


@dataclass(frozen=True)
class HostLayout:
    """The host's memory: tensors by kind and name, each with the memory that holds it and the offset there."""

    places: Mapping[tuple[str, str], tuple[Any, int]]

    def array(self, argument: Argument) -> NDArray[Any]:
        """What a call on the host is given."""
        memory, offset = self.places[argument.kind, argument.name]
        array = array_at(memory, replace(argument.view, offset=offset + argument.view.offset))
        array.flags.writeable = array.flags.writeable and argument.kind != "weight"
        return array


@dataclass(frozen=True)
class AcceleratorLayout:
    """The hot device's memory, in the same way."""

    places: Mapping[tuple[str, str], tuple[Any, int]]

    def view(self, argument: Argument) -> ArgumentView:
        """What a call on the device is given."""
        memory, offset = self.places[argument.kind, argument.name]
        return ArgumentView(memory, replace(argument.view, offset=offset + argument.view.offset))


def host_layout(program: Program, weights: Mapping[str, tuple[Any, int]]) -> HostLayout:
    """Zeroed arena and caches, and the `weights` by name. Raises DoesNotFitError."""
    arena = anonymous_map(program.arena_bytes, "the model's workspace")
    places = {("weight", name): place for name, place in weights.items()}
    for name, tensor in program.buffers.items():
        if program.memories["buffer", name] == "host":
            places["buffer", name] = (arena, tensor.offset)
    for name, tensor in program.state.items():
        if program.memories["state", name] == "host":
            places["state", name] = (anonymous_map(tensor.size_bytes, f"the cache {name}"), 0)
    return HostLayout(places)


def accelerator_layout(
    program: Program,
    device: Accelerator,
    mapped: mmap.mmap,
    tensors: Mapping[str, Tensor],
    of_host: Mapping[str, tuple[Any, int]],
) -> tuple[AcceleratorLayout, NDArray[np.uint8]]:
    """Memory of the device for all that its calls use, its weights copied from the `mapped` file but for those that it
    reads where the host has them; and the memory that it shares with the host. Raises DoesNotFitError.
    """
    shared, array = device.share(program.shared_arena_bytes, "what host and device exchange")
    arenas = {"shared": shared, "device": device.allocate(program.accelerator_arena_bytes, "the model's workspace")}
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
    return AcceleratorLayout(places), array


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
