"""The grids of values that groups of weights may take, and how a group's grid is chosen, in eager PyTorch."""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from picompile_passes.formats import BLOCK, E8M0, GROUP, INT8, ZERO_STEPS, Codec, ScaleType

# float16 reaches 65504; a bfloat16 checkpoint can hold more, and infinity would spread through every later layer.
F16_MAX = 65504.0
# Candidates for the scale of a group, less one, between a code less and a code more than its span. Compiled code takes
# two of them at a time.
STEPS = 7
# Powers of two that are scales: normal float32 numbers, and no weight is beyond float16.
_EXPONENTS = (-126, 13)


@dataclass(frozen=True)
class BlockScales:
    """Scales, or minima, of types that are `in_blocks`: `whole` numbers of groups, times the `factor` of their block.

    `whole` is int16 [..., groups], and `factor` float32 [..., blocks], exact in float16.
    """

    whole: Tensor
    factor: Tensor

    def values(self, group: int) -> Tensor:
        """Return their products, float32 [..., groups], for groups of `group` weights."""
        of_groups = self.factor.repeat_interleave(BLOCK // group, dim=-1)[..., : self.whole.shape[-1]]
        return self.whole.to(torch.float32) * of_groups


@dataclass(frozen=True)
class GroupGrid:
    """The values that the weights of each group may take, as `Codec` defines them for the codes of `form`.

    `scale` is float32 [..., groups], exact in the format's type of scales, and so are `zero` or `minimum`, where groups
    have them. `scale_parts` and `minimum_parts` are what those in blocks are made of.
    """

    form: Codec
    scale: Tensor
    zero: Tensor
    minimum: Tensor | None = None
    scale_parts: BlockScales | None = None
    minimum_parts: BlockScales | None = None

    @classmethod
    def of_parts(
        cls, form: Codec, scale: "Tensor | BlockScales", minimum: "Tensor | BlockScales | None" = None
    ) -> "GroupGrid":
        """Return the grid with these scales and minima, those in blocks by their parts."""
        scales, minima = (
            each.values(form.group) if isinstance(each, BlockScales) else each for each in (scale, minimum)
        )
        assert scales is not None
        parts = (each if isinstance(each, BlockScales) else None for each in (scale, minimum))
        return cls(form, scales, torch.full_like(scales, form.zero or 0.0), minima, *parts)

    def codes(self, groups: Tensor) -> Tensor:
        """Return the codes nearest to `groups` float32 [..., n], as float32; the even one of two."""
        above = groups if self.minimum is None else groups - self.minimum.unsqueeze(-1)
        scaled = above * _inverse(self.scale).unsqueeze(-1)
        if self.form.table:
            return _nearest_in_table(scaled, self.form)
        return scaled.add_(self.zero.unsqueeze(-1)).round_().clamp_(self.form.lowest, self.form.highest)

    def values(self, codes: Tensor) -> Tensor:
        """Return the weights that codes [..., n] stand for, float32."""
        if self.form.table:
            return _table_values(self.form)[codes.to(torch.int64)] * self.scale.unsqueeze(-1)
        values = (codes.to(torch.float32) - self.zero.unsqueeze(-1)) * self.scale.unsqueeze(-1)
        return values if self.minimum is None else values.add_(self.minimum.unsqueeze(-1))

    def nearest(self, groups: Tensor) -> Tensor:
        """Return the values nearest to `groups` float32 [..., n]."""
        return self.values(self.codes(groups))


def group_grid(groups: Tensor, form: Codec, shrink: float = 1.0) -> GroupGrid:
    """Return the grid that spans each group of weights, float32 [..., 32], or `shrink` times that span.

    What lies outside a smaller span is rounded to its end, and what lies inside more finely. Groups of a format whose
    scales are in blocks are those of a row, float32 [..., groups, weights].
    """
    if form.scale == E8M0:
        return _best_power(groups, form, shrink)
    if form.minimum is not None:
        low = groups.amin(dim=-1).clamp_(max=0.0) * shrink
        high = groups.amax(dim=-1).clamp_(min=0.0) * shrink
        return GroupGrid.of_parts(
            form,
            _stored((high - low) / (form.highest - form.lowest), form.scale, form.group),
            _stored(low, form.minimum, form.group),
        )
    if form.zero is None:
        low = groups.amin(dim=-1).clamp_(max=0.0) * shrink
        high = groups.amax(dim=-1).clamp_(min=0.0) * shrink
        scale = _as_f16((high - low) / (form.highest - form.lowest))
        zero = (-low * _inverse(scale) * ZERO_STEPS).round_().clamp_(0.0, 255.0) / ZERO_STEPS
        return GroupGrid(form, scale, zero)
    values = _extremes(form)
    furthest = float(values[values.abs().argmax()])
    if bool((values == -furthest).any()):
        scale = groups.abs().amax(dim=-1) * shrink / abs(furthest)
    else:
        # One value is further from 0 than all others, so the extreme gets it, whatever its sign.
        extreme = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True)).squeeze(-1)
        scale = extreme * shrink / furthest
    return GroupGrid.of_parts(form, _stored(scale, form.scale, form.group))


def _stored(values: Tensor, kind: ScaleType | None, group: int = GROUP) -> "Tensor | BlockScales":
    """Return the numbers of type `kind` that are nearest to `values` float32 [..., groups], groups of `group` weights.

    The factor of a block makes the largest of its whole numbers the largest that the type has.
    """
    if kind is None or not kind.in_blocks:
        return _as_f16(values)
    most, per_block = 127 if kind == INT8 else 255, BLOCK // group
    padded = F.pad(values, (0, -values.shape[-1] % per_block))
    blocks = padded.view(*padded.shape[:-1], -1, per_block)
    largest = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))
    factor = _as_f16(largest / most)
    whole = (blocks * _inverse(factor)).round_().clamp_(-most if kind == INT8 else 0, most).to(torch.int16)
    return BlockScales(whole.flatten(-2)[..., : values.shape[-1]], factor.squeeze(-1))


# A candidate has to leave an error that is smaller by so much of Σ w weight². Else the span stays, which is exact
# where weights lie on its grid.
_WORTH = 1e-6


def fitted_grid(groups: Tensor, form: Codec) -> GroupGrid:
    """Return the grid of each group of weights, float32 [rows, groups, weights], that leaves the least error.

    The error is Σ w (value - weight)², where w is the weight's magnitude and the root of the mean square of its group
    together: of a few spans that reach up to a code further or less far, each with the scale, and the minimum, of least
    squares for its codes. GGML makes its K-quants in this way (`make_qkx2_quants`, `make_qx_quants`).
    """
    weights = groups.square().mean(dim=-1, keepdim=True).sqrt() + groups.abs()
    if not form.has_zeros:
        return GroupGrid.of_parts(form, _stored(_fitted_scale(groups, weights, form), form.scale, form.group))
    scale, minimum = _fitted_line(groups, weights, form)
    stored = _stored(scale, form.scale, form.group)
    if form.minimum is not None:
        return GroupGrid.of_parts(form, stored, _stored(minimum, form.minimum, form.group))
    grid = GroupGrid.of_parts(form, stored)
    zero = (-minimum * _inverse(grid.scale) * ZERO_STEPS).round_().clamp_(0.0, 255.0) / ZERO_STEPS
    return replace(grid, zero=zero)


def _fitted_line(groups: Tensor, weights: Tensor, form: Codec) -> tuple[Tensor, Tensor]:
    """Return scales and minima [rows, groups], of which a code is a multiple and a sum."""
    # Only float16 has minima above 0.
    highest, is_below = float(form.highest), form.minimum is None or form.minimum.in_blocks
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    low = low.clamp(max=0.0) if is_below else low
    # Zeros lie between the first code and the last.
    high = high.clamp(min=0.0) if form.minimum is None else high
    span = high - low
    scale, minimum = span.clamp(min=0.0) / highest, low
    codes = ((groups - low.unsqueeze(-1)) * (highest * _inverse(span)).unsqueeze(-1)).round_()
    least = (weights * (codes * scale.unsqueeze(-1) + low.unsqueeze(-1) - groups).square()).sum(-1)
    sw, sx, worth = weights.sum(-1), (weights * groups).sum(-1), _WORTH * (weights * groups * groups).sum(-1)
    for step in range(STEPS + 1):
        inverse = (highest + 2.0 * step / STEPS - 1.0) * _inverse(span)
        codes = ((groups - low.unsqueeze(-1)) * inverse.unsqueeze(-1)).round_().clamp_(0.0, highest)
        weighted = weights * codes
        sl, sl2, sxl = weighted.sum(-1), (weighted * codes).sum(-1), (weighted * groups).sum(-1)
        determinant = sw * sl2 - sl * sl
        found = (sw * sxl - sx * sl) / determinant, (sl2 * sx - sl * sxl) / determinant
        above = (found[1] > 0) & is_below
        of_codes, at_zero = torch.where(above, sxl / sl2, found[0]), torch.where(above, 0.0, found[1])
        off = of_codes.unsqueeze(-1) * codes + at_zero.unsqueeze(-1) - groups
        error = (weights * off.square()).sum(-1)
        better = (determinant > 0) & (span > 0) & (error < least - worth)
        scale, minimum = torch.where(better, of_codes, scale), torch.where(better, at_zero, minimum)
        least = torch.where(better, error, least)
    return scale, minimum


def _fitted_scale(groups: Tensor, weights: Tensor, form: Codec) -> Tensor:
    """Return scales [rows, groups] of a format with one zero: the furthest code is the extreme's, whatever its sign."""
    zero = form.zero or 0.0
    low, high = form.lowest - zero, form.highest - zero
    extreme = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True)).squeeze(-1)
    end = torch.full_like(extreme, low) if -low > high else high * extreme.sign()
    scale = torch.where(extreme == 0, 0.0, extreme / end)
    values = (groups * (end * _inverse(extreme)).unsqueeze(-1)).round_().clamp_(low, high) * scale.unsqueeze(-1)
    most, worth = (weights * values * (2.0 * groups - values)).sum(-1), _WORTH * (weights * groups * groups).sum(-1)
    for step in range(STEPS + 1):
        inverse = (end + end.sign() * (2.0 * step / STEPS - 1.0)) * _inverse(extreme)
        codes = (groups * inverse.unsqueeze(-1)).round_().clamp_(low, high)
        sl2, sxl = (weights * codes * codes).sum(-1), (weights * codes * groups).sum(-1)
        better = (sl2 > 0) & (sxl.square() > (most + worth) * sl2)
        most, scale = torch.where(better, sxl.square() / sl2, most), torch.where(better, sxl / sl2, scale)
    return scale


def _extremes(form: Codec) -> Tensor:
    """Return values over their scale, with the least and the greatest among them, of a format with one zero."""
    return _table_values(form) if form.table else torch.tensor([form.lowest, form.highest]) - (form.zero or 0.0)


def _as_f16(scale: Tensor) -> Tensor:
    return scale.clamp_(-F16_MAX, F16_MAX).to(torch.float16).to(torch.float32)


def _best_power(groups: Tensor, form: Codec, shrink: float) -> GroupGrid:
    """Return grids whose scales are powers of two: of the two that span most and all of a group, the nearer one.

    The first is the scale of the OCP specification, 2^(floor(log2 of the largest weight) - floor(log2 of the largest
    value)).
    """
    largest = groups.abs().amax(dim=-1) * shrink
    most = math.floor(math.log2(float(_extremes(form).abs().max())))
    exponents = (torch.frexp(largest).exponent - 1 - most).clamp_(*_EXPONENTS)
    grids = []
    for more in (0, 1):
        scale = torch.ldexp(torch.ones_like(largest), (exponents + more).clamp_(*_EXPONENTS))
        scale = torch.where(largest == 0, 0.0, scale)
        grids.append(GroupGrid(form, scale, torch.full_like(scale, form.zero or 0.0)))
    errors = [(grid.nearest(groups) - groups).square_().sum(dim=-1) for grid in grids]
    scale = torch.where(errors[1] < errors[0], grids[1].scale, grids[0].scale)
    return GroupGrid(form, scale, grids[0].zero)


def _table_values(form: Codec) -> Tensor:
    return torch.tensor(form.table, dtype=torch.float32) * form.table_step


def _nearest_in_table(scaled: Tensor, form: Codec) -> Tensor:
    """Return the codes of the values in the format's table that are nearest to `scaled`; the even code of two."""
    values, codes = _table_values(form).sort(stable=True)
    middles = (values[1:] + values[:-1]) / 2
    # A number at a middle goes below it: where the code above is the even one, the border is the next number below.
    below = torch.nextafter(middles, torch.tensor(-torch.inf))
    borders = torch.where(codes[1:] % 2 == 0, below, middles)
    return codes.to(torch.float32)[torch.bucketize(scaled, borders)]


def _inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale, and 0 where the scale is 0: such a group is all zeros."""
    return torch.where(scale == 0, torch.zeros_like(scale), 1.0 / scale)


def has_powers(scales: Tensor, form: Codec) -> bool:
    """Return whether these powers of two are normal numbers of float32, as ours are, and all weights are finite."""
    least, most = torch.aminmax(scales)
    largest = most * (max(form.table) * form.table_step)
    return float(least) >= torch.finfo(torch.float32).tiny and bool(torch.isfinite(largest))
