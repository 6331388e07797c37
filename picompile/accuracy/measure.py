"""Reading a text with the checkpoint, with each variant of it, and with the artifact.

A variant runs layer by layer and yields the hidden states before the output head. For one window at a time, logits are
computed from these and compared with the checkpoint's. So memory holds one layer, or the two heads, with the hidden
states of two variants and the logits of one window, however long the text is.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule

from picompile.accuracy.comparison import CheckpointComparison, VariantAccuracy, perplexity_of
from picompile.accuracy.distances import TokenDistances, join_tokens, measure_tokens
from picompile.accuracy.variants import Replaced, Variant
from picompile.errors import UnsupportedModelError
from picompile.intervals import block_size, estimate_mean, token_blocks
from picompile.progress import Advance, Progress
from picompile.streaming import Segment, State, new_states, run_segment, split_layers, window_values
from picompile_passes.graph.materialize import WeightSource
from picompile_runtime import Engine, load
from picompile_runtime.bench.perplexity import decoded
from picompile_runtime.sampling.sampler import no_scores


@dataclass(frozen=True)
class ComparedArtifact:
    """The artifact in `folder`, which must run on this machine, as the last variant.

    `by_decode` says whether it reads token by token, as it generates: only so do its predictors choose neurons.
    `title` and `remedy` are as in `Variant`.
    """

    folder: Path
    by_decode: bool
    title: str
    remedy: str


@dataclass(frozen=True)
class ComparedText:
    """Windows of token ids for the comparison, and their source. The first id of each is given, not predicted."""

    windows: Sequence[Sequence[int]]
    source: str

    @property
    def inputs(self) -> list[Sequence[int]]:
        """The ids that are read, window by window."""
        return [window[:-1] for window in self.windows]

    @property
    def targets(self) -> list[Tensor]:
        """The ids that are predicted, window by window, int64."""
        return [torch.tensor(list(window)[1:]) for window in self.windows]


@dataclass(frozen=True)
class _Head:
    """The last segment of a graph, and the live values of each window before it."""

    segment: Segment
    weights: WeightSource
    states: Sequence[State]
    replaced: Replaced

    def logits(self) -> Iterator[Tensor]:
        """Yield the logits [tokens, vocabulary] of one window after another."""
        (node,) = self.segment.graph_module.graph.output_node().all_input_nodes
        return window_values(self.segment, self.weights, self.states, node, replace=self.replaced)


def compare_variants(
    checkpoint: tuple[GraphModule, WeightSource],
    variants: Sequence[Variant],
    artifact: ComparedArtifact,
    text: ComparedText,
    bound: float | None,
    progress: Progress,
) -> CheckpointComparison:
    """Return how far each variant, and at last the artifact, is from the checkpoint.

    Args:
        checkpoint: its canonical graph and its weights.
        variants: the model with one lossy part after another.
        artifact: the artifact, which has all of them.
        text: what is read. No window may be longer than the artifact's context and one.
        bound: the share by which the artifact's perplexity may exceed the checkpoint's; None for any.
        progress: is told of each step.

    Raises:
        UnsupportedModelError: logits of the checkpoint or of a variant contain NaN.
        KernelError: those of the artifact do.
    """
    reference = _run_to_head("the checkpoint", *checkpoint, {}, text, progress)
    predicted = [len(window) - 1 for window in text.windows]
    blocks = token_blocks(predicted, block_size(predicted))
    lines: list[VariantAccuracy] = []
    found: TokenDistances | None = None
    for variant in variants:
        own = _run_to_head(variant.title, variant.graph_module, variant.weights, variant.replaced, text, progress)
        with progress.step(f"compare {variant.title}", len(blocks)) as advance:
            found = _compare(reference, ([logits] for logits in own.logits()), text, advance)
        _require_numbers(found, variant.title)
        lines.append(_line(variant.part, variant.title, variant.remedy, found, blocks, before=lines))
    found = _compare_artifact(reference, artifact, text, progress)
    lines.append(_line("runtime", artifact.title, artifact.remedy, found, blocks, before=lines))
    return CheckpointComparison(
        bound=bound,
        perplexity=perplexity_of(found.reference_nll),
        tokens=len(blocks),
        text=text.source,
        lines=tuple(lines),
    )


def _run_to_head(
    title: str,
    graph_module: GraphModule,
    weights: WeightSource,
    replaced: Replaced,
    text: ComparedText,
    progress: Progress,
) -> _Head:
    """Run all segments of a graph but the last, and return the last with the live values before it."""
    *before, last = split_layers(graph_module)
    states = new_states(graph_module, text.inputs)
    with progress.step(title, sum(map(len, text.inputs)) * len(before)) as advance:
        for segment in before:
            run_segment(segment, weights, states, advance=advance, replace=replaced)
    return _Head(last, weights, states, replaced)


def _compare_artifact(
    reference: _Head, artifact: ComparedArtifact, text: ComparedText, progress: Progress
) -> TokenDistances:
    total = sum(map(len, text.inputs))
    with load(artifact.folder) as engine, progress.step("compare the artifact", total) as advance:
        chunks = (_read(engine, ids, artifact.by_decode) for ids in text.inputs)
        found = _compare(reference, chunks, text, advance)
        if np.isnan(found.nll).any():
            raise no_scores("contain NaN", engine.overflow())
    return found


def _read(engine: Engine, ids: Sequence[int], by_decode: bool) -> Iterator[Tensor]:
    """Yield the logits of an artifact that reads one window, chunk by chunk or token by token."""
    engine.reset()
    tokens = [int(token) for token in ids]
    yield from map(torch.from_numpy, decoded(engine, tokens) if by_decode else engine.score(tokens))


def _compare(
    reference: _Head, windows: Iterable[Iterable[Tensor]], text: ComparedText, advance: Advance
) -> TokenDistances:
    """Return the distances from the checkpoint's logits, of logits that come window by window, each in chunks."""
    parts = []
    for expected, chunks, targets in zip(reference.logits(), windows, text.targets, strict=True):
        seen = 0
        for logits in chunks:
            rows = slice(seen, seen + len(logits))
            parts.append(measure_tokens(expected[rows], logits, targets[rows]))
            seen += len(logits)
            advance(len(logits))
    return join_tokens(parts)


def _require_numbers(found: TokenDistances, title: str) -> None:
    """Raise `UnsupportedModelError` where the logits of a streamed graph are not numbers."""
    for values, name in ((found.reference_nll, "the checkpoint"), (found.nll, title)):
        if np.isnan(values).any():
            raise UnsupportedModelError(f"the logits of {name} contain NaN on held-out text: its weights are broken")


def _line(
    part: str,
    title: str,
    remedy: str,
    found: TokenDistances,
    blocks: NDArray[np.int64],
    before: Sequence[VariantAccuracy],
) -> VariantAccuracy:
    """Return the line of one variant; `before` are the lines before it."""
    change = estimate_mean(found.nll - found.reference_nll, blocks).map(_relative_change)
    kl = estimate_mean(found.kl, blocks).map(_not_negative)
    last = before[-1] if before else None
    return VariantAccuracy(
        part=part,
        title=title,
        remedy=remedy,
        perplexity=perplexity_of(found.nll),
        relative_change=change,
        kl=kl,
        same_top=float(found.same_top.mean()),
        added_change=change.value - (0.0 if last is None else last.relative_change.value),
        added_kl=kl.value - (0.0 if last is None else last.kl.value),
    )


def _relative_change(log_ratio: float) -> float:
    return float(np.expm1(log_ratio))


def _not_negative(value: float) -> float:
    return max(value, 0.0)
