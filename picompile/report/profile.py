"""The section of a profile: figures of firing counts, pictures of them, and tables."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from picompile.errors import UsageError
from picompile.predictors.firing import CONTRIBUTION, MAGNITUDE
from picompile.predictors.profile.files import read_tensors
from picompile.predictors.profile.profile import LayerProfile, Profile, layer_file, load_profile
from picompile.predictors.store import Predictors
from picompile.report import numbers
from picompile.report.drawing import INK, SERIES, Canvas, from_zero, layer_axis, picture, ramp
from picompile.report.numbers import (
    NOTHING,
    PagePicture,
    PageSection,
    Part,
    Pictures,
    Table,
    counted,
    percent,
    relative_change,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Counts = NDArray[np.int64] | NDArray[np.float64]


@dataclass(frozen=True)
class FiringSummary:
    """The firing of the neurons of a layer or a model.

    `firing_share` of the neurons fire for a token; the share `neurons_for_80_percent` of them makes 80 % of the
    firings; the most active fifth makes the share `skewness`; `never_fired` counts those that fired for no token. Where
    nothing fired, there are no firings to have a share of: both are None.
    """

    neurons: int
    firing_share: float
    neurons_for_80_percent: float | None
    skewness: float | None
    never_fired: int


def firing_curve(counts: Counts) -> NDArray[np.float64]:
    """Return the share of all firings that the most active neurons make, for 0, 1, 2, … of them. `[n] → [n + 1]`

    Takes contributions as well as counts. All zero where nothing fired.
    """
    ordered = np.sort(np.asarray(counts, np.float64).ravel())[::-1]
    curve = np.concatenate([np.zeros(1), ordered.cumsum()])
    return curve / curve[-1] if curve[-1] > 0 else curve


def share_for(curve: NDArray[np.float64], firings: float) -> float | None:
    """Return the smallest share of the neurons that makes this share of the firings; None where nothing fired."""
    return int((curve < firings).sum()) / (len(curve) - 1) if curve[-1] > 0 else None


def summarize(layers: Sequence[Counts], tokens: int) -> FiringSummary:
    """Return the figures of some layers taken together, from each neuron's firings among `tokens`."""
    counts = np.concatenate([np.asarray(layer).ravel() for layer in layers])
    curve = firing_curve(counts)
    fifth = max(1, round(len(counts) / 5))
    return FiringSummary(
        neurons=len(counts),
        firing_share=float(counts.mean()) / tokens,
        neurons_for_80_percent=share_for(curve, 0.8),
        skewness=float(curve[fifth]) if curve[-1] > 0 else None,
        never_fired=int((counts == 0).sum()),
    )


def sampled(curve: NDArray[np.float64], points: int = 160) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a curve as x and y in percent, at so many places that a picture needs; denser at its steep beginning."""
    last = len(curve) - 1
    places = np.unique(np.rint(last * np.linspace(0, 1, min(points, last + 1)) ** 2).astype(int))
    return 100 * places / last, 100 * curve[places]


def imported_counts(predictors: Predictors) -> dict[int, NDArray[np.int64]]:
    """Return how often each neuron fired `[neurons]`, by layer, where that is known; of how many tokens is not.

    Raises `UsageError` for a damaged file.
    """
    files = {layer.layer: predictors.path / layer_file(layer.layer) for layer in predictors.layers}
    return {layer: _counts(file) for layer, file in files.items() if file.is_file()}


def _counts(file: Path) -> NDArray[np.int64]:
    counts = read_tensors(file, only="counts")[0].get("counts")
    if counts is None or counts.ndim != 1 or not len(counts) or counts.is_floating_point() or bool((counts < 0).any()):
        raise UsageError(f"{file}: holds no counts of firings; import the predictors again")
    values: NDArray[np.int64] = counts.long().numpy()
    return values


@dataclass(frozen=True)
class FiringProfile:
    """The profile `of`: by layer, how often each neuron fired, and what its firings contributed, both `[neurons]`."""

    of: Profile
    counts: Mapping[int, NDArray[np.int64]]
    contribution: Mapping[int, NDArray[np.float64]]

    @property
    def path(self) -> Path:
        """The profile's folder."""
        return self.of.folder

    def figures(self) -> dict[int, FiringSummary]:
        """Return the figures of each layer."""
        return {layer: summarize([counts], self.of.tokens) for layer, counts in self.counts.items()}

    def model_figures(self) -> FiringSummary:
        """Return the figures of the whole model."""
        return summarize([*self.counts.values()], self.of.tokens)


def read_profile(folder: Path) -> FiringProfile:
    """Read a folder that `picompile profile` wrote. Raise `UsageError` for one that is not whole."""
    profile = load_profile(folder)
    layers = [layer.layer for layer in profile.layers]
    counts = {layer: profile.counts(layer).numpy() for layer in layers}
    return FiringProfile(profile, counts, {layer: profile.contribution(layer).double().numpy() for layer in layers})


_NAMED_LAYERS = 8


def curves_picture(name: str, counts: Mapping[int, Counts]) -> PagePicture:
    """Return the picture of neurons against firings: a line for each layer and one for the model."""
    model = firing_curve(np.concatenate([np.asarray(layer).ravel() for layer in counts.values()]))
    mark = share_for(model, 0.8)

    def paint(canvas: Canvas) -> None:
        axes = canvas.axes(x="neurons, most active first (%)", y="share of all firings (%)")
        named = _named(list(counts))
        for position, (layer, values) in enumerate(counts.items()):
            curve = firing_curve(values)
            label = f"layer {layer}" if layer in named else None
            (line,) = axes.plot(*sampled(curve), color=ramp(position, len(counts)), linewidth=1.2, label=label)
            canvas.hover(line, f"layer {layer}: {_makers(share_for(curve, 0.8))}")
        (line,) = axes.plot(*sampled(model), color=INK, linewidth=2.6, label="whole model")
        canvas.hover(line, f"whole model: {_makers(mark)}")
        if mark is not None:
            _mark(axes, 100 * mark)
        axes.set(xlim=(0, 100), ylim=(0, 101))
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.16))

    words = (
        "The neurons of a layer, or of the whole model, stand in the order of how often they fire. The line says what "
        "share of all firings the first of them make. The steeper it begins, the fewer neurons do most of the work; on "
        "the diagonal all would fire alike."
    )
    shares = {layer: share_for(firing_curve(values), 0.8) for layer, values in counts.items()}
    description = f"Whole model: {_makers(mark)}"
    if extremes := _extremes({layer: share for layer, share in shares.items() if share is not None}):
        description += f"; by layer from {extremes[0]} to {extremes[1]}"
    return picture(paint, name, title="Who makes the firings", description=f"{description}.", words=words)


def layers_picture(name: str, layers: Mapping[int, FiringSummary]) -> PagePicture:
    """Return the picture of the shares of neurons that fire for a token and that never fired, by layer."""
    shares = {layer: figures.firing_share for layer, figures in layers.items()}
    never = {layer: figures.never_fired / figures.neurons for layer, figures in layers.items()}
    mean = sum(f.firing_share * f.neurons for f in layers.values()) / sum(f.neurons for f in layers.values())

    def paint(canvas: Canvas) -> None:
        above, below = canvas.figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        for axes, values, colour, what in (
            (above, shares, SERIES[0], "fire"),
            (below, never, SERIES[1], "never fired"),
        ):
            bars = axes.bar(list(values), [100 * share for share in values.values()], color=colour, width=0.75)
            for bar, (layer, share) in zip(bars, values.items(), strict=True):
                canvas.hover(bar, f"layer {layer}: {percent(share, 2)} of the neurons {what}")
            from_zero(axes, max(values.values()), 1.0)
        above.axhline(100 * mean, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        above.set_title(f"mean {percent(mean)}", loc="right")
        above.set_ylabel("fire for a token (%)")
        below.set_ylabel("never fired (%)")
        layer_axis(canvas, above, below)

    words = (
        "Above: the share of a layer's neurons that fire for a token, on average; the dashed line is the mean of all "
        "neurons. Below: the share that fired for no token of the calibration text at all."
    )
    least, most = _extremes(shares) or ("", "")
    lost = counted(sum(figures.never_fired for figures in layers.values()), "neuron")
    description = f"From {least} to {most} of the neurons fire for a token; {lost} never fired."
    return picture(paint, name, title="How many fire", description=description, words=words)


def _mark(axes: "Axes", place: float) -> None:
    """Point out which percentage of the neurons makes 80 % of the firings."""
    axes.plot([0, place, place], [80, 80, 0], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.plot(place, 80, "o", color=INK, markersize=6)
    right = place < 50
    text = f"{percent(place / 100)} of the neurons\nmake 80 % of the firings"
    axes.annotate(text, (place + (2 if right else -2), 3), ha="left" if right else "right")


def _makers(share: float | None) -> str:
    return "nothing fired" if share is None else f"{percent(share)} of the neurons make 80 % of the firings"


def _named(layers: list[int]) -> set[int]:
    """Return the layers that the legend names: all, or a few from the first to the last."""
    if len(layers) <= _NAMED_LAYERS:
        return set(layers)
    return {layers[round(place * (len(layers) - 1) / 4)] for place in range(5)}


def _extremes(shares: Mapping[int, float]) -> tuple[str, str] | None:
    """Return the least and the most of the shares, each with its layer; None where there are none."""
    if not shares:
        return None
    least, most = min(shares, key=lambda layer: shares[layer]), max(shares, key=lambda layer: shares[layer])
    return f"{percent(shares[least])} (layer {least})", f"{percent(shares[most])} (layer {most})"


_COLUMNS: Mapping[str, Callable[[tuple[LayerProfile, FiringSummary, Counts]], str]] = {
    "layer": lambda row: str(row[0].layer),
    "neurons": lambda row: f"{row[1].neurons:,}",
    "threshold": lambda row: numbers.decimal(numbers.measured(row[0].threshold)),
    "fire for a token": lambda row: numbers.percent(row[1].firing_share, 2),
    "make 80 % of firings": lambda row: numbers.percent(row[1].neurons_for_80_percent, 2),
    "make 80 % of contribution": lambda row: numbers.percent(share_for(firing_curve(row[2]), 0.8), 2),
    "skewness": lambda row: numbers.percent(row[1].skewness, 2),
    "never fired": lambda row: f"{row[1].never_fired:,}",
}
_OF_EXPERTS: Mapping[str, Callable[[tuple[LayerProfile, FiringSummary, Counts]], str]] = {
    "experts": lambda row: f"{row[0].experts:,}" if row[0].experts else NOTHING,
    "make 80 % of choices": lambda row: percent(row[0].experts_for_80_percent, 2) if row[0].experts else NOTHING,
    "never chosen": lambda row: f"{row[0].never_chosen:,}" if row[0].experts else NOTHING,
    "chosen again": lambda row: percent(row[0].chosen_again, 2) if row[0].experts else NOTHING,
}
_EXPERTS = (
    " A neuron does not fire on a token that does not choose its expert. The last columns say what share of the "
    "experts makes 80 % of all choices, how many of them no token chose, and how often a token chooses an expert that "
    "the token before has chosen."
)
_SKEWNESS = "Skewness is the share of the firings that the most active fifth of the neurons makes."
_LENGTH = "the length of its row of the down matrix"
# By the profile's measure.
_WORDS = {
    MAGNITUDE: "A neuron fires on a token when the magnitude of what it sends to the down matrix is above the "
    f"threshold. Its contribution is that magnitude times {_LENGTH}. {_SKEWNESS}",
    CONTRIBUTION: "A neuron fires on a token when its contribution is above the threshold: the magnitude of what it "
    f"sends to the down matrix times {_LENGTH}. {_SKEWNESS}",
}


def profile_section(anchor: str, profile: FiringProfile) -> PageSection:
    """Return the section: facts, firing curves, firing by layer, and the search for thresholds."""
    of, figures, model = profile.of, profile.figures(), profile.model_figures()
    facts = [
        ("model", of.model_name),
        ("fingerprint", of.fingerprint[:16]),
        ("text", f"{of.tokens:,} tokens, in windows of {of.window}: {', '.join(of.sources) or NOTHING}"),
        ("neurons", f"{model.neurons:,} in {numbers.counted(len(figures), 'layer')}"),
        ("fire for a token", numbers.percent(model.firing_share, 2)),
        ("make 80 % of the firings", numbers.percent(model.neurons_for_80_percent, 2)),
        ("never fired", numbers.counted(model.never_fired, "neuron")),
    ]
    if of.has_experts:
        experts, never = (sum(counts) for counts in zip(*((x.experts, x.never_chosen) for x in of.layers), strict=True))
        facts.append(("experts", f"{experts:,}, of which tokens never chose {never:,}"))
    if of.thresholds is not None:
        facts.append(("thresholds are of", of.by))
    pictures = [
        curves_picture(f"{anchor}-curves", profile.counts),
        layers_picture(f"{anchor}-layers", figures),
    ]
    rows = [(layer, figures[layer.layer], profile.contribution[layer.layer]) for layer in of.layers]
    columns, words = (
        ({**_COLUMNS, **_OF_EXPERTS}, _WORDS[of.by] + _EXPERTS) if of.has_experts else (_COLUMNS, _WORDS[of.by])
    )
    layers = Table.of("Each layer", rows, columns, words=words)
    parts: list[Part] = [Pictures(pictures), layers, *_search_tables(of.thresholds, of.by)]
    return PageSection(anchor, kind="profile", name=str(profile.path), facts=facts, parts=parts)


def _search_tables(search: Mapping[str, Any] | None, by: str) -> list[Table]:
    """Return how the thresholds of neurons that are never quite silent were found; nothing where they need none."""
    if search is None or not isinstance(tried := search.get("tried"), Mapping):
        return []
    dense, taken = numbers.measured(search.get("dense_perplexity")), numbers.measured(search.get("silenced_share"))
    found = {
        share: numbers.measured(perplexity)
        for text, perplexity in tried.items()
        if (share := numbers.from_text(text)) is not None
    }
    rows = [
        (
            numbers.percent(share, 1),
            numbers.perplexity(perplexity),
            numbers.change(relative_change({"dense_perplexity": dense, "perplexity": perplexity})),
            "yes" if share == taken else NOTHING,
        )
        for share, perplexity in sorted(found.items())
    ]
    bound = numbers.percent(numbers.measured(search.get("accuracy_bound")), 2)
    words = (
        f"Each layer's threshold is the same quantile of its {by}s: the largest with which the perplexity of "
        f"held-out text stays within {bound} of that with every neuron, {numbers.perplexity(dense)}."
    )
    return [Table("Search for thresholds", ("silenced", "perplexity", "change", "taken"), rows, words=words)]
