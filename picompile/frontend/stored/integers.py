"""Matrices of integers in groups of inputs, each with a scale and a zero: their values, and exact rows of ours."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from picompile.frontend.stored.record import as_float16
from picompile_passes.formats import FLOAT16, FORMATS, GROUP, ZERO_STEPS, Codec
from picompile_passes.formats.grids import GroupGrid
from picompile_passes.formats.packing import pack_codes

# Inputs that are unpacked at a time; a multiple of those that fill whole words.
STEP = 256
# The largest zero that a byte has in a format with a zero for each group.
_MOST_ZERO = int(255 / ZERO_STEPS)


@dataclass(frozen=True)
class IntegerMatrix:
    """A matrix of weights (code - zero) × scale, zero and scale those of the group of the input and of the output.

    `codes` returns the codes, of `bits` bits, of the inputs from its first to before its second argument, a multiple of
    32 and the next one or the end: int16 [inputs, outputs]. `zeros` is int16 and `scales` float, [groups, outputs];
    `groups` int64 [inputs] has the group of each input.
    """

    bits: int
    codes: Callable[[int, int], Tensor]
    zeros: Tensor
    scales: Tensor
    groups: Tensor

    def values(self) -> Tensor:
        """Return the weights, float32 [outputs, inputs], exact where scales are float16."""
        scales = self.scales.to(torch.float32)
        values = torch.empty(scales.shape[1], len(self.groups), dtype=torch.float32)
        for start, stop in self._steps():
            group_scales = scales[self.groups[start:stop]]
            differences = self.codes(start, stop) - self.zeros[self.groups[start:stop]]
            values[:, start:stop] = (differences.to(torch.float32) * group_scales).T
        return values

    def stored_format(self) -> str | None:
        """Return the smallest format that has all weights, whatever their codes; None where there is none."""
        if self._halves() is None:
            return None
        least, most = (int(end) for end in torch.aminmax(self.zeros))
        last = (1 << self.bits) - 1
        for form in sorted((FORMATS[name] for name in FORMATS.builtin), key=lambda form: form.bits):
            if not _is_candidate(form):
                continue
            zero = int(form.zero or 0)
            if form.zero is None:
                has_all = last <= form.highest and least >= 0 and most <= _MOST_ZERO
            else:
                has_all = form.least_code <= zero - most and last - least + zero <= form.highest
            if has_all:
                return form.name
        return None

    def _halves(self) -> Tensor | None:
        """Return the scales as float16; None where they are not, or 32 columns side by side are of several groups."""
        if len(self.groups) % GROUP:
            return None
        by_group = self.groups.view(-1, GROUP)
        return as_float16(self.scales) if bool((by_group == by_group[:, :1]).all()) else None

    def packed(self, format_name: str) -> Tensor | None:
        """Return the rows packed as a format of ours, uint8 [outputs, row bytes], where it has all weights; else None.

        It has where 32 columns side by side are of one group, scales are numbers of float16, or nearly so, and codes
        are those of the format: symmetric 4-bit matrices in q4, all of up to 4 bits in q4m, symmetric ones of 8 in q8.
        """
        form, inputs, outputs = FORMATS[format_name], len(self.groups), self.scales.shape[1]
        halves = self._halves() if _is_candidate(form) else None
        if halves is None:
            return None
        zeros = self.zeros if form.zero is None else torch.full_like(self.zeros, int(form.zero))
        least, most = (int(end) for end in torch.aminmax(zeros))
        if form.zero is None and not 0 <= least <= most <= _MOST_ZERO:
            return None
        codes = torch.empty(outputs, inputs, dtype=torch.int16)
        for start, stop in self._steps():
            part = self.codes(start, stop)
            if form.zero is not None:
                part = part - self.zeros[self.groups[start:stop]] + int(form.zero)
            low, high = torch.aminmax(part)
            if int(low) < form.least_code or int(high) > form.highest:
                return None
            codes[:, start:stop] = part.T
        packed = torch.zeros(outputs, form.row_bytes(inputs), dtype=torch.uint8)
        scales, own = (each[self.groups[::GROUP]].T.to(torch.float32) for each in (halves, zeros))
        pack_codes(codes.view(outputs, -1, GROUP), GroupGrid(form, scales, own), inputs, packed)
        return packed

    def _steps(self) -> Iterator[tuple[int, int]]:
        inputs = len(self.groups)
        return ((start, min(inputs, start + STEP)) for start in range(0, inputs, STEP))


def _is_candidate(form: Codec) -> bool:
    """Return whether a format has whole numbers, and a scale and at most a zero for each 32."""
    return form.scale == FLOAT16 and not form.table and form.minimum is None and form.group == GROUP
