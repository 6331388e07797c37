"""A profile that is damaged, or of another model, is refused in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.damage import damages, replaced, without
from helpers.support import BuildOnce
from picompile.cli.profile import _show as show_profile
from picompile.errors import DoesNotFitError, UnsupportedModelError, UsageError
from picompile.frontend.checkpoint import fingerprint
from picompile.predictors.firing import FiringRule
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.profile import load_profile
from picompile.predictors.profile.run import profile_model


@pytest.fixture(scope="module")
def whole(build_once: BuildOnce, tiny_model: Path, prose: Path) -> Path:
    """A profile. Tests must not change it."""
    options = ProfileOptions((prose,), tokens=1024, samples=9, window=128)
    return build_once("profile-to-damage", lambda folder: profile_model(tiny_model, folder, options) and None)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of a profile, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


@pytest.fixture(scope="module")
def described(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, of which only the description is damaged, and written anew every time."""
    return Path(shutil.copytree(whole, tmp_path_factory.mktemp("described") / "copy"))


def change(folder: Path, **changes: object) -> None:
    path = folder / "profile.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def put(folder: Path, *place: str | int, value: Any) -> None:
    path = folder / "profile.json"
    path.write_text(json.dumps(replaced(json.loads(path.read_text()), place, value)))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def swap_layer(folder: Path) -> None:
    shutil.copy(folder / "tokens.safetensors", folder / "layers" / "001.safetensors")


FOUND = {"accuracy_bound": 0.01, "silenced_share": 0.5, "dense_perplexity": 9.0, "perplexity": 9.01}

DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "profile.json").unlink(), "is no profile: it has no profile.json"),
    (lambda f: (f / "profile.json").write_text("{"), "not readable as JSON"),
    (lambda f: change(f, format="picompile-artifact"), "is not a profile's description"),
    (lambda f: (f / "profile.json").write_text('{"schema": 1, "schema": 1}'), "the key 'schema' stands twice"),
    (lambda f: change(f, schema=2), "has schema 2, not 1"),
    (lambda f: change(f, complete=False), "not complete"),
    (lambda f: change(f, model=None), "damaged"),
    (lambda f: change(f, samples=10), "000.safetensors: damaged"),
    (lambda f: change(f, thresholds={}), "thresholds: silenced_share must be a number from 0 to 1, but is missing"),
    (lambda f: change(f, thresholds=FOUND | {"by": "energy"}), "thresholds: by must be one of magnitude, contribution"),
    (lambda f: put(f, "calibration", "window", value=96), "tokens must be a multiple of the window of 96"),
    (lambda f: put(f, "calibration", "held_out_tokens", value=0), "held_out_tokens must be an integer from 128"),
    (lambda f: put(f, "layers", 0, "layer", value=1), "layers must be a list of layers in order, each once"),
    (lambda f: put(f, "layers", 1, "layer", value=10**400), "beyond which no model has layers"),
    (lambda f: put(f, "layers", 1, "threshold", value=float("nan")), "threshold must be a number from 0 .* is nan"),
    (lambda f: put(f, "layers", 1, "place", value="norm"), "place must be one of stream, block, but is 'norm'"),
    (lambda f: (f / "tokens.safetensors").unlink(), "tokens.safetensors: missing or damaged"),
    (lambda f: cut(f / "tokens.safetensors"), "tokens.safetensors: missing or damaged"),
    (lambda f: cut(f / "layers" / "001.safetensors"), "001.safetensors: missing or damaged"),
    (swap_layer, "001.safetensors: damaged: it holds"),
]


def retyped(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype)


def holding(place: int, value: float) -> Callable[[Tensor], Tensor]:
    def damage(tensor: Tensor) -> Tensor:
        damaged = tensor.clone()
        damaged.view(-1)[place] = value
        return damaged

    return damage


@pytest.mark.parametrize("by", [{}, {"by": "contribution"}])
def test_a_profile_says_what_its_thresholds_are_of(
    folder: Path, by: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, thresholds=FOUND | by)
    put(folder, "layers", 1, "threshold", value=0.25)
    profile = load_profile(folder)
    assert profile.by == by.get("by", "magnitude")
    assert profile.firing_rules == {0: FiringRule(0.0, profile.by), 1: FiringRule(0.25, profile.by)}
    show_profile(profile)
    assert f"silenced  50.0% of the {profile.by}s; perplexity +0.111%" in capsys.readouterr().out


# A tensor of the second layer, what becomes of it, and what is said of it.
OF_A_LAYER: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
    ("counts", retyped(torch.float32), r"'counts' F32 \[200\].* instead of .*'counts' I64 \[200\]"),
    ("counts", holding(5, 1025), "counts must be from 0 to the number of tokens"),
    ("contribution", holding(7, float("nan")), "contribution must be finite and not negative"),
    ("contribution", holding(7, -0.25), "contribution must be"),
    ("input", retyped(torch.bfloat16), "'input' BF16"),
    ("positions", lambda tensor: tensor.flip(0), "positions must be places of tokens in order"),
    ("positions", holding(-1, 1024), "positions must be"),
    ("positions", lambda tensor: torch.arange(9) + 3, "samples of other tokens than in the layer before"),
]


@pytest.mark.parametrize(("name", "damage", "message"), OF_A_LAYER)
def test_damaged_layer(name: str, damage: Callable[[Tensor], Tensor], message: str, folder: Path) -> None:
    file = folder / "layers" / "001.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: damage(tensors[name])}, file)
    with pytest.raises(UsageError, match=message) as caught:
        load_profile(folder)
    assert str(caught.value).startswith(f"{file}: damaged: ")


def test_what_is_checked_when_it_is_read(folder: Path, tiny_model: Path) -> None:
    """And what is not in profiles of earlier versions, or not in texts."""
    assert load_profile(folder).config == json.loads((tiny_model / "config.json").read_text())
    put(folder, "calibration", "sources", value=["\udcff.txt", "\u4e2d\U0001f600"])
    path, file = folder / "profile.json", folder / "layers" / "001.safetensors"
    path.write_text(json.dumps(without(json.loads(path.read_text()), ("model", "config"))))
    tensors = load_file(file)
    save_file({**tensors, "input": holding(100, float("nan"))(tensors["input"])}, file)
    profile = load_profile(folder)
    assert (profile.config, profile.sources) == (None, ("?.txt", "\u4e2d\U0001f600"))
    assert profile.samples(0).shape == (9, 96)
    with pytest.raises(UsageError, match=r"001\.safetensors: damaged: input must be finite"):
        profile.samples(1)
    tokens = folder / "tokens.safetensors"
    tensors = load_file(tokens)
    save_file({**tensors, "held_out": tensors["held_out"].to(torch.int64)}, tokens)
    with pytest.raises(UsageError, match=r"tokens\.safetensors: damaged: it holds .* instead of .*'held_out' I32"):
        load_profile(folder)


@pytest.mark.parametrize("name", ["calibration", "held_out"])
@pytest.mark.parametrize("damage", [holding(0, 300), lambda ids: ids.flip(1)])
def test_other_tokens(name: str, damage: Callable[[Tensor], Tensor], folder: Path, tiny_model: Path) -> None:
    """Before anything is done with a profile, its tokens are those that it was made of."""
    file = folder / "tokens.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: damage(tensors[name])}, file)
    profile = load_profile(folder)
    for use in (profile.held_out, profile.calibration, lambda: profile.require_model(fingerprint(tiny_model))):
        with pytest.raises(UsageError, match=r"tokens\.safetensors: damaged: other token ids than profile\.json"):
            use()


def loads_or_is_refused(folder: Path, content: Any) -> None:
    """Whatever the description says: one line that can be printed, or a profile that can be shown and read."""
    (folder / "profile.json").write_text(json.dumps(content))
    try:
        profile = load_profile(folder)
    except UsageError as error:
        assert str(error).isprintable()
        assert len(str(error)) < 600
        return
    show_profile(profile)
    assert [layer.layer for layer in profile.layers] == [0, 1]
    assert {layer.place for layer in profile.layers} <= {"stream", "block"}
    assert profile.tokens == sum(map(len, load_file(folder / "tokens.safetensors")["calibration"]))
    assert all(len(profile.counts(layer.layer)) == layer.neurons for layer in profile.layers)


@settings(max_examples=25)
@given(data=st.data())
def test_anything_in_any_places(data: st.DataObject, whole: Path, described: Path) -> None:
    for damaged in damages(data, json.loads((whole / "profile.json").read_text())):
        loads_or_is_refused(described, damaged)


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damaged_profiles_are_refused(damage: Callable[[Path], object], message: str, folder: Path) -> None:
    load_profile(folder)
    damage(folder)
    with pytest.raises(UsageError, match=message) as caught:
        load_profile(folder)
    assert "\n" not in str(caught.value)


def test_a_profile_of_another_model_does_not_fit(folder: Path, tiny_model: Path) -> None:
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
    with pytest.raises(DoesNotFitError, match=r"0\.1 MiB are free"):
        profile_model(tiny_model, tmp_path / "new", options)
    assert not (tmp_path / "new").exists()


def test_weights_that_are_no_numbers_leave_nothing(tiny_model: Path, prose: Path, tmp_path: Path) -> None:
    """Nor do numbers of which the neurons' values are none."""
    for name, value, message in (
        ("mlp.up_proj", float("nan"), "has NaN or infinite values"),
        ("post_attention_layernorm", 3e38, "^layer 1: its neurons' values are not finite numbers"),
    ):
        model = Path(shutil.copytree(tiny_model, tmp_path / name))
        tensors = load_file(model / "model.safetensors")
        tensors[f"model.layers.1.{name}.weight"].view(-1)[5:] = value
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
        with pytest.raises(UnsupportedModelError, match=message):
            profile_model(model, tmp_path / "new", ProfileOptions((prose,), tokens=1024, window=128))
        assert not (tmp_path / "new").exists()
