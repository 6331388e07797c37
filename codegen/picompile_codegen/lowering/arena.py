"""Places of activations in the arena: buffers whose lifetimes do not overlap share memory. Imports no torch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

ALIGNMENT_BYTES = 64


def align(offset: int) -> int:
    """Return the next multiple of the alignment that kernels assume."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class Lifetime:
    """A buffer of `size` bytes that is used from call `first` to call `last`."""

    name: str
    size: int
    first: int
    last: int

    def overlaps(self, other: "Lifetime") -> bool:
        """Return whether both live at some call."""
        # A buffer that dies in the call where another is born must not share with it: inputs and outputs never alias.
        return self.first <= other.last and other.first <= self.last


def place_buffers(
    lifetimes: Iterable[Lifetime], base: int, overlap: Callable[[Lifetime, Lifetime], bool] = Lifetime.overlaps
) -> tuple[Mapping[Lifetime, int], int]:
    """Return the offset of each buffer, from `base` on, and the end of the arena in bytes.

    Largest first into the lowest gap that is free during the buffer's whole life (greedy by size, arXiv 2001.03288).
    Two buffers share memory only where they do not `overlap`.
    """
    placed: dict[Lifetime, int] = {}
    for life in sorted(lifetimes, key=lambda life: (-life.size, life.first, life.name)):
        taken = [(offset, offset + other.size) for other, offset in placed.items() if overlap(other, life)]
        placed[life] = _lowest_gap(life.size, taken, base)
    return placed, align(max((offset + life.size for life, offset in placed.items()), default=base))


def _lowest_gap(size: int, taken: Iterable[tuple[int, int]], base: int) -> int:
    """Return the lowest offset ≥ base where `size` bytes fit between the taken (start, end) ranges."""
    offset = base
    for start, end in sorted(taken):
        if offset + size <= start:
            break
        offset = max(offset, align(end))
    return offset
