"""Matrices of integers in groups of inputs, each with a scale and a zero: their values, and exact rows of ours."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from picompile_passes.formats import FORMATS, GROUP
from picompile_passes.formats.packing import data_bytes

# Inputs that are unpacked at a time; a multiple of those that fill whole words.
STEP = 256


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
            values[:, start:stop] = (self._differences(start, stop).to(torch.float32) * group_scales).T
        return values

    def packed(self, format_name: str) -> Tensor | None:
        """Return the rows in q8 or q4, uint8 [outputs, row bytes], where that is exact; else None.

        It is where 32 columns side by side are of one group, scales are numbers of float16, and every code - zero is
        one of the format: symmetric 4-bit matrices in q4, all 4-bit matrices in q8.
        """
        form, inputs, outputs = FORMATS[format_name], len(self.groups), self.scales.shape[1]
        # A format's zeros, tables and planes are not those of the checkpoint.
        if form.data_bits not in (4, 8) or form.zero is None or form.table or inputs % GROUP:
            return None
        by_group, halves = self.groups.view(-1, GROUP), self.scales.to(torch.float16)
        if not bool((by_group == by_group[:, :1]).all()) or not torch.equal(halves.to(self.scales.dtype), self.scales):
            return None
        own_zero = int(form.zero)
        packed = torch.zeros(outputs, form.row_bytes(inputs), dtype=torch.uint8)
        for start, stop in self._steps():
            codes = self._differences(start, stop).T.reshape(outputs, -1, GROUP)
            low, high = torch.aminmax(codes)
            if int(low) + own_zero < form.lowest or int(high) + own_zero > form.highest:
                return None
            data = data_bytes(codes + own_zero, form).reshape(outputs, -1)
            at = start * form.data_bits // 8
            packed[:, at : at + data.shape[1]] = data
        offset, count = form.scale_offset_bytes(inputs), inputs // GROUP
        packed[:, offset : offset + 2 * count] = halves[by_group[:, 0]].T.contiguous().view(torch.uint8)
        return packed

    def _differences(self, start: int, stop: int) -> Tensor:
        return self.codes(start, stop) - self.zeros[self.groups[start:stop]]

    def _steps(self) -> Iterator[tuple[int, int]]:
        inputs = len(self.groups)
        return ((start, min(inputs, start + STEP)) for start in range(0, inputs, STEP))
