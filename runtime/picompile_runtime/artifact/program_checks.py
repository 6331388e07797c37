"""Checks of a program's buffers and memories: the runtime can talk to it, and its kernels touch nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from picompile_runtime.artifact.program import Program
from picompile_runtime.errors import ArtifactError

# step[0] = tokens in this step, step[1] = position of the first, step[2] = their sequence's slot; the rest is reserved.
_STEP_FIELDS = 8
_FLAG_WORDS = 16
"""Names of program.json's devices, as messages have them."""

# A kernel that overwrote these would make others go wrong.
_OWN_PLACE = ("step", "tokens", "positions", "slots", "stats", "stats.batch", "flags", "abandoned", "tickets")


def check_program(program: Program, where: str) -> None:
    """Raise ArtifactError, naming `where`, if anything in the program is wrong."""
    _check_buffers(program, where)
    _check_statistics(program, where)
    _check_state(program, where)
    _check_own_places(program, where)
    _check_sides(program, where)
    _check_logits(program, where)


def _check_buffers(program: Program, where: str) -> None:
    for name, dtype, shape in _interface(program):
        found = program.buffers.get(name)
        if found is None or (found.dtype, found.shape) != (dtype, shape):
            raise ArtifactError(f"{where}: buffers: {name} must be {dtype} {list(shape)}")


def _interface(program: Program) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, dtype and shape of the buffers through which the runtime talks to the program."""
    yield "step", "int32", (_STEP_FIELDS,)
    for name in ("tokens", "positions", "slots"):
        yield name, "int32", (max(program.chunk, program.batch_rows),)
    rows = {"score": program.chunk, "score_masked": program.chunk, "batch": program.batch_rows}
    for function, name in program.logits.items():
        yield name, "float32", (rows.get(function, 1), program.vocab)
    for function, top in program.top_logits.items():
        found = program.buffers.get(top.scores)
        count = 1 if found is None else min(found.shape[-1], program.vocab)
        for name, dtype in ((top.scores, "float32"), (top.ids, "int32")):
            yield name, dtype, (rows.get(function, 1), count)
    if program.has_accelerator:
        flags = program.buffers.get("flags")
        yield "flags", "int32", (1 if flags is None else flags.shape[0], _FLAG_WORDS)
        yield "abandoned", "int32", (_FLAG_WORDS,)
    if program.ffn:
        parts = program.buffers["stats"].shape[0] if "stats" in program.buffers else 1
        yield "stats", "int64", (parts, 2)
        if program.batch_rows > 1:
            yield "stats.batch", "int64", (parts, 2)


def _check_statistics(program: Program, where: str) -> None:
    rows = [part.stats_row for part in program.ffn]
    if not rows:
        return
    parts = program.buffers["stats"].shape[0]
    if max(rows) >= parts:
        raise ArtifactError(f"{where}: ffn: a stats_row lies outside of the buffer stats, which has {parts}")


def _check_state(program: Program, where: str) -> None:
    """Check that positional state has a row for each position: kernels write at the position that they are given."""
    for name, tensor in program.state.items():
        if tensor.grows is not None and tensor.shape[1 + tensor.grows] != program.context:
            rows = f"{program.context} rows, one for each position, in dimension {tensor.grows}"
            raise ArtifactError(f"{where}: state: {name} must have {rows}")


def _check_own_places(program: Program, where: str) -> None:
    """Check that no buffer overlaps those that control the kernels."""
    for own in (own for name in _OWN_PLACE for own in (name, f"{name}.accelerator") if own in program.buffers):
        kept = program.buffers[own]
        for name, other in program.buffers.items():
            if program.memories["buffer", name] != program.memories["buffer", own]:
                continue
            apart = other.offset + other.size_bytes <= kept.offset or kept.offset + kept.size_bytes <= other.offset
            if name != own and not apart:
                raise ArtifactError(f"{where}: buffers: {name} overlaps {own}")


def _check_sides(program: Program, where: str) -> None:
    """Check that calls use memory that their side can reach: its own, or shared memory."""
    for call in (call for calls in program.functions.values() for call in calls):
        for argument in call.args:
            memory = program.memories.get((argument.kind, argument.name), call.device)
            if memory not in (call.device, "shared"):
                given = f"{call.kernel} on the {call.device} is given {argument.name}"
                raise ArtifactError(f"{where}: {given}, which is in {_memory_name(memory)} memory")
    has_accelerator = program.has_accelerator
    for (kind, name), memory in program.memories.items():
        if memory != "host" and (not has_accelerator or (kind, memory) == ("state", "shared")):
            raise ArtifactError(f"{where}: {kind} {name} may not be in {_memory_name(memory)} memory")
    for name in ("step", "tokens", "positions", "slots", "stats"):
        if program.memories.get(("buffer", name)) == "accelerator":
            raise ArtifactError(f"{where}: buffers: {name} must not be in the accelerator's memory")
    for name in ("flags", "abandoned"):
        if program.has_accelerator and program.memories["buffer", name] != "shared":
            raise ArtifactError(f"{where}: buffers: {name} must be in shared memory")
    counts = [name for name in ("stats", "stats.batch") if program.has_accelerator and name in program.buffers]
    for name in counts:
        own, twin = program.buffers[name], program.buffers.get(f"{name}.accelerator")
        if twin is None or (twin.dtype, twin.shape) != (own.dtype, own.shape):
            raise ArtifactError(f"{where}: buffers: {name}.accelerator must be {own.dtype} {list(own.shape)}")


def _check_logits(program: Program, where: str) -> None:
    """Check that the host can read what it needs of each step: logits or top logits, except for `score`.

    The runtime copies logits from the accelerator's memory only for `score`, a whole chunk of them, and on request.
    """
    if unknown := sorted(set(program.top_logits) - set(program.logits)):
        raise ArtifactError(f"{where}: leading: {unknown[0]} is no function that gives logits")
    known = [name for top in program.top_logits.values() for name in (top.scores, top.ids)]
    known += [name for function, name in program.logits.items() if function not in (*program.top_logits, "score")]
    for name in known:
        if program.memories["buffer", name] == "accelerator":
            raise ArtifactError(f"{where}: buffers: {name} must not be in the accelerator's memory")


def _memory_name(memory: str) -> str:
    return "the accelerator's" if memory == "accelerator" else memory
