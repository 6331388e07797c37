"""Bytes of a model as packed, by what reads them, and the launches that read them on a GPU."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from picompile.compile_options import MOST_SEQUENCES

if TYPE_CHECKING:
    from picompile.placement.counting import Packing
    from picompile.placement.times import Where
    from picompile_codegen.lowering.lower import Lowered
    from picompile_codegen.lowering.program import LoweredProgram, ProgramCall
    from picompile_codegen.specs import KernelSpec


@dataclass(frozen=True)
class LayerLaunches:
    """Launches of a layer's parts for a token, where they are on the GPU.

    `attention`: norms, projections and additions. `kv_cache`: attention itself, with rotation and writing the cache.
    `predictor`: what makes a mask. `hot`: the block's kernel, where any neuron is hot.
    """

    attention: int
    kv_cache: int
    predictor: int
    hot: int


@dataclass(frozen=True)
class LayerBytes:
    """One layer.

    `attention_bytes`: projections, their biases and the layer's norms, all read for every token. `neurons` rows of
    `neuron_bytes` each (gate, up, down and elements of biases), of which `deciding_bytes` are read whether or not the
    neuron fires: the gate row of `exact`, the bits of `sign`, all of it for `none`, nothing for a predictor with
    weights of its own, whose bytes are `predictor_bytes`, all read for every token. `shared_bytes` of the block belong
    to no neuron (the bias of down, and padding); where the block is split they go with the hot part. `kv_cache_bytes`
    at full context, for all sequences.

    `number_bytes` are what a neuron of a part takes besides: where a predictor makes one mask for both parts, each part
    has the numbers of its neurons. So a part of n neurons takes at most n · (`neuron_bytes` + `number_bytes`) +
    `SPLIT_BYTES` (of `counting`), the hot part `shared_bytes` more.
    """

    attention_bytes: int
    predictor_bytes: int
    neurons: int
    neuron_bytes: int
    deciding_bytes: int
    shared_bytes: int
    kv_cache_bytes: int
    launches: LayerLaunches
    number_bytes: int = 0

    @property
    def hot_launches(self) -> int:
        """Launches that hot neurons need: a predictor without weights of its own goes with them, as `sign` does."""
        return self.launches.hot + (0 if self.predictor_bytes else self.launches.predictor)


@dataclass(frozen=True)
class ModelBytes:
    """A whole model at one weight format, context and batch.

    `embedding_bytes` of which a token reads one row; `head_bytes` read in full for every token. Where they are one
    matrix (`tied`), it is counted as the head's and `embedding_bytes` is what is left (tables of positions).
    `table_bytes` are small tables that each device has for itself (rotary angles, the final norm, thresholds of
    predictors). `workspace_bytes` are activations and logits, on each device that computes. `hidden` in elements: what
    crosses between devices is float32 [hidden]. `head_launches` are those of the head on the GPU, with the final norm.
    """

    name: str
    quant: str
    predictor: str
    context: int
    batch: int
    hidden: int
    parameters: int
    layers: tuple[LayerBytes, ...]
    embedding_bytes: int
    head_bytes: int
    tied: bool
    table_bytes: int
    workspace_bytes: int
    head_launches: int


# Counts a token's launches on the GPU, on the CUDA kernels that lowering would make.
#
# `count_launches` takes the lowered graph that bytes are counted on, where every part is on one device, and has the
# CUDA
# twin of each kernel in `decode` written: that says how many launches it is. Nothing is compiled. What a layer needs
# more
# where it has parts on both devices depends on the placement: `exchange_launches`. `tests/placement/test_launches.py`
# holds both to graphs that are lowered for a GPU.
#
# A package's predictor whose kernel has no CUDA twin, which cannot be compiled for a GPU, counts as one launch. Three
# things are not counted: that OPT-350M's projection of embeddings crosses twice more; the further inputs of a step of
# several sequences; that a hot part of such a step, where no mask is made, may add up fewer slices than the whole
# block.


# The part of a layer that a call belongs to, as `Placement` of `picompile_codegen` places it.
_PARTS = {
    "norm": "attention",
    "linear": "attention",
    "add": "attention",
    "rotary": "kv_cache",
    "attention": "kv_cache",
    "predict": "predictor",
    "ffn": "hot",
}

# A kernel that sends and one that receives: both are in the time of an exchange (`Machine.crossing_s`).
CROSSING_LAUNCHES = 2
# Queries, keys and values go to a cache on the host, and what attention makes of them comes back.
_CACHE_LAUNCHES = 4


def count_launches(lowered: "Lowered", batch: int) -> tuple[tuple[LayerLaunches, ...], int]:
    """Count the launches of a token's calls, or of those of `batch` sequences together.

    Args:
        lowered: a graph lowered for the host alone.
        batch: sequences that are decoded together.

    Returns:
        Launches of each layer, and those of the head, with what makes the highest logits known to the host.
    """
    calls = lowered.program.functions["decode"]
    launches = _by_kernel(lowered, calls, batch)
    ends = _layer_ends(calls)
    first = next(place for place, call in enumerate(calls) if call.op == "attention")
    counts = [Counter[str]() for _ in range(len(ends) + 1)]
    for place, call in enumerate(calls):
        # Embeddings, and what is added to them before the first layer, are on the host.
        if call.op == "embedding" or (call.op == "add" and place < first):
            continue
        layer = sum(place > end for end in ends)
        counts[layer]["head" if layer == len(ends) else _PARTS[call.op]] += launches[call.kernel]
    layers = tuple(
        LayerLaunches(count["attention"], count["kv_cache"], count["predictor"], count["hot"]) for count in counts[:-1]
    )
    return layers, counts[-1]["head"] + _leading(lowered.program.vocab, batch)


def exchange_launches(layer: LayerBytes, where: "Where") -> tuple[int, int, int]:
    """Count the launches that a layer needs for having parts on both devices, with none, some and all neurons hot.

    They are made for every token, whether or not a cold neuron fires: what sends and receives, and the addition of the
    parts of a block, where that is on the GPU. A predictor is taken to read what the block reads.
    """
    masked_by_host = int(layer.predictor_bytes > 0 and not where.predictor_on_gpu)
    if not where.attention_on_gpu:
        # The block's input comes, and its mask where the host makes one; the result goes back.
        there = 2 + masked_by_host
        return 0, there, there
    cache = 0 if where.kv_cache_on_gpu else _CACHE_LAUNCHES
    # Input and mask go together, the result comes back, and is added to that of the hot neurons.
    none, some, every = 2, 3, 0
    if masked_by_host:
        # The input goes for the predictor even if no neuron is cold, and a mask comes for the hot ones.
        some, every = some + 1, 2
    return none + cache, some + cache, every + cache


def _by_kernel(lowered: "Lowered", calls: "Sequence[ProgramCall]", batch: int) -> dict[str, int]:
    """The launches of each kernel that `calls` name, by its name."""
    specs = {kernel.name: spec for spec, kernel in lowered.built.items()}
    return {call.kernel: _launches_of(specs[call.kernel], batch) for call in calls}


def _launches_of(spec: "KernelSpec", batch: int) -> int:
    """The launches of the CUDA kernel of `spec`, one where there is none, in a step of `batch` sequences."""
    from picompile_codegen import cuda
    from picompile_codegen.lowering.program import cuda_kernel_of

    if type(spec) not in cuda.BODIES:
        return 1
    # A plan may be of more sequences than an artifact can hold.
    batch = min(batch, MOST_SEQUENCES)
    if batch > 1:
        # What the function `batch` asks for instead.
        batched: dict[str, Any] = {"rows": batch, "sequences": batch, "mode": "sequences"}
        names = {field.name for field in fields(spec)}
        spec = replace(spec, **{name: value for name, value in batched.items() if name in names})
    return len(cuda_kernel_of(spec).grids)


def _leading(vocab: int, batch: int) -> int:
    from picompile_codegen.specs import TopLogitsSpec

    return _launches_of(TopLogitsSpec(vocab, rows=1), batch)


def _layer_ends(calls: "Sequence[ProgramCall]") -> list[int]:
    """The place of the last call of each layer: that of its block or its attention, and of the additions after it."""
    ends = [place for place, call in enumerate(calls) if call.op == "ffn"]
    ends[-1] = max(ends[-1], max(place for place, call in enumerate(calls) if call.op == "attention"))
    for number, end in enumerate(ends):
        while end + 1 < len(calls) and calls[end + 1].op == "add":
            end += 1
        ends[number] = end
    return ends


# The tensors of a lowered graph, each in the place it counts for.
#
# Every packed tensor belongs to the first call of the decode function that reads it, and calls belong to layers by
# their
# place: what is behind the feed-forward block of one layer, up to and with that of the next, is the next one's.


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
        from picompile_codegen.lowering.program import tensor_bytes

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
        from picompile_codegen.lowering.program import tensor_bytes
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


def _workspace_bytes(program: "LoweredProgram", batch: int) -> int:
    from picompile_codegen.lowering.function import align

    spans = list(_spans(program))
    of_token = align(max(end for _, end in spans)) - min(start for start, _ in spans)
    return program.arena_bytes + (batch - 1) * (of_token + align(_ELEMENT_BYTES * program.vocab))


def _spans(program: "LoweredProgram") -> Iterator[tuple[int, int]]:
    """Where in the arena the activations of one token lie."""
    from picompile_codegen.lowering.program import tensor_bytes

    for name, buffer in program.buffers.items():
        if name.startswith("decode."):
            start = buffer.offset or 0
            yield start, start + tensor_bytes(buffer.dtype, buffer.shape)
