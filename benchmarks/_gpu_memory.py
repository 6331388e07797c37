"""A kernel's arguments in memory of a `HotDevice`, between guards, with copies of what is large."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from _gpu_example import STEP_NUMBER, Example
from _gpu_formats import Array

from picompile_runtime.device import HotDevice, View
from picompile_runtime.memory import Tensor

_GUARD_BYTES = 256
_POISON = 0xFF
# What is larger is an input, and gets neither poison nor guards.
_MOST_GUARDED = 2**24


@dataclass(frozen=True)
class _Place:
    """Where an argument is: copy i begins at `start` + i · `stride` of `memory`; `host` is its array, if shared."""

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
        device: HotDevice,
        arguments: Sequence[dict[str, Any]],
        example: Example,
        copies: int = 1,
        masks: int = 1,
    ) -> None:
        """`copies` of the example's rotating inputs, and memory for so many masks."""
        self._device, self._arguments = device, arguments
        step = np.full(8, -1, np.int32)
        step[:4] = example.tokens, example.position, 0, STEP_NUMBER
        inputs = {"step": step, **example.inputs}
        sizes: dict[str, int] = {}
        for argument in arguments:
            stem = argument["name"].partition(".")[0]
            sizes[stem] = max(sizes.get(stem, 0), _size(argument))
        self._places = {
            name: self._place(name, size, inputs.get(name), example, masks if name == "mask" else copies)
            for name, size in sizes.items()
        }

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
            self._device.copy(memory, [(place.start, place.start + i * stride, size) for i in range(1, own)])
        return place

    def _write(self, place: _Place, value: Array, copy: int) -> None:
        data, start = np.ascontiguousarray(value).reshape(-1).view(np.uint8), place.start + copy * place.stride
        if place.host is not None:
            place.host[start : start + len(data)] = data
        else:
            self._device.write(place.memory, start, data)

    def write(self, name: str, value: Array, copy: int) -> None:
        """Writes a copy of an input anew, or its first rows."""
        self._write(self._places[name], value, copy)

    def views(self, copy: int = 0) -> list[View]:
        """What a call is given: this copy of what has any, modulo their number."""
        return [self._view(argument, copy) for argument in self._arguments]

    def _view(self, argument: dict[str, Any], copy: int) -> View:
        place = self._places[argument["name"].partition(".")[0]]
        offset = place.start + copy % place.copies * place.stride
        return View(place.memory, Tensor(argument["dtype"], tuple(argument["shape"]), offset))

    def read(self, name: str) -> Array:
        """An argument as it is now."""
        argument = next(each for each in self._arguments if each["name"] == name)
        return self._bytes(name, 0, _size(argument)).view(argument["dtype"]).reshape(argument["shape"])

    def is_intact(self, name: str) -> bool:
        """Whether the guards around an argument are."""
        place = self._places[name]
        before, after = self._bytes(name, -_GUARD_BYTES, _GUARD_BYTES), self._bytes(name, place.size, _GUARD_BYTES)
        return bool((before == _POISON).all() and (after == _POISON).all())

    @property
    def guarded(self) -> list[str]:
        """The arguments that have guards."""
        return [name for name, place in self._places.items() if place.size < _MOST_GUARDED]

    def _bytes(self, name: str, start: int, size: int) -> Array:
        place = self._places[name.partition(".")[0]]
        found = np.zeros(size, np.uint8)
        if place.host is not None:
            found[:] = place.host[place.start + start : place.start + start + size]
        else:
            self._device.read(place.memory, place.start + start, found)
        return found


def _size(argument: dict[str, Any]) -> int:
    return math.prod(argument["shape"]) * np.dtype(argument["dtype"]).itemsize
