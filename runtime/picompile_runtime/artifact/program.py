"""The flat program of an artifact: kernel calls over planned buffers. `program_file.read_program` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from picompile_runtime.devices.memory import Tensor

SCHEMA = 4
FUNCTIONS = ("decode", "prefill", "prefill_last", "score")
SCORE_MASKED = "score_masked"  # `score` with the neurons that predictors name; some programs have it
BATCH = "batch"  # the function that reads a token each of several sequences; only programs for several have it
ONE_TOKEN_EACH = ("decode", BATCH)  # functions that read one token of each sequence
STATE_KINDS = ("positional", "recurrent")
STATS_ROW_BYTES = 16  # int64 [computed, fired]
DEVICES = ("host", "accelerator")  # where calls run
UPLOAD_OP = "upload"  # the operator that copies weights, whose bytes other calls then read with their own types
WAITING_OPS = ("wait", "receive")  # operators that wait for the other side
MEMORIES = ("host", "accelerator", "shared")


@dataclass(frozen=True)
class Argument:
    """An argument of a call: `view`, whose offset counts from the start of the tensor called `name`."""

    kind: str  # "buffer", "state" or "weight"
    name: str
    view: Tensor


@dataclass(frozen=True)
class Call:
    """One kernel call.

    `weight_bytes` are the weights that it reads if every neuron is computed. `window`, for attention, is how many
    positions a token sees at most; 0 means all. `device` is where it runs, one of DEVICES.
    """

    kernel: str
    args: tuple[Argument, ...]
    op: str
    layer: int | None
    weight_bytes: int
    window: int = 0
    device: str = "host"


@dataclass(frozen=True)
class FeedForward:
    """One feed-forward part of `decode`, or of `batch`.

    `predictor` decides which of its `neurons` it computes. It counts how many it computed and how many fired in row
    `stats_row` of the buffer `stats`, or of `stats.batch` for a step that reads several sequences. A neuron has `rows`
    rows in the part's last matrix; `kept_rows` of them are read only if it fires, the others if it is computed. In a
    mixture of `experts`, `neurons` are those of the `chosen` ones of a token.
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


@dataclass(frozen=True)
class TopLogits:
    """Names of the buffers in which a function leaves its top logits.

    `scores`, float32 [rows, n], descends; `ids`, int32 [rows, n], has their tokens, the lower one first among equals.
    """

    scores: str
    ids: str


@dataclass(frozen=True)
class StateTensor(Tensor):
    """State of an operator: a tensor [sequences, *the shape of one sequence].

    Attributes:
        kind: one of STATE_KINDS. `positional` state has a row for each token, `recurrent` state a fixed size.
        layer: the operator's layer.
        grows: the dimension of a sequence's shape that has the rows of tokens; None for recurrent state.
    """

    kind: str = "positional"
    layer: int = 0
    grows: int | None = None

    @property
    def sequence_bytes(self) -> int:
        """Size of one sequence's state in bytes."""
        return self.size_bytes // self.shape[0]


@dataclass(frozen=True)
class Program:
    """A whole program.

    Attributes:
        buffers: tensors at their offsets in the arena of their memory.
        state: what operators keep between tokens, with a slot for each of `sequences`.
        memories: the memory of each buffer and state tensor (by kind and name): host, device (the accelerator's) or
            shared.
        streamed: names of the weights that the accelerator uses and that stay with the host.
        batch_rows: how many tokens a step of BATCH reads at most; 1 if there is no such function.
        functions: the calls of each of FUNCTIONS, of SCORE_MASKED in some programs, and of BATCH if there is one.
        logits: the buffer with the logits of each function that computes them.
        top_logits: the buffers with the top logits of each function whose logits are in the accelerator's memory.
        ffn: the feed-forward parts.
    """

    context: int
    chunk: int
    vocab: int
    layers: int
    sequences: int
    batch_rows: int
    arena_bytes: int
    accelerator_arena_bytes: int
    shared_arena_bytes: int
    buffers: Mapping[str, Tensor]
    state: Mapping[str, StateTensor]
    functions: Mapping[str, tuple[Call, ...]]
    logits: Mapping[str, str]
    top_logits: Mapping[str, TopLogits]
    ffn: tuple[FeedForward, ...]
    memories: Mapping[tuple[str, str], str]
    streamed: frozenset[str]

    @cached_property
    def has_accelerator(self) -> bool:
        """Whether some calls run on an accelerator."""
        return any(call.device == "accelerator" for calls in self.functions.values() for call in calls)

    @property
    def waiting_kernels(self) -> frozenset[str]:
        """Names of the kernels that wait for the other side."""
        return frozenset(call.kernel for calls in self.functions.values() for call in calls if call.op in WAITING_OPS)

    @property
    def token_bytes(self) -> int:
        """Bytes of the positional state, on the host and on an accelerator, that hold one token."""
        positional = sum(each.size_bytes for each in self.state.values() if each.kind == "positional")
        return positional // (self.sequences * self.context)

    def rows(self, function: str) -> int:
        """Return how many tokens a step of a function reads at most."""
        return {"decode": 1, BATCH: self.batch_rows}.get(function, self.chunk)

    def calls(self, function: str, device: str) -> tuple[Call, ...]:
        """Return the calls of a function that run on `device`, in order."""
        return tuple(call for call in self.functions[function] if call.device == device)
