"""Feed-forward blocks of experts, of which a token computes the chosen ones, against the same block in float64."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from test_kernels_ffn import CHUNK, Block, check, check_sequences
from test_kernels_ffn import spec_of as spec_of_block
from test_kernels_ffn_limits import Example as WithLimits

from helpers.kernels.bounds import noting_bounds
from helpers.kernels.workbench import Array, Workbench, uniform
from helpers.products import sampled
from picompile_codegen import cpu, cuda
from picompile_codegen.errors import CodegenError
from picompile_codegen.specs import CountedFfnSpec, FfnSpec

# Neurons of all experts: how many experts there are, and how many a token may choose, comes behind.
BLOCKS = {
    "reglu": (Block(7 * 45, 96, gated=True, activation="relu"), 7, 2),
    "fatrelu": (Block(4 * 77, 72, gated=True, activation="fatrelu(0.25)", biases="gud"), 4, 3),
    "relu2": (Block(5 * 64, 100, gated=False, activation="relu2"), 5, 1),
    "opt": (Block(33 * 5, 136, gated=False, activation="relu", biases="ud"), 33, 8),
    "swiglu": (Block(8 * 40, 96, gated=True, activation="silu"), 8, 2),
    "gelu": (Block(6 * 24, 72, gated=False, activation="gelu", biases="ud"), 6, 6),
}


def spec_of(name: str, kind: str, form: str, rows: int, rowwise: bool = False, limits: str = "") -> FfnSpec:
    block, experts, chosen = BLOCKS[name]
    return replace(
        spec_of_block(block, kind, form, rows, rowwise),
        experts=experts,
        chosen=chosen,
        expert_bias="d" in block.biases,
        gate_limits="g" in limits,
        output_limits="o" in limits,
    )


class Example(WithLimits):
    """Random weights, and gains of a few experts for each token, some of them below 0."""

    def __init__(self, name: str, kind: str, form: str, tokens: int, seed: int, limits: str = "") -> None:
        block, self.experts, self.chosen = BLOCKS[name]
        super().__init__(block, kind, limits, form, tokens, seed)
        rng = np.random.default_rng([seed, 2])
        gains = np.zeros((tokens, self.experts), np.float32)
        for row in gains:
            # A token may also choose fewer of them than it can, or none.
            count = self.chosen if rng.random() < 0.7 else rng.integers(self.chosen + 1)
            row[rng.permutation(self.experts)[:count]] = rng.uniform(0.2, 1.5, count) * rng.choice([-1, 1], count)
        self.choose(gains)
        if "d" in block.biases:
            self.inputs["expert_bias"] = uniform(rng, self.experts * block.dim)

    def choose(self, gains: Array) -> None:
        """Give each token these gains, of the neurons that it keeps as they are."""
        self.gains = gains
        self.inputs["gains"] = gains

    def of_neurons(self) -> Array:
        """The gain of each token's neurons: [tokens, neurons]."""
        return np.repeat(self.gains, self.block.neurons // self.experts, axis=1)

    def computed(self) -> NDArray[np.bool_]:
        return super().computed() & (self.of_neurons() != 0)

    def hidden(self) -> NDArray[np.float64]:
        return np.where(self.of_neurons() != 0, super().hidden() * self.of_neurons(), 0.0)

    def output(self) -> NDArray[np.float64]:
        biases = self.inputs.get("expert_bias", np.zeros(self.experts * self.block.dim))
        return super().output() + self.gains.astype(np.float64) @ biases.reshape(self.experts, -1)


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("experts") / "host.so")


def is_case(name: str, kind: str, **_: object) -> bool:
    return kind != "exact" or BLOCKS[name][0].activation not in ("silu", "gelu")


@sampled(
    name=BLOCKS,
    kind=("dense", "exact", "masked"),
    form=("f16", "q8", "q4", "q6", "q4m"),
    when=is_case,
    # test_kernels_ffn.py has every format.
    fast={"name": ("fatrelu", "relu2", "swiglu"), "form": ("f16", "q8", "q4m")},
    slow="compiles a kernel per case",
)
def test_one_token(workbench: Workbench, name: str, kind: str, form: str) -> None:
    for seed in range(4):
        example = Example(name, kind, form, 1, seed)
        check(workbench, cpu.write_kernel(spec_of(name, kind, form, 1)), example, 1, counted=name != "gelu")


@sampled(
    name=BLOCKS,
    kind=("dense", "exact", "masked"),
    form=("f16", "q8", "q4"),
    rowwise=(True, False),
    when=is_case,
    fast={"name": ("fatrelu", "opt", "swiglu")},
    slow="compiles two kernels per case",
)
def test_several_tokens(workbench: Workbench, name: str, kind: str, form: str, rowwise: bool) -> None:
    """Each token has the output that it has alone, bit for bit: in a batch that of decoding, in a chunk that of any."""
    rows = CHUNK if rowwise else 37
    spec = spec_of(name, kind, form, rows, rowwise=rowwise and kind != "masked")
    spec = replace(spec, in_tiles=kind == "masked" and not rowwise)
    alone = cpu.write_kernel(spec_of(name, kind, form, 1))
    for tokens in (1, 4, rows):
        example = Example(name, kind, form, tokens, seed=tokens)
        if kind == "masked":
            example.kept = np.random.default_rng(tokens).random((tokens, example.block.neurons)) < 0.4
            example.inputs["mask"] = example.kept.astype(np.uint8)
        if rowwise:
            check_sequences(workbench, cpu.write_kernel(spec), alone, example)
        else:
            check(workbench, cpu.write_kernel(spec), example, rows)
            found = workbench.run(spec, example.inputs, tokens=tokens)["y"]
            # Where gates decide, as in decoding, a masked block of one token has the neurons that are left of its mask.
            as_decoded = spec.is_sparse and form != "f16"
            for t in {0, tokens // 2, tokens - 1}:
                names = ("x", "mask", "gains")
                own = {key: value[t : t + 1] if key in names else value for key, value in example.inputs.items()}
                assert workbench.run(spec, own, tokens=1)["y"][:1].tobytes() == found[t : t + 1].tobytes()
                if as_decoded and kind == "exact":
                    assert workbench.run(alone, own)["y"].tobytes() == found[t : t + 1].tobytes()


@sampled(
    name=("fatrelu", "swiglu", "gelu"),
    kind=("dense", "exact", "masked"),
    limits=("g", "o", "go"),
    form=("f16", "q4"),
    rows=(1, CHUNK),
    when=lambda name, kind, limits, rows, **_: (
        (BLOCKS[name][0].gated or limits == "o")
        and (kind != "exact" or "g" in limits or name == "fatrelu")
        and (kind != "masked" or rows == 1)
    ),
    fast={"form": ("f16",)},
    slow="compiles a kernel per case",
)
def test_limits(workbench: Workbench, name: str, kind: str, limits: str, form: str, rows: int) -> None:
    """Limits are of outputs before they are multiplied by gains."""
    spec = spec_of(name, kind, form, rows, limits=limits)
    for tokens in (1,) if rows == 1 else (2, CHUNK):
        example = Example(name, kind, form, tokens, seed=tokens, limits=limits)
        check(workbench, cpu.write_kernel(spec), example, rows)


def poison(example: Example, name: str, kind: str, token: int) -> dict[str, Array]:
    """Weights, biases and limits of all experts that the token has not chosen are not numbers."""
    spec, out = spec_of(name, kind, "f16", 1), np.flatnonzero(example.of_neurons()[token] == 0)
    inputs = {key: value.copy() for key, value in example.inputs.items()}
    for key, parts in (("neuron_w", spec.bundle_parts), ("decide_w", 1)):
        if key in inputs:
            inputs[key].reshape(spec.neurons, parts, -1)[out] = 255
    for key in ("gate_bias", "up_bias"):
        if key in inputs:
            inputs[key][out] = np.nan
    if "expert_bias" in inputs:
        inputs["expert_bias"].reshape(spec.experts, -1)[example.gains[token] == 0] = np.nan
    if "mask" in inputs:
        inputs["mask"][:, out] = 1
    return inputs


@pytest.mark.slow(
    "compiles a kernel per case; one of each kind is fast", but=("1-opt-m", "1-fatrelu-d", "13-fatrelu-e")
)
@pytest.mark.parametrize(
    ("name", "kind"), [("fatrelu", "dense"), ("fatrelu", "exact"), ("opt", "exact"), ("opt", "masked")]
)
@pytest.mark.parametrize("rows", [1, CHUNK])
def test_nothing_of_other_experts_is_read(workbench: Workbench, name: str, kind: str, rows: int) -> None:
    """Not even their columns of a mask count."""
    spec = spec_of(name, kind, "f16", rows)
    for seed in range(3):
        example = Example(name, kind, "f16", 1, seed=seed)
        expected = workbench.run(spec, example.inputs)["y"]
        assert np.array_equal(workbench.run(spec, poison(example, name, kind, 0))["y"], expected, equal_nan=True)
        assert np.isfinite(expected[0]).all()


@pytest.mark.parametrize(("name", "kind"), [("fatrelu", "exact"), ("opt", "dense")])
def test_nothing_of_other_experts_is_read_in_tiles(workbench: Workbench, name: str, kind: str) -> None:
    spec = spec_of(name, kind, "f16", 37)
    example = Example(name, kind, "f16", 37, seed=3)
    _, experts, chosen = BLOCKS[name]
    gains = np.random.default_rng(2).uniform(0.5, 1.5, (37, experts)).astype(np.float32)
    gains[:, ::2] = 0
    gains[:, 2 * chosen :] = 0
    # Some tokens, and an expert, have none.
    gains[:5], gains[:, 1] = 0, 0
    example.choose(gains)
    expected = workbench.run(spec, example.inputs, tokens=37)["y"]
    example.assert_output(expected)
    assert np.array_equal(workbench.run(spec, poison(example, name, kind, 5), tokens=37)["y"], expected)


@pytest.mark.parametrize(("name", "kind"), [("reglu", "exact"), ("swiglu", "dense"), ("opt", "masked")])
def test_gains_that_no_router_makes(workbench: Workbench, name: str, kind: str) -> None:
    """More experts than may be chosen: the first ones count. What is not a number shows."""
    kernel = noting_bounds(cpu.write_kernel(spec_of(name, kind, "f16", 1)))
    example = Example(name, kind, "f16", 1, seed=1)
    example.inputs["outside"] = np.zeros(1, np.int32)
    _, experts, chosen = BLOCKS[name]
    example.inputs["gains"] = np.ones((1, experts), np.float32)
    example.gains = (np.arange(experts) < chosen).astype(np.float32)[None]
    found = workbench.run(kernel, example.inputs)
    example.assert_output(found["y"])
    example.inputs["gains"][0, 0] = np.nan
    assert np.isnan(workbench.run(kernel, example.inputs)["y"]).all()
    assert found["outside"].tolist() == [0]
    example.choose(np.zeros((1, experts), np.float32))
    nothing = workbench.run(kernel, example.inputs)
    assert np.array_equal(nothing["y"][0], example.biases.get("down_bias", np.zeros(example.block.dim)))
    assert nothing["stats"].tolist() == [1000, 2000]


def test_parts_of_experts_are_refused() -> None:
    spec = spec_of("reglu", "masked", "f16", 1)
    for wrong in (replace(spec, mask_columns=1000), replace(spec, squares=True), CountedFfnSpec(**vars(spec))):
        with pytest.raises(CodegenError, match="no CPU kernel for a part of a block of experts"):
            cpu.write_kernel(wrong)
    with pytest.raises(CodegenError, match="no GPU kernel for a block of experts"):
        cuda.write_kernel(spec)
