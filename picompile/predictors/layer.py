"""What is known of one layer's predictor."""

from dataclasses import asdict, dataclass, fields
from typing import Any

LEARNED_KINDS = ("learned", "learned-relu")
INPUTS = ("block", "stream", "previous")

# The parts of a learned predictor, as their tensors are called.
PARTS = ("fc1", "fc2", "bias")


@dataclass(frozen=True)
class LayerPredictor:
    """One layer's predictor.

    `kind` names a predictor kind of `picompile_passes.predictors`. `input` and `rank` are those of a learned kind: what
    it reads (`block`, `stream` or `previous`, see `InsertPredictors`) and the rows of fc1. `threshold` is the logit, or
    the share of signs, above which a neuron is computed. `parameters` counts the predictor's own; `bytes_f16` is what
    they take in f16.

    The rest was measured on samples that training did not see, and is None where nothing was: `recall` is fired and
    computed / fired, `weighted_recall` the same weighted by contribution, `precision` fired and computed / computed,
    `firing_share` and `computed_share` are shares of all neurons, `skewness` is the share of firings that the most
    active fifth of the neurons has.
    """

    layer: int
    kind: str
    input: str | None = None
    rank: int | None = None
    threshold: float = 0.0
    parameters: int = 0
    bytes_f16: int = 0
    recall: float | None = None
    weighted_recall: float | None = None
    precision: float | None = None
    firing_share: float | None = None
    computed_share: float | None = None
    skewness: float | None = None

    @property
    def learned(self) -> bool:
        """Whether it has weights of its own."""
        return self.kind in LEARNED_KINDS

    def to_json(self) -> dict[str, Any]:
        """The entry of `predictors.json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, entry: Any) -> "LayerPredictor":
        """Reads an entry; fields of later versions are passed over.

        Raises `ValueError` with the fact that is wrong.
        """
        if not isinstance(entry, dict):
            raise ValueError("an entry of layers is no object")
        known = {field.name for field in fields(cls)}
        given = {key: value for key, value in entry.items() if key in known}
        if not _whole(given.get("layer")) or not isinstance(given.get("kind"), str):
            raise ValueError("an entry of layers has no layer number or no kind")
        predictor = cls(**given)
        predictor._check()
        return predictor

    def _check(self) -> None:
        place = f"layer {self.layer}"
        for name, value in (("threshold", self.threshold), *((name, getattr(self, name)) for name in _MEASURES)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{place}: {name} is {value!r}, not a number")
        if self.threshold != self.threshold or abs(self.threshold) == float("inf"):
            raise ValueError(f"{place}: threshold is {self.threshold}")
        if not self.learned:
            return
        if self.input not in INPUTS:
            raise ValueError(f"{place}: input is {self.input!r}, not one of {', '.join(INPUTS)}")
        if not _whole(self.rank) or self.rank == 0:
            raise ValueError(f"{place}: rank is {self.rank!r}, not a count")


_MEASURES = (
    "parameters",
    "bytes_f16",
    "recall",
    "weighted_recall",
    "precision",
    "firing_share",
    "computed_share",
    "skewness",
)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def tensor_name(layer: int, part: str) -> str:
    """The name of a part's tensor in `predictors.safetensors`. In a graph `predictors.` stands before it."""
    return f"layers.{layer}.{part}"
