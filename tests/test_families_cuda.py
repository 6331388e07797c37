"""Models of squared ReLU for a GPU: their CUDA kernels run in the emulation, step by step, against eager transformers.

The stand-in driver runs them. A third of the neurons and everything but the embedding is on the device.
"""

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

import picompile_runtime
from helpers.fake_cuda.fixtures import emulate, fake_cuda, fake_library
from helpers.families import build, save
from helpers.reference import eager_logits, relative_error, round_weights
from helpers.support import compile_for_test
from test_end_to_end import BYTES_TOLERANCE, TOLERANCE

pytestmark = pytest.mark.slow("runs whole models in the emulation; their kernels have fast tests")

__all__ = ["fake_cuda", "fake_library"]

CONTEXT, CHUNK, STEPS = 48, 16, 4
CASES = [
    *[("bitnet", "f16", "exact"), ("bitnet", "q4", "none"), ("arcee", "q4", "exact"), ("nemotron", "q8", "exact")],
    *[("nanochat", "f16", "none"), ("persimmon", "q4", "exact"), ("jais2", "q8", "exact")],
]


@pytest.mark.parametrize(("name", "quant", "predictor"), CASES)
def test_kernels_of_a_model(
    name: str, quant: str, predictor: str, fake_cuda: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = build(name)
    folder, artifact = tmp_path / "model", tmp_path / "artifact"
    save(name, reference, folder)
    neurons = reference.config.intermediate_size
    hot = {0: tuple(range(1, neurons, 3)), 1: tuple(range(0, neurons, 3))}
    options = {"quant": quant, "predictor": predictor, "hot": hot, "kv_dtype": "f32"}
    compile_for_test(folder, artifact, target="4090", context=CONTEXT, chunk=CHUNK, **options)
    emulate(artifact, monkeypatch)

    round_weights(reference, quant)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(reference.config.vocab_size, (CHUNK + 5 + STEPS,), generator=generator).tolist()
    with picompile_runtime.load(artifact, threads=1) as engine:
        rows = [engine.prefill(ids[:-STEPS]).copy()]
        rows += [engine.decode(token).copy() for token in ids[-STEPS:]]
    found = torch.from_numpy(np.stack([row.reshape(-1) for row in rows]))
    expected = eager_logits(reference, ids)[-STEPS - 1 :]
    assert relative_error(found, expected) < (TOLERANCE if quant == "f16" else BYTES_TOLERANCE)
