"""`elementwise`: arithmetic on single elements that has no operator of its own."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from picompile_passes.dialect.expressions import broadcast_shape, evaluate_expression, parse_expression
from picompile_passes.dialect.operator import Call, operator
from picompile_passes.graph.values import value_text


def _inputs_fit(call: Call) -> Iterator[str]:
    """The expression can be read, and its inputs have a number for each element or token."""
    inputs, expression = call.values["inputs"], call.values["expression"]
    try:
        parse_expression(expression, len(inputs))
    except ValueError as error:
        yield f"its expression: {error}"
    dim = int(call.node.meta["val"].shape[-1])
    for value in inputs:
        shape = value.meta["val"].shape
        if shape[-1] not in (1, dim) or len(shape) != (1 if value in call.constants else 2):
            yield f"{value.name} is {value_text(value.meta['val'])}, which does not fit {dim} columns"


def _broadcast(inputs: list[Tensor], **_: Any) -> Tensor:
    return inputs[0].new_empty(broadcast_shape(inputs))


@operator(part="pointwise", dimensions={}, result=_broadcast, checks=(_inputs_fit,))
def elementwise(inputs: list[Tensor], expression: str) -> Tensor:
    """y = expression(inputs), arithmetic on single elements as `expressions` describes it.

    Each input is a value [T, D], a value [T, 1] with one number for each token, a constant [D], or a constant [1]
    → [T, D].
    """
    return evaluate_expression(expression, inputs)
