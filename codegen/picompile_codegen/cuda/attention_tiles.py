"""Tiles of queries, keys and values in the memory of a block, and their products."""

from collections.abc import Callable

from tvm import tirx

from picompile_codegen.cuda.attention_arguments import number
from picompile_codegen.cuda.attention_queries import ChunkTile
from picompile_codegen.cuda.attention_units import load_unit, unit_scale, unit_size
from picompile_codegen.cuda.function import Place, blocks_for
from picompile_codegen.cuda.outer import OWN, SIDE, THREADS, Padded, add_products
from picompile_codegen.kernels.cache import Cache
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, loop, minimum, when

# Columns of queries and keys that are in memory at once.
DEPTH = SIDE // 2


def multiply_slices(slices: Padded, sums: Tensor, place: Place) -> None:
    """sums[i, j] += query i · key j in the columns of a slice: 32 rows with the queries', and behind them the keys'."""
    add_products(slices, slices, DEPTH, sums, place, right_first=DEPTH)


def multiply_weights(weights: Padded, values: Padded, sums: Tensor, place: Place) -> None:
    """sums[i, j] += Σ weights[key, query i] · values[key, column j]."""
    add_products(weights, values, SIDE, sums, place)


def load_queries(q: Tensor, queries: ChunkTile, depth: Expr, memory: Padded, place: Place) -> None:
    """Columns of slice `depth`, scaled; zeros past the last."""
    shape = queries.shape
    size = unit_size("float32", shape.head_dim)

    def load(index: Expr, unit: Expr) -> tuple[Expr, ...]:
        row, head = queries.query(index)
        values = load_unit(q, (row,), head * shape.head_dim + _inside(unit, shape.head_dim, size) * size, size)
        return tuple(tirx.Select(unit * size < shape.head_dim, value * shape.scale, number(0.0)) for value in values)

    _load_slice(load, size, depth, memory, 0, place)


def load_keys(keys: Cache, rows: Callable[[Expr], tuple[Expr, ...]], depth: Expr, memory: Padded, place: Place) -> None:
    """Columns of slice `depth`. Past the last there is anything: queries have zeros there."""
    size = unit_size(keys.data.dtype, keys.dim)

    def load(index: Expr, unit: Expr) -> tuple[Expr, ...]:
        return _scaled(keys, rows(index), bind(_inside(unit, keys.dim, size)) * size, size)

    _load_slice(load, size, depth, memory, DEPTH, place)


def load_values(
    values: Cache, rows: Callable[[Expr], tuple[Expr, ...]], first: Expr, memory: Padded, place: Place
) -> None:
    """Columns from `first` on, a multiple of 64. Past the last there is anything."""
    size = unit_size(values.data.dtype, values.dim)
    units = SIDE // size

    def load(index: Expr) -> None:
        key, unit = bind(index // units), bind(index % units)
        start = bind(_inside(first // size + unit, values.dim, size)) * size
        loaded = _scaled(values, rows(key), start, size)
        for i in range(0, size, OWN):
            memory.store(key, unit * size + i, loaded[i : i + OWN])

    _each(SIDE * units, load, place)


def _load_slice(
    load: Callable[[Expr, Expr], tuple[Expr, ...]], size: int, depth: Expr, memory: Padded, top: int, place: Place
) -> None:
    """Element c of slice `depth` of row `index` goes to row top + c, column index. `load(index, unit)` gives a unit."""
    units = DEPTH // size

    def one(number_of_unit: Expr) -> None:
        index, unit = bind(number_of_unit // units), bind(number_of_unit % units)
        for i, value in enumerate(load(index, bind(depth * units + unit))):
            memory.store(top + unit * size + i, index, (value,))

    _each(SIDE * units, one, place)


def _each(count: int, body: Callable[[Expr], None], place: Place) -> None:
    """`body(i)` for `count` numbers, that the threads of the block take in turns."""
    with loop(0, blocks_for(count, THREADS)) as turn:
        index = bind(turn * THREADS + place.thread)
        with when(index < count):
            body(index)


def _inside(unit: Expr, width: int, size: int) -> Expr:
    """`unit`, or the last one of a row that is `width` wide."""
    return minimum(unit, width // size - 1)


def _scaled(cache: Cache, row: tuple[Expr, ...], start: Expr, size: int) -> tuple[Expr, ...]:
    values, scale = load_unit(cache.data, row, start, size), unit_scale(cache, row, start)
    return values if scale is None else tuple(bind(value * scale) for value in values)
