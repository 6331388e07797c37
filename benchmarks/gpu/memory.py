"""A kernel's arguments in memory of a `Accelerator`, between guards, with copies of what is large."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu.example import STEP_NUMBER, Example
from benchmarks.gpu.weights import Array
from picompile_runtime.devices.accelerator import Accelerator, ArgumentView
from picompile_runtime.devices.memory import Tensor

_GUARD_BYTES = 256
_POISON = 0xFF
# What is larger is an input, and gets neither poison nor guards.
_MOST_GUARDED = 2**24


@dataclass(frozen=True)
class _Place:
    """The place of an argument: copy i begins at `start` + i · `stride` of `memory`; `host` is its array, if shared."""

    memory: Any
    start: int
    stride: int
    size: int
    copies: int
    host: Array | None


class Arguments:
    """The arguments of one case. All that is no input is poisoned: NaN as a float, -1 as an integer."""

    def __init__(
        self,
        device: Accelerator,
        arguments: Sequence[dict[str, Any]],
        example: Example,
        copies: int = 1,
        masks: Array | None = None,
    ) -> None:
        """`copies` of the example's rotating inputs; `masks` in the place of its mask, which take turns as well."""
        self._device, self._arguments = device, arguments
        step = np.full(8, -1, np.int32)
        step[:4] = example.tokens, example.position, 0, STEP_NUMBER
        tickets = [each for each in arguments if each["tickets"]]
        inputs = {
            "step": step,
            **{each["name"]: np.zeros(each["shape"], np.int32) for each in tickets},
            **example.inputs,
        }
        sizes: dict[str, int] = {}
        for argument in arguments:
            stem = argument["name"].partition(".")[0]
            sizes[stem] = max(sizes.get(stem, 0), _size(argument))
        count = 1 if masks is None else len(masks)
        self._places = {
            name: self._place(name, size, inputs.get(name), example, count if name == "mask" else copies)
            for name, size in sizes.items()
        }
        for number, mask in enumerate(() if masks is None else masks):
            self._write(self._places["mask"], mask, number)

    def _place(self, name: str, size: int, value: Array | None, example: Example, copies: int) -> _Place:
        own = copies if name in (*example.rotating, "mask") else 1
        stride = -(-size // _GUARD_BYTES) * _GUARD_BYTES + _GUARD_BYTES
        total = _GUARD_BYTES + own * stride
        host: Array | None = None
        if name in example.shared:
            memory, host = self._device.share(total, f"the argument {name}")
            host[:] = _POISON
        else:
            memory = self._device.allocate(total, f"the argument {name}")
            if size < _MOST_GUARDED:
                self._device.write(memory, 0, np.full(total, _POISON, np.uint8))
        place = _Place(memory, _GUARD_BYTES, stride, size, own, host)
        if value is not None:
            self._write(place, value, 0)
            self._repeat(place)
        return place

    def _repeat(self, place: _Place) -> None:
        starts = [place.start + i * place.stride for i in range(1, place.copies)]
        if place.host is None:
            self._device.copy(place.memory, [(place.start, start, place.size) for start in starts])
            return
        for start in starts:
            place.host[start : start + place.size] = place.host[place.start : place.start + place.size]

    def _write(self, place: _Place, value: Array, copy: int) -> None:
        data, start = np.ascontiguousarray(value).reshape(-1).view(np.uint8), place.start + copy * place.stride
        if place.host is not None:
            place.host[start : start + len(data)] = data
        else:
            self._device.write(place.memory, start, data)

    def views(self, copy: int = 0) -> list[ArgumentView]:
        """Return the arguments of a call: this copy, modulo their number, of each argument that has copies."""
        return [self._view(argument, copy) for argument in self._arguments]

    def _view(self, argument: dict[str, Any], copy: int) -> ArgumentView:
        place = self._places[argument["name"].partition(".")[0]]
        offset = place.start + copy % place.copies * place.stride
        return ArgumentView(place.memory, Tensor(argument["dtype"], tuple(argument["shape"]), offset))

    def read(self, name: str) -> Array:
        """An argument as it is now."""
        argument = next(each for each in self._arguments if each["name"] == name)
        found: Array = self._bytes(name, 0, _size(argument)).view(argument["dtype"]).reshape(argument["shape"])
        return found

    def damaged(self) -> list[str]:
        """The arguments around which guards were written to."""
        guarded = [(name, place.size) for name, place in self._places.items() if place.size < _MOST_GUARDED]
        starts = [(name, start) for name, size in guarded for start in (-_GUARD_BYTES, size)]
        return [name for name, start in starts if (self._bytes(name, start, _GUARD_BYTES) != _POISON).any()]

    def _bytes(self, name: str, start: int, size: int) -> Array:
        place = self._places[name.partition(".")[0]]
        found = np.zeros(size, np.uint8)
        if place.host is not None:
            found[:] = place.host[place.start + start : place.start + start + size]
        else:
            self._device.read(place.memory, place.start + start, found)
        return found


def _size(argument: dict[str, Any]) -> int:
    return int(math.prod(argument["shape"]) * np.dtype(argument["dtype"]).itemsize)
