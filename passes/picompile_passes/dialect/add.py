"""`add`: the one operator of aten that the dialect has on tokens."""

import torch

from picompile_passes.dialect.operator import Operator

add = Operator(
    name="add",
    target=torch.ops.aten.add.Tensor,
    eager=torch.add,
    part="pointwise",
    dimensions={"self": "TD", "other": "TD"},
)
