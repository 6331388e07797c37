"""The accuracy gate as tables: perplexity with every neuron and with the predicted ones, and the rounds before."""

from collections.abc import Mapping, Sequence
from typing import Any

from picompile.blame import to_blame
from picompile.report import numbers
from picompile.report.blocks import Table
from picompile.report.layers import LayerFigures
from picompile.report.numbers import NOTHING, measured, whole

_NAMED_LAYERS = 8

_WORDS = (
    "Perplexity of held-out text, with every neuron computed (dense) and with those that the predictors choose. The "
    "gate is how far it may rise. Beyond it, the layers in which most is missed get larger predictors, one round after "
    "another."
)


def gate_table(gate: Mapping[str, Any], layers: Sequence[LayerFigures]) -> Table | None:
    """What the predictors cost on held-out text; None where nothing was measured. `layers` say where most is missed."""
    dense, perplexity = measured(gate.get("dense_perplexity")), measured(gate.get("perplexity"))
    if dense is None and perplexity is None:
        return None
    row = (
        numbers.perplexity(dense),
        numbers.perplexity(perplexity),
        numbers.change(relative_change(gate)),
        numbers.percent(measured(gate.get("bound")), 2),
        verdict(gate),
        numbers.count(whole(gate.get("rounds"))),
        _named(to_blame({layer.layer: layer.missed_energy or 0.0 for layer in layers})),
        numbers.count(whole(gate.get("tokens"))),
        str(gate.get("text") or NOTHING),
    )
    return Table(
        "What it costs in accuracy",
        ("dense", "with predictors", "change", "gate", "met", "rounds", "most missed in layers", "tokens", "text"),
        [row],
        texts=frozenset({"met", "most missed in layers", "text"}),
        words=_WORDS,
    ).without_empty(NOTHING)


def relative_change(gate: Mapping[str, Any]) -> float | None:
    """How far the predictors raise the perplexity."""
    found = measured(gate.get("relative_change"))
    ratio = numbers.ratio(measured(gate.get("perplexity")), measured(gate.get("dense_perplexity")))
    return found if found is not None or ratio is None else ratio - 1


def verdict(gate: Mapping[str, Any]) -> str:
    """Whether the change is within the bound."""
    change, bound = relative_change(gate), measured(gate.get("bound"))
    if change is None or bound is None:
        return NOTHING
    return "yes" if change <= bound else "no"


def _named(layers: Sequence[int]) -> str:
    """A few of the layers, and how many more there are."""
    more = f" and {len(layers) - _NAMED_LAYERS} more" if len(layers) > _NAMED_LAYERS else ""
    return ", ".join(map(str, layers[:_NAMED_LAYERS])) + more or NOTHING
