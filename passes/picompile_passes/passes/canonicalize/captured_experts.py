"""`picompile::expert_gains`: the mark that a captured graph has where a router's choice of experts ends.

A frontend writes experts as plain arithmetic over all of them, each neuron times the gain of its expert, and makes the
gains by this operator. It is no operator of the dialect: `raise-route` raises it, with the arithmetic of the router
before it, to `route`.
"""

import torch
from torch import Tensor


@torch.library.custom_op("picompile::expert_gains", mutates_args=())
def _expert_gains(index: Tensor, weights: Tensor, experts: int) -> Tensor:
    """gains[t, e] = the sum of weights[t, j] over all j with index[t, j] = e, for the experts 0 to `experts` - 1.

    index int64 [T, k], weights [T, k] → [T, experts]. An index of `experts` or more is that of no expert: transformers
    has such where it leaves a choice out.
    """
    gains = weights.new_zeros((*index.shape[:-1], experts + 1))
    return gains.scatter_add(-1, index.clamp(max=experts), weights)[..., :experts].contiguous()


@_expert_gains.register_fake
def _(index: Tensor, weights: Tensor, experts: int) -> Tensor:
    return weights.new_empty((*index.shape[:-1], experts))


EXPERT_GAINS = torch.ops.picompile.expert_gains.default
"""The operator: (index [T, k], weights [T, k], experts) → gains [T, experts]."""
