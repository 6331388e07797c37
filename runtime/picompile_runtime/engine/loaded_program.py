"""The program that an engine runs, and the weights that it has beside those of the artifact's file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picompile_runtime.artifact.program import Argument, Program
from picompile_runtime.devices.memory import Tensor, aligned_zeros

Piece = Argument | bytes
"""A part of a weight that is made: a view of a weight of the file, or its content."""


@dataclass(frozen=True)
class LoadedProgram:
    """A program as it is loaded.

    Attributes:
        program: the program.
        tensors: its weights by name, with those that the artifact's file does not have.
        made: of these the small ones, each as pieces that follow one another without gaps.
        joined: of these the large ones, each as the names of weights that lie one behind the other with the host.
        computed_bytes: the size of the weights that were planned for the GPU and whose neurons the host computes.
    """

    program: Program
    tensors: Mapping[str, Tensor]
    made: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    computed_bytes: int = 0

    def contents(self, weight: Callable[[Argument], NDArray[Any]]) -> dict[str, NDArray[np.uint8]]:
        """Return the bytes of each weight in `made`; `weight` returns what the file has of a weight."""
        found = {}
        for name, pieces in self.made.items():
            parts = [each if isinstance(each, bytes) else weight(each).tobytes() for each in pieces]
            found[name] = aligned_zeros((self.tensors[name].size_bytes,), np.uint8)
            found[name][:] = np.frombuffer(b"".join(parts), np.uint8)
        return found

    def loading_order(self, names: Iterable[str]) -> list[str]:
        """Return those of the weights `names` that are in the file, weights that are to be joined one after another."""
        parts = [part for parts in self.joined.values() for part in parts]
        return [name for name in dict.fromkeys([*parts, *names]) if name not in self.made and name not in self.joined]
