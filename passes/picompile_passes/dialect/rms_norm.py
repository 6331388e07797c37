"""`rms_norm`: the norm of Llama and most that came after it."""

import torch
from torch import Tensor

from picompile_passes.dialect.heads import groups_divide, split_heads
from picompile_passes.dialect.operator import operator


@operator(part="norm", dimensions={"x": "TD", "weight": "D"}, result="TD", checks=(groups_divide,))
def rms_norm(x: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) · weight over the last dimension (arXiv 1910.07467).

    With several `groups`, each of them is normalized by itself, as models do with the heads of queries and keys.
    x [T, D], weight [D] → [T, D].
    """
    parts = split_heads(x, groups)
    return (parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2) * weight
