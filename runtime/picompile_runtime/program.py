"""The flat program of an artifact: kernel calls over planned buffers. Read from program.json, with every name resolved
and every tensor proven to lie inside its memory, so that running it cannot touch anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from picompile_runtime.errors import ArtifactError
from picompile_runtime.fields import Fields, parse_object
from picompile_runtime.memory import ALIGNMENT, Tensor

SCHEMA = 1
FUNCTIONS = ("decode", "prefill", "prefill_last", "score")
STEP_FIELDS = 8  # step[0] = tokens in this step, step[1] = position of the first; the rest is reserved
STATS_ROW_BYTES = 16  # int64 [computed, fired]
_DTYPES = ("int8", "uint8", "int32", "int64", "float16", "float32")
_OWN_PLACE = ("step", "tokens", "positions", "stats")  # a kernel that wrote over these would lead others astray


@dataclass(frozen=True)
class Argument:
    """What a kernel is given: `view`, whose offset counts from the start of the tensor called `name`."""

    kind: str  # "buffer", "state" or "weight"
    name: str
    view: Tensor


@dataclass(frozen=True)
class Call:
    """One kernel call. `weight_bytes`: what it reads of weights when every neuron is computed."""

    kernel: str
    args: tuple[Argument, ...]
    op: str
    layer: int | None
    weight_bytes: int


@dataclass(frozen=True)
class FeedForward:
    """One feed-forward part of `decode`: which neurons it computes is decided by `predictor`, how many it did compute
    and how many fired it counts in row `stats_row` of the buffer `stats`.
    """

    layer: int
    part: str
    neurons: int
    predictor: str
    stats_row: int


@dataclass(frozen=True)
class Program:
    """A whole program.

    `buffers` lie at their offsets in the arena; `functions` has the calls of each of FUNCTIONS; `logits` names the
    buffer of each function that gives logits.
    """

    context: int
    chunk: int
    vocab: int
    layers: int
    arena_bytes: int
    buffers: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    functions: Mapping[str, tuple[Call, ...]]
    logits: Mapping[str, str]
    ffn: tuple[FeedForward, ...]


def read_program(text: bytes, weights: Mapping[str, Tensor], where: str) -> Program:
    """Parse and check a program.json whose weights are `weights`; ArtifactError on anything out of order."""
    root = parse_object(text, where)
    if root.integer("schema") != SCHEMA:
        raise root.wrong("schema", f"{SCHEMA}, the only one this runtime knows")
    arena_bytes = root.integer("arena_bytes")
    buffers = {name: _buffer(entry, arena_bytes) for name, entry in root.object("buffers").members().items()}
    state = {name: _tensor(entry) for name, entry in root.object("state").members().items()}
    sources: dict[str, Mapping[str, Tensor]] = {"buffer": buffers, "state": state, "weight": weights}
    functions = root.object("functions")
    program = Program(
        context=root.integer("context", 1, 2**31 - 1),
        chunk=root.integer("chunk", 1, 2**20),
        vocab=root.integer("vocab", 1, 2**31 - 1),
        layers=root.integer("layers"),
        arena_bytes=arena_bytes,
        buffers=buffers,
        state=state,
        functions={name: tuple(_call(entry, sources) for entry in functions.objects(name)) for name in FUNCTIONS},
        logits={name: root.object("logits").text(name) for name in FUNCTIONS if name != "prefill"},
        ffn=tuple(_feed_forward(entry) for entry in root.objects("ffn")),
    )
    _check_interface(program, where)
    _check_own_places(program, where)
    _check_lookups(program, where)
    return program


def _tensor(entry: Fields, offset: int = 0) -> Tensor:
    if (dtype := entry.text("dtype")) not in _DTYPES:
        raise entry.wrong("dtype", f"one of {', '.join(_DTYPES)}")
    return Tensor(dtype, entry.shape("shape"), offset)


def _buffer(entry: Fields, arena_bytes: int) -> Tensor:
    buffer = _tensor(entry, entry.integer("offset"))
    if buffer.offset % ALIGNMENT or buffer.offset + buffer.size_bytes > arena_bytes:
        raise entry.wrong("offset", f"a multiple of {ALIGNMENT} such that the buffer ends inside the arena")
    return buffer


def _call(entry: Fields, sources: Mapping[str, Mapping[str, Tensor]]) -> Call:
    return Call(
        kernel=entry.text("kernel"),
        args=tuple(_argument(argument, sources) for argument in entry.objects("args")),
        op=entry.text("op"),
        layer=None if entry.data.get("layer") is None else entry.integer("layer"),
        weight_bytes=entry.integer("weight_bytes"),
    )


def _argument(entry: Fields, sources: Mapping[str, Mapping[str, Tensor]]) -> Argument:
    kinds = [kind for kind in sources if kind in entry.data]
    if len(kinds) != 1:
        raise ArtifactError(f"{entry.where}: must name one buffer, state or weight")
    name = entry.text(kinds[0])
    if (source := sources[kinds[0]].get(name)) is None:
        raise entry.wrong(kinds[0], "the name of one that exists")
    own = Fields({"dtype": source.dtype, "shape": list(source.shape), **entry.data}, entry.where)
    view = _tensor(own, entry.integer("offset") if "offset" in entry.data else 0)
    if view.offset % np.dtype(view.dtype).itemsize or view.offset + view.size_bytes > source.size_bytes:
        raise ArtifactError(f"{entry.where}: {view.dtype} {list(view.shape)} at {view.offset} is not inside of {name}")
    return Argument(kinds[0], name, view)


def _feed_forward(entry: Fields) -> FeedForward:
    return FeedForward(
        layer=entry.integer("layer"),
        part=entry.text("part"),
        neurons=entry.integer("neurons", 1),
        predictor=entry.text("predictor"),
        stats_row=entry.integer("stats_row"),
    )


def _check_interface(program: Program, where: str) -> None:
    """The buffers through which the runtime talks to the program."""
    logits = {name: [program.chunk if name == "score" else 1, program.vocab] for name in program.logits}
    wanted = [("step", "int32", [STEP_FIELDS]), ("tokens", "int32", [program.chunk])]
    wanted += [("positions", "int32", [program.chunk])]
    wanted += [(buffer, "float32", logits[name]) for name, buffer in program.logits.items()]
    if program.ffn:
        rows = program.buffers["stats"].shape[0] if "stats" in program.buffers else 1
        wanted += [("stats", "int64", [rows, 2])]
        if any(part.stats_row >= rows for part in program.ffn):
            raise ArtifactError(f"{where}: ffn: a stats_row lies outside of the buffer stats, which has {rows}")
    for name, dtype, shape in wanted:
        found = program.buffers.get(name)
        if found is None or (found.dtype, list(found.shape)) != (dtype, shape):
            raise ArtifactError(f"{where}: buffers: {name} must be {dtype} {shape}")
    for name, tensor in program.state.items():
        if len(tensor.shape) != 3 or tensor.shape[1] != program.context:
            raise ArtifactError(f"{where}: state: {name} must be [kv_heads, {program.context}, head_dim]")


def _check_own_places(program: Program, where: str) -> None:
    """No buffer may overlap those that steer the kernels."""
    for own in (name for name in _OWN_PLACE if name in program.buffers):
        kept = program.buffers[own]
        for name, other in program.buffers.items():
            apart = other.offset + other.size_bytes <= kept.offset or kept.offset + kept.size_bytes <= other.offset
            if name != own and not apart:
                raise ArtifactError(f"{where}: buffers: {name} overlaps {own}")


def _check_lookups(program: Program, where: str) -> None:
    """Tables indexed by token or position have a row for each; kernels do not check their indices."""
    needed = {"tokens": program.vocab, "positions": program.context}
    for call in (call for calls in program.functions.values() for call in calls if call.op == "embedding"):
        rows = max((needed.get(argument.name, 0) for argument in call.args if argument.kind == "buffer"), default=0)
        if any(argument.kind == "weight" and argument.view.shape[0] < rows for argument in call.args):
            raise ArtifactError(f"{where}: {call.kernel}: the table has fewer than {rows} rows")
