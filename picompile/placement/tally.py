"""The tensors of a lowered graph, each in the place it counts for.

Every packed tensor belongs to the first call of the decode function that reads it, and calls belong to layers by their
place: what is behind the feed-forward block of one layer, up to and with that of the next, is the next one's.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from picompile.placement.launches import count_launches
from picompile.placement.model_bytes import LayerBytes, ModelBytes

if TYPE_CHECKING:
    from picompile.placement.counting import Packing
    from picompile_codegen.lower import Lowered
    from picompile_codegen.program import Program

_ELEMENT_BYTES = 4
_MATRICES = ("decide_w", "neuron_w", "signs")
_BIASES = ("gate_bias", "up_bias")


class Reader(NamedTuple):
    """The first call that reads a tensor: its place, what it does, and what the tensor is to it."""

    place: int
    op: str
    parameter: str


class Tally:
    """Counts a lowered graph."""

    def __init__(self, lowered: "Lowered", packing: "Packing") -> None:
        from picompile_codegen.program import tensor_bytes

        self._program, self._packing = lowered.program, packing
        self._launches, self._head_launches = count_launches(lowered, packing.batch)
        self._decode = lowered.program.functions["decode"]
        parameters = {kernel.name: kernel.params for kernel in lowered.kernels}
        self._readers: dict[str, Reader] = {}
        for place, call in enumerate(self._decode):
            for parameter, argument in zip(parameters[call.kernel], call.args, strict=True):
                if argument.space != "buffer":
                    reader = Reader(place, call.op, parameter.partition(".")[0])
                    self._readers.setdefault(argument.name, reader)
        self._sizes = {name: tensor_bytes(each.dtype, each.shape) for name, each in lowered.weights.tensors.items()}
        self._ends = [place for place, call in enumerate(self._decode) if call.op == "ffn"]
        attentions = [place for place, call in enumerate(self._decode) if call.op == "attention"]
        self._ends[-1] = max(self._ends[-1], attentions[-1])
        heads = [call for call in self._decode if call.op == "head"]
        self._head = {argument.name for call in heads for argument in call.args if argument.space == "weight"}

    def model(self, name: str, hidden: int, parameters: int) -> ModelBytes:
        """All bytes, with what the program does not say of the model."""
        apart: Counter[str] = Counter()
        layers: list[dict[str, int]] = [{} for _ in self._ends]
        for tensor, size in self._sizes.items():
            where = self._apart(tensor)
            if where is not None:
                apart[where] += size
            else:
                layers[self._layer(tensor)][tensor] = size
        read = {tensor for tensor, reader in self._readers.items() if reader.op == "embedding"}
        return ModelBytes(
            name=name,
            quant=self._packing.quant,
            predictor="+".join(sorted({part.predictor for part in self._program.ffn})),
            context=self._packing.context,
            batch=self._packing.batch,
            hidden=hidden,
            parameters=parameters,
            layers=tuple(self._one(number, sizes) for number, sizes in enumerate(layers)),
            embedding_bytes=apart["embedding"],
            head_bytes=apart["head"],
            tied=bool(read & self._head),
            table_bytes=apart["table"],
            workspace_bytes=_workspace_bytes(self._program, self._packing.batch),
            head_launches=self._head_launches,
        )

    def _layer(self, name: str) -> int:
        return bisect_left(self._ends, self._readers[name].place)

    def _apart(self, tensor: str) -> str | None:
        """What a tensor belongs to that is of no layer: `embedding`, `head` or `table`."""
        if tensor in self._head:
            return "head"
        reader = self._readers.get(tensor)
        # Tables of angles and thresholds of predictors are numbers that layers share.
        if reader is None or reader.parameter in ("cos", "sin", "threshold", "most"):
            return "table"
        if reader.op == "embedding":
            return "embedding"
        if reader.place > self._ends[-1]:
            return "head" if reader.op == "linear" else "table"
        return None

    def _one(self, number: int, sizes: Mapping[str, int]) -> LayerBytes:
        from picompile_codegen.program import tensor_bytes
        from picompile_passes.predictors import predictor_kind

        part = self._program.ffn[number]
        block = {tensor for tensor in sizes if self._readers[tensor].op == "ffn"}
        predict = {tensor for tensor in sizes if self._readers[tensor].op == "predict"}
        rows = {
            self._readers[tensor].parameter: sizes[tensor] // part.neurons for tensor in self._rows(block | predict)
        }
        biases = sum(_ELEMENT_BYTES for tensor in block if self._readers[tensor].parameter in _BIASES)
        neuron_bytes = sum(rows.values()) + biases
        deciding = {
            "exact": rows.get("decide_w", 0) + min(biases, _ELEMENT_BYTES),
            "sign": rows.get("signs", 0),
            "none": neuron_bytes,
        }
        of_neurons = block | self._rows(predict)
        caches = {name: tensor for name, tensor in self._program.state.items() if self._layer(name) == number}
        return LayerBytes(
            attention_bytes=sum(size for tensor, size in sizes.items() if tensor not in block | predict),
            predictor_bytes=sum(sizes[tensor] for tensor in predict - of_neurons),
            neurons=part.neurons,
            neuron_bytes=neuron_bytes,
            deciding_bytes=deciding.get(part.predictor, 0),
            shared_bytes=sum(sizes[tensor] for tensor in of_neurons) - part.neurons * neuron_bytes,
            kv_cache_bytes=self._packing.batch * sum(tensor_bytes(each.dtype, each.shape) for each in caches.values()),
            launches=self._launches[number],
            number_bytes=0 if predictor_kind(part.predictor).row_local else _ELEMENT_BYTES,
        )

    def _rows(self, tensors: set[str]) -> set[str]:
        """Those that have rows for each neuron."""
        return {tensor for tensor in tensors if self._readers[tensor].parameter in _MATRICES}


def _workspace_bytes(program: "Program", batch: int) -> int:
    from picompile_codegen.plan_buffers import align

    spans = list(_spans(program))
    of_token = align(max(end for _, end in spans)) - min(start for start, _ in spans)
    return program.arena_bytes + (batch - 1) * (of_token + align(_ELEMENT_BYTES * program.vocab))


def _spans(program: "Program") -> Iterator[tuple[int, int]]:
    """Where in the arena the activations of one token lie."""
    from picompile_codegen.program import tensor_bytes

    for name, buffer in program.buffers.items():
        if name.startswith("decode."):
            start = buffer.offset or 0
            yield start, start + tensor_bytes(buffer.dtype, buffer.shape)
