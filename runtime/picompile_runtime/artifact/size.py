"""The memory that a model takes when it is loaded, known before it is."""

from __future__ import annotations

import os
from contextlib import ExitStack

from picompile_runtime.artifact.files import artifact_folder, open_file, read_small_file, translate_system_errors
from picompile_runtime.artifact.manifest import PROGRAM, WEIGHTS, read_manifest
from picompile_runtime.artifact.program_file import read_program
from picompile_runtime.artifact.weights import read_header
from picompile_runtime.devices.memory import map_file


def loaded_bytes(path: str | os.PathLike[str], kv_bytes: int | None = None) -> int:
    """Return about how much memory the artifact in the folder `path` takes: weights, workspaces and state.

    Nothing is hashed, and nothing of the weights is read.

    Args:
        path: the artifact's folder.
        kv_bytes: how much of the KV cache may be in use. Without it the state of one sequence is counted: others take
            memory when they are used.

    Raises:
        PicompileRuntimeError: the artifact cannot be opened.
    """
    folder = artifact_folder(path)
    with translate_system_errors(folder), ExitStack() as stack:
        read_manifest(folder)
        text = read_small_file(open_file(folder, PROGRAM, stack), str(folder / PROGRAM))
        weights = stack.enter_context(map_file(open_file(folder, WEIGHTS, stack)))
        program = read_program(text, read_header(weights, str(folder / WEIGHTS)), str(folder / PROGRAM))
        workspaces = program.arena_bytes + program.accelerator_arena_bytes + program.shared_arena_bytes
        state = sum(tensor.size_bytes for tensor in program.state.values())
        used = state // program.sequences if kv_bytes is None else min(state, kv_bytes)
        return len(weights) + workspaces + used
