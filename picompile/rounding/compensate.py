"""Rounding with compensation: weights that are not rounded yet compensate for the errors of those that are.

If a matrix W is multiplied with inputs x whose second moments are H = Σ x · xᵀ, rounding it to Q costs
tr((W - Q) · H · (W - Q)ᵀ). Inputs are taken one after another; the error of one input's weights is distributed over the
weights of the following inputs, by the inverse of H (GPTQ, arXiv 2210.17323). With U upper triangular and Uᵀ · U = H⁻¹,

    e = (w - q) / U[i, i],   w[j] -= U[i, j] · e   for all j > i

The order of the inputs is free, except that groups share a scale: inputs with large moments come first, because fewer
inputs are left to compensate for later ones.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from picompile.errors import UnsupportedModelError
from picompile_passes.formats import GROUP, Codec
from picompile_passes.formats.grids import GroupGrid, group_grid
from picompile_passes.formats.packing import pack_codes

# Added to the diagonal of H, as a share of its mean; ten times as much at each further try.
_DAMPING, _MOST_DAMPING = 0.01, 1.0
# A group's span of weights is tried whole and cut at both ends: the few outside are rounded worse, all others better.
_SHRINKS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)
# Inputs whose errors are collected before they are spread over all that follow.
_BLOCK = 4 * GROUP
# Outputs that are rounded together: bounds the memory that an output head takes.
_OUTPUTS = 16_384


def round_rows(weight: Tensor, moments: Tensor, form: Codec) -> Tensor:
    """Round a matrix whose rows are outputs, so that groups are of 32 inputs; return it packed.

    Args:
        weight: [outputs, inputs], of any float dtype.
        moments: second moments of its inputs, float32 [inputs, inputs].
        form: a format of integers.

    Returns:
        uint8 [outputs, row bytes], as `picompile_passes.formats` lays rows out.

    Raises:
        UnsupportedModelError: the moments are not finite.
    """
    outputs, inputs = weight.shape
    order = _order_of_groups(moments.diagonal(), form.padded_columns(inputs))
    factor = inverse_factor(moments, order)
    packed = torch.zeros(outputs, form.row_bytes(inputs), dtype=torch.uint8)
    for start in range(0, outputs, _OUTPUTS):
        part = slice(start, start + _OUTPUTS)
        work = torch.zeros(len(order), len(packed[part]))
        work[:inputs] = weight[part].T
        rounding = _GroupsOfInputs(form, order, work.shape[1])
        _compensate(work[order], factor, rounding)
        rounding.pack(inputs, packed[part])
    return packed


def round_neurons(weight: Tensor, moments: Tensor, form: Codec) -> Tensor:
    """Round a matrix whose rows are neurons, that is inputs, so that groups are of 32 outputs; return it packed.

    Args:
        weight: the down matrix [neurons, outputs], of any float dtype.
        moments: second moments of the neurons' outputs, float32 [neurons, neurons].
        form: a format of integers.

    Returns:
        uint8 [neurons, row bytes].

    Raises:
        UnsupportedModelError: the moments are not finite.
    """
    neurons, outputs = weight.shape
    order = moments.diagonal().argsort(descending=True, stable=True)
    factor = inverse_factor(moments, order)
    work = torch.zeros(neurons, form.padded_columns(outputs))
    work[:, :outputs] = weight
    rounding = _GroupsOfOutputs(form, neurons, work.shape[1] // GROUP)
    _compensate(work[order], factor, rounding)
    packed = torch.zeros(neurons, form.row_bytes(outputs), dtype=torch.uint8)
    rounding.pack(outputs, packed)
    return packed[order.argsort()].contiguous()


def inverse_factor(moments: Tensor, order: Tensor) -> Tensor:
    """Return U, upper triangular, with Uᵀ · U = (H + damping)⁻¹, float32: H are the moments of inputs in this order.

    With J · H · J = L · Lᵀ, where J reverses the order, H = M · Mᵀ for the upper triangular M = J · L · J, and U = M⁻¹:
    one factorization, where that of the inverse would take two. An order may be longer than there are inputs: those
    that do not exist have moments of 0.

    Raises `UnsupportedModelError` where the moments are not finite numbers.
    """
    mean = float(moments.diagonal().mean())
    if not mean < float("inf"):
        raise UnsupportedModelError("inputs of a layer are not finite numbers: the model's weights are damaged")
    damping = _DAMPING
    while True:
        damped = _permuted(moments, order.flip(0))
        damped.diagonal().add_(damping * mean if mean > 0 else 1.0)
        lower, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0 or damping >= _MOST_DAMPING:
            break
        damping *= 10.0
    # A block of many neurons has large moments: none is kept longer than it is needed.
    del damped
    upper = lower.flip(0, 1)
    del lower
    inverse: Tensor = torch.linalg.solve_triangular(upper, torch.eye(len(upper)), upper=True)
    return inverse


def _order_of_groups(diagonal: Tensor, padded: int) -> Tensor:
    """Return an order of `padded` inputs, int64: groups by the sum of their moments, a group's inputs by theirs."""
    energy = torch.zeros(padded)
    energy[: len(diagonal)] = diagonal
    by_group = energy.view(-1, GROUP)
    inside = by_group.argsort(dim=1, descending=True, stable=True) + torch.arange(0, padded, GROUP).unsqueeze(1)
    return inside[by_group.sum(dim=1).argsort(descending=True, stable=True)].flatten()


def _permuted(moments: Tensor, order: Tensor) -> Tensor:
    """Return the moments with inputs in this order; inputs that do not exist have moments of 0."""
    size, known = len(order), len(moments)
    if size == known:
        return moments[order][:, order]
    padded = torch.zeros(size, size)
    padded[:known, :known] = moments
    return padded[order][:, order]


class _Rounding(ABC):
    """Rounds the weights of one input after another, in the order that they are given in."""

    @abstractmethod
    def begin(self, first: int, weights: Tensor, sizes: Tensor) -> None:
        """See the weights [32, outputs] of the inputs that follow, and the size of an error of 1 of each, [32]."""

    @abstractmethod
    def round(self, number: int, weights: Tensor) -> Tensor:
        """Return the rounded weights of input `number`, [outputs], and keep their codes."""


def _compensate(work: Tensor, factor: Tensor, rounding: _Rounding) -> None:
    """Round `work` [inputs, outputs], which is overwritten; `factor` is U of its inputs."""
    inputs = len(work)
    for start in range(0, inputs, _BLOCK):
        end = min(start + _BLOCK, inputs)
        errors = torch.empty(end - start, work.shape[1])
        for first in range(start, end, GROUP):
            stop = min(first + GROUP, end)
            rounding.begin(first, work[first:stop], factor.diagonal()[first:stop].reciprocal().square())
            for i in range(first, stop):
                error = (work[i] - rounding.round(i, work[i])) / factor[i, i]
                errors[i - start] = error
                if i + 1 < stop:
                    work[i + 1 : stop].addr_(factor[i, i + 1 : stop], error, alpha=-1.0)
            work[stop:end].addmm_(factor[first:stop, stop:end].T, errors[first - start : stop - start], alpha=-1.0)
        work[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1.0)


class _GroupsOfInputs(_Rounding):
    """Groups are of 32 inputs, in an order that keeps them together: each output has a scale for each of them."""

    def __init__(self, form: Codec, order: Tensor, outputs: int) -> None:
        """Prepare for inputs in the `order` of their numbers."""
        self._form, self._order = form, order
        self._codes = torch.empty(outputs, len(order), dtype=torch.int8)
        self._scale, self._zero = (torch.empty(outputs, len(order) // GROUP) for _ in range(2))
        self._grid: GroupGrid | None = None

    def begin(self, first: int, weights: Tensor, sizes: Tensor) -> None:
        """Choose the group's grid, which all its weights will be rounded to."""
        self._grid = best_grid(weights.T.contiguous(), self._form, sizes)
        group = int(self._order[first]) // GROUP
        self._scale[:, group], self._zero[:, group] = self._grid.scale, self._grid.zero

    def round(self, number: int, weights: Tensor) -> Tensor:
        """Return the nearest weights on the group's grid."""
        assert self._grid is not None
        codes = self._grid.codes(weights.unsqueeze(1))
        self._codes[:, int(self._order[number])] = codes.squeeze(1)
        return self._grid.values(codes).squeeze(1)

    def pack(self, inputs: int, packed: Tensor) -> None:
        """Write rows of `inputs` weights to `packed`."""
        codes = self._codes.view(len(packed), -1, GROUP)
        pack_codes(codes, GroupGrid(self._form, self._scale, self._zero), inputs, packed)


class _GroupsOfOutputs(_Rounding):
    """Groups are of 32 outputs: an input's weights have scales of their own, which are chosen when its turn comes."""

    def __init__(self, form: Codec, inputs: int, groups: int) -> None:
        """Prepare for `inputs` inputs, each with weights in `groups` groups."""
        self._form = form
        self._codes = torch.empty(inputs, groups, GROUP, dtype=torch.int8)
        self._scale, self._zero = (torch.empty(inputs, groups) for _ in range(2))

    def begin(self, first: int, weights: Tensor, sizes: Tensor) -> None:
        """Do nothing: every input has scales of its own."""

    def round(self, number: int, weights: Tensor) -> Tensor:
        """Return the nearest weights on the best grids of the input's groups."""
        groups = weights.view(-1, GROUP)
        grid = best_grid(groups, self._form)
        codes = grid.codes(groups)
        self._codes[number], self._scale[number], self._zero[number] = codes, grid.scale, grid.zero
        return grid.values(codes).view(-1)

    def pack(self, outputs: int, packed: Tensor) -> None:
        """Write rows of `outputs` weights to `packed`, in the order in which the inputs came."""
        pack_codes(self._codes, GroupGrid(self._form, self._scale, self._zero), outputs, packed)


@dataclass(frozen=True)
class _Best:
    """The best scale and zero of each group so far, and their errors."""

    grid: GroupGrid
    error: Tensor


def best_grid(groups: Tensor, form: Codec, sizes: Tensor | None = None) -> GroupGrid:
    """Return, for each group, the grid of the least squared rounding error, of several that span all or most of it.

    Args:
        groups: weights, float32 [..., 32].
        form: a format of integers.
        sizes: what a squared error of 1 in each of the 32 counts; None counts all alike.
    """
    best: _Best | None = None
    for shrink in _SHRINKS:
        grid = group_grid(groups, form, shrink)
        squares = (grid.nearest(groups) - groups).square_()
        error = squares.sum(dim=-1) if sizes is None else squares @ sizes
        if best is None:
            best = _Best(grid, error)
            continue
        better = error < best.error
        scale, zero = torch.where(better, grid.scale, best.grid.scale), torch.where(better, grid.zero, best.grid.zero)
        best = _Best(GroupGrid(form, scale, zero), torch.minimum(error, best.error))
    assert best is not None
    return best.grid
