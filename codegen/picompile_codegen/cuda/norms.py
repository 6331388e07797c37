"""Norms of a row that the threads of a block share, for kernels of their own and for the end of others."""

from collections.abc import Callable
from dataclasses import dataclass

from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind
from picompile_codegen.cpu.token_ops import inverse_root
from picompile_codegen.cuda.function import CudaFunction
from picompile_codegen.cuda.matrix import ColumnLanes
from picompile_codegen.cuda.memory import block_sum, loads_first
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
        function: CudaFunction,
        prefix: str = "",
        *,
        first: Expr = 0,
        early: bool = True,
    ) -> "NormVectors":
        """Read elements from column `first` on: all now, so that they come while threads wait for each other.

        Names of arguments begin with `prefix`. Without `early` each is read where it is used, and takes no register
        before.
        """

        def reader(vector: KernelTensor | None) -> OfRun | None:
            if vector is None:
                return None
            known = vector

            def of_run(number: int) -> list[Expr]:
                return columns.load_run(number, known, first=first)

            return [of_run(number) for number in range(len(columns.runs))].__getitem__ if early else of_run

        return cls(*(reader(function.get(f"{prefix}{name}")) for name in ("weight", "bias")))


def write_norm(
    norm: Norm,
    columns: ColumnLanes,
    values: OfRun,
    vectors: NormVectors,
    out: tuple[KernelTensor, Expr, Expr],
    *,
    thread: Expr,
    together: int = 0,
) -> None:
    """Write the norm of a row, whose elements `values` gives, zeros for columns that do not exist.

    `out` is a tensor, the row there, and the column at which the row begins. All threads of the block must come. With
    `together` the elements are loaded whenever they are used: else ptxas would load them all, and spill. Results are
    then written of so many runs at a time: ptxas moves no load in front of a store that may be to the same place, so
    that each turn waits for memory once. Sums take a run at a time, and ptxas has their loads under way together.
    """
    numbers, width = range(len(columns.runs)), float(norm.dim // norm.groups)
    y, row, first = out

    def turns(runs: int) -> list[range]:
        return [numbers[i : i + runs] for i in numbers[::runs]] if together else [numbers]

    def read(of_run: OfRun | None, group: range) -> list[list[Expr]]:
        return [] if of_run is None else [of_run(number) for number in group]

    def come() -> None:
        if together:
            loads_first()

    def sum_of(elements: Callable[[int, list[Expr]], list[Expr]]) -> Expr:
        totals = []
        for group in turns(1):
            found = read(values, group)
            come()
            totals += [_total(elements(number, each)) for number, each in zip(group, found, strict=True)]
        return block_sum(_total(totals), thread, columns.threads)

    # Columns that do not exist are 0, which is not the mean.
    mean = None if isinstance(norm, RmsNormSpec) else bind(sum_of(lambda _, found: found) / width)

    def centered(number: int, found: list[Expr]) -> list[Expr]:
        return found if mean is None else columns.or_zeros(number, [value - mean for value in found])

    squares = sum_of(lambda number, found: [value * value for value in centered(number, found)])
    factor = bind(inverse_root(squares / width, norm.eps))
    for group in turns(together):
        found, weights, biases = (read(each, group) for each in (values, vectors.weight, vectors.bias))
        come()
        for place, number in enumerate(group):
            results = [value * factor for value in centered(number, found[place])]
            if weights:
                results = [value * weight for value, weight in zip(results, weights[place], strict=True)]
            if biases:
                results = [value + bias for value, bias in zip(results, biases[place], strict=True)]
            columns.store_run(number, y, row, results, first=first)


def _total(values: list[Expr]) -> Expr:
    """Return the sum, by halves: less rounding than one after another, and additions that need not wait for each
    other."""
    while len(values) > 1:
        rest = values[-1:] if len(values) % 2 else []
        values = [bind(a + b) for a, b in zip(values[::2], values[1::2], strict=False)] + rest
    return values[0]
