"""Constants that passes compute, made once for equal contents."""

import torch
from torch import Tensor
from torch.fx import Node

from picompile_passes.rewriter import Rewriter


class SharedConstants:
    """The constants that one run of a pass has made: the same values again are the same node."""

    def __init__(self, rewriter: Rewriter) -> None:
        self._rewriter = rewriter
        self._made: list[tuple[Tensor, Node]] = []

    def get(self, name: str, tensor: Tensor, source: Node) -> Node:
        """A node that reads `tensor`; `name` and `source` are for one that is new."""
        for known, node in self._made:
            if known.dtype == tensor.dtype and torch.equal(known, tensor):
                return node
        node = self._rewriter.constant(name, tensor, sources=(source,))
        self._made.append((tensor, node))
        return node
