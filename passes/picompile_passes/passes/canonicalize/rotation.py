"""Reading a rotary position embedding out of the form of a query or key.

A rotated head has elements c·x[a] ∓ s·x[b], c = g·cos(position · f), s = g·sin(position · f): a pair of elements (a, b)
for each frequency f, and a common factor g. How a model orders the pairs (halves, as Llama, or neighbours, as GPT-J),
whether it leaves some elements as they are, and where it multiplies by g shows in the form and nowhere else.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from picompile_passes.passes.canonicalize.forms import Form

# The sampled factors are float32 cosines and sines, times a factor of a few float32 roundings.
_TOLERANCE = 1e-5


class _RotationParts(NamedTuple):
    """A value as cosine · x[own] + sine · x[other]. Columns [heads, d]; factors [tokens, heads, d]."""

    own: Tensor
    other: Tensor
    cosine: Tensor
    sine: Tensor


@dataclass(frozen=True)
class Rotation:
    """A value of heads of d elements, each turned by position · frequency and multiplied by `factor`.

    Elements are in the half-split order of the dialect's `rotary`: `order` [d] says which element of the value stands
    at each place, `columns` [heads · d] which column of the root it is made from. `cosine` and `sine` [tokens, d/2] are
    of the first halves, without the factor; both are None where nothing turns.
    """

    columns: Tensor
    order: Tensor
    factor: float
    cosine: Tensor | None = None
    sine: Tensor | None = None

    def turns_by(self, frequencies: Tensor, tolerance: float = _TOLERANCE) -> bool:
        """Whether `frequencies` give the sampled cosines and sines at all positions."""
        if self.cosine is None or self.sine is None:
            return False
        angle = torch.arange(self.cosine.shape[0], dtype=torch.float32).unsqueeze(-1) * frequencies
        return _close(angle.cos(), self.cosine, tolerance) and _close(angle.sin(), self.sine, tolerance)

    def frequencies(self) -> Tensor:
        """The frequencies [d/2], float64, as exactly as the sample has them: the longer, the better.

        The angle at position 1 gives each to 1e-7; each later position, four times as far, tells it four times better,
        as long as the estimate is good enough to know how many whole turns lie between.
        """
        if self.cosine is None or self.sine is None:
            raise ValueError("nothing turns")
        angles = torch.atan2(self.sine.double(), self.cosine.double())
        estimate, position = angles[1], 1
        while (position := min(4 * position, angles.shape[0] - 1)) > 1:
            turned = torch.remainder(angles[position] - position * estimate + torch.pi, 2 * torch.pi) - torch.pi
            estimate = estimate + turned / position
            if position == angles.shape[0] - 1:
                break
        return estimate


def read_rotation(form: Form, columns: int, heads: int) -> Rotation | None:
    """The rotation that `form`, [tokens, heads · d] of a root with `columns` columns, is; None where it is none."""
    parts = _parts(form, columns, heads)
    if parts is None:
        return None
    factor = float(parts.cosine[0, 0, 0])
    own, other, cosine, sine = parts.own, parts.other, parts.cosine / factor, parts.sine / factor
    turning = (sine[:, 0] != 0).any(dim=0)
    if not turning.any() and _close(cosine, torch.ones_like(cosine)) and not sine.any():
        return Rotation(own.flatten(), torch.arange(own.shape[1]), factor)
    halves = _halves(own[0], other[0], turning & (sine[1, 0] < 0), turning)
    if halves is None:
        return None
    first, second = halves
    order = torch.cat(halves)
    rotation = Rotation(own[:, order].flatten(), order, factor, cosine[:, 0, first], -sine[:, 0, first])
    expected = _rebuilt(rotation, own, first, second)
    return rotation if _agrees(expected, _RotationParts(own, other, cosine, sine)) else None


def _parts(form: Form, columns: int, heads: int) -> _RotationParts | None:
    """Sums the terms of each element by the columns they read; None where there are more than two."""
    tokens = form.shape.numel() // (form.shape[-1])
    shape = (len(form.terms), tokens, heads, -1)
    index = torch.stack([term.index for term in form.terms]).reshape(shape)
    factor = torch.stack([term.factor for term in form.terms]).reshape(shape)
    column = index - columns * torch.arange(tokens).reshape(1, tokens, 1, 1)
    if not bool((column == column[:, :1]).all()) or not factor[:, 0].any():
        return None
    column = column[:, 0]
    own = column.gather(0, factor[:, 0].abs().argmax(dim=0, keepdim=True))[0]
    used = (factor != 0).any(dim=1) & (column != own)
    other = torch.where(used, column, own).gather(0, used.int().argmax(dim=0, keepdim=True))[0]
    if not bool(((column == other) | ~used).all()):
        return None
    mine = (column == own).unsqueeze(1)
    zero = torch.zeros((), dtype=factor.dtype)
    return _RotationParts(
        own, other, torch.where(mine, factor, zero).sum(dim=0), torch.where(mine, zero, factor).sum(dim=0)
    )


def _halves(own: Tensor, other: Tensor, is_first: Tensor, turning: Tensor) -> tuple[Tensor, Tensor] | None:
    """The elements of one head that make the first halves, and those that make the second, pair by pair."""
    place = {int(column): number for number, column in enumerate(own)}
    first = is_first.nonzero().flatten()
    partners = [place.get(int(other[number]), -1) for number in first]
    still = (~turning).nonzero().flatten()
    if -1 in partners or 2 * len(first) + len(still) != len(own) or len(still) % 2:
        return None
    second = torch.tensor(partners, dtype=torch.int64)
    return torch.cat([first, still[: len(still) // 2]]), torch.cat([second, still[len(still) // 2 :]])


def _rebuilt(rotation: Rotation, own: Tensor, first: Tensor, second: Tensor) -> _RotationParts:
    """The parts that a value turned by `rotation` has, its factor left out."""
    heads, size = own.shape
    cosine, sine = (
        torch.zeros(rotation.cosine.shape[0], heads, size, dtype=torch.float64)  # type: ignore[union-attr]
        for _ in range(2)
    )
    other = torch.empty_like(own)
    for half, opposite, sign in ((first, second, -1.0), (second, first, 1.0)):
        cosine[:, :, half] = rotation.cosine.unsqueeze(1)  # type: ignore[union-attr]
        sine[:, :, half] = sign * rotation.sine.unsqueeze(1)  # type: ignore[union-attr]
        other[:, half] = own[:, opposite]
    return _RotationParts(own, other, cosine, sine)


def _agrees(expected: _RotationParts, found: _RotationParts) -> bool:
    """Whether the factors are the same everywhere, and the columns wherever a sine reads them."""
    turning = (found.sine != 0).any(dim=0)
    same_columns = bool(((expected.other == found.other) | ~turning).all())
    return same_columns and _close(expected.cosine, found.cosine) and _close(expected.sine, found.sine)


def _close(left: Tensor, right: Tensor, tolerance: float = _TOLERANCE) -> bool:
    return torch.allclose(left.double(), right.double(), rtol=0.0, atol=tolerance)
