"""Feed-forward blocks against the same block in float64, and what they count."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from workbench import Array, Workbench, assert_close, packed, uniform

from picompile_codegen import kernels
from picompile_codegen.kernels import Kernel
from picompile_passes.dialect import parse_activation

CHUNK = 13


@dataclass(frozen=True)
class Block:
    """A feed-forward block: sizes, activations and biases (letters of gate, up, down)."""

    neurons: int
    dim: int
    gated: bool
    activation: str
    up_activation: str = "identity"
    biases: str = ""


BLOCKS = {
    "reglu": Block(200, 96, gated=True, activation="relu"),
    "drelu": Block(864, 320, gated=True, activation="relu", up_activation="relu"),
    "fatrelu": Block(77, 72, gated=True, activation="fatrelu(0.25)", biases="gud"),
    "relu2": Block(200, 100, gated=False, activation="relu2"),
    "opt": Block(130, 136, gated=False, activation="relu", biases="ud"),
    "swiglu": Block(200, 96, gated=True, activation="silu"),
    "gelu": Block(96, 72, gated=False, activation="gelu", biases="ud"),
}
FORMATS = ("f16", "q8", "q4")
CASES = [
    (name, kind, form, rows)
    for name, kind, form, rows in product(BLOCKS, ("dense", "exact"), FORMATS, (1, CHUNK))
    # The format changes nothing but how rows are read, which two blocks show.
    if (form == "f16" or name in ("reglu", "opt"))
    and (kind == "dense" or parse_activation(BLOCKS[name].activation).sparse)
]


def kernel_of(name: str, kind: str, format_name: str, rows: int) -> Kernel:
    block = BLOCKS[name]
    return kernels.ffn(
        kind=kind,
        format=format_name,
        neurons=block.neurons,
        dim=block.dim,
        rows=rows,
        gated=block.gated,
        activation=block.activation,
        up_activation=block.up_activation,
        gate_bias="g" in block.biases,
        up_bias="u" in block.biases,
        down_bias="d" in block.biases,
    )


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("ffn") / "host.so", [kernel_of(*case) for case in CASES])


class Example:
    """Random weights of a block and the kernel's arguments that they make."""

    def __init__(self, block: Block, kind: str, format_name: str, tokens: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.block = block
        names = ["gate", "up", "down"] if block.gated else ["up", "down"]
        matrices = {name: packed(rng, format_name, block.neurons, block.dim) for name in names}
        self.weights = {name: weights for name, (_, weights) in matrices.items()}
        self.x = uniform(rng, tokens, block.dim)
        self.biases = {
            f"{name}_bias": uniform(rng, block.dim if name == "down" else block.neurons)
            for name in names
            if name[0] in block.biases
        }
        apart = names[:1] if kind == "exact" else []
        together = [matrices[name][0] for name in names if name not in apart]
        self.inputs: dict[str, Array] = {"x": self.x, "stats": np.array([1000, 2000]), **self.biases}
        self.inputs["neuron_w"] = np.stack(together, axis=1).reshape(-1, together[0].shape[1])
        if apart:
            self.inputs["decide_w"] = matrices[apart[0]][0]

    def products(self, name: str) -> NDArray[np.float64]:
        """x times gate or up, with its bias: [tokens, neurons]."""
        return self.x.astype(np.float64) @ self.weights[name].T + self.biases.get(f"{name}_bias", 0)

    def hidden(self) -> NDArray[np.float64]:
        """What each neuron sends down: [tokens, neurons]."""
        up = torch.from_numpy(self.products("up"))
        act = parse_activation(self.block.activation).function
        if not self.block.gated:
            return act(up).numpy()
        up_act = parse_activation(self.block.up_activation).function
        return (act(torch.from_numpy(self.products("gate"))) * up_act(up)).numpy()

    def output(self) -> NDArray[np.float64]:
        return self.hidden() @ self.weights["down"] + self.biases.get("down_bias", 0)


@pytest.mark.parametrize(("name", "kind", "format_name", "rows"), CASES)
def test_ffn(workbench: Workbench, name: str, kind: str, format_name: str, rows: int) -> None:
    kernel = kernel_of(name, kind, format_name, rows)
    for tokens in (1,) if rows == 1 else (1, 2, CHUNK):
        example = Example(BLOCKS[name], kind, format_name, tokens, seed=rows + tokens)
        result = workbench.run(kernel, example.inputs, tokens=tokens if rows > 1 else -1)
        assert_close(result["y"][:tokens], example.output())


# GELU of a number far below zero is zero in float32 only.
@pytest.mark.parametrize(("name", "kind", "format_name", "rows"), [c for c in CASES if c[3] == 1 and c[0] != "gelu"])
def test_counts(workbench: Workbench, name: str, kind: str, format_name: str, rows: int) -> None:
    """Computed: all neurons, or those above the threshold; then those that send something down."""
    block = BLOCKS[name]
    example = Example(block, kind, format_name, tokens=1, seed=9)
    result = workbench.run(kernel_of(name, kind, format_name, rows), example.inputs)
    decided = example.products("gate" if block.gated else "up")
    computed = int((decided > parse_activation(block.activation).threshold).sum()) if kind == "exact" else block.neurons
    assert result["stats"].tolist() == [1000 + computed, 2000 + np.count_nonzero(example.hidden())]


@pytest.mark.parametrize("rows", [1, CHUNK])
@pytest.mark.parametrize("value", [-100.0, 100.0])
def test_none_and_all_fire(workbench: Workbench, rows: int, value: float) -> None:
    """A bias that silences every neuron, or wakes every neuron."""
    example = Example(BLOCKS["opt"], "exact", "f16", tokens=rows, seed=3)
    example.biases["up_bias"][:] = value
    result = workbench.run(kernel_of("opt", "exact", "f16", rows), example.inputs, tokens=rows)
    assert_close(result["y"], example.output())
    if rows == 1:
        fired = 0 if value < 0 else BLOCKS["opt"].neurons
        assert result["stats"].tolist() == [1000 + fired, 2000 + fired]


@pytest.mark.parametrize("rows", [1, CHUNK])
def test_silent_neuron_may_overflow(workbench: Workbench, rows: int) -> None:
    """A neuron that does not fire contributes nothing, not even where its up is infinite."""
    example = Example(BLOCKS["fatrelu"], "exact", "f16", tokens=rows, seed=4)
    example.biases["gate_bias"][5] = -1000
    expected = example.output()
    example.biases["up_bias"][5] = np.inf
    result = workbench.run(kernel_of("fatrelu", "exact", "f16", rows), example.inputs, tokens=rows)
    assert_close(result["y"], expected)


@pytest.mark.parametrize("kind", ["dense", "exact"])
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("rows", [1, CHUNK])
def test_same_bits_for_any_number_of_threads(workbench: Workbench, kind: str, format_name: str, rows: int) -> None:
    example = Example(BLOCKS["reglu"], kind, format_name, tokens=rows, seed=5)
    kernel = kernel_of("reglu", kind, format_name, rows)
    results = [workbench.run(kernel, example.inputs, tokens=rows, threads=threads) for threads in (1, 2, 3, 5)]
    assert len({result["y"].tobytes() + result["stats"].tobytes() for result in results}) == 1
