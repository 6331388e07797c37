"""Where the tensors of a program are: in the host's memory, the accelerator's, or memory that both share."""

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

# Bytes of an upload's parts. Only one part of the mapped file needs to be in memory at a time.
_PART_BYTES = 2**25


@dataclass(frozen=True)
class HostLayout:
    """The host's tensors: for each kind and name, the memory that holds it and its offset there in bytes."""

    places: Mapping[tuple[str, str], tuple[Any, int]]

    def array(self, argument: Argument) -> NDArray[Any]:
        """Return an argument of a call on the host; weights are read-only."""
        memory, offset = self.places[argument.kind, argument.name]
        array = array_at(memory, replace(argument.view, offset=offset + argument.view.offset))
        array.flags.writeable = array.flags.writeable and argument.kind != "weight"
        return array


@dataclass(frozen=True)
class AcceleratorLayout:
    """The accelerator's tensors: for each kind and name, the memory that holds it and its offset there in bytes."""

    places: Mapping[tuple[str, str], tuple[Any, int]]

    def view(self, argument: Argument) -> ArgumentView:
        """Return an argument of a call on the accelerator."""
        memory, offset = self.places[argument.kind, argument.name]
        return ArgumentView(memory, replace(argument.view, offset=offset + argument.view.offset))


def host_layout(program: Program, weights: Mapping[str, tuple[Any, int]]) -> HostLayout:
    """Allocate the host's arena and caches, zeroed, and return them with the `weights` by name.

    Raises DoesNotFitError.
    """
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
    accelerator: Accelerator,
    mapped: mmap.mmap,
    tensors: Mapping[str, Tensor],
    of_host: Mapping[str, tuple[Any, int]],
) -> tuple[AcceleratorLayout, NDArray[np.uint8]]:
    """Allocate the accelerator's memory for everything that its calls use, and copy its weights there.

    Args:
        program: the program.
        accelerator: the accelerator.
        mapped: the mapped weights file.
        tensors: the weights' places in the file.
        of_host: the host's weights by name; the accelerator reads streamed weights where the host has them.

    Returns:
        The layout, and the memory that the accelerator shares with the host, uint8 [bytes].

    Raises:
        DoesNotFitError: there is too little memory.
    """
    shared, array = accelerator.share(program.shared_arena_bytes, "memory for transfers between host and accelerator")
    arenas = {
        "shared": shared,
        "device": accelerator.allocate(program.accelerator_arena_bytes, "the model's workspace"),
    }
    places: dict[tuple[str, str], tuple[Any, int]] = {}
    for name, tensor in program.buffers.items():
        if (memory := program.memories["buffer", name]) in arenas:
            places["buffer", name] = (arenas[memory], tensor.offset)
    for name, tensor in program.state.items():
        if program.memories["state", name] == "device":
            places["state", name] = (accelerator.allocate(tensor.size_bytes, f"the cache {name}"), 0)
    used = weights_of(program, "device")
    places |= _upload(accelerator, mapped, {name: tensors[name] for name in used if name not in program.streamed})
    if streamed := [name for name in used if name in program.streamed]:
        adopted = accelerator.adopt(of_host[streamed[0]][0])
        places |= {("weight", name): (adopted, of_host[name][1]) for name in streamed}
    return AcceleratorLayout(places), array


def weights_of(program: Program, device: str) -> list[str]:
    """Return the names of the weights that calls on `device` use, in order of use; for the host, streamed ones too."""
    calls = (call for function in program.functions for call in program.calls(function, device))
    used = [arg.name for call in calls for arg in call.args if arg.kind == "weight"]
    return list(dict.fromkeys([*used, *(sorted(program.streamed) if device == "host" else ())]))


def _upload(
    accelerator: Accelerator, mapped: mmap.mmap, tensors: Mapping[str, Tensor]
) -> dict[tuple[str, str], tuple[Any, int]]:
    offsets, end = {}, 0
    for name, tensor in tensors.items():
        offsets[name] = end
        end += -(-tensor.size_bytes // ALIGNMENT) * ALIGNMENT
    memory = accelerator.allocate(end, "the accelerator's weights")
    source = np.frombuffer(mapped, np.uint8)
    for name, tensor in tensors.items():
        for start, size in _parts(tensor.size_bytes):
            first = tensor.offset + start
            accelerator.write(memory, offsets[name] + start, source[first : first + size])
    accelerator.protect(memory)
    return {("weight", name): (memory, offset) for name, offset in offsets.items()}


def _parts(size_bytes: int) -> Sequence[tuple[int, int]]:
    return [(start, min(_PART_BYTES, size_bytes - start)) for start in range(0, size_bytes, _PART_BYTES)]
