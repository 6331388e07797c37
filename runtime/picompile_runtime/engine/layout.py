"""The memory of each tensor of a program: the host's memory, the accelerator's, or memory that both share."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.artifact.program import Argument, Call, Program
from picompile_runtime.devices.accelerator import Accelerator, ArgumentView
from picompile_runtime.devices.memory import ALIGNMENT, Tensor, anonymous_map, array_at, in_units
from picompile_runtime.errors import DoesNotFitError

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
    """Allocate the host's arena and state, zeroed, and return them with the `weights` by name.

    Raises DoesNotFitError.
    """
    arena = anonymous_map(program.arena_bytes, "the model's workspace")
    places = {("weight", name): place for name, place in weights.items()}
    for name, tensor in program.buffers.items():
        if program.memories["buffer", name] == "host":
            places["buffer", name] = (arena, tensor.offset)
    for name, tensor in program.state.items():
        if program.memories["state", name] == "host":
            state = anonymous_map(tensor.size_bytes, f"the state {name}")
            # Pages of 2 MiB would be taken whole for the first token of a short sequence.
            with suppress(OSError, AttributeError):
                state.madvise(mmap.MADV_NOHUGEPAGE)
            places["state", name] = (state, 0)
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
        "accelerator": accelerator.allocate(program.accelerator_arena_bytes, "the model's workspace"),
    }
    places: dict[tuple[str, str], tuple[Any, int]] = {}
    for name, tensor in program.buffers.items():
        if (memory := program.memories["buffer", name]) in arenas:
            places["buffer", name] = (arenas[memory], tensor.offset)
    for name, tensor in program.state.items():
        if program.memories["state", name] == "accelerator":
            places["state", name] = (accelerator.allocate(tensor.size_bytes, f"the state {name}"), 0)
    used = weights_of(program, "accelerator")
    own = {name: tensors[name] for name in used if name not in program.streamed}
    places |= _upload(accelerator, mapped, own)
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
    accelerator: Accelerator,
    mapped: mmap.mmap,
    tensors: Mapping[str, Tensor],
) -> dict[tuple[str, str], tuple[Any, int]]:
    offsets, end = {}, 0
    for name, tensor in tensors.items():
        offsets[name] = end
        end += -(-tensor.size_bytes // ALIGNMENT) * ALIGNMENT
    memory = accelerator.allocate(end, "the accelerator's weights")
    of_file = np.frombuffer(mapped, np.uint8)
    for name, tensor in tensors.items():
        for start, size in _parts(tensor.size_bytes):
            first = tensor.offset + start
            accelerator.write(memory, offsets[name] + start, of_file[first : first + size])
    accelerator.protect(memory)
    return {("weight", name): (memory, offset) for name, offset in offsets.items()}


def _parts(size_bytes: int) -> Sequence[tuple[int, int]]:
    return [(start, min(_PART_BYTES, size_bytes - start)) for start in range(0, size_bytes, _PART_BYTES)]


# How much of the accelerator's memory a program needs, and which weights stay with the host if too little is free.


# Bytes left free for the driver at least: it keeps some for each graph and for the code. This is an estimate.
_SPARED_BYTES = 2**26
# A GPU finds pinned memory of the host by tables in its own memory: 8 bytes for each page of 4 KiB, so 4 KiB for 2 MiB.
_MAPPED_BYTES, _TABLE_BYTES = 2**21, 2**12
# Large pieces of a GPU's memory are multiples of this.
_PIECE_BYTES = 2**21
# Share of a sparse block's neurons that a step reads, as against all of a dense matrix. It only affects the order in
# which weights leave the accelerator, so it need not be exact.
_SPARSE_SHARE = 0.5


@dataclass(frozen=True)
class AcceleratorNeed:
    """Bytes of the accelerator's memory that a program needs.

    `driver` is what is left free for the driver: for itself, for graphs, and to find the host's memory that is pinned.
    """

    weights: int
    kv_cache: int
    workspace: int
    driver: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.kv_cache + self.workspace + self.driver

    def __str__(self) -> str:
        """Return the parts in words, for errors."""
        parts = {"weights": self.weights, "KV cache": self.kv_cache, "workspace": self.workspace, "driver": self.driver}
        return ", ".join(f"{name} {in_units(size)[0]}" for name, size in parts.items())


def accelerator_need(program: Program, tensors: Mapping[str, Tensor], graph_bytes: int = 0) -> AcceleratorNeed:
    """Return the memory that `program` needs with its weights `tensors`; the driver keeps `graph_bytes` for graphs."""
    caches = (tensor for name, tensor in program.state.items() if program.memories["state", name] == "accelerator")
    pinned_bytes = _packed_bytes(
        tensors[name] for name in weights_of(program, "accelerator") if name in program.streamed
    )
    tables_bytes = pinned_bytes // _MAPPED_BYTES * _TABLE_BYTES
    return AcceleratorNeed(
        weights=_pieces(_packed_bytes(tensors[name] for name in _own_weights(program))),
        kv_cache=sum(_pieces(tensor.size_bytes) for tensor in caches),
        workspace=_pieces(program.accelerator_arena_bytes),
        driver=max(_SPARED_BYTES, graph_bytes + tables_bytes),
    )


def fit_accelerator(
    program: Program, tensors: Mapping[str, Tensor], free_bytes: int, may_move: bool, graph_bytes: int = 0
) -> Program:
    """Return `program`, or a version of it that fits the accelerator's memory.

    If `free_bytes` are too few and weights `may_move`, the result computes the same but leaves as many weights as it
    must with the host, from where the accelerator reads them over the bus. The first to move are those of which a step
    reads the smallest share.

    Args:
        program: the program as it was planned.
        tensors: its weights.
        free_bytes: free memory of the accelerator.
        may_move: whether weights may move to the host.
        graph_bytes: memory that the driver keeps for graphs.

    Raises:
        DoesNotFitError: the program does not fit. Nothing has been loaded by then.
    """
    need = accelerator_need(program, tensors, graph_bytes)
    if need.total <= free_bytes:
        return program
    if not may_move:
        needed, free = in_units(need.total, free_bytes)
        raise DoesNotFitError(
            f"the model needs {needed} of GPU memory ({need}) and {free} are free; close what "
            "uses the GPU, leave weights with the host (--replan), or compile with a smaller --vram-budget"
        )
    wanted, own = need.total - free_bytes, frozenset(_own_weights(program))
    while True:
        moved = _moved_weights(program, tensors, wanted)
        smaller = replace(program, streamed=program.streamed | moved)
        excess = (least := accelerator_need(smaller, tensors, graph_bytes)).total - free_bytes
        if excess <= 0:
            return smaller
        if moved == own:
            break
        # To find what has moved takes memory as well, and large pieces are not given back in part.
        wanted = _packed_bytes(tensors[name] for name in moved) + excess
    needed, free = in_units(least.total, free_bytes)
    raise DoesNotFitError(
        f"the model needs {needed} of GPU memory ({least}) even if its weights stay with the host, and "
        f"{free} are free; close what uses the GPU, or compile for a smaller --context"
    )


def _moved_weights(program: Program, tensors: Mapping[str, Tensor], wanted_bytes: int) -> frozenset[str]:
    """Return names of the accelerator's weights with `wanted_bytes` together, or all of them if they have fewer."""
    read = _read_bytes(program, tensors)
    # Among equals the last goes first, since the first layers begin a step.
    names = _own_weights(program)[::-1]
    order = sorted(names, key=lambda name: read.get(name, 0.0) / max(1, tensors[name].size_bytes))
    moved: set[str] = set()
    for name in order:
        if _packed_bytes(tensors[each] for each in moved) >= wanted_bytes:
            break
        moved.add(name)
    return frozenset(moved)


def _read_bytes(program: Program, tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return about how many bytes of each of the accelerator's weights a decoding step reads."""
    read: dict[str, float] = {}
    for call in program.calls("decode", "accelerator"):
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
    return [name for name in weights_of(program, "accelerator") if name not in program.streamed]


def _pieces(size_bytes: int) -> int:
    return -(-size_bytes // _PIECE_BYTES) * _PIECE_BYTES


def _packed_bytes(tensors: Iterable[Tensor]) -> int:
    """Return how much memory tensors take one behind the other."""
    return sum(-(-tensor.size_bytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
