"""Tensors as a kernel sees them, and the statements that loops are made of: a thin skin over TVM's IR builder.

Kernels are written in ordinary Python that runs once, when a kernel is built. So a Python `for` unrolls and a Python
`if` selects, while `loop`, `parallel` and `when` make statements of the kernel.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

# An expression of the kernel: an int or float known at build time, or TVM's expression of one or several lanes.
Expr = Any


class KernelTensor:
    """A tensor of a kernel. `x[i, j]` is an expression, `x[i, j] = value` a statement.

    The last index may be a run of lanes (`vector.at`): then a vector is loaded or stored. `is_written` is whether any
    statement so far has stored to it.
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self.is_written = False

    @property
    def dtype(self) -> str:
        """The type of the elements, by TVM's name."""
        return str(self._buffer.dtype)

    @property
    def rows(self) -> int:
        """The first dimension."""
        return int(self._buffer.shape[0])

    @property
    def columns(self) -> int:
        """The last dimension."""
        return int(self._buffer.shape[-1])

    @property
    def first(self) -> Expr:
        """The first element."""
        return tirx.BufferLoad(self._buffer, [0] * len(self._buffer.shape))

    def __getitem__(self, index: Expr | tuple[Expr, ...]) -> Expr:
        return tirx.BufferLoad(self._buffer, list(index) if isinstance(index, tuple) else [index])

    def __setitem__(self, index: Expr | tuple[Expr, ...], value: Expr) -> None:
        self.is_written = True
        T.buffer_store(self._buffer, value, list(index) if isinstance(index, tuple) else [index])


class TensorView(KernelTensor):
    """A tensor seen through its indices: row i is row `row(i)` of `tensor`, and column 0 is column `column` of it."""

    def __init__(self, tensor: KernelTensor, *, row: Callable[[Expr], Expr] | None = None, column: Expr = 0) -> None:
        super().__init__(tensor._buffer)
        self._tensor, self._row, self._column = tensor, row, column

    def __getitem__(self, index: Expr | tuple[Expr, ...]) -> Expr:
        return self._tensor[self._place(index)]

    def __setitem__(self, index: Expr | tuple[Expr, ...], value: Expr) -> None:
        self._tensor[self._place(index)] = value

    def _place(self, index: Expr | tuple[Expr, ...]) -> tuple[Expr, ...]:
        *rows, column = index if isinstance(index, tuple) else (index,)
        if rows and self._row is not None:
            rows[0] = self._row(rows[0])
        if isinstance(column, tirx.Ramp):  # a sum would be no run of lanes any more
            return (*rows, tirx.Ramp(column.base + self._column, column.stride, column.lanes))
        return (*rows, column + self._column)


class AddingView(TensorView):
    """A view that adds what is stored to what is there."""

    def __setitem__(self, index: Expr | tuple[Expr, ...], value: Expr) -> None:
        super().__setitem__(index, self[index] + value)


def local(*shape: int, dtype: str = "float32") -> KernelTensor:
    """A tensor on the stack of the task that is running; small ones that are indexed by constants live in registers."""
    # Scope "global" and the annotation together keep TVM from asking a runtime for the memory.
    return KernelTensor(T.alloc_buffer(shape, dtype, scope="global", annotations={"disable_lower_builtin": True}))


def local_vectors(*shape: int, lanes: int, dtype: str = "float32") -> KernelTensor:
    """A tensor on the stack whose elements are whole vectors, aligned to their size. `local` is aligned to 16 bytes."""
    return local(*shape, dtype=f"{dtype}x{lanes}")


def counter() -> KernelTensor:
    """An int32 of the task that is running, which begins at 0: a tensor of one element."""
    count = local(1, dtype="int32")
    count[0] = 0
    return count


def bind(value: Expr) -> Expr:
    """Compute `value` here, once. Python variables hold expressions, which are otherwise repeated at every use."""
    return T.bind(value)


def intrinsic(dtype: str, name: str, *values: Expr) -> Expr:
    """One of LLVM's functions.

    TVM is not told that they are pure, as all of them are, and leaves what they are given as it is written.
    """
    return tirx.call_llvm_intrin(dtype, name, *values)


def loop(start: Expr, stop: Expr) -> Any:
    """`with loop(0, n) as i:` runs its body for i from `start` to `stop` - 1, in order."""
    return T.serial(start, stop)


def in_slices(total: int, width: int, body: Callable[[Expr, int, bool], None]) -> None:
    """Run `body(start, size, is_first)` for each slice of `width` of a range, the last of which may be smaller.

    The body is written up to three times: for the first slice, for those in the middle, and for what is left over.
    """
    body(0, min(width, total), True)
    full, rest = divmod(total, width)
    if full > 1:
        with loop(1, full) as index:
            body(index * width, width, False)
    if full and rest:
        body(full * width, rest, False)


# Entering and leaving a parallel region takes about a microsecond, in which one core reads this much.
_WORTH_A_REGION_BYTES = 32 * 1024


def worth_a_region(work_bytes: int) -> bool:
    """Return whether work that reads so many bytes gains from several threads."""
    return work_bytes >= _WORTH_A_REGION_BYTES


def parallel(count: Expr, *, when_worth: bool = True) -> Any:
    """`with parallel(count) as i:` runs its body for i from 0 to `count` - 1 on all threads, in runs of consecutive i.

    With `when_worth` False it is a plain loop.
    """
    return T.parallel(0, count) if when_worth else T.serial(0, count)


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    """Run the body if `condition` holds."""
    with T.If(condition), T.Then():
        yield


def prefetch(tensor: KernelTensor, *index: Expr, into_first_level: bool = False) -> None:
    """Prefetch the cache line of an element, which need not exist, long before it is read.

    The line goes to the second-level cache, where a core can wait for many more lines than in the first: two cores of
    a Zen 4 read scattered rows of 3 KiB at 16 GB/s with prefetches into the first level, and at 42 GB/s into the
    second. What the processor soon fetches into the second level by itself may gain from `into_first_level`.
    ADR 84 has what was measured of both.
    """
    for_reading, into_level, of_data = (tirx.IntImm("int32", value) for value in (0, 3 if into_first_level else 2, 1))
    address = tirx.address_of(tensor[index])
    T.evaluate(intrinsic("void", "llvm.prefetch", address, for_reading, into_level, of_data))


def minimum(a: Expr, b: Expr) -> Expr:
    """The smaller of two numbers, lane by lane."""
    return tirx.Min(a, b)


def maximum(a: Expr, b: Expr) -> Expr:
    """The larger of two numbers, lane by lane."""
    return tirx.Max(a, b)


def select(condition: Expr, if_true: Expr, if_false: Expr) -> Expr:
    """One of two values, lane by lane. Both are computed: there is no branch."""
    return tirx.Select(condition, if_true, if_false)
