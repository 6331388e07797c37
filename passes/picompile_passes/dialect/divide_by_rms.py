"""`divide_by_rms`: the norm across the neurons of a block, behind it."""

from typing import Any

from torch import Tensor

from picompile_passes.dialect.operator import operator


def _without_squares(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] - 1))


@operator(part="norm", dimensions={"x": "TE", "bias": "D"}, result=_without_squares, forms=("sparse",))
def divide_by_rms(x: Tensor, bias: Tensor | None, neurons: int, eps: float) -> Tensor:
    """y = x[:, :D] / sqrt(x[:, D] / neurons + eps) + bias: the norm of a `sparse_ffn` with `squares`.

    Division by a token's root mean square commutes with the product with down, so that it may come behind it. x
    [T, D + 1], bias [D] → [T, D].
    """
    y = x[..., :-1] / (x[..., -1:] / neurons + eps).sqrt()
    return y if bias is None else y + bias
