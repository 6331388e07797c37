"""The inputs of a kernel, and the outputs that eager PyTorch computes from them in float64."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.weights import Array, random_block
from picompile_passes.dialect import dequantize_rows
from picompile_passes.formats.panels import to_panels

# A step that no flag holds before it.
STEP_NUMBER = 7


@dataclass(frozen=True)
class Example:
    """`inputs` by argument, a packed matrix under the name before its dot; `expected` the first rows of each output.

    `moved_bytes`: weights, caches and masks that a call must read. `rotating` are the inputs that copies are made of,
    so that they come from memory; `masks` are other masks for the same. `shared` lie in memory of the host that the GPU
    sees.
    """

    inputs: Mapping[str, Array]
    expected: Mapping[str, Array]
    moved_bytes: int = 0
    rotating: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    tokens: int = 1
    position: int = 0
    masks: Array | None = None


@dataclass
class Maker:
    """Makes the example of one case, with eager PyTorch on `device`."""

    parameters: Mapping[str, Any]
    rng: np.random.Generator
    device: str
    share: float = 1.0
    inputs: dict[str, Array] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """One less than there are rows, where there are several: what is behind them must stay as it was."""
        rows = int(self.parameters["rows"])
        return rows if rows == 1 else rows - 1

    def wide(self, values: Array) -> Tensor:
        """Float64 on PyTorch's device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device).to(torch.float64)

    def floats(self, name: str, *shape: int, offset: float = 0.0) -> Tensor:
        """A random input, and the same in float64."""
        self.inputs[name] = (self.rng.uniform(-1, 1, shape) + offset).astype(np.float32)
        return self.wide(self.inputs[name])

    def matrix(self, name: str, form: str, rows: int, columns: int, *, panels: bool = False) -> Tensor:
        """A random packed matrix, in panels or rows, and the float32 that it stands for."""
        block = random_block(self.rng, form, rows, columns)
        repeats = -(-rows // len(block))
        packed = np.tile(block, (repeats, 1))[:rows]
        self.inputs[name] = to_panels(torch.from_numpy(packed), form, columns).numpy() if panels else packed
        return dequantize_rows(torch.from_numpy(block), form, columns).to(self.device).repeat(repeats, 1)[:rows]

    def chosen(self, count: int, shape: tuple[int, ...]) -> Array:
        """In each row of a mask exactly `count` ones."""
        mask = np.zeros(shape, bool)
        for row in mask.reshape(-1, shape[-1]):
            row[self.rng.permutation(shape[-1])[:count]] = True
        return mask


def numpy_of(value: Tensor) -> Array:
    """The values, on the host."""
    return value.cpu().numpy()
