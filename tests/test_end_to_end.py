"""The last test of a compiler: what it made gives the numbers of the model that it was given.

Every family, and every weight format of each kind of block, against eager transformers in float32 on the same rounded
weights: prompts of 1, 2, 17 and 300 tokens, then 32 tokens one at a time, on 1, 2 and 3 threads.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.fx import GraphModule

import picompile_runtime
from helpers.families import VARIANTS, build, save
from helpers.reference import eager_logits, relative_error, round_weights
from helpers.weight_formats import ROW_FORMATS
from picompile.compile import compile_model
from picompile.compile.passes import pipeline_passes
from picompile.config import CompileOptions
from picompile.frontend.captured import Captured
from picompile.frontend.hf import load_model
from picompile_passes.base import GraphPass, Stage, stage_of
from picompile_passes.graph.materialize import materialize
from picompile_passes.pipeline import Pipeline

PROMPTS = (1, 2, 17, 300)
STEPS = 32
TOLERANCE = 1e-3
TIGHT_TOLERANCE = 1e-5
# Where weights are bytes, so are activations, and each product is off by half a percent: 1 to 4 % at the end, with
# random weights, whose logits are what is left of many terms. What a trained model loses is in docs/benchmarks.md.
BYTES_TOLERANCE = 5e-2


Capture = Callable[[str], Captured]


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """Capture each variant once for all formats."""

    @functools.cache
    def capture(name: str) -> Captured:
        save(name, build(name), folder := tmp_path_factory.mktemp(name))
        return load_model(folder)

    return capture


def _compiled_logits(artifact: Path, ids: list[int], prompt: int, threads: int) -> torch.Tensor:
    """Logits after the prompt and after each of STEPS further tokens: [STEPS + 1, vocabulary]."""
    with picompile_runtime.load(artifact, threads=threads) as engine:
        rows = [engine.prefill(ids[:prompt])]
        rows += [engine.decode(token) for token in ids[prompt : prompt + STEPS]]
    return torch.from_numpy(np.stack([row.reshape(-1) for row in rows]))


# The graph of each family is checked in f16, whose rounding hides least; the kernels of the other formats with a block
# of each kind: gated, with biases, beside attention, of two activations, and with a norm across neurons.
QUANTIZED = [
    *(("llama-relu", quant) for quant in ROW_FORMATS if quant != "f16"),
    *[
        ("opt-pre-norm", "q8"),
        ("opt-post-norm", "q4"),
        ("opt-pre-norm", "q6"),
        ("falcon-7b", "q4"),
        ("falcon-40b", "q8"),
    ],
    *[("bamboo", "q4"), ("bitnet", "q4"), ("bitnet", "q8"), ("persimmon", "q4m"), ("jais2", "q6")],
    *[("llama3-silu-tied", "q4"), ("qwen2", "q4m")],
]
# Every neuron of these is computed, and all of their matrices are whole panels.
WHOLE = ("falcon-7b", "llama3-silu-tied")


@pytest.mark.slow("compiles a model per family and format; one in f16 is fast", but=("llama-relu-f16",))
@pytest.mark.parametrize(("name", "quant"), [*((name, "f16") for name in VARIANTS), *QUANTIZED])
def test_logits_equal_eager_transformers(name: str, quant: str, captured: Capture, tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    # The cache as it comes with f16 weights; in float32 with the others.
    kv_dtype, tolerance = (None, TOLERANCE) if quant == "f16" else ("f32", BYTES_TOLERANCE)
    compile_model(captured(name), artifact, CompileOptions(quant=quant, kv_dtype=kv_dtype))
    reference = build(name)
    round_weights(reference, quant, by_outputs=name in WHOLE)
    vocabulary = reference.config.vocab_size
    ids = torch.randint(vocabulary, (max(PROMPTS) + STEPS,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = eager_logits(reference, ids)
    for prompt in PROMPTS:
        measured = {threads: _compiled_logits(artifact, ids, prompt, threads) for threads in (1, 2, 3)}
        error = relative_error(measured[1], expected[prompt - 1 : prompt + STEPS])
        assert error < tolerance, f"prompt of {prompt} tokens: {error:.2e}"
        assert torch.equal(measured[1], measured[2]), "2 threads give other bits than 1"
        assert torch.equal(measured[1], measured[3]), "3 threads give other bits than 1"
    with picompile_runtime.load(artifact, threads=2) as engine:
        scored = torch.from_numpy(np.concatenate([np.array(rows) for rows in engine.score(ids)]))
    assert relative_error(scored, expected) < tolerance


def _greedy(artifact: Path, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Tokens at temperature 0, and the share of neurons computed in each block."""
    with picompile_runtime.load(artifact, threads=2) as engine:
        logits, tokens = engine.prefill(prompt), []
        for _ in range(count):
            tokens.append(int(np.argmax(logits)))
            logits = engine.decode(tokens[-1])
        return tokens, [block.computed_share for block in engine.firing()]


@pytest.mark.slow("compiles two models per family; one family is fast", but=("llama-relu",))
@pytest.mark.parametrize("name", ["llama-relu", "prosparse", "bamboo", "opt-pre-norm", "falcon-40b", "bitnet", "jais2"])
def test_exact_gives_the_tokens_of_none_and_computes_less(name: str, captured: Capture, tmp_path: Path) -> None:
    results = {}
    for predictor in ("exact", "none"):
        artifact = tmp_path / predictor
        compile_model(captured(name), artifact, CompileOptions(quant="f16", predictor=predictor))
        results[predictor] = _greedy(artifact, [5, 17, 3], 48)
    assert results["exact"][0] == results["none"][0]
    assert all(share == 1.0 for share in results["none"][1])
    assert all(0.0 < share < 0.9 for share in results["exact"][1])


@pytest.mark.slow("compiles three models per family; test_hybrid.py has fast ones with hot neurons")
@pytest.mark.parametrize(
    ("name", "quant"),
    [("llama-relu", "f16"), ("opt-pre-norm", "q4"), ("llama3-silu-tied", "f16"), ("bitnet", "q4")],
)
def test_any_hot_set_gives_the_same_logits(name: str, quant: str, captured: Capture, tmp_path: Path) -> None:
    model = captured(name)
    neurons, generator = model.facts.ffn, torch.Generator().manual_seed(2)
    some = torch.randperm(neurons, generator=generator)[: neurons // 3].tolist()
    ids = torch.randint(model.facts.vocab, (17 + STEPS,), generator=generator).tolist()
    results = []
    for number, hot in enumerate(({}, {0: some, 1: range(neurons)}, {0: [0], 1: []})):
        artifact = tmp_path / str(number)
        compile_model(model, artifact, CompileOptions(quant=quant, hot=hot))
        results.append(_compiled_logits(artifact, ids, 17, threads=2))
    for split in results[1:]:
        # Rows keep their bits whatever part they are in; the order of the sum differs, and which eight rows of down
        # have their factors rounded together.
        assert relative_error(split, results[0]) < (1e-4 if quant == "f16" else BYTES_TOLERANCE)


@pytest.mark.slow(
    "runs every stage of a model per family; one gated and one plain are fast", but=("llama-relu", "opt-post-norm")
)
@pytest.mark.parametrize("name", ["llama-relu", "bamboo", "opt-post-norm", "falcon-40b", "qwen2"])
def test_every_stage_runs_in_eager_pytorch(name: str, captured: Capture) -> None:
    """After each pass the graph still gives the logits of transformers; f16 holds these weights exactly."""
    model = captured(name)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    expected = eager_logits(build(name), ids)
    hot = {0: range(0, model.facts.ffn, 3), 1: [7]}
    stages = []

    def run(before: GraphModule, pass_: GraphPass, after: GraphModule, seconds: float) -> None:
        with torch.no_grad():
            logits = materialize(after, model.weights)(torch.tensor(ids), torch.arange(len(ids)))
        error = relative_error(logits, expected)
        assert error < TIGHT_TOLERANCE, f"after {pass_.name}: {error:.2e}"
        stages.append(stage_of(after))

    Pipeline(tuple(pipeline_passes(CompileOptions(quant="f16", hot=hot))), run)(model.graph_module)
    assert set(stages) == set(Stage)
