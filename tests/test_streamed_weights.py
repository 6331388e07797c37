"""Prompts on a GPU to which weights of the host come slice by slice, in the emulation, with copies early and late.

Where the host has the KV cache of a layer, it lends it. Stages are made so small that each matrix has several slices.
The stand-in driver runs the nodes of a graph in orders that its edges allow: a copy as early as it can be, as late as
it can be, and at random.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import picompile_runtime
from helpers.fake_cuda.fixtures import fake_cuda, fake_library
from helpers.families import build, save
from helpers.kernels.emulator import Emulated
from helpers.reference import eager_logits, relative_error, round_weights
from helpers.support import compile_for_test
from picompile.compile import lower as compile_lower
from picompile_codegen.lowering import slices
from picompile_codegen.lowering.placement import ON_HOST, Placement
from picompile_runtime.artifact.reader import open_artifact
from picompile_runtime.devices.cuda import CudaAccelerator, graph
from picompile_runtime.devices.cuda import open as open_gpu
from picompile_runtime.devices.cuda.graph import BoundCopy
from test_end_to_end import BYTES_TOLERANCE, TOLERANCE

pytestmark = pytest.mark.slow("runs whole models in the emulation; kernels and the driver have fast tests")

__all__ = ["fake_cuda", "fake_library"]

CONTEXT, CHUNK = 48, 16
IDS = 2 * CHUNK + 5
BUFFER_BYTES = 1021
EARLY, LATE, AT_RANDOM = "1", "2", "0"


@dataclass(frozen=True)
class Case:
    """A model, and which layers' attention and caches the GPU has; None for all of them."""

    family: str
    quant: str
    predictor: str
    placement: Placement | None = None
    kv_dtype: str = "f32"


# A gate that lies apart, squares of neurons beside their sum, and biases without a gate.
CASES = {
    "llama-relu": Case("llama-relu", "f16", "exact"),
    "opt-post-norm": Case("opt-post-norm", "q8", "none"),
    # Nothing but hot neurons; the caches of the host; projections of one layer and the cache of the other.
    "llama-neurons": Case("llama-relu", "q4", "exact", ON_HOST, "q8"),
    "bitnet-caches": Case("bitnet", "q4", "none", Placement(frozenset({0, 1})), "f16"),
    "opt-crosswise": Case("opt-post-norm", "f16", "none", Placement(frozenset({1}), frozenset({0}), head=True)),
}


@dataclass(frozen=True)
class Streamed:
    """An artifact, its kernels in emulation, the prompt's tokens, and what eager PyTorch makes of them."""

    artifact: Path
    kernels: Path
    ids: Sequence[int]
    expected: torch.Tensor
    tolerance: float

    def logits(self) -> NDArray[np.float32]:
        """Return those of the prompt's last token, which three chunks lead to."""
        with picompile_runtime.load(self.artifact, threads=1) as engine:
            return engine.prefill(self.ids).copy()


def make(name: str, folder: Path) -> Streamed:
    case = CASES[name]
    reference = build(case.family)
    save(case.family, reference, folder / "model")
    config = reference.config
    neurons = getattr(config, "intermediate_size", None) or config.ffn_dim
    hot = {0: tuple(range(1, neurons, 9)), 1: tuple(range(0, neurons, 5))}
    options = {"quant": case.quant, "predictor": case.predictor, "hot": hot, "kv_dtype": case.kv_dtype}
    with pytest.MonkeyPatch.context() as patch:
        if case.placement is not None:
            patch.setattr(compile_lower, "_placement", lambda plan, layers: case.placement)
        compile_for_test(folder / "model", folder / "artifact", target="4090", context=CONTEXT, chunk=CHUNK, **options)
    Emulated((folder / "artifact" / "kernels" / "device.cu").read_text(), folder / "kernels.so")
    round_weights(reference, case.quant)
    ids = torch.randint(config.vocab_size, (IDS,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = eager_logits(reference, ids)[-1:]
    is_exact = case.quant == "f16" and case.kv_dtype == "f32"
    return Streamed(
        folder / "artifact", folder / "kernels.so", ids, expected, TOLERANCE if is_exact else BYTES_TOLERANCE
    )


@pytest.fixture(scope="module", params=CASES)
def streamed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streamed]:
    with pytest.MonkeyPatch.context() as patch:
        # Less than 64 neurons take: slices have as many all the same.
        patch.setattr(slices, "STAGING_BYTES", 1)
        yield make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def gpu(streamed: Streamed, fake_cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Streamed:
    monkeypatch.setenv("FAKE_CUDA_KERNELS", str(streamed.kernels))
    return streamed


def test_slices_are_copied_once_for_a_chunk(streamed: Streamed) -> None:
    """Each block has several, which together are its weights."""
    artifact = open_artifact(streamed.artifact)
    calls = artifact.program.calls("prefill_last", "accelerator")
    uploads = [call for call in calls if call.op == "upload"]
    assert len(uploads) >= 3 * 2
    sources, targets = zip(*[call.args[-2:] for call in uploads], strict=True)
    spans = sorted((each.name, each.view.offset, each.view.size_bytes) for each in sources)
    for name in artifact.program.streamed:
        parts = [(offset, size) for each, offset, size in spans if each == name]
        ends = np.cumsum([size for _, size in parts])
        assert [offset for offset, _ in parts] == [0, *ends[:-1]]
        assert ends[-1] == artifact.tensors[name].size_bytes
    # Stages take turns.
    stages = [stage.name for stage in targets if stage.view.offset == 0]
    assert all({first, second} == {"staging.0", "staging.1"} for first, second in pairwise(stages))


def deliver(monkeypatch: pytest.MonkeyPatch, copies: str) -> None:
    """Let copies come as early or as late as they can, or at random."""
    monkeypatch.setenv("FAKE_CUDA_COPIES", copies)
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "200" if copies == AT_RANDOM else "0")


def test_whenever_copies_arrive_the_logits_have_the_same_bits(gpu: Streamed, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the graphs of stamped steps copies are in order with launches."""
    found = []
    for copies in (EARLY, LATE, AT_RANDOM):
        deliver(monkeypatch, copies)
        found.append(gpu.logits())
    assert relative_error(torch.from_numpy(found[0].reshape(1, -1)), gpu.expected) < gpu.tolerance
    with picompile_runtime.load(gpu.artifact, threads=1) as engine:
        engine.start_timing(slowly=True)
        found.append(engine.prefill(gpu.ids))
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])


def test_weights_that_cannot_be_pinned_give_the_same_bits(
    gpu: Streamed, monkeypatch: pytest.MonkeyPatch, fake_cuda: ctypes.CDLL
) -> None:
    """They come through buffers that are no divisor of any slice."""
    expected = gpu.logits()
    assert fake_cuda.fake_count(b"cuLaunchHostFunc") == 0
    monkeypatch.setenv("FAKE_CUDA_NO_PINNING", "801")
    monkeypatch.setattr(open_gpu, "CudaAccelerator", partial(CudaAccelerator, staging_bytes=BUFFER_BYTES))
    for copies in (EARLY, LATE, AT_RANDOM):
        deliver(monkeypatch, copies)
        with picompile_runtime.load(gpu.artifact, threads=1) as engine:
            assert engine.unpinned_bytes > 0
            np.testing.assert_array_equal(engine.prefill(gpu.ids), expected)
            engine.reset()
            engine.start_timing(slowly=True)
            np.testing.assert_array_equal(engine.prefill(gpu.ids), expected)
    uploads = [
        call for call in open_artifact(gpu.artifact).program.calls("prefill_last", "accelerator") if call.op == "upload"
    ]
    sizes = [call.args[-1].view.size_bytes for call in uploads]
    assert max(sizes) > 2 * BUFFER_BYTES and all(size % BUFFER_BYTES for size in sizes)


def test_a_missing_wait_or_copy_is_found(gpu: Streamed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that does not wait for a copy reads too early, a copy that does not wait for a launch writes early."""
    expected, seen, enqueue = gpu.logits(), [0], graph._enqueue
    for copies, wait in ((LATE, "_await"), (EARLY, "_last_user")):
        with monkeypatch.context() as patch:
            patch.setenv("FAKE_CUDA_COPIES", copies)
            np.testing.assert_array_equal(gpu.logits(), expected)
            patch.setattr(graph._Fork, wait, lambda *_: None)
            assert not np.array_equal(gpu.logits(), expected), wait

    def all_but_the_third(driver: object, node: object, *rest: object) -> None:
        seen[0] += isinstance(node, BoundCopy)
        if not isinstance(node, BoundCopy) or seen[0] != 3:
            enqueue(driver, node, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(graph, "_enqueue", all_but_the_third)
    assert not np.array_equal(gpu.logits(), expected)
