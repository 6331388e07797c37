"""Feed-forward blocks against the same block in float64, and what they count."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers.kernels.bounds import noting_bounds
from helpers.kernels.workbench import Array, Workbench, as_seen, assert_close, packed, uniform
from helpers.products import sampled
from helpers.weight_formats import ROW_FORMATS
from picompile_codegen import cpu
from picompile_codegen.cpu.kernel import Kernel
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
# What a part of a block has a mask of: more columns than the part has neurons.
MASK_COLUMNS = 1000


def spec_of(block: Block, kind: str, format_name: str, rows: int, rowwise: bool = False) -> FfnSpec:
    own = {name: value for name, value in vars(block).items() if name != "biases"}
    own |= {f"{name}_bias": name[0] in block.biases for name in ("gate", "up", "down")}
    found = FfnSpec(kind=kind, format=format_name, rows=rows, rowwise=rowwise, **own)
    return replace(found, kind="masked", mask_columns=MASK_COLUMNS) if kind == "part" else found


def kernel_of(name: str, kind: str, format_name: str, rows: int, rowwise: bool = False) -> Kernel:
    return cpu.write_kernel(spec_of(BLOCKS[name], kind, format_name, rows, rowwise))


class Example:
    """Random weights of a block and the kernel's arguments that they make."""

    def __init__(self, block: Block, kind: str, format_name: str, tokens: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.block, self.kind, self.format_name = block, kind, format_name
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

    def computed(self) -> NDArray[np.bool_]:
        """Whether a kernel for one token computes the neuron: those of the mask, or those above the threshold."""
        found = np.broadcast_to(self.kept, self._hidden().shape)
        if self.kind != "exact":
            return found
        return self.products("gate" if self.block.gated else "up") > parse_activation(self.block.activation).threshold

    def counts(self) -> list[int]:
        """Neurons computed, and those that send something down, added to what was counted before."""
        return [1000 + int(self.computed().sum()), 2000 + np.count_nonzero(self.hidden())]

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


def check(workbench: Workbench, kernel: Kernel, example: Example, rows: int, counted: bool = True) -> None:
    """Any number of threads gives the same bits; what a token computes is counted where it is alone."""
    tokens = len(example.x)
    step = tokens if rows > 1 else -1
    results = [workbench.run(kernel, example.inputs, tokens=step, threads=threads) for threads in (1, 3)]
    example.assert_output(results[0]["y"][:tokens])
    assert np.isnan(results[0]["y"][tokens:]).all()
    assert len({result["y"].tobytes() + result["stats"].tobytes() for result in results}) == 1
    if counted:
        assert results[0]["stats"].tolist() == (example.counts() if rows == 1 else [1000, 2000])


def check_sequences(workbench: Workbench, kernel: Kernel, alone: Kernel, example: Example) -> Array:
    """Each token has the output that it has alone, bit for bit. Returns the statistics."""
    tokens = len(example.x)
    results = [workbench.run(kernel, example.inputs, tokens=tokens, threads=threads) for threads in (1, 3)]
    example.assert_output(results[0]["y"][:tokens])
    assert results[0]["y"].tobytes() == results[1]["y"].tobytes()
    own = [
        {key: value[t : t + 1] if key in ("x", "mask", "gains") else value for key, value in example.inputs.items()}
        for t in range(tokens)
    ]
    singles = [workbench.run(alone, inputs) for inputs in own]
    assert results[0]["y"][:tokens].tobytes() == b"".join(single["y"].tobytes() for single in singles)
    start = np.array([1000, 2000])
    assert results[0]["stats"].tolist() == sum((single["stats"] - start for single in singles), start).tolist()
    return results[0]["stats"]


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("ffn") / "host.so")


def is_kind(name: str, kind: str, rows: int, **_: object) -> bool:
    """Whether a block can be of this kind: an activation has to tell which neurons fire; masks are for one token."""
    return (kind != "exact" or parse_activation(BLOCKS[name].activation).sparse) and (
        kind in ("dense", "exact") or rows == 1
    )


LARGER = [pytest.param(name, marks=pytest.mark.slow("like others")) for name in ("drelu", "relu2", "gelu", "normed")]


@sampled(
    name=("reglu", "fatrelu", "opt", "swiglu", "bitnet", *LARGER),
    kind=("dense", "exact", "masked", "part"),
    form=ROW_FORMATS,
    rows=(1, CHUNK),
    when=is_kind,
    slow="compiles a kernel per case",
)
def test_ffn(workbench: Workbench, name: str, kind: str, form: str, rows: int) -> None:
    for tokens in (1,) if rows == 1 else (1, 2, CHUNK):
        example = Example(BLOCKS[name], kind, form, tokens, seed=rows + tokens)
        # GELU of a number far below zero is zero in float32 only.
        check(workbench, kernel_of(name, kind, form, rows), example, rows, counted=name != "gelu")


def test_neurons_that_wait_fit_their_memory(workbench: Workbench) -> None:
    """The last 16 of a slice's 48 neurons come where some of the first 32 are left over; most neurons fire."""
    block = Block(768, 64, gated=False, activation="relu", biases="u")
    kernel = noting_bounds(cpu.write_kernel(spec_of(block, "masked", "q4", 1)))
    for seed in range(4):
        example = Example(block, "masked", "q4", 1, seed)
        example.mask(np.ones(block.neurons, bool), "masked", np.random.default_rng(seed))
        example.biases["up_bias"][:] = 1.4 * np.abs(example.products("up")).std()
        example.inputs["outside"] = np.zeros(1, np.int32)
        results = workbench.run(kernel, example.inputs)
        example.assert_output(results["y"])
        assert results["outside"].tolist() == [0]


@pytest.mark.slow("compiles a kernel per case; one of each kind is fast", but=("reglu-masked-f16",))
@pytest.mark.parametrize(
    ("name", "kind", "form"),
    [("reglu", "masked", "f16"), ("opt", "part", "f16"), ("bitnet", "masked", "f16"), ("opt", "masked", "q4")],
)
def test_masks_of_a_chunk_in_tiles(workbench: Workbench, name: str, kind: str, form: str) -> None:
    """Each token has a mask of its own."""
    block = BLOCKS[name]
    kernel = cpu.write_kernel(replace(spec_of(block, kind, form, CHUNK), in_tiles=True))
    for tokens in (1, 8, CHUNK):
        example, rng = Example(block, kind, form, tokens, seed=tokens), np.random.default_rng(tokens)
        columns = MASK_COLUMNS if kind == "part" else block.neurons
        mask = (rng.random((tokens, columns)) < 0.4).astype(np.uint8)
        example.inputs["mask"] = mask
        example.kept = mask[:, example.inputs["table"]] == 1 if kind == "part" else mask == 1
        check(workbench, kernel, example, CHUNK, counted=False)


@pytest.mark.slow("compiles a kernel per case; test_ffn has fast ones")
@sampled(
    kind=("dense", "masked", "exact"),
    form=ROW_FORMATS[1:],
    rows=(1, CHUNK),
    when=lambda kind, rows, **_: kind != "masked" or rows == 1,
    slow="compiles a kernel per case",
)
def test_down_is_exact_for_equal_outputs(workbench: Workbench, kind: str, form: str, rows: int) -> None:
    """Where all outputs are equal, and all weights of down 0 or -1, y is exact."""
    example = Example(BLOCKS["opt"], kind, form, tokens=rows, seed=11)
    example.alike(kind)
    result = workbench.run(kernel_of("opt", kind, form, rows), example.inputs, tokens=rows)
    assert_close(result["y"], example.output())


@pytest.mark.slow("compiles a kernel per case; one of each kind is fast", but=("reglu-f16-masked",))
@pytest.mark.parametrize(
    ("name", "form", "kind"),
    [
        *(("reglu", "f16", "masked"), ("opt", "f16", "masked"), ("opt", "q4", "masked"), ("swiglu", "f16", "masked")),
        *(("bitnet", "q8", "masked"), ("drelu", "q4m", "masked"), ("drelu", "q4", "exact"), ("drelu", "q6", "exact")),
        *(("opt", "q8", "exact"), ("bitnet", "f16", "exact"), ("fatrelu", "f16", "dense"), ("swiglu", "q4", "dense")),
        *(("normed", "q8", "dense"), ("opt", "q6", "dense"), ("opt", "q4m", "dense")),
    ],
)
def test_several_sequences(workbench: Workbench, name: str, form: str, kind: str) -> None:
    """With a mask of its own for each where there are masks."""
    block, masked = BLOCKS[name], kind == "masked"
    kernel, alone = kernel_of(name, kind, form, CHUNK, rowwise=not masked), kernel_of(name, kind, form, 1)
    for tokens, share in product((1, 4, CHUNK), (0.0, 0.2, 0.9) if masked else (1.0,)):
        example = Example(block, kind, form, tokens, seed=tokens)
        if masked:
            example.kept = np.random.default_rng(tokens).random((tokens, block.neurons)) < share
            example.inputs["mask"] = example.kept.astype(np.uint8)
        check_sequences(workbench, kernel, alone, example)


@pytest.mark.slow("compiles a kernel per case; one of each kind is fast", but=("5-1-reglu-",))
@pytest.mark.parametrize(
    ("name", "kind", "form"),
    [("reglu", "masked", "f16"), ("fatrelu", "masked", "q4"), ("bitnet", "masked", "q8"), ("opt", "part", "q6")],
)
@pytest.mark.parametrize(("room", "rows"), [(5, 1), (900, CHUNK)])
def test_blocks_share_a_kernel(workbench: Workbench, name: str, kind: str, form: str, room: int, rows: int) -> None:
    """Each has the bits that its own kernel gives it; the number of its neurons is an argument."""
    block, rng = BLOCKS[name], np.random.default_rng(room)
    own = spec_of(block, kind, form, rows)
    shared = cpu.write_kernel(CountedFfnSpec(**vars(own) | {"neurons": block.neurons + room}))
    example = Example(block, kind, form, rows, seed=rows)
    if rows > 1:
        columns = block.neurons if kind == "masked" else MASK_COLUMNS
        example.inputs["mask"] = (rng.random((rows, columns)) < 0.3).astype(np.uint8)
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


# ---- corners ----


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
        assert result["stats"].tolist() == [1000 + fired, 2000 + fired] == example.counts()


@pytest.mark.slow("compiles a kernel per case; one of each kind is fast", but=("masked-reglu", "masked-opt"))
@pytest.mark.parametrize("name", ["reglu", "opt", "swiglu", "bitnet"])
@pytest.mark.parametrize("kind", ["masked", "part"])
def test_masks_of_none_one_and_all(workbench: Workbench, name: str, kind: str) -> None:
    """One neuron is the first, the last, or one at the edges of the slices."""
    kernel, count = kernel_of(name, kind, "f16", 1), BLOCKS[name].neurons
    for neuron in (None, 0, 1, 23, 24, 25, count - 1, ...):
        example = Example(BLOCKS[name], kind, "f16", tokens=1, seed=7)
        chosen = np.arange(count) == neuron if isinstance(neuron, int) else np.full(count, neuron is ...)
        example.mask(chosen, kind, np.random.default_rng(6))
        result = workbench.run(kernel, example.inputs)
        expected = np.concatenate([np.broadcast_to(example.output(), (1, BLOCKS[name].dim)), example.squares()], axis=1)
        assert np.allclose(result["y"], expected, rtol=0, atol=1e-5 * max(np.abs(expected).max(), 1))
        assert result["stats"].tolist() == example.counts()


@pytest.mark.parametrize(
    ("name", "kind", "rows"), [("opt", "masked", 1), ("fatrelu", "exact", 1), ("fatrelu", "exact", CHUNK)]
)
def test_neuron_that_is_left_out_may_overflow(workbench: Workbench, name: str, kind: str, rows: int) -> None:
    """One that is not in the mask or does not fire contributes nothing, not even where its up is infinite."""
    example = Example(BLOCKS[name], kind, "f16", tokens=rows, seed=4)
    if kind == "masked":
        example.mask(np.arange(BLOCKS[name].neurons) != 5, kind, np.random.default_rng())
    else:
        example.biases["gate_bias"][5] = -1000
    expected = example.output()
    example.biases["up_bias"][5] = np.inf
    assert_close(workbench.run(kernel_of(name, kind, "f16", rows), example.inputs, tokens=rows)["y"], expected)


def test_squares_of_a_neuron_that_overflows_show(workbench: Workbench) -> None:
    example = Example(BLOCKS["normed"], "exact", "f16", tokens=1, seed=4)
    example.biases["up_bias"][5] = np.inf
    assert np.isinf(workbench.run(kernel_of("normed", "exact", "f16", 1), example.inputs)["y"][0, -1])
