"""The feed-forward block of one token, over the neurons that fire.

1. `exact`: the deciding product of every neuron, in parallel; then the numbers of the neurons that fire, in order.
2. Neurons are cut into SLICES equal runs. Each slice goes through its neurons one after the other: product with up,
   activation, and down's row, times what came out, added to the slice's own y. A neuron's rows lie together, so this
   reads memory in long pieces, once.
3. The slices' y are added up, in order.

The number of slices is fixed: so are the order of all additions and therefore every bit of y, for any number of threads.
"""

from tvm import tirx

from picompile_codegen.kernels.dot import Vector, dot, prepare_vector
from picompile_codegen.kernels.ffn_shape import FfnArguments
from picompile_codegen.kernels.kernel import KernelFunction
from picompile_codegen.kernels.matrix import Matrix, each_group
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local, loop, parallel, when, worth_a_region
from picompile_codegen.kernels.vector import LANES, at, blocks, fma, load, splat, store
from picompile_passes.dialect.formats import GROUP

# Divisible among 1, 2, 3, 4, 6, 8, 12 and 24 threads.
SLICES = 24
# Columns of y that are added up at a time.
_SUM_COLUMNS = 128


def ffn_one(function: KernelFunction, arguments: FfnArguments) -> None:
    """Declares the rest of the arguments and writes the body."""
    shape = arguments.shape
    decided = function.scratch("decided", "float32", shape.neurons) if shape.is_exact else None
    fired = function.scratch("fired", "int32", shape.neurons) if shape.is_exact else None
    partial = function.scratch("partial", "float32", SLICES, shape.dim)
    nonzero = function.scratch("nonzero", "int32", SLICES)
    y = function.floats("y", 1, shape.dim)

    vector = prepare_vector(arguments.x, arguments.bundle)
    count: Expr = shape.neurons
    if decided is not None and fired is not None:
        _decide(arguments, vector, decided)
        count = _compact(arguments, decided, fired)
    with parallel(SLICES, when_worth=worth_a_region(arguments.bundle.bytes)) as index:
        _slice(arguments, vector, decided, fired, count, index, partial, nonzero)
    _sum_slices(arguments, partial, y)
    _count(arguments.stats, count, nonzero)


def _decide(arguments: FfnArguments, vector: Vector, decided: Tensor) -> None:
    """decided[j] = x · decide[j] + bias[j]."""
    neurons, bias = arguments.shape.neurons, arguments.first_bias
    with parallel(neurons, when_worth=worth_a_region(arguments.bundle.bytes)) as neuron:
        matrix, row = arguments.first_row(neuron)
        product = dot(matrix, row, vector)
        decided[neuron] = product if bias is None else product + bias[neuron]


def _compact(arguments: FfnArguments, decided: Tensor, fired: Tensor) -> Expr:
    """Lists the neurons above the threshold; returns their number. Without a branch, which could not be predicted."""
    count = local(1, dtype="int32")
    count[0] = 0
    threshold = tirx.FloatImm("float32", arguments.shape.threshold)
    with loop(0, arguments.shape.neurons) as neuron:
        fired[count[0]] = neuron
        count[0] = count[0] + tirx.Cast("int32", decided[neuron] > threshold)
    return bind(count[0])


def _slice(
    arguments: FfnArguments,
    vector: Vector,
    decided: Tensor | None,
    fired: Tensor | None,
    count: Expr,
    index: Expr,
    partial: Tensor,
    nonzero: Tensor,
) -> None:
    blocks(arguments.shape.dim, lambda c, valid: store(partial, index, c, value=splat(0.0), valid=valid))
    nonzero[index] = 0
    with loop(tirx.floordiv(count * index, SLICES), tirx.floordiv(count * (index + 1), SLICES)) as position:
        neuron = position if fired is None else bind(fired[position])
        h = _neuron_output(arguments, vector, decided, neuron)
        with when(h != tirx.FloatImm("float32", 0.0)):
            nonzero[index] = nonzero[index] + 1
            _add_row(arguments.bundle, arguments.down_row(neuron), h, partial, index)


def _neuron_output(arguments: FfnArguments, vector: Vector, decided: Tensor | None, neuron: Expr) -> Expr:
    """h of one neuron: a scalar."""
    if decided is not None:
        first = decided[neuron]
    else:
        matrix, row = arguments.first_row(neuron)
        first = _biased(dot(matrix, row, vector), arguments.first_bias, neuron)
    up = None
    if arguments.shape.gated:
        up = splat(_biased(dot(arguments.bundle, arguments.up_row(neuron), vector), arguments.up_bias, neuron))
    # Eight equal lanes: the functions are written for vectors, and a scalar costs as much.
    return bind(tirx.Shuffle([bind(arguments.output(splat(first), up))], [0]))


def _biased(value: Expr, bias: Tensor | None, neuron: Expr) -> Expr:
    return value if bias is None else bind(value + bias[neuron])


def _add_row(matrix: Matrix, row: Expr, factor: Expr, out: Tensor, index: Expr) -> None:
    """out[index] += factor · row."""

    def add(group: Expr, lane_counts: tuple[int, ...]) -> None:
        weights = matrix.group(row, group)
        scale = bind(splat(factor if weights.scale is None else factor * weights.scale))
        for i, valid in enumerate(lane_counts):
            raw = weights.raw[i] + splat(weights.offset) if weights.offset else weights.raw[i]
            c = group * GROUP + i * LANES
            store(out, index, c, value=fma(raw, scale, load(out, index, c, valid=valid)), valid=valid)

    each_group(matrix.columns, add)


def _sum_slices(arguments: FfnArguments, partial: Tensor, y: Tensor) -> None:
    """y = down_bias + Σ partial[s], s in order."""
    dim, bias = arguments.shape.dim, arguments.down_bias

    def add_up(c: Expr, valid: int) -> None:
        value = local(LANES)
        value[at(0)] = splat(0.0) if bias is None else load(bias, c, valid=valid)
        with loop(0, SLICES) as index:
            value[at(0)] = value[at(0)] + load(partial, index, c, valid=valid)
        store(y, 0, c, value=value[at(0)], valid=valid)

    full, rest = divmod(dim, _SUM_COLUMNS)
    with parallel(full, when_worth=worth_a_region(dim * SLICES * 4)) as block:
        blocks(_SUM_COLUMNS, lambda c, valid: add_up(block * _SUM_COLUMNS + c, valid))
    if rest:
        blocks(rest, lambda c, valid: add_up(full * _SUM_COLUMNS + c, valid))


def _count(stats: Tensor, computed: Expr, nonzero: Tensor) -> None:
    stats[0] = stats[0] + tirx.Cast("int64", computed)
    with loop(0, SLICES) as index:
        stats[1] = stats[1] + tirx.Cast("int64", nonzero[index])
