"""`rotary`: positions as rotations of queries and keys."""

from collections.abc import Iterator

import torch
from torch import Tensor

from picompile_passes.dialect.heads import split_heads
from picompile_passes.dialect.operator import Call, operator


def _heads_fit(call: Call) -> Iterator[str]:
    """Each head has as many pairs of features as there are frequencies."""
    heads, frequencies, dim = call.values["heads"], call.columns("inverse_frequency"), call.columns("x")
    if 2 * frequencies * heads != dim:
        yield f"{heads} heads of {frequencies} frequencies do not fit {dim}"


@operator(
    part="position",
    dimensions={"x": "TD", "positions": "T", "inverse_frequency": "H"},
    result="TD",
    checks=(_heads_fit,),
)
def rotary(
    x: Tensor, positions: Tensor, inverse_frequency: Tensor, heads: int, scaling: float, still_scaling: float = 1.0
) -> Tensor:
    """y = x with each head's (x[i], x[i + d/2]) turned by positions[t] · inverse_frequency[i], times `scaling`.

    Pairs of frequency 0 do not turn, and are multiplied by `still_scaling` instead: the rest of a partly turned head.
    This is the half-split form of GPT-NeoX and Llama (arXiv 2104.09864); `scaling` is 1 except for YaRN and LongRoPE.
    x [T, heads · d], positions int64 [T], inverse_frequency [d/2] → like x.
    """
    cos, sin = (table.unsqueeze(-2) for table in rotary_tables(positions, inverse_frequency, scaling, still_scaling))
    first, second = split_heads(x, heads).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)


def rotary_tables(
    positions: Tensor, inverse_frequency: Tensor, scaling: float, still_scaling: float
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines by which `rotary` multiplies, float32 [T, d/2] each, in eager models' arithmetic."""
    frequency = inverse_frequency.to(torch.float32)
    angle = positions.to(torch.float32).unsqueeze(-1) * frequency
    scale = torch.where(frequency == 0, still_scaling, scaling)
    return angle.cos() * scale, angle.sin() * scale
