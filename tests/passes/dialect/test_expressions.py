"""Expressions of `elementwise`: their text, what they compute, and what is no expression."""

import pytest
import torch
from torch import Tensor

from picompile_passes.dialect import parse_activation
from picompile_passes.dialect.activations import ACTIVATIONS
from picompile_passes.dialect.expressions import (
    FUNCTIONS,
    ExpressionStep,
    broadcast_shape,
    evaluate_expression,
    expression_text,
    parse_expression,
)
from picompile_passes.graph.operands import ELEMENTWISE

T, D = 3, 5


def inputs() -> list[Tensor]:
    """Return one input of each kind: a value, a number for each token, a vector, a number."""
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(shape, generator=generator) + 0.5 for shape in ((T, D), (T, 1), (D,), (1,))]


STEPS = (
    ExpressionStep("mul", ("x0", 0.1)),
    ExpressionStep("where_greater", ("t0", -2.5e-9, "x1", "x2")),
    ExpressionStep("tanh", ("t1",)),
)
TEXT = "t0 = mul(x0, 0.1); t1 = where_greater(t0, -2.5e-09, x1, x2); tanh(t1)"


def test_steps_and_their_text() -> None:
    assert expression_text(STEPS) == TEXT
    assert parse_expression(TEXT, 3) == STEPS
    assert expression_text([ExpressionStep("abs", ("x12",))]) == "abs(x12)"
    assert set(ACTIVATIONS) - {"identity"} <= set(FUNCTIONS)


@pytest.mark.parametrize("number", [0.1, -0.0, 1e-45, 3.4028234663852886e38, 1 / 3, 5, -7e22])
def test_numbers_come_back_as_they_were(number: float) -> None:
    (step,) = parse_expression(expression_text([ExpressionStep("add", ("x0", number))]), 1)
    assert repr(step.operands[1]) == repr(float(number))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not step 0 of an expression"),
        ("x0", "'x0' is not step 0"),
        ("mul(x0, x1", "is not step 0"),
        ("mul(x0, x1);abs(t0)", "is not step 0"),
        ("t0 = abs(x0)", "is not step 0"),
        ("abs(x0); abs(t0)", "'abs\\(x0\\)' is not step 0"),
        ("t1 = abs(x0); abs(t1)", "is not step 0"),
        ("t0 = abs(x0); t0 = abs(t0); abs(t0)", "'t0 = abs\\(t0\\)' is not step 1"),
        ("t0 = abs(x0); ", "'' is not step 1"),
        ("twice(x0)", "there is no function twice of 1 operands"),
        ("identity(x0)", "there is no function identity"),
        ("mul(x0)", "there is no function mul of 1 operands"),
        ("abs(x0, x1)", "there is no function abs of 2 operands"),
        ("abs(x2)", "step 0 reads x2, which there is not"),
        ("abs(t0)", "step 0 reads t0, which there is not"),
        ("t0 = abs(x0); abs(t1)", "step 1 reads t1"),
        ("abs(y0)", "could not convert"),
        ("add(x0, )", "could not convert"),
        ("add(x0,x1)", "there is no function add of 1 operands|could not convert"),
        ("add(x0, inf)", "step 0 takes inf, which is no finite number"),
        ("add(x0, nan)", "no finite number"),
        ("add(x0, 1e999)", "no finite number"),
        ("fatrelu(0.5)(x0)", "is not step 0"),
    ],
)
def test_texts_that_are_no_expression(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_expression(text, 2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function(name: str) -> None:
    values = [x.expand(T, D) for x in inputs()]
    expected = {
        "add": lambda a, b, *_: a + b,
        "sub": lambda a, b, *_: a - b,
        "mul": lambda a, b, *_: a * b,
        "div": lambda a, b, *_: a / b,
        "maximum": lambda a, b, *_: torch.where(a < b, b, a),
        "minimum": lambda a, b, *_: torch.where(a < b, a, b),
        "where_greater": lambda a, b, yes, no: yes * (a > b) + no * (a <= b),
        "abs": lambda a, *_: a.clamp_min(0) - a.clamp_max(0),
        "sqrt": lambda a, *_: a**0.5,
        "exp": lambda a, *_: torch.e**a,
        "softplus": lambda a, *_: (1 + torch.e**a).log(),
        "erf": lambda a, *_: torch.special.erf(a),
    }
    assert set(expected) <= set(FUNCTIONS)
    count = FUNCTIONS[name][0]
    text = f"{name}({', '.join(f'x{number}' for number in range(count))})"
    found = evaluate_expression(text, values[:count])
    if name in expected:
        torch.testing.assert_close(found, expected[name](*values))
    else:
        assert torch.equal(found, parse_activation(name).function(values[0]))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("t0 = mul(x0, x1); t1 = add(t0, x2); div(t1, x3)", (0, 1, 2, 3)),
        ("sub(x0, x1)", (2, 0)),
        ("mul(x0, x1)", (1, 2)),
        ("add(x0, x1)", (3, 0)),
        ("add(x1, 1.0)", (0, 3)),
        ("mul(x0, 1.0)", (0,)),
    ],
)
def test_kinds_of_inputs(text: str, numbers: tuple[int, ...]) -> None:
    """Eager and fake operator have one shape, also for one number, and the inputs are left alone."""
    given = [inputs()[number] for number in numbers]
    before = [x.clone() for x in given]
    found = ELEMENTWISE(given, text)
    assert found.shape == broadcast_shape(given) == (T, D)
    assert found.is_contiguous()
    assert all(found.data_ptr() != x.data_ptr() for x in given)
    torch.testing.assert_close(found, evaluate_expression(text, [x.double() for x in given]).float())
    assert all(map(torch.equal, given, before))
    torch.library.opcheck(ELEMENTWISE, (given, text))
