"""Whatever ends a profiling, the same command goes on with it and ends with the same bytes."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from helpers.digests import digests
from helpers.support import ROOT, BuildOnce, save_tiny_llama
from picompile import streaming as layerwise_run
from picompile.errors import UsageError
from picompile.output import reserve
from picompile.predictors.profile import ProfileOptions, files, load_profile, profile_model
from picompile.progress import NoProgress


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(params=["relu", "silu"])
def model(request: pytest.FixtureRequest, build_once: BuildOnce, tiny_model: Path) -> Path:
    if request.param == "relu":
        return tiny_model
    return build_once("tiny-silu", lambda folder: save_tiny_llama(folder, hidden_act="silu"))


def options(prose: Path, **more: object) -> ProfileOptions:
    return ProfileOptions((prose,), tokens=1024, samples=100, window=128, gate=0.01, **more)  # type: ignore[arg-type]


@pytest.mark.slow("ends and resumes a profiling again and again; one model is fast", but=("relu",))
def test_ended_between_any_two_files(model: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two bisections instead of six.
    monkeypatch.setattr("picompile.predictors.profile.thresholds._STEPS", 4)
    profile_model(model, tmp_path / "undisturbed", options(prose))
    expected = digests(tmp_path / "undisturbed")
    assert set(expected) == {"profile.json", "tokens.safetensors", *(f"layers/00{i}.safetensors" for i in (0, 1))}
    written, whole_runs, folder = 0, 0, tmp_path / "ended"
    real_rename = Path.rename

    def rename(path: Path, target: Path) -> Path:
        nonlocal written
        written += 1
        if written == random_end:
            if before:
                # As a process leaves it that had no time to remove it.
                (path.parent / ".stray.tmp").write_bytes(b"half")
                raise Ended
            real_rename(path, target)
            raise Ended
        return real_rename(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    for end in range(1, 60):
        written, random_end, before = 0, end, end % 2 == 0
        folder = tmp_path / f"ended{end}"
        try:
            profile_model(model, folder, options(prose))
            whole_runs += 1
        except Ended:
            random_end = -1
            profile_model(model, folder, options(prose))
        assert digests(folder) == expected
        if whole_runs:
            break
    # The description twice, the tokens, two layers, what is alive at three cuts; for the search it is more.
    assert end > (6 if model.name == "tiny-model" else 16)


def test_layers_that_are_through_are_not_run_again(
    tiny_model: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.write_tensors

    def write(path: Path, *arguments: Any) -> None:
        real(path, *arguments)
        if path.name == "001.safetensors":
            raise Ended

    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr("picompile.predictors.profile.run.write_tensors", write)
        profile_model(tiny_model, tmp_path / "profile", options(prose))
    with pytest.raises(UsageError, match="is not complete; the same command goes on with it"):
        load_profile(tmp_path / "profile")
    ran = []
    run_segment = layerwise_run.run_segment
    with monkeypatch.context() as patch:
        patch.setattr(
            "picompile.predictors.profile.collect.run_segment",
            lambda segment, *more: ran.append(segment.title) or run_segment(segment, *more),  # type: ignore[func-returns-value]
        )
        profile_model(tiny_model, tmp_path / "profile", options(prose))
    assert ran == ["layer 1"]
    profile_model(tiny_model, tmp_path / "undisturbed", options(prose))
    assert digests(tmp_path / "profile") == digests(tmp_path / "undisturbed")


@pytest.mark.parametrize("damage", ["{", "[]", "{}", "[" * 100_000, None])
def test_notes_that_cannot_be_read_are_made_again(
    damage: str | None, build_once: BuildOnce, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notes hold the values alive between segments, and what the search has found."""
    monkeypatch.setattr("picompile.predictors.profile.thresholds._STEPS", 4)
    model = build_once("tiny-silu", lambda folder: save_tiny_llama(folder, hidden_act="silu"))
    # Every worker has a text of its own.
    name = f"tiny-silu-profile-{hashlib.sha256(prose.read_bytes()).hexdigest()}"
    expected = build_once(name, lambda folder: profile_model(model, folder, options(prose)) and None)
    real = files.write_tensors

    def write(path: Path, *arguments: Any) -> None:
        real(path, *arguments)
        if path.name == "state.safetensors" and (path.parent / "layers" / "000.safetensors").exists():
            raise Ended

    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr("picompile.predictors.profile.state.write_tensors", write)
        profile_model(model, tmp_path / "profile", options(prose))
    state = tmp_path / "profile" / "state.safetensors"
    if damage is None:
        tensors, metadata = files.read_tensors(state)
        real(state, dict(list(tensors.items())[:-1]), metadata)
    else:
        state.write_bytes(state.read_bytes()[:-1])
        (tmp_path / "profile" / "search.json").write_text(damage)
    profile_model(model, tmp_path / "profile", options(prose))
    assert digests(tmp_path / "profile") == digests(expected)


def test_work_of_other_inputs_begins_anew(
    tiny_model: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "profile"
    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr("picompile.predictors.profile.directory.ProfileDirectory.finish", Mock(side_effect=Ended))
        profile_model(tiny_model, folder, options(prose, seed=1))
    assert (folder / "layers" / "001.safetensors").exists()
    said = Mock(wraps=NoProgress())
    profile_model(tiny_model, folder, options(prose, seed=2), said)
    said.say.assert_called_once_with(f"{folder}: was begun with other inputs, and begins anew")
    profile_model(tiny_model, tmp_path / "undisturbed", options(prose, seed=2))
    assert digests(folder) == digests(tmp_path / "undisturbed")


def test_a_state_that_was_lost_is_made_again(
    tiny_model: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr("picompile.predictors.profile.directory.ProfileDirectory.finish", Mock(side_effect=Ended))
        profile_model(tiny_model, tmp_path / "profile", options(prose))
    state = tmp_path / "profile" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-100])
    profile_model(tiny_model, tmp_path / "profile", options(prose))
    profile_model(tiny_model, tmp_path / "undisturbed", options(prose))
    assert digests(tmp_path / "profile") == digests(tmp_path / "undisturbed")


def test_two_at_once(tiny_model: Path, prose: Path, tmp_path: Path) -> None:
    held = reserve(tmp_path / "profile", overwrite=True)
    with held, pytest.raises(UsageError, match=rf"is being written by another picompile \(process {os.getpid()}\)"):
        profile_model(tiny_model, tmp_path / "profile", options(prose))


def test_a_complete_profile_stays_until_another_takes_its_place(
    tiny_model: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = tmp_path / "profile", options(prose, seed=2, overwrite=True)
    profile_model(tiny_model, folder, options(prose, seed=1))
    (folder / "notes.txt").write_text("mine")
    before = digests(folder)
    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr("picompile.predictors.profile.directory.ProfileDirectory.finish", Mock(side_effect=Ended))
        profile_model(tiny_model, folder, other)
    assert {name: digest for name, digest in digests(folder).items() if not name.startswith(".")} == before
    assert load_profile(folder).tokens
    said = Mock(wraps=NoProgress())
    profile_model(tiny_model, folder, other, said)
    said.say.assert_called_once_with(f"{folder}: was begun, and goes on")
    profile_model(tiny_model, tmp_path / "undisturbed", options(prose, seed=2))
    mine = {"notes.txt": before["notes.txt"]}
    assert digests(folder) == digests(tmp_path / "undisturbed") | mine
    assert {path.name for path in tmp_path.iterdir()} == {"profile", "undisturbed"}


def test_leftovers_of_an_interrupted_replacement_are_removed_on_request(
    tiny_model: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "profile"
    profile_model(tiny_model, folder, options(prose, seed=1))
    before = digests(folder)
    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr("picompile.predictors.profile.directory.ProfileDirectory.finish", Mock(side_effect=Ended))
        profile_model(tiny_model, folder, options(prose, seed=2, overwrite=True))
    profile_model(tiny_model, folder, options(prose, seed=1))
    assert digests(folder) == before


@pytest.mark.slow("kills profilings at random; an end between two files is fast")
def test_killed_at_random_moments(tiny_model: Path, prose: Path, tmp_path: Path) -> None:
    """In a process of its own, which has computed nothing before it forks."""
    command = ["profile", str(tiny_model), "-o", "FOLDER", "--calibration", str(prose), "--window", "128"]
    seed = random.randrange(1 << 16)
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "tests" / "helpers" / "kill.py",
            "--moments",
            "3",
            "--seed",
            str(seed),
            tmp_path / "work",
            *command,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("then same bytes") == 3
