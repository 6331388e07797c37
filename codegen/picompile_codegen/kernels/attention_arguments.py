"""What an attention kernel is made for and given, and how a row's queries, key and value come from that."""

from collections.abc import Callable
from dataclasses import dataclass

from picompile_codegen.kernels.attention_work import Queries
from picompile_codegen.kernels.cache import Cache, CachedHead
from picompile_codegen.kernels.rotary import Angles
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local, loop, maximum, minimum
from picompile_codegen.kernels.vector import LANES, blocks, load, splat, store

# Enough heads of keys for the cores of a desktop machine. Where there are fewer, tasks share the positions as well.
_ENOUGH_HEADS = 16
# Positions of a task then. A multiple of this for long contexts, of which there are no more parts than _MOST_PARTS.
_PART_POSITIONS = 512
_MOST_PARTS = 32


@dataclass(frozen=True)
class Shape:
    """What an attention kernel is made for (see `attention`)."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    context: int
    rows: int
    scale: float
    window: int

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.heads // self.kv_heads

    @property
    def part_positions(self) -> int:
        """Positions that a task goes through at most. Not a matter of threads: results must not depend on these."""
        if self.kv_heads >= _ENOUGH_HEADS:
            return self.context
        return -(-self.context // (_MOST_PARTS * _PART_POSITIONS)) * _PART_POSITIONS

    @property
    def parts(self) -> int:
        """Parts of the context."""
        return -(-self.context // self.part_positions)


@dataclass(frozen=True)
class Tensors:
    """Arguments of an attention kernel (see `attention`). `partial` are what parts come to: for each row, head and
    part `outputs` [value_dim, padded], and in `extremes` the maximum of the scores and the sum of the weights."""

    q: Tensor
    keys: Cache
    values: Cache
    y: Tensor
    new_keys: Tensor | None
    new_values: Tensor | None
    angles: Angles | None
    outputs: Tensor | None
    extremes: Tensor | None


def first_position(shape: Shape, position: Expr) -> Expr:
    """The first position that a token at `position` sees."""
    return bind(maximum(position - (shape.window - 1), 0)) if shape.window else 0


def give(shape: Shape, tensors: Tensors, row: Expr, head: Expr, value: Callable[[Expr], Expr]) -> None:
    """y of a head at `row`: `value(column)` gives its vectors."""
    start = bind(head * shape.value_dim)
    blocks(shape.value_dim, lambda c, n: store(tensors.y, row, start + c, value=value(c), valid=n))


def extend_cache(
    shape: Shape, tensors: Tensors, row: Expr, position: Expr, keys: CachedHead, values: CachedHead
) -> None:
    """Writes this row's key and value."""
    if tensors.new_keys is None or tensors.new_values is None:
        return
    key_start, value_start = bind(keys.number * shape.head_dim), bind(values.number * shape.value_dim)
    source, start = tensors.new_keys, key_start
    if tensors.angles is not None:
        turned = local(1, shape.head_dim)
        tensors.angles.turn(
            source, row, start, shape.head_dim // 2, position,
            lambda c, value, valid: store(turned, 0, c, value=value, valid=valid),
        )  # fmt: skip
        keys.write(position, lambda c, valid: load(turned, 0, c, valid=valid))
    else:
        keys.write(position, lambda c, valid: load(source, row, start + c, valid=valid))
    new_values = tensors.new_values
    values.write(position, lambda c, valid: load(new_values, row, value_start + c, valid=valid))


def ready_queries(shape: Shape, tensors: Tensors, row: Expr, position: Expr, kv_head: Expr) -> Queries:
    """The query heads that share `kv_head`, scaled and, where that is asked for, turned."""
    queries = Queries.of(shape.group, shape.head_dim, shape.value_dim)
    scale = splat(shape.scale)
    with loop(0, queries.padded) as i:
        # Queries past the last fill up a tile, and nobody looks at what becomes of them.
        for c in range(shape.head_dim // LANES * LANES, shape.head_dim, LANES):
            store(queries.q, i, c, value=splat(0.0))
        start = bind((kv_head * shape.group + minimum(i, shape.group - 1)) * shape.head_dim)

        def keep(c: Expr, value: Expr, valid: int) -> None:
            store(queries.q, i, c, value=value * scale, valid=valid)

        if tensors.angles is not None:
            tensors.angles.turn(tensors.q, row, start, shape.head_dim // 2, position, keep)
        else:
            blocks(shape.head_dim, lambda c, valid: keep(c, load(tensors.q, row, start + c, valid=valid), valid))
    return queries
