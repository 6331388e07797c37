"""Artifacts whose GPU has less free memory than was planned: the host computes hot neurons, in the emulation.

Results are those of the program as it was planned but for the order in which neurons are added.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import picompile_runtime
from helpers.fake_cuda.fixtures import fake_cuda, fake_library
from helpers.families import VOCABULARY, build, save
from helpers.kernels.emulator import Emulated
from helpers.support import compile_for_test, save_byte_tokenizer, save_tiny_llama
from picompile import compile_steps
from picompile.loading import load_engine
from picompile.progress import NoProgress
from picompile_codegen.lowering.placement import Placement
from picompile_runtime.artifact.reader import open_artifact
from picompile_runtime.bench.bandwidth import step_bytes
from picompile_runtime.devices.cuda import CudaAccelerator
from picompile_runtime.engine import layout
from picompile_runtime.engine.engine import Engine
from picompile_runtime.engine.layout import accelerator_need
from test_prediction import held_out, write_predictors

pytestmark = pytest.mark.slow("runs whole models in the emulation")

__all__ = ["fake_cuda", "fake_library", "held_out"]

NEURONS, SEQUENCES = 200, 3
HOT = {0: tuple(range(0, NEURONS, 2)), 1: tuple(range(1, NEURONS, 3))}
# Biases of neurons that are computed for every token, or for none, whatever is rounded.
UNDOUBTED = (30.0, 30.0, -30.0)
PROMPTS = ([1, 2, 3, 4, 5], [3, 1], [9, 8, 7])
TOLERANCE = 1e-5
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
    compile_for_test(
        model,
        folder / "artifact",
        target="4090",
        quant="f16",
        kv_dtype="f32",
        predictor="learned",
        predictors=write_predictors(model, folder / "predictors", bias=UNDOUBTED),
        calibration=(text,),
        gate=None,
        gate_tokens=40,
        hot=HOT,
        context=64,
        chunk=16,
        sequences=SEQUENCES,
        **CASES[name],
    )
    Emulated((folder / "artifact" / "kernels" / "device.cu").read_text(), folder / "kernels.so")
    artifact = open_artifact(folder / "artifact")
    need = accelerator_need(artifact.program, artifact.tensors)
    artifact.close()
    return Planned(folder / "artifact", folder / "kernels.so", need.total)


@pytest.fixture(scope="module", params=CASES)
def planned(
    request: pytest.FixtureRequest, held_out: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Planned]:
    placement = Placement(frozenset({0, 1}), frozenset({0}), frozenset({0, 1}), head=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_steps, "_placement", lambda plan, layers: placement)
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
        for slot in range(SEQUENCES):
            engine.reset(slot)
        prompt = engine.prefill(PROMPTS[0]).copy()
        engine.reset_firing()
        token = engine.decode(7).copy()
        for slot in range(1, SEQUENCES):
            engine.prefill(PROMPTS[slot], slot)
        tokens = engine.decode_sequences([4, 5, 6], list(range(SEQUENCES))).copy()
        counted: dict[tuple[str, int], tuple[float, float]] = {}
        for function in ("decode", "batch"):
            for row in engine.firing(function):
                before = counted.get((function, row.part.layer), (0.0, 0.0))
                shares = (row.computed_share, row.fired_share)
                sums = [one + share * row.part.neurons for one, share in zip(before, shares, strict=True)]
                counted[function, row.part.layer] = sums[0], sums[1]
        return Results(prompt, token, tokens, counted)


def close(found: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    return float(np.abs(found - expected).max()) < TOLERANCE * float(np.abs(expected).max())


@pytest.mark.parametrize("layers", [(1,), (0, 1)])
def test_the_host_computes_what_the_gpu_cannot_hold(
    gpu: Planned, monkeypatch: pytest.MonkeyPatch, layers: Sequence[int]
) -> None:
    """Logits and counts are those of the program as it was planned, and those of prompts have the same bits."""
    with gpu.lacking(0, monkeypatch) as engine:
        assert (engine.moved_bytes, engine.computed_bytes) == (0, 0)
        expected = Results.of(engine)
    # The embedding and small weights move as well.
    with gpu.lacking(gpu.hot_bytes(*layers), monkeypatch) as engine:
        assert engine.computed_bytes == gpu.hot_bytes(*layers) <= engine.moved_bytes
        for function in ("decode", "batch"):
            calls = [call for call in engine.loaded.program.functions[function] if call.op == "ffn"]
            assert {call.layer for call in calls if call.device == "device"} == {0, 1} - set(layers)
            assert {call.layer for call in calls if call.device == "host"} == {0, 1}
        found = Results.of(engine)
        again = Results.of(engine)
    np.testing.assert_array_equal(found.prompt, expected.prompt)
    assert close(found.token, expected.token) and close(found.tokens, expected.tokens)
    np.testing.assert_array_equal(again.tokens, found.tokens)
    assert found.counted.keys() == expected.counted.keys()
    for key, counts in expected.counted.items():
        assert found.counted[key] == pytest.approx(counts), key
        assert 0 < counts[1] < counts[0] < SEQUENCES * NEURONS, expected.counted


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
