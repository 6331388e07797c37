"""Collection of firing counts and input samples, layer by layer, while windows of tokens run through the model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile.errors import UnsupportedModelError
from picompile.predictors.firing import FiringRule
from picompile.predictors.profile.directory import ProfileDirectory
from picompile.progress import Progress
from picompile.streaming import Segment, WindowLoss, run_segment
from picompile_passes.dialect import parse_activation
from picompile_passes.dialect.ffn import FfnOperands
from picompile_passes.dialect.neurons import neuron_rms
from picompile_passes.graph.materialize import WeightSource
from picompile_passes.graph.nodes import arguments, is_call
from picompile_passes.graph.operands import LAYER_NORM, RMS_NORM, expert_count

Replace = dict[Node, Callable[..., Tensor]]

_LARGEST_F16 = 65504.0


def layer_of(block: Node) -> int:
    """Return the layer's number."""
    return int(block.meta["layer"])


def norm_of(segment: Segment, block: Node) -> Node | None:
    """Return the norm whose output the block reads; None if there is none in this segment."""
    norm = arguments(block)["x"]
    # The output of a norm in another segment would have to be saved for a run that is resumed.
    return norm if is_call(norm, RMS_NORM, LAYER_NORM) and norm in segment.nodes else None


def can_be_silent(block: Node) -> bool:
    """Return whether the output of a neuron of the block is exactly zero when it does not fire."""
    values = arguments(block)
    texts = [values["activation"], *([values["up_activation"]] if values["gate"] is not None else [])]
    return any(parse_activation(text).sparse for text in texts)


def has_threshold(block: Node) -> bool:
    """Return whether it takes a threshold to tell which neurons of the block fire.

    Not where neurons can be silent, nor of experts: every neuron of a chosen one fires.
    """
    return not can_be_silent(block) and not expert_count(block)


def check_experts_fire(name: str, blocks: Iterable[Node]) -> None:
    """Raise `UnsupportedModelError` for lossy predictors of blocks of experts whose neurons are never silent."""
    if any(expert_count(block) and not can_be_silent(block) for block in blocks):
        raise UnsupportedModelError(
            f"{name}: every neuron of a chosen expert fires, so that predictors have nothing to predict; choose "
            "--predictor none"
        )


See = Callable[[Tensor, Tensor, Tensor, Tensor | None], None]
"""Receives the outputs of a block's neurons: magnitudes [tokens, neurons], which of them fire, the lengths of the down
rows [neurons], and what a norm across the neurons divides each token by, [tokens, 1], or None without one. Of experts,
magnitudes are times the gain, and no neuron of one that is not chosen fires."""


def thresholded_ffn(rule: FiringRule, see: See) -> Callable[..., Tensor]:
    """Return a function like `ffn` that skips neurons that do not fire by `rule`.

    Magnitudes are those before a norm across the neurons, as predictors see them.
    """

    def ffn(*operands: Any, **named: Any) -> Tensor:
        block = FfnOperands(*operands, **named)
        hidden = block.outputs()
        magnitude, lengths = hidden.abs(), block.down.norm(dim=1)
        fires = rule.fires(magnitude, lengths)
        kept = hidden if rule.threshold == 0 else torch.where(fires, hidden, torch.zeros_like(hidden))
        rms = None if block.norm_eps is None else neuron_rms(kept, block.norm_eps)
        see(magnitude, fires, lengths, rms)
        return block.result(kept if rms is None else kept / rms)

    return ffn


class LayerCollector:
    """Counts the firings of one layer's neurons, and keeps the block's inputs at `positions`.

    Of experts, it counts how many tokens choose each as well, and after which the token before has chosen, and keeps
    the gains at `positions`.
    """

    def __init__(self, segment: Segment, block: Node, rule: FiringRule, positions: Tensor) -> None:
        self.block, self.norm, self.rule = block, norm_of(segment, block), rule
        neurons, hidden = (int(size) for size in arguments(block)["up"].meta["val"].shape)
        experts = expert_count(block)
        self.counts = torch.zeros(neurons, dtype=torch.int64)
        self.chosen = torch.zeros(experts, dtype=torch.int64)
        self.after = torch.zeros(experts, experts, dtype=torch.int64)
        self._magnitude = torch.zeros(neurons, dtype=torch.float64)
        self._lengths = torch.zeros(neurons)
        self._inputs, self._gains = _Sampler(positions, hidden), _Sampler(positions, experts)

    def replace(self) -> Replace:
        """Return the functions to call instead of the graph's."""
        compute = thresholded_ffn(self.rule, self._count)

        def ffn(*operands: Any, **named: Any) -> Tensor:
            block = FfnOperands(*operands, **named)
            if block.gains is not None:
                self._count_choices(self._gains.take(block.gains) != 0)
            return compute(*(block if self.norm is not None else block._replace(x=self._inputs.take(block.x))))

        if self.norm is None:
            return {self.block: ffn}
        normalize: Any = self.norm.target
        return {self.block: ffn, self.norm: lambda x, *operands: normalize(self._inputs.take(x), *operands)}

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of the layer's file. Raise `UnsupportedModelError` if its values are not finite."""
        contribution = (self._magnitude * self._lengths).float()
        if not bool(contribution.isfinite().all()):
            raise UnsupportedModelError(
                f"layer {layer_of(self.block)}: its neurons' values are not finite numbers: the weights are damaged"
            )
        tensors = {
            "counts": self.counts,
            "contribution": contribution,
            "input": self._inputs.samples,
            "positions": self._inputs.positions,
        }
        if not len(self.chosen):
            return tensors
        return tensors | {"chosen": self.chosen, "after": self.after, "gains": self._gains.samples}

    def _count_choices(self, chosen: Tensor) -> None:
        """Count the choices of the tokens of a window: bool [tokens, experts]."""
        self.chosen += chosen.sum(dim=0)
        numbers = chosen.float()
        self.after += (numbers[:-1].T @ numbers[1:]).long()

    def _count(self, magnitude: Tensor, fires: Tensor, lengths: Tensor, rms: Tensor | None) -> None:
        self.counts += fires.sum(dim=0)
        kept = magnitude if self.rule.threshold == 0 else magnitude * fires
        kept = kept if rms is None else kept / rms
        self._magnitude += kept.sum(dim=0)
        self._lengths = lengths


class _Sampler:
    """Keeps rows of the tokens at `positions`, float16 [samples, columns], while these pass window by window."""

    def __init__(self, positions: Tensor, columns: int) -> None:
        self.positions, self.samples = positions, torch.empty(len(positions), columns, dtype=torch.float16)
        self._tokens, self._taken = 0, 0

    def take(self, x: Tensor) -> Tensor:
        """Keep the rows of x [tokens, columns] at sampled positions; return x."""
        end = self._tokens + len(x)
        stop = int(torch.searchsorted(self.positions, end))
        rows = x[self.positions[self._taken : stop] - self._tokens]
        # A few directions of a residual stream can exceed the range of float16.
        self.samples[self._taken : stop] = rows.clamp(-_LARGEST_F16, _LARGEST_F16)
        self._tokens, self._taken = end, stop
        return x


def summarize(counts: Tensor, tokens: int) -> dict[str, Any]:
    """Return `firing_share`, `neurons_for_80_percent` and `never_fired` of a layer; counts int64 [neurons]."""
    reached = counts.sort(descending=True).values.double().cumsum(0)
    total = float(reached[-1])
    needed = int((reached < 0.8 * total).sum()) + 1 if total else 0
    return {
        "firing_share": total / tokens / len(counts),
        "neurons_for_80_percent": needed / len(counts),
        "never_fired": int((counts == 0).sum()),
    }


def summarize_experts(chosen: Tensor, after: Tensor, tokens: int) -> dict[str, Any]:
    """Return the figures of a layer's experts as `LayerProfile` has them.

    chosen int64 [experts] counts tokens, after int64 [experts, experts] pairs of tokens.
    """
    figures, total = summarize(chosen, tokens), int(chosen.sum())
    return {
        "chosen_again": int(after.diagonal().sum()) / total if total else 0.0,
        "experts": len(chosen),
        "experts_for_80_percent": figures["neurons_for_80_percent"],
        "never_chosen": figures["never_fired"],
    }


def draw_positions(samples: int, tokens: int, seed: int) -> Tensor:
    """Draw the tokens to sample: int64 [min(samples, tokens)], in order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(tokens, generator=generator)[:samples].sort().values


Extra = dict[str, Tensor]
"""Tensors that a pass collects over several segments; saved with the states."""

Begin = Callable[[Segment, Extra], tuple[Replace, Callable[[], None]]]
"""Called before a segment; returns the functions to call instead of the graph's, and one to call after the segment."""


@dataclass(frozen=True)
class SegmentedModel:
    """A canonical graph, cut into segments, and its weights."""

    graph_module: GraphModule
    segments: tuple[Segment, ...]
    weights: WeightSource


def run_pass(
    model: SegmentedModel,
    name: str,
    windows: Sequence[Sequence[int]],
    begin: Begin,
    directory: ProfileDirectory,
    progress: Progress,
    *,
    segments: int | None = None,
    loss: WindowLoss | None = None,
) -> Extra:
    """Run `windows` through the first `segments` segments, by default all; `loss` receives the logits.

    A pass that was interrupted is resumed at the segment where the last process stopped. `name` tells passes apart: the
    saved state of another pass is not used.
    """
    chosen = model.segments[:segments]
    logits = model.graph_module.graph.output_node().all_input_nodes if loss is not None else ()
    first, states, extra = directory.state.load(name, model.graph_module, chosen, windows)
    total = sum(map(len, windows)) * (len(chosen) - first)
    with progress.step(name, total) as advance:
        for number, segment in enumerate(chosen[first:], start=first):
            replace, finish = begin(segment, extra)
            run_segment(segment, model.weights, states, observe=loss, nodes=logits, advance=advance, replace=replace)
            finish()
            if number + 1 < len(chosen):
                directory.state.save(name, number + 1, states, extra)
    return extra
