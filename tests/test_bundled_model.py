"""The bundled model: real training, real sparsity, and the tokens of eager transformers, one by one."""

import json
from pathlib import Path

import pytest
import torch

import picompile_runtime
from helpers.hybrid import greedy
from helpers.reference import round_weights
from helpers.support import BUNDLED_MODEL, BuildOnce, compile_for_test

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


def test_greedy_tokens_equal_eager_transformers(artifact: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    round_weights(model, "f16")
    assert len(PROMPTS) == 20
    with picompile_runtime.load(artifact, threads=2) as engine:
        for prompt in _prompts():
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0, len(prompt) :]
            assert greedy(engine, prompt, TOKENS)[0] == expected.tolist()


def test_the_bundled_model_has_learned_and_is_sparse(artifact: Path) -> None:
    """Far below the perplexity of guessing (its vocabulary, 2048), with most neurons silent."""
    from tokenizers import Tokenizer

    text = (Path(__file__).parent / "data" / "heldout.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json")).encode(text).ids
    with picompile_runtime.load(artifact, threads=2) as engine:
        result = picompile_runtime.perplexity(engine, ids[:4096])
        greedy(engine, ids[:100], TOKENS)
        shares = [block.fired_share for block in engine.firing()]
    assert result.perplexity < 30
    assert 0.0 < sum(shares) / len(shares) < 0.35
