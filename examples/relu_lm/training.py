"""Training: AdamW with a penalty on what the neurons say, resumable from a checkpoint."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from relu_lm.texts import draw_batch
from relu_lm.variants import MAX_CONTEXT, Variant, observe_neurons

# Context length in tokens from each share of the training on. Short ones first: they are cheaper, and most of what
# there is to learn is near.
CONTEXTS = ((0.0, 256), (0.5, 512), (0.8, MAX_CONTEXT))

CHECKPOINT_EVERY_S = 300


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
        """Return the command that trains a model with these options."""
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


def new_optimizer(model: PreTrainedModel) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only. The learning rate is set at each step."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


@contextmanager
def recorded_magnitudes(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Collects the mean magnitude of what each layer's neurons say, in a forward pass."""
    magnitudes: list[torch.Tensor] = []
    hooks = observe_neurons(model, lambda values: magnitudes.append(values.abs().mean(dtype=torch.float32)))
    try:
        yield magnitudes
    finally:
        for hook in hooks:
            hook.remove()


def batch_loss(model: PreTrainedModel, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cross entropy, with the router's loss if any, and the mean magnitude of the neurons' outputs.

    `[rows, context + 1] → [], []`

    Matrix products are in bfloat16, which was 1.4 times as fast as float32 on a CPU with AVX-512 BF16.
    """
    with torch.autocast("cpu", torch.bfloat16), recorded_magnitudes(model) as magnitudes:
        result = model(batch[:, :-1], use_cache=False)
    entropy = functional.cross_entropy(result.logits.float().flatten(0, 1), batch[:, 1:].flatten())
    if model.training and getattr(result, "aux_loss", None) is not None:
        entropy = entropy + model.config.router_aux_loss_coef * result.aux_loss
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
