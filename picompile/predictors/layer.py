"""What is known of one layer's predictor."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from picompile.description import LARGEST_F32, choice, figure, layer_number, number
from picompile_runtime.fields import Fields

LEARNED_KINDS = ("learned", "learned-relu")
LOSSLESS_KINDS = ("exact", "none")
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
    def from_json(cls, entry: Fields) -> "LayerPredictor":
        """Reads an entry; fields of later versions are passed over.

        Raises `ArtifactError` with the field that is wrong.
        """
        layer, kind = layer_number(entry), entry.text("kind")
        given = {key: read(entry, key) for key, read in _READ.items() if entry.data.get(key) is not None}
        for key in _needed(kind):
            if key not in given:
                raise entry.wrong(key, f"given for a layer of kind {kind}")
        return cls(layer, kind, **given)


# How the fields are read that an entry need not have.
_READ: Mapping[str, Callable[[Fields, str], Any]] = {
    "input": lambda entry, key: choice(entry, key, INPUTS),
    "rank": lambda entry, key: entry.integer(key, 1),
    "threshold": lambda entry, key: number(entry, key, -LARGEST_F32, LARGEST_F32),
    "parameters": Fields.integer,
    "bytes_f16": Fields.integer,
    **dict.fromkeys(
        ("recall", "weighted_recall", "precision", "firing_share", "computed_share", "skewness"),
        figure,
    ),
}


def _needed(kind: str) -> tuple[str, ...]:
    """What a layer of `kind` cannot be without."""
    if kind in LEARNED_KINDS:
        return ("input", "rank", "threshold", "parameters", "bytes_f16")
    # Of a kind that skips neurons, no threshold is as good as another.
    return () if kind in LOSSLESS_KINDS else ("threshold",)


def tensor_name(layer: int, part: str) -> str:
    """The name of a part's tensor in `predictors.safetensors`. In a graph `predictors.` stands before it."""
    return f"layers.{layer}.{part}"
