"""Feed-forward blocks that leave out neurons below limits of their own, against the same block in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_kernels_ffn import CHUNK, Block, check, check_sequences, spec_of
from test_kernels_ffn import Example as WithoutLimits

from helpers.kernels.workbench import Array, Workbench
from helpers.products import sampled
from picompile_codegen import cpu
from picompile_codegen.cpu.kernel import Kernel
from picompile_passes.dialect import parse_activation

BLOCKS = {
    "swiglu": Block(200, 96, gated=True, activation="silu"),
    "odd": Block(77, 72, gated=True, activation="gelu_tanh", biases="gud"),
    "fatrelu": Block(203, 101, gated=True, activation="fatrelu(0.25)", squares=True),
    "gelu": Block(131, 136, gated=False, activation="gelu", biases="ud", squares=True),
}
NAMES = {"g": "gate_limits", "o": "output_limits"}


def kernel_of(name: str, kind: str, limits: str, format_name: str, rows: int, rowwise: bool = False) -> Kernel:
    spec = spec_of(BLOCKS[name], kind, format_name, rows, rowwise)
    return cpu.write_kernel(replace(spec, gate_limits="g" in limits, output_limits="o" in limits))


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("limits") / "host.so")


class Example(WithoutLimits):
    """Random weights, and limits that lie well between the magnitudes that the tokens of the example have."""

    def __init__(self, block: Block, kind: str, limits: str, format_name: str, tokens: int, seed: int) -> None:
        super().__init__(block, kind, format_name, tokens, seed)
        rng = np.random.default_rng([seed, 1])
        self.limits = limits
        if "g" in limits:
            self.inputs["gate_limits"] = between(np.abs(self.activated()), rng)
        if "o" in limits:
            self.inputs["output_limits"] = between(np.abs(self._hidden()), rng)

    def activated(self) -> NDArray[np.float64]:
        """The gate of each neuron, activated: [tokens, neurons]."""
        activation = parse_activation(self.block.activation).function
        return activation(torch.from_numpy(self.products("gate"))).numpy()

    def computed(self) -> NDArray[np.bool_]:
        return self.activated_above() if self.kind == "exact" and "g" in self.limits else super().computed()

    def activated_above(self) -> NDArray[np.bool_]:
        return np.abs(self.activated()) > self.inputs["gate_limits"]

    def above(self) -> NDArray[np.bool_]:
        """Whether the neuron is in the mask and above its limits."""
        kept = np.broadcast_to(self.kept, self._hidden().shape)
        if "g" in self.limits:
            kept = kept & self.activated_above()
        return kept & (np.abs(self._hidden()) > self.inputs["output_limits"]) if "o" in self.limits else kept

    def hidden(self) -> NDArray[np.float64]:
        return np.where(self.above(), self._hidden(), 0.0)


def between(values: NDArray[np.float64], rng: np.random.Generator) -> Array:
    """Return for each column a number that is far from all of `values` [tokens, neurons]: float32 [neurons]."""
    ordered = np.sort(np.concatenate([0 * values[:1], values, 2 * values.max(axis=0, keepdims=True) + 1e-3]), axis=0)
    gaps = np.diff(ordered, axis=0)
    wide = np.where(gaps > 1e-3 * gaps.sum(axis=0), rng.random(gaps.shape), 0).argmax(axis=0)
    columns = np.arange(values.shape[1])
    return (ordered[wide, columns] + gaps[wide, columns] / 2).astype(np.float32)


def is_case(name: str, kind: str, limits: str, rows: int = 1, **_: object) -> bool:
    """Whether a block can have these limits: a gate to be limited, one that decides, and masks for one token."""
    block = BLOCKS[name]
    return (
        (block.gated or limits == "o")
        and (kind != "exact" or limits != "o" or parse_activation(block.activation).sparse)
        and (kind in ("dense", "exact") or rows == 1)
    )


@sampled(
    name=BLOCKS,
    kind=("exact", "dense", "masked", "part"),
    limits=("g", "o", "go"),
    form=("f16", "q8", "q4"),
    rows=(1, CHUNK),
    when=is_case,
    slow="compiles a kernel per case",
)
def test_limits(workbench: Workbench, name: str, kind: str, limits: str, form: str, rows: int) -> None:
    for tokens in (1,) if rows == 1 else (2, CHUNK):
        example = Example(BLOCKS[name], kind, limits, form, tokens, seed=rows + tokens)
        assert 0.05 < example.above().mean() < 0.95
        check(workbench, kernel_of(name, kind, limits, form, rows), example, rows)


@pytest.mark.slow("compiles a kernel per case; test_limits has fast ones")
@sampled(
    name=BLOCKS,
    kind=("exact", "dense", "masked"),
    limits=("g", "o", "go"),
    form=("f16", "q8", "q4"),
    when=is_case,
    slow="compiles a kernel per case",
)
def test_several_sequences(workbench: Workbench, name: str, kind: str, limits: str, form: str) -> None:
    """Each token has the output that it has alone, bit for bit."""
    kernel = kernel_of(name, kind, limits, form, CHUNK, rowwise=kind != "masked")
    alone = kernel_of(name, kind, limits, form, 1)
    for tokens in (1, 4, CHUNK):
        example = Example(BLOCKS[name], kind, limits, form, tokens, seed=tokens)
        if kind == "masked":
            example.kept = np.random.default_rng(tokens).random((tokens, BLOCKS[name].neurons)) < 0.6
            example.inputs["mask"] = example.kept.astype(np.uint8)
        assert check_sequences(workbench, kernel, alone, example).tolist() == example.counts()


# A list of the gates' products, and blocks without a list; one token, and a chunk.
OF_EDGES = [
    ("swiglu", "exact", "go", "q4", 1),
    ("odd", "masked", "go", "f16", 1),
    ("gelu", "dense", "o", "q8", 1),
    ("swiglu", "exact", "go", "f16", CHUNK),
]


@pytest.mark.slow("compiles a kernel per case; one is fast", but=("('odd', ",))
@pytest.mark.parametrize("case", OF_EDGES, ids=str)
def test_limits_of_zero_and_infinite_ones(workbench: Workbench, case: tuple[str, str, str, str, int]) -> None:
    name, kind, limits, form, rows = case
    example, kernel = Example(BLOCKS[name], kind, limits, form, rows, seed=3), kernel_of(*case)
    given = [NAMES[letter] for letter in limits]
    example.inputs |= {limit: np.zeros(BLOCKS[name].neurons, np.float32) for limit in given}
    example.assert_output(workbench.run(kernel, example.inputs, tokens=rows)["y"])
    # GELU of a number far below zero is zero.
    assert example.above().sum() >= 0.95 * rows * np.count_nonzero(example.kept)
    for limit in given:
        infinite = np.full(BLOCKS[name].neurons, np.inf, np.float32)
        result = workbench.run(kernel, example.inputs | {limit: infinite}, tokens=rows)
        expected = np.zeros((rows, BLOCKS[name].dim)) + example.biases.get("down_bias", 0)
        assert np.array_equal(result["y"][:, : BLOCKS[name].dim], expected)
        assert not result["y"][:, BLOCKS[name].dim :].any()
        assert result["stats"][1] == 2000


@pytest.mark.slow(
    "compiles a kernel per case; one of each kind is fast",
    but=("('odd', 'masked', 'go', 'f16')-1]", "('odd', 'exact', 'g', 'f16')"),
)
@pytest.mark.parametrize("rows", [1, CHUNK])
@pytest.mark.parametrize(
    "case", [("odd", "exact", "g", "f16"), ("odd", "masked", "go", "f16"), ("gelu", "dense", "o", "f16")], ids=str
)
def test_an_overflow_shows_above_the_limits_alone(
    workbench: Workbench, case: tuple[str, str, str, str], rows: int
) -> None:
    """A product with up that is infinite or not a number does not count below the limit of the gate."""
    name, kind, limits, form = case
    kind = "dense" if rows > 1 and kind == "masked" else kind
    example, kernel = Example(BLOCKS[name], kind, limits, form, rows, seed=4), kernel_of(name, kind, limits, form, rows)
    example.kept[5] = True
    if kind == "masked":
        example.inputs["mask"] = example.kept[None].astype(np.uint8)
    if "g" in limits:
        example.inputs["gate_bias"][5] = 10.0
        example.inputs["gate_limits"][5] = 1e9
        expected = workbench.run(kernel, example.inputs, tokens=rows)["y"]
        for value in (np.inf, np.nan):
            example.inputs["up_bias"][5] = value
            assert np.array_equal(workbench.run(kernel, example.inputs, tokens=rows)["y"], expected)
        example.inputs["gate_limits"][5] = 0
    # For one token, a list of neurons has those alone whose output differs from 0, which no comparison says of NaN.
    example.inputs["up_bias"][5] = np.inf if kind == "exact" and rows == 1 else np.nan
    assert not np.isfinite(workbench.run(kernel, example.inputs, tokens=rows)["y"]).any()


def test_rows_of_down_of_neurons_below_their_limits_are_not_read(workbench: Workbench) -> None:
    """Weights there that are not numbers do not show. Nor do those of up where the gate leaves a neuron out."""
    for name, kind, limits in (("odd", "exact", "go"), ("odd", "masked", "go"), ("gelu", "dense", "o")):
        example = Example(BLOCKS[name], kind, limits, "f16", tokens=1, seed=5)
        kernel = kernel_of(name, kind, limits, "f16", 1)
        expected = workbench.run(kernel, example.inputs)["y"]
        out = ~example.above()[0]
        parts = example.inputs["neuron_w"].shape[0] // BLOCKS[name].neurons
        rows_of = example.inputs["neuron_w"].reshape(BLOCKS[name].neurons, parts, -1).copy()
        rows_of.view(np.uint8)[out, -1] = 255
        if "g" in limits and kind == "exact":
            rows_of.view(np.uint8)[~example.activated_above()[0], -2] = 255
        poisoned = example.inputs | {"neuron_w": rows_of.reshape(example.inputs["neuron_w"].shape)}
        assert np.array_equal(workbench.run(kernel, poisoned)["y"], expected)
