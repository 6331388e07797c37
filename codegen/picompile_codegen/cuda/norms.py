"""Norms of a row that the threads of a block share, for kernels of their own and for the end of others."""

from collections.abc import Callable
from dataclasses import dataclass

from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind
from picompile_codegen.cpu.token_ops import inverse_root
from picompile_codegen.cuda.matrix import ColumnLanes
from picompile_codegen.cuda.memory import block_sum
from picompile_codegen.specs import Norm, RmsNormSpec

# of_run(number) → this thread's elements in that run of its columns
OfRun = Callable[[int], list[Expr]]


@dataclass(frozen=True)
class NormVectors:
    """The weight and the bias of a norm as a thread reads them, those that the norm has."""

    weight: OfRun | None
    bias: OfRun | None

    @classmethod
    def of(
        cls,
        columns: ColumnLanes,
        weight: KernelTensor | None,
        bias: KernelTensor | None,
        *,
        first: Expr = 0,
        early: bool = True,
    ) -> "NormVectors":
        """Read elements from column `first` on: all now, so that they come while threads wait for each other.

        Without `early` each is read where it is used, and takes no register before.
        """

        def reader(vector: KernelTensor | None) -> OfRun | None:
            if vector is None:
                return None
            known = vector

            def of_run(number: int) -> list[Expr]:
                return columns.load_run(number, known, first=first)

            return [of_run(number) for number in range(len(columns.runs))].__getitem__ if early else of_run

        return cls(reader(weight), reader(bias))


def write_norm(
    norm: Norm,
    columns: ColumnLanes,
    values: OfRun,
    vectors: NormVectors,
    out: tuple[KernelTensor, Expr, Expr],
    thread: Expr,
) -> None:
    """Write the norm of a row, whose elements `values` gives, zeros for columns that do not exist.

    `out` is a tensor, the row there, and the column at which the row begins. All threads of the block must come.
    """
    numbers, width = range(len(columns.runs)), float(norm.dim // norm.groups)
    y, row, first = out

    def sum_of(of_run: OfRun) -> Expr:
        return block_sum(_total([_total(of_run(number)) for number in numbers]), thread, columns.threads)

    # Columns that do not exist are 0, which is not the mean.
    mean = None if isinstance(norm, RmsNormSpec) else bind(sum_of(values) / width)

    def centered(number: int) -> list[Expr]:
        if mean is None:
            return values(number)
        return columns.or_zeros(number, [value - mean for value in values(number)])

    squares = sum_of(lambda number: [value * value for value in centered(number)])
    factor = bind(inverse_root(squares / width, norm.eps))
    for number in numbers:
        found = [value * factor for value in centered(number)]
        if vectors.weight is not None:
            found = [value * weight for value, weight in zip(found, vectors.weight(number), strict=True)]
        if vectors.bias is not None:
            found = [value + bias for value, bias in zip(found, vectors.bias(number), strict=True)]
        columns.store_run(number, y, row, found, first=first)


def _total(values: list[Expr]) -> Expr:
    """Return the sum, by halves: less rounding than one after another, and additions that need not wait for each
    other."""
    while len(values) > 1:
        rest = values[-1:] if len(values) % 2 else []
        values = [bind(a + b) for a, b in zip(values[::2], values[1::2], strict=False)] + rest
    return values[0]
