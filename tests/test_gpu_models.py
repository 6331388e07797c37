"""Models on a GPU, several sequences and long ones, in the emulation.

The sides of neurons, and of the KV cache of a layer, are as plans have them.
"""

import ctypes
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import picompile_runtime
from helpers.fake_cuda.fixtures import emulate, fake_cuda, fake_library
from helpers.families import build, save
from helpers.reference import eager_logits, relative_error, round_weights
from helpers.support import compile_for_test
from picompile.compile import lower as compile_lower
from picompile_codegen.lowering.placement import Placement
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
        given: dict[str, object] = {"quant": "f16", "kv_dtype": "f32", "accuracy_bound": None, "chunk": 16, **options}
        given |= {} if target == "cpu" else {"hot": HOT}
        if options["predictor"] != "exact":
            given |= {"calibration": (held_out,), "check_tokens": 40}
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
