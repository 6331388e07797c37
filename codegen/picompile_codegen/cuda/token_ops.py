"""The rows of a step, see `picompile_codegen.cpu.token_ops`, for kernels that are several launches."""

from collections.abc import Callable

from tvm import tirx

from picompile_codegen.cpu.cache import Cache, cache_argument
from picompile_codegen.cpu.tensor import Expr, bind, maximum, minimum, when
from picompile_codegen.cpu.token_ops import Mode, StepRows, angles_argument, mode_name
from picompile_codegen.cuda.function import WARP, CudaFunction, CudaKernel, ThreadIndex, blocks_for
from picompile_codegen.cuda.matrix import (
    ColumnLanes,
    block_threads,
    lanes_for,
    load_lanes,
    matrix_argument,
    store_lanes,
)
from picompile_codegen.cuda.memory import block_sum, warp_max
from picompile_passes.dialect.formats import GROUP


def step_rows(function: CudaFunction, mode: Mode, rows: int, context: int, sequences: int) -> Callable[[], StepRows]:
    """Declares what `mode` needs, before the first launch. What it returns reads the step: call it inside a launch."""
    positions = function.argument("positions", "int32", rows, below=context) if mode == "batch" else None
    has_slots = mode == "batch" and sequences > 1
    slots = function.argument("slots", "int32", rows, below=sequences) if has_slots else None

    def read() -> StepRows:
        count = function.tokens(rows)
        if positions is not None:
            return StepRows(count, lambda row: positions[row], lambda row: 0 if slots is None else slots[row])
        first, slot = function.position(context), 0 if sequences == 1 else function.slot(sequences)
        return StepRows(count, lambda row: bind(first + row) if mode == "chunk" else first, lambda _: slot)

    return read


# Adding two values, and keeping the last row of one, on a GPU.


_THREADS = 128


def add(*, dim: int, rows: int) -> CudaKernel:
    """y = a + b. a, b float32 [rows, dim] → [rows, dim]."""
    function, lanes = CudaFunction("add", dim, f"r{rows}"), lanes_for(dim)
    with function:
        a, b, y = (function.floats(name, rows, dim) for name in ("a", "b", "y"))
        with function.launch(grid=(_blocks(dim), rows), block=_THREADS) as place:
            start = _start(place, lanes)
            inside = bind(tirx.And(place.block_y < function.tokens(rows), start < dim))
            index = (place.block_y, start)
            pairs = zip(load_lanes(a, index, lanes, inside), load_lanes(b, index, lanes, inside), strict=True)
            store_lanes(y, index, [first + second for first, second in pairs], inside)
    return function.cuda_kernel()


def take_last(*, dim: int, rows: int) -> CudaKernel:
    """The last of the rows that count: y[0] = x[n - 1]. x float32 [rows, dim] → [1, dim]."""
    function, lanes = CudaFunction("take_last", dim, f"r{rows}"), lanes_for(dim)
    with function:
        x, y = function.floats("x", rows, dim), function.floats("y", 1, dim)
        with function.launch(grid=_blocks(dim), block=_THREADS) as place:
            start = _start(place, lanes)
            last = bind(function.tokens(rows) - 1)
            store_lanes(y, (0, start), load_lanes(x, (last, start), lanes, start < dim), start < dim)
    return function.cuda_kernel()


def _blocks(dim: int) -> int:
    """Blocks for a row."""
    return blocks_for(dim // lanes_for(dim), _THREADS)


def _start(place: ThreadIndex, lanes: int) -> Expr:
    """The first column of a thread."""
    return (place.block * _THREADS + place.thread) * lanes


# Embedding on a GPU: a thread unpacks 16 bytes of a row of the table.


_EMBEDDING_THREADS = 64


def embedding(*, format: str, vocab: int, dim: int, rows: int, offset: int) -> CudaKernel:
    """y[t] = w[ids[t] + offset]. ids int32 [rows], w packed [vocab, dim] → y float32 [rows, dim].

    An id outside the table reads whatever lies there: ids are checked before they get here.
    """
    function = CudaFunction("embedding", format, f"{vocab}x{dim}", f"r{rows}", f"o{offset}")
    with function:
        ids = function.argument("ids", "int32", rows, below=vocab - offset)
        w = matrix_argument(function, "w", format, vocab, dim)
        y = function.floats("y", rows, dim)
        lanes, units = lanes_for(dim), blocks_for(dim, w.unit_weights)
        with function.launch(grid=(blocks_for(units, _EMBEDDING_THREADS), rows), block=_EMBEDDING_THREADS) as place:
            token, number = place.block_y, bind(place.block * _EMBEDDING_THREADS + place.thread)
            with when(tirx.And(token < function.tokens(rows), number < units)):
                unit = w.unit(bind(ids[token] + offset), number)
                weights = [bind(unit.weight(i)) for i in range(w.unit_weights)]
                for i in range(0, w.unit_weights, lanes):
                    column = unit.first + i
                    store_lanes(y, (token, column), weights[i : i + lanes], column < dim)
    return function.cuda_kernel()


# Normalization of each token's activations on a GPU: a block takes a token, and reads it once.


def rms_norm(*, dim: int, rows: int, eps: float) -> CudaKernel:
    """y = x / sqrt(mean(x²) + eps) · weight. x float32 [rows, dim], weight float32 [dim] → y like x."""
    function, threads = CudaFunction("rms_norm", dim, f"r{rows}", eps), block_threads(dim)
    with function:
        x, weight, y = function.floats("x", rows, dim), function.floats("weight", dim), function.floats("y", rows, dim)
        with function.launch(grid=rows, block=threads) as place, when(place.block < function.tokens(rows)):
            columns = ColumnLanes.of(dim, place.thread)
            # The weights are asked for before threads wait for each other, so that nobody waits for memory twice.
            values, weights = columns.load(x, place.block), columns.load(weight)
            squares = block_sum(_total([value * value for value in values]), place.thread, threads)
            factor = _inverse_root(squares / float(dim), eps)
            scaled = [value * factor * scale for value, scale in zip(values, weights, strict=True)]
            columns.store(y, place.block, scaled)
    return function.cuda_kernel()


def layer_norm(*, dim: int, rows: int, eps: float, weight: bool, bias: bool) -> CudaKernel:
    """y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias. x float32 [rows, dim], weight, bias [dim] → y like x."""
    function = CudaFunction("layer_norm", dim, f"r{rows}", eps, "w" * weight + "b" * bias)
    threads = block_threads(dim)
    with function:
        x = function.floats("x", rows, dim)
        weights = function.optional_floats("weight", dim, weight)
        biases = function.optional_floats("bias", dim, bias)
        y = function.floats("y", rows, dim)
        with function.launch(grid=rows, block=threads) as place, when(place.block < function.tokens(rows)):
            columns = ColumnLanes.of(dim, place.thread)
            values = columns.load(x, place.block)
            factors = [1.0] * len(values) if weights is None else columns.load(weights)
            summands = [0.0] * len(values) if biases is None else columns.load(biases)
            mean = bind(block_sum(_total(values), place.thread, threads) / float(dim))
            # Columns that do not exist were read as 0, which is not the mean.
            deviations = columns.or_zeros([value - mean for value in values])
            squares = block_sum(_total([value * value for value in deviations]), place.thread, threads)
            root = _inverse_root(squares / float(dim), eps)
            affine = zip(deviations, factors, summands, strict=True)
            columns.store(y, place.block, [value * root * factor + summand for value, factor, summand in affine])
    return function.cuda_kernel()


def _total(values: list[Expr]) -> Expr:
    """The sum, by halves: less rounding than one after another, and additions that need not wait for each other."""
    while len(values) > 1:
        rest = values[-1:] if len(values) % 2 else []
        values = [bind(a + b) for a, b in zip(values[::2], values[1::2], strict=False)] + rest
    return values[0]


def _inverse_root(value: Expr, eps: float) -> Expr:
    return bind(tirx.FloatImm("float32", 1.0) / tirx.sqrt(value + tirx.FloatImm("float32", eps)))


# Rotary position embedding on a GPU: a thread turns a pair of elements.


# Few, so that even one token is shared by several multiprocessors.
_ROTARY_THREADS = 128


def rotary(*, heads: int, head_dim: int, rows: int, context: int, mode: Mode) -> CudaKernel:
    """Turns each head's (x[i], x[i + d/2]) by the angle of its position, whose cosine and sine are in tables.

    x float32 [rows, heads · d], cos and sin float32 [context, d/2] → y like x. Positions: see `step_rows`.
    """
    half = head_dim // 2
    function = CudaFunction("rotary", f"{heads}x{head_dim}", mode_name(mode, rows), f"c{context}")
    with function:
        x = function.floats("x", rows, heads * head_dim)
        angles = angles_argument(function, context, half)
        y = function.floats("y", rows, heads * head_dim)
        read_step = step_rows(function, mode, rows, context, sequences=1)
        with function.launch(grid=(blocks_for(heads * half, _ROTARY_THREADS), rows), block=_ROTARY_THREADS) as place:
            tokens, row = read_step(), place.block_y
            pair = bind(place.block * _ROTARY_THREADS + place.thread)
            with when(tirx.And(row < tokens.count, pair < heads * half)):
                head, i = bind(pair // half), bind(pair % half)
                first = bind(head * head_dim + i)
                position = bind(tokens.position(row))
                a, b = bind(x[row, first]), bind(x[row, first + half])
                cosine, sine = bind(angles.cos[position, i]), bind(angles.sin[position, i])
                y[row, first] = a * cosine - b * sine
                y[row, first + half] = b * cosine + a * sine
    return function.cuda_kernel()


# Writing the KV cache on a GPU. What it looks like: see `picompile_codegen.cpu.cache`.


_CACHE_THREADS = 128
_LARGEST_BYTE = 127.0
_F16_MAX = 65504.0


def cache_write(
    *, kv_heads: int, head_dim: int, context: int, rows: int, kv_dtype: str, mode: Mode, sequences: int
) -> CudaKernel:
    """cache[slot, h, position] = x[t, h] for each row t; positions and slots: see `step_rows`.

    x float32 [rows, kv_heads · d], cache as in `kernels.cache.Cache`.
    """
    shape = (f"{kv_heads}x{head_dim}", mode_name(mode, rows), f"c{context}", f"s{sequences}")
    function = CudaFunction("cache_write", kv_dtype, *shape)
    with function:
        x = function.floats("x", rows, kv_heads * head_dim)
        cache = cache_argument(function, "cache", kv_dtype, sequences, kv_heads, context, head_dim)
        read_step = step_rows(function, mode, rows, context, sequences)
        with function.launch(grid=(blocks_for(kv_heads * WARP, _CACHE_THREADS), rows), block=_CACHE_THREADS) as place:
            tokens, row = read_step(), place.block_y
            head = bind(place.block * (_CACHE_THREADS // WARP) + place.warp)
            with when(tirx.And(row < tokens.count, head < kv_heads)):
                index = (bind(tokens.slot(row)), head, bind(tokens.position(row)))
                write_row(cache, index, lambda column: x[row, head * head_dim + column], place.lane)
    return function.cuda_kernel()


def write_row(cache: Cache, row: tuple[Expr, Expr, Expr], source: Callable[[Expr], Expr], lane: Expr) -> None:
    """A warp writes row (slot, head, position) of a cache; `source(column)` gives its elements. All lanes must come."""
    for group in range(blocks_for(cache.dim, GROUP)):
        column = bind(group * GROUP + lane)
        inside = column < cache.dim
        value = bind(tirx.if_then_else(inside, source(column), _float(0.0)))
        stored = value if cache.scales is None else _in_bytes(cache, (*row, group), value, lane)
        with when(inside):
            cache.data[(*row, column)] = tirx.Cast(cache.data.dtype, stored)


def _in_bytes(cache: Cache, group: tuple[Expr, ...], value: Expr, lane: Expr) -> Expr:
    """Writes the scale of 32 elements, a lane has each of them, and gives the nearest multiple of it, an int32."""
    largest = warp_max(tirx.abs(value))
    scale = bind(tirx.Cast("float16", minimum(largest / _float(_LARGEST_BYTE), _float(_F16_MAX))))
    with when(lane == 0):
        cache.scales[group] = scale  # type: ignore[index]
    kept = bind(tirx.Cast("float32", scale))
    inverse = tirx.if_then_else(kept > _float(0.0), _float(1.0) / kept, _float(0.0))
    near = tirx.nearbyint(value * bind(inverse))
    return tirx.Cast("int32", maximum(minimum(near, _float(_LARGEST_BYTE)), _float(-_LARGEST_BYTE)))


def _float(value: float) -> Expr:
    return tirx.FloatImm("float32", value)
