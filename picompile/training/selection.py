"""Which share of the contribution each layer's predictor must find, and what follows from it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from picompile.training.candidates import LayerResult
from picompile.training.choose import Choice, Limits, choose
from picompile.training.workplace import Workplace

_FILE = "choice.json"


@dataclass(frozen=True)
class Selection:
    """`targets` by layer, what a choice must keep to, and the perplexities that were measured of choices."""

    targets: Mapping[int, float]
    limits: Limits
    measured: dict[str, float] = field(default_factory=dict)

    @classmethod
    def first(cls, layers: Sequence[int], recall: float, limits: Limits, measured: dict[str, float]) -> "Selection":
        """The same target for all layers."""
        return cls(dict.fromkeys(layers, recall), limits, measured)

    @classmethod
    def read(cls, place: Workplace) -> "Selection | None":
        """What `write` wrote; None where nothing was, or where it is damaged: then it is made again."""
        content = place.read(_FILE)
        try:
            targets = {int(layer): float(target) for layer, target in content["targets"].items()}
            measured = {str(key): float(perplexity) for key, perplexity in content["measured"].items()}
            return cls(targets, Limits(**content["limits"]), measured)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None

    def write(self, place: Workplace, gate: Mapping[str, Any] | None = None) -> None:
        """Notes the selection, and what the gate found of it."""
        targets = {str(layer): target for layer, target in self.targets.items()}
        content = {"targets": targets, "limits": asdict(self.limits), "measured": self.measured, "gate": gate}
        place.write(_FILE, content)

    def choices(self, results: Sequence[LayerResult]) -> list[Choice]:
        """The cheapest choice for these targets. Raises `UsageError` where there is none within the budget."""
        return choose(results, self.targets, self.limits)

    def tightened(self, layers: Sequence[int]) -> "Selection":
        """The same, but `layers` may miss half of what they might."""
        halved = {layer: 1 - (1 - self.targets[layer]) / 2 for layer in layers}
        return replace(self, targets={**self.targets, **halved})

    def changes(self, other: "Selection", results: Sequence[LayerResult]) -> bool:
        """Whether `other` leads to another choice."""
        pairs = zip(self.choices(results), other.choices(results), strict=True)
        return any(
            (mine.kind, mine.candidate, mine.point) != (theirs.kind, theirs.candidate, theirs.point)
            for mine, theirs in pairs
        )
