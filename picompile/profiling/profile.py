"""A profile: how a model's neurons fire, and samples of what its feed-forward blocks read. A folder on disk."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from picompile.errors import UsageError
from picompile.profiling.files import read_shapes, read_tensors

FORMAT = "picompile-profile"
SCHEMA = 1
PROFILE_FILE = "profile.json"
TOKENS_FILE = "tokens.safetensors"


def layer_file(layer: int) -> str:
    """Where a layer's tensors lie in the folder."""
    return f"layers/{layer:03d}.safetensors"


@dataclass(frozen=True)
class LayerProfile:
    """How the neurons of one layer fire.

    A neuron fires on a token where the magnitude of what it sends to its down row is above `threshold`.
    `firing_share` of the neurons fire on a token; the `neurons_for_80_percent` share of them makes 80 % of the firings;
    `never_fired` counts those that fired on no token. `place` says what the samples are: `stream`, what the norm before
    the block reads, or `block`, what the block itself reads.
    """

    layer: int
    neurons: int
    threshold: float
    firing_share: float
    neurons_for_80_percent: float
    never_fired: int
    place: str


@dataclass(frozen=True)
class Profile:
    """A profile that was read from `folder`.

    `fingerprint` is that of the model, `tokens` are counted in windows of `window`, `sample_count` of them were kept.
    `sources` and `held_out_source` name the texts. `thresholds` says how those of the layers were found: None in ReLU
    models, where they are zero.
    """

    folder: Path
    fingerprint: str
    model_name: str
    hidden: int
    layers: tuple[LayerProfile, ...]
    window: int
    tokens: int
    sample_count: int
    sources: tuple[str, ...]
    held_out_source: str
    held_out_tokens: int
    thresholds: Mapping[str, Any] | None = field(default=None, repr=False)

    def counts(self, layer: int) -> Tensor:
        """On how many of the tokens each neuron fired: int64 [neurons]."""
        return self._layer_tensor(layer, "counts")

    def contribution(self, layer: int) -> Tensor:
        """The sum, over the tokens, of magnitude times length of the down row of each firing: float32 [neurons]."""
        return self._layer_tensor(layer, "contribution")

    def samples(self, layer: int) -> Tensor:
        """What the block, or the norm before it, read on the sampled tokens: float16 [samples, hidden]."""
        return self._layer_tensor(layer, "input")

    def positions(self, layer: int) -> Tensor:
        """Which tokens were sampled: int64 [samples], places in the windows laid end to end. The same in all layers."""
        return self._layer_tensor(layer, "positions")

    def calibration(self) -> list[list[int]]:
        """The windows of token ids that were counted over."""
        return self._windows("calibration")

    def held_out(self) -> list[list[int]]:
        """The windows of token ids that only measure."""
        return self._windows("held_out")

    def require_model(self, fingerprint: str) -> None:
        """Raises `UsageError` unless the profile is of the model of that fingerprint."""
        if fingerprint != self.fingerprint:
            raise UsageError(f"{self.folder}: is a profile of another model ({self.model_name}); profile this one")

    def _layer_tensor(self, layer: int, name: str) -> Tensor:
        path = self.folder / layer_file(layer)
        return _named(path, read_tensors(path, only=name)[0], name)

    def _windows(self, name: str) -> list[list[int]]:
        path = self.folder / TOKENS_FILE
        windows: list[list[int]] = _named(path, read_tensors(path)[0], name).tolist()
        return windows


def load_profile(folder: Path) -> Profile:
    """Reads the profile in `folder`. Raises `UsageError` for what is none, is not complete, or is damaged."""
    path = folder / PROFILE_FILE
    content = read_description(folder)
    if content is None:
        raise UsageError(f"{folder}: is no profile: it has no {PROFILE_FILE}")
    if content.get("schema") != SCHEMA:
        raise UsageError(f"{path}: has schema {content.get('schema')}, not {SCHEMA}; profile the model again")
    if content.get("complete") is not True:
        raise UsageError(f"{folder}: is a profile that is not complete; the same command goes on with it")
    try:
        profile = _from_json(folder, content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path}: damaged: {error!r}; profile the model again") from error
    _check_files(profile)
    return profile


def read_description(folder: Path) -> dict[str, Any] | None:
    """What `profile.json` says; None where there is none. Raises `UsageError` for one that is not a profile's."""
    path = folder / PROFILE_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UsageError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(f"{path}: is not a profile's description")
    return content


def describe(profile: Profile, inputs: str, version: str, sha256: str) -> dict[str, Any]:
    """The contents of `profile.json` of a complete profile. `inputs` tells runs with other inputs apart."""
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "picompile": version,
        "model": {"fingerprint": profile.fingerprint, "name": profile.model_name, "hidden": profile.hidden},
        "calibration": {
            "sources": list(profile.sources),
            "tokens": profile.tokens,
            "window": profile.window,
            "held_out_source": profile.held_out_source,
            "held_out_tokens": profile.held_out_tokens,
            "sha256": sha256,
        },
        "samples": profile.sample_count,
        "thresholds": profile.thresholds,
        "inputs": inputs,
        "complete": True,
        "layers": [asdict(layer) for layer in profile.layers],
    }


def _from_json(folder: Path, content: Mapping[str, Any]) -> Profile:
    calibration = content["calibration"]
    return Profile(
        folder=folder,
        fingerprint=str(content["model"]["fingerprint"]),
        model_name=str(content["model"]["name"]),
        hidden=int(content["model"]["hidden"]),
        layers=tuple(LayerProfile(**layer) for layer in content["layers"]),
        window=int(calibration["window"]),
        tokens=int(calibration["tokens"]),
        sample_count=int(content["samples"]),
        sources=tuple(map(str, calibration["sources"])),
        held_out_source=str(calibration["held_out_source"]),
        held_out_tokens=int(calibration["held_out_tokens"]),
        thresholds=content["thresholds"],
    )


def _check_files(profile: Profile) -> None:
    """Raises `UsageError` for a file that is missing, cut, or of other shapes. Reads headers only."""
    count, hidden = profile.sample_count, profile.hidden
    for layer in profile.layers:
        shapes = {
            "counts": [layer.neurons],
            "contribution": [layer.neurons],
            "input": [count, hidden],
            "positions": [count],
        }
        _check_shapes(profile.folder / layer_file(layer.layer), shapes)
    windows = {"calibration": profile.tokens, "held_out": profile.held_out_tokens}
    shapes = {name: [tokens // profile.window, profile.window] for name, tokens in windows.items()}
    _check_shapes(profile.folder / TOKENS_FILE, shapes)


def _check_shapes(path: Path, shapes: Mapping[str, list[int]]) -> None:
    found = read_shapes(path)
    if found != shapes:
        raise UsageError(f"{path}: damaged: it holds {found} instead of {dict(shapes)}; profile the model again")


def _named(path: Path, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise UsageError(f"{path}: damaged: it holds no {name}; profile the model again")
    return tensors[name]
