"""Projections that leave out small inputs: of one token, of several sequences' next tokens, and of a chunk of a prompt.

The matrix has a row for each input. The kernel for one token has three steps, like a feed-forward block's:
1. List the numbers of the inputs that are above their limits, in order.
2. Cut the list into SLICES equal runs, each with a partial y, to which it adds its rows times their inputs
   (`add_rows.py`). While rows are read, those further on in the list are fetched.
3. Add up the partial y in order (`ffn_slices.py`).
The number of slices is fixed, and so is the order of all additions: every bit of y is the same for any number of
threads. For several sequences each token does that by itself, to the same bits.

A chunk reads all rows, since some token needs almost every one: inputs that are left out are set to zero.
"""

from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.accumulate import Reduction, ReductionInputs, accumulate
from picompile_codegen.cpu.add_rows import SomeRows, SumOrder, add_rows, rows_together
from picompile_codegen.cpu.ffn_slices import Slices
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.matrix import CACHE_LINE_BYTES, KernelMatrix
from picompile_codegen.cpu.panels import import_functions
from picompile_codegen.cpu.tensor import (
    Expr,
    KernelTensor,
    bind,
    counter,
    local,
    loop,
    minimum,
    parallel,
    select,
    worth_a_region,
)
from picompile_codegen.cpu.vector import blocks, load, splat, store
from picompile_codegen.specs import SparseLinearSpec

# The number of slices, as of a feed-forward block (`ffn.py`).
SLICES = 16


@dataclass(frozen=True)
class _Projection:
    """The arguments of the kernel. `limits` is float32 [k], `w` has k rows of n columns."""

    spec: SparseLinearSpec
    x: KernelTensor
    limits: KernelTensor
    w: KernelMatrix
    bias: KernelTensor | None
    stats: KernelTensor
    y: KernelTensor


@dataclass(frozen=True)
class _Inputs:
    """The inputs that one token reads: the first `count` numbers in row `row` of `numbers` int32 [rows, k]."""

    numbers: KernelTensor
    row: Expr
    count: Expr

    def number(self, position: Expr) -> Expr:
        """Return the number of the input at a position of the list, or of the last one behind the end."""
        return bind(self.numbers[self.row, minimum(position, self.count - 1)])


@body(SparseLinearSpec)
def sparse_linear(spec: SparseLinearSpec, function: KernelFunction) -> None:
    """Write the body of a `SparseLinearSpec`."""
    projection = _Projection(
        spec=spec,
        x=function["x"],
        limits=function["limits"],
        w=KernelMatrix.argument(function, "w"),
        bias=function.get("bias"),
        stats=function["stats"],
        y=function["y"],
    )
    if spec.rows == 1:
        _one(projection, function)
    elif spec.rowwise:
        _rowwise(projection, function)
    else:
        _chunk(projection, function)


def _declare_slices(projection: _Projection, function: KernelFunction) -> Slices:
    order, count = SumOrder.of(projection.w), projection.spec.rows * SLICES
    # A cache line more, for the reason that `Slices.declare` gives.
    width = order.width(projection.spec.n) + CACHE_LINE_BYTES // 4
    sums = function.scratch("slices", "float32", count, width)
    return Slices(sums, function.scratch("read", "int32", count), order, SLICES)


def _one(projection: _Projection, function: KernelFunction) -> None:
    spec = projection.spec
    numbers = function.scratch("listed", "int32", 1, spec.k)
    slices = _declare_slices(projection, function)
    inputs = _list(projection, numbers, 0)
    with parallel(SLICES, when_worth=worth_a_region(projection.w.bytes)) as index:
        _add_slice(projection, inputs, slices, index, index)
    slices.add_up(projection.y, projection.bias, spec.n, 1)
    slices.count(projection.stats, inputs.count, 1)


def _rowwise(projection: _Projection, function: KernelFunction) -> None:
    spec = projection.spec
    numbers = function.scratch("listed", "int32", spec.rows, spec.k)
    counts = function.scratch("counts", "int32", spec.rows)
    slices = _declare_slices(projection, function)
    tokens = function.tokens(spec.rows)
    with parallel(tokens) as token:
        counts[token] = _list(projection, numbers, token).count
    # A slice of one token is followed by the same slice of the next, which finds some of its rows in the cache.
    with parallel(tokens * SLICES) as index:
        number = _settled(index // tokens)
        token = _settled(index - number * tokens)
        inputs = _Inputs(numbers, token, bind(counts[token]))
        _add_slice(projection, inputs, slices, _settled(token * SLICES + number), number)
    slices.add_up(projection.y, projection.bias, spec.n, tokens)
    total = counter()
    with loop(0, tokens) as token:
        total[0] = total[0] + counts[token]
    slices.count(projection.stats, bind(total[0]), tokens)


def _list(projection: _Projection, numbers: KernelTensor, token: Expr) -> _Inputs:
    """List the inputs of a token that are above their limits, or no number."""
    count = counter()
    with loop(0, projection.spec.k) as j:
        # Written whether it is read or not, and then kept or overwritten: a branch could not be predicted.
        numbers[token, count[0]] = j
        # Not the opposite comparison, which is false for NaN.
        count[0] = count[0] + (1 - tirx.Cast("int32", tirx.abs(projection.x[token, j]) <= projection.limits[j]))
    return _Inputs(numbers, token, bind(count[0]))


def _add_slice(projection: _Projection, inputs: _Inputs, slices: Slices, index: Expr, number: Expr) -> None:
    """Add the rows of slice `number` of a token's list to row `index` of `slices`."""
    w, together = projection.w, rows_together(projection.w)
    slices.clear(index, projection.spec.n)
    start, stop = _settled(inputs.count * number // SLICES), _settled(inputs.count * (number + 1) // SLICES)
    slices.nonzero[index] = stop - start
    distance = max(w.rows_ahead, together[0])
    with loop(start, minimum(start + distance, stop)) as position:
        w.fetch_row(inputs.number(position))

    def add(first: Expr, rows: int, stop: Expr | None = None) -> None:
        """Add the rows at `rows` positions from `first` on, those before `stop`."""
        positions = [first + i for i in range(rows)]
        numbers = [inputs.number(position) for position in positions]
        factors = [bind(projection.x[inputs.row, row]) for row in numbers]
        if stop is not None:
            factors = [_settled(select(at < stop, x, 0.0), "float32") for at, x in zip(positions, factors, strict=True)]
        ahead = [inputs.number(position + distance) for position in positions]
        add_rows(SomeRows(w, numbers, [factors], slices.y, [index], ahead))

    times = bind((stop - start) // together[0])
    with loop(0, times) as time:
        add(_settled(start + time * together[0]), together[0])
    rest = _settled(start + times * together[0])
    few = together[-1]
    # Behind the slice's last row, rows are read again and multiplied by zero.
    with loop(0, (stop - rest + (few - 1)) // few) as time:
        add(_settled(rest + time * few), few, stop)


def _settled(value: Expr, dtype: str = "int32") -> Expr:
    """Compute a number here, through memory. TVM would write what `bind` holds into all sums of it, for minutes."""
    cell = local(1, dtype=dtype)
    cell[0] = value
    return bind(cell[0])


def _chunk(projection: _Projection, function: KernelFunction) -> None:
    spec, w = projection.spec, projection.w
    kept = function.scratch("kept", "float32", spec.rows, spec.k)
    inputs = ReductionInputs.declare(function, "kept", spec.rows, spec.k, w)
    import_functions(function)
    tokens = function.tokens(spec.rows)

    def keep(token: Expr, column: Expr, valid: int) -> None:
        x = bind(load(projection.x, token, column, valid=valid))
        is_small = tirx.abs(x) <= load(projection.limits, column, valid=valid)
        store(kept, token, column, value=select(is_small, splat(0.0), x), valid=valid)

    with parallel(tokens) as token:
        blocks(spec.k, lambda column, valid: keep(token, column, valid))
    inputs.pack(kept, tokens, spec.k)
    reduction = Reduction(w, spec.k, lambda row: row, projection.bias, projection.y)
    accumulate(reduction, inputs, tokens, when_worth=worth_a_region(w.bytes))
