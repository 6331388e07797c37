"""Models on a GPU, several sequences, long ones, and less free memory than was planned, in the emulation.

What is on either side, the KV cache of a layer as well, is as plans have it. Where the GPU lacks memory, the host
computes hot neurons: then results are those of the planned program but for the order in which neurons are added.
"""

import ctypes
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import picompile_runtime
from helpers.fake_cuda.fixtures import emulate, fake_cuda, fake_library
from helpers.families import VOCABULARY, build, save
from helpers.kernels.emulator import Emulated
from helpers.reference import eager_logits, relative_error, round_weights
from helpers.support import compile_for_test, save_byte_tokenizer, save_tiny_llama
from picompile.compile import lower as compile_lower
from picompile.loading import load_engine
from picompile.progress import NoProgress
from picompile_codegen.lowering.placement import Placement
from picompile_runtime.artifact.reader import open_artifact
from picompile_runtime.bench.bandwidth import step_bytes
from picompile_runtime.devices.cuda import CudaAccelerator
from picompile_runtime.engine import layout
from picompile_runtime.engine.engine import Engine
from picompile_runtime.engine.layout import accelerator_need
from test_end_to_end import BYTES_TOLERANCE, TOLERANCE
from test_prediction import held_out, write_predictors

pytestmark = pytest.mark.slow("runs whole models in the emulation; their kernels have fast tests")

__all__ = ["fake_cuda", "fake_library", "held_out"]


SEQUENCES, VOCAB, NEURONS = 16, 300, 200
LONG = 32_768
# The cache of the second layer is with the host.
SPLIT = Placement(frozenset({0, 1}), frozenset({0}), frozenset({0, 1}), head=True)
# Biases of neurons that are computed for every token, or for none, whatever is rounded.
UNDOUBTED = (30.0, 30.0, -30.0)
# Layers differ in how many they are, so they share kernels that take that as an argument.
HOT = {0: tuple(range(0, NEURONS, 2)), 1: tuple(range(1, NEURONS, 3))}

# compiled(target, **options) → the artifact
Compiled = Callable[..., Path]


@pytest.fixture
def compiled(
    fake_cuda: ctypes.CDLL, tiny_model: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Compiled:
    """Compile a model for the CPU, or half of its neurons and more of it for the stand-in."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG}))
    monkeypatch.setattr(compile_lower, "_placement", lambda plan, layers: SPLIT)

    def compile_it(target: str, **options: object) -> Path:
        artifact = tmp_path / target
        given: dict[str, object] = {"quant": "f16", "kv_dtype": "f32", "gate": None, "chunk": 16, **options}
        given |= {} if target == "cpu" else {"hot": HOT}
        if options["predictor"] != "exact":
            given |= {"calibration": (held_out,), "gate_tokens": 40}
        if options["predictor"] == "learned":
            given["predictors"] = write_predictors(model, tmp_path / "predictors", bias=UNDOUBTED)
        compile_for_test(model, artifact, target=target, **given)
        if target != "cpu":
            emulate(artifact, monkeypatch)
        return artifact

    return compile_it


@pytest.mark.parametrize("predictor", ["exact", "learned"])
def test_sixteen_sequences_are_those_alone(compiled: Compiled, predictor: str) -> None:
    """Each has a mask of its own. Steps of several tokens round activations to halves."""
    rng = np.random.default_rng(16)
    prompts = [rng.integers(0, VOCAB, 3 + number % 5).tolist() for number in range(SEQUENCES)]
    tokens = rng.integers(0, VOCAB, (2, SEQUENCES)).tolist()
    artifact = compiled("4090", predictor=predictor, context=64, sequences=SEQUENCES)
    with picompile_runtime.load(artifact, threads=1) as engine:
        alone = []
        for prompt, *following in zip(prompts, *tokens, strict=True):
            engine.reset()
            engine.prefill(prompt)
            alone.append([engine.decode(token).copy() for token in following])
        engine.reset()
        for slot, prompt in enumerate(prompts):
            engine.prefill(prompt, slot)
        order = rng.permutation(SEQUENCES).tolist()
        # All of them, and then some.
        steps = [engine.decode_sequences([tokens[0][slot] for slot in order], order).copy()]
        steps.append(engine.decode_sequences([tokens[1][slot] for slot in order[:5]], order[:5]).copy())
    for step, found in enumerate(steps):
        for slot, logits in zip(order, found, strict=False):
            expected = torch.from_numpy(alone[slot][step].reshape(-1))
            assert relative_error(torch.from_numpy(logits), expected) < 1e-2, (step, slot)


def test_a_context_of_32768_tokens(compiled: Compiled) -> None:
    """Far behind others, whose keys and values are 0 here, a token sees what it sees on the host alone."""
    found = []
    for target in ("cpu", "4090"):
        artifact = compiled(target, predictor="exact", context=LONG, sequences=2)
        with picompile_runtime.load(artifact, threads=1) as engine:
            engine.prefill([3, 1, 4, 1, 5], 1)
            # A prompt of so many tokens would take the emulation hours.
            engine._positions[1] = LONG - 2
            found.append(np.stack([engine.decode(token, 1).copy().reshape(-1) for token in (9, 2)]))
    expected, measured = (torch.from_numpy(each) for each in found)
    assert relative_error(measured, expected) < 1e-3


@pytest.mark.parametrize(
    ("name", "quant", "predictor"),
    [("bitnet", "f16", "exact"), ("arcee", "q4", "exact"), ("nanochat", "f16", "none"), ("jais2", "q8", "exact")],
)
def test_kernels_of_squared_relu(
    name: str, quant: str, predictor: str, fake_cuda: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the neurons and everything but the embedding is on the device; against eager transformers."""
    reference, artifact = build(name), tmp_path / "artifact"
    save(name, reference, tmp_path / "model")
    neurons = reference.config.intermediate_size
    hot = {0: tuple(range(1, neurons, 3)), 1: tuple(range(0, neurons, 3))}
    options = {"quant": quant, "predictor": predictor, "hot": hot, "kv_dtype": "f32"}
    compile_for_test(tmp_path / "model", artifact, target="4090", context=48, chunk=16, **options)
    emulate(artifact, monkeypatch)

    round_weights(reference, quant)
    ids = torch.randint(reference.config.vocab_size, (25,), generator=torch.Generator().manual_seed(3)).tolist()
    with picompile_runtime.load(artifact, threads=1) as engine:
        rows = [engine.prefill(ids[:-4]).copy(), *(engine.decode(token).copy() for token in ids[-4:])]
    found = torch.from_numpy(np.stack([row.reshape(-1) for row in rows]))
    expected = eager_logits(reference, ids)[-5:]
    assert relative_error(found, expected) < (TOLERANCE if quant == "f16" else BYTES_TOLERANCE)


PROMPTS = ([1, 2, 3, 4, 5], [3, 1], [9, 8, 7])
FEW = 3
# Of ReLU and without biases; with them, without a gate; and with limits.
CASES = {"llama": {}, "opt-post-norm": {}, "limits": {"skip": 0.002, "skip_tokens": 512}}


@dataclass(frozen=True)
class Planned:
    """An artifact, its kernels in emulation, and the memory that its program takes."""

    artifact: Path
    kernels: Path
    free_bytes: int

    @contextmanager
    def lacking(self, size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
        """Load it where so much memory is missing."""
        self.leave(size_bytes, monkeypatch)
        with picompile_runtime.load(self.artifact, threads=1, replan=True) as engine:
            yield engine

    def leave(self, size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let so much memory be missing; the stand-in says that a sixteenth is in use."""
        monkeypatch.setenv("FAKE_CUDA_MEMORY", str(-(-(self.free_bytes - size_bytes) * 16 // 15) + 64))

    def hot_bytes(self, *layers: int) -> int:
        """Return the size of the hot matrices of some layers."""
        artifact = open_artifact(self.artifact)
        sizes = [artifact.tensors[f"layers.{layer}.ffn.neurons.hot"].size_bytes for layer in layers]
        artifact.close()
        return sum(sizes)


def make(name: str, text: Path, folder: Path) -> Planned:
    model = folder / "model"
    if name == "opt-post-norm":
        save(name, build(name), model)
        save_byte_tokenizer(model, VOCABULARY)
    else:
        save_tiny_llama(model)
    predictors = write_predictors(model, folder / "predictors", bias=UNDOUBTED)
    learned = {
        "predictor": "learned",
        "predictors": predictors,
        "calibration": (text,),
        "gate": None,
        "gate_tokens": 40,
    }
    sizes = {"context": 64, "chunk": 16, "sequences": FEW, "quant": "f16", "kv_dtype": "f32"}
    compile_for_test(model, folder / "artifact", target="4090", hot=HOT, **learned, **sizes, **CASES[name])
    Emulated((folder / "artifact" / "kernels" / "device.cu").read_text(), folder / "kernels.so")
    artifact = open_artifact(folder / "artifact")
    need = accelerator_need(artifact.program, artifact.tensors)
    artifact.close()
    return Planned(folder / "artifact", folder / "kernels.so", need.total)


@pytest.fixture(scope="module", params=CASES)
def planned(
    request: pytest.FixtureRequest, held_out: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Planned]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_lower, "_placement", lambda plan, layers: SPLIT)
        # The model is smaller than any piece, and than what is left for the driver.
        patch.setattr(layout, "_SPARED_BYTES", 0)
        patch.setattr(layout, "_PIECE_BYTES", 1)
        patch.setattr(CudaAccelerator, "graph_bytes", lambda self, kernels: 0)
        yield make(request.param, held_out, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def gpu(planned: Planned, fake_cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Planned:
    monkeypatch.setenv("FAKE_CUDA_KERNELS", str(planned.kernels))
    return planned


@dataclass(frozen=True)
class Results:
    """Logits of a prompt, of a token, and of a token each of several sequences; neurons computed and fired by layer."""

    prompt: NDArray[np.float32]
    token: NDArray[np.float32]
    tokens: NDArray[np.float32]
    counted: dict[tuple[str, int], tuple[float, float]]

    @staticmethod
    def of(engine: Engine) -> "Results":
        """Run steps of each function."""
        for slot in range(FEW):
            engine.reset(slot)
        prompt = engine.prefill(PROMPTS[0]).copy()
        engine.reset_firing()
        token = engine.decode(7).copy()
        for slot in range(1, FEW):
            engine.prefill(PROMPTS[slot], slot)
        tokens = engine.decode_sequences([4, 5, 6], list(range(FEW))).copy()
        counted: dict[tuple[str, int], tuple[float, float]] = {}
        for function in ("decode", "batch"):
            for row in engine.firing(function):
                before = counted.get((function, row.part.layer), (0.0, 0.0))
                shares = (row.computed_share, row.fired_share)
                sums = [one + share * row.part.neurons for one, share in zip(before, shares, strict=True)]
                counted[function, row.part.layer] = sums[0], sums[1]
        return Results(prompt, token, tokens, counted)


def close(found: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    return float(np.abs(found - expected).max()) < 1e-5 * float(np.abs(expected).max())


def test_the_host_computes_what_the_gpu_cannot_hold(gpu: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and counts are those of the program as it was planned, and those of prompts have the same bits."""
    with gpu.lacking(0, monkeypatch) as engine:
        assert (engine.moved_bytes, engine.computed_bytes) == (0, 0)
        expected = Results.of(engine)
    for layers in ((1,), (0, 1)):
        # The embedding and small weights move as well.
        with gpu.lacking(gpu.hot_bytes(*layers), monkeypatch) as engine:
            assert engine.computed_bytes == gpu.hot_bytes(*layers) <= engine.moved_bytes
            for function in ("decode", "batch"):
                calls = [call for call in engine.loaded.program.functions[function] if call.op == "ffn"]
                assert {call.layer for call in calls if call.device == "device"} == {0, 1} - set(layers)
                assert {call.layer for call in calls if call.device == "host"} == {0, 1}
            found, again = Results.of(engine), Results.of(engine)
        np.testing.assert_array_equal(found.prompt, expected.prompt)
        assert close(found.token, expected.token) and close(found.tokens, expected.tokens)
        np.testing.assert_array_equal(again.tokens, found.tokens)
        assert found.counted.keys() == expected.counted.keys()
        for key, counts in expected.counted.items():
            assert found.counted[key] == pytest.approx(counts), key
            assert 0 < counts[1] < counts[0] < FEW * NEURONS, expected.counted


def test_a_command_says_what_the_cpu_computes(gpu: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(NoProgress, "say", lambda self, text: lines.append(text))
    gpu.leave(gpu.hot_bytes(1), monkeypatch)
    load_engine(gpu.artifact, 1, True, NoProgress()).close()
    (line,) = lines
    assert "GiB of weights that were planned for the GPU stay with the host" in line
    assert "the CPU computes the neurons of 0.00 GiB of them" in line


def test_times_are_those_of_the_calls_that_run(gpu: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the bytes of a step have an entry for each of them, without neurons that were not computed."""
    read = []
    for lacking in (0, gpu.hot_bytes(0, 1)):
        with gpu.lacking(lacking, monkeypatch) as engine:
            engine.start_timing(slowly=True)
            engine.decode(3)
            calls = engine.timing("decode")
            moved = step_bytes(engine.loaded, "decode", engine.firing(), cached=1)
            assert len(calls) == len(moved)
            read.append(sum(moved))
    assert read[1] == pytest.approx(read[0], rel=1e-3)
