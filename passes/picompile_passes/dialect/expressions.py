"""Expressions of `elementwise`: arithmetic on single elements, as text that a graph carries.

An expression is a list of steps, separated by `; `. Each but the last gives its result a name:

    t0 = mul(x0, 0.5); t1 = tanh(t0); mul(t1, x1)

`x0`, `x1` … are the inputs of the operator, `t0`, `t1` … the results of earlier steps. Other operands are numbers. The
last step's result is the operator's.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from picompile_passes.dialect.activations import ACTIVATIONS

Operand = str | float

# Every function of an expression, by name: how many operands it takes, and what it computes.
FUNCTIONS: Mapping[str, tuple[int, Callable[..., Tensor]]] = {
    "add": (2, torch.add),
    "sub": (2, torch.sub),
    "mul": (2, torch.mul),
    "div": (2, torch.div),
    "maximum": (2, torch.maximum),
    "minimum": (2, torch.minimum),
    "where_greater": (4, lambda a, b, yes, no: torch.where(a > b, yes, no)),
    "abs": (1, torch.abs),
    "sqrt": (1, torch.sqrt),
    "exp": (1, torch.exp),
    "erf": (1, torch.erf),
    "softplus": (1, F.softplus),
    **{name: (1, activation.function) for name, activation in ACTIVATIONS.items() if name != "identity"},
}

_STEP = re.compile(r"(?:t(?P<number>\d+) = )?(?P<function>\w+)\((?P<operands>[^()]*)\)")
_NAME = re.compile(r"(?P<kind>[xt])(?P<number>\d+)")


@dataclass(frozen=True)
class ExpressionStep:
    """One step of an expression: a function and its operands, which are names or numbers."""

    function: str
    operands: tuple[Operand, ...]


def expression_text(steps: Sequence[ExpressionStep]) -> str:
    """Return the text of an expression, which `parse_expression` reads back."""
    texts = [f"{step.function}({', '.join(_operand_text(operand) for operand in step.operands)})" for step in steps]
    return "; ".join([*(f"t{number} = {text}" for number, text in enumerate(texts[:-1])), texts[-1]])


def parse_expression(text: str, inputs: int) -> tuple[ExpressionStep, ...]:
    """Return the steps of an expression over `inputs` inputs.

    Raises `ValueError`, with the part that is wrong, for a text that is none.
    """
    parts = text.split("; ")
    return tuple(_parse_step(part, number, number == len(parts) - 1, inputs) for number, part in enumerate(parts))


def evaluate_expression(text: str, inputs: Sequence[Tensor]) -> Tensor:
    """Return the value of an expression in PyTorch; the inputs are broadcast as usual."""
    results: list[Tensor] = []
    for step in parse_expression(text, len(inputs)):
        _, function = FUNCTIONS[step.function]
        results.append(function(*(_value(operand, inputs, results) for operand in step.operands)))
    return results[-1].expand(broadcast_shape(inputs)).clone(memory_format=torch.contiguous_format)


def broadcast_shape(inputs: Sequence[Tensor]) -> torch.Size:
    """Return the shape that inputs have together; the first dimension of size other than 1 counts."""
    longest = max(inputs, key=lambda x: x.dim())
    shape = list(longest.shape)
    for x in inputs:
        for dim, size in enumerate(reversed(x.shape), start=1):
            if isinstance(shape[-dim], int) and shape[-dim] == 1:
                shape[-dim] = size
    return torch.Size(shape)


def _operand_text(operand: Operand) -> str:
    return operand if isinstance(operand, str) else repr(float(operand))


def _parse_step(text: str, number: int, is_last: bool, inputs: int) -> ExpressionStep:
    match = _STEP.fullmatch(text)
    if match is None or match["number"] != (None if is_last else str(number)):
        raise ValueError(f"{text!r} is not step {number} of an expression")
    operands = tuple(_parse_operand(operand, number, inputs) for operand in match["operands"].split(", "))
    function = match["function"]
    if function not in FUNCTIONS or len(operands) != FUNCTIONS[function][0]:
        raise ValueError(f"{text!r}: there is no function {function} of {len(operands)} operands")
    return ExpressionStep(function, operands)


def _parse_operand(text: str, number: int, inputs: int) -> Operand:
    match = _NAME.fullmatch(text)
    if match is None:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"step {number} takes {text}, which is no finite number")
        return value
    if int(match["number"]) >= (inputs if match["kind"] == "x" else number):
        raise ValueError(f"step {number} reads {text}, which there is not")
    return text


def _value(operand: Operand, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> Tensor:
    if isinstance(operand, float):
        return torch.tensor(operand, dtype=torch.float32, device=inputs[0].device)
    values = inputs if operand[0] == "x" else results
    return values[int(operand[1:])]
