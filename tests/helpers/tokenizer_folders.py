"""Folders with tokenizers that are trained here, and what the runtime and transformers make of them."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from picompile.frontend.tokenizer.read import read_tokenizer
from picompile_runtime.sampling.tokenizer import Tokenizer

ROWS = 1000
LINES = (
    "Hello world, it's 1234 and 5678: don't stop at 90.",
    "for i in range(10):\n    print(i)\n",
    "Привет мир. 日本語のテキスト. naïve café",
    "the quick brown fox  jumps   over the lazy dog",
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_byte_level(
    split: Any = None, special: Iterable[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
) -> Any:
    """Return a byte-level tokenizer of the tokenizers package; `split` comes before the split into words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = words if split is None else pre_tokenizers.Sequence([split, words])
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special), initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(LINES * 9, trainer)
    return tokenizer


def save_folder(folder: Path, tokenizer: Any, /, **files: Any) -> Path:
    """Write tokenizer.json, config.json and other files, whose names are given with `__` for a dot; return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def in_artifact(folder: Path, rows: int = ROWS) -> Tokenizer:
    """Return the runtime's tokenizer, of the files that an artifact would have."""
    files = read_tokenizer(folder, rows)
    assert files.tokenizer_json is not None
    return Tokenizer(files.tokenizer_json, files.tokenizer_config)


def assert_equal_ids(ours: Tokenizer, theirs: Callable[..., Any], texts: Iterable[str]) -> None:
    """Compare with a tokenizer of transformers, with the tokens around a text and without."""
    for text in texts:
        for around in (False, True):
            assert ours.encode(text, around) == theirs(text, add_special_tokens=around)["input_ids"], text
