"""The data that the training of one layer depends on: the block's weights, its norm, and the samples."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile.predictors.profile.files import read_tensors, write_tensors
from picompile_passes.dialect.activations import parse_activation
from picompile_passes.dialect.ops import neuron_outputs
from picompile_passes.graph.materialize import WeightSource, evaluate_constant
from picompile_passes.graph.nodes import arguments, calls, is_call
from picompile_passes.graph.operands import FFN, LAYER_NORM, RMS_NORM

_WEIGHTS = ("gate", "up", "down", "gate_bias", "up_bias")


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
    are float32 [neurons, hidden], biases [neurons]. A neuron fires where the magnitude of its output, before the down
    projection, is above `threshold`.
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
    threshold: float

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
        return self.silent_at is not None and not other and self.threshold == 0

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
    threshold: float,
) -> LayerData:
    """Gather the data of a layer.

    `samples` has, for this layer and for the one before if wanted, the sampled inputs and what they are inputs of:
    `stream` (of the norm) or `block`.
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
    tensors: dict[str, Any] = {name: constant(values[name]) for name in _WEIGHTS}
    return LayerData(
        layer=layer,
        samples=own,
        previous=samples_of(layer - 1),
        activation=str(values["activation"]),
        up_activation=str(values["up_activation"]),
        threshold=threshold,
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
    tensors = {name: getattr(data, name) for name in _WEIGHTS if getattr(data, name) is not None}
    facts: dict[str, Any] = {
        name: getattr(data, name) for name in ("layer", "activation", "up_activation", "threshold")
    }
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
    weights = {name: tensors.get(name) for name in _WEIGHTS}
    given: dict[str, Any] = {**facts, **read, **weights}
    return LayerData(**{field.name: given[field.name] for field in fields(LayerData)})
