"""The Hugging Face folder of a trained model, and its card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedModel

from relu_lm.texts import END_OF_TEXT
from relu_lm.variants import MAX_CONTEXT


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


def firing_table(firing: dict[str, Any], chosen: int) -> str:
    """The figures of `plot_firing.summarize` in Markdown.

    Of a mixture, each token counts for every one of the `chosen` experts, and a neuron is one place in all of them:
    only the share that fires says something of such figures. `chosen` is 0 without experts.
    """
    rows = [*firing["layers"], {"layer": "model", **firing["model"]}]
    if chosen:
        lines = ["| layer | neurons of the chosen experts that fire |", "| --- | --- |"]
        return "\n".join([*lines, *(f"| {row['layer']} | {row['firing_share'] / chosen:.1%} |" for row in rows)])
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
hidden size {variant.hidden}, {variant.neurons} neurons {block}, {variant.heads} heads, tied embeddings, a vocabulary of
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
