"""The flat program that `program.json` holds, as dataclasses: kernel calls over planned buffers."""

from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from torch.fx import Node

from picompile_codegen.specs.arguments import ITEM_BYTES
from picompile_passes.dialect.state import StateKind

PROGRAM_SCHEMA = 4

Space = Literal["buffer", "state", "weight"]

# Where a call runs: on the host, or on the accelerator, which is a GPU or a second partition of the CPU.
Device = Literal["host", "accelerator"]
# Where a tensor lies: in a device's own memory, or in memory of the host that both see.
Memory = Literal["host", "accelerator", "shared"]


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a compact tensor."""
    return ITEM_BYTES[dtype] * prod(shape)


@dataclass(frozen=True)
class ProgramTensor:
    """A tensor that a call can name: a planned buffer with its offset in the arena."""

    dtype: str
    shape: tuple[int, ...]
    offset: int | None = None
    memory: Memory = "host"

    def to_json(self) -> dict[str, Any]:
        """Return the form in program.json."""
        fields: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape)}
        if self.offset is not None:
            fields["offset"] = self.offset
        return fields if self.memory == "host" else {**fields, "memory": self.memory}


@dataclass(frozen=True)
class ProgramState(ProgramTensor):
    """State of a layer's operator: a tensor [sequences, *the shape of one sequence].

    Dimension `grows` of a sequence's shape has a row for each token; it is None for `recurrent` state.
    """

    kind: StateKind = "positional"
    layer: int = 0
    grows: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the form in program.json, where the shape is that of one sequence."""
        fields = {"kind": self.kind, "layer": self.layer, **super().to_json(), "shape": list(self.shape[1:])}
        return fields if self.grows is None else {**fields, "grows": self.grows}


@dataclass(frozen=True)
class Arg:
    """One argument of a call: a tensor by name, seen with its own dtype and shape or with those given here."""

    space: Space
    name: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    offset: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the form in program.json: only what differs from the tensor itself is written."""
        fields: dict[str, Any] = {self.space: self.name}
        if self.dtype is not None:
            fields["dtype"] = self.dtype
        if self.shape is not None:
            fields["shape"] = list(self.shape)
        if self.offset:
            fields["offset"] = self.offset
        return fields


@dataclass(frozen=True)
class ProgramCall:
    """One kernel call. `weight_bytes` is what it reads of weights when every neuron is computed.

    `window` of an attention: how many positions a token sees at most, 0 for all that there are. `node` is what the call
    was made for: the last of several nodes that are one call. Only in memory.
    """

    kernel: str
    args: tuple[Arg, ...]
    op: str
    layer: int | None
    weight_bytes: int
    window: int = 0
    device: Device = "host"
    node: Node | None = field(default=None, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the form in program.json."""
        fields = {
            "kernel": self.kernel,
            "args": [arg.to_json() for arg in self.args],
            "op": self.op,
            "layer": self.layer,
            "weight_bytes": self.weight_bytes,
        }
        if self.window:
            fields["window"] = self.window
        return fields if self.device == "host" else {**fields, "device": self.device}


@dataclass(frozen=True)
class FfnPart:
    """One feed-forward kernel of the decode function and the row of the statistics buffer that it counts into.

    A neuron has `rows` rows in the bundle, which are read if it is computed. The last `kept_rows` of them are read only
    if it is above its limits as well. Of a block of `experts`, `neurons` are those of the `chosen` ones of a token.
    """

    layer: int
    part: str
    neurons: int
    predictor: str
    stats_row: int
    rows: int = 1
    kept_rows: int = 0
    experts: int = 0
    chosen: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the form in program.json: rows are written where not all of them count alike, experts where there are
        some."""
        unused = (() if self.kept_rows else ("rows", "kept_rows")) + (() if self.experts else ("experts", "chosen"))
        return {name: value for name, value in vars(self).items() if name not in unused}


@dataclass(frozen=True)
class TopLogitsBuffers:
    """The buffers, by name, for the highest logits of a function: `scores` float32 [rows, n] descending, and `ids`,
    their tokens, int32 [rows, n].
    """

    scores: str
    ids: str


@dataclass
class LoweredProgram:
    """Everything the runtime executes. All functions share the arenas, the state and the weights.

    The state has a place, a slot, for each of `sequences`. A step of `batch` reads `batch_rows` tokens at most, each of
    any slot. `kv_dtype` is that of the KV cache, if it has one. An arena in each memory holds its buffers.
    `top_logits` has the functions whose logits are in the accelerator's memory, and where the highest of them are.
    `streamed` weights stay with the host: where the accelerator uses them, for prompts, it reads them from there.
    The calls of a function are in order for each device; between devices, order is made by flags in shared memory.
    """

    context: int
    chunk: int
    vocab: int
    layers: int
    sequences: int = 1
    batch_rows: int = 1
    kv_dtype: str = "float16"
    arena_bytes: int = 0
    accelerator_arena_bytes: int = 0
    shared_arena_bytes: int = 0
    buffers: dict[str, ProgramTensor] = field(default_factory=dict)
    state: dict[str, ProgramState] = field(default_factory=dict)
    functions: dict[str, list[ProgramCall]] = field(default_factory=dict)
    logits: dict[str, str] = field(default_factory=dict)
    top_logits: dict[str, TopLogitsBuffers] = field(default_factory=dict)
    ffn: list[FfnPart] = field(default_factory=list)
    streamed: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the content of program.json."""
        return {
            "schema": PROGRAM_SCHEMA,
            "context": self.context,
            "chunk": self.chunk,
            "vocab": self.vocab,
            "layers": self.layers,
            "sequences": self.sequences,
            "batch_rows": self.batch_rows,
            "arena_bytes": self.arena_bytes,
            "accelerator_arena_bytes": self.accelerator_arena_bytes,
            "shared_arena_bytes": self.shared_arena_bytes,
            "buffers": {name: tensor.to_json() for name, tensor in self.buffers.items()},
            "state": {name: tensor.to_json() for name, tensor in self.state.items()},
            "functions": {name: [call.to_json() for call in calls] for name, calls in self.functions.items()},
            "logits": self.logits,
            **({"leading": {name: vars(each) for name, each in self.top_logits.items()}} if self.top_logits else {}),
            "ffn": [part.to_json() for part in self.ffn],
            "streamed": self.streamed,
        }

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of all sequences at full context."""
        return sum(tensor_bytes(tensor.dtype, tensor.shape) for tensor in self.state.values())
