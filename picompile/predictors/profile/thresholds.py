"""Search for the firing thresholds of models whose neurons are never quite silent (SiLU, GELU).

A neuron whose output, by magnitude or by contribution, is below its layer's threshold counts as silent. Each layer's
threshold is the same quantile of what is measured, as in CATS (arXiv 2404.08763), which goes by magnitude. The search
finds the largest quantile with which the perplexity on held-out text stays within the accuracy bound. It takes seven
runs over the held-out text: one of the dense model, which also counts what is measured, and six bisections.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from picompile.errors import UnsupportedModelError
from picompile.predictors.firing import FiringRule
from picompile.predictors.profile.collect import (
    Extra,
    Replace,
    See,
    SegmentedModel,
    can_be_silent,
    layer_of,
    run_pass,
    thresholded_ffn,
)
from picompile.predictors.profile.directory import ProfileDirectory
from picompile.progress import Progress
from picompile.streaming import Segment, WindowLoss

# Quantiles are tried in steps of 1 / _STEPS.
_STEPS = 64

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
            if str(middle) not in found["perplexities"]:
                found["perplexities"][str(middle)] = self._perplexity(self._rules(found, middle), middle)
                self.directory.write_search(found)
            kept = found["perplexities"][str(middle)] <= found["dense_perplexity"] * (1 + self.accuracy_bound)
            low, high = (middle, high) if kept else (low, middle)
        return self._rules(found, low), {
            "by": self.by,
            "gate": self.accuracy_bound,
            "silenced_share": low / _STEPS,
            "dense_perplexity": found["dense_perplexity"],
            "perplexity": found["perplexities"].get(str(low), found["dense_perplexity"]),
            "tried": {str(int(step) / _STEPS): value for step, value in sorted(found["perplexities"].items())},
        }

    def _dense(self) -> dict[str, Any]:
        loss = WindowLoss(self.windows)
        histograms = run_pass(
            self.model, "dense", self.windows, self._counting, self.directory, self.progress, loss=loss
        )
        counts = {layer: histogram.tolist() for layer, histogram in sorted(histograms.items())}
        found = {"dense_perplexity": _finite(loss.perplexity), "perplexities": {}, "histograms": counts}
        self.directory.write_search(found)
        return found

    def _counting(self, segment: Segment, extra: Extra) -> tuple[Replace, Callable[[], None]]:
        replace: Replace = {}
        for block in _searched(segment):
            histogram = extra.setdefault(str(layer_of(block)), torch.zeros(_BINS, dtype=torch.int64))
            replace[block] = thresholded_ffn(FiringRule(), _counter(histogram, FiringRule(by=self.by)))
        return replace, lambda: None

    def _perplexity(self, rules: Mapping[int, FiringRule], step: int) -> float:
        def begin(segment: Segment, extra: Extra) -> tuple[Replace, Callable[[], None]]:
            blocks = _searched(segment)
            return {b: thresholded_ffn(rules[layer_of(b)], lambda *_: None) for b in blocks}, lambda: None

        loss = WindowLoss(self.windows)
        name = f"threshold at {step / _STEPS:.1%}"
        run_pass(self.model, name, self.windows, begin, self.directory, self.progress, loss=loss)
        return loss.perplexity

    def _rules(self, found: Mapping[str, Any], step: int) -> dict[int, FiringRule]:
        thresholds = {int(layer): quantile(counts, step / _STEPS) for layer, counts in found["histograms"].items()}
        return {layer: FiringRule(threshold, self.by) for layer, threshold in thresholds.items()}


def quantile(counts: Sequence[int], share: float) -> float:
    """Return the largest bin edge with at most `share` of all that was counted below it; 0 if there is none."""
    below = torch.tensor(counts, dtype=torch.int64).cumsum(0)
    edges = int((below <= share * float(below[-1])).sum())
    return float(2.0 ** (_LOWEST + edges * (_HIGHEST - _LOWEST) / _BINS)) if edges else 0.0


def _searched(segment: Segment) -> list[Node]:
    return [block for block in segment.blocks if not can_be_silent(block)]


def _counter(histogram: Tensor, rule: FiringRule) -> See:
    def count(magnitude: Tensor, fires: Tensor, lengths: Tensor, rms: Tensor | None) -> None:
        logarithms = rule.measure(magnitude, lengths).log2().clamp_(_LOWEST, _HIGHEST)
        histogram.add_(torch.histc(logarithms, _BINS, _LOWEST, _HIGHEST).to(torch.int64))

    return count


def _finite(perplexity: float) -> float:
    if not perplexity < float("inf"):
        raise UnsupportedModelError("the model's logits are not finite numbers: its weights are damaged")
    return perplexity
