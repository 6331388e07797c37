"""Feed-forward blocks against the same block in float64, and what they count."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers.kernels.workbench import Array, Workbench, as_seen, assert_close, packed, uniform
from picompile_codegen import cpu
from picompile_codegen.cpu import Kernel
from picompile_codegen.errors import CodegenError
from picompile_codegen.specs import CountedFfnSpec, FfnSpec
from picompile_passes.dialect import dequantize_rows, parse_activation, quantize_rows

CHUNK = 13


@dataclass(frozen=True)
class Block:
    """A feed-forward block: sizes, activations, biases (letters of gate, up, down), whether it adds up squares."""

    neurons: int
    dim: int
    gated: bool
    activation: str
    up_activation: str = "identity"
    biases: str = ""
    squares: bool = False


BLOCKS = {
    "reglu": Block(200, 96, gated=True, activation="relu"),
    "drelu": Block(864, 320, gated=True, activation="relu", up_activation="relu"),
    "fatrelu": Block(77, 72, gated=True, activation="fatrelu(0.25)", biases="gud"),
    "relu2": Block(200, 100, gated=False, activation="relu2"),
    "opt": Block(130, 136, gated=False, activation="relu", biases="ud"),
    "swiglu": Block(200, 96, gated=True, activation="silu"),
    "gelu": Block(96, 72, gated=False, activation="gelu", biases="ud"),
    "bitnet": Block(203, 101, gated=True, activation="relu2", squares=True),
    "normed": Block(77, 72, gated=False, activation="relu2", biases="ud", squares=True),
    # More neurons than a panel has rows, and a block of bytes: test_isa_kernels.py has chunks of it.
    "long": Block(1100, 40, gated=False, activation="relu"),
}
FORMATS = ("f16", "q8", "q6", "q4m", "q4")
CASES = [
    (name, kind, form, rows)
    for name, kind, form, rows in product(BLOCKS, ("dense", "exact", "masked", "part"), FORMATS, (1, CHUNK))
    # The format changes nothing but how rows are read, which two blocks show.
    if name != "long"
    and (form == "f16" or name in ("reglu", "opt"))
    and (kind != "exact" or parse_activation(BLOCKS[name].activation).sparse)
    and (kind in ("dense", "exact") or rows == 1)
    # Nor does it matter to a part, which only finds its neurons in another mask.
    and (kind != "part" or (name in ("reglu", "opt") and form == "f16"))
    # Squares are added up beside what the others show: below are the ways in which they are.
    and not BLOCKS[name].squares
]
CASES += [
    ("bitnet", "masked", "f16", 1),
    ("bitnet", "part", "f16", 1),
    ("bitnet", "dense", "f16", CHUNK),
    ("bitnet", "exact", "q8", 1),
    ("bitnet", "exact", "q8", CHUNK),
    ("bitnet", "dense", "q4", 1),
    ("normed", "exact", "f16", 1),
    ("normed", "dense", "q4", CHUNK),
    # Rows of more than eight groups.
    *(("drelu", "exact", form, 1) for form in ("q6", "q4m")),
    *(("drelu", "dense", form, CHUNK) for form in ("q6", "q4m")),
]
# Cases that are not slow: every kind of block, every way through a kernel and every format.
FAST = (
    *("reglu-dense-f16-1]", "reglu-exact-f16-1]", "reglu-exact-q4-13]", "reglu-masked-f16-1]", "reglu-part-f16-1]"),
    *("drelu-masked-f16-1]", "fatrelu-exact-f16-1]", "swiglu-dense-f16-13]"),
    *("bitnet-exact-q8-1]", "normed-dense-q4-13]", "drelu-exact-q4m-1]"),
)
# What a part of a block has a mask of: more columns than the part has neurons.
MASK_COLUMNS = 1000


def spec_of(block: Block, kind: str, format_name: str, rows: int, rowwise: bool = False) -> FfnSpec:
    return FfnSpec(
        kind="masked" if kind == "part" else kind,
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
        mask_columns=MASK_COLUMNS if kind == "part" else None,
        squares=block.squares,
        rowwise=rowwise,
    )


def kernel_of(name: str, kind: str, format_name: str, rows: int, rowwise: bool = False) -> Kernel:
    return cpu.write_kernel(spec_of(BLOCKS[name], kind, format_name, rows, rowwise))


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("ffn") / "host.so")


class Example:
    """Random weights of a block and the kernel's arguments that they make."""

    def __init__(self, block: Block, kind: str, format_name: str, tokens: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.block, self.format_name = block, format_name
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
        self.kept = np.ones(block.neurons, bool)
        if kind in ("masked", "part"):
            self.mask(rng.random(block.neurons) < 0.4, kind, rng)

    def mask(self, kept: NDArray[np.bool_], kind: str, rng: np.random.Generator) -> None:
        """Keeps the neurons of `kept`. In a part they are columns of the mask here and there, in no order."""
        self.kept, mask = kept, kept
        if kind == "part":
            self.inputs["table"] = rng.permutation(MASK_COLUMNS)[: len(kept)].astype(np.int32)
            mask = rng.random(MASK_COLUMNS) < 0.5
            mask[self.inputs["table"]] = kept
        self.inputs["mask"] = mask[None].astype(np.uint8)

    def alike(self, kind: str) -> None:
        """Makes every output of an ungated block the same, and every weight of down 0 or -1."""
        block = self.block
        data = {name: self.weights[name].astype(np.float32) for name in ("up", "down")}
        data["up"][:] = 0
        self.biases["up_bias"][:] = 0.75
        data["down"] = np.where(data["down"] > 0, np.float32(0), np.float32(-1))
        packs = {name: quantize_rows(torch.from_numpy(value), self.format_name) for name, value in data.items()}
        for name, value in packs.items():
            self.weights[name] = dequantize_rows(value, self.format_name, block.dim).numpy().astype(np.float64)
        order = ("down",) if kind == "exact" else ("up", "down")
        self.inputs["neuron_w"] = np.stack([packs[name].numpy() for name in order], axis=1).reshape(
            -1, packs["up"].shape[1]
        )
        if kind == "exact":
            self.inputs["decide_w"] = packs["up"].numpy()

    def products(self, name: str) -> NDArray[np.float64]:
        """x times gate or up, with its bias: [tokens, neurons]."""
        return as_seen(self.x, self.format_name) @ self.weights[name].T + self.biases.get(f"{name}_bias", 0)

    def hidden(self) -> NDArray[np.float64]:
        """Return the output of each neuron that is kept, else 0: [tokens, neurons]."""
        return np.where(self.kept, self._hidden(), 0.0)

    def _hidden(self) -> NDArray[np.float64]:
        up = torch.from_numpy(self.products("up"))
        act = parse_activation(self.block.activation).function
        if not self.block.gated:
            return act(up).numpy()
        up_act = parse_activation(self.block.up_activation).function
        return (act(torch.from_numpy(self.products("gate"))) * up_act(up)).numpy()

    def output(self) -> NDArray[np.float64]:
        return self.hidden() @ self.weights["down"] + self.biases.get("down_bias", 0)

    def squares(self) -> NDArray[np.float64]:
        """Return the sum of squares of each token, the last column of y: [tokens, 1], or [tokens, 0] without one."""
        total = (self.hidden() ** 2).sum(axis=1, keepdims=True)
        return total if self.block.squares else total[:, :0]

    def assert_output(self, measured: Array) -> None:
        """y, and in all formats but f16 within what rounding on the way down may change.

        There an output times a weight's scale is rounded to a 127th of the largest such product beside it, and with
        many tokens a weight to a 127th of the largest beside it: by half a 127th of that, for each neuron.
        """
        expected, hidden = self.output(), np.abs(self.hidden())
        assert np.isfinite(measured).all(), "something that must not be read was read, or nothing was written"
        measured, squares = measured[:, : self.block.dim], measured[:, self.block.dim :]
        assert np.allclose(squares, self.squares(), rtol=1e-5, atol=0)
        if self.format_name == "f16" or not expected.any():
            assert np.abs(measured - expected).max() <= 2e-5 * np.abs(expected).max()
            return
        largest = np.abs(self.weights["down"]).max()
        error = np.abs(measured - expected)
        most = hidden.max(axis=1, keepdims=True) * largest * np.count_nonzero(hidden, axis=1, keepdims=True) / 127
        assert (error <= most + 1e-4).all()
        # Roundings are independent of each other, so that their sum grows with the root of their number.
        assert (
            np.sqrt((error**2).mean()) <= 2 * (most / np.sqrt(np.maximum(np.count_nonzero(hidden, axis=1), 1))).mean()
        )


@pytest.mark.slow("compiles a kernel per case; one of each kind is fast", but=FAST)
@pytest.mark.parametrize(("name", "kind", "format_name", "rows"), CASES)
def test_ffn(workbench: Workbench, name: str, kind: str, format_name: str, rows: int) -> None:
    kernel = kernel_of(name, kind, format_name, rows)
    for tokens in (1,) if rows == 1 else (1, 2, CHUNK):
        example = Example(BLOCKS[name], kind, format_name, tokens, seed=rows + tokens)
        result = workbench.run(kernel, example.inputs, tokens=tokens if rows > 1 else -1)
        example.assert_output(result["y"][:tokens])


@pytest.mark.slow("compiles a kernel per case; one of each kind is fast", but=("reglu-masked-f16",))
@pytest.mark.parametrize(
    ("name", "kind", "format_name"),
    [("reglu", "masked", "f16"), ("opt", "part", "f16"), ("bitnet", "masked", "f16"), ("opt", "masked", "q4")],
)
def test_masks_of_a_chunk_in_tiles(workbench: Workbench, name: str, kind: str, format_name: str) -> None:
    """Each token has a mask of its own."""
    block = BLOCKS[name]
    kernel = cpu.write_kernel(replace(spec_of(block, kind, format_name, CHUNK), in_tiles=True))
    for tokens in (1, 8, CHUNK):
        example, rng = Example(block, kind, format_name, tokens, seed=tokens), np.random.default_rng(tokens)
        columns = MASK_COLUMNS if kind == "part" else block.neurons
        mask = (rng.random((tokens, columns)) < 0.4).astype(np.uint8)
        example.inputs["mask"] = mask
        example.kept = mask[:, example.inputs["table"]] == 1 if kind == "part" else mask == 1
        results = [workbench.run(kernel, example.inputs, tokens=tokens, threads=threads)["y"] for threads in (1, 3)]
        example.assert_output(results[0][:tokens])
        assert results[0].tobytes() == results[1].tobytes()


@pytest.mark.slow("compiles a kernel per case; one of each kind is fast", but=("exact-1-q8",))
@pytest.mark.parametrize("format_name", FORMATS[1:])
@pytest.mark.parametrize(
    ("kind", "rows"), [("dense", 1), ("masked", 1), ("exact", 1), ("dense", CHUNK), ("exact", CHUNK)]
)
def test_down_is_exact_for_equal_outputs(workbench: Workbench, kind: str, format_name: str, rows: int) -> None:
    """Where all outputs are equal, and all weights of down 0 or -1, y is exact."""
    example = Example(BLOCKS["opt"], kind, format_name, tokens=rows, seed=11)
    example.alike(kind)
    result = workbench.run(kernel_of("opt", kind, format_name, rows), example.inputs, tokens=rows)
    assert_close(result["y"], example.output())


OF_SEQUENCES = [
    ("reglu", "f16", "masked"),
    ("opt", "f16", "masked"),
    ("opt", "q4", "masked"),
    ("swiglu", "f16", "masked"),
    ("bitnet", "q8", "masked"),
    ("drelu", "q4", "exact"),
    ("opt", "q8", "exact"),
    ("bitnet", "f16", "exact"),
    ("fatrelu", "f16", "dense"),
    ("swiglu", "q4", "dense"),
    ("normed", "q8", "dense"),
    ("drelu", "q6", "exact"),
    ("opt", "q6", "dense"),
    ("drelu", "q4m", "masked"),
    ("opt", "q4m", "dense"),
]


@pytest.mark.slow("compiles a kernel per case; one of each kind is fast", but=("0.2-reglu-f16-masked",))
@pytest.mark.parametrize(("name", "format_name", "kind"), OF_SEQUENCES)
@pytest.mark.parametrize("share", [0.0, 0.2, 0.9])
def test_several_sequences(workbench: Workbench, name: str, format_name: str, kind: str, share: float) -> None:
    """Each token has the output that it has alone, bit for bit, with a mask of its own where there are masks."""
    block = BLOCKS[name]
    kernel, alone = (
        kernel_of(name, kind, format_name, CHUNK, rowwise=kind != "masked"),
        kernel_of(name, kind, format_name, 1),
    )
    for tokens in (1, 4, CHUNK) if kind == "masked" or share == 0.2 else ():
        example = Example(block, kind, format_name, tokens, seed=tokens)
        if kind == "masked":
            example.kept = np.random.default_rng(tokens).random((tokens, block.neurons)) < share
            example.inputs["mask"] = example.kept.astype(np.uint8)
        results = [workbench.run(kernel, example.inputs, tokens=tokens, threads=threads) for threads in (1, 3)]
        example.assert_output(results[0]["y"][:tokens])
        assert results[0]["y"].tobytes() == results[1]["y"].tobytes()
        own = [
            {key: value[t : t + 1] if key in ("x", "mask") else value for key, value in example.inputs.items()}
            for t in range(tokens)
        ]
        singles = [workbench.run(alone, inputs) for inputs in own]
        assert results[0]["y"][:tokens].tobytes() == b"".join(single["y"].tobytes() for single in singles)
        start = np.array([1000, 2000])
        counted = sum((single["stats"] - start for single in singles), start)
        assert results[0]["stats"].tolist() == counted.tolist()


@pytest.mark.slow("compiles a kernel per case; one of each kind is fast", but=("reglu-masked-f16-5-1]",))
@pytest.mark.parametrize("rows", [1, CHUNK])
@pytest.mark.parametrize("room", [5, 900])
@pytest.mark.parametrize(
    ("name", "kind", "format_name"),
    [("reglu", "masked", "f16"), ("fatrelu", "masked", "q4"), ("bitnet", "masked", "q8"), ("opt", "part", "q6")],
)
def test_blocks_share_a_kernel(
    workbench: Workbench, name: str, kind: str, format_name: str, room: int, rows: int
) -> None:
    """Each has the bits that its own kernel gives it; the number of its neurons is an argument."""
    block, rng = BLOCKS[name], np.random.default_rng(room)
    own = spec_of(block, kind, format_name, rows)
    shared = cpu.write_kernel(CountedFfnSpec(**vars(own) | {"neurons": block.neurons + room}))
    example = Example(block, kind, format_name, rows, seed=rows)
    if rows > 1 and kind == "masked":
        example.inputs["mask"] = (rng.random((rows, block.neurons)) < 0.3).astype(np.uint8)
    elif rows > 1:
        example.inputs["mask"] = (rng.random((rows, MASK_COLUMNS)) < 0.3).astype(np.uint8)
    counted = {**example.inputs, "count": np.array([block.neurons], np.int32)}
    if kind == "masked":
        counted["mask"] = counted["mask"].reshape(-1)
    for threads in (1, 3):
        expected = workbench.run(cpu.write_kernel(own), example.inputs, tokens=rows, threads=threads)
        found = workbench.run(shared, counted, tokens=rows, threads=threads)
        assert np.isfinite(expected["y"]).all()
        assert found["y"].tobytes() == expected["y"].tobytes()
        assert found["stats"].tolist() == expected["stats"].tolist()


def test_only_blocks_with_masks_share_a_kernel() -> None:
    own = spec_of(BLOCKS["reglu"], "exact", "f16", 1)
    with pytest.raises(CodegenError, match="no CPU kernel for CountedFfnSpec of kind exact"):
        cpu.write_kernel(CountedFfnSpec(**vars(own)))


@pytest.mark.slow(
    "compiles a kernel per case; one of each kind is fast", but=tuple(case for case in FAST if case.endswith("-1]"))
)
# GELU of a number far below zero is zero in float32 only.
@pytest.mark.parametrize(("name", "kind", "format_name", "rows"), [c for c in CASES if c[3] == 1 and c[0] != "gelu"])
def test_statistics_count_computed_and_firing_neurons(
    workbench: Workbench, name: str, kind: str, format_name: str, rows: int
) -> None:
    """Computed: all neurons, those above the threshold or those of the mask; then those that send something down."""
    block = BLOCKS[name]
    example = Example(block, kind, format_name, tokens=1, seed=9)
    result = workbench.run(kernel_of(name, kind, format_name, rows), example.inputs)
    computed = int(example.kept.sum())
    if kind == "exact":
        decided = example.products("gate" if block.gated else "up")
        computed = int((decided > parse_activation(block.activation).threshold).sum())
    assert result["stats"].tolist() == [1000 + computed, 2000 + np.count_nonzero(example.hidden())]


@pytest.mark.parametrize("rows", [1, CHUNK])
@pytest.mark.parametrize("value", [-100.0, 100.0])
def test_no_neuron_fires_or_every_neuron(workbench: Workbench, rows: int, value: float) -> None:
    """A bias that silences every neuron, or wakes every neuron."""
    example = Example(BLOCKS["opt"], "exact", "f16", tokens=rows, seed=3)
    example.biases["up_bias"][:] = value
    result = workbench.run(kernel_of("opt", "exact", "f16", rows), example.inputs, tokens=rows)
    assert_close(result["y"], example.output())
    if rows == 1:
        fired = 0 if value < 0 else BLOCKS["opt"].neurons
        assert result["stats"].tolist() == [1000 + fired, 2000 + fired]


@pytest.mark.slow("compiles a kernel per case; one of each kind is fast", but=("False-reglu-", "True-reglu-"))
@pytest.mark.parametrize(("name", "kind"), [c[:2] for c in CASES if c[1] in ("masked", "part") and c[2] == "f16"])
@pytest.mark.parametrize("value", [False, True])
def test_empty_and_full_masks(workbench: Workbench, name: str, kind: str, value: bool) -> None:
    example = Example(BLOCKS[name], kind, "f16", tokens=1, seed=6)
    example.mask(np.full(BLOCKS[name].neurons, value), kind, np.random.default_rng(6))
    result = workbench.run(kernel_of(name, kind, "f16", 1), example.inputs)
    expected = example.output() if value or "d" in BLOCKS[name].biases else np.zeros((1, BLOCKS[name].dim))
    expected = np.concatenate([expected, example.squares()], axis=1)
    assert np.allclose(result["y"], expected, rtol=0, atol=2e-5 * max(np.abs(expected).max(), 1))
    assert result["stats"][0] == 1000 + value * BLOCKS[name].neurons


@pytest.mark.parametrize("name", ["reglu", "opt", "swiglu"])
def test_one_neuron(workbench: Workbench, name: str) -> None:
    """Whichever it is: the first, the last and those at the edges of the slices."""
    kernel, block = kernel_of(name, "masked", "f16", 1), BLOCKS[name]
    for neuron in (0, 1, 23, 24, 25, block.neurons - 1):
        example = Example(block, "masked", "f16", tokens=1, seed=7)
        example.mask(np.arange(block.neurons) == neuron, "masked", np.random.default_rng())
        result = workbench.run(kernel, example.inputs)
        assert np.allclose(result["y"], example.output(), rtol=0, atol=1e-5)
        assert result["stats"].tolist() == [1001, 2000 + np.count_nonzero(example.hidden())]


def test_neuron_that_is_left_out_may_overflow(workbench: Workbench) -> None:
    example = Example(BLOCKS["opt"], "masked", "f16", tokens=1, seed=8)
    example.mask(np.arange(130) != 5, "masked", np.random.default_rng())
    expected = example.output()
    example.biases["up_bias"][5] = np.inf
    assert_close(workbench.run(kernel_of("opt", "masked", "f16", 1), example.inputs)["y"], expected)


@pytest.mark.parametrize("rows", [1, CHUNK])
def test_silent_neuron_may_overflow(workbench: Workbench, rows: int) -> None:
    """A neuron that does not fire contributes nothing, not even where its up is infinite."""
    example = Example(BLOCKS["fatrelu"], "exact", "f16", tokens=rows, seed=4)
    example.biases["gate_bias"][5] = -1000
    expected = example.output()
    example.biases["up_bias"][5] = np.inf
    result = workbench.run(kernel_of("fatrelu", "exact", "f16", rows), example.inputs, tokens=rows)
    assert_close(result["y"], expected)


def test_squares_of_a_neuron_that_overflows_show(workbench: Workbench) -> None:
    example = Example(BLOCKS["normed"], "exact", "f16", tokens=1, seed=4)
    example.biases["up_bias"][5] = np.inf
    assert np.isinf(workbench.run(kernel_of("normed", "exact", "f16", 1), example.inputs)["y"][0, -1])


@pytest.mark.slow("compiles a kernel per case; one of each kind is fast", but=("reglu-exact-f16-", "reglu-exact-q4-"))
@pytest.mark.parametrize(
    ("name", "kind", "format_name", "rows"), [case for case in CASES if case[0] in ("reglu", "bitnet")]
)
def test_same_bits_for_any_number_of_threads(
    workbench: Workbench, name: str, kind: str, format_name: str, rows: int
) -> None:
    example = Example(BLOCKS[name], kind, format_name, tokens=rows, seed=5)
    kernel = kernel_of(name, kind, format_name, rows)
    results = [workbench.run(kernel, example.inputs, tokens=rows, threads=threads) for threads in (1, 2, 3, 5)]
    assert len({result["y"].tobytes() + result["stats"].tobytes() for result in results}) == 1
