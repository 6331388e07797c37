"""Trains small language models whose feed-forward neurons fire sparsely, from scratch: the bundled one and larger ones.

| variant | parameters | feed-forward blocks | text |
| --- | --- | --- | --- |
| `tiny-reglu` | 3.5 million, the bundled model | Llama with a ReLU gate (ReGLU) | code |
| `tiny-moe` | 4 million | Mixtral: 8 experts with ReLU gates, 2 of them for a token | code |
| `reglu` | 21 million | the same | code and documents |
| `opt` | 22 million | OPT: ReLU without a gate, biases, layer norms | code and documents |

The code is that of the running Python's standard library, the documents its language reference; the tokenizer is a
byte-level BPE trained on the same files. About 3 % of the files, chosen by a hash of their names, are seen by neither
and measure the result. Everything runs on a CPU: an hour on one or two cores for each.

    python examples/train_relu_lm.py --variant reglu --out build/relu-lm/reglu --steps 1500

An interrupted training goes on with the same command and `--resume`.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Annotated

import torch
import typer
from plot_firing import count_firings, summarize
from relu_lm.folder import CARD, firing_table, round_weights, save_model
from relu_lm.measure import score, write_sample
from relu_lm.texts import cut_prompts, pack, small_files, train_tokenizer
from relu_lm.training import Recipe, say, train
from relu_lm.variants import MAX_CONTEXT, VARIANTS, new_model
from tokenizers import Tokenizer

SAMPLE_PROMPT = 'def read_lines(path):\n    """'


def main(
    out: Annotated[Path, typer.Option(help="The model's folder.")],
    variant: Annotated[str, typer.Option(help=f"What to train: {', '.join(VARIANTS)}.")] = "tiny-reglu",
    steps: Annotated[int, typer.Option(help="Train for so many steps; 0 for no bound.", min=0)] = 0,
    minutes: Annotated[float, typer.Option(help="Train for so long; 0 for no bound.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the first weights and of the order of the text.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in the work folder.")] = False,
    work: Annotated[
        Path | None, typer.Option(help="Where the checkpoint is; build/train-VARIANT if not given.")
    ] = None,
    tests_data: Annotated[Path | None, typer.Option(help="Also write held-out text and prompts here.")] = None,
    l1: Annotated[float, typer.Option(help="Penalty on the mean magnitude, for sparsity.", min=0)] = 0.5,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1.5e-3,
    tokens_per_step: Annotated[int, typer.Option(help="Tokens in one update.", min=MAX_CONTEXT)] = 2048,
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
        architecture=chosen.architecture,
        block="an expert" if chosen.experts else "a layer",
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
        firing=firing_table(firing, chosen.chosen),
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
