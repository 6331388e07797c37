"""Complex numbers in an exported graph, as pairs of real ones: the graph computes what the module does."""

import pytest
import torch
from torch import Tensor, nn

from picompile import UnsupportedModelError
from picompile.frontend.complex_numbers import remove_complex


class _Turned(nn.Module):
    """Turns pairs as DeepSeek V2 does."""

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        turns = torch.polar(torch.full_like(angles, 0.5), angles) * 2.0 * angles.square()
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        product = turns.unsqueeze(0).unsqueeze(-3).to("cpu") * pairs
        return torch.view_as_real(3.0 * product).flatten(-2)


class _Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x).cumsum(0))


def test_products_and_moves() -> None:
    x, angles = torch.randn(2, 3, 5, 8), torch.randn(5, 4)
    module = _Turned()
    exported = torch.export.export(module, (x, angles)).module()
    assert isinstance(exported, torch.fx.GraphModule)
    # `export_decoder` takes checks out first.
    for node in list(exported.graph.nodes):
        if "_assert_tensor_metadata" in str(node.target):
            exported.graph.erase_node(node)
    remove_complex(exported.graph)
    exported.recompile()
    values = [node.meta.get("val") for node in exported.graph.nodes]
    assert not any(isinstance(value, Tensor) and value.is_complex() for value in values)
    for node in exported.graph.nodes:
        assert "complex" not in str(node.target) and "polar" not in str(node.target)
    torch.testing.assert_close(exported(x, angles), module(x, angles))


def test_other_arithmetic_is_refused() -> None:
    exported = torch.export.export(_Summed(), (torch.randn(3, 2),)).module()
    assert isinstance(exported, torch.fx.GraphModule)
    with pytest.raises(UnsupportedModelError, match=r"cumsum \(aten\.cumsum\.default\) works on complex numbers"):
        remove_complex(exported.graph)
