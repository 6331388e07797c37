"""Matrices of integers in groups of inputs, each with a scale and a zero: their values, and exact rows of ours."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from picompile_passes.formats import FLOAT16, FORMATS, GROUP, ZERO_STEPS
from picompile_passes.formats.packing import GroupGrid, pack_codes

# Inputs that are unpacked at a time; a multiple of those that fill whole words.
STEP = 256
# The largest zero that a byte has in a format with a zero for each group.
_MOST_ZERO = int(255 / ZERO_STEPS)


@dataclass(frozen=True)
class IntegerMatrix:
    """A matrix of weights (code - zero) × scale, zero and scale those of the group of the input and of the output.

    `codes` returns the codes of the inputs from its first to before its second argument, a multiple of 32 and the next
    one or the end: int16 [inputs, outputs]. `zeros` is int16 and `scales` float, [groups, outputs]; `groups` int64
    [inputs] has the group of each input.
    """

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

    def packed(self, format_name: str) -> Tensor | None:
        """Return the rows packed as a format of ours, uint8 [outputs, row bytes], where that is exact; else None.

        It is where 32 columns side by side are of one group, scales are numbers of float16, and the format has all
        codes: symmetric 4-bit matrices in q4, and all of up to 4 bits in q4m, q6 and q8.
        """
        form, inputs, outputs = FORMATS[format_name], len(self.groups), self.scales.shape[1]
        if form.table or form.scale != FLOAT16 or inputs % GROUP:
            return None
        by_group, halves = self.groups.view(-1, GROUP), self.scales.to(torch.float16)
        if not bool((by_group == by_group[:, :1]).all()) or not torch.equal(halves.to(self.scales.dtype), self.scales):
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
            if int(low) < form.lowest or int(high) > form.highest:
                return None
            codes[:, start:stop] = part.T
        packed = torch.zeros(outputs, form.row_bytes(inputs), dtype=torch.uint8)
        scales, own = (each[by_group[:, 0]].T.to(torch.float32) for each in (halves, zeros))
        pack_codes(codes.view(outputs, -1, GROUP), GroupGrid(form, scales, own), inputs, packed)
        return packed

    def _steps(self) -> Iterator[tuple[int, int]]:
        inputs = len(self.groups)
        return ((start, min(inputs, start + STEP)) for start in range(0, inputs, STEP))
