"""Arithmetic that becomes `elementwise`, by rule, and what cannot be expressed so."""

import pytest
import torch
from torch.fx import GraphModule

from helpers.raising import HIDDEN, VOCAB, Builder, Value, Write, aten, only, operators, raised, refused, stays
from picompile_passes.graph.nodes import calls
from picompile_passes.graph.operands import ELEMENTWISE, EMBEDDING, LINEAR, RMS_NORM
from picompile_passes.passes.canonicalize.raise_elementwise import RaiseElementwise


def _where(op: object, *constant: object, swapped: bool = False) -> Write:
    def write(b: Builder, x: Value) -> Value:
        values = [x * 2.0, x]
        return b.call(op, x, *constant).where(*(values[::-1] if swapped else values))

    return write


def _unary(op: object, *arguments: object, **options: object) -> Write:
    return lambda b, x: b.call(op, x, *arguments, **options)


def _positive(op: object, *arguments: object) -> Write:
    return lambda b, x: b.call(op, x.abs() + 0.5, *arguments)


# What is written, and the expression that becomes of it.
_FORMS: dict[str, tuple[Write, str]] = {
    "scaled": (_unary(aten.mul.Tensor, 9.0), "mul(x0, 9.0)"),
    "soft cap": (lambda b, x: (x / 30.0).tanh() * 30.0, "t0 = div(x0, 30.0); t1 = tanh(t0); mul(t1, 30.0)"),
    "add of a number, times alpha": (_unary(aten.add.Tensor, 3.0, alpha=2), "t0 = mul(3.0, 2.0); add(x0, t0)"),
    "sub": (_unary(aten.sub.Tensor, 3.0), "sub(x0, 3.0)"),
    "rsub": (_unary(aten.rsub.Scalar, 3.0), "sub(3.0, x0)"),
    "rsub, times alpha": (_unary(aten.rsub.Scalar, 3.0, 2), "t0 = mul(x0, 2.0); sub(3.0, t0)"),
    "mul by a scalar": (_unary(aten.mul.Scalar, 3), "mul(x0, 3.0)"),
    "div by a scalar": (_unary(aten.div.Scalar, 3), "div(x0, 3.0)"),
    "neg": (_unary(aten.neg.default), "mul(x0, -1.0)"),
    "square": (_unary(aten.square.default), "mul(x0, x0)"),
    "expm1": (_unary(aten.expm1.default), "t0 = exp(x0); sub(t0, 1.0)"),
    "gelu": (_unary(aten.gelu.default), "gelu(x0)"),
    "gelu by tanh": (_unary(aten.gelu.default, approximate="tanh"), "gelu_tanh(x0)"),
    "silu": (_unary(aten.silu.default), "silu(x0)"),
    "erf": (_unary(aten.erf.default), "erf(x0)"),
    "softplus": (_unary(aten.softplus.default), "softplus(x0)"),
    "steep softplus": (_unary(aten.softplus.default, 2.0), "t0 = mul(x0, 2.0); t1 = softplus(t0); div(t1, 2.0)"),
    "relu6": (_unary(aten.relu6.default), "relu6(x0)"),
    "sqrt": (_positive(aten.sqrt.default), "t0 = abs(x0); t1 = add(t0, 0.5); sqrt(t1)"),
    "rsqrt": (_positive(aten.rsqrt.default), "t0 = abs(x0); t1 = add(t0, 0.5); t2 = sqrt(t1); div(1.0, t2)"),
    "reciprocal": (_positive(aten.reciprocal.default), "t0 = abs(x0); t1 = add(t0, 0.5); div(1.0, t1)"),
    "root power": (_positive(aten.pow.Tensor_Scalar, 0.5), "t0 = abs(x0); t1 = add(t0, 0.5); sqrt(t1)"),
    "inverse root power": (
        _positive(aten.pow.Tensor_Scalar, -0.5),
        "t0 = abs(x0); t1 = add(t0, 0.5); t2 = sqrt(t1); div(1.0, t2)",
    ),
    "third power": (_unary(aten.pow.Tensor_Scalar, 3), "t0 = mul(x0, x0); mul(t0, x0)"),
    "first power": (_unary(aten.pow.Tensor_Scalar, 1), "mul(x0, 1.0)"),
    "inverse square": (
        _positive(aten.pow.Tensor_Scalar, -2.0),
        "t0 = abs(x0); t1 = add(t0, 0.5); t2 = mul(t1, t1); div(1.0, t2)",
    ),
    "clamp": (_unary(aten.clamp.default, -0.5, 0.25), "t0 = maximum(x0, -0.5); minimum(t0, 0.25)"),
    "clamp from below": (_unary(aten.clamp.default, -0.5), "maximum(x0, -0.5)"),
    "clamp from above": (_unary(aten.clamp.default, None, 0.5), "minimum(x0, 0.5)"),
    "clamp_min": (_unary(aten.clamp_min.default, 0.1), "maximum(x0, 0.1)"),
    "clamp_max": (_unary(aten.clamp_max.default, 0.1), "minimum(x0, 0.1)"),
    "hardtanh": (_unary(aten.hardtanh.default, -0.5, 0.25), "t0 = maximum(x0, -0.5); minimum(t0, 0.25)"),
    "gt": (_where(aten.gt.Scalar, 0.1), "t0 = mul(x0, 2.0); where_greater(x0, 0.1, t0, x0)"),
    "lt": (_where(aten.lt.Scalar, 0.1), "t0 = mul(x0, 2.0); where_greater(0.1, x0, t0, x0)"),
    "le": (_where(aten.le.Scalar, 0.1), "t0 = mul(x0, 2.0); where_greater(x0, 0.1, x0, t0)"),
    "ge": (_where(aten.ge.Scalar, 0.1), "t0 = mul(x0, 2.0); where_greater(0.1, x0, x0, t0)"),
    "steps once": (lambda b, x: b.call(aten.mul.Tensor, *(x.tanh() for _ in range(2))), "t0 = tanh(x0); mul(t0, t0)"),
}


@pytest.mark.parametrize("form", _FORMS)
def test_operators_become_steps(form: str) -> None:
    write, expression = _FORMS[form]
    result = raised(write, RaiseElementwise())
    inputs, found = only(result, ELEMENTWISE).args
    assert ([value.target for value in inputs], found) == ([EMBEDDING], expression)
    assert operators(result) == {"elementwise": 1}


def _other(b: Builder, x: Value) -> Value:
    return b.call(RMS_NORM, x, b.parameter("norm", HIDDEN), 1e-5)


def test_sums_at_the_ends_of_a_region_are_in_it() -> None:
    def write(b: Builder, x: Value) -> Value:
        other = _other(b, x)
        return ((x + other) * 0.25).gt(other).where(other, -other) + other

    result = raised(write, RaiseElementwise())
    assert operators(result) == {"rms_norm": 1, "elementwise": 1}
    assert only(result, ELEMENTWISE).args[1] == (
        "t0 = add(x0, x1); t1 = mul(t0, 0.25); t2 = mul(x1, -1.0); t3 = where_greater(t1, x1, x1, t2); add(t3, x1)"
    )


def test_a_value_that_others_read_ends_a_region() -> None:
    def write(b: Builder, x: Value) -> Value:
        scaled = x * 3.0
        return scaled.tanh() * _other(b, scaled)

    result = raised(write, RaiseElementwise())
    texts = [node.args[1] for node in calls(result.graph, ELEMENTWISE)]
    assert texts == ["mul(x0, 3.0)", "t0 = tanh(x0); mul(t0, x1)"]


def _input(result: GraphModule, number: int = 1) -> Value:
    inputs, _ = only(result, ELEMENTWISE).args
    return inputs[number]


@pytest.mark.parametrize(
    ("shape", "found"), [((HIDDEN,), (HIDDEN,)), ((1, HIDDEN), (HIDDEN,)), ((1, 1), (1,)), ((), (1,))]
)
def test_a_parameter_is_a_vector(shape: tuple[int, ...], found: tuple[int, ...]) -> None:
    result = raised(lambda b, x: x * b.parameter("scale", *shape), RaiseElementwise())
    assert _input(result).meta["val"].shape == found
    assert len(shape) != 1 or _input(result).target == "scale"


def test_a_number_for_each_token_is_an_input() -> None:

    result = raised(
        lambda b, x: x * b.call(LINEAR, x, b.parameter("gate", 1, HIDDEN), None).sigmoid(), RaiseElementwise()
    )
    assert only(result, ELEMENTWISE).args[1] == "t0 = sigmoid(x0); mul(x1, t0)"
    assert _input(result, 0).target is LINEAR
    added = raised(lambda b, x: x + b.call(LINEAR, x, b.parameter("gate", 1, HIDDEN), None), RaiseElementwise())
    assert only(added, ELEMENTWISE).args[1] == "add(x0, x1)", "the sum of values of one size is another operator"


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_number_for_each_head_and_token_is_repeated(heads_first: bool) -> None:
    def write(b: Builder, x: Value) -> Value:
        heads, gates = x.unflatten(-1, [3, HIDDEN // 3]), b.linear(x, "gate", 3).unflatten(-1, [3, 1])
        heads, gates = ((part.transpose(0, 1) if heads_first else part) for part in (heads, gates))
        gated = heads * gates.sigmoid()
        return (gated.transpose(0, 1) if heads_first else gated).flatten(1)

    assert only(raised(write, RaiseElementwise()), ELEMENTWISE).args[1] == "t0 = sigmoid(x0); mul(x1, t0)"


def test_constants_of_the_same_values_are_one_and_that_of_one_number_is_the_number() -> None:
    def write(b: Builder, x: Value) -> Value:
        for number, shape in enumerate([(), (1,), (HIDDEN,)]):
            x = x * b.constant(f"scale{number}", torch.full(shape, 0.125))
        values = torch.arange(HIDDEN) * 0.5
        return _other(b, x * b.constant("left", values)) * b.constant("right", values.clone().unsqueeze(0))

    result = raised(write, RaiseElementwise())
    assert [node.args[1] for node in calls(result.graph, ELEMENTWISE)] == [
        "t0 = mul(x0, 0.125); t1 = mul(t0, 0.125); t2 = mul(t1, 0.125); mul(t2, x1)",
        "mul(x0, x1)",
    ]
    assert len(dict(result.named_buffers())) == 1


def _position_rows(b: Builder) -> Value:
    return ((b.positions.unsqueeze(1) * 0.1) * b.constant("rates", torch.arange(HIDDEN) / 7)).sin()


def test_rows_by_position_become_a_lookup() -> None:
    def write(b: Builder, x: Value) -> Value:
        b.bounded(40)
        return x + _position_rows(b)

    result = raised(write, RaiseElementwise())
    lookup = _input(result)
    assert lookup.target is EMBEDDING
    assert (lookup.args[0].target, lookup.args[2]) == ("positions", 0)
    assert lookup.args[1].meta["val"].shape == (40, HIDDEN)
    rows = (torch.arange(40).unsqueeze(1) * 0.1 * torch.arange(HIDDEN) / 7).sin()
    torch.testing.assert_close(result.get_buffer(lookup.args[1].target), rows)


def _unbounded_rows(b: Builder, x: Value) -> Value:
    return x * _position_rows(b)


def _wide_table(b: Builder, x: Value) -> Value:
    b.bounded(1 << 27)
    return _unbounded_rows(b, x)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_unary(aten.pow.Tensor_Scalar, 2.5), r"pow_1 \(aten\.pow\.Tensor_Scalar\): a power of 2\.5, which is not"),
        (_unary(aten.pow.Tensor_Scalar, 0), "a power of 0"),
        (_unary(aten.pow.Tensor_Scalar, 9), "a power of 9"),
        (_unary(aten.mul.Tensor, float("inf")), r"mul \(aten\.mul\.Tensor\): a number that is not finite"),
        (_unary(aten.clamp.default, float("-inf"), 1.0), "a number that is not finite"),
        (_unbounded_rows, r"mul_2 .*: it takes sin, which depends on positions"),
        (_wide_table, "it takes sin, which depends on positions"),
    ],
)
def test_what_cannot_be_expressed_is_named(write: Write, message: str) -> None:
    refused(write, RaiseElementwise(), message)


@pytest.mark.parametrize(
    "write",
    [
        lambda b, x: x + _other(b, x),
        _unary(aten.cumsum.default, -1),
        _unary(aten.sin.default),
        _unary(aten.flip.default, [1]),
        # Integers.
        lambda b, x: x + b.parameter("even", 2 * VOCAB, HIDDEN).embedding(b.tokens * 2),
    ],
)
def test_other_operators_stay(write: Write) -> None:
    assert stays(write, RaiseElementwise())
