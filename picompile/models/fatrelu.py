"""FATReLU, the activation of ProSparse (arXiv 2402.13516): a ReLU that lets nothing through below its threshold."""

import torch
from torch import Tensor, nn


class FatReLU(nn.Module):
    """y = x where x > threshold, else 0."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape → the same shape."""
        return torch.where(x > self.threshold, x, torch.zeros_like(x))

    def extra_repr(self) -> str:
        """What `print` shows of it."""
        return f"threshold={self.threshold}"
