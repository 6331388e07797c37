"""Reads program.json.

Reading resolves every name and checks that every tensor lies inside its memory, so running the program cannot touch
anything else.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from picompile_runtime.artifact import MOST_SEQUENCES
from picompile_runtime.artifact.fields import Fields, parse_object
from picompile_runtime.artifact.program import (
    BATCH,
    DEVICES,
    FUNCTIONS,
    MEMORIES,
    SCHEMA,
    SCORE_MASKED,
    STATE_KINDS,
    Argument,
    Call,
    FeedForward,
    Program,
    StateTensor,
    TopLogits,
)
from picompile_runtime.artifact.program_checks import check_program
from picompile_runtime.devices.memory import ALIGNMENT, Tensor
from picompile_runtime.errors import ArtifactError

_DTYPES = ("int8", "uint8", "int32", "int64", "float16", "float32")


def read_program(text: bytes, weights: Mapping[str, Tensor], where: str) -> Program:
    """Return the program in `text`, a program.json whose weights are `weights`.

    Raises ArtifactError, naming `where`, if anything in it is wrong.
    """
    root = parse_object(text, where)
    if root.integer("schema") != SCHEMA:
        raise root.wrong("schema", f"{SCHEMA}, the only one this runtime knows")
    arenas = {memory: root.integer(_arena(memory)) for memory in MEMORIES}
    of_buffers, of_state = root.object("buffers").members(), root.object("state").members()
    buffers = {name: _buffer(entry, arenas[_memory(entry)]) for name, entry in of_buffers.items()}
    sequences = root.integer("sequences", 1, MOST_SEQUENCES)
    state = {name: _state(entry, sequences) for name, entry in of_state.items()}
    memories = {("buffer", name): _memory(entry) for name, entry in of_buffers.items()}
    memories |= {("state", name): _memory(entry) for name, entry in of_state.items()}
    sources: dict[str, Mapping[str, Tensor]] = {"buffer": buffers, "state": state, "weight": weights}
    functions = root.object("functions")
    # An artifact of before drafts has a row for each sequence.
    batch_rows = root.integer("batch_rows", sequences, MOST_SEQUENCES) if "batch_rows" in root.data else sequences
    optional = (SCORE_MASKED,) if SCORE_MASKED in functions.data else ()
    names = (*FUNCTIONS, *optional, *((BATCH,) if batch_rows > 1 else ()))
    program = Program(
        context=root.integer("context", 1, 2**31 - 1),
        chunk=root.integer("chunk", 1, 2**20),
        vocab=root.integer("vocab", 1, 2**31 - 1),
        layers=root.integer("layers"),
        sequences=sequences,
        batch_rows=batch_rows,
        arena_bytes=arenas["host"],
        accelerator_arena_bytes=arenas["accelerator"],
        shared_arena_bytes=arenas["shared"],
        buffers=buffers,
        state=state,
        functions={name: tuple(_call(entry, sources) for entry in functions.objects(name)) for name in names},
        logits={name: root.object("logits").text(name) for name in names if name != "prefill"},
        top_logits=_top_logits(root),
        ffn=tuple(_feed_forward(entry) for entry in root.objects("ffn")),
        memories=memories,
        streamed=frozenset(root.texts("streamed")),
    )
    if unknown := sorted(program.streamed - set(weights)):
        raise ArtifactError(f"{where}: streamed: there are no weights called {unknown[0]}")
    check_program(program, where)
    return program


def _arena(memory: str) -> str:
    return "arena_bytes" if memory == "host" else f"{memory}_arena_bytes"


def _memory(entry: Fields) -> str:
    return entry.one_of("memory", MEMORIES)


def _tensor(entry: Fields, offset: int = 0) -> Tensor:
    if (dtype := entry.text("dtype")) not in _DTYPES:
        raise entry.wrong("dtype", f"one of {', '.join(_DTYPES)}")
    return Tensor(dtype, entry.shape("shape"), offset)


def _state(entry: Fields, sequences: int) -> StateTensor:
    of_one, kind = _tensor(entry), entry.one_of("kind", STATE_KINDS)
    # The rows of a token are whole: the last dimension never grows.
    grows = entry.integer("grows", 0, len(of_one.shape) - 2) if kind == "positional" else None
    return StateTensor(of_one.dtype, (sequences, *of_one.shape), kind=kind, layer=entry.integer("layer"), grows=grows)


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
        window=entry.integer("window") if "window" in entry.data else 0,
        device=entry.one_of("device", DEVICES),
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


def _top_logits(root: Fields) -> dict[str, TopLogits]:
    """Return the top logits of each function; the field is missing if all logits are in the host's memory."""
    if "leading" not in root.data:
        return {}
    entries = root.object("leading").members()
    return {name: TopLogits(entry.text("scores"), entry.text("ids")) for name, entry in entries.items()}


def _feed_forward(entry: Fields) -> FeedForward:
    rows = entry.optional_integer("rows", 1) or 1
    experts = entry.optional_integer("experts", 1) or 0
    return FeedForward(
        layer=entry.integer("layer"),
        part=entry.text("part"),
        neurons=entry.integer("neurons", 1),
        predictor=entry.text("predictor"),
        stats_row=entry.integer("stats_row"),
        rows=rows,
        kept_rows=entry.optional_integer("kept_rows", most=rows) or 0,
        experts=experts,
        chosen=entry.integer("chosen", 1, experts) if experts else 0,
    )
