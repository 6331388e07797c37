"""Memory that a GPU sees, and places in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.device import View
from picompile_runtime.errors import ArtifactError


@dataclass(frozen=True)
class Memory:
    """Memory at `address` of the device: its own, or the host's that it sees."""

    address: int
    size_bytes: int

    def at(self, offset: int, size_bytes: int) -> int:
        """The address of bytes from `offset` on, which must be inside. Raises ValueError if they are not."""
        if not 0 <= offset <= offset + size_bytes <= self.size_bytes:
            raise ValueError(f"bytes {offset} to {offset + size_bytes} of a memory of {self.size_bytes}")
        return self.address + offset


def data_address(memory: Memory, offset: int, data: NDArray[Any]) -> int:
    """Where in `memory` the array uint8 [n] goes to or comes from. Raises ValueError."""
    if data.dtype != np.uint8 or data.ndim != 1:
        raise ValueError(f"bytes to copy must be uint8 [n], not {data.dtype} {list(data.shape)}")
    return memory.at(offset, len(data))


def view_address(kernel: str, view: View) -> int:
    """The address of an argument of `kernel`. Raises ArtifactError where it is not inside of its memory."""
    try:
        return int(view.memory.at(view.tensor.offset, view.tensor.size_bytes))
    except ValueError as error:
        raise ArtifactError(f"kernel {kernel}: an argument lies outside of its memory ({error})") from error
