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
def rotary(x: Tensor, positions: Tensor, inverse_frequency: Tensor, heads: int, scaling: float) -> Tensor:
    """y = x with each head's (x[i], x[i + d/2]) turned by positions[t] · inverse_frequency[i], times `scaling`.

    This is the half-split form of GPT-NeoX and Llama (arXiv 2104.09864); `scaling` is 1 except for YaRN.
    x [T, heads · d], positions int64 [T], inverse_frequency [d/2] → like x.
    """
    angle = positions.to(torch.float32).unsqueeze(-1) * inverse_frequency.to(torch.float32)
    cos, sin = (angle.cos() * scaling).unsqueeze(-2), (angle.sin() * scaling).unsqueeze(-2)
    first, second = split_heads(x, heads).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
