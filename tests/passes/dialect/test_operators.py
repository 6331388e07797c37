"""Records of operators: shapes that follow from letters, and facts that cannot be."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from picompile_passes.dialect import OPERATORS, operator, operator_of, targets_of
from picompile_passes.dialect.sparse_ffn import SparseFfnOperands

T, D, F = 3, 8, 6


def floats(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


BLOCK = (None, floats(F, D), floats(F, D), None, None, floats(D), "relu", "identity")
MASK = torch.ones(T, F, dtype=torch.bool)
EXAMPLES = {
    "add": (floats(T, D), floats(T, D)),
    "attention": (floats(T, D), floats(T, 4), floats(T, 6), 4, 2, 0.5, 0, 0),
    "dequantize": (torch.zeros(F, 64, dtype=torch.uint8), "q8", 30),
    "divide_by_rms": (floats(T, D + 1).abs(), None, F, 1e-5),
    "elementwise": ([floats(T, 1), floats(D)], "mul(x0, x1)"),
    "embedding": (torch.arange(T), floats(5, D), 1),
    "ffn": (floats(T, D), *BLOCK),
    "layer_norm": (floats(T, D), None, None, 1e-5, 2),
    "linear": (floats(T, D), floats(F, D), None),
    "predict": (floats(T, D), [floats(F, D)], "none", 0.0),
    "quantize": (floats(F, 30), "q4"),
    "rms_norm": (floats(T, D), floats(D), 1e-5),
    "rotary": (floats(T, D), torch.arange(T), floats(2), 2, 1.0),
    "route": (floats(T, 8), floats(8), floats(8), 3, "sigmoid", "sum", 2.5, 1e-20, 4, 2, "top2"),
    "sparse_ffn": (floats(T, D), MASK, None, *BLOCK, True),
}
GAINS = torch.tensor([[0.5, 0.0, -2.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
OF_EXPERTS = {
    "ffn": (floats(T, D), *BLOCK, None, GAINS, floats(3, D)),
    "predict": (floats(T, D), [floats(F, D)], "exact", 0.0, GAINS),
    "sparse_ffn": (floats(T, D), MASK, None, *BLOCK, False, None, None, GAINS, floats(3, D)),
}


@pytest.mark.parametrize("leading", [(), (2,)], ids=["tokens", "batches"])
@pytest.mark.parametrize(
    ("name", "example"),
    [*EXAMPLES.items(), *OF_EXPERTS.items()],
    ids=[*EXAMPLES, *(f"{name} of experts" for name in OF_EXPERTS)],
)
def test_the_fake_result_is_like_the_real_one(name: str, example: tuple[object, ...], leading: tuple[int, ...]) -> None:
    """Dimensions before the tokens stay in front."""
    record, schema = OPERATORS[name], OPERATORS[name].target._schema.arguments
    letters = [record.dimensions.get(argument.name, "") for argument in schema]
    of_tokens = record.part != "packing" and name != "elementwise"
    given = [
        value.expand(*leading, *value.shape) if of_tokens and own.startswith("T") else value
        for value, own in zip(example, letters, strict=False)
    ]
    real = record.target(*given)
    if leading and of_tokens and name != "embedding":
        torch.testing.assert_close(real, record.target(*example).expand(*leading, *real.shape[1:]))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = record.target(*[mode.from_tensor(each) if isinstance(each, Tensor) else each for each in given])
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
    torch.testing.assert_close(record.eager(*given), real)


def test_every_operator_has_an_example_and_is_found_by_what_graphs_call() -> None:
    assert set(EXAMPLES) == set(OPERATORS.builtin)
    assert all(operator_of(OPERATORS[name].target) is OPERATORS[name] for name in EXAMPLES)
    assert operator_of(torch.ops.aten.mul.Tensor) is None
    assert OPERATORS["attention"].target in targets_of("mixer")


def test_operands_that_a_named_tuple_has_are_the_schema() -> None:
    names = [argument.name for argument in OPERATORS["sparse_ffn"].target._schema.arguments]
    assert names == list(SparseFfnOperands._fields)


@pytest.mark.parametrize("fact", [{"dimensions": {"z": "TD"}}, {"dimensions": {"x": "TD"}, "packed": ("z",)}])
def test_a_fact_about_no_operand_is_refused(fact: dict[str, object]) -> None:
    def double(x: Tensor) -> Tensor:
        return 2 * x

    double.__name__ = f"double_{len(fact)}"
    with pytest.raises(ValueError, match="has no operand 'z'"):
        operator(part="pointwise", result="TD", namespace="picompile_testing_facts", **fact)(double)
