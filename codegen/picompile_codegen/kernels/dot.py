"""Products of rows of a packed matrix with one vector: what decoding is made of.

A matrix is read once, front to back, and everything else stays in the first-level cache, so these are bound by memory as
long as a group of weights costs no more cycles than its bytes take to arrive.
"""

from dataclasses import dataclass

from picompile_codegen.kernels.matrix import Group, Matrix, each_group
from picompile_codegen.kernels.tensor import Expr, Tensor, local
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
        return [load(self.x, 0, group * GROUP + i * LANES, valid=valid) for i, valid in enumerate(lane_counts)]


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


def dot(matrix: Matrix, row: Expr, vector: Vector) -> Expr:
    """The product of one row of `matrix` with `vector`: a scalar."""
    sums = local(_CHAINS * LANES)
    for chain in range(_CHAINS):
        sums[at(chain * LANES)] = splat(0.0)
    unroll = 1 if matrix.scale is None else _CHAINS
    position = 0

    def add_group(group: Expr, lane_counts: tuple[int, ...]) -> None:
        nonlocal position
        weights, inputs = matrix.group(row, group), vector.group(group, lane_counts)
        if weights.scale is None:
            for i, value in enumerate(inputs):
                _add(sums, i, weights.raw[i], value)
            return
        products = _raw_products(weights, inputs, vector.offsets, group)
        _add(sums, position % _CHAINS, products, splat(weights.scale))
        position += 1

    each_group(matrix.columns, add_group, unroll)
    first, second, third, fourth = (sums[at(chain * LANES)] for chain in range(_CHAINS))
    return total((first + second) + (third + fourth))


def _add(sums: Tensor, chain: int, a: Expr, b: Expr) -> None:
    index = at(chain * LANES)
    sums[index] = fma(a, b, sums[index])


def _raw_products(weights: Group, inputs: list[Expr], offsets: Tensor | None, group: Expr) -> Expr:
    """Σ (raw + offset) · x of one group, lane by lane."""
    if offsets is None:
        products, start = weights.raw[0] * inputs[0], 1
    else:
        products, start = load(offsets, group * LANES), 0
    for raw, value in zip(weights.raw[start:], inputs[start:], strict=False):
        products = fma(raw, value, products)
    return products
