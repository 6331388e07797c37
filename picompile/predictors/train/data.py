"""The samples of one layer, their firing labels, and the trade-off curve of a predictor measured with them."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile.predictors.firing import FiringRule
from picompile.predictors.profile.files import read_tensors, write_tensors
from picompile_passes.dialect.activations import parse_activation
from picompile_passes.dialect.neurons import neuron_gains, neuron_outputs, neuron_rms
from picompile_passes.graph.materialize import WeightSource, evaluate_constant
from picompile_passes.graph.nodes import arguments, calls, is_call
from picompile_passes.graph.operands import FFN, LAYER_NORM, NEURON_ROWS, RMS_NORM


@dataclass(frozen=True)
class Norm:
    """The norm before a block: `op` is `rms_norm` or `layer_norm`; weight and bias [D] where it has them."""

    op: str
    eps: float
    weight: Tensor | None
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Return x float32 [tokens, hidden] normalized by the model's own operator."""
        if self.op == "rms_norm":
            normed: Tensor = torch.ops.picompile.rms_norm(x, self.weight, self.eps)
        else:
            normed = torch.ops.picompile.layer_norm(x, self.weight, self.bias, self.eps)
        return normed


@dataclass(frozen=True)
class Samples:
    """The inputs of a block, or of the norm before it, on sampled tokens: float16 [samples, hidden], and that norm."""

    values: Tensor
    norm: Norm | None

    def __len__(self) -> int:
        return len(self.values)

    def stream(self, rows: slice | Tensor) -> Tensor:
        """Return the inputs of the norm, in float32."""
        return self.values[rows].float()

    def block(self, rows: slice | Tensor) -> Tensor:
        """Return the inputs of the block, in float32."""
        x = self.stream(rows)
        return x if self.norm is None else self.norm(x)


@dataclass(frozen=True)
class LayerData:
    """The weights and samples of one layer.

    `previous` are the samples of the layer before on the same tokens, or None if they are not wanted. gate, up and down
    are float32 [neurons, hidden], biases [neurons]. `rule` says which neurons fire. `norm_eps` is that of a norm across
    the neurons, if there is one. `gains` float16 [samples, experts] are those of a block of experts, whose neurons do
    not fire, and are not predicted, where their expert is not chosen.
    """

    layer: int
    samples: Samples
    previous: Samples | None
    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    activation: str
    up_activation: str
    rule: FiringRule
    norm_eps: float | None = None
    gains: Tensor | None = None

    @property
    def neurons(self) -> int:
        """The number of neurons of the block."""
        return int(self.up.shape[0])

    @property
    def hidden(self) -> int:
        """The hidden size of the model."""
        return int(self.up.shape[1])

    @property
    def neuron_parameters(self) -> int:
        """The number of weights that one computed neuron reads."""
        return self.hidden * (1 if self.gate is None else 2) + int(self.down.shape[1])

    @property
    def gating(self) -> tuple[Tensor, Tensor | None]:
        """The matrix whose sign decides [F, D], and its bias: the gate's, or up's where there is no gate."""
        return (self.up, self.up_bias) if self.gate is None else (self.gate, self.gate_bias)

    @property
    def silent_at(self) -> float | None:
        """The output of the gating matrix at or below which a neuron is silent; None if no neuron ever is."""
        activation = parse_activation(self.activation)
        return activation.threshold if activation.sparse else None

    @property
    def one_sided(self) -> bool:
        """Whether the gating matrix alone determines which neurons fire."""
        other = self.gate is not None and parse_activation(self.up_activation).sparse
        return self.silent_at is not None and not other and self.rule.threshold == 0

    @property
    def chosen_share(self) -> float:
        """The share of the neurons that a sample's experts have; 1 for a block without experts."""
        return 1.0 if self.gains is None else float((self.gains != 0).float().mean())

    def gains_of(self, rows: slice | Tensor) -> Tensor | None:
        """Return the gains of the neurons' experts, float32 [rows, neurons]; None for a block without experts."""
        return None if self.gains is None else neuron_gains(self.gains[rows].float(), self.neurons)

    def candidates(self, rows: slice | Tensor) -> Tensor | None:
        """Return which neurons there are to predict: bool [rows, neurons], those of chosen experts; None for all."""
        gains = self.gains_of(rows)
        return None if gains is None else gains != 0

    def of_candidates(self, rows: slice, *values: Tensor) -> tuple[Tensor, ...]:
        """Return values [rows, neurons] of the `candidates`: flat, if these are not all."""
        candidates = self.candidates(rows)
        return values if candidates is None else tuple(value[candidates] for value in values)

    def inputs(self, name: str, rows: slice | Tensor) -> Tensor:
        """Return the inputs of a predictor that reads `name`: float32 [rows, hidden]."""
        if name == "previous":
            if self.previous is None:
                raise ValueError(f"layer {self.layer} has no samples of the layer before")
            return self.previous.block(rows)
        return self.samples.stream(rows) if name == "stream" else self.samples.block(rows)

    @property
    def input_choices(self) -> tuple[str, ...]:
        """The inputs that predictors of this layer can read."""
        stream = () if self.samples.norm is None else ("stream",)
        return ("block", *stream, *(() if self.previous is None else ("previous",)))

    def outputs(self, x: Tensor) -> Tensor:
        """Return the output of each neuron before the down projection: x [tokens, hidden] → [tokens, neurons]."""
        weights = (self.gate, self.up, self.gate_bias, self.up_bias)
        return neuron_outputs(x, *weights, self.activation, self.up_activation)


def find_blocks(graph_module: GraphModule) -> dict[int, Node]:
    """Return the feed-forward blocks of a canonical graph by layer."""
    return {int(block.meta["layer"]): block for block in calls(graph_module.graph, FFN)}


def layer_data(
    graph_module: GraphModule,
    weights: WeightSource,
    layer: int,
    samples: Mapping[int, tuple[Tensor, str]],
    rule: FiringRule,
    gains: Tensor | None = None,
) -> LayerData:
    """Gather the data of a layer.

    `samples` has, for this layer and for the one before if wanted, the sampled inputs and what they are inputs of:
    `stream` (of the norm) or `block`. `gains` are those of these samples, of a block of experts.
    """
    blocks = find_blocks(graph_module)
    values = arguments(blocks[layer])

    def constant(node: Node | None) -> Tensor | None:
        return None if node is None else evaluate_constant(graph_module, node, weights)

    def samples_of(number: int) -> Samples | None:
        if number not in samples:
            return None
        tensor, place = samples[number]
        return Samples(tensor, _norm(blocks[number], constant) if place == "stream" else None)

    own = samples_of(layer)
    if own is None:
        raise ValueError(f"no samples of layer {layer}")
    tensors: dict[str, Any] = {name: constant(values[name]) for name in NEURON_ROWS}
    return LayerData(
        layer=layer,
        samples=own,
        previous=samples_of(layer - 1),
        activation=str(values["activation"]),
        up_activation=str(values["up_activation"]),
        rule=rule,
        norm_eps=values["norm_eps"],
        gains=gains,
        **tensors,
    )


def reads_norm(block: Node) -> bool:
    """Return whether the input of a block comes from a norm."""
    return is_call(arguments(block)["x"], RMS_NORM, LAYER_NORM)


def _norm(block: Node, constant: Any) -> Norm:
    node = arguments(block)["x"]
    if not reads_norm(block):
        raise ValueError(f"what {block.name} reads is from no norm")
    values = arguments(node)
    op = "rms_norm" if is_call(node, RMS_NORM) else "layer_norm"
    return Norm(op, float(values["eps"]), constant(values["weight"]), constant(values.get("bias")))


def save_layer_data(path: Path, data: LayerData) -> None:
    """Write the data for a worker process."""
    tensors = {name: getattr(data, name) for name in (*NEURON_ROWS, "gains") if getattr(data, name) is not None}
    facts: dict[str, Any] = {name: getattr(data, name) for name in ("layer", "activation", "up_activation", "norm_eps")}
    facts["rule"] = asdict(data.rule)
    for name, samples in (("samples", data.samples), ("previous", data.previous)):
        if samples is None:
            continue
        tensors[name] = samples.values
        if samples.norm is not None:
            facts[f"{name}.norm"] = {"op": samples.norm.op, "eps": samples.norm.eps}
            parts = {"weight": samples.norm.weight, "bias": samples.norm.bias}
            tensors |= {f"{name}.norm.{part}": tensor for part, tensor in parts.items() if tensor is not None}
    write_tensors(path, tensors, {"facts": json.dumps(facts)})


def load_layer_data(path: Path) -> LayerData:
    """Read the data that `save_layer_data` wrote."""
    tensors, metadata = read_tensors(path)
    facts = json.loads(metadata["facts"])

    def samples(name: str) -> Samples | None:
        if name not in tensors:
            return None
        norm = facts.pop(f"{name}.norm", None)
        parts = [tensors.get(f"{name}.norm.{part}") for part in ("weight", "bias")]
        return Samples(tensors[name], None if norm is None else Norm(norm["op"], norm["eps"], *parts))

    read = {"samples": samples("samples"), "previous": samples("previous")}
    weights = {name: tensors.get(name) for name in (*NEURON_ROWS, "gains")}
    given: dict[str, Any] = {**facts, **read, **weights, "rule": FiringRule(**facts["rule"])}
    return LayerData(**{field.name: given[field.name] for field in fields(LayerData)})


# Firing labels of samples, and the trade-off curve of a predictor measured with them.


# Samples processed at a time: a float32 tensor of them takes 45 MB with 11,008 neurons.
ROWS = 1024

_SMALLEST, _LARGEST = 2.0**-14, 65504.0


@dataclass(frozen=True)
class FiringLabels:
    """Firing labels of the samples, and the contribution of each firing.

    `contribution` float16 [samples, neurons] is 0 where a neuron is silent, else |h| · ‖down row‖ in units of the
    layer's mean, with h times the gain of its expert, and as a norm across the neurons leaves it. `decided_share` is
    the share of neurons that the gating matrix alone does not silence on the samples `test`: the share that an exact
    predictor computes. Of experts it is a share of the neurons of those that are chosen.
    """

    contribution: Tensor
    decided_share: float


def measure_firing(data: LayerData, test: slice) -> FiringLabels:
    """Compute all neurons on all samples, `ROWS` samples at a time, and return their labels."""
    lengths = data.down.norm(dim=1)
    contribution = torch.empty(len(data.samples), data.neurons, dtype=torch.float16)
    decided, counted, unit = 0, 0, 0.0
    for start in range(0, len(contribution), ROWS):
        rows = slice(start, start + ROWS)
        x, gains = data.samples.block(rows), data.gains_of(rows)
        magnitude = data.outputs(x).abs_()
        if gains is not None:
            magnitude *= gains.abs()
        fires = data.rule.fires(magnitude, lengths)
        if data.norm_eps is not None:
            magnitude /= neuron_rms(magnitude, data.norm_eps)
        magnitude *= lengths
        # The first block sets the unit, so that float16 can hold contributions far from 1 in the model's own scale.
        unit = unit or _mean_magnitude(magnitude, fires)
        scaled = (magnitude / (unit or 1.0)).clamp_(_SMALLEST, _LARGEST)
        contribution[start : start + ROWS] = torch.where(fires, scaled, torch.zeros_like(scaled))
        if data.silent_at is not None:
            tested = slice(max(0, test.start - start), None)
            above = F.linear(x[tested], *data.gating) > data.silent_at
            counted += above.numel() if gains is None else int((gains[tested] != 0).sum())
            decided += int((above if gains is None else above & (gains[tested] != 0)).sum())
    return FiringLabels(contribution, decided / max(1, counted))


def _mean_magnitude(magnitude: Tensor, fires: Tensor) -> float:
    count = int(fires.sum())
    return float(magnitude[fires].double().mean()) if count else 0.0


_BINS = 4096
# Bins have equal width in score / (|score| + _BEND): narrow where thresholds lie, and unbounded at both ends.
_BEND = 8.0

# The recalls, weighted by contribution, at which reports show a curve.
_SHOWN_RECALLS = (0.9, 0.95, 0.97, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9965, 0.998, 0.999, 0.9995)


@dataclass(frozen=True)
class CurvePoint:
    """Figures of a predictor at one threshold. Shares refer to all neurons and tokens; of experts, to chosen ones."""

    threshold: float
    recall: float
    weighted_recall: float
    precision: float
    computed_share: float
    computed_ratio: float


@dataclass(frozen=True)
class RecallCurve:
    """The trade-off of a predictor: for each threshold, how many neurons it computes and how much it finds.

    Entry i of each tensor [bins] is about the neurons whose score is in bin i or higher: `computed` (int64) counts
    them, `fired` (int64) counts those that fire, `contribution` (float64) sums the contributions of these.
    """

    computed: Tensor
    fired: Tensor
    contribution: Tensor
    total: int

    @property
    def firing_share(self) -> float:
        """The share of all neurons and tokens that fires."""
        return int(self.fired[0]) / max(1, self.total)

    def at(self, weighted_recall: float) -> CurvePoint:
        """Return the point at the highest threshold that finds this share of the contribution.

        If none does, the point is at the lowest threshold, which finds everything.
        """
        found = self.contribution / self.contribution[0].clamp_min(1e-300)
        if float(self.contribution[0]) == 0:
            return self._point(_BINS - 1)
        reached = int((found >= weighted_recall).sum())
        return self._point(max(0, reached - 1))

    def _point(self, index: int) -> CurvePoint:
        computed, fired = int(self.computed[index]), int(self.fired[index])
        all_fired, whole = int(self.fired[0]), float(self.contribution[0])
        return CurvePoint(
            threshold=_lower_edge(index),
            recall=fired / all_fired if all_fired else 1.0,
            weighted_recall=float(self.contribution[index]) / whole if whole else 1.0,
            precision=fired / computed if computed else 1.0,
            computed_share=computed / max(1, self.total),
            computed_ratio=computed / all_fired if all_fired else float(computed > 0),
        )

    def shown(self) -> list[dict[str, Any]]:
        """Return points along the curve, for reports."""
        return [{name: _rounded(value) for name, value in vars(self.at(recall)).items()} for recall in _SHOWN_RECALLS]

    def tensors(self) -> dict[str, Tensor]:
        """Return the curve as the tensors that are stored."""
        total = torch.tensor([self.total])
        return {"computed": self.computed, "fired": self.fired, "found": self.contribution.float(), "total": total}

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor]) -> "RecallCurve":
        """Return the curve from the tensors that `tensors` returned."""
        found = tensors["found"].double()
        return cls(tensors["computed"], tensors["fired"], found, int(tensors["total"]))


def measure_curve(blocks: Iterator[tuple[Tensor, ...]]) -> RecallCurve:
    """Return the curve of a predictor.

    `blocks` are its scores (float32) and the contributions (float16), both [tokens, neurons] or flat, of held-out
    samples.
    """
    counts = torch.zeros(2, _BINS, dtype=torch.int64)
    contribution = torch.zeros(_BINS, dtype=torch.float64)
    for scores, block in blocks:
        bins, block = _bin(scores).flatten(), block.flatten().float()
        counts[0] += torch.bincount(bins, minlength=_BINS)
        fired = bins[block > 0]
        counts[1] += torch.bincount(fired, minlength=_BINS)
        contribution += torch.bincount(fired, weights=block[block > 0].double(), minlength=_BINS)
    above: Callable[[Tensor], Tensor] = lambda values: values.flip(0).cumsum(0).flip(0)  # noqa: E731
    whole = above(contribution)
    # In units of the whole, so that float32 can hold it.
    return RecallCurve(above(counts[0]), above(counts[1]), whole / whole[0].clamp_min(1e-300), int(counts[0].sum()))


def _bin(scores: Tensor) -> Tensor:
    bent = scores / (scores.abs() + _BEND)
    return ((bent + 1) * (_BINS / 2)).long().clamp_(0, _BINS - 1)


def _lower_edge(index: int) -> float:
    """Return the score at which bin `index` begins; for the first bin, a number below every score."""
    if index == 0:
        return -1e4
    bent = index * 2 / _BINS - 1
    return _BEND * bent / (1 - abs(bent))


def _rounded(value: float) -> float:
    return round(value, 6)
