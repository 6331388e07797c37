"""Rows of caches and of queries as attention reads them: up to 16 bytes at a time, a unit, as float32.

Rows follow one another without padding, so a unit is as wide as the alignment of all rows allows.
"""

from tvm import tirx

from picompile_codegen.cuda.memory import extern
from picompile_codegen.kernels.cache import Cache
from picompile_codegen.kernels.tensor import Expr, Tensor, bind
from picompile_passes.dialect.formats import GROUP

_UNIT_BYTES = 16
_ELEMENT_BYTES = {"float32": 4, "float16": 2, "int8": 1}
_WORD_BYTES = 4


def unit_size(dtype: str, width: int, most: int = _UNIT_BYTES) -> int:
    """Elements of a unit of rows that are `width` wide, a power of two: no more than `most`, nor than 16 bytes."""
    size = 1
    while width % (2 * size) == 0 and 2 * size <= most and 2 * size * _ELEMENT_BYTES[dtype] <= _UNIT_BYTES:
        size *= 2
    return size


def load_unit(x: Tensor, row: tuple[Expr, ...], start: Expr, size: int) -> tuple[Expr, ...]:
    """Elements `start` … `start` + `size` - 1 of a row as float32. `start` is a product with `size`."""
    if size == 1:
        return (bind(tirx.Cast("float32", x[(*row, start)])),)
    vector = bind(x[(*row, tirx.Ramp(start, 1, size))])
    if x.dtype == "int8" and size >= _WORD_BYTES:
        return _bytes(vector, size)
    return tuple(bind(tirx.Cast("float32", tirx.Shuffle([vector], [i]))) for i in range(size))


def unit_scale(cache: Cache, row: tuple[Expr, ...], start: Expr) -> Expr | None:
    """What the unit that begins at `start` is to be multiplied by; None for 1. A unit is inside one group."""
    if cache.scales is None:
        return None
    return bind(tirx.Cast("float32", cache.scales[(*row, start // GROUP)]))


def _bytes(vector: Expr, size: int) -> tuple[Expr, ...]:
    count = size // _WORD_BYTES
    words = bind(tirx.reinterpret("uint32" if count == 1 else f"uint32x{count}", vector))
    each = [words] if count == 1 else [bind(tirx.Shuffle([words], [i])) for i in range(count)]
    return tuple(bind(extern("float32", "pi_byte", each[i // _WORD_BYTES], i % _WORD_BYTES)) for i in range(size))
