"""Which numbers weights can have: what float16 holds, in which matrices and scales are kept."""

import math

import torch
from torch import Tensor

from picompile.errors import UnsupportedModelError

# The names that safetensors has for the dtypes we read, and ours for them.
DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}

_LARGEST_F16 = 65504.0
# Below it float16 has fewer digits than its eleven bits, and none below a thousandth of it.
_SMALLEST_F16 = 2.0**-14


def check_values(values: Tensor, name: str, holder: str) -> None:
    """Refuse NaN and infinity, which would reach every logit, and a matrix that float16 does not hold.

    One core checks 8 GB a second; to read and pack them takes many times as long. Raises `UnsupportedModelError`, which
    begins with `name`; `holder`, such as checkpoint, is what is damaged.
    """
    if not values.numel():
        return
    least, most = (float(end) for end in torch.aminmax(values))
    if not math.isfinite(least) or not math.isfinite(most):
        raise damaged(name, holder)
    largest = max(-least, most)
    if values.ndim == 1 or largest == 0:
        return
    if largest > _LARGEST_F16:
        raise UnsupportedModelError(
            f"{name} has values up to {largest:.4g}, and weights are kept in float16, which ends at 65504"
        )
    if largest < _SMALLEST_F16:
        raise UnsupportedModelError(
            f"{name} has values up to {largest:.4g}, and weights are kept in float16, which has few digits below "
            f"{_SMALLEST_F16:.1e}"
        )


def damaged(name: str, holder: str) -> UnsupportedModelError:
    """Return the error for a tensor of NaN or infinite values."""
    return UnsupportedModelError(f"{name} has NaN or infinite values: the {holder} is damaged")
