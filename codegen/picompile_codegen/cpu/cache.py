"""The KV cache: how keys and values of all sequences are stored, read and written.

float16 and float32 are stored as they are. In q8 each 32 consecutive elements of a row share a float16 scale, as
weights do (`dialect/formats.py`): an element is off by at most half of it, 1/254 of the largest of the 32, and 4e-6
more where that is so small that float16 holds its scale with few bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import Expr, KernelTensor, bind, loop, maximum, minimum, parallel, prefetch, select
from picompile_codegen.cpu.token_ops import step_rows
from picompile_codegen.cpu.vector import LANES, at, blocks, highest, load, splat, store
from picompile_codegen.specs import CacheWriteSpec
from picompile_codegen.specs.arguments import scale_groups
from picompile_passes.weight_formats import GROUP

LARGEST_BYTE = 127.0
F16_MAX = 65504.0
_LINE_BYTES = 64
ELEMENT_BYTES = {"float32": 4, "float16": 2, "int8": 1}

# A vector of a row: `source(start, valid)` gives lanes from `start` on, of which the first `valid` count.
Source = Callable[[Expr, int], Expr]


@dataclass(frozen=True)
class Cache:
    """Keys or values of a layer: `data` kv_dtype [sequences, kv_heads, context, dim]; in q8 int8, and `scales` float16
    [sequences, kv_heads, context, groups of 32]."""

    data: KernelTensor
    scales: KernelTensor | None
    dim: int

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
        return self.cache.dim * ELEMENT_BYTES[self.cache.data.dtype]

    def raw(self, position: Expr, start: Expr, valid: int = LANES, lanes: int = LANES) -> Expr:
        """A vector of float32 from a row, to be multiplied by the row's scale where there is one."""
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
        """`count` bytes of a row in q8 as int16, of which the first `valid` are read and the others 0."""
        data, row = self.cache.data, (self.slot, self.number, position)
        if valid >= count:
            return tirx.Cast(f"int16x{count}", data[(*row, at(start, count))])
        zero = tirx.IntImm("int16", 0)
        words = [tirx.Cast("int16", data[(*row, start + i)]) if i < valid else zero for i in range(count)]
        return tirx.Shuffle(words, list(range(count)))

    def value(self, position: Expr, start: Expr, valid: int = LANES) -> Expr:
        """A vector of float32 from a row, which does not cross a multiple of 32."""
        raw = self.raw(position, start, valid)
        return raw if self.cache.scales is None else raw * splat(self.scale(position, start // GROUP))

    def prefetch_scales(self, position: Expr, rows: int) -> None:
        """Prefetch the scales of `rows` rows from `position` on, where there are any."""
        if self.cache.scales is not None:
            for start in range(0, rows * self.groups, _LINE_BYTES // 2):
                prefetch(self.cache.scales, self.slot, self.number, position, start)

    def prefetch(self, position: Expr, into_first_level: bool) -> None:
        """Prefetch a row, which need not exist."""
        for start in range(0, self.cache.dim, _LINE_BYTES // ELEMENT_BYTES[self.cache.data.dtype]):
            place = (self.slot, self.number, position, start)
            prefetch(self.cache.data, *place, into_first_level=into_first_level)

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


def cache_argument(function: KernelFunction, name: str) -> Cache:
    """Return the cache of that name: argument `name` and, in q8, `name`_scales."""
    data = function[name]
    return Cache(data, function.get(f"{name}_scales"), data.columns)


def cache_write(spec: CacheWriteSpec, function: KernelFunction) -> None:
    """Write the body of a `CacheWriteSpec`."""
    x, cache = function["x"], cache_argument(function, "cache")
    tokens = step_rows(function, spec.mode, spec.rows, spec.context, spec.sequences)
    with parallel(tokens.count, when_worth=spec.rows > 1) as t:
        position, slot = bind(tokens.position(t)), tokens.slot(t)
        with loop(0, spec.kv_heads) as head:

            def source(c: Expr, valid: int) -> Expr:
                return load(x, t, head * spec.head_dim + c, valid=valid)

            cache.head(slot, head).write(position, source)
