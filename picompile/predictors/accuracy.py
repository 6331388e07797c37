"""The accuracy check: what predictors cost a model in perplexity, and which layers lose most."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile.intervals import Estimate, block_size, estimate_mean, token_blocks
from picompile.predictors.firing import FiringRule
from picompile.progress import Advance, NoProgress, Progress
from picompile.streaming import stream_windows
from picompile_passes.dialect.neurons import neuron_rms
from picompile_passes.dialect.sparse_ffn import SparseFfnOperands
from picompile_passes.graph.materialize import WeightSource
from picompile_passes.graph.nodes import arguments, calls, is_call
from picompile_passes.graph.operands import DIVIDE_BY_RMS, SPARSE_FFN
from picompile_passes.predictors import predictor_kind
from picompile_runtime import Engine, load
from picompile_runtime.bench.perplexity import Perplexity, Reading, token_losses

# The layers that are named make this share of the missed energy.
_WORST_SHARE = 0.8


def rank_layers_by_error(missed: Mapping[int, float]) -> list[int]:
    """Return the layers with the largest shares of all missed energy, the worst first, without those that miss none.

    `missed` is each layer's missed energy, as `picompile.predictors.accuracy` measures it.
    """
    whole, seen, found = sum(missed.values()), 0.0, []
    for layer, energy in sorted(missed.items(), key=lambda entry: (-entry[1], entry[0])):
        if energy <= 0 or seen >= _WORST_SHARE * whole:
            break
        found.append(layer)
        seen += energy
    return found


def first_windows(windows: Sequence[Sequence[int]], tokens: int, longest: int | None = None) -> list[Sequence[int]]:
    """Return the first `tokens` ids at most, in windows of `longest` ids at most and of 2 at least.

    The first id of a window is given and the others are predicted: one alone tells nothing.
    """
    kept: list[Sequence[int]] = []
    room = tokens
    for window in windows:
        step = longest or len(window)
        for start in range(0, len(window), step or 1):
            piece = window[start : min(start + step, start + room)]
            if len(piece) >= 2:
                kept.append(piece)
                room -= len(piece)
    return kept


# How well the predictors of a graph tell which neurons fire, layer by layer, on real text.
#
# | figure | of all tokens |
# | --- | --- |
# | recall | firing neurons that are computed / firing neurons |
# | weighted recall | the same, each firing weighted by its contribution, magnitude of h times length of the down row |
# | precision | firing neurons that are computed / computed neurons |
# | missed energy | squared length of what the left-out neurons would have added / that of the whole block's output |


@dataclass(frozen=True)
class LayerAccuracy:
    """The accuracy of one layer's predictor.

    Shares are of the layer's neurons, of experts of those of chosen ones, per token; `rank` is None but for learned
    kinds. A neuron that its limits leave out does not count as computed.
    """

    layer: int
    kind: str
    rank: int | None
    recall: float
    weighted_recall: float
    precision: float
    firing_share: float
    computed_share: float
    missed_energy: float


def measure_layers(
    graph_module: GraphModule,
    weights: WeightSource,
    windows: Sequence[Sequence[int]],
    rules: Mapping[int, FiringRule] | None = None,
    progress: Progress | None = None,
) -> list[LayerAccuracy]:
    """Return how well each layer's mask knows its neurons, on `windows` of token ids.

    `graph_module` is of the predicted stage.

    `rules` says which neurons of a layer fire; where it names none, those whose output is not zero. Every layer sees
    what the predictors before it have left, as it does when the artifact generates.
    """
    blocks = [_Block(node, (rules or {}).get(node.meta["layer"], FiringRule())) for node in _blocks(graph_module)]
    measured = {block.node: block.compute for block in blocks}
    stream_windows(graph_module, weights, windows, progress=progress, nodes=tuple(measured), replace=measured)
    return [block.accuracy() for block in blocks]


def _blocks(graph_module: GraphModule) -> list[Node]:
    return list(calls(graph_module.graph, SPARSE_FFN))


class _Block:
    """Computes a block in place of its operator, and gathers its sums over the windows."""

    def __init__(self, node: Node, rule: FiringRule) -> None:
        self.node, self.rule = node, rule
        self._predictor = arguments(arguments(node)["mask"])
        division = next((user for user in node.users if is_call(user, DIVIDE_BY_RMS)), None)
        self._norm_eps = None if division is None else float(arguments(division)["eps"])
        self._sums = torch.zeros(8, dtype=torch.float64)

    def compute(self, *operands: Any, **named: Any) -> Tensor:
        """Return y of a window, given the operands of its `sparse_ffn`."""
        block = SparseFfnOperands(*operands, **named)
        activated, raised = block.factors()
        kept = block.keep(activated, raised)
        y = block.result(kept)
        self._count(block, activated if raised is None else activated * raised, kept)
        return y

    def _count(self, block: SparseFfnOperands, hidden: Tensor, kept: Tensor) -> None:
        gains, neurons = block.neuron_gains(), float(block.mask.numel())
        has_limits = block.gate_limits is not None or block.output_limits is not None
        mask = block.mask & (kept != 0) if has_limits else block.mask
        if gains is not None:
            # Neurons of experts that are not chosen are no neurons of the token.
            mask, neurons = mask & (gains != 0), float((gains != 0).sum())
        lengths, magnitude = block.down.norm(dim=1), (hidden if gains is None else hidden * gains).abs()
        fired = self.rule.fires(magnitude, lengths)
        if self._norm_eps is not None:
            rms = neuron_rms(hidden, self._norm_eps)
            hidden, magnitude = hidden / rms, magnitude / rms
        contribution = magnitude * fired * lengths
        times_down = block._replace(down_bias=None, expert_bias=None, squares=False).result
        self._sums += torch.stack(
            [
                fired.sum(),
                mask.sum(),
                (fired & mask).sum(),
                contribution.sum(),
                (contribution * mask).sum(),
                times_down(torch.where(mask, 0.0, hidden)).square().sum(),
                times_down(hidden).square().sum(),
                torch.tensor(neurons),
            ]
        ).double()

    def accuracy(self) -> LayerAccuracy:
        fired, computed, both, contribution, kept, missed, whole, neurons = self._sums.tolist()
        kind = self._predictor["kind"]
        rank = int(self._predictor["weights"][0].meta["val"].shape[0]) if predictor_kind(kind).has_rank else None
        return LayerAccuracy(
            layer=self.node.meta["layer"],
            kind=kind,
            rank=rank,
            recall=both / fired if fired else 1.0,
            weighted_recall=kept / contribution if contribution else 1.0,
            precision=both / computed if computed else 1.0,
            firing_share=fired / neurons,
            computed_share=computed / neurons,
            missed_energy=missed / whole if whole else 0.0,
        )


# The accuracy check: one artifact reads one text with every neuron, and again as it generates.

Losses = NDArray[np.float64]
IsClear = Callable[[Sequence[Losses]], bool]


@dataclass(frozen=True)
class AccuracyResult:
    """Perplexity of an artifact with every neuron (`dense`) and with its predictors, over `tokens` predicted tokens.

    `change` is the share by which the predictors raise it, with its 95 % confidence interval, None where the figures
    are not of single tokens.
    """

    dense_perplexity: float
    perplexity: float
    tokens: int
    change: Estimate | None = None

    @property
    def interval(self) -> list[float | None] | None:
        """The two ends of the change's 95 % confidence interval, None where there is none."""
        return None if self.change is None else [self.change.low, self.change.high]

    @property
    def relative_change(self) -> float:
        """The share by which the predictors raise the perplexity; negative where they lower it."""
        return self.perplexity / self.dense_perplexity - 1

    def is_above(self, bound: float) -> bool:
        """Return whether the whole confidence interval lies above `bound`; False without an interval."""
        return self.change is not None and self.change.low is not None and self.change.low > bound


@dataclass(frozen=True)
class AccuracyReport:
    """The result of an accuracy check.

    `bound` is the share by which perplexity may rise, None for any. `text` says where the text came from that was read,
    and `layers` how well each layer's predictor knows its neurons.
    """

    bound: float | None
    result: AccuracyResult
    text: str
    layers: tuple[LayerAccuracy, ...]

    @property
    def met(self) -> bool:
        """Whether perplexity is within the bound; a perplexity that is not a number is not."""
        return self.bound is None or self.result.relative_change <= self.bound

    @property
    def worst_layers(self) -> list[int]:
        """The layers with the largest shares of all missed energy, the worst first."""
        return rank_layers_by_error({layer.layer: layer.missed_energy for layer in self.layers})

    @property
    def refusal(self) -> str:
        """The message for an artifact that does not meet its bound."""
        recalls = {layer.layer: layer.weighted_recall for layer in self.layers}
        named = ", ".join(f"{layer} (recall by contribution {recalls[layer]:.2%})" for layer in self.worst_layers[:4])
        change, bound = 100 * self.result.relative_change, 100 * (self.bound or 0)
        return (
            f"the predictors raise the perplexity by {change:.3g} %, more than {bound:.3g} %; most is missed "
            f"in layers {named or 'none'}; train larger ones, or allow more with --accuracy-bound"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the artifact's report."""
        return {
            "bound": self.bound,
            "dense_perplexity": self.result.dense_perplexity,
            "perplexity": self.result.perplexity,
            "relative_change": self.result.relative_change,
            "interval": self.result.interval,
            "tokens": self.result.tokens,
            "text": self.text,
            "layers": [asdict(layer) for layer in self.layers],
        }


def check_artifact(
    artifact: Path,
    windows: Sequence[Sequence[int]],
    threads: int | None = None,
    progress: Progress | None = None,
    bound: float | None = None,
) -> AccuracyResult:
    """Return the perplexity of `artifact` on `windows` of token ids with every neuron, and with its predictors.

    Every neuron is read in chunks. So are predicted ones where the program can: several times as fast as token by
    token, and in the same arithmetic, so that the difference is that of the neurons alone. Where that raises the
    perplexity by more than `bound`, or the program cannot, they are read token by token, as text is generated. Chunks
    end where the interval of what is read so far lies above `bound`.

    No window may be longer than the context and one. Raises what the runtime raises.
    """
    progress = progress or NoProgress()
    lengths = [len(window) - 1 for window in windows]
    with load(artifact, threads) as engine:

        def read(title: str, reading: Reading, is_clear: IsClear = lambda losses: False) -> list[Losses]:
            with progress.step(f"accuracy check, {title}", sum(lengths)) as advance:
                return read_windows(engine, windows, reading, advance, is_clear)

        dense = read("every neuron", "chunks")

        def is_beyond(losses: Sequence[Losses]) -> bool:
            return bound is not None and compare_readings(dense, losses).is_above(bound)

        if engine.scores_masked:
            result = compare_readings(dense, read("predicted neurons", "masked chunks", is_beyond))
            if bound is None or result.relative_change <= bound:
                return result
        return compare_readings(dense, read("predicted neurons, as generated", "tokens"))


def read_windows(
    engine: Engine,
    windows: Sequence[Sequence[int]],
    reading: Reading,
    advance: Advance,
    is_clear: IsClear = lambda losses: False,
) -> list[Losses]:
    """Return the losses of each window, in nats, float64 [predicted tokens]; `advance` counts these.

    The last window is the first behind which `is_clear` returns True for the losses so far.
    """
    losses: list[Losses] = []
    for window in windows:
        losses.append(token_losses(engine, window, reading))
        advance(len(window) - 1)
        if is_clear(losses):
            break
    return losses


def compare_readings(dense: Sequence[Losses], other: Sequence[Losses]) -> AccuracyResult:
    """Return the perplexities of two readings of the windows that `other` has, given each token's loss."""
    lengths = [len(losses) for losses in other]
    before, after = np.concatenate(dense[: len(other)]), np.concatenate(other)
    perplexities = [Perplexity(float(losses.sum()), len(losses)).perplexity for losses in (before, after)]
    change = estimate_mean(after - before, token_blocks(lengths, block_size(lengths))).map(math.expm1)
    return AccuracyResult(perplexities[0], perplexities[1], len(after), change)
