"""Where in the arena each activation lives: buffers whose lifetimes do not overlap share memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from picompile_codegen.program import Call, Tensor, tensor_bytes

ALIGNMENT_BYTES = 64


def align(offset: int) -> int:
    """The next multiple of the alignment that kernels assume."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class _Lifetime:
    name: str
    size: int
    first: int
    last: int

    def overlaps(self, other: "_Lifetime") -> bool:
        # A buffer that dies in the call where another is born must not share with it: inputs and outputs never alias.
        return self.first <= other.last and other.first <= self.last


def _lifetimes(calls: Sequence[Call], sizes: Mapping[str, int]) -> list[_Lifetime]:
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, call in enumerate(calls):
        for arg in call.args:
            if arg.space == "buffer" and arg.name in sizes:
                first.setdefault(arg.name, index)
                last[arg.name] = index
    return [_Lifetime(name, sizes[name], first[name], last[name]) for name in first]


def _lowest_gap(size: int, taken: Iterable[tuple[int, int]], base: int) -> int:
    """The lowest offset ≥ base where `size` bytes fit between the taken (start, end) ranges."""
    offset = base
    for start, end in sorted(taken):
        if offset + size <= start:
            break
        offset = max(offset, align(end))
    return offset


def plan_buffers(
    calls: Sequence[Call], buffers: Mapping[str, Tensor], base: int, *, reuse: bool = True
) -> tuple[dict[str, Tensor], int]:
    """Gives every buffer of one function an offset from `base` on; returns them and the end of the arena in bytes.

    Largest first into the lowest gap that is free during the buffer's whole life (greedy by size, arXiv 2001.03288).
    Without `reuse` it is theirs for good.
    """
    sizes = {name: tensor_bytes(tensor.dtype, tensor.shape) for name, tensor in buffers.items()}
    lifetimes = sorted(_lifetimes(calls, sizes), key=lambda life: (-life.size, life.first, life.name))
    placed: list[tuple[_Lifetime, int]] = []
    for life in lifetimes:
        taken = [(offset, offset + other.size) for other, offset in placed if not reuse or other.overlaps(life)]
        placed.append((life, _lowest_gap(life.size, taken, base)))
    offsets = {life.name: offset for life, offset in placed}
    end = max((offset + life.size for life, offset in placed), default=base)
    planned = {name: replace(tensor, offset=offsets[name]) for name, tensor in buffers.items() if name in offsets}
    return planned, align(end)
