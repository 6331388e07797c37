"""What the slices of a feed-forward block make, for one token or several, and how it becomes y."""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.kernels.add_rows import SumOrder
from picompile_codegen.kernels.ffn_shape import FfnArguments
from picompile_codegen.kernels.kernel import KernelFunction
from picompile_codegen.kernels.matrix import CACHE_LINE_BYTES
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local, loop, parallel, when, worth_a_region
from picompile_codegen.kernels.vector import LANES, at, splat

# Columns of y that a task adds up, a multiple of every `SumOrder.columns`.
_TASK_COLUMNS = 128


@dataclass(frozen=True)
class Slices:
    """y of some neurons each, float32 [slices, sums] in `order`, and how many of their h are not zero, int32 [slices].

    Slices `per_token` · t … belong to token t.
    """

    y: Tensor
    nonzero: Tensor
    order: SumOrder
    per_token: int

    @classmethod
    def declare(cls, function: KernelFunction, arguments: FfnArguments, per_token: int) -> "Slices":
        """Memory for `per_token` slices of every token."""
        order, count = SumOrder.of(arguments.bundle), arguments.shape.rows * per_token
        # A cache line more: the same columns of all slices would else compete for the same few places of a cache.
        width = order.width(arguments.shape.dim) + CACHE_LINE_BYTES // 4
        y = function.scratch("slices", "float32", count, width)
        return cls(y, function.scratch("nonzero", "int32", count), order, per_token)

    def add_up(self, y: Tensor, bias: Tensor | None, dim: int, tokens: Expr) -> None:
        """y [rows, dim] of each token: its slices, in order, and the bias."""
        full, rest = divmod(dim, _TASK_COLUMNS)
        tasks = full + (rest > 0)

        def add_vector(token: Expr, first: Expr, runs: list[tuple[Expr, int, int]]) -> None:
            value = local(LANES)
            value[at(0)] = splat(0.0)
            with loop(0, self.per_token) as index:
                value[at(0)] = value[at(0)] + self.y[token * self.per_token + index, at(first)]
            summed = bind(value[at(0)])
            for column, lane, count in runs:
                _store(y, token, column, summed, lane, count, bias)

        def add_columns(token: Expr, start: Expr, columns: int) -> None:
            self.order.each(
                columns,
                lambda position, runs: add_vector(
                    token, start + position, [(start + column, lane, count) for column, lane, count in runs]
                ),
            )

        with parallel(tokens * tasks, when_worth=worth_a_region(self.per_token * dim * 4)) as index:
            token = bind(index // tasks)
            task = bind(index - token * tasks)
            if full:
                with when(task < full):
                    add_columns(token, bind(task * _TASK_COLUMNS), _TASK_COLUMNS)
            if rest:
                with when(task == full):
                    add_columns(token, full * _TASK_COLUMNS, rest)

    def count(self, stats: Tensor, computed: Expr, tokens: Expr) -> None:
        """Adds to `stats` how many neurons were computed and how many were not zero."""
        stats[0] = stats[0] + tirx.Cast("int64", computed)
        with loop(0, tokens * self.per_token) as index:
            stats[1] = stats[1] + tirx.Cast("int64", self.nonzero[index])


def _store(y: Tensor, token: Expr, column: Expr, sums: Expr, lane: int, count: int, bias: Tensor | None) -> None:
    """`count` sums, from lane `lane` on, to consecutive columns."""
    lanes = list(range(lane, lane + count))
    if count in (LANES, LANES // 2):
        value = tirx.Shuffle([sums], lanes)
        y[token, at(column, count)] = value if bias is None else value + bias[at(column, count)]
        return
    for i, number in enumerate(lanes):
        value = tirx.Shuffle([sums], [number])
        y[token, column + i] = value if bias is None else value + bias[column + i]
