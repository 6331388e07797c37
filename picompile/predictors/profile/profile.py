"""A profile, a folder on disk: firing counts of a model's neurons, and samples of its feed-forward blocks' inputs."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from picompile.errors import UsageError
from picompile.frontend.tensor_file import headers_of
from picompile.predictors.description import (
    adding_advice,
    check_order,
    check_schema,
    choice,
    layer_number,
    number,
    read_object,
)
from picompile.predictors.firing import MAGNITUDE, MEASURES, FiringRule
from picompile.predictors.profile.files import read_tensors
from picompile.predictors.profile.options import PROFILE_FILE
from picompile.predictors.profile.windows import windows_sha256
from picompile.quantities import LARGEST_FLOAT32
from picompile_runtime.artifact.fields import Fields

FORMAT = "picompile-profile"
SCHEMA = 1
TOKENS_FILE = "tokens.safetensors"
PLACES = ("stream", "block")

ADVICE = "profile the model again"


def layer_file(layer: int) -> str:
    """Return the file of a layer's tensors, relative to the folder."""
    return f"layers/{layer:03d}.safetensors"


@dataclass(frozen=True)
class LayerProfile:
    """The firing statistics of one layer.

    A neuron fires on a token if its output, by the profile's measure, is above `threshold`.
    `firing_share` is the mean share of neurons that fire on a token; the share `neurons_for_80_percent` of the neurons
    makes 80 % of the firings; `never_fired` counts neurons that fired on no token. `place` says what the samples are
    inputs of: `stream` (the norm before the block) or `block` (the block itself).

    Of a mixture, the share `experts_for_80_percent` of the `experts` makes 80 % of all choices, and no token chose the
    `never_chosen`; of `chosen_again` of all choices the token before has chosen the same expert. A neuron does not fire
    on a token that does not choose its expert.
    """

    layer: int
    neurons: int
    threshold: float
    firing_share: float
    neurons_for_80_percent: float
    never_fired: int
    place: str
    experts: int = 0
    experts_for_80_percent: float = 0.0
    never_chosen: int = 0
    chosen_again: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the entry of `profile.json`; one of a block without experts says nothing of them."""
        return {name: value for name, value in asdict(self).items() if self.experts or name not in _OF_EXPERTS}


_OF_EXPERTS = ("experts", "experts_for_80_percent", "never_chosen", "chosen_again")


@dataclass(frozen=True)
class Profile:
    """A profile that was read from `folder`.

    `fingerprint` is the model's. Firings were counted on `tokens` tokens in windows of `window`, and the block inputs
    of `sample_count` of them were kept. `sources` and `held_out_source` name the texts. `thresholds` has the facts of
    the threshold search; it is None for ReLU models, whose thresholds are zero. `tokens_sha256` is the `windows_sha256`
    of the token ids. `config` is the content of the model's config.json, None in profiles of earlier versions.
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
    tokens_sha256: str = field(default="", repr=False)
    config: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def by(self) -> str:
        """The measure of a neuron's output that thresholds are of: one of `MEASURES`, by default `magnitude`."""
        return str((self.thresholds or {}).get("by", MAGNITUDE))

    @property
    def has_experts(self) -> bool:
        """Whether a layer of the model is a mixture of experts."""
        return any(layer.experts for layer in self.layers)

    @property
    def firing_rules(self) -> dict[int, FiringRule]:
        """The rule by which the neurons of each layer fire."""
        return {layer.layer: FiringRule(layer.threshold, self.by) for layer in self.layers}

    def counts(self, layer: int) -> Tensor:
        """Return on how many of the tokens each neuron fired: int64 [neurons]."""
        return self._layer_tensor(layer, "counts")

    def chosen(self, layer: int) -> Tensor:
        """Return how many of the tokens chose each expert: int64 [experts]. Raise `UsageError` for a layer of none."""
        return self._layer_tensor(layer, "chosen")

    def chosen_after(self, layer: int) -> Tensor:
        """Return how many of the tokens chose each expert (column) right after one that chose each other (row).

        int64 [experts, experts]. Raise `UsageError` for a layer of none.
        """
        return self._layer_tensor(layer, "after")

    def gains(self, layer: int) -> Tensor:
        """Return the gains of all experts on sampled tokens: float16 [samples, experts]; 0 where it is not chosen."""
        return self._layer_tensor(layer, "gains")

    def contribution(self, layer: int) -> Tensor:
        """Return the sum over all firings of magnitude times length of the down row: float32 [neurons]."""
        return self._layer_tensor(layer, "contribution")

    def samples(self, layer: int) -> Tensor:
        """Return the inputs of the block, or of the norm before it, on sampled tokens: float16 [samples, hidden]."""
        return self._layer_tensor(layer, "input")

    def positions(self, layer: int) -> Tensor:
        """Return the sampled tokens: int64 [samples], positions in the concatenated windows, equal in all layers."""
        return self._layer_tensor(layer, "positions")

    def calibration(self) -> list[list[int]]:
        """Return the windows of token ids that firings were counted on."""
        return self._windows("calibration")

    def held_out(self) -> list[list[int]]:
        """Return the held-out windows of token ids, which are only measured on."""
        return self._windows("held_out")

    def require_model(self, fingerprint: str) -> None:
        """Raise `UsageError` if the profile is of a model with another fingerprint, or its token file was changed."""
        if fingerprint != self.fingerprint:
            raise UsageError(f"{self.folder}: is a profile of another model ({self.model_name!r}); profile this one")
        self._token_ids()

    def _layer_tensor(self, layer: int, name: str) -> Tensor:
        """Read a tensor of a layer. Raise `UsageError` if it holds values that no profile has."""
        path = self.folder / layer_file(layer)
        found = _named(path, read_tensors(path, only=name)[0], name)
        must, holds = _VALUES[name]
        if not holds(found, self.tokens):
            raise UsageError(f"{path}: damaged: {name} must be {must}; {ADVICE}")
        return found

    def _windows(self, name: str) -> list[list[int]]:
        windows: list[list[int]] = self._token_ids()[name].tolist()
        return windows

    def _token_ids(self) -> dict[str, Tensor]:
        """Read the token ids. Raise `UsageError` if they are not those that were profiled on."""
        path = self.folder / TOKENS_FILE
        tensors = read_tensors(path)[0]
        windows = {name: _named(path, tensors, name) for name in ("calibration", "held_out")}
        if windows_sha256(*windows.values()) != self.tokens_sha256:
            raise UsageError(f"{path}: damaged: other token ids than {PROFILE_FILE} was made of; {ADVICE}")
        return windows


# For each tensor of a layer: what it must hold, in words, and a check of that, given the number of tokens.
_VALUES: Mapping[str, tuple[str, Callable[[Tensor, int], bool]]] = {
    "counts": ("from 0 to the number of tokens", lambda x, tokens: bool(((x >= 0) & (x <= tokens)).all())),
    "chosen": ("from 0 to the number of tokens", lambda x, tokens: bool(((x >= 0) & (x <= tokens)).all())),
    "after": ("from 0 to the number of tokens", lambda x, tokens: bool(((x >= 0) & (x <= tokens)).all())),
    "gains": ("finite", lambda x, tokens: bool(x.isfinite().all())),
    "contribution": ("finite and not negative", lambda x, tokens: bool((x.isfinite() & (x >= 0)).all())),
    "input": ("finite", lambda x, tokens: bool(x.isfinite().all())),
    "positions": (
        "places of tokens in order",
        lambda x, tokens: bool((x[1:] > x[:-1]).all() and x[0] >= 0 and x[-1] < tokens),
    ),
}


def is_complete(folder: Path) -> bool:
    """Return whether the folder holds a complete profile. Raise `UsageError` as `read_description` does."""
    return (read_description(folder) or {}).get("complete") is True


def read_description(folder: Path) -> dict[str, Any] | None:
    """Return the content of `profile.json`; None if there is none. Raise `UsageError` if it is not a profile's."""
    path = folder / PROFILE_FILE
    return read_object(path, FORMAT, "a profile's description") if path.is_file() else None


def describe(profile: Profile, inputs: str, version: str, sha256: str) -> dict[str, Any]:
    """Return the content of `profile.json` for a complete profile. `inputs` tells runs with other inputs apart."""
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "picompile": version,
        "model": {
            "fingerprint": profile.fingerprint,
            "name": profile.model_name,
            "hidden": profile.hidden,
            "config": profile.config,
        },
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
        "layers": [layer.to_json() for layer in profile.layers],
    }


def _named(path: Path, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise UsageError(f"{path}: damaged: it holds no {name}; {ADVICE}")
    return tensors[name]


# Reading checks every field and every file against what a profile can be. A model that knows every token has a
# perplexity of 1, except for rounding.
_LEAST_PERPLEXITY = 0.999


def load_profile(folder: Path) -> Profile:
    """Read the profile in `folder`. Raise `UsageError` if it is no profile, not complete, or damaged."""
    path = folder / PROFILE_FILE
    content = read_description(folder)
    if content is None:
        raise UsageError(f"{folder}: is no profile: it has no {PROFILE_FILE}")
    check_schema(path, content, SCHEMA, ADVICE)
    if content.get("complete") is not True:
        raise UsageError(f"{folder}: is a profile that is not complete; the same command goes on with it")
    with adding_advice(ADVICE):
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
    experts = entry.integer("experts", 1, neurons) if "experts" in entry.data else 0
    if experts and neurons % experts:
        raise entry.wrong("experts", f"a divisor of the {neurons} neurons")
    return LayerProfile(
        layer=layer_number(entry),
        neurons=neurons,
        threshold=number(entry, "threshold", 0, LARGEST_FLOAT32),
        firing_share=number(entry, "firing_share", 0, 1),
        neurons_for_80_percent=number(entry, "neurons_for_80_percent", 0, 1),
        never_fired=entry.integer("never_fired", 0, neurons),
        place=choice(entry, "place", PLACES),
        experts=experts,
        experts_for_80_percent=number(entry, "experts_for_80_percent", 0, 1) if experts else 0.0,
        never_chosen=entry.integer("never_chosen", 0, experts) if experts else 0,
        chosen_again=number(entry, "chosen_again", 0, 1) if experts else 0.0,
    )


def _windowed(text: Fields, key: str, window: int) -> int:
    """Return a number of tokens, which must be a multiple of the window."""
    tokens = text.integer(key, window)
    if tokens % window:
        raise text.wrong(key, f"a multiple of the window of {window}")
    return tokens


def _search(search: Fields) -> Mapping[str, Any]:
    """Return the facts of the threshold search unchanged, after a check of their measure and numbers."""
    if "by" in search.data:
        choice(search, "by", MEASURES)
    number(search, "silenced_share", 0, 1)
    for key in ("dense_perplexity", "perplexity"):
        number(search, key, _LEAST_PERPLEXITY)
    return search.data


def _check_files(profile: Profile) -> None:
    """Raise `UsageError` for a file that is missing, truncated, of other shapes, or holds values that no profile has.

    The samples, which are large, are not read, nor are files that only training or compilation reads.
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
        if layer.experts:
            kinds["chosen"], kinds["after"] = f"I64 [{layer.experts}]", f"I64 [{layer.experts}, {layer.experts}]"
            kinds["gains"] = f"F16 [{count}, {layer.experts}]"
        path = profile.folder / layer_file(layer.layer)
        _check_kinds(path, kinds)
        of_experts = (profile.chosen, profile.chosen_after) if layer.experts else ()
        for read in (profile.counts, profile.contribution, *of_experts):
            read(layer.layer)
        found = profile.positions(layer.layer)
        if positions is not None and not found.equal(positions):
            raise UsageError(f"{path}: damaged: samples of other tokens than in the layer before; {ADVICE}")
        positions = found
    windows = {"calibration": profile.tokens, "held_out": profile.held_out_tokens}
    kinds = {name: f"I32 [{tokens // profile.window}, {profile.window}]" for name, tokens in windows.items()}
    _check_kinds(profile.folder / TOKENS_FILE, kinds)


def _check_kinds(path: Path, kinds: Mapping[str, str]) -> None:
    headers = headers_of(path, "missing or damaged", UsageError)
    found = {name: f"{header.dtype} {list(header.shape)}" for name, header in headers.items()}
    if found != kinds:
        raise UsageError(f"{path}: damaged: it holds {_listed(found)} instead of {_listed(kinds)}; {ADVICE}")


def _listed(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name!r} {kind}" for name, kind in sorted(kinds.items()))[:300] or "nothing"
