"""Training in three stages: least squares, then block by block, then the whole model; resumable from a checkpoint.

1. The down projections are solved for, layer by layer: with the other activation before them, they bring the copy's
   stream as near to the original's as a linear map can. Both models read a short text once.
2. Each block alone learns to do the same, now with its gate and up matrices: gradients stay inside of a block.
3. The whole copy learns the original's distribution of the next token.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from relu_lm.training import save_checkpoint, say
from torch import Tensor, nn

from picompile.errors import UsageError
from relufication.measure import divergence, measure
from relufication.pair import Pair, decoder_layers, feed_forward_blocks, seen_neurons
from relufication.solving import check_added, solve_down
from relufication.texts import Texts

CHECKPOINT_EVERY_S = 600.0
# Shares of the training after which the copy is measured: more often where it changes fast.
MEASURED_AT = (0.0, 0.01, 0.02, 0.05, *(tenths / 10 for tenths in range(1, 10)))
CHECKPOINT = "checkpoint.pt"
_WARMUP_STEPS = 20


@dataclass(frozen=True)
class Recipe:
    """How to train. `steps` or `minutes` ends the training, whichever comes first; zero is no bound.

    The first share `blocks` of it is block by block. `l1` weighs the penalty on what neurons add to the stream.
    """

    steps: int
    minutes: float
    blocks: float
    solve_tokens: int
    rows: int
    l1: float
    block_learning_rate: float
    learning_rate: float

    def progress(self, step: int, elapsed_s: float) -> float:
        """The share of the training that is done, 0 to 1."""
        by_steps = step / self.steps if self.steps else 0.0
        by_time = elapsed_s / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_steps, by_time))

    def stage(self, progress: float) -> str:
        return "blocks" if progress < self.blocks else "model"

    def learning_rate_at(self, stage: str, stage_step: int, progress: float) -> float:
        """In each stage: linear warm-up, then a cosine down to 5 % of the peak."""
        done = progress / self.blocks if stage == "blocks" else (progress - self.blocks) / (1 - self.blocks)
        peak = self.block_learning_rate if stage == "blocks" else self.learning_rate
        return peak * min(1.0, (stage_step + 1) / _WARMUP_STEPS) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass
class State:
    """Where a training stands, after how many seconds of wall time and of all its threads.

    `records` are the measurements so far, and `due` is how many of `MEASURED_AT` are behind it.
    """

    step: int = 0
    stage: str = "start"
    stage_step: int = 0
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    tokens: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)
    due: int = 0
    finished: bool = False


def relative_error(found: Tensor, wanted: Tensor) -> Tensor:
    """The squared error in shares of the square of what is wanted. Two of any shape → `[]`"""
    return (found - wanted).square().sum() / wanted.square().sum()


def contributions(neurons: Tensor, output: Tensor, down: Tensor) -> Tensor:
    """The L1 penalty: what single neurons add to the stream, in lengths of what all add together.

    A neuron adds its value times its column of `down`. The length makes the penalty one of firing: without it, smaller
    values and larger columns would lessen it. Neurons `[..., neurons]`, output `[..., hidden]` → `[]`
    """
    sizes = neurons.abs().flatten(0, -2).mean(0) @ down.norm(dim=0)
    return sizes / output.detach().norm(dim=-1).mean()


def learn_blocks(pair: Pair, batch: Tensor, l1: float) -> float:
    """Add the gradients of every block's own error, one block's after the other's. Return the mean relative error.

    A block reads the copy's stream, and is to add what makes it the original's behind this layer.
    """
    blocks, errors = feed_forward_blocks(pair.copy), []
    wanted: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, output: wanted.append(output))
        for layer in decoder_layers(pair.original)
    ]
    with torch.no_grad():
        pair.original.base_model(batch, use_cache=False)  # type: ignore[operator]
    seen: list[tuple[Tensor, Tensor]] = []

    def learn(_: nn.Module, __: Any, after: Tensor) -> None:
        block, (inputs, added) = blocks[len(errors)], seen.pop()
        with torch.enable_grad():
            neurons: list[Tensor] = []
            hook = block.down_proj.register_forward_hook(lambda _, given, __: neurons.append(given[0]))
            output = block(inputs)
            hook.remove()
            error = relative_error(output, added + wanted[len(errors)] - after)
            torch.autograd.backward(error + l1 * contributions(neurons[0], output, block.down_proj.weight))
        seen.clear()
        errors.append(error.item())

    hooks += [block.register_forward_hook(lambda _, given, output: seen.append((given[0], output))) for block in blocks]
    hooks += [layer.register_forward_hook(learn) for layer in decoder_layers(pair.copy)]
    try:
        with torch.no_grad():
            pair.copy.base_model(batch, use_cache=False)  # type: ignore[operator]
    finally:
        for hook in hooks:
            hook.remove()
    return sum(errors) / len(errors)


def learn_model(pair: Pair, batch: Tensor, l1: float) -> float:
    """Add the gradients of the divergence of the whole copy from the original, and return it."""
    blocks = feed_forward_blocks(pair.copy)
    penalties: list[Tensor] = []

    def penalize(layer: int, neurons: Tensor, output: Tensor) -> None:
        penalties.append(contributions(neurons, output, blocks[layer].down_proj.weight))

    with torch.no_grad():
        exact = pair.original(batch, use_cache=False).logits
    with seen_neurons(pair.copy, penalize):
        found = pair.copy(batch, use_cache=False).logits
    loss = divergence(exact, found)
    torch.autograd.backward(loss + l1 * torch.stack(penalties).mean())
    return loss.item()


def new_optimizer(pair: Pair) -> torch.optim.AdamW:
    return torch.optim.AdamW(pair.trained().values(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def take_step(pair: Pair, optimizer: torch.optim.AdamW, stage: str, batch: Tensor, l1: float, rate: float) -> float:
    """One update in the stage `blocks` or `model`. Return the loss."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    if stage == "blocks":
        loss = learn_blocks(pair, batch, l1)
    else:
        loss = learn_model(pair, batch, l1)
        torch.nn.utils.clip_grad_norm_(pair.trained().values(), 1.0)
    optimizer.step()
    return loss


def require_checkpoint(work: Path, inputs: Mapping[str, Any]) -> None:
    """Raise `UsageError` unless the work folder has a checkpoint of a training with the options `inputs`."""
    path = work / CHECKPOINT
    if not path.is_file():
        raise UsageError(f"{path}: is not there, so nothing can be resumed; leave --resume out, or name its --work")
    found = torch.load(path, weights_only=True, mmap=True)["inputs"]
    differ = [name for name, value in inputs.items() if found.get(name) != value]
    if differ:
        was, now = (", ".join(f"{name} {of.get(name)}" for name in differ) for of in (found, inputs))
        raise UsageError(f"{path}: is of a training with {was}, not {now}; give another --work")


class _Stop:
    """Whether Ctrl-C or SIGTERM came. They end the training after the step that is at work."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __enter__(self) -> _Stop:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, _: Any) -> None:
        self.signal = number

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Trainer:
    """A training that goes on from the checkpoint in the work folder where there is one.

    `inputs` are the options that the checkpoint depends on, as `require_checkpoint` compares them. `note(state)` is
    called after each measurement.
    """

    def __init__(
        self,
        pair: Pair,
        texts: Texts,
        recipe: Recipe,
        work: Path,
        inputs: Mapping[str, Any],
        note: Callable[[State], None],
    ) -> None:
        self.pair, self.texts, self.recipe, self.note = pair, texts, recipe, note
        self.inputs = dict(inputs)
        self.checkpoint = work / CHECKPOINT
        self.optimizer = new_optimizer(pair)
        self.state = State()
        if self.checkpoint.exists():
            self._load()
        self._before_s, self._started = self.state.elapsed_s, time.monotonic()
        self._before_cpu_s, self._started_cpu = self.state.cpu_s, time.process_time()
        self._saved_s = self.state.elapsed_s

    def run(self) -> int | None:
        """Train to the end of the recipe: return None then, and the number of a signal that stopped it before."""
        with _Stop() as stop:
            if self.state.stage == "start" and not self.state.finished:
                self._begin()
            while stop.signal is None and not self.state.finished:
                self.state.elapsed_s = self._elapsed_s()
                progress = self.recipe.progress(self.state.step, self.state.elapsed_s)
                if progress >= 1:
                    self._finish()
                    break
                if self.state.due < len(MEASURED_AT) and progress >= MEASURED_AT[self.state.due]:
                    self._measure(self.state.stage)
                    self.state.due = sum(mark <= progress for mark in MEASURED_AT)
                self._step(progress)
                if self.state.elapsed_s - self._saved_s > CHECKPOINT_EVERY_S:
                    self._save()
            if not self.state.finished:
                self._save()
            return None if self.state.finished else stop.signal

    def _begin(self) -> None:
        """Measure the swap alone, and solve. What was begun of this is begun again."""
        if self.recipe.solve_tokens or self.recipe.blocks:
            check_added(self.pair, self.texts.batch(0, 1))
        self._measure("swap")
        if self.recipe.solve_tokens:
            say(f"solving for {len(feed_forward_blocks(self.pair.copy))} down projections")
            batches = [self.texts.batch(number, self.recipe.rows) for number in range(self._solve_batches())]
            solve_down(self.pair, batches)
            self.state.tokens += sum(batch.numel() for batch in batches)
        self.state.stage = "solve"
        self._save()

    def _solve_batches(self) -> int:
        """How many batches the solution reads; the training goes on behind them."""
        return -(-self.recipe.solve_tokens // (self.recipe.rows * self.texts.library.shape[1]))

    def _step(self, progress: float) -> None:
        state, recipe = self.state, self.recipe
        stage = recipe.stage(progress)
        if stage != state.stage:
            if state.stage == "blocks" and state.records[-1]["step"] != state.step:
                self._measure("blocks")
            state.stage, state.stage_step = stage, 0
            self.optimizer = new_optimizer(self.pair)
        rate = recipe.learning_rate_at(stage, state.stage_step, progress)
        batch = self.texts.batch(self._solve_batches() + state.step, recipe.rows)
        loss = take_step(self.pair, self.optimizer, stage, batch, recipe.l1, rate)
        state.step, state.stage_step, state.tokens = state.step + 1, state.stage_step + 1, state.tokens + batch.numel()
        if state.step % 20 == 0:
            place = f"{progress:.1%}  {self._elapsed_s():.0f} s  {state.tokens:,} tokens"
            say(f"{stage} step {state.step}  {place}  loss {loss:.4f}")

    def _finish(self) -> None:
        """Round the weights to what is saved, and measure them."""
        for parameter in self.pair.copy.parameters():
            parameter.data = parameter.data.half().float()
        self.state.finished = True
        self._measure("end")
        self._save()

    def _measure(self, stage: str) -> None:
        state = self.state
        probes = {name: measure(self.pair, windows) for name, windows in self.texts.probes.items()}
        place = {"stage": stage, "step": state.step, "tokens": state.tokens}
        place |= {"seconds": round(self._elapsed_s(), 1), "cpu_seconds": round(self._cpu_s(), 1)}
        state.records.append({**place, "text": probes})
        for name, found in probes.items():
            firing = sum(found["firing"]) / len(found["firing"])
            say(
                f"{stage} step {state.step}  {name}: loss {found['loss']:.4f} (original {found['original_loss']:.4f})  "
                f"KL {found['kl']:.4f}  firing {firing:.1%}"
            )
        self.note(state)

    def _elapsed_s(self) -> float:
        return self._before_s + time.monotonic() - self._started

    def _cpu_s(self) -> float:
        return self._before_cpu_s + time.process_time() - self._started_cpu

    def _save(self) -> None:
        self.state.elapsed_s = self._saved_s = self._elapsed_s()
        self.state.cpu_s = self._cpu_s()
        weights = {name: parameter.detach() for name, parameter in self.pair.trained().items()}
        # Moments of a finished training would only take space.
        moments = {} if self.state.finished else self.optimizer.state_dict()
        content = {"weights": weights, "optimizer": moments, "state": vars(self.state), "inputs": self.inputs}
        save_checkpoint(self.checkpoint, content)

    def _load(self) -> None:
        content = torch.load(self.checkpoint, weights_only=True)
        self.state = State(**content["state"])
        with torch.no_grad():
            for name, parameter in self.pair.trained().items():
                parameter.copy_(content["weights"][name])
        if not self.state.finished:
            self.optimizer.load_state_dict(content["optimizer"])
        say(f"resumed at step {self.state.step}, {self.state.elapsed_s:.0f} s")
