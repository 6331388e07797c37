"""The trained mixture: real routing, real sparsity inside the experts, and the tokens of eager transformers."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import picompile_runtime
from helpers.hybrid import greedy
from helpers.reference import round_weights
from helpers.support import ROOT, TRAINED_MIXTURE, BuildOnce, compile_for_test
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.run import profile_model

DATA = ROOT / "tests" / "data"
PROMPTS: list[str] = json.loads((DATA / "heldout_prompts.json").read_text(encoding="utf-8"))
TOKENS = 32


@pytest.fixture(scope="module", params=["none", "exact"])
def artifact(request: pytest.FixtureRequest, build_once: BuildOnce) -> Path:
    def build(folder: Path) -> None:
        compile_for_test(TRAINED_MIXTURE, folder, quant="f16", predictor=request.param)

    return build_once(f"mixture-f16-{request.param}", build)


def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TRAINED_MIXTURE / "tokenizer.json"))


def _text() -> list[int]:
    ids: list[int] = _tokenizer().encode((DATA / "heldout.txt").read_text(encoding="utf-8")).ids
    return ids


@pytest.mark.slow("compares 320 tokens with eager transformers, for two artifacts")
def test_greedy_tokens_equal_eager_transformers(artifact: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TRAINED_MIXTURE, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    round_weights(model, "f16")
    with picompile_runtime.load(artifact, threads=2) as engine:
        for prompt in (_tokenizer().encode(text).ids for text in PROMPTS[:10]):
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0, len(prompt) :]
            assert greedy(engine, prompt, TOKENS)[0] == expected.tolist()


@pytest.mark.slow("reads 2,048 tokens with two artifacts")
def test_it_has_learned(artifact: Path) -> None:
    """Far below the perplexity of guessing, 2048."""
    with picompile_runtime.load(artifact, threads=2) as engine:
        assert picompile_runtime.perplexity(engine, _text()[:2048]).perplexity < 40


def test_experts_are_chosen_unevenly_and_most_of_its_neurons_are_silent(tmp_path: Path) -> None:
    """Experts are chosen unevenly, as those of a random router are not, and one is dead; of 8, a token chooses 2."""
    options = ProfileOptions((DATA / "heldout.txt",), window=256, tokens=2048)
    profile = profile_model(TRAINED_MIXTURE, tmp_path / "profile", options)
    for layer in profile.layers:
        chosen = profile.chosen(layer.layer)
        assert int(chosen.sum()) == 2 * profile.tokens
        assert layer.experts == 8
    assert [layer.never_chosen for layer in profile.layers] == [0, 0, 0, 1]
    busiest = max(int(profile.chosen(layer.layer).max()) for layer in profile.layers)
    assert busiest > 1.3 * profile.tokens / 4
    # `firing_share` counts neurons of experts that were not chosen as silent.
    assert sum(layer.firing_share for layer in profile.layers) / len(profile.layers) * 4 < 0.35
