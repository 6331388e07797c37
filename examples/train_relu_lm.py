"""Trains small language models whose feed-forward neurons fire sparsely, from scratch: the bundled one and larger ones.

| variant | parameters | feed-forward blocks | text |
| --- | --- | --- | --- |
| `tiny-reglu` | 3.5 million, the bundled model | Llama with a ReLU gate (ReGLU) | code |
| `reglu` | 21 million | the same | code and documents |
| `opt` | 22 million | OPT: ReLU without a gate, biases, layer norms | code and documents |

The code is that of the running Python's standard library, the documents its language reference; the tokenizer is a
byte-level BPE trained on the same files. About 3 % of the files, chosen by a hash of their names, are seen by neither
and measure the result. Everything runs on a CPU: an hour on one or two cores for each.

    python examples/train_relu_lm.py --variant reglu --out build/relu-lm/reglu --steps 1500

An interrupted training goes on with the same command and `--resume`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import random
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import torch
import typer
from plot_firing import count_firings, summarize
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
)

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_PERCENT = 3

# Words take the space before them, as in GPT-2, so a run of indentation is one token and the word after it is the same
# token as in the middle of a line. Newlines stand alone: a prompt may end at one.
SPLIT = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+(?!\S)|[^\S\n]+"

# Context length in tokens from each share of the training on. Short ones first: they are cheaper, and most of what
# there is to learn is near.
CONTEXTS = ((0.0, 256), (0.5, 512), (0.8, 1024))
MAX_CONTEXT = CONTEXTS[-1][1]

CHECKPOINT_EVERY_S = 300
SAMPLE_PROMPT = 'def read_lines(path):\n    """'


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------------------- text


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


# ------------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Recipe:
    """How to train. `steps` or `minutes` ends the training, whichever comes first; zero is no bound."""

    steps: int
    minutes: float
    seed: int
    l1: float
    learning_rate: float
    tokens_per_step: int

    def command(self, variant: Variant, out: Path) -> str:
        """What to type to train like this."""
        bound = f"--steps {self.steps}" if self.steps else f"--minutes {self.minutes:g}"
        return (
            f"python examples/train_relu_lm.py --variant {variant.name} --out {out} {bound} --seed {self.seed} "
            f"--l1 {self.l1:g} --learning-rate {self.learning_rate:g} --tokens-per-step {self.tokens_per_step}"
        )

    def progress(self, step: int, elapsed_s: float) -> float:
        """The share of the training that is done, 0 to 1."""
        by_steps = step / self.steps if self.steps else 0.0
        by_time = elapsed_s / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_steps, by_time))

    def learning_rate_at(self, step: int, progress: float) -> float:
        """Linear warm-up over 300 steps, then a cosine down to 2 % of the peak."""
        warmup = min(1.0, (step + 1) / 300)
        cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * warmup * cosine

    def l1_at(self, progress: float) -> float:
        """Zero for the first tenth, then a linear rise to the full penalty at half of the training."""
        return self.l1 * min(1.0, max(0.0, (progress - 0.1) / 0.4))

    def batch_at(self, tokens: torch.Tensor, step: int, progress: float) -> torch.Tensor:
        context = [length for start, length in CONTEXTS if progress >= start][-1]
        return draw_batch(tokens, context, self.tokens_per_step // context, seed=self.seed * 1_000_003 + step)


@dataclass(frozen=True)
class Variant:
    """One model that can be trained. Sizes of its tokenizer and its shape, and whether it reads documents too."""

    name: str
    family: str
    vocabulary: int
    hidden: int
    neurons: int
    layers: int
    heads: int
    documents: bool

    def config(self, end: int, vocabulary: int) -> PretrainedConfig:
        shared = {
            "vocab_size": vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": MAX_CONTEXT,
            "tie_word_embeddings": True,
            "bos_token_id": end,
            "eos_token_id": end,
        }
        if self.family == "opt":
            return OPTConfig(
                **shared,
                ffn_dim=self.neurons,
                word_embed_proj_dim=self.hidden,
                activation_function="relu",
                dropout=0.0,
                pad_token_id=end,
            )
        return LlamaConfig(
            **shared, intermediate_size=self.neurons, num_key_value_heads=self.heads // 2, hidden_act="relu"
        )

    def texts(self, held_out: bool) -> dict[str, str]:
        """What the model reads, or what measures it, by name."""
        return read_library(held_out) | (read_documents(held_out) if self.documents else {})


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("tiny-reglu", "llama", 2048, 192, 704, 6, 6, documents=False),
        Variant("reglu", "llama", 4096, 512, 1536, 6, 8, documents=True),
        Variant("opt", "opt", 4096, 512, 2048, 6, 8, documents=True),
    )
}


def down_projections(model: PreTrainedModel) -> list[tuple[torch.nn.Linear, torch.nn.Linear]]:
    """What writes to the residual stream in each layer: the attention's output and the FFN's down projection."""
    if model.config.model_type == "opt":
        return [(layer.self_attn.out_proj, layer.fc2) for layer in model.model.decoder.layers]
    return [(layer.self_attn.o_proj, layer.mlp.down_proj) for layer in model.model.layers]


def new_model(variant: Variant, tokenizer: Tokenizer, seed: int) -> PreTrainedModel:
    """Random weights; what writes to the residual stream starts smaller in deeper models, as in GPT-2."""
    torch.manual_seed(seed)
    config = variant.config(tokenizer.token_to_id(END_OF_TEXT), tokenizer.get_vocab_size())
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for projections in down_projections(model):
        for projection in projections:
            projection.weight.data /= math.sqrt(2 * variant.layers)
    return model


def new_optimizer(model: PreTrainedModel) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only. The learning rate is set at each step."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


@contextmanager
def recorded_magnitudes(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Collects the mean magnitude of what each layer's neurons send to the down projection, in a forward pass."""
    magnitudes: list[torch.Tensor] = []

    def record(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        magnitudes.append(inputs[0].abs().mean(dtype=torch.float32))

    hooks = [down.register_forward_pre_hook(record) for _, down in down_projections(model)]
    try:
        yield magnitudes
    finally:
        for hook in hooks:
            hook.remove()


def batch_loss(model: PreTrainedModel, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cross entropy, and the mean magnitude of the neurons' outputs. `[rows, context + 1] → [], []`

    Matrix products are in bfloat16, which was 1.4 times as fast as float32 on a CPU with AVX-512 BF16.
    """
    with torch.autocast("cpu", torch.bfloat16), recorded_magnitudes(model) as magnitudes:
        logits = model(batch[:, :-1], use_cache=False).logits
    entropy = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    return entropy, torch.stack(magnitudes).mean()


def take_step(
    model: PreTrainedModel,
    optimizer: torch.optim.AdamW,
    batch: torch.Tensor,
    learning_rate: float,
    l1: float,
) -> tuple[float, float]:
    """One update. The penalty on the magnitude makes neurons fall silent: ProSparse, arXiv 2402.13516."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    entropy, magnitude = batch_loss(model, batch)
    optimizer.zero_grad()
    torch.autograd.backward(entropy + l1 * magnitude)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return entropy.item(), magnitude.item()


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def train(
    model: PreTrainedModel, tokens: torch.Tensor, held_out: torch.Tensor, recipe: Recipe, checkpoint: Path
) -> tuple[int, float]:
    """Trains to the end of the recipe, from the checkpoint where there is one. Returns all its steps and seconds."""
    optimizer = new_optimizer(model)
    step, before_s = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, before_s = state["step"], state["elapsed_s"]
        say(f"resumed at step {step}, {before_s:.0f} s")

    probe = draw_batch(held_out, 256, 32, seed=recipe.seed)
    started, saved_s = time.monotonic(), before_s
    while True:
        elapsed_s = before_s + time.monotonic() - started
        progress = recipe.progress(step, elapsed_s)
        if progress >= 1 or elapsed_s - saved_s > CHECKPOINT_EVERY_S:
            weights, moments = model.state_dict(), optimizer.state_dict()
            save_checkpoint(checkpoint, {"model": weights, "optimizer": moments, "step": step, "elapsed_s": elapsed_s})
            saved_s = elapsed_s
            with torch.no_grad():
                say(f"step {step}  held-out loss {batch_loss(model, probe)[0]:.3f}")
        if progress >= 1:
            return step, elapsed_s

        batch = recipe.batch_at(tokens, step, progress)
        learning_rate, l1 = recipe.learning_rate_at(step, progress), recipe.l1_at(progress)
        entropy, magnitude = take_step(model, optimizer, batch, learning_rate, l1)
        step += 1
        if step % 20 == 0:
            say(f"step {step}  {progress:.1%}  {elapsed_s:.0f} s  loss {entropy:.3f}  magnitude {magnitude:.4f}")


# -------------------------------------------------------------------------------------------------------------- measure


@dataclass(frozen=True)
class Score:
    """How well a model predicts some text."""

    nats: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


@torch.no_grad()
def score(model: PreTrainedModel, tokenizer: Tokenizer, texts: Iterable[str]) -> Score:
    """Each text by itself, after an end-of-text token, in full windows that overlap by half.

    A token is scored once, with at least half a window before it, except near the beginning of its text.
    """
    half = MAX_CONTEXT // 2
    nats, count, size = 0.0, 0, 0
    for text in texts:
        row = pack(tokenizer, [text])[:-1]
        for start in range(0, max(1, len(row) - 1 - half), half):
            window = row[start : start + MAX_CONTEXT + 1]
            logits = model(window[None, :-1], use_cache=False).logits[0]
            known = half if start else 0
            nats += functional.cross_entropy(logits[known:], window[known + 1 :], reduction="sum").item()
        count += len(row) - 1
        size += len(text.encode())
    return Score(nats, count, size)


@torch.no_grad()
def write_sample(model: PreTrainedModel, tokenizer: Tokenizer, prompt: str, seed: int) -> str:
    """The prompt and 160 tokens after it, at temperature 0.7, from the most probable 90 %."""
    torch.manual_seed(seed)
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=160,
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        top_k=0,
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    return str(tokenizer.decode(out[0].tolist()))


# --------------------------------------------------------------------------------------------------------------- export


def round_weights(model: PreTrainedModel) -> None:
    """Gives every weight its nearest float16 value, in place; what is measured from here on is what is saved."""
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()


def save_model(model: PreTrainedModel, tokenizer: Tokenizer, out: Path) -> None:
    """The Hugging Face folder, with float16 weights."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end)
    model.half().save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_CONTEXT,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def firing_table(firing: dict[str, Any]) -> str:
    """The figures of `plot_firing.summarize` in Markdown."""
    rows = [*firing["layers"], {"layer": "model", **firing["model"]}]
    lines = ["| layer | neurons firing per token | neurons that make 80 % of the firings | never fired |"]
    lines += ["| --- | --- | --- | --- |"]
    for row in rows:
        shares = f"{row['firing_share']:.1%} | {row['neurons_for_80_percent']:.1%}"
        lines.append(f"| {row['layer']} | {shares} | {row['never_fired']} |")
    return "\n".join(lines)


CARD = """\
---
language: [code]
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
library_name: transformers
---
# {variant.name}

A language model of {parameters:,} parameters that writes Python, {architecture}: {variant.layers} layers,
hidden size {variant.hidden}, {variant.neurons} neurons a layer, {variant.heads} heads, tied embeddings, a vocabulary of
{vocabulary}, a context of {context} tokens. Weights are float16. It was trained from scratch by
`examples/train_relu_lm.py`, with a penalty that makes its neurons fire sparsely; the sparsity is real, not simulated.
It is for tests and demonstrations, and good for nothing else.

## Data and licence

The standard library of CPython {python}, less tests, `encodings`, `pydoc_data` and generated tables{documents}: {files}
files, {megabytes:.2f} MB, {corpus_tokens:,} tokens. {held_files} more files, chosen by a hash of their names, trained
neither the model nor the tokenizer, and measure it.

Copyright © 2001 Python Software Foundation; all rights reserved. CPython is distributed under the [PSF License
Version 2](https://docs.python.org/3/license.html); so is this model, and so are excerpts of held-out files.

## Training

    {command}

{steps:,} steps of {tokens_per_step:,} tokens: {tokens_seen:,} tokens, {passes:.1f} times the text, in {minutes:.0f}
minutes of wall time, CPU threads: {threads}. AdamW, matrix products in bfloat16, master weights in float32.

## Held-out files

Measured on the rounded weights, in float32, each text by itself in windows of {context} tokens that overlap by half.

| text | bytes | tokens | perplexity per token | bits per byte |
| --- | --- | --- | --- | --- |
| all held-out files | {all.bytes:,} | {all.tokens:,} | {all.perplexity:.3f} | {all.bits_per_byte:.3f} |
| small held-out files | {part.bytes:,} | {part.tokens:,} | {part.perplexity:.3f} | {part.bits_per_byte:.3f} |

## Firing

Measured on small held-out files, in windows of {context} tokens. A neuron fires for a token when its ReLU is not
zero.

{firing}

## A sample

The first line and the quotes are the prompt; temperature 0.7, top-p 0.9, seed {seed}:

```python
{sample}
```
"""


def main(
    out: Annotated[Path, typer.Option(help="The model's folder.")],
    variant: Annotated[str, typer.Option(help=f"What to train: {', '.join(VARIANTS)}.")] = "tiny-reglu",
    steps: Annotated[int, typer.Option(help="Train for so many steps; 0 for no bound.", min=0)] = 0,
    minutes: Annotated[float, typer.Option(help="Train for so long; 0 for no bound.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the first weights and of the order of the text.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in the work folder.")] = False,
    work: Annotated[
        Path | None, typer.Option(help="Where the checkpoint is; build/train-VARIANT if not given.")
    ] = None,
    tests_data: Annotated[Path | None, typer.Option(help="Also write held-out text and prompts here.")] = None,
    l1: Annotated[float, typer.Option(help="Penalty on the mean magnitude, for sparsity.", min=0)] = 0.5,
    learning_rate: Annotated[float, typer.Option(help="At its peak.")] = 1.5e-3,
    tokens_per_step: Annotated[int, typer.Option(help="In one update.", min=MAX_CONTEXT)] = 2048,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 2,
) -> None:
    """Train a small language model that fires sparsely, on Python's standard library."""
    if variant not in VARIANTS:
        raise typer.BadParameter(f"unknown variant {variant!r}; known are {', '.join(VARIANTS)}")
    chosen = VARIANTS[variant]
    work = work or Path("build") / f"train-{variant}"
    if not steps and not minutes:
        raise typer.BadParameter("say how long to train, with --steps or --minutes")
    torch.set_num_threads(threads)
    recipe = Recipe(steps, minutes, seed, l1, learning_rate, tokens_per_step)
    checkpoint, tokenizer_file = work / "checkpoint.pt", work / "tokenizer.json"
    work.mkdir(parents=True, exist_ok=True)
    if not resume:
        checkpoint.unlink(missing_ok=True)
        tokenizer_file.unlink(missing_ok=True)

    texts, held_texts = chosen.texts(held_out=False), chosen.texts(held_out=True)
    if not tokenizer_file.exists():
        say("training the tokenizer")
        train_tokenizer(texts.values(), chosen.vocabulary).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokens = pack(tokenizer, texts.values())
    model = new_model(chosen, tokenizer, seed)
    say(f"{len(texts)} files, {len(tokens):,} tokens; {model.num_parameters():,} parameters")
    done, elapsed_s = train(model, tokens, pack(tokenizer, held_texts.values()), recipe, checkpoint)

    say("measuring")
    model.eval()
    round_weights(model)
    excerpt = small_files(held_texts, limit=64_000)
    excerpt_tokens = torch.tensor(tokenizer.encode(excerpt).ids)
    result, result_of_excerpt = score(model, tokenizer, held_texts.values()), score(model, tokenizer, [excerpt])
    firing = summarize(count_firings(model, excerpt_tokens, MAX_CONTEXT), len(excerpt_tokens))
    sample = write_sample(model, tokenizer, SAMPLE_PROMPT, seed)
    card = CARD.format(
        variant=chosen,
        architecture="an OPT with ReLU" if chosen.family == "opt" else "a Llama with a ReLU gate (ReGLU)",
        documents=", and the language reference it carries" if chosen.documents else "",
        parameters=model.num_parameters(),
        vocabulary=tokenizer.get_vocab_size(),
        context=MAX_CONTEXT,
        python=platform.python_version(),
        files=len(texts),
        megabytes=sum(len(text.encode()) for text in texts.values()) / 1e6,
        corpus_tokens=len(tokens),
        held_files=len(held_texts),
        command=recipe.command(chosen, out),
        steps=done,
        tokens_per_step=tokens_per_step,
        tokens_seen=done * tokens_per_step,
        passes=done * tokens_per_step / len(tokens),
        minutes=elapsed_s / 60,
        threads=threads,
        all=result,
        part=result_of_excerpt,
        firing=firing_table(firing),
        seed=seed,
        sample=sample.rstrip(),
    )
    save_model(model, tokenizer, out)
    (out / "README.md").write_text(card, "utf-8")
    if tests_data:
        tests_data.mkdir(parents=True, exist_ok=True)
        (tests_data / "heldout.txt").write_text(excerpt, "utf-8")
        prompts = cut_prompts(held_texts, count=20, seed=0)
        (tests_data / "heldout_prompts.json").write_text(json.dumps(prompts, indent=2) + "\n", "utf-8")
    print(f"held-out perplexity {result.perplexity:.3f}, {result.bits_per_byte:.3f} bits per byte\n\n{sample}")


if __name__ == "__main__":
    typer.run(main)
