"""Measurements of a trained model on text that it has not seen."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import PreTrainedModel

from relu_lm.texts import END_OF_TEXT, pack
from relu_lm.variants import MAX_CONTEXT


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
