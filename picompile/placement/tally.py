"""Tally a program: which bytes and launches belong to which layer, to the embedding, to the output head.

Every packed tensor belongs to the first call of a decoded token that reads it. Calls belong to layers by their order: a
layer begins behind the feed-forward block of the layer before and ends with its own.

A program to tally (`TalliedProgram`) comes from a graph that is lowered as for an artifact (`counting.py`), or from the
numbers of a config.json alone (`shape_graph.py`).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from picompile.placement.launches import TalliedCall, count_launches, layer_ends
from picompile.placement.model_bytes import LayerBytes, LayerLaunches, ModelBytes, Packing

_ELEMENT_BYTES = 4
_MATRICES = ("decide_w", "neuron_w", "signs")
_BIASES = ("gate_bias", "up_bias")
_LIMITS = ("gate_limits", "output_limits")
# Tables of angles and thresholds of predictors are numbers that layers share.
_TABLES = ("cos", "sin", "threshold", "most")


@dataclass(frozen=True)
class TalliedBlock:
    """One feed-forward block. `row_local` says that its predictor only needs the rows of the neurons in question."""

    neurons: int
    predictor: str
    row_local: bool


@dataclass(frozen=True)
class TalliedProgram:
    """The parts of a program that are tallied: the calls of a decoded token, and the bytes of everything it has.

    `weight_bytes` and `cache_bytes` are by tensor; the caches are those of one sequence. `workspace_bytes` are the
    activations and logits of all sequences. `top_logits_launches` are for finding the top logits.
    """

    calls: tuple[TalliedCall, ...]
    weight_bytes: Mapping[str, int]
    cache_bytes: Mapping[str, int]
    blocks: tuple[TalliedBlock, ...]
    workspace_bytes: int
    top_logits_launches: int


def tally(program: TalliedProgram, packing: Packing, name: str, hidden: int, parameters: int) -> ModelBytes:
    """Return all bytes and launches of `program` by the part of the model that they belong to.

    `name`, `hidden` (elements of the residual stream) and `parameters` are facts of the model that a program lacks.
    """
    return _Tally(program, packing).model(name, hidden, parameters)


class _Reader(NamedTuple):
    """The first call that reads a tensor: its place in the order of calls, its operator, and the parameter."""

    place: int
    op: str
    parameter: str


class _Tally:
    def __init__(self, program: TalliedProgram, packing: Packing) -> None:
        self._program, self._packing, self._calls = program, packing, program.calls
        self._readers: dict[str, _Reader] = {}
        for place, call in enumerate(self._calls):
            for parameter, tensor in call.tensors.items():
                self._readers.setdefault(tensor, _Reader(place, call.op, parameter))
        self._ends = layer_ends(self._calls)
        self._head = {tensor for call in self._calls if call.op == "head" for tensor in call.tensors.values()}

    def model(self, name: str, hidden: int, parameters: int) -> ModelBytes:
        apart: Counter[str] = Counter()
        layers: list[dict[str, int]] = [{} for _ in self._ends]
        for tensor, size in self._program.weight_bytes.items():
            where = self._apart(tensor)
            if where is not None:
                apart[where] += size
            else:
                layers[self._layer(tensor)][tensor] = size
        embeddings = {tensor for tensor, reader in self._readers.items() if reader.op == "embedding"}
        launches, head_launches = count_launches(self._calls, self._program.weight_bytes, self._packing.batch)
        return ModelBytes(
            name=name,
            quant=self._packing.quant,
            predictor="+".join(sorted({block.predictor for block in self._program.blocks})),
            context=self._packing.context,
            batch=self._packing.batch,
            hidden=hidden,
            parameters=parameters,
            layers=tuple(self._one(number, sizes, launches[number]) for number, sizes in enumerate(layers)),
            embedding_bytes=apart["embedding"],
            head_bytes=apart["head"],
            tied=bool(embeddings & self._head),
            table_bytes=apart["table"],
            workspace_bytes=self._program.workspace_bytes,
            head_launches=head_launches + self._program.top_logits_launches,
            chunk=self._packing.chunk,
            predictor_quant=self._packing.predictor_quant,
        )

    def _layer(self, tensor: str) -> int:
        return bisect_left(self._ends, self._readers[tensor].place)

    def _apart(self, tensor: str) -> str | None:
        """Return what a tensor outside of all layers belongs to: `embedding`, `head` or `table`; None in a layer."""
        if tensor in self._head:
            return "head"
        reader = self._readers.get(tensor)
        if reader is None or reader.parameter in _TABLES:
            return "table"
        if reader.op == "embedding":
            return "embedding"
        if reader.place > self._ends[-1]:
            return "head" if reader.op == "linear" else "table"
        return None

    def _one(self, number: int, sizes: Mapping[str, int], launches: LayerLaunches) -> LayerBytes:
        block = self._program.blocks[number]
        of_ffn = {tensor for tensor in sizes if self._readers[tensor].op == "ffn"}
        of_predictor = {tensor for tensor in sizes if self._readers[tensor].op == "predict"}
        rows = {
            self._readers[tensor].parameter: sizes[tensor] // block.neurons
            for tensor in self._rows(of_ffn | of_predictor)
        }
        numbers = [self._readers[tensor].parameter for tensor in of_ffn]
        biases = _ELEMENT_BYTES * sum(parameter in _BIASES for parameter in numbers)
        neuron_bytes = sum(rows.values()) + biases + _ELEMENT_BYTES * sum(parameter in _LIMITS for parameter in numbers)
        of_gate = min(biases, _ELEMENT_BYTES) + _ELEMENT_BYTES * ("gate_limits" in numbers)
        gating_bytes = {
            "exact": rows.get("decide_w", 0) + of_gate,
            "sign": rows.get("signs", 0),
            "none": neuron_bytes,
        }
        of_neurons = of_ffn | self._rows(of_predictor)
        caches = [size for tensor, size in self._program.cache_bytes.items() if self._layer(tensor) == number]
        return LayerBytes(
            attention_bytes=sum(size for tensor, size in sizes.items() if tensor not in of_ffn | of_predictor),
            predictor_bytes=sum(sizes[tensor] for tensor in of_predictor - of_neurons),
            neurons=block.neurons,
            neuron_bytes=neuron_bytes,
            # A gate with limits decides as `exact` does, whatever the predictor is called.
            gating_bytes=gating_bytes.get("exact" if "decide_w" in rows else block.predictor, 0),
            shared_bytes=sum(sizes[tensor] for tensor in of_neurons) - block.neurons * neuron_bytes,
            kv_cache_bytes=self._packing.batch * sum(caches),
            launches=launches,
            number_bytes=0 if block.row_local else _ELEMENT_BYTES,
        )

    def _rows(self, tensors: set[str]) -> set[str]:
        """Return the tensors that have rows for each neuron."""
        return {tensor for tensor in tensors if self._readers[tensor].parameter in _MATRICES}
