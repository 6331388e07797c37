"""`linear`: a projection."""

import torch.nn.functional as F
from torch import Tensor

from picompile_passes.dialect.operator import operator


@operator(part="linear", dimensions={"x": "TK", "weight": "NK", "bias": "N"}, result="TN", packed=("weight",))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y = x · weightᵀ + bias. x [T, K], weight [N, K], bias [N] → [T, N]."""
    return F.linear(x, weight, bias)
