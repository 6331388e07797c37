"""`embedding`: rows of a table."""

import torch.nn.functional as F
from torch import Tensor

from picompile_passes.dialect.operator import operator


@operator(part="embedding", dimensions={"ids": "T", "weight": "VD"}, result="TD", packed=("weight",))
def embedding(ids: Tensor, weight: Tensor, offset: int) -> Tensor:
    """y[t] = weight[ids[t] + offset]: row lookup. ids int64 [T], weight [V, D] → [T, D].

    `offset` is for OPT, whose position table starts two rows late.
    """
    return F.embedding(ids + offset, weight)
