"""Measure what it costs to leave out heads of attention that contribute little, if one knew them beforehand.

    python benchmarks/idle_heads.py models/tiny-reglu
    python benchmarks/idle_heads.py SmolLM2-135M-Instruct.Q4_1.gguf --tokens 3072

An oracle: for each token and layer, the heads whose output times the projection behind attention is shortest are left
out, as many of each token. No predictor can choose better by this measure. MODEL is a Llama as transformers reads it.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from picompile.streaming import negative_log_likelihood

_TEXT = Path(__file__).parent.parent / "tests" / "data" / "heldout.txt"
_WINDOW = 512


class Oracle:
    """Leaves out the `count` heads of each token that contribute least, before a projection reads them."""

    def __init__(self, heads: int) -> None:
        self.heads, self.count = heads, 0

    def __call__(self, projection: nn.Linear, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self.count == 0:
            return None
        outputs = inputs[0].unflatten(-1, (self.heads, -1))
        by_head = projection.weight.unflatten(1, (self.heads, -1))
        contributions = torch.einsum("bthd,nhd->bthn", outputs, by_head).norm(dim=-1)
        least = contributions.topk(self.count, dim=-1, largest=False).indices
        kept = torch.ones_like(contributions).scatter_(-1, least, 0.0)
        return ((outputs * kept.unsqueeze(-1)).flatten(-2),)


def perplexity(model: Any, windows: list[Tensor]) -> float:
    total = tokens = 0.0
    with torch.no_grad():
        for window in windows:
            logits = model(window[None]).logits[0, :-1]
            total += negative_log_likelihood(logits, window[1:])
            tokens += len(window) - 1
    return math.exp(total / tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, default=_TEXT)
    parser.add_argument("--tokens", type=int, default=3072)
    given = parser.parse_args()
    if not given.model.exists() or not given.text.exists() or given.tokens < 2:
        parser.error("MODEL and --text must exist, and --tokens be 2 or more")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    is_file = given.model.suffix == ".gguf"
    folder, source = (given.model.parent, {"gguf_file": given.model.name}) if is_file else (given.model, {})
    tokenizer = AutoTokenizer.from_pretrained(folder, **source)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source).eval()
    ids = torch.tensor(tokenizer(given.text.read_text())["input_ids"][: given.tokens])
    windows = [window for window in ids.split(_WINDOW) if len(window) > 1]
    oracle = Oracle(model.config.num_attention_heads)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(oracle)
    whole = perplexity(model, windows)
    print(f"{given.model}, {len(ids)} tokens: perplexity {whole:.4f} with all {oracle.heads} heads of a layer")
    for count in range(1, oracle.heads // 2 + 1):
        oracle.count = count
        found = perplexity(model, windows)
        print(f"{oracle.count} of {oracle.heads} heads left out: {100 * (found / whole - 1):+.2f} %", flush=True)


if __name__ == "__main__":
    main()
