"""Products of rows of a packed matrix with one vector: what decoding is made of.

A matrix is read once, front to back; all else stays in the first-level cache. So these are bound by memory, as long as
a group of weights costs no more cycles than its bytes take to arrive. A core at 3.7 GHz gets through 24 GB/s of q8 and
11 GB/s of q4 (20 billion weights a second): with activations in float32, a group takes four conversions and five
multiply-adds, and in q4 six instructions to unpack it.
"""

from dataclasses import dataclass
from itertools import cycle

from picompile_codegen.kernels.matrix import Group, Matrix, each_group
from picompile_codegen.kernels.tensor import Expr, Tensor, bind, local
from picompile_codegen.kernels.vector import LANES, at, fma, load, splat, store, total
from picompile_passes.dialect.formats import GROUP

# A multiply-add takes four cycles and two can start in each; four chains are enough while memory is what is waited for.
_CHAINS = 4


@dataclass(frozen=True)
class Vector:
    """The vector that rows are multiplied with: x[0], and what the offset of a format makes of it.

    Σ (raw + offset) · x = Σ raw · x + offset · Σ x, and the second sum is the same for every row. `offsets` holds
    it for each group, lane by lane, so that a group's sum merely starts from there.
    """

    x: Tensor
    offsets: Tensor | None

    def group(self, group: Expr, lane_counts: tuple[int, ...]) -> list[Expr]:
        """The vectors that meet group `group` of a row."""
        return [bind(load(self.x, 0, group * GROUP + i * LANES, valid=valid)) for i, valid in enumerate(lane_counts)]


def prepare_vector(x: Tensor, matrix: Matrix) -> Vector:
    """Readies x float32 [1, columns] for products with rows of `matrix`, or of any of its format and width."""
    if not matrix.offset:
        return Vector(x, None)
    offsets = local(matrix.groups * LANES)
    vector = Vector(x, offsets)

    def sum_group(group: Expr, lane_counts: tuple[int, ...]) -> None:
        inputs = vector.group(group, lane_counts)
        store(offsets, group * LANES, value=sum(inputs[1:], inputs[0]) * splat(matrix.offset))

    each_group(matrix.columns, sum_group)
    return vector


def dot(matrix: Matrix, number: Expr, vector: Vector, ahead: Expr | None = None) -> Expr:
    """The product of row `number` of `matrix` with `vector`: a scalar. Row `ahead` is read next (see `Matrix.row`)."""
    sums = local(_CHAINS, LANES)
    for chain in range(_CHAINS):
        sums[chain, at(0)] = splat(0.0)
    row = matrix.row(number, ahead=ahead)
    chains = cycle(range(_CHAINS))

    def add_group(group: Expr, lane_counts: tuple[int, ...]) -> None:
        part, inputs = row.group(group), vector.group(group, lane_counts)
        if part.scale is None:
            for raw, value in zip(part.raw, inputs, strict=False):
                _add(sums, next(chains), raw, value)
        else:
            _add(sums, next(chains), _raw_products(part, inputs, vector.offsets, group), part.scale)

    each_group(matrix.columns, add_group, unroll=matrix.groups_per_line)
    a, b, c, d = (sums[chain, at(0)] for chain in range(_CHAINS))
    return total((a + b) + (c + d))


def biased(product: Expr, bias: Tensor | None, row: Expr) -> Expr:
    """`product` of row `row`, with its bias where there is one."""
    return product if bias is None else bind(product + bias[row])


def _add(sums: Tensor, chain: int, a: Expr, b: Expr) -> None:
    sums[chain, at(0)] = fma(a, b, sums[chain, at(0)])


def _raw_products(part: Group, inputs: list[Expr], offsets: Tensor | None, group: Expr) -> Expr:
    """Σ (raw + offset) · x of one group, lane by lane."""
    raw, values = list(part.raw[: len(inputs)]), list(inputs)
    products = raw.pop(0) * values.pop(0) if offsets is None else load(offsets, group * LANES)
    for a, b in zip(raw, values, strict=True):
        products = fma(a, b, products)
    return products
