"""The memory that an artifact takes when it is loaded, from its files alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from picompile_runtime import ArtifactError, load
from picompile_runtime.artifact.size import loaded_bytes


def test_weights_workspace_and_state_count(make_artifact: Callable[..., Path]) -> None:
    folder = make_artifact()
    with load(folder) as engine:
        program = engine.artifact.program
    state = sum(tensor.size_bytes for tensor in program.state.values())
    fixed = (folder / "weights.safetensors").stat().st_size + program.arena_bytes
    fixed += program.accelerator_arena_bytes + program.shared_arena_bytes
    assert loaded_bytes(folder) == fixed + state // program.sequences
    assert loaded_bytes(folder, kv_bytes=8) == fixed + min(8, state)
    assert loaded_bytes(folder, kv_bytes=2**40) == fixed + state


def test_nothing_is_hashed(make_artifact: Callable[..., Path]) -> None:
    folder = make_artifact()
    size = loaded_bytes(folder)
    weights = folder / "weights.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert loaded_bytes(folder) == size


def test_a_folder_without_an_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError):
        loaded_bytes(tmp_path)
    with pytest.raises(ArtifactError):
        loaded_bytes(tmp_path / "nothing")
