"""The section of a profile: who fires, and how often."""

from collections.abc import Mapping
from typing import Any

from picompile.report import numbers
from picompile.report.blocks import UNFOLDED, Part, Pictures, Section, Table
from picompile.report.firing import Firing, firing_curve, share_for
from picompile.report.firing_pictures import curves_picture, layers_picture
from picompile.report.gate import relative_change
from picompile.report.numbers import NOTHING
from picompile.report.profile import FiringProfile

_COLUMNS = (
    "layer",
    "neurons",
    "threshold",
    "fire for a token",
    "make 80 % of firings",
    "make 80 % of contribution",
    "skewness",
    "never fired",
)
_WORDS = (
    "A neuron fires on a token when the magnitude of what it sends to the down matrix is above the threshold. Its "
    "contribution is that magnitude times the length of its row of the down matrix. Skewness is the share of the "
    "firings that the most active fifth of the neurons makes."
)


def profile_section(anchor: str, profile: FiringProfile) -> Section:
    """Facts, firing curves, firing per layer, and how thresholds were found."""
    of, figures, model = profile.of, profile.figures(), profile.model_figures()
    facts = [
        ("model", of.model_name),
        ("fingerprint", of.fingerprint[:16]),
        ("text", f"{of.tokens:,} tokens, in windows of {of.window}: {', '.join(of.sources) or NOTHING}"),
        ("neurons", f"{model.neurons:,} in {numbers.counted(len(profile.layers), 'layer')}"),
        ("fire for a token", numbers.percent(model.firing_share, 2)),
        ("make 80 % of the firings", numbers.percent(model.neurons_for_80_percent, 2)),
        ("never fired", numbers.counted(model.never_fired, "neuron")),
    ]
    pictures = [
        curves_picture(f"{anchor}-curves", {layer.layer: layer.counts for layer in profile.layers}),
        layers_picture(f"{anchor}-layers", figures),
    ]
    tables = [_layers_table(profile, figures), *_search_tables(of.thresholds)]
    parts: list[Part] = [Pictures(pictures), *tables]
    return Section(anchor, "profile", str(profile.path), facts, parts)


def _layers_table(profile: FiringProfile, figures: Mapping[int, Firing]) -> Table:
    rows = []
    for layer in profile.layers:
        firing, contribution = figures[layer.layer], firing_curve(layer.contribution)
        rows.append(
            (
                str(layer.layer),
                f"{firing.neurons:,}",
                numbers.decimal(numbers.measured(layer.threshold)),
                numbers.percent(firing.firing_share, 2),
                numbers.percent(firing.neurons_for_80_percent, 2),
                numbers.percent(share_for(contribution, 0.8), 2),
                numbers.percent(firing.skewness, 2),
                f"{firing.never_fired:,}",
            )
        )
    return Table("Each layer", _COLUMNS, rows, words=_WORDS, folded=len(rows) > UNFOLDED)


def _search_tables(search: Mapping[str, Any] | None) -> list[Table]:
    """How the thresholds of neurons that are never quite silent were found; nothing where they need none."""
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
    gate = numbers.percent(numbers.measured(search.get("gate")), 2)
    words = (
        "Each layer's threshold is the same quantile of its magnitudes: the largest with which the perplexity of "
        f"held-out text stays within {gate} of that with every neuron, {numbers.perplexity(dense)}."
    )
    return [Table("Search for thresholds", ("silenced", "perplexity", "change", "taken"), rows, words=words)]
