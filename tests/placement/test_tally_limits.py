"""Bytes of layers whose gates decide which neurons are computed, and of neurons with limits."""

import pytest

from picompile.placement.counting import tallied_program
from picompile.placement.model_bytes import LayerBytes, Packing
from picompile.placement.tally import tally
from picompile.testing import GraphShape, build
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline

SHAPE = GraphShape(hidden=24, heads=3, ffn=80, layers=1, activation="silu")
ROW_BYTES = 64  # 24 columns in f16, padded to 32
# Vectors of 80 float32 are whole cache lines, to which tensors are padded.


def layer_with(**limits: tuple[int, ...]) -> LayerBytes:
    graph_module = Pipeline((InsertPredictors("none", **limits), Quantize("f16")))(build(SHAPE)).graph_module
    program = tallied_program(lower(graph_module, LowerOptions(64, 4, "float32")), 1)
    (layer,) = tally(program, Packing("f16", "none", context=64), "limited", SHAPE.hidden, 1).layers
    return layer


@pytest.mark.parametrize(
    ("limits", "numbers", "gating_bytes"),
    [
        ({}, 0, 3 * ROW_BYTES),
        ({"output_limits": (0,)}, 1, 3 * ROW_BYTES + 4),
        ({"gate_limits": (0,)}, 1, ROW_BYTES + 4),
        ({"gate_limits": (0,), "output_limits": (0,)}, 2, ROW_BYTES + 4),
    ],
)
def test_a_gate_with_limits_is_read_in_full(
    limits: dict[str, tuple[int, ...]], numbers: int, gating_bytes: int
) -> None:
    """Up and down of a neuron are read if its gate is above its limit; each limit is a float32 beside its rows."""
    layer = layer_with(**limits)
    assert layer.neuron_bytes == 3 * ROW_BYTES + 4 * numbers
    assert layer.gating_bytes == gating_bytes
    assert layer.shared_bytes == layer_with().shared_bytes
