"""Feed-forward blocks on a GPU, with and without limits, against the same block in float64, and what they count."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from test_kernels_ffn import BLOCKS as CPU_BLOCKS
from test_kernels_ffn import MASK_COLUMNS, Block, spec_of
from test_kernels_ffn_limits import BLOCKS as LIMITED_BLOCKS
from test_kernels_ffn_limits import NAMES
from test_kernels_ffn_limits import Example as CpuExample

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.halves import in_halves, weights_in_halves
from helpers.kernels.workbench import Array
from helpers.products import sampled
from helpers.weight_formats import ROW_FORMATS
from picompile_codegen import cuda
from picompile_codegen.cuda import dot, ffn_down, ffn_hidden, mma
from picompile_codegen.cuda.function import CudaKernel
from picompile_codegen.specs import CountedFfnSpec
from picompile_passes.dialect import parse_activation

CHUNK = 13
BLOCKS = {
    **CPU_BLOCKS,
    "odd": LIMITED_BLOCKS["odd"],
    "squared gelu": LIMITED_BLOCKS["gelu"],
    # More columns than are in shared memory at a time, and than warps read in whole turns, in every format.
    "wide": Block(34, 4200, gated=True, activation="relu", biases="gud"),
    # Enough neurons for chunks to be cut into slices of them.
    "sliced": Block(300, 72, gated=True, activation="silu", up_activation="relu", biases="d"),
    "small": Block(40, 40, gated=False, activation="relu"),
    "small fatrelu": Block(40, 40, gated=True, activation="fatrelu(0.25)", biases="gud"),
    "small gated": Block(72, 40, gated=True, activation="relu"),
    # Squares of several slices for one token, behind a row of whole tiles and behind a part of one.
    "whole": Block(300, 512, gated=False, activation="relu2", squares=True),
}
SLOW = "compiles a kernel per case"
# Block, kind, limits (letters of gate and output), format, rows.
Case = tuple[str, str, str, str, int]


def kernel_of(case: Case, room: int | None = None) -> CudaKernel:
    """The kernel of a block, or the one that takes its neurons as an argument and has `room` for more."""
    name, kind, limits, form, rows = case
    spec = spec_of(BLOCKS[name], kind, form, rows)
    spec = replace(spec, gate_limits="g" in limits, output_limits="o" in limits)
    if room is not None:
        spec = CountedFfnSpec(**asdict(replace(spec, neurons=spec.neurons + room)))
    return cuda.write_kernel(spec)


class Example(CpuExample):
    """As on the CPU, but that activations are not rounded, or on tensor cores to halves."""

    on_tensor_cores = False

    def __init__(self, case: Case, tokens: int, seed: int) -> None:
        name, kind, limits, form, rows = case
        super().__init__(BLOCKS[name], kind, limits, form, tokens, seed)
        self.on_tensor_cores = rows > 1 and kind in ("exact", "dense")

    @property
    def tolerance(self) -> float:
        """A few hidden values are rounded to another half from float32 than from float64."""
        return 3e-4 if self.on_tensor_cores else 2e-5

    def products(self, name: str) -> NDArray[np.float64]:
        x, weights = self.x.astype(np.float64), self.weights[name]
        if self.on_tensor_cores:
            x, weights = in_halves(x), weights_in_halves(weights)
        return x @ weights.T + self.biases.get(f"{name}_bias", 0)

    def output(self) -> NDArray[np.float64]:
        hidden, down = self.hidden(), self.weights["down"]
        if self.on_tensor_cores:
            hidden, down = in_halves(hidden), weights_in_halves(down)
        return hidden @ down + self.biases.get("down_bias", np.zeros(self.block.dim))

    def masks(self, kept: NDArray[np.bool_], rng: np.random.Generator) -> None:
        """A mask for each token: `kept` [tokens, neurons]."""
        self.kept, masks = kept, kept
        if self.kind == "part":
            masks = rng.random((len(kept), MASK_COLUMNS)) < 0.5
            masks[:, self.inputs["table"]] = kept
        self.inputs["mask"] = masks.astype(np.uint8)

    def assert_output(self, found: Array) -> None:
        """Check the rows of all tokens, and that the others are not written."""
        tokens, dim = len(self.x), self.block.dim
        expected, squares = self.output(), self.squares()
        assert np.allclose(found[:tokens, dim:], squares, rtol=2e-5, atol=0)
        most = self.tolerance * (np.abs(expected).max() or 1)
        assert np.abs(found[:tokens, :dim] - expected).max() <= most
        assert np.isnan(found[tokens:]).all()


def check(workbench: CudaWorkbench, case: Case, room: int | None = None) -> None:
    """Compare a block with float64. Chunks that are not masked are not counted."""
    (name, kind, limits, _, rows), kernel = case, kernel_of(case, room)
    has_masks = kind in ("masked", "part")
    for tokens, share in ((1, 0.4),) if rows == 1 else ((2, 0.0), (CHUNK, 0.4)):
        example, rng = Example(case, tokens, seed=rows + tokens), np.random.default_rng([rows, tokens])
        assert not limits or 0.02 < example.above().mean() < 0.98
        if has_masks and rows > 1:
            example.masks(rng.random((tokens, BLOCKS[name].neurons)) < share, rng)
        inputs = example.inputs | {"count": np.array([BLOCKS[name].neurons], np.int32)}
        if room is not None and kind == "masked":
            inputs["mask"] = inputs["mask"].reshape(-1)
        found = workbench.run(kernel, inputs, tokens=tokens if rows > 1 else -1)
        example.assert_output(found["y"])
        assert found["stats"].tolist() == (example.counts() if rows == 1 or has_masks else [1000, 2000])


def is_case(name: str, kind: str, limits: str, room: int | None, **_: object) -> bool:
    """Whether there is such a block. Without limits, roundings decide which outputs of gelu are 0 and do not count."""
    block = BLOCKS[name]
    has_list = "g" in limits or parse_activation(block.activation).sparse
    fits = (block.gated or "g" not in limits) and (kind != "exact" or has_list) and (not limits or room is None)
    return fits and (limits != "" or name != "odd")


@sampled(
    slow=SLOW,
    name=("opt", "bitnet", "odd", "sliced"),
    kind=("dense", "exact", "masked", "part"),
    limits=("", "g", "o", "go"),
    form=ROW_FORMATS,
    rows=(1, CHUNK),
    # Most groups of the last one have no neuron.
    room=(None, 7, 1500),
    when=is_case,
    # test_kernels_predict.py has every format.
    fast={"form": ("f16", "q4", "q4m", "q8"), "limits": ("", "go"), "name": ("opt", "odd")},
)
def test_blocks(
    workbench: CudaWorkbench, name: str, kind: str, limits: str, form: str, rows: int, room: int | None
) -> None:
    check(workbench, (name, kind, limits, form, rows), room)


@pytest.mark.slow(SLOW)
@pytest.mark.parametrize(
    ("case", "room"),
    [
        *(
            (("wide", kind, "", form, 1), None)
            for kind, form in (("exact", "f16"), *(("masked", f) for f in ROW_FORMATS[2:]))
        ),
        *((("whole", kind, "", form, 1), room) for kind, form, room in (("exact", "q6", 7), ("dense", "f16", None))),
        *((("fatrelu", "exact", "", "f16", rows), room) for rows, room in ((1, 1500), (CHUNK, None))),
        *((("squared gelu", kind, "o", "q8", rows), None) for kind, rows in (("masked", CHUNK), ("dense", 1))),
        (("normed", "exact", "", "f16", CHUNK), None),
        (("swiglu", "dense", "", "q8", 1), 7),
    ],
    ids=str,
)
def test_other_blocks(workbench: CudaWorkbench, case: Case, room: int | None) -> None:
    check(workbench, case, room)


@pytest.mark.slow("compiles blocks for the emulation", but=("opt-part",))
@pytest.mark.parametrize(("name", "kind"), [("reglu", "masked"), ("opt", "part")])
def test_masks(workbench: CudaWorkbench, name: str, kind: str) -> None:
    """No neuron, every neuron, and one: the first, the last and some between."""
    case, neurons = (name, kind, "", "f16", 1), np.arange(BLOCKS[name].neurons)
    for kept in (neurons < 0, neurons >= 0, *(neurons == one for one in (0, 31, 32, neurons[-1]))):
        example = Example(case, 1, seed=7)
        example.mask(kept, kind, np.random.default_rng(6))
        found = workbench.run(kernel_of(case), example.inputs)
        example.assert_output(found["y"])
        assert found["stats"].tolist() == example.counts()


@pytest.mark.slow("compiles blocks for the emulation")
@pytest.mark.parametrize("case", [("opt", "exact", "", "q4", 1), ("fatrelu", "exact", "", "f16", CHUNK)], ids=str)
def test_no_neuron_fires_or_every_neuron(workbench: CudaWorkbench, case: Case) -> None:
    """A bias that silences every neuron, or wakes every neuron."""
    for value in (-100.0, 100.0):
        example = Example(case, case[4], seed=3)
        example.biases["gate_bias" if example.block.gated else "up_bias"][:] = value
        example.assert_output(workbench.run(kernel_of(case), example.inputs, tokens=case[4])["y"])


OF_EDGES = [("odd", "exact", "go", "f16", 1), ("odd", "masked", "go", "f16", 1), ("odd", "exact", "go", "f16", CHUNK)]


@pytest.mark.slow(SLOW, but=("('odd', 'exact', 'go', 'f16', 1)",))
@pytest.mark.parametrize("case", OF_EDGES, ids=str)
def test_limits_of_zero_and_infinite_ones(workbench: CudaWorkbench, case: Case) -> None:
    kernel, rows, names = kernel_of(case), case[4], [NAMES[letter] for letter in case[2]]
    example = Example(case, rows, seed=3)
    zeros = np.zeros(example.block.neurons, np.float32)
    example.inputs |= dict.fromkeys(names, zeros)
    example.assert_output(workbench.run(kernel, example.inputs, tokens=rows)["y"])
    for limit in names:
        found = workbench.run(kernel, example.inputs | {limit: zeros + np.float32(np.inf)}, tokens=rows)
        assert np.array_equal(found["y"], np.zeros_like(found["y"]) + example.biases["down_bias"])
        assert found["stats"][1] == 2000


@pytest.mark.slow("compiles blocks for the emulation; one is fast", but=("('opt'",))
@pytest.mark.parametrize(
    "case",
    [("opt", "masked", "", "f16", 1), *(("fatrelu", "exact", "", "f16", rows) for rows in (1, CHUNK)), *OF_EDGES],
    ids=str,
)
def test_a_neuron_that_is_left_out_may_overflow(workbench: CudaWorkbench, case: Case) -> None:
    """By the mask, by its gate or by the limit of its gate: it contributes nothing, not even where its up is NaN."""
    (_, kind, limits, _, rows), kernel = case, kernel_of(case)
    example = Example(case, rows, seed=4)
    if kind == "masked":
        example.mask(example.kept & (np.arange(example.block.neurons) != 5), kind, np.random.default_rng())
        if limits:
            example.kept[5] = example.inputs["mask"][0, 5] = True
    elif not limits:
        example.biases["gate_bias"][5] = -1000
    if limits:
        example.inputs["gate_limits"][5] = 1e9
    expected = workbench.run(kernel, example.inputs, tokens=rows)["y"]
    example.assert_output(expected)
    for value in (np.inf, np.nan):
        example.inputs["up_bias"][5] = value
        assert np.array_equal(workbench.run(kernel, example.inputs, tokens=rows)["y"], expected)
    if limits:
        example.inputs["gate_limits"][5] = 0
        assert np.isnan(workbench.run(kernel, example.inputs, tokens=rows)["y"]).all()


# What only large blocks meet, made small: parts of x, groups of several warps, and slices that are listed in turns.
SMALLER = [(dot, "_COLUMNS", 64), (ffn_hidden, "_GROUPS", 2), (ffn_down, "_LISTED", 256), (ffn_down, "_BLOCKS", 1)]


@pytest.mark.slow(SLOW)
@pytest.mark.parametrize("kind", ["masked", "dense"])
def test_large_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    for module, name, value in SMALLER:
        monkeypatch.setattr(module, name, value)
    check(CudaWorkbench(tmp_path), ("drelu", kind, "", "f16", 1))


@pytest.mark.slow(f"{SLOW}; test_cuda_linear.py has a fast one of several tiles")
@sampled(
    slow=SLOW,
    # A gate that lies apart, one beside up, and none.
    block=(
        ("small fatrelu", "exact", "q4"),
        *(
            pytest.param(each, marks=pytest.mark.slow("like the first"))
            for each in (("small gated", "dense", "f16"), ("small", "dense", "q6"))
        ),
    ),
    tile=("LARGE", "SMALL"),
    sm=(75, 80),
)
def test_several_tiles_of_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, block: tuple[str, str, str], tile: str, sm: int
) -> None:
    """More tokens than a tile has, and fewer than the second one."""
    monkeypatch.setattr(mma, "_ENOUGH_BLOCKS", 1 if tile == "LARGE" else 1000)
    (name, kind, form), most = block, getattr(mma, tile).tokens
    case, workbench = (name, kind, "", form, most + 6), CudaWorkbench(tmp_path, sm)
    for tokens in (3, most + 3):
        example = Example(case, tokens, seed=tokens)
        example.assert_output(workbench.run(kernel_of(case), example.inputs, tokens=tokens)["y"])


@pytest.mark.parametrize("neurons", [1, 31, 11008, 14337, 28672, 200000])
def test_every_neuron_is_in_one_group(neurons: int) -> None:
    groups = ffn_hidden.NeuronGroups.of(neurons)
    found = [groups.neuron(group, i) for group in range(groups.count) for i in range(groups.members(group))]
    assert sorted(found) == list(range(neurons))
    at_places = [groups.at_place(place) for place in range(groups.places)]
    assert sorted(number for number in at_places if number < neurons) == list(range(neurons))
