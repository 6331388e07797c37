"""Blocks of experts with matrices in panels, against the same in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_kernels_panels import FAST, TOGETHER

from helpers.kernels.workbench import Array, Workbench, as_seen, assert_close, packed, uniform
from helpers.products import sampled
from picompile_codegen import cpu
from picompile_codegen.cpu.kernel import Kernel
from picompile_codegen.specs import ExpertsSpec
from picompile_passes.dialect import parse_activation
from picompile_passes.formats.panels import block_has_panels, to_panels

# More than a tile of tokens choose the same expert.
CHUNK = 75
EXPERTS, CHOSEN, SIZE, DIM = 5, 2, 48, 80
SLOW = "compiles a kernel per case"

BLOCKS = {
    "swiglu": {"gated": True, "activation": "silu", "up_activation": "identity", "biases": ""},
    "gelu": {"gated": False, "activation": "gelu", "up_activation": "identity", "biases": "ude"},
    "geglu": {"gated": True, "activation": "gelu_tanh", "up_activation": "relu", "biases": "gue"},
    "reglu": {"gated": True, "activation": "relu", "up_activation": "identity", "biases": "d"},
}


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("experts") / "host.so")


def spec_of(formats: Sequence[str], block: str, rows: int, activation_bytes: int = 1, **changes: int) -> ExpertsSpec:
    own = BLOCKS[block]
    shape = {"neurons": EXPERTS * SIZE, "dim": DIM, "experts": EXPERTS, "chosen": CHOSEN} | changes
    return ExpertsSpec(
        formats=tuple(formats) if own["gated"] else tuple(formats[1:]),
        rows=rows,
        gated=bool(own["gated"]),
        activation=str(own["activation"]),
        up_activation=str(own["up_activation"]),
        activation_bytes=activation_bytes,
        **{f"{name}_bias": name[0] in str(own["biases"]) for name in ("gate", "up", "down", "expert")},
        **shape,
    )


def experts_kernel(formats: tuple[str, ...], block: str, tokens: int | None, activation_bytes: int) -> Kernel:
    return cpu.write_kernel(spec_of(formats, block, 1 if tokens is None else CHUNK, activation_bytes))


def random_gains(rng: np.random.Generator, tokens: int, experts: int, chosen: int) -> Array:
    """`chosen` gains of each token, some of them negative; a token has none now and then, and the first expert many."""
    scores = rng.random((tokens, experts)) + np.where(np.arange(experts) == 0, 0.5, 0.0)
    is_chosen = scores.argsort(axis=1).argsort(axis=1) >= experts - chosen
    is_chosen &= rng.random((tokens, 1)) > 0.1
    return np.where(is_chosen, rng.uniform(-0.3, 1, (tokens, experts)), 0).astype(np.float32)


@dataclass(frozen=True)
class Weights:
    """The arguments of a kernel but for x, gains and stats, and what they stand for, float64, by name."""

    spec: ExpertsSpec
    inputs: dict[str, Array]
    matrices: dict[str, NDArray[np.float64]]
    biases: dict[str, Array]

    @classmethod
    def random(cls, rng: np.random.Generator, spec: ExpertsSpec) -> "Weights":
        names = ("gate", "up", "down") if spec.gated else ("up", "down")
        shapes = dict.fromkeys(names, (spec.neurons, spec.dim)) | {
            "down": (spec.experts * spec.dim, spec.expert_neurons)
        }
        inputs, matrices = {}, {}
        for name, form in zip(names, spec.formats, strict=True):
            data, matrices[name] = packed(rng, form, *shapes[name])
            inputs[f"{name}_w"] = to_panels(torch.from_numpy(data), form, shapes[name][1]).numpy()
        sizes = {
            "gate": (spec.neurons,),
            "up": (spec.neurons,),
            "expert": (spec.experts, spec.dim),
            "down": (spec.dim,),
        }
        biases = {name: uniform(rng, *size) for name, size in sizes.items() if getattr(spec, f"{name}_bias")}
        return cls(spec, inputs | {f"{name}_bias": bias.reshape(-1) for name, bias in biases.items()}, matrices, biases)

    def expected(self, x: Array, gains: Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return y, and the outputs of the neurons of all experts [tokens, experts, neurons of one]."""
        spec, forms = self.spec, dict(zip(self.matrices, self.spec.formats, strict=True))

        def activated(name: str, activation: str) -> NDArray[np.float64]:
            products = as_seen(x, forms[name], spec.activation_bytes) @ self.matrices[name].T
            products = products + self.biases.get(name, 0.0)
            found: NDArray[np.float64] = parse_activation(activation).function(torch.from_numpy(products)).numpy()
            return found

        first, *_ = self.matrices
        hidden = activated(first, spec.activation)
        if spec.gated:
            hidden = hidden * activated("up", spec.up_activation)
        hidden = hidden.reshape(len(x), spec.experts, spec.expert_neurons)
        y = np.zeros((len(x), spec.dim)) + self.biases.get("down", 0.0)
        down = self.matrices["down"].reshape(spec.experts, spec.dim, spec.expert_neurons)
        for expert in range(spec.experts):
            seen = as_seen(hidden[:, expert].astype(np.float32), forms["down"], spec.activation_bytes)
            outputs = seen @ down[expert].T + (self.biases["expert"][expert] if spec.expert_bias else 0.0)
            y += gains[:, expert, None].astype(np.float64) * outputs
        return y, hidden


@sampled(
    formats=TOGETHER,
    block=BLOCKS,
    tokens=(None, 3, CHUNK),
    activation_bytes=(1, 2),
    fast={"formats": FAST},
    slow=SLOW,
)
def test_experts(
    workbench: Workbench, formats: tuple[str, ...], block: str, tokens: int | None, activation_bytes: int
) -> None:
    """`tokens` None is the kernel of decode. Threads change no bit, and each token has the bits that it has alone."""
    rng = np.random.default_rng([len(block), tokens or 0])
    kernel = experts_kernel(formats, block, tokens, activation_bytes)
    weights = Weights.random(rng, spec_of(formats, block, kernel.tokens, activation_bytes))
    x, stats = uniform(rng, tokens or 1, DIM), np.array([5, 7], np.int64)
    gains = random_gains(rng, len(x), EXPERTS, CHOSEN)
    if tokens is None:
        gains[0] = [0.5, 0, 0, -0.25, 0]
    expected, hidden = weights.expected(x, gains)
    inputs = weights.inputs | {"x": x, "gains": gains, "stats": stats}
    step = -1 if tokens is None else tokens
    results = [workbench.run(kernel, inputs, tokens=step, threads=threads) for threads in (1, 2, 5)]
    # One byte of an output of the neurons may be rounded to another: a 254th of a group's largest.
    assert_close(results[0]["y"][: len(x)], expected, 2e-3 if activation_bytes == 1 else 2e-5)
    assert (results[0]["y"][len(x) :].view(np.uint8) == 255).all(), "rows that do not count were written"
    assert len({result["y"].tobytes() for result in results}) == 1
    computed, fired = results[0]["stats"].tolist()
    chosen = np.abs(hidden[gains != 0])
    # An output near 0 may be one or not.
    least, unsure = int((chosen >= 1e-3).sum()), int((chosen < 1e-3).sum())
    assert computed == 5 + chosen.size
    assert 7 + least <= fired <= 7 + least + unsure
    if tokens is not None:
        for row, own, value in zip(x, gains, results[0]["y"], strict=False):
            alone = workbench.run(kernel, inputs | {"x": row[None], "gains": own[None]}, tokens=1)["y"][0]
            assert alone.tobytes() == value.tobytes()


@pytest.mark.slow("compiles two kernels per case; one is fast", but=("q4_k-3]",))
@pytest.mark.parametrize("rows", [CHUNK, 3])
@pytest.mark.parametrize("form", ["q4", "q4_k", "fp8"])
def test_tokens_have_the_bits_of_decode(workbench: Workbench, form: str, rows: int) -> None:
    """The kernels of decode, of a step of several sequences and of prompts give each token the same bits."""
    rng = np.random.default_rng(rows)
    one, several = spec_of((form,) * 3, "geglu", 1), spec_of((form,) * 3, "geglu", rows)
    weights, x = Weights.random(rng, one), uniform(rng, rows, DIM)
    gains, stats = random_gains(rng, rows, EXPERTS, CHOSEN), np.zeros(2, np.int64)
    inputs = weights.inputs | {"stats": stats}
    found = workbench.run(several, inputs | {"x": x, "gains": gains}, tokens=rows)
    counted = np.zeros(2, np.int64)
    for row, own, value in zip(x, gains, found["y"], strict=True):
        alone = workbench.run(one, inputs | {"x": row[None], "gains": own[None]})
        assert alone["y"][0].tobytes() == value.tobytes()
        counted += alone["stats"]
    assert counted.tolist() == found["stats"].tolist()


@pytest.mark.parametrize("rows", [1, 4])
def test_more_gains_than_there_may_be(workbench: Workbench, rows: int) -> None:
    """The first experts are computed, and nothing is written outside of memory, as the workbench finds out."""
    rng = np.random.default_rng(rows)
    spec = spec_of(("q4",) * 3, "swiglu", rows)
    weights, x = Weights.random(rng, spec), uniform(rng, rows, DIM)
    gains = rng.uniform(0.5, 1, (rows, EXPERTS)).astype(np.float32)
    stats = np.zeros(2, np.int64)
    found = workbench.same(spec, weights.inputs | {"x": x, "gains": gains, "stats": stats}, tokens=rows)
    expected, _ = weights.expected(x, np.where(np.arange(EXPERTS) < CHOSEN, gains, np.float32(0)))
    assert_close(found["y"], expected, 2e-3)
    assert found["stats"][0] == rows * CHOSEN * SIZE


@pytest.mark.slow("compiles a kernel per case; one has a bias", but=("swiglu-", "reglu-1]"))
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("block", ["swiglu", "reglu"])
def test_no_expert(workbench: Workbench, rows: int, block: str) -> None:
    rng = np.random.default_rng(rows)
    spec = spec_of(("q4",) * 3, block, rows)
    weights = Weights.random(rng, spec)
    given = {
        "x": uniform(rng, rows, DIM),
        "gains": np.zeros((rows, EXPERTS), np.float32),
        "stats": np.zeros(2, np.int64),
    }
    found = workbench.same(spec, weights.inputs | given, tokens=rows)
    assert np.array_equal(found["y"], np.broadcast_to(weights.biases.get("down", np.float32(0)), (rows, DIM)))
    assert not found["stats"].any()


@pytest.mark.parametrize("rows", [1, 4])
def test_what_is_no_number_shows(workbench: Workbench, rows: int) -> None:
    """In a token, or in one of its gains; not in other tokens."""
    rng = np.random.default_rng(rows)
    spec = spec_of(("q4",) * 3, "swiglu", rows)
    weights, x = Weights.random(rng, spec), uniform(rng, rows, DIM)
    gains = np.tile(np.array([0.5, 0, 0, 0.25, 0], np.float32), (rows, 1))
    for name in ("x", "gains"):
        given = {"x": x.copy(), "gains": gains.copy(), "stats": np.zeros(2, np.int64)}
        given[name][0, 3] = np.nan
        y = workbench.run(spec, weights.inputs | given, tokens=rows)["y"]
        assert np.isnan(y[0]).all()
        assert np.isfinite(y[1:]).all()


@pytest.mark.slow("compiles a kernel per case", but=("9]",))
@pytest.mark.parametrize("rows", [1, 9])
def test_one_of_many_experts(workbench: Workbench, rows: int) -> None:
    """Experts of a panel each, an odd number of panels of outputs, and one expert for a token."""
    rng = np.random.default_rng(rows)
    spec = spec_of(("q4", "q8", "q4"), "geglu", rows, experts=33, neurons=33 * 16, dim=48, chosen=1)
    weights, x = Weights.random(rng, spec), uniform(rng, rows, spec.dim)
    gains = np.zeros((rows, spec.experts), np.float32)
    gains[np.arange(rows), rng.integers(0, spec.experts, rows)] = rng.uniform(0.5, 1, rows)
    given = {"x": x, "gains": gains, "stats": np.zeros(2, np.int64)}
    found = workbench.same(spec, weights.inputs | given, tokens=rows)
    assert_close(found["y"], weights.expected(x, gains)[0], 2e-3)


def test_panels_of_experts() -> None:
    assert block_has_panels(("q4", "q4", "q6_k"), 1024, 2048)
    assert block_has_panels(("q4", "q4"), 16, 48)
    assert not block_has_panels(("q4", "q4", "q4"), 24, 48)
    assert not block_has_panels(("q4", "q4", "q4"), 48, 24)
    assert not block_has_panels(("q4", "q4", "f16"), 48, 48)
