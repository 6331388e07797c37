"""The texts of the models: the standard library and its documents, a part of them held out."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_PERCENT = 3

# Words take the space before them, as in GPT-2, so a run of indentation is one token and the word after it is the same
# token as in the middle of a line. Newlines stand alone: a prompt may end at one.
SPLIT = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?!\S)|[^\S\n]+"


def library_files() -> list[Path]:
    """The standard library's modules, relative to its folder, less tests and generated tables."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped_folders = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    skipped_files = {"html/entities.py", "locale.py"}
    files = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        generated = name.as_posix() in skipped_files or name.name.startswith("_sysconfigdata")
        if not generated and skipped_folders.isdisjoint(name.parts):
            files.append(name)
    return sorted(files)


def is_held_out(name: Path) -> bool:
    """Whether a file is kept from training, by its name alone: the same for every machine and Python version."""
    digest = hashlib.sha256(name.as_posix().encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def read_documents(held_out: bool) -> dict[str, str]:
    """The topics of the language reference that the standard library carries: those held out, or the others."""
    found = {f"topics/{name}": text for name, text in topics.items() if text.strip()}
    return {name: text for name, text in found.items() if is_held_out(Path(name)) == held_out}


def read_library(held_out: bool) -> dict[str, str]:
    """The texts of the held-out files, or of the others, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    names = [name for name in library_files() if is_held_out(name) == held_out]
    texts = {name.as_posix(): (root / name).read_bytes().decode("utf-8", errors="replace") for name in names}
    return {name: text for name, text in texts.items() if text.strip()}


def small_files(texts: dict[str, str], limit: int) -> str:
    """Whole files, one after the other, from those of a thousand characters upwards until `limit` is reached."""
    chosen = ""
    for text in sorted(texts.values(), key=len):
        if len(text) >= 1000 and len(chosen) + len(text) <= limit:
            chosen += text
    return chosen


def cut_prompts(texts: dict[str, str], count: int, seed: int) -> list[str]:
    """Runs of whole lines, 80 to 300 characters each, from anywhere in the texts, each line with the same chance."""
    draw = random.Random(seed)
    places = [(name, line) for name, text in sorted(texts.items()) for line in range(text.count("\n"))]
    prompts: list[str] = []
    while len(prompts) < count:
        name, first = draw.choice(places)
        target, prompt = draw.randint(80, 250), ""
        for line in texts[name].splitlines(keepends=True)[first:]:
            prompt += line
            if len(prompt) > target:
                break
        prompt = prompt.rstrip()
        if 80 <= len(prompt) <= 300 and prompt not in prompts and not prompt.startswith("\n"):
            prompts.append(prompt)
    return prompts


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE: any text round-trips, and no token is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pack(tokenizer: Tokenizer, texts: Iterable[str]) -> torch.Tensor:
    """All texts in one row of token ids, an end-of-text token before each and after the last. `[tokens]`"""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = [token for encoding in tokenizer.encode_batch(list(texts)) for token in (end, *encoding.ids)]
    return torch.tensor([*ids, end])


def draw_batch(tokens: torch.Tensor, context: int, rows: int, seed: int) -> torch.Tensor:
    """Random windows of the packed text; a function of the seed alone, so a resumed training goes on as it would have.

    Returns `[rows, context + 1]`: the inputs and, one further, the targets.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - context, (rows, 1), generator=generator)
    return tokens[starts + torch.arange(context + 1)]
