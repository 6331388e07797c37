"""The state that an engine keeps of each sequence, one object for each kind.

Positional state, the KV cache, has a row for each token: a sequence goes back to any position, where the next rows are
written over those that it forgets. Recurrent state has a fixed size, and each token changes all of it: a sequence goes
back only to a position at which a copy was kept, a checkpoint.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.artifact.program import Program, StateTensor
from picompile_runtime.devices.accelerator import Accelerator
from picompile_runtime.devices.memory import item_bytes

MOST_CHECKPOINTS = 8
"""Checkpoints that are kept of a sequence at most, beside its start."""

Bytes = NDArray[np.uint8]


class StateMemory(Protocol):
    """The memory of one state tensor, on the host or on an accelerator. Offsets are in bytes."""

    def copy(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy inside the memory; each move is (from offset, to offset, bytes), and no two overlap."""

    def read(self, offset: int, data: Bytes) -> None:
        """Fill `data` with what is at `offset`."""

    def write(self, offset: int, data: Bytes) -> None:
        """Put `data` at `offset`."""

    def release(self, start: int, stop: int) -> None:
        """Give back the memory from `start` to `stop`, as far as that is possible."""


class HostState:
    """A state tensor in the host's memory."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._bytes = np.frombuffer(memory, np.uint8)

    def copy(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy as `StateMemory` says."""
        for source, target, size in moves:
            self._bytes[target : target + size] = self._bytes[source : source + size]

    def read(self, offset: int, data: Bytes) -> None:
        """Fill `data` with what is at `offset`."""
        data[:] = self._bytes[offset : offset + len(data)]

    def write(self, offset: int, data: Bytes) -> None:
        """Put `data` at `offset`."""
        self._bytes[offset : offset + len(data)] = data

    def release(self, start: int, stop: int) -> None:
        """Give whole pages back to the system, which are zeros when they are used again."""
        start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            self._memory.madvise(mmap.MADV_DONTNEED, start, stop - start)


@dataclass(frozen=True)
class AcceleratorState:
    """A state tensor in an accelerator's memory."""

    accelerator: Accelerator
    memory: Any

    def copy(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy as `StateMemory` says."""
        self.accelerator.copy(self.memory, moves)

    def read(self, offset: int, data: Bytes) -> None:
        """Fill `data` with what is at `offset`."""
        self.accelerator.read(self.memory, offset, data)

    def write(self, offset: int, data: Bytes) -> None:
        """Put `data` at `offset`."""
        self.accelerator.write(self.memory, offset, data)

    def release(self, start: int, stop: int) -> None:
        """Keep the memory: the accelerator has no pages to give back."""


Placed = Sequence[tuple[StateTensor, StateMemory]]


class SequenceState(Protocol):
    """State of one kind, of the sequences in all slots. `seen` is how many tokens a slot has, which the engine knows.

    Attributes:
        can_cut: whether a sequence can go back to every position.
    """

    can_cut: bool

    def reusable(self, slot: int, prefix: int, seen: int) -> int:
        """Return the last position up to `prefix` that the sequence in `slot` can go back to."""

    def cut(self, slot: int, position: int, seen: int) -> None:
        """Go back to `position`, which is `reusable`."""

    def copy(self, source: int, target: int, count: int, seen: int) -> None:
        """Make `target` a copy of `source` at position `count`, which is `reusable` there; `source` has `seen`."""

    def release(self, slot: int, seen: int) -> None:
        """Give back memory that the tokens of `slot` do not need."""

    def keep(self, slot: int, seen: int, pin: bool = False) -> None:
        """Keep a checkpoint of the sequence in `slot` at its position `seen`; the last that is pinned stays."""

    def recover(self, slot: int, seen: int) -> int:
        """Go back to the last position at which the state is sure, after a step that failed, and return it."""

    def overflowed(self, slot: int, seen: int) -> int | None:
        """Return the first layer whose float16 state has an infinity, None if none has."""


class PositionalState:
    """State with a row for each token."""

    can_cut = True

    def __init__(self, placed: Placed) -> None:
        """Take over the tensors `placed` in memory."""
        self._placed = placed

    def reusable(self, slot: int, prefix: int, seen: int) -> int:
        """Return `prefix`: the rows of a prefix do not depend on what follows."""
        return prefix

    def cut(self, slot: int, position: int, seen: int) -> None:
        """Do nothing: rows behind `position` are never read before they are written again."""

    def copy(self, source: int, target: int, count: int, seen: int) -> None:
        """Copy the rows of the first `count` tokens."""
        if not count or source == target:
            return
        for tensor, memory in self._placed:
            row_bytes, starts = _rows(tensor, source)
            distance = (target - source) * tensor.sequence_bytes
            memory.copy([(start, start + distance, count * row_bytes) for start in starts])

    def release(self, slot: int, seen: int) -> None:
        """Give back the memory of the rows from position `seen` on."""
        for tensor, memory in self._placed:
            if not seen:
                memory.release(slot * tensor.sequence_bytes, (slot + 1) * tensor.sequence_bytes)
                continue
            row_bytes, starts = _rows(tensor, slot)
            for start in starts:
                memory.release(start + seen * row_bytes, start + _context(tensor) * row_bytes)

    def keep(self, slot: int, seen: int, pin: bool = False) -> None:
        """Do nothing: every position is kept."""

    def recover(self, slot: int, seen: int) -> int:
        """Return `seen`: a step writes only rows behind that."""
        return seen

    def overflowed(self, slot: int, seen: int) -> int | None:
        """Return the first layer with an infinity in the rows of a sequence's tokens, None if none has."""
        halves = ((tensor, memory) for tensor, memory in self._placed if tensor.dtype == "float16")
        for tensor, memory in sorted(halves, key=lambda each: each[0].layer):
            row_bytes, starts = _rows(tensor, slot)
            data = np.empty(seen * row_bytes, np.uint8)
            for start in starts:
                memory.read(start, data)
                if np.isinf(data.view(np.float16)).any():
                    return tensor.layer
        return None


def _context(tensor: StateTensor) -> int:
    assert tensor.grows is not None
    return tensor.shape[1 + tensor.grows]


def _rows(tensor: StateTensor, slot: int) -> tuple[int, range]:
    """Return the bytes of a row of positional state, and where the rows of each head of `slot` begin."""
    assert tensor.grows is not None
    row_bytes = prod(tensor.shape[2 + tensor.grows :]) * item_bytes(tensor.dtype)
    start = slot * tensor.sequence_bytes
    return row_bytes, range(start, start + tensor.sequence_bytes, _context(tensor) * row_bytes)


class RecurrentState:
    """State of a fixed size. Every sequence begins with zeros."""

    can_cut = False

    def __init__(self, placed: Placed) -> None:
        """Take over the tensors `placed` in memory, which are zeros."""
        self._placed = placed
        # For each slot, checkpoints by position: a copy of each tensor.
        self._kept: list[dict[int, list[Bytes]]] = [{} for _ in range(placed[0][0].shape[0])]
        self._pinned = [0] * len(self._kept)

    def reusable(self, slot: int, prefix: int, seen: int) -> int:
        """Return `prefix` if the sequence is there, else the position of the last checkpoint up to it."""
        return prefix if prefix == seen else max((each for each in self._kept[slot] if each <= prefix), default=0)

    def cut(self, slot: int, position: int, seen: int) -> None:
        """Restore the checkpoint at `position`."""
        if position != seen:
            self._restore(slot, self._kept[slot].get(position))
            self._kept[slot] = self._kept_up_to(slot, position)

    def copy(self, source: int, target: int, count: int, seen: int) -> None:
        """Copy the state whole, as it is or as the checkpoint at `count` has it, and all checkpoints up to that."""
        if source == target:
            self.cut(target, count, seen)
        elif count != seen:
            self._restore(target, self._kept[source].get(count))
        else:
            for tensor, memory in self._placed:
                size = tensor.sequence_bytes
                memory.copy([(source * size, target * size, size)])
        self._kept[target] = self._kept_up_to(source, count)

    def release(self, slot: int, seen: int) -> None:
        """Do nothing: the size does not depend on the number of tokens."""

    def keep(self, slot: int, seen: int, pin: bool = False) -> None:
        """Keep a checkpoint.

        Of too many the one goes whose neighbours are nearest to each other, never the last nor the one that is pinned.
        """
        self._pinned[slot] = seen if pin else self._pinned[slot]
        kept = self._kept[slot]
        kept[seen] = []
        for tensor, memory in self._placed:
            kept[seen].append(np.empty(tensor.sequence_bytes, np.uint8))
            memory.read(slot * tensor.sequence_bytes, kept[seen][-1])
        if len(kept) > MOST_CHECKPOINTS:
            places = [0, *sorted(kept)]
            gaps = {places[i]: places[i + 1] - places[i - 1] for i in range(1, len(places) - 1)}
            del kept[min(gaps.keys() - {self._pinned[slot]}, key=lambda place: (gaps[place], place))]

    def recover(self, slot: int, seen: int) -> int:
        """Restore the last checkpoint, and return its position."""
        position = max(self._kept[slot], default=0)
        self._restore(slot, self._kept[slot].get(position))
        return position

    def overflowed(self, slot: int, seen: int) -> int | None:
        """Return None: this state is in float32."""
        return None

    def _kept_up_to(self, slot: int, position: int) -> dict[int, list[Bytes]]:
        return {place: copies for place, copies in self._kept[slot].items() if place <= position}

    def _restore(self, slot: int, copies: list[Bytes] | None) -> None:
        """Write the copies of a checkpoint, zeros for the start of a sequence, which has none."""
        for number, (tensor, memory) in enumerate(self._placed):
            size = tensor.sequence_bytes
            memory.write(slot * size, np.zeros(size, np.uint8) if copies is None else copies[number])


def sequence_states(program: Program, memories: Mapping[str, StateMemory]) -> tuple[SequenceState, ...]:
    """Return the state of a program by kind, for those kinds that it has; `memories` are those of its tensors."""
    makes: Mapping[str, Any] = {"positional": PositionalState, "recurrent": RecurrentState}
    return tuple(make(placed) for kind, make in makes.items() if (placed := list(_placed(program, kind, memories))))


def host_state_bytes(program: Program, tokens: int | None = None) -> int:
    """Return how much of the host's memory the state takes at most, checkpoints included.

    With `tokens` these are how many all slots hold together; without, all are full.
    """
    total = 0
    for name, tensor in program.state.items():
        size = tensor.size_bytes if program.memories["state", name] == "host" else 0
        if tensor.grows is None:
            size += MOST_CHECKPOINTS * tensor.size_bytes
        elif tokens is not None:
            # Each head of each slot has pages of its own, of which the last is partly unused.
            heads = prod(tensor.shape[: 1 + tensor.grows])
            size = min(size, size * tokens // (program.sequences * program.context) + heads * mmap.PAGESIZE)
        total += size
    return total


def _placed(
    program: Program, kind: str, memories: Mapping[str, StateMemory]
) -> Iterator[tuple[StateTensor, StateMemory]]:
    return ((tensor, memories[name]) for name, tensor in program.state.items() if tensor.kind == kind)
