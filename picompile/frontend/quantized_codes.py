"""The integers of GPTQ and AWQ: how eight or four of them lie in an int32, and which numbers they stand for.

A weight is (code - zero) × scale, zero and scale those of the group of its input and of its output.

| | `qweight`, int32 | `qzeros`, int32 [groups, outputs / 8] | in one int32 |
| --- | --- | --- | --- |
| GPTQ | [inputs / 8, outputs] | zero - 1, in checkpoint format `gptq_v2` zero | element i in bits 4 i to 4 i + 3 |
| AWQ | [inputs, outputs / 8] | zero | element i at place 0, 4, 1, 5, 2, 6, 3, 7 |

With 8 bits there are four in an int32. One is subtracted from and added to whole int32, as GPTQModel does: a zero of 0
borrows from its neighbour.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

WORD_BITS = 32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class CodeLayout:
    """The layout of a checkpoint's integers: `method` is gptq or awq, `less_one` whether zeros are stored less 1.

    `plain` is whether its config says that zeros are in the middle, and that groups are of columns side by side;
    `ordered` whether it says that they are not of columns side by side, so that each matrix needs its `g_idx`.
    """

    method: str
    bits: int
    group_size: int
    less_one: bool
    plain: bool = True
    ordered: bool = False

    @property
    def per_word(self) -> int:
        """Return the number of integers in an int32."""
        return WORD_BITS // self.bits


@dataclass(frozen=True)
class QuantizedMatrix:
    """The tensors of one matrix. `groups` int64 [inputs] has the group of each input, `scales` is [groups, outputs]."""

    layout: CodeLayout
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    groups: Tensor

    @property
    def inputs(self) -> int:
        """Return the number of columns of the weight."""
        return len(self.groups)

    @property
    def outputs(self) -> int:
        """Return the number of rows of the weight."""
        return int(self.scales.shape[1])

    def zeros(self) -> Tensor:
        """Return the zero of each group and output, int16 [groups, outputs]."""
        stored = self.qzeros
        if self.layout.less_one:
            ones = sum(1 << self.layout.bits * place for place in range(self.layout.per_word))
            # int32 wraps around, as it did when 1 was subtracted.
            stored = (stored.to(torch.int64) + ones).to(torch.int32)
        return unpack_columns(stored, self.layout)

    def codes(self, zeros: Tensor, start: int, stop: int) -> Tensor:
        """Return code - zero for the inputs from `start` to `stop`, which are whole int32: int16 [inputs, outputs]."""
        per_word = self.layout.per_word
        if self.layout.method == "awq":
            stored = unpack_columns(self.qweight[start:stop], self.layout)
        else:
            words = self.qweight[start // per_word : -(-stop // per_word)]
            stored = _unpacked(words, self.layout.bits).movedim(-1, 1).reshape(-1, self.outputs)
        return stored[: stop - start] - zeros[self.groups[start:stop]]


def unpack_columns(words: Tensor, layout: CodeLayout) -> Tensor:
    """Return the integers of int32 [rows, n], int16 [rows, n × integers in a word], in the order of the outputs."""
    integers = _unpacked(words, layout.bits)
    if layout.method == "awq":
        integers = integers[..., torch.tensor(_AWQ_PLACES)]
    return integers.reshape(len(words), -1)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the integers of each int32, lowest bits first: int16 [..., integers in a word]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return torch.bitwise_right_shift(words.unsqueeze(-1), shifts).bitwise_and_((1 << bits) - 1).to(torch.int16)
