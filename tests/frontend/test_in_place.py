"""Calls that change an argument: others take their place where nothing shares memory with it, and nowhere else."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from picompile.frontend.in_place import remove_writes, writes_in_place

Function = Callable[[Tensor], Tensor]


class _Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _normalized(x: Tensor) -> Tensor:
    best = x.softmax(-1).topk(2)[0]
    best /= best.sum(-1, keepdim=True)
    return best * 2.0 + best


def _masked(x: Tensor) -> Tensor:
    mask = torch.zeros_like(x)
    before = mask + 1.0
    mask.scatter_(1, x.topk(2)[1], 1)
    mask.mul_(3.0).add_(x)
    return mask.view(-1, 2).sum(-1) + before.view(-1, 2).sum(-1)


def _viewed(x: Tensor) -> Tensor:
    y = x * 2.0
    part = y[:, 1]
    y.mul_(3.0)
    return y + part.unsqueeze(-1)


def _slice(x: Tensor) -> Tensor:
    y = x * 2.0
    y[:, 1] += 1.0
    return y


def _dropped(x: Tensor) -> Tensor:
    y = x * 2.0
    z = F.dropout(y, 0.5, training=False)
    z += 1.0
    return y + z


def _another_dtype(x: Tensor) -> Tensor:
    y = x.round().to(torch.int64) + 0
    y += 2
    return y.abs_().float()


def _input(x: Tensor) -> Tensor:
    y = x.clone()
    return y.copy_(x.flip(0)) + x


@pytest.mark.parametrize(
    ("function", "removed"),
    [
        (_normalized, True),
        (_masked, True),
        (_another_dtype, True),
        (_viewed, False),
        (_slice, False),
        (_dropped, False),
        (_input, True),
    ],
)
def test_writes(function: Function, removed: bool) -> None:
    x = torch.randn(4, 6)
    module = _Module(function).eval()
    exported = torch.export.export(module, (x,)).module()
    assert isinstance(exported, GraphModule)
    assert writes_in_place(exported.graph)
    assert remove_writes(exported.graph) is removed
    if removed:
        exported.graph.lint()
        exported.recompile()
        assert not writes_in_place(exported.graph)
        assert torch.equal(exported(x), module(x))


def test_a_graph_that_writes_nothing() -> None:
    exported = torch.export.export(_Module(torch.relu), (torch.randn(3),)).module()
    assert isinstance(exported, GraphModule) and not writes_in_place(exported.graph)
