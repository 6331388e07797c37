"""Helpers for tests of several folders besides fixtures. They are in no conftest, since several have that name."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from picompile.machine.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
BUNDLED_MODEL = ROOT / "models" / "tiny-reglu"
TRAINED_MIXTURE = ROOT / "models" / "tiny-moe"

# What property tests draw: see conftest.py.
HYPOTHESIS_PROFILE = os.environ.get("PICOMPILE_HYPOTHESIS", "ci")

# The targets, before a fixture leaves out of their code what is not used here.
ALL_TARGETS = dict(TARGETS)
CPU_TARGET = ALL_TARGETS["cpu"]

BuildOnce = Callable[[str, Callable[[Path], None]], Path]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


Cli = Callable[..., Ended]


def save_byte_tokenizer(folder: Path, vocabulary: int) -> None:
    """A tokenizer with a token for every byte, `<s>` 256 before a text, `</s>` 257, and made-up words after that."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġword{number}" for number in range(258, vocabulary)]
    tokens = [*letters, "<s>", "</s>", *words]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.save(str(folder / "tokenizer.json"))


def save_tiny_llama(folder: Path, **changes: object) -> None:
    """A Hugging Face folder: a ReGLU model of odd sizes with random weights, float32, and a tokenizer of bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {
        "vocab_size": 300,
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "relu",
        "max_position_embeddings": 256,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**fields, **changes}))
    model.save_pretrained(folder)
    save_byte_tokenizer(folder, vocabulary=300)


def compile_for_test(model: Path, artifact: Path, **options: object) -> None:
    from picompile.compile import compile_model
    from picompile.config import CompileOptions

    compile_model(model, artifact, CompileOptions(**options))  # type: ignore[arg-type]
