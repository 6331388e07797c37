"""The KV cache: how keys and values of all sequences are stored, read and written.

float16 and float32 are stored as they are. In q8 each 32 consecutive elements of a row share a float16 scale, as
weights do (`formats/q8.py`): an element is off by at most half of it, 1/254 of the largest of the 32, and 4e-6
more where that is so small that float16 holds its scale with few bits. In q4 each 32 elements are first multiplied by
the orthogonal Hadamard matrix, which spreads a large one over all of them (QuaRot, arXiv 2404.00456). What comes of it
is stored as weights of four bits: the number that is largest in magnitude has the code 0, zero has 8, and byte i of a
group has the codes of numbers i and i + 16. Queries are turned as keys are, and mixtures of values turned back.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.backend import body
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, maximum, minimum, parallel, prefetch, select
from picompile_codegen.cpu.token_ops import step_rows
from picompile_codegen.cpu.vector import (
    LANES,
    at,
    blocks,
    fma,
    highest,
    load,
    repeat,
    splat,
    splat_int,
    store,
    to_floats,
)
from picompile_codegen.specs import CacheWriteSpec
from picompile_codegen.specs.arguments import ITEM_BYTES, scale_groups
from picompile_passes.formats import GROUP

LARGEST_BYTE = 127.0
F16_MAX = 65504.0
_LINE_BYTES = 64
_ZERO_CODE, _LARGEST_CODE = 8, 15

# A vector of a row: `source(start, valid)` gives lanes from `start` on, of which the first `valid` count.
Source = Callable[[Expr, int], Expr]


@dataclass(frozen=True)
class Cache:
    """Keys or values of a layer: `data` kv_dtype [sequences, kv_heads, context, dim]; in q8 int8, in q4 uint8 with half
    as many elements, and with either `scales` float16 [sequences, kv_heads, context, groups of 32]."""

    data: KernelTensor
    scales: KernelTensor | None
    dim: int

    @property
    def has_nibbles(self) -> bool:
        """Whether a byte has two elements."""
        return self.data.dtype == "uint8"

    def head(self, slot: Expr, head: Expr) -> "CachedHead":
        """The rows of one head of one sequence."""
        return CachedHead(self, slot, head)


@dataclass(frozen=True)
class CachedHead:
    """The rows of one head of the sequence in `slot`, a row for each position."""

    cache: Cache
    slot: Expr
    number: Expr

    @property
    def groups(self) -> int:
        """Scales of a row; 0 where a row has none."""
        return 0 if self.cache.scales is None else scale_groups(self.cache.dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row without its scales."""
        return self.cache.data.columns * ITEM_BYTES[self.cache.data.dtype]

    def raw(self, position: Expr, start: Expr, valid: int = LANES, lanes: int = LANES) -> Expr:
        """A vector of float32 from a row, to be multiplied by the row's scale where there is one."""
        if self.cache.has_nibbles:
            codes = self._codes(position, start, lanes)
            return to_floats(tirx.Cast(f"int32x{lanes}", codes) - splat_int(_ZERO_CODE, lanes), lanes)
        return load(self.cache.data, self.slot, self.number, position, start, valid=valid, lanes=lanes)

    def scale(self, position: Expr, group: Expr) -> Expr:
        """The scale of 32 elements of a row, float32."""
        assert self.cache.scales is not None
        return tirx.Cast("float32", self.cache.scales[self.slot, self.number, position, group])

    def scales_of_eight(self, position: Expr) -> list[Expr]:
        """The scales of eight rows from `position` on, all of which must exist: for each group a float32x8."""
        assert self.cache.scales is not None
        groups = self.groups
        read = [bind(load(self.cache.scales, self.slot, self.number, position, i * LANES)) for i in range(groups)]
        return [tirx.Shuffle(read, [row * groups + group for row in range(LANES)]) for group in range(groups)]

    def bytes(self, position: Expr, start: Expr, valid: int, count: int) -> Expr:
        """`count` elements of a row in q8 or q4 as int16 without scale: the first `valid`, and 0 for the others."""
        if self.cache.has_nibbles:
            return self._signed_codes(position, start, count)
        data, row = self.cache.data, (self.slot, self.number, position)
        if valid >= count:
            return tirx.Cast(f"int16x{count}", data[(*row, at(start, count))])
        zero = tirx.IntImm("int16", 0)
        words = [tirx.Cast("int16", data[(*row, start + i)]) if i < valid else zero for i in range(count)]
        return tirx.Shuffle(words, list(range(count)))

    def _codes(self, position: Expr, start: Expr, count: int) -> Expr:
        """The codes of `count` elements of half a group in q4, uint8."""
        half = GROUP // 2
        data, row = self.cache.data, (self.slot, self.number, position)
        pairs = bind(data[(*row, at(start // GROUP * half + start % half, count))])
        bits = tirx.Cast("uint8", start // half % 2 * 4)
        return (pairs >> tirx.Broadcast(bits, count)) & tirx.Broadcast(tirx.IntImm("uint8", 15), count)

    def _signed_codes(self, position: Expr, start: Expr, count: int) -> Expr:
        """`count` elements of a row in q4 as int16: half a group or a whole one."""
        zero = tirx.Broadcast(tirx.IntImm("int16", _ZERO_CODE), count)
        if count <= GROUP // 2:
            return tirx.Cast(f"int16x{count}", self._codes(position, start, count)) - zero
        data, half = self.cache.data, count // 2
        pairs = bind(data[self.slot, self.number, position, at(start // 2, half)])
        words = bind(tirx.Cast(f"int16x{half}", pairs))
        parts = (
            words & tirx.Broadcast(tirx.IntImm("int16", 15), half),
            words >> tirx.Broadcast(tirx.IntImm("int16", 4), half),
        )
        return tirx.Shuffle([bind(part) for part in parts], list(range(count))) - zero

    def value(self, position: Expr, start: Expr, valid: int = LANES) -> Expr:
        """A vector of float32 from a row, which does not cross a multiple of 32."""
        raw = self.raw(position, start, valid)
        return raw if self.cache.scales is None else raw * splat(self.scale(position, start // GROUP))

    def prefetch_scales(self, position: Expr, rows: int) -> None:
        """Prefetch the scales of `rows` rows from `position` on, where there are any."""
        if self.cache.scales is not None:
            for start in range(0, rows * self.groups, _LINE_BYTES // 2):
                prefetch(self.cache.scales, self.slot, self.number, position, start)

    def prefetch(self, position: Expr) -> None:
        """Prefetch a row, which need not exist."""
        for start in range(0, self.cache.data.columns, _LINE_BYTES // ITEM_BYTES[self.cache.data.dtype]):
            prefetch(self.cache.data, self.slot, self.number, position, start, into_first_level=True)

    def write(self, position: Expr, source: Source) -> None:
        """Write a row."""
        if self.cache.scales is None:

            def copy(c: Expr, valid: int) -> None:
                store(self.cache.data, self.slot, self.number, position, c, value=source(c, valid), valid=valid)

            blocks(self.cache.dim, copy)
            return
        full, rest = divmod(self.cache.dim, GROUP)
        if full:
            with loop(0, full) as group:
                self._write_group(position, group, source, GROUP)
        if rest:
            self._write_group(position, full, source, rest)

    def _write_group(self, position: Expr, group: Expr, source: Source, size: int) -> None:
        """Write the scale of 32 elements (fewer at the end of a row) and the nearest multiples of it."""
        assert self.cache.scales is not None
        starts = [(bind(group * GROUP + i), min(LANES, size - i)) for i in range(0, size, LANES)]
        values = [bind(source(start, valid)) for start, valid in starts]
        if self.cache.has_nibbles:
            self._write_nibbles(position, group, spread(values))
            return
        largest = splat(0.0)
        for value in values:
            largest = maximum(largest, tirx.abs(value))
        scale = bind(minimum(highest(largest) / LARGEST_BYTE, F16_MAX))
        self.cache.scales[self.slot, self.number, position, group] = tirx.Cast("float16", scale)
        kept = bind(self.scale(position, group))
        inverse = bind(splat(select(kept > 0.0, 1.0 / kept, 0.0)))
        for (start, valid), value in zip(starts, values, strict=True):
            near = tirx.nearbyint(value * inverse)
            near = maximum(minimum(near, splat(LARGEST_BYTE)), splat(-LARGEST_BYTE))
            integers = bind(tirx.Cast(f"int32x{LANES}", near))
            data, row = self.cache.data, (self.slot, self.number, position)
            if valid == LANES:
                data[(*row, at(start))] = tirx.Cast(f"int8x{LANES}", integers)
            else:
                for i in range(valid):
                    data[(*row, start + i)] = tirx.Cast("int8", tirx.Shuffle([integers], [i]))

    def _write_nibbles(self, position: Expr, group: Expr, values: list[Expr]) -> None:
        """Write the scale of 32 elements and the nearest codes."""
        assert self.cache.scales is not None
        largest, least = values[0], values[0]
        for value in values[1:]:
            largest, least = bind(maximum(largest, value)), bind(minimum(least, value))
        high, low = highest(largest), highest(splat(0.0) - least)
        extreme = select(high >= low, high, 0.0 - low)
        scale = bind(maximum(minimum(extreme * (-1.0 / _ZERO_CODE), F16_MAX), -F16_MAX))
        self.cache.scales[self.slot, self.number, position, group] = tirx.Cast("float16", scale)
        kept = bind(self.scale(position, group))
        inverse = bind(splat(select(kept != 0.0, 1.0 / kept, 0.0)))
        codes = []
        for value in values:
            near = tirx.nearbyint(fma(value, inverse, splat(float(_ZERO_CODE))))
            near = maximum(minimum(near, splat(float(_LARGEST_CODE))), splat(0.0))
            codes.append(bind(tirx.Cast(f"uint8x{LANES}", tirx.Cast(f"int32x{LANES}", near))))
        four = tirx.Broadcast(tirx.IntImm("uint8", 4), LANES)
        for i in range(2):
            place = at(group * (GROUP // 2) + i * LANES)
            self.cache.data[self.slot, self.number, position, place] = codes[i] | (codes[i + 2] << four)


def spread(values: list[Expr]) -> list[Expr]:
    """A group, four vectors, times the orthogonal Hadamard matrix of 32, which is its own inverse."""
    for distance in (1, 2):
        pairs = [(i, i + distance) for i in range(4) if not i & distance]
        sums = {place: bind(value) for i, j in pairs for place, value in _sum_and_difference(values, i, j)}
        values = [sums[i] for i in range(4)]
    for distance in (4, 2, 1):
        signs = [tirx.FloatImm("float32", -1.0 if lane & distance else 1.0) for lane in range(LANES)]
        sign = tirx.Shuffle(signs, list(range(LANES)))
        others = [repeat(value, [lane ^ distance for lane in range(LANES)]) for value in values]
        values = [bind(fma(value, sign, other)) for value, other in zip(values, others, strict=True)]
    return [bind(value * splat(GROUP**-0.5)) for value in values]


def _sum_and_difference(values: list[Expr], i: int, j: int) -> list[tuple[int, Expr]]:
    return [(i, values[i] + values[j]), (j, values[i] - values[j])]


def spread_rows(rows: KernelTensor, count: Expr, width: int) -> None:
    """Turn the first `count` rows of float32 [any, width], a multiple of 32, in place."""
    with loop(0, count) as row, loop(0, width // GROUP) as group:
        starts = [bind(group * GROUP + i) for i in range(0, GROUP, LANES)]
        for start, value in zip(starts, spread([bind(load(rows, row, start)) for start in starts]), strict=True):
            store(rows, row, start, value=value)


def cache_argument(function: KernelFunction, name: str) -> Cache:
    """Return the cache of that name: argument `name` and, in q8 and q4, `name`_scales."""
    data = function[name]
    return Cache(data, function.get(f"{name}_scales"), data.columns * (2 if data.dtype == "uint8" else 1))


@body(CacheWriteSpec)
def cache_write(spec: CacheWriteSpec, function: KernelFunction) -> None:
    """Write the body of a `CacheWriteSpec`."""
    x, cache = function["x"], cache_argument(function, "cache")
    tokens = step_rows(function, spec)
    with parallel(tokens.count, when_worth=spec.rows > 1) as t:
        position, slot = bind(tokens.position(t)), tokens.slot(t)
        with loop(0, spec.kv_heads) as head:

            def source(c: Expr, valid: int) -> Expr:
                return load(x, t, head * spec.head_dim + c, valid=valid)

            cache.head(slot, head).write(position, source)
