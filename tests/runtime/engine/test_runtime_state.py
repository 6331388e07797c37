"""State in an accelerator's memory: the same moves as on the host, and checkpoints that the host keeps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from picompile_runtime.artifact.program import StateTensor
from picompile_runtime.engine.state import AcceleratorState, PositionalState, RecurrentState

POSITIONAL = StateTensor("float16", (3, 2, 5, 4), grows=1)
RECURRENT = StateTensor("float32", (3, 6), kind="recurrent")


class FakeAccelerator:
    """The methods of an `Accelerator` that state needs; its memory is an array of bytes."""

    def copy(self, memory: Any, moves: Sequence[tuple[int, int, int]]) -> None:
        for source, target, size in moves:
            memory[target : target + size] = memory[source : source + size]

    def read(self, memory: Any, offset: int, data: Any) -> None:
        data[:] = memory[offset : offset + len(data)]

    def write(self, memory: Any, offset: int, data: Any) -> None:
        memory[offset : offset + len(data)] = data


def placed(tensor: StateTensor) -> tuple[np.ndarray, list[Any]]:
    """A tensor in an accelerator's memory, as an array and as states take it."""
    memory = np.arange(tensor.size_bytes).astype(np.uint8)
    return memory.view(tensor.dtype).reshape(tensor.shape), [(tensor, AcceleratorState(FakeAccelerator(), memory))]  # type: ignore[arg-type]


def test_rows_of_each_head_are_copied() -> None:
    array, given = placed(POSITIONAL)
    before = array.copy()
    PositionalState(given).copy(2, 0, 3, 5)
    before[0, :, :3] = before[2, :, :3]
    assert array.tobytes() == before.tobytes()


def test_checkpoints_are_restored_and_copied() -> None:
    array, given = placed(RECURRENT)
    state = RecurrentState(given)
    array[1] = 4.0
    state.keep(1, 4)
    array[1] = 7.0
    state.copy(1, 2, 7, 7)
    state.copy(1, 0, 4, 7)
    assert array[:, 0].tolist() == [4.0, 7.0, 7.0]
    state.cut(2, 4, 7)
    assert state.recover(1, 7) == 4
    assert array[:, 0].tolist() == [4.0, 4.0, 4.0]
    state.copy(1, 1, 0, 4)
    assert array[1].tolist() == [0.0] * 6
    assert [state.reusable(slot, 9, 10) for slot in range(3)] == [4, 0, 4]


def test_an_infinity_in_the_rows_of_tokens_is_found() -> None:
    array, given = placed(POSITIONAL)
    array[:] = 65504
    other, more = placed(replace(POSITIONAL, layer=3))
    other[:] = np.nan  # what is made of an infinity
    single, of_float32 = placed(replace(POSITIONAL, dtype="float32", layer=1))
    single[:] = np.inf
    state = PositionalState([*more, *given, *of_float32])
    assert state.overflowed(1, 5) is None
    array[1, 1, 3, 2] = np.inf
    assert [state.overflowed(1, seen) for seen in (3, 4)] == [None, 0] and state.overflowed(2, 5) is None
    assert RecurrentState(placed(RECURRENT)[1]).overflowed(0, 5) is None
