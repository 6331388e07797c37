"""The text that both models read: Python's standard library, and what the original writes itself; parts held out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from relu_lm.training import say
from torch import Tensor

from picompile.errors import UsageError
from picompile.frontend.tokenizer.read import read_tokenizer
from picompile.predictors.profile.files import read_tensors, write_tensors
from picompile.predictors.profile.prepare import own_windows
from picompile.predictors.profile.windows import cut_windows, library_tokens
from picompile.progress import NoProgress
from picompile_runtime import Tokenizer

# Every eighth window that is read is the model's own text, every eighth of which is held out.
OWN_EVERY = 8

# A chat model is asked these, in turn; it answers otherwise each time.
QUESTIONS = (
    "What is the capital of Italy?",
    "Write a short story about a lighthouse.",
    "How does a bicycle stay upright?",
    "Give me a recipe for pancakes.",
    "Explain recursion to a child.",
    "What is 17 plus 25?",
    "Write a Python function that reverses a string.",
    "Who was Marie Curie?",
    "Translate 'thank you' into French.",
    "List four animals that live in the sea.",
    "How can I learn to play the guitar?",
    "What causes the seasons?",
    "Write a poem about rain.",
    "Describe a day in the life of a baker.",
    "What is the difference between a list and a tuple in Python?",
    "Why do leaves change their colour?",
)


@dataclass(frozen=True)
class Texts:
    """Windows of token ids, int64 [windows, window]. `probes` are held out, by name; `own` may be empty."""

    library: Tensor
    own: Tensor
    probes: Mapping[str, Tensor]
    seed: int

    def batch(self, step: int, rows: int) -> Tensor:
        """The windows of a step, a function of the step alone: a resumed training reads on as it would have.

        Returns `[rows, window]`. Each text is read once in a random order, then again in another.
        """
        return torch.stack([self._window(step * rows + row) for row in range(rows)])

    def _window(self, number: int) -> Tensor:
        if len(self.own) and number % OWN_EVERY == OWN_EVERY - 1:
            return _shuffled(self.own, number // OWN_EVERY, self.seed)
        before = number // OWN_EVERY if len(self.own) else 0
        return _shuffled(self.library, number - before, self.seed)


def _shuffled(windows: Tensor, number: int, seed: int) -> Tensor:
    again, place = divmod(number, len(windows))
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed * 1_000_003 + again))
    return windows[order[place]]


@dataclass(frozen=True)
class TextOptions:
    """How much text there is: the most `tokens` of the library, `own` ones of the model, `probe` ones held out."""

    window: int
    tokens: int
    own: int
    probe: int
    seed: int


def open_tokenizer(model: Path, vocabulary: int) -> Tokenizer:
    """The tokenizer of a checkpoint, with its chat template."""
    files = read_tokenizer(model, vocabulary)
    if files.tokenizer_json is None:
        raise UsageError(f"{model}: has no tokenizer.json, which is needed to read text; add the model's own")
    return Tokenizer(files.tokenizer_json, files.tokenizer_config)


def read_texts(model: Path, tokenizer: Tokenizer, options: TextOptions, work: Path) -> Texts:
    """Read the library, and have the original write text of its own, which is kept in the work folder."""
    library = cut_windows(_library(tokenizer, options), options.window).long()
    held_out, _ = library_tokens(tokenizer, options.probe, options.seed, held_out=True)
    probes = {"library": cut_windows(held_out, options.window).long()}
    if not len(library) or not len(probes["library"]):
        raise UsageError(f"a text of {options.tokens} tokens, {options.probe} held out, has no window; give more")
    own = _own(model, tokenizer, options, library, work).long()
    kept = -(-len(own) // OWN_EVERY)
    if kept:
        probes["own"] = own[:kept]
    return Texts(library, own[kept:], probes, options.seed)


def _library(tokenizer: Tokenizer, options: TextOptions) -> list[int]:
    """An excerpt of each file, and further excerpts until there are enough tokens."""
    tokens: list[int] = []
    seed = options.seed
    while len(tokens) < options.tokens:
        tokens += library_tokens(tokenizer, options.tokens - len(tokens), seed, held_out=False)[0]
        seed += 1
    return tokens


def _own(model: Path, tokenizer: Tokenizer, options: TextOptions, library: Tensor, work: Path) -> Tensor:
    path, named = work / "own.safetensors", {"options": f"{options.own} {options.window} {options.seed}"}
    if path.exists():
        tensors, found = read_tensors(path)
        if found.get("options") == named["options"]:
            return tensors["own"]
    windows = cut_windows([], options.window)
    if options.own:
        if tokenizer.has_chat_template:
            starts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
        else:
            starts = [row[:8].tolist() for row in library]
        starts = [start[: options.window // 2] for start in starts]
        say(f"the original writes {options.own:,} tokens")
        with _threads_of_torch():
            windows = own_windows(model, options.own, options.window, starts, options.seed, NoProgress())
    write_tensors(path, {"own": windows}, named)
    return windows


@contextmanager
def _threads_of_torch() -> Iterator[None]:
    """Have compiled models run on as many threads as torch does, whatever the machine has."""
    before = os.environ.get("PICOMPILE_THREADS")
    os.environ["PICOMPILE_THREADS"] = str(torch.get_num_threads())
    try:
        yield
    finally:
        del os.environ["PICOMPILE_THREADS"]
        if before is not None:
            os.environ["PICOMPILE_THREADS"] = before
