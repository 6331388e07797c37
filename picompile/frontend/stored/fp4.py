"""Matrices of FP4 numbers (E2M1), two in a byte, the first in its low half."""

import torch
from torch import Tensor

from picompile.frontend.stored.blocks import Coded, ScaledBlocks, look_up, pair_table

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp4_blocks(stored: Tensor, scales: Tensor, group: int, form: str, unit: float = 1.0) -> ScaledBlocks:
    """Return the matrix [rows, inputs] of bytes uint8 [rows, inputs / 2], with a scale for each `group` of inputs.

    `scales` are [rows, groups]; bytes stand for powers of two (E8M0). Scales of our format `form` are `unit` times
    those.
    """
    table = pair_table(torch.tensor([*_E2M1, *(-value for value in _E2M1)]), low_first=True)
    codes = pair_table(torch.arange(16, dtype=torch.uint8), low_first=True)
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return ScaledBlocks(
        lambda start, stop: look_up(stored[start:stop], table),
        (stored.shape[0], 2 * stored.shape[1]),
        scales.to(torch.float32),
        (1, group),
        coded=Coded(form, lambda start, stop: look_up(stored[start:stop], codes), unit=unit),
    )
