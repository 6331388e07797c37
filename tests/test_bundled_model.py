"""The bundled model: real training, real sparsity, and the tokens of eager transformers, one by one."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import picompile_runtime
from helpers.reference import round_weights
from helpers.support import BUNDLED_MODEL, BuildOnce, compile_for_test
from picompile_runtime import Engine

PROMPTS: list[str] = json.loads((Path(__file__).parent / "data" / "heldout_prompts.json").read_text(encoding="utf-8"))
TOKENS = 64

pytestmark = pytest.mark.slow("compares 1,280 tokens with eager transformers; test_end_to_end.py has fast models")


@pytest.fixture(scope="module")
def artifact(build_once: BuildOnce) -> Path:
    return build_once("bundled-f16", lambda folder: compile_for_test(BUNDLED_MODEL, folder, quant="f16"))


def _prompts() -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


def _greedy(engine: Engine, prompt: list[int]) -> list[int]:
    engine.reset()
    tokens = [int(np.argmax(engine.prefill(prompt)))]
    while len(tokens) < TOKENS:
        tokens.append(int(np.argmax(engine.decode(tokens[-1]))))
    return tokens


@torch.no_grad()
def _eager(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """Transformers in float32, greedy, past the end-of-text token too."""
    result = model(input_ids=torch.tensor([prompt]), use_cache=True)
    tokens = [int(result.logits[0, -1].argmax())]
    while len(tokens) < TOKENS:
        step = torch.tensor([[tokens[-1]]])
        result = model(input_ids=step, past_key_values=result.past_key_values, use_cache=True)
        tokens.append(int(result.logits[0, -1].argmax()))
    return tokens


def test_greedy_tokens_equal_eager_transformers(artifact: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()
    round_weights(model, "f16")
    assert len(PROMPTS) == 20
    with picompile_runtime.load(artifact, threads=2) as engine:
        for prompt in _prompts():
            assert _greedy(engine, prompt) == _eager(model, prompt)


def test_the_bundled_model_has_learned_and_is_sparse(artifact: Path) -> None:
    """Far below the perplexity of guessing (its vocabulary, 2048), with most neurons silent."""
    from tokenizers import Tokenizer

    text = (Path(__file__).parent / "data" / "heldout.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json")).encode(text).ids
    with picompile_runtime.load(artifact, threads=2) as engine:
        result = picompile_runtime.perplexity(engine, ids[:4096])
        _greedy(engine, ids[:100])
        shares = [block.fired_share for block in engine.firing()]
    assert result.perplexity < 30
    assert 0.0 < sum(shares) / len(shares) < 0.35
