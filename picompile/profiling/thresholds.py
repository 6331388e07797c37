"""Thresholds for models whose neurons are never quite silent (SiLU, GELU).

A neuron that sends less than a threshold to its down row is taken to be silent. Each layer's threshold is the same
quantile of its magnitudes, as in CATS (arXiv 2404.08763); the largest quantile is searched for with which the
perplexity on held-out text stays inside the gate. The search takes seven runs over the held-out text: one of the dense
model, which also counts the magnitudes, and six bisections.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from picompile.errors import UnsupportedModelError
from picompile.layerwise import Segment
from picompile.layerwise.perplexity import WindowLoss
from picompile.profiling.collect import Replace, can_be_silent, layer_of, thresholded_ffn
from picompile.profiling.passes import Extra, Model, run_pass
from picompile.profiling.workplace import Workplace
from picompile.progress import Progress

# Shares are tried in steps of one of these.
_STEPS = 64

# Magnitudes are counted by their binary logarithms, in bins of a sixteenth: thresholds differ by 4 %.
_LOWEST, _HIGHEST, _BINS = -40, 24, 1024


@dataclass(frozen=True)
class Search:
    """Looks for the thresholds of `model` on `windows`, and notes in `workplace` what it has found."""

    model: Model
    windows: Sequence[Sequence[int]]
    gate: float
    workplace: Workplace
    progress: Progress

    def run(self) -> tuple[dict[int, float], dict[str, Any]]:
        """Thresholds by layer, and how they were found."""
        found = self.workplace.read_search() or self._dense()
        low, high = 0, _STEPS
        while high - low > 1:
            middle = (low + high) // 2
            if str(middle) not in found["perplexities"]:
                found["perplexities"][str(middle)] = self._perplexity(self._thresholds(found, middle), middle)
                self.workplace.write_search(found)
            kept = found["perplexities"][str(middle)] <= found["dense_perplexity"] * (1 + self.gate)
            low, high = (middle, high) if kept else (low, middle)
        return self._thresholds(found, low), {
            "gate": self.gate,
            "silenced_share": low / _STEPS,
            "dense_perplexity": found["dense_perplexity"],
            "perplexity": found["perplexities"].get(str(low), found["dense_perplexity"]),
            "tried": {str(int(step) / _STEPS): value for step, value in sorted(found["perplexities"].items())},
        }

    def _dense(self) -> dict[str, Any]:
        loss = WindowLoss(self.windows)
        histograms = run_pass(
            self.model, "dense", self.windows, self._counting, self.workplace, self.progress, loss=loss
        )
        counts = {layer: histogram.tolist() for layer, histogram in sorted(histograms.items())}
        found = {"dense_perplexity": _finite(loss.perplexity), "perplexities": {}, "histograms": counts}
        self.workplace.write_search(found)
        return found

    def _counting(self, segment: Segment, extra: Extra) -> tuple[Replace, Callable[[], None]]:
        replace: Replace = {}
        for block in _searched(segment):
            histogram = extra.setdefault(str(layer_of(block)), torch.zeros(_BINS, dtype=torch.int64))
            replace[block] = thresholded_ffn(0.0, _counter(histogram))
        return replace, lambda: None

    def _perplexity(self, thresholds: Mapping[int, float], step: int) -> float:
        def begin(segment: Segment, extra: Extra) -> tuple[Replace, Callable[[], None]]:
            blocks = _searched(segment)
            return {b: thresholded_ffn(thresholds[layer_of(b)], lambda *_: None) for b in blocks}, lambda: None

        loss = WindowLoss(self.windows)
        name = f"threshold at {step / _STEPS:.1%}"
        run_pass(self.model, name, self.windows, begin, self.workplace, self.progress, loss=loss)
        return loss.perplexity

    def _thresholds(self, found: Mapping[str, Any], step: int) -> dict[int, float]:
        return {int(layer): quantile(counts, step / _STEPS) for layer, counts in found["histograms"].items()}


def quantile(counts: Sequence[int], share: float) -> float:
    """The largest edge of the bins of magnitudes with at most `share` of all below it; 0 where there is none."""
    below = torch.tensor(counts, dtype=torch.int64).cumsum(0)
    edges = int((below <= share * float(below[-1])).sum())
    return float(2.0 ** (_LOWEST + edges * (_HIGHEST - _LOWEST) / _BINS)) if edges else 0.0


def _searched(segment: Segment) -> list[Node]:
    return [block for block in segment.blocks if not can_be_silent(block)]


def _counter(histogram: Tensor) -> Callable[[Tensor, Tensor, Tensor], None]:
    def count(magnitude: Tensor, fires: Tensor, down: Tensor) -> None:
        logarithms = magnitude.log2().clamp_(_LOWEST, _HIGHEST)
        histogram.add_(torch.histc(logarithms, _BINS, _LOWEST, _HIGHEST).to(torch.int64))

    return count


def _finite(perplexity: float) -> float:
    if not perplexity < float("inf"):
        raise UnsupportedModelError("the model's logits are not finite numbers: its weights are damaged")
    return perplexity
