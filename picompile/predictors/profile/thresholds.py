"""Search for the firing thresholds of models whose neurons are never quite silent (SiLU, GELU).

A neuron whose output, by magnitude or by contribution, is below its layer's threshold counts as silent. Each layer's
threshold is the same quantile of that measure, as in CATS (arXiv 2404.08763), which uses magnitudes. The search finds
the largest quantile with which the perplexity on held-out text stays within the accuracy bound. It takes one run of the
dense model over the held-out text, which also gathers the quantiles, and six bisections. A bisection reads a quarter of
the text at first, then half and then all of it, until it is clear on which side of the bound the change is. Windows are
compared one by one, so differences between texts do not count. The result is measured on the whole text.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from picompile.errors import UnsupportedModelError
from picompile.intervals import Estimate, estimate_mean
from picompile.predictors.firing import FiringRule
from picompile.predictors.profile.collect import (
    Extra,
    Replace,
    See,
    SegmentedModel,
    has_threshold,
    layer_of,
    run_pass,
    thresholded_ffn,
)
from picompile.predictors.profile.directory import ProfileDirectory
from picompile.progress import Progress
from picompile.streaming import Segment, WindowLoss

# Quantiles are tried in steps of 1 / _STEPS.
_STEPS = 64

# The parts of the text after which a bisection may end, and how far the bound must be from the change, in halves of its
# 95 % confidence interval: a chance of 1 in 10,000 for each look.
_PARTS = (0.25, 0.5, 1.0)
_CLEAR = 2.0
_LEAST_WINDOWS = 8

# What is measured is counted by its binary logarithm, in bins of a sixteenth: neighbouring thresholds differ by 4 %.
_LOWEST, _HIGHEST, _BINS = -40, 24, 1024


@dataclass(frozen=True)
class ThresholdSearch:
    """Searches for the thresholds of `model`, by the measure `by`, on `windows`; saves its state in `directory`."""

    model: SegmentedModel
    windows: Sequence[Sequence[int]]
    by: str
    accuracy_bound: float
    directory: ProfileDirectory
    progress: Progress

    def run(self) -> tuple[dict[int, FiringRule], dict[str, Any]]:
        """Return the rules by layer, and the facts about the search for `profile.json`."""
        found = self.directory.read_search() or self._dense()
        low, high = 0, _STEPS
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_kept(found, middle) else (low, middle)
        change = self._read(found, low, len(self.windows)) if low else Estimate(0.0, 0.0, 0.0)
        return self._rules(found, low), {
            "by": self.by,
            "accuracy_bound": self.accuracy_bound,
            "silenced_share": low / _STEPS,
            "dense_perplexity": found["dense_perplexity"],
            "perplexity": found["dense_perplexity"] * _exp(change.value),
            "change": vars(change.map(math.expm1)),
            "tried": {
                str(int(step) / _STEPS): found["dense_perplexity"] * _exp(self._change(found, step).value)
                for step in sorted(found["losses"])
            },
        }

    def _is_kept(self, found: dict[str, Any], step: int) -> bool:
        """Return whether the perplexity stays within the bound with the thresholds of a step."""
        bound = math.log1p(self.accuracy_bound)
        for part in _PARTS:
            change = self._read(found, step, max(_LEAST_WINDOWS, math.ceil(part * len(self.windows))))
            if change.low is not None and abs(bound - change.value) > _CLEAR * (change.value - change.low):
                break
        return change.value <= bound

    def _read(self, found: dict[str, Any], step: int, windows: int) -> Estimate:
        """Return how much the loss of a token changes with the thresholds of a step, nats, over at least so many
        windows."""
        losses = found["losses"].setdefault(str(step), [])
        if len(losses) < min(windows, len(self.windows)):
            losses += self._losses(self._rules(found, step), step, range(len(losses), min(windows, len(self.windows))))
            self.directory.write_search(found)
        return self._change(found, step)

    def _change(self, found: Mapping[str, Any], step: int | str) -> Estimate:
        losses = np.array(found["losses"][str(step)])
        tokens = np.array([len(window) - 1 for window in self.windows[: len(losses)]])
        changes = (losses - np.array(found["dense_losses"][: len(losses)])) / tokens
        windows = np.arange(len(losses))
        # As many times as a window has tokens: a mean over tokens, and an interval by windows.
        return estimate_mean(np.repeat(changes, tokens), np.repeat(windows, tokens))

    def _dense(self) -> dict[str, Any]:
        loss = WindowLoss(self.windows)
        histograms = run_pass(
            self.model,
            name="dense",
            windows=self.windows,
            begin=self._counting,
            directory=self.directory,
            progress=self.progress,
            loss=loss,
        )
        counts = {layer: histogram.tolist() for layer, histogram in sorted(histograms.items())}
        found = {
            "dense_perplexity": _finite(loss.perplexity),
            "dense_losses": loss.losses,
            "losses": {},
            "histograms": counts,
        }
        self.directory.write_search(found)
        return found

    def _counting(self, segment: Segment, extra: Extra) -> tuple[Replace, Callable[[], None]]:
        replace: Replace = {}
        for block in _searched(segment):
            histogram = extra.setdefault(str(layer_of(block)), torch.zeros(_BINS, dtype=torch.int64))
            replace[block] = thresholded_ffn(FiringRule(), _counter(histogram, FiringRule(by=self.by)))
        return replace, lambda: None

    def _losses(self, rules: Mapping[int, FiringRule], step: int, part: range) -> list[float]:
        """Return the losses of the windows of a part, nats."""

        def begin(segment: Segment, extra: Extra) -> tuple[Replace, Callable[[], None]]:
            blocks = _searched(segment)
            return {b: thresholded_ffn(rules[layer_of(b)], lambda *_: None) for b in blocks}, lambda: None

        windows = self.windows[part.start : part.stop]
        loss = WindowLoss(windows)
        # The name tells the saved state of this part from that of another.
        name = f"threshold at {step / _STEPS:.1%}, windows {part.start + 1} to {part.stop}"
        run_pass(self.model, name, windows, begin, self.directory, self.progress, loss=loss)
        return loss.losses

    def _rules(self, found: Mapping[str, Any], step: int) -> dict[int, FiringRule]:
        thresholds = {int(layer): quantile(counts, step / _STEPS) for layer, counts in found["histograms"].items()}
        return {layer: FiringRule(threshold, self.by) for layer, threshold in thresholds.items()}


def quantile(counts: Sequence[int], share: float) -> float:
    """Return the largest bin edge with at most `share` of all that was counted below it; 0 if there is none."""
    below = torch.tensor(counts, dtype=torch.int64).cumsum(0)
    edges = int((below <= share * float(below[-1])).sum())
    return float(2.0 ** (_LOWEST + edges * (_HIGHEST - _LOWEST) / _BINS)) if edges else 0.0


def _searched(segment: Segment) -> list[Node]:
    return [block for block in segment.blocks if has_threshold(block)]


def _counter(histogram: Tensor, rule: FiringRule) -> See:
    def count(magnitude: Tensor, fires: Tensor, lengths: Tensor, rms: Tensor | None) -> None:
        logarithms = rule.measure(magnitude, lengths).log2().clamp_(_LOWEST, _HIGHEST)
        histogram.add_(torch.histc(logarithms, _BINS, _LOWEST, _HIGHEST).to(torch.int64))

    return count


def _finite(perplexity: float) -> float:
    if not perplexity < float("inf"):
        raise UnsupportedModelError("the model's logits are not finite numbers: its weights are damaged")
    return perplexity


def _exp(nats: float) -> float:
    """Return e to this power, or some 1e304 where that is no float64 number."""
    return math.exp(min(nats, 700.0))
