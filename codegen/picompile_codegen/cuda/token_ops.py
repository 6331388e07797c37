"""Kernels on a GPU that treat each token by itself, and the kernel that extends the KV cache."""

from collections.abc import Callable
from itertools import accumulate

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.cache import F16_MAX, LARGEST_BYTE, Cache, cache_argument
from picompile_codegen.cpu.tensor import Expr, bind, maximum, minimum, when
from picompile_codegen.cpu.token_ops import Angles, inverse_root, step_rows
from picompile_codegen.cuda.function import WARP, CudaFunction, ThreadIndex, blocks_for
from picompile_codegen.cuda.matrix import ColumnLanes, CudaMatrix, block_threads, lanes_for, load_lanes, store_lanes
from picompile_codegen.cuda.memory import compute, warp_max
from picompile_codegen.cuda.norms import NormVectors, write_norm
from picompile_codegen.cuda.panel_codes import CODES, WORDS, PanelRows, weights_of_row
from picompile_codegen.specs import (
    AddSpec,
    CacheWriteSpec,
    DivideByRmsSpec,
    ElementwiseSpec,
    EmbeddingSpec,
    JoinColumnsSpec,
    LayerNormSpec,
    Norm,
    RmsNormSpec,
    RotarySpec,
    TakeLastSpec,
)
from picompile_passes.formats import GROUP

_ADD_THREADS = 128


@body(AddSpec)
def add(spec: AddSpec, function: CudaFunction) -> None:
    """Write the launch of an `AddSpec`."""
    a, b, y, lanes = function["a"], function["b"], function["y"], lanes_for(spec.dim)
    with function.launch(grid=(_blocks(spec.dim), spec.rows), block=_ADD_THREADS) as place:
        start = _start(place, lanes)
        inside = bind(tirx.And(place.block_y < function.tokens(spec.rows), start < spec.dim))
        index = (place.block_y, start)
        pairs = zip(load_lanes(a, index, lanes, inside), load_lanes(b, index, lanes, inside), strict=True)
        store_lanes(y, index, [first + second for first, second in pairs], inside)


@body(ElementwiseSpec)
def elementwise(spec: ElementwiseSpec, function: CudaFunction) -> None:
    """Write the launch of an `ElementwiseSpec`."""
    y, lanes = function["y"], lanes_for(spec.dim)
    inputs = [(kind, function[f"x{number}"]) for number, kind in enumerate(spec.inputs)]
    with function.launch(grid=(_blocks(spec.dim), spec.rows), block=_ADD_THREADS) as place:
        row, start = place.block_y, bind(_start(place, lanes))
        inside = bind(tirx.And(row < function.tokens(spec.rows), start < spec.dim))
        rows = {"r": (row, start), "v": (start,)}
        numbers = {"t": (row, 0), "n": (0,)}
        columns = [
            load_lanes(x, rows[kind], lanes, inside)
            if kind in rows
            else [bind(tirx.if_then_else(inside, x[numbers[kind]], 0.0))] * lanes
            for kind, x in inputs
        ]
        values = [compute(spec.expression, [column[i] for column in columns]) for i in range(lanes)]
        store_lanes(y, (row, start), values, inside)


@body(TakeLastSpec)
def take_last(spec: TakeLastSpec, function: CudaFunction) -> None:
    """Write the launch of a `TakeLastSpec`."""
    x, y, lanes = function["x"], function["y"], lanes_for(spec.dim)
    with function.launch(grid=_blocks(spec.dim), block=_ADD_THREADS) as place:
        start = _start(place, lanes)
        last = bind(function.tokens(spec.rows) - 1)
        store_lanes(y, (0, start), load_lanes(x, (last, start), lanes, start < spec.dim), start < spec.dim)


@body(JoinColumnsSpec)
def join_columns(spec: JoinColumnsSpec, function: CudaFunction) -> None:
    """Write the launches of a `JoinColumnsSpec`, one for each part."""
    y, starts = function["y"], accumulate(spec.widths, initial=0)
    for number, (width, first) in enumerate(zip(spec.widths, starts, strict=False)):
        lanes = min(lanes_for(width), lanes_for(first), lanes_for(y.columns))
        with function.launch(grid=(blocks_for(width // lanes, _ADD_THREADS), spec.rows), block=_ADD_THREADS) as place:
            start = _start(place, lanes)
            inside = bind(tirx.And(place.block_y < function.tokens(spec.rows), start < width))
            values = load_lanes(function[f"x{number}"], (place.block_y, start), lanes, inside)
            store_lanes(y, (place.block_y, first + start), values, inside)


def _blocks(dim: int) -> int:
    """Return how many blocks a row takes."""
    return blocks_for(dim // lanes_for(dim), _ADD_THREADS)


def _start(place: ThreadIndex, lanes: int) -> Expr:
    """The first column of a thread."""
    return (place.block * _ADD_THREADS + place.thread) * lanes


# In an embedding a thread unpacks 16 bytes of a row of the table.


_EMBEDDING_THREADS = 64


@body(EmbeddingSpec)
def embedding(spec: EmbeddingSpec, function: CudaFunction) -> None:
    """Write the launch of an `EmbeddingSpec`."""
    ids, w, y = function["ids"], CudaMatrix.argument(function, "w"), function["y"]
    if w.panels:
        _look_up_in_panels(spec, function, w)
        return
    lanes, units = lanes_for(spec.dim), blocks_for(spec.dim, w.unit_weights)
    grid = (blocks_for(units, _EMBEDDING_THREADS), spec.rows)
    with function.launch(grid=grid, block=_EMBEDDING_THREADS) as place:
        token, number = place.block_y, bind(place.block * _EMBEDDING_THREADS + place.thread)
        with when(tirx.And(token < function.tokens(spec.rows), number < units)):
            unit = w.unit(bind(ids[token] + spec.offset), number)
            weights = [bind(unit.weight(i)) for i in range(w.unit_weights)]
            for i in range(0, w.unit_weights, lanes):
                column = unit.first + i
                store_lanes(y, (token, column), weights[i : i + lanes], column < spec.dim)


def _look_up_in_panels(spec: EmbeddingSpec, function: CudaFunction, w: CudaMatrix) -> None:
    """Write the launch for a table in panels: a thread unpacks four columns of each half of a group of 32."""
    ids, y, lanes = function["ids"], function["y"], lanes_for(spec.dim)
    quads = blocks_for(spec.dim, GROUP) * WORDS
    with function.launch(grid=(blocks_for(quads, _EMBEDDING_THREADS), spec.rows), block=_EMBEDDING_THREADS) as place:
        token, number = place.block_y, bind(place.block * _EMBEDDING_THREADS + place.thread)
        with when(tirx.And(token < function.tokens(spec.rows), number < quads)):
            row = PanelRows.of_row(bind(ids[token] + spec.offset))
            group, quad = bind(number // WORDS), bind(number % WORDS)
            for half, weights in enumerate(weights_of_row(w, row, group, quad)):
                for i in range(0, CODES, lanes):
                    column = bind(group * GROUP + half * (GROUP // 2) + quad * CODES + i)
                    store_lanes(y, (token, column), weights[i : i + lanes], column < spec.dim)


@body(LayerNormSpec, RmsNormSpec)
def norm(spec: Norm, function: CudaFunction) -> None:
    """Write the launch of a `RmsNormSpec` or `LayerNormSpec`: a block takes a group of a token, and reads it once."""
    x, width = function["x"], spec.dim // spec.groups
    grid = spec.rows if spec.groups == 1 else (spec.rows, spec.groups)
    with (
        function.launch(grid=grid, block=block_threads(width)) as place,
        when(place.block < function.tokens(spec.rows)),
    ):
        first = 0 if spec.groups == 1 else bind(place.block_y * width)
        columns = ColumnLanes.of(width, place.thread)
        values = [columns.load_run(number, x, place.block, first=first) for number in range(len(columns.runs))]
        vectors = NormVectors.of(columns, function, first=first)
        out = function["y"], place.block, first
        write_norm(spec, columns, values=values.__getitem__, vectors=vectors, out=out, thread=place.thread)


@body(DivideByRmsSpec)
def divide_by_rms(spec: DivideByRmsSpec, function: CudaFunction) -> None:
    """Write the launch of a `DivideByRmsSpec`: a thread for each column, which reads the sum of squares, too."""
    x, y, bias = function["x"], function["y"], function.get("bias")
    with function.launch(grid=(blocks_for(spec.dim, _ADD_THREADS), spec.rows), block=_ADD_THREADS) as place:
        row, column = place.block_y, bind(place.block * _ADD_THREADS + place.thread)
        with when(tirx.And(row < function.tokens(spec.rows), column < spec.dim)):
            factor = inverse_root(x[row, spec.dim] / float(spec.neurons), spec.eps)
            value = x[row, column] * factor
            y[row, column] = value if bias is None else value + bias[column]


# In a rotary embedding a thread turns a pair of elements.


# Few, so that even one token is shared by several multiprocessors.
_ROTARY_THREADS = 128


@body(RotarySpec)
def rotary(spec: RotarySpec, function: CudaFunction) -> None:
    """Write the launch of a `RotarySpec`."""
    x, y, angles = function["x"], function["y"], Angles(function["cos"], function["sin"])
    half, pairs = spec.head_dim // 2, spec.heads * (spec.head_dim // 2)
    with function.launch(grid=(blocks_for(pairs, _ROTARY_THREADS), spec.rows), block=_ROTARY_THREADS) as place:
        tokens = step_rows(function, spec)
        row, pair = place.block_y, bind(place.block * _ROTARY_THREADS + place.thread)
        with when(tirx.And(row < tokens.count, pair < pairs)):
            head, i = bind(pair // half), bind(pair % half)
            first = bind(head * spec.head_dim + i)
            position = bind(tokens.position(row))
            a, b = bind(x[row, first]), bind(x[row, first + half])
            cosine, sine = bind(angles.cos[position, i]), bind(angles.sin[position, i])
            y[row, first] = a * cosine - b * sine
            y[row, first + half] = b * cosine + a * sine


# A warp writes a row of the KV cache, whose layout `picompile_codegen.cpu.cache` describes.


_CACHE_THREADS = 128


@body(CacheWriteSpec)
def cache_write(spec: CacheWriteSpec, function: CudaFunction) -> None:
    """Write the launch of a `CacheWriteSpec`."""
    x, cache, dim = function["x"], cache_argument(function, "cache"), spec.head_dim
    grid = (blocks_for(spec.kv_heads * WARP, _CACHE_THREADS), spec.rows)
    with function.launch(grid=grid, block=_CACHE_THREADS) as place:
        tokens = step_rows(function, spec)
        row, head = place.block_y, bind(place.block * (_CACHE_THREADS // WARP) + place.warp)
        with when(tirx.And(row < tokens.count, head < spec.kv_heads)):
            index = (bind(tokens.slot(row)), head, bind(tokens.position(row)))
            write_row(cache, index, lambda column: x[row, head * dim + column], place.lane)


def write_row(cache: Cache, row: tuple[Expr, Expr, Expr], source: Callable[[Expr], Expr], lane: Expr) -> None:
    """Write, by a warp, row (slot, head, position) of a cache; `source(column)` gives its elements.

    All lanes must come.
    """
    for group in range(blocks_for(cache.dim, GROUP)):
        column = bind(group * GROUP + lane)
        inside = column < cache.dim
        value = bind(tirx.if_then_else(inside, source(column), 0.0))
        stored = value if cache.scales is None else _in_bytes(cache, (*row, group), value, lane)
        with when(inside):
            cache.data[(*row, column)] = tirx.Cast(cache.data.dtype, stored)


def _in_bytes(cache: Cache, group: tuple[Expr, ...], value: Expr, lane: Expr) -> Expr:
    """Write the scale of 32 elements, one a lane, and return the nearest multiple of it, an int32."""
    largest = warp_max(tirx.abs(value))
    scale = bind(tirx.Cast("float16", minimum(largest / LARGEST_BYTE, F16_MAX)))
    with when(lane == 0):
        cache.scales[group] = scale  # type: ignore[index]
    kept = bind(tirx.Cast("float32", scale))
    inverse = tirx.if_then_else(kept > 0.0, 1.0 / kept, 0.0)
    near = tirx.nearbyint(value * bind(inverse))
    return tirx.Cast("int32", maximum(minimum(near, LARGEST_BYTE), -LARGEST_BYTE))
