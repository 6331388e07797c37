"""`layer_norm`: the norm of GPT and OPT."""

import torch.nn.functional as F
from torch import Tensor

from picompile_passes.dialect.heads import groups_divide, split_heads
from picompile_passes.dialect.operator import operator


@operator(part="norm", dimensions={"x": "TD", "weight": "D", "bias": "D"}, result="TD", checks=(groups_divide,))
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int = 1) -> Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias (arXiv 1607.06450), for each of `groups` by itself.

    x [T, D], weight and bias [D] → [T, D].
    """
    if groups == 1:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    normed = F.layer_norm(split_heads(x, groups), (x.shape[-1] // groups,), None, None, eps).flatten(-2)
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias
