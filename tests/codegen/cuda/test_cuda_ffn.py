"""Feed-forward blocks on a GPU against the same block in float64, and what they count."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from test_kernels_ffn import BLOCKS as CPU_BLOCKS
from test_kernels_ffn import MASK_COLUMNS, Block
from test_kernels_ffn import Example as CpuExample

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.halves import BlockInHalves
from helpers.kernels.workbench import assert_close
from picompile_codegen import cuda
from picompile_codegen.cuda import CudaKernel, dot, ffn_down, mma
from picompile_codegen.cuda import ffn_hidden as ffn_groups
from picompile_codegen.specs import CountedFfnSpec, FfnSpec
from picompile_passes.dialect import parse_activation

CHUNK = 13
BLOCKS = {
    **CPU_BLOCKS,
    # More columns than are in shared memory at a time, and than warps read in whole turns, in every format.
    "wide": Block(34, 4200, gated=True, activation="relu", biases="gud"),
    # Enough neurons for chunks to be cut into slices of them.
    "sliced": Block(300, 72, gated=True, activation="relu", up_activation="relu", biases="d"),
    "small": Block(40, 40, gated=False, activation="relu"),
    # Squares of several slices for one token, behind a row of whole tiles and behind a part of one.
    "whole": Block(300, 512, gated=False, activation="relu2", squares=True),
}
# Every way through the kernels, and every format on each side of them; test_cuda_activations.py has the activations.
CASES = [
    ("reglu", "masked", "f16", 1),
    ("reglu", "masked", "q8", 1),
    ("wide", "masked", "q4", 1),
    ("wide", "exact", "f16", 1),
    ("opt", "masked", "f16", 1),
    ("opt", "part", "f16", 1),
    ("opt", "exact", "q4", 1),
    ("fatrelu", "exact", "f16", 1),
    ("drelu", "masked", "f16", 1),
    ("swiglu", "dense", "q8", 1),
    ("fatrelu", "exact", "f16", CHUNK),
    ("opt", "dense", "q4", CHUNK),
    ("sliced", "dense", "q8", CHUNK),
    ("whole", "exact", "q4", 1),
    ("whole", "dense", "f16", 1),
    ("bitnet", "masked", "q8", 1),
    ("bitnet", "exact", "f16", 1),
    ("bitnet", "dense", "q8", CHUNK),
    ("normed", "exact", "f16", CHUNK),
    *(
        (name, kind, format_name, rows)
        for format_name in ("q6", "q4m")
        for name, kind, rows in (
            ("wide", "masked", 1),
            ("opt", "exact", 1),
            ("swiglu", "dense", 1),
            ("sliced", "dense", CHUNK),
        )
    ),
]
# Blocks of different sizes that share a kernel: every way through, and neurons fewer than its groups and slices.
COUNTED = [
    ("opt", "part", "f16", 1),
    ("opt", "exact", "q4", 1),
    ("fatrelu", "exact", "f16", 1),
    ("swiglu", "dense", "q8", 1),
    ("bitnet", "part", "q8", 1),
    ("whole", "exact", "q6", 1),
    ("opt", "part", "q4m", CHUNK),
    ("opt", "dense", "q4", CHUNK),
    ("sliced", "dense", "q8", CHUNK),
    ("bitnet", "dense", "q4", CHUNK),
    ("reglu", "exact", "f16", CHUNK),
]
# How many neurons the kernel has room for, beside those of the block. Most groups of the last one have no neuron.
ROOM = (7, 1500)
OF_SEQUENCES = [("opt", "part", "f16"), ("swiglu", "masked", "q8"), ("bitnet", "part", "f16")]


def kernel_of(name: str, kind: str, format_name: str, rows: int, room: int | None = None) -> CudaKernel:
    """The kernel of a block, or the one that takes its neurons as an argument and has `room` for more."""
    block = BLOCKS[name]
    make = FfnSpec if room is None else CountedFfnSpec
    return cuda.write_kernel(
        make(
            kind="masked" if kind == "part" else kind,
            format=format_name,
            neurons=block.neurons + (room or 0),
            dim=block.dim,
            rows=rows,
            gated=block.gated,
            activation=block.activation,
            up_activation=block.up_activation,
            gate_bias="g" in block.biases,
            up_bias="u" in block.biases,
            down_bias="d" in block.biases,
            mask_columns=MASK_COLUMNS if kind == "part" else None,
            squares=block.squares,
        )
    )


class Example(BlockInHalves, CpuExample):
    """As on the CPU, but that activations are not rounded, or on tensor cores to halves."""

    def hidden(self) -> NDArray[np.float64]:
        return CpuExample.hidden(self)

    def result(self) -> NDArray[np.float64]:
        """Return y, with the squares where there are any."""
        tokens = np.zeros((len(self.x), 1))
        return np.concatenate([self.output() + tokens, self.squares() + tokens], axis=1)

    def masks(self, kept: NDArray[np.bool_], kind: str, rng: np.random.Generator) -> None:
        """A mask for each token."""
        self.kept, masks = kept, []
        table = rng.permutation(MASK_COLUMNS)[: self.block.neurons].astype(np.int32)
        for row in kept:
            mask = rng.random(MASK_COLUMNS) < 0.5
            mask[table] = row
            masks.append(mask if kind == "part" else row)
        self.inputs["mask"] = np.stack(masks).astype(np.uint8)
        if kind == "part":
            self.inputs["table"] = table

    def counts(self, kind: str) -> list[int]:
        """Neurons computed and those that send something down, added to what was counted before."""
        computed = np.broadcast_to(self.kept, self.hidden().shape)
        if kind == "exact":
            decided = self.products("gate" if self.block.gated else "up")
            computed = decided > parse_activation(self.block.activation).threshold
        return [1000 + int(computed.sum()), 2000 + np.count_nonzero(self.hidden())]


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> CudaWorkbench:
    return CudaWorkbench(tmp_path_factory.mktemp("ffn") / "device.so")


@pytest.mark.slow(
    "compiles a kernel per case; one of each kind is fast",
    but=("reglu-masked-f16-1]", "opt-exact-q4-1]", "opt-exact-q4m-1]", "sliced-dense-q8-13", "bitnet-exact-f16-1]"),
)
@pytest.mark.parametrize(("name", "kind", "format_name", "rows"), CASES)
def test_ffn(workbench: CudaWorkbench, name: str, kind: str, format_name: str, rows: int) -> None:
    kernel = kernel_of(name, kind, format_name, rows)
    for tokens in (1,) if rows == 1 else (2, CHUNK):
        example = Example(BLOCKS[name], kind, format_name, tokens, seed=rows + tokens)
        example.on_tensor_cores = rows > 1
        result = workbench.run(kernel, example.inputs, tokens=tokens if rows > 1 else -1)
        assert_close(result["y"][:tokens, : BLOCKS[name].dim], example.output(), example.tolerance)
        assert np.allclose(result["y"][:tokens, BLOCKS[name].dim :], example.squares(), rtol=1e-5, atol=0)
        assert np.isnan(result["y"][tokens:]).all()
        # Chunks are not counted.
        assert result["stats"].tolist() == ([1000, 2000] if rows > 1 else example.counts(kind))


@pytest.mark.slow(
    "compiles a kernel per case; one of each kind is fast", but=("opt-part-f16-1-7]", "sliced-dense-q8-13-1500")
)
@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize(("name", "kind", "format_name", "rows"), COUNTED)
def test_blocks_share_a_kernel(
    workbench: CudaWorkbench, name: str, kind: str, format_name: str, rows: int, room: int
) -> None:
    """The number of neurons is an argument, and arrays have no more rows than that."""
    kernel, block = kernel_of(name, kind, format_name, rows, room), BLOCKS[name]
    for tokens in (1,) if rows == 1 else (2, CHUNK):
        rng = np.random.default_rng([rows, tokens])
        example = Example(block, kind, format_name, tokens, seed=rows + tokens)
        if kind == "part" and rows > 1:
            example.masks(rng.random((tokens, block.neurons)) < 0.4, kind, rng)
        example.on_tensor_cores = rows > 1 and kind != "part"
        count = np.array([block.neurons], np.int32)
        result = workbench.run(kernel, example.inputs | {"count": count}, tokens=tokens if rows > 1 else -1)
        expected = example.result()
        assert np.allclose(result["y"][:tokens, block.dim :], expected[:, block.dim :], rtol=2e-5, atol=0)
        assert_close(result["y"][:tokens, : block.dim], expected[:, : block.dim], example.tolerance)
        assert np.isnan(result["y"][tokens:]).all()
        if rows == 1:
            assert result["stats"].tolist() == example.counts(kind)


@pytest.mark.slow("compiles a kernel per case; one of each kind is fast", but=("0.2-swiglu-",))
@pytest.mark.parametrize(("name", "kind", "format_name"), OF_SEQUENCES)
@pytest.mark.parametrize("share", [0.0, 0.2, 0.9])
def test_several_sequences(workbench: CudaWorkbench, name: str, kind: str, format_name: str, share: float) -> None:
    """A mask for each token."""
    kernel = kernel_of(name, kind, format_name, CHUNK)
    for tokens in (1, 4):
        rng = np.random.default_rng([tokens, int(share * 10)])
        example = Example(BLOCKS[name], kind, format_name, tokens, seed=tokens)
        example.masks(rng.random((tokens, BLOCKS[name].neurons)) < share, kind, rng)
        result = workbench.run(kernel, example.inputs, tokens=tokens)
        expected = example.result()
        assert np.allclose(result["y"][:tokens], expected, rtol=0, atol=2e-5 * max(np.abs(expected).max(), 1))
        assert np.isnan(result["y"][tokens:]).all()
        assert result["stats"].tolist() == example.counts(kind)


@pytest.mark.parametrize("case", [("opt", "exact", "q4", 1), ("fatrelu", "exact", "f16", CHUNK)], ids=str)
@pytest.mark.parametrize("value", [-100.0, 100.0])
def test_no_neuron_fires_or_every_neuron(
    workbench: CudaWorkbench, case: tuple[str, str, str, int], value: float
) -> None:
    """A bias that silences every neuron, or wakes every neuron."""
    name, kind, format_name, rows = case
    example = Example(BLOCKS[name], kind, format_name, tokens=rows, seed=3)
    example.on_tensor_cores = rows > 1
    example.biases["gate_bias" if BLOCKS[name].gated else "up_bias"][:] = value
    result = workbench.run(kernel_of(*case), example.inputs, tokens=rows)
    assert_close(result["y"], example.output() + np.zeros((rows, 1)), example.tolerance)


@pytest.mark.parametrize("name", ["reglu", "opt"])
def test_one_neuron(workbench: CudaWorkbench, name: str) -> None:
    """Whichever it is: the first, the last and some between."""
    kernel, block = kernel_of(name, "masked", "f16", 1), BLOCKS[name]
    for neuron in (0, 31, 32, block.neurons - 1):
        example = Example(block, "masked", "f16", tokens=1, seed=7)
        example.mask(np.arange(block.neurons) == neuron, "masked", np.random.default_rng())
        result = workbench.run(kernel, example.inputs)
        assert np.allclose(result["y"], example.output(), rtol=0, atol=1e-5)
        assert result["stats"].tolist() == [1001, 2000 + np.count_nonzero(example.hidden())]


@pytest.mark.parametrize("value", [False, True])
def test_empty_and_full_masks(workbench: CudaWorkbench, value: bool) -> None:
    for name, kind in (("reglu", "masked"), ("opt", "part")):
        example = Example(BLOCKS[name], kind, "f16", tokens=1, seed=6)
        example.mask(np.full(BLOCKS[name].neurons, value), kind, np.random.default_rng(6))
        result = workbench.run(kernel_of(name, kind, "f16", 1), example.inputs)
        expected = example.output() + np.zeros((1, 1))
        assert np.allclose(result["y"], expected, rtol=0, atol=2e-5 * max(np.abs(expected).max(), 1))
        assert result["stats"][0] == 1000 + value * BLOCKS[name].neurons


def test_neuron_that_is_left_out_may_overflow(workbench: CudaWorkbench) -> None:
    example = Example(BLOCKS["opt"], "masked", "f16", tokens=1, seed=8)
    example.mask(np.arange(130) != 5, "masked", np.random.default_rng())
    expected = example.output()
    example.biases["up_bias"][5] = np.inf
    assert_close(workbench.run(kernel_of("opt", "masked", "f16", 1), example.inputs)["y"], expected)


@pytest.mark.parametrize("rows", [1, CHUNK])
def test_silent_neuron_may_overflow(workbench: CudaWorkbench, rows: int) -> None:
    """A neuron that does not fire contributes nothing, not even where its up is infinite."""
    example = Example(BLOCKS["fatrelu"], "exact", "f16", tokens=rows, seed=4)
    example.on_tensor_cores = rows > 1
    example.biases["gate_bias"][5] = -1000
    expected = example.output()
    example.biases["up_bias"][5] = np.inf
    result = workbench.run(kernel_of("fatrelu", "exact", "f16", rows), example.inputs, tokens=rows)
    assert_close(result["y"], expected, example.tolerance)


# What only large blocks meet, made small: parts of x, groups of several warps, and slices that are listed in turns.
SMALLER = [(dot, "_COLUMNS", 64), (ffn_groups, "_GROUPS", 2), (ffn_down, "_LISTED", 256), (ffn_down, "_BLOCKS", 1)]
OF_LARGE_BLOCKS = [("drelu", "masked"), ("drelu", "dense")]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[CudaWorkbench, dict[tuple[str, str], CudaKernel]]:
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in SMALLER:
            patch.setattr(module, name, value)
        built = {case: kernel_of(*case, "f16", 1) for case in OF_LARGE_BLOCKS}
    return CudaWorkbench(tmp_path_factory.mktemp("large") / "device.so", built.values()), built


@pytest.mark.slow("compiles a kernel per case; one of each kind is fast")
@pytest.mark.parametrize("case", OF_LARGE_BLOCKS, ids="-".join)
def test_large_blocks(large: tuple[CudaWorkbench, dict[tuple[str, str], CudaKernel]], case: tuple[str, str]) -> None:
    workbench, built = large
    example = Example(BLOCKS[case[0]], case[1], "f16", tokens=1, seed=12)
    result = workbench.run(built[case], example.inputs)
    assert_close(result["y"], example.output())
    assert result["stats"].tolist() == example.counts(case[1])


# Name, kind, format: a gate that lies apart, one beside up, and none.
OF_TILES = [("fatrelu", "exact", "q4"), ("reglu", "dense", "f16"), ("small", "dense", "q6")]


@pytest.mark.parametrize("case", OF_TILES, ids="-".join)
@pytest.mark.parametrize("tile", [mma.LARGE, mma.SMALL], ids=["large", "small"])
@pytest.mark.parametrize("sm", [75, 80])
def test_several_tiles_of_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: tuple[str, str, str], tile: mma.ProductTile, sm: int
) -> None:
    """More tokens than a tile has, and fewer than the second one."""
    monkeypatch.setattr(mma, "_ENOUGH_BLOCKS", 1 if tile == mma.LARGE else 1000)
    name, kind, format_name = case
    kernel = kernel_of(name, kind, format_name, tile.tokens + 6)
    workbench = CudaWorkbench(tmp_path / "device.so", [kernel], sm)
    for tokens in (3, tile.tokens + 3):
        example = Example(BLOCKS[name], kind, format_name, tokens, seed=tokens)
        example.on_tensor_cores = True
        result = workbench.run(kernel, example.inputs, tokens=tokens)
        assert_close(result["y"][:tokens], example.output(), example.tolerance)
        assert np.isnan(result["y"][tokens:]).all()


@pytest.mark.parametrize("neurons", [1, 31, 11008, 14337, 28672, 200000])
def test_every_neuron_is_in_one_group(neurons: int) -> None:
    groups = ffn_groups.NeuronGroups.of(neurons)
    found = [groups.neuron(group, i) for group in range(groups.count) for i in range(groups.members(group))]
    assert sorted(found) == list(range(neurons))
    at_places = [groups.at_place(place) for place in range(groups.places)]
    assert sorted(number for number in at_places if number < neurons) == list(range(neurons))
