"""The graph dialect: a dozen operators that every supported model is made of, one in each file.

An operator is a `torch.library.custom_op` with a fake implementation and an eager reference, so that a graph at any
stage runs in plain PyTorch and can be compared with the stage before it. `OPERATORS` has all of them by name.

Symbols: T tokens, D hidden size, F neurons of a feed-forward block, V vocabulary. All floats are float32. Matrices have
one row for each output (`linear`) or for each neuron (`ffn`: gate, up *and* down, which is the transpose of a
checkpoint's down projection), because a row is what is stored, moved and skipped.

A package offers an operator by an entry point of the group `picompile.operators`, which has the operator's name and
leads to an `Operator`.
"""

from torch._ops import OpOverload

from picompile_passes.dialect.activations import ACTIVATIONS, Activation, parse_activation
from picompile_passes.dialect.operator import Call, Operator, Part, operator, operator_name, operator_of
from picompile_passes.formats.packing import dequantize_rows, quantize_rows
from picompile_passes.plugins import Registry, members

__all__ = [
    "ACTIVATIONS",
    "OPERATORS",
    "Activation",
    "Call",
    "Operator",
    "dequantize_rows",
    "operator",
    "operator_name",
    "operator_of",
    "parse_activation",
    "quantize_rows",
    "targets_of",
]


OPERATORS = Registry[Operator](
    "operator", "picompile.operators", Operator, (each for each in members(__name__) if isinstance(each, Operator))
)


def targets_of(part: Part) -> tuple[OpOverload, ...]:
    """Return what nodes call that are of a part of a layer, by our own operators and those of packages."""
    return tuple(each.target for each in OPERATORS.values() if each.part == part)
