"""Reading a profile: every field and every file is held against what a profile can be."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from picompile.description import LARGEST_F32, check_order, check_schema, choice, layer_number, number, refusing
from picompile.errors import UsageError
from picompile.profiling.files import read_kinds
from picompile.profiling.profile import (
    ADVICE,
    PLACES,
    PROFILE_FILE,
    SCHEMA,
    TOKENS_FILE,
    LayerProfile,
    Profile,
    layer_file,
    read_description,
)
from picompile_runtime.fields import Fields

# That of who knows every token, but for rounding.
_LEAST_PERPLEXITY = 0.999


def load_profile(folder: Path) -> Profile:
    """Reads the profile in `folder`. Raises `UsageError` for what is none, is not complete, or is damaged."""
    path = folder / PROFILE_FILE
    content = read_description(folder)
    if content is None:
        raise UsageError(f"{folder}: is no profile: it has no {PROFILE_FILE}")
    check_schema(path, content, SCHEMA, ADVICE)
    if content.get("complete") is not True:
        raise UsageError(f"{folder}: is a profile that is not complete; the same command goes on with it")
    with refusing(ADVICE):
        profile = _profile(folder, Fields(content, f"{path}: damaged"))
    _check_files(profile)
    return profile


def _profile(folder: Path, content: Fields) -> Profile:
    model, text = content.object("model"), content.object("calibration")
    window = text.integer("window", 2)
    layers = tuple(map(_layer, content.objects("layers")))
    check_order(content, [layer.layer for layer in layers])
    return Profile(
        folder=folder,
        fingerprint=model.text("fingerprint"),
        model_name=model.text("name"),
        hidden=model.integer("hidden", 1),
        layers=layers,
        window=window,
        tokens=_windowed(text, "tokens", window),
        sample_count=content.integer("samples", 1),
        sources=text.texts("sources"),
        held_out_source=text.text("held_out_source"),
        held_out_tokens=_windowed(text, "held_out_tokens", window),
        thresholds=None if content.data.get("thresholds", 0) is None else _search(content.object("thresholds")),
        tokens_sha256=text.text("sha256"),
        config=model.object("config").data if "config" in model.data else None,
    )


def _layer(entry: Fields) -> LayerProfile:
    neurons = entry.integer("neurons", 1)
    return LayerProfile(
        layer=layer_number(entry),
        neurons=neurons,
        threshold=number(entry, "threshold", 0, LARGEST_F32),
        firing_share=number(entry, "firing_share", 0, 1),
        neurons_for_80_percent=number(entry, "neurons_for_80_percent", 0, 1),
        never_fired=entry.integer("never_fired", 0, neurons),
        place=choice(entry, "place", PLACES),
    )


def _windowed(text: Fields, key: str, window: int) -> int:
    """A number of tokens, all in whole windows."""
    tokens = text.integer(key, window)
    if tokens % window:
        raise text.wrong(key, f"a multiple of the window of {window}")
    return tokens


def _search(search: Fields) -> Mapping[str, Any]:
    """How thresholds were found, as it stands there."""
    number(search, "silenced_share", 0, 1)
    for key in ("dense_perplexity", "perplexity"):
        number(search, key, _LEAST_PERPLEXITY)
    return search.data


def _check_files(profile: Profile) -> None:
    """Raises `UsageError` for a file that is missing, cut, of other shapes, or with values that no profile has.

    Does not read the samples, which are large, nor what only a training or a compilation reads.
    """
    count, positions = profile.sample_count, None
    listed = {profile.folder / layer_file(layer.layer) for layer in profile.layers}
    if others := set((profile.folder / "layers").glob("*.safetensors")) - listed:
        raise UsageError(f"{min(others)}: damaged: {PROFILE_FILE} has no such layer; {ADVICE}")
    for layer in profile.layers:
        kinds = {
            "counts": f"I64 [{layer.neurons}]",
            "contribution": f"F32 [{layer.neurons}]",
            "input": f"F16 [{count}, {profile.hidden}]",
            "positions": f"I64 [{count}]",
        }
        path = profile.folder / layer_file(layer.layer)
        _check_kinds(path, kinds)
        for read in (profile.counts, profile.contribution):
            read(layer.layer)
        found = profile.positions(layer.layer)
        if positions is not None and not found.equal(positions):
            raise UsageError(f"{path}: damaged: samples of other tokens than in the layer before; {ADVICE}")
        positions = found
    windows = {"calibration": profile.tokens, "held_out": profile.held_out_tokens}
    kinds = {name: f"I32 [{tokens // profile.window}, {profile.window}]" for name, tokens in windows.items()}
    _check_kinds(profile.folder / TOKENS_FILE, kinds)


def _check_kinds(path: Path, kinds: Mapping[str, str]) -> None:
    found = read_kinds(path)
    if found != kinds:
        raise UsageError(f"{path}: damaged: it holds {_listed(found)} instead of {_listed(kinds)}; {ADVICE}")


def _listed(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name!r} {kind}" for name, kind in sorted(kinds.items()))[:300] or "nothing"
