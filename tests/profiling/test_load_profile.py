"""A profile that is damaged, or of another model, is refused in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support import BuildOnce

from picompile.checkpoint.fingerprint import fingerprint
from picompile.errors import DoesNotFitError, UnsupportedModelError, UsageError
from picompile.profiling import ProfileOptions, load_profile, profile_model


@pytest.fixture
def folder(build_once: BuildOnce, tiny_model: Path, prose: Path, tmp_path: Path) -> Path:
    """A copy of a profile, to be damaged."""
    options = ProfileOptions((prose,), tokens=1024, samples=9, window=128)
    made = build_once("profile-to-damage", lambda folder: profile_model(tiny_model, folder, options) and None)
    return Path(shutil.copytree(made, tmp_path / "copy"))


def change(folder: Path, **changes: object) -> None:
    path = folder / "profile.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def swap_layer(folder: Path) -> None:
    shutil.copy(folder / "tokens.safetensors", folder / "layers" / "001.safetensors")


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "profile.json").unlink(), "is no profile: it has no profile.json"),
    (lambda f: (f / "profile.json").write_text("{"), "not readable as JSON"),
    (lambda f: (f / "profile.json").write_text("[]"), "is not a profile's description"),
    (lambda f: change(f, format="picompile-artifact"), "is not a profile's description"),
    (lambda f: change(f, schema=2), "has schema 2, not 1"),
    (lambda f: change(f, complete=False), "not complete"),
    (lambda f: change(f, layers=[{"layer": 0}]), "damaged"),
    (lambda f: change(f, model=None), "damaged"),
    (lambda f: change(f, samples=10), "000.safetensors: damaged"),
    (lambda f: (f / "tokens.safetensors").unlink(), "tokens.safetensors: missing or damaged"),
    (lambda f: cut(f / "tokens.safetensors"), "tokens.safetensors: missing or damaged"),
    (lambda f: cut(f / "layers" / "001.safetensors"), "001.safetensors: missing or damaged"),
    (lambda f: (f / "layers" / "001.safetensors").write_bytes(b""), "001.safetensors: missing or damaged"),
    (swap_layer, "001.safetensors: damaged: it holds"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damaged(damage: Callable[[Path], object], message: str, folder: Path) -> None:
    load_profile(folder)
    damage(folder)
    with pytest.raises(UsageError, match=message) as caught:
        load_profile(folder)
    assert "\n" not in str(caught.value)


def test_of_another_model(folder: Path, tiny_model: Path) -> None:
    profile = load_profile(folder)
    profile.require_model(fingerprint(tiny_model))
    with pytest.raises(UsageError, match="profile of another model"):
        profile.require_model("0" * 64)


def test_places_that_will_not_do(
    folder: Path, tiny_model: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ProfileOptions((prose,), tokens=1024, samples=9, window=128, overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="exists and is not a folder"):
        profile_model(tiny_model, tmp_path / "file", options)
    (folder / "profile.json").unlink()
    with pytest.raises(UsageError, match=r"has no profile\.json, so it is not overwritten"):
        profile_model(tiny_model, folder, options)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(DoesNotFitError, match=r"0\.00 GB are free"):
        profile_model(tiny_model, tmp_path / "new", options)
    assert not (tmp_path / "new").exists()


def test_weights_that_are_no_numbers_leave_nothing(tiny_model: Path, prose: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"^layer 1: its neurons' values are not finite numbers"):
        profile_model(model, tmp_path / "new", ProfileOptions((prose,), tokens=1024, window=128))
    assert not (tmp_path / "new").exists()
