"""What is gathered of one layer while windows of tokens run through it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile.errors import UnsupportedModelError
from picompile.predictors.profile.directory import ProfileDirectory
from picompile.progress import Progress
from picompile.streaming import Segment, WindowLoss, run_segment
from picompile_passes.dialect import parse_activation
from picompile_passes.dialect.ops import neuron_outputs
from picompile_passes.graph.materialize import WeightSource
from picompile_passes.graph.nodes import arguments, is_call
from picompile_passes.graph.operands import LAYER_NORM, RMS_NORM

Replace = dict[Node, Callable[..., Tensor]]

_LARGEST_F16 = 65504.0


def layer_of(block: Node) -> int:
    """The layer's number."""
    return int(block.meta["layer"])


def norm_of(segment: Segment, block: Node) -> Node | None:
    """The norm that makes what the block reads, where there is one."""
    norm = arguments(block)["x"]
    # One in another segment would have to be remembered from there when a killed run goes on.
    return norm if is_call(norm, RMS_NORM, LAYER_NORM) and norm in segment.nodes else None


def can_be_silent(block: Node) -> bool:
    """Whether what a neuron of the block sends to its down row is exactly zero where it does not fire."""
    values = arguments(block)
    texts = [values["activation"], *([values["up_activation"]] if values["gate"] is not None else [])]
    return any(parse_activation(text).sparse for text in texts)


def thresholded_ffn(threshold: float, see: Callable[[Tensor, Tensor, Tensor], None]) -> Callable[..., Tensor]:
    """`ffn` without the neurons whose outputs are at most `threshold` in magnitude.

    `see` receives the magnitudes [tokens, neurons], which of them fire, and the down rows [neurons, hidden].
    """

    def ffn(x: Tensor, *operands: Any) -> Tensor:
        gate, up, down, gate_bias, up_bias, down_bias, activation, up_activation = operands
        hidden = neuron_outputs(x, gate, up, gate_bias, up_bias, activation, up_activation)
        magnitude = hidden.abs()
        fires = magnitude > threshold
        see(magnitude, fires, down)
        kept = hidden if threshold == 0 else torch.where(fires, hidden, torch.zeros_like(hidden))
        return F.linear(kept, down.transpose(0, 1), down_bias)

    return ffn


class LayerCollector:
    """Counts firings of one layer's neurons, and keeps what the block read at `positions`."""

    def __init__(self, segment: Segment, block: Node, threshold: float, positions: Tensor) -> None:
        self.block, self.norm, self.threshold = block, norm_of(segment, block), threshold
        neurons, hidden = (int(size) for size in arguments(block)["up"].meta["val"].shape)
        self.counts = torch.zeros(neurons, dtype=torch.int64)
        self._magnitude = torch.zeros(neurons, dtype=torch.float64)
        self._lengths = torch.zeros(neurons)
        self._positions = positions
        self._samples = torch.empty(len(positions), hidden, dtype=torch.float16)
        self._tokens, self._taken = 0, 0

    def replace(self) -> Replace:
        """The calls to be made instead of the graph's."""
        ffn = thresholded_ffn(self.threshold, self._count)
        if self.norm is None:
            return {self.block: lambda x, *operands: ffn(self._sample(x), *operands)}
        normalize: Any = self.norm.target
        return {self.block: ffn, self.norm: lambda x, *operands: normalize(self._sample(x), *operands)}

    def tensors(self) -> Mapping[str, Tensor]:
        """What is kept of the layer. Raises `UnsupportedModelError` where its values are not numbers."""
        contribution = (self._magnitude * self._lengths).float()
        if not bool(contribution.isfinite().all()):
            raise UnsupportedModelError(
                f"layer {layer_of(self.block)}: its neurons' values are not finite numbers: the weights are damaged"
            )
        return {
            "counts": self.counts,
            "contribution": contribution,
            "input": self._samples,
            "positions": self._positions,
        }

    def _sample(self, x: Tensor) -> Tensor:
        """Keeps the rows that are among the sampled positions; gives x on."""
        end = self._tokens + len(x)
        stop = int(torch.searchsorted(self._positions, end))
        rows = x[self._positions[self._taken : stop] - self._tokens]
        # A few directions of a residual stream can be beyond float16.
        self._samples[self._taken : stop] = rows.clamp(-_LARGEST_F16, _LARGEST_F16)
        self._tokens, self._taken = end, stop
        return x

    def _count(self, magnitude: Tensor, fires: Tensor, down: Tensor) -> None:
        self.counts += fires.sum(dim=0)
        kept = magnitude if self.threshold == 0 else magnitude * fires
        self._magnitude += kept.sum(dim=0)
        self._lengths = down.norm(dim=1)


def summarize(counts: Tensor, tokens: int) -> dict[str, Any]:
    """`firing_share`, `neurons_for_80_percent` and `never_fired` of a layer; counts int64 [neurons]."""
    reached = counts.sort(descending=True).values.double().cumsum(0)
    total = float(reached[-1])
    needed = int((reached < 0.8 * total).sum()) + 1 if total else 0
    return {
        "firing_share": total / tokens / len(counts),
        "neurons_for_80_percent": needed / len(counts),
        "never_fired": int((counts == 0).sum()),
    }


def draw_positions(samples: int, tokens: int, seed: int) -> Tensor:
    """Which tokens are sampled: int64 [min(samples, tokens)], in order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(tokens, generator=generator)[:samples].sort().values


# One run of all windows through a model's segments, which goes on where the last process left it.


Extra = dict[str, Tensor]
"""What a pass gathers over several segments; saved with the states."""

Begin = Callable[[Segment, Extra], tuple[Replace, Callable[[], None]]]
"""Called before a segment: the calls to be made instead of the graph's, and what is to be done after the segment."""


@dataclass(frozen=True)
class SegmentedModel:
    """A canonical graph in segments, and its weights."""

    graph_module: GraphModule
    segments: tuple[Segment, ...]
    weights: WeightSource


def run_pass(
    model: SegmentedModel,
    name: str,
    windows: Sequence[Sequence[int]],
    begin: Begin,
    workplace: ProfileDirectory,
    progress: Progress,
    *,
    segments: int | None = None,
    loss: WindowLoss | None = None,
) -> Extra:
    """Runs `windows` through the first `segments` segments, by default all; `loss` receives the logits.

    `name` tells passes apart: what was saved of another is not gone on with.
    """
    chosen = model.segments[:segments]
    logits = model.graph_module.graph.output_node().all_input_nodes if loss is not None else ()
    first, states, extra = workplace.load_state(name, model.graph_module, chosen, windows)
    total = sum(map(len, windows)) * (len(chosen) - first)
    with progress.step(name, total) as advance:
        for number, segment in enumerate(chosen[first:], start=first):
            replace, finish = begin(segment, extra)
            run_segment(segment, model.weights, states, loss, logits, advance, replace)
            finish()
            if number + 1 < len(chosen):
                workplace.save_state(name, number + 1, states, extra)
    return extra


# Thresholds for models whose neurons are never quite silent (SiLU, GELU).
#
# A neuron that sends less than a threshold to its down row is taken to be silent. Each layer's threshold is the same
# quantile of its magnitudes, as in CATS (arXiv 2404.08763); the largest quantile is searched for with which the
# perplexity on held-out text stays inside the gate. The search takes seven runs over the held-out text: one of the
# dense
# model, which also counts the magnitudes, and six bisections.


# Shares are tried in steps of one of these.
_STEPS = 64

# Magnitudes are counted by their binary logarithms, in bins of a sixteenth: thresholds differ by 4 %.
_LOWEST, _HIGHEST, _BINS = -40, 24, 1024


@dataclass(frozen=True)
class ThresholdSearch:
    """Looks for the thresholds of `model` on `windows`, and notes in `workplace` what it has found."""

    model: SegmentedModel
    windows: Sequence[Sequence[int]]
    gate: float
    workplace: ProfileDirectory
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
