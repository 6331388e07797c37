"""A predictor set: the predictor of each layer, and their tensors as a weight source."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import GraphModule

from picompile.errors import UsageError
from picompile.frontend.tensor_file import TensorHeader, read_tensor
from picompile.predictors.description import choice, figure, layer_number, number
from picompile.quantities import LARGEST_FLOAT32
from picompile_passes.formats.packing import dequantize_rows, quantize_rows
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import FFN, INPUTS
from picompile_passes.graph.weight_source import WeightSource, load_rows, take_rows
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.predictors import PREDICTOR_KINDS
from picompile_runtime.artifact.fields import Fields

LEARNED_KINDS = tuple(name for name in PREDICTOR_KINDS.builtin if PREDICTOR_KINDS[name].has_rank)
LOSSLESS_KINDS = tuple(name for name in PREDICTOR_KINDS.builtin if PREDICTOR_KINDS[name].lossless)

# The tensors of a learned predictor.
PARTS = ("fc1", "fc2", "bias")


@dataclass(frozen=True)
class LayerPredictor:
    """One layer's predictor.

    `kind` names a predictor kind of `picompile_passes.predictors`. `input` and `rank` are those of a learned kind: its
    input (`block`, `stream` or `previous`, see `InsertPredictors`) and the rows of fc1. `threshold` is the logit, or
    the share of signs, above which a neuron is computed. `parameters` counts the predictor's own weights; `bytes_f16`
    is their size in f16.

    The other fields were measured on held-out samples, and are None if they were not: `recall` is (fired and computed)
    / fired, `weighted_recall` is the recall weighted by contribution, `precision` is (fired and computed) / computed,
    `firing_share` and `computed_share` are shares of all neurons, `skewness` is the share of firings that come from the
    most active fifth of the neurons.
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
        """Whether the predictor has weights of its own."""
        return self.kind in LEARNED_KINDS

    @classmethod
    def from_json(cls, entry: Fields) -> "LayerPredictor":
        """Read an entry; unknown fields of later versions are ignored.

        Raises:
            ArtifactError: A field is missing or wrong; the error names it.
        """
        layer, kind = layer_number(entry), entry.text("kind")
        given = {key: read(entry, key) for key, read in _READ.items() if entry.data.get(key) is not None}
        for key in _needed(kind):
            if key not in given:
                raise entry.wrong(key, f"given for a layer of kind {kind}")
        return cls(layer, kind, **given)


# How each optional field of an entry is read.
_READ: Mapping[str, Callable[[Fields, str], Any]] = {
    "input": lambda entry, key: choice(entry, key, INPUTS),
    "rank": lambda entry, key: entry.integer(key, 1),
    "threshold": lambda entry, key: number(entry, key, -LARGEST_FLOAT32, LARGEST_FLOAT32),
    "parameters": Fields.integer,
    "bytes_f16": Fields.integer,
    **dict.fromkeys(
        ("recall", "weighted_recall", "precision", "firing_share", "computed_share", "skewness"),
        figure,
    ),
}


def _needed(kind: str) -> tuple[str, ...]:
    """Return the fields that a layer of `kind` must have."""
    if kind in LEARNED_KINDS:
        return ("input", "rank", "threshold", "parameters", "bytes_f16")
    # A kind that skips neurons needs a threshold; no default is safe.
    return () if kind in LOSSLESS_KINDS else ("threshold",)


def tensor_name(layer: int, part: str) -> str:
    """Return the name of a part's tensor in `predictors.safetensors`; in a graph it has the prefix `predictors.`."""
    return f"layers.{layer}.{part}"


class TensorsOnAccess(Mapping[str, Tensor]):
    """Tensors by name, each read by a function of its own whenever it is asked for."""

    def __init__(self, reads: Mapping[str, Callable[[], Tensor]]) -> None:
        self._reads = reads

    def __getitem__(self, name: str) -> Tensor:
        return self._reads[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._reads)

    def __len__(self) -> int:
        return len(self._reads)


class OverlayWeights:
    """A weight source of `base` and further tensors, which are loaded on access.

    `shapes` are the shapes of the further tensors by name, and `load` reads one of them. They hide tensors of `base`
    with the same names.
    """

    def __init__(
        self, base: WeightSource, shapes: Mapping[str, tuple[int, ...]], load: Callable[[str], Tensor]
    ) -> None:
        self._base = base
        self._shapes = dict(shapes)
        self._load = load

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return [*(name for name in self._base.names() if name not in self._shapes), *self._shapes]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor `name` without reading it. Raise `KeyError` for an unknown name."""
        return self._shapes[name] if name in self._shapes else self._base.shape(name)

    def load(self, name: str) -> Tensor:
        """Return the tensor `name`, which must not be written to. Raise `KeyError` for an unknown name."""
        return self._load(name) if name in self._shapes else self._base.load(name)

    def load_rows(self, name: str, rows: Tensor) -> Tensor:
        """Return some rows of a matrix, or of a stack of matrices. Raise `KeyError` for an unknown name."""
        return take_rows(self._load(name), rows) if name in self._shapes else load_rows(self._base, name, rows)

    def packed(
        self, name: str, format_name: str, transposed: bool = False, rows: Tensor | None = None
    ) -> Tensor | None:
        """Return rows of a matrix of `base` in the bytes that it has them in already, all without `rows`, or None."""
        packed: Callable[..., Tensor | None] | None = getattr(self._base, "packed", None)
        if packed is None or name in self._shapes:
            return None
        return packed(name, format_name, transposed, *(() if rows is None else (rows,)))

    def stored(self) -> Mapping[str, str | None]:
        """Return the format that has the numbers of each quantized matrix of `base`, None where no format has them."""
        stored: Callable[[], Mapping[str, str | None]] | None = getattr(self._base, "stored", None)
        found = {} if stored is None else stored()
        return {name: form for name, form in found.items() if name not in self._shapes}


class BlockShape(NamedTuple):
    """Sizes of a feed-forward block: its neurons, and its inputs."""

    neurons: int
    hidden: int


@dataclass(frozen=True)
class Predictors:
    """A predictor set: one predictor for every layer, read from `path` and checked.

    `fingerprint`, `name` and `model_parameters` are those of the model, None if they were not recorded. `accuracy` has
    the facts of training's accuracy check, `curves` the trade-off curves of each layer.
    """

    path: Path
    layers: tuple[LayerPredictor, ...]
    headers: Mapping[str, TensorHeader]
    fingerprint: str | None = None
    name: str | None = None
    model_parameters: int | None = None
    accuracy: Mapping[str, Any] = field(default_factory=dict)
    curves: Sequence[Mapping[str, Any]] = ()

    @property
    def parameters(self) -> int:
        """The number of parameters of all predictors together."""
        return sum(layer.parameters for layer in self.layers)

    def tensor(self, layer: int, part: str) -> Tensor:
        """Return `fc1` [rank, hidden], `fc2` [neurons, rank] or `bias` [neurons], mapped from the file.

        Raises:
            KeyError: The layer has no learned predictor.
            UsageError: The file has changed since it was read.
        """
        name = tensor_name(layer, part)
        return read_tensor(self.headers[name].file, name, UsageError)

    def weights(self, base: WeightSource, quant: str | None = None) -> OverlayWeights:
        """Return `base` and the learned predictors' tensors, under the names that `insert_pass` gives them.

        Their matrices have the values that the weight format `quant` gives them; None: those of the file.
        """
        shapes = {f"predictors.{name}": header.shape for name, header in self.headers.items()}

        def load(name: str) -> Tensor:
            _, _, layer, part = name.split(".")
            tensor = self.tensor(int(layer), part)
            if quant is None or tensor.dim() < 2:
                return tensor
            return dequantize_rows(quantize_rows(tensor, quant), quant, tensor.shape[1])

        return OverlayWeights(base, shapes, load)

    def insert_pass(self) -> InsertPredictors:
        """Return the pass that inserts these predictors into a canonical graph."""
        learned = [layer for layer in self.layers if layer.learned]
        return InsertPredictors(
            kind="auto",
            kinds={layer.layer: layer.kind for layer in self.layers},
            ranks={layer.layer: layer.rank for layer in learned if layer.rank is not None},
            inputs={layer.layer: layer.input for layer in learned if layer.input is not None},
            thresholds={layer.layer: layer.threshold for layer in self.layers if layer.kind not in LOSSLESS_KINDS},
        )

    def require_model(self, fingerprint: str | None, blocks: Mapping[int, BlockShape]) -> None:
        """Raise `UsageError` if these are predictors of another model.

        `blocks` are the `block_shapes` of the model. Fingerprints are compared only if neither is None.
        """
        if None not in (fingerprint, self.fingerprint) and fingerprint != self.fingerprint:
            of = f" of {self.name}" if self.name else ""
            raise UsageError(f"{self.path}: predictors{of} for another model than this; train them for it")
        numbers = {layer.layer for layer in self.layers}
        if numbers != set(blocks):
            missing = sorted(set(blocks) - numbers)
            what = f"no predictor for layer {missing[0]}" if missing else f"layer {max(numbers)} is not in the model"
            raise UsageError(f"{self.path}: {what}, which has {len(blocks)} layers; train predictors for this model")
        for layer in self.layers:
            if layer.learned:
                self._require_shape(layer, blocks[layer.layer])

    def _require_shape(self, layer: LayerPredictor, block: BlockShape) -> None:
        expected = ((layer.rank, block.hidden), (block.neurons, layer.rank), (block.neurons,))
        for part, shape in zip(PARTS, expected, strict=True):
            found = self.headers[tensor_name(layer.layer, part)].shape
            if found != shape:
                raise UsageError(
                    f"{self.path}: {part} of layer {layer.layer} is {list(found)}, but the model needs {list(shape)}"
                )


def block_shapes(graph_module: GraphModule) -> dict[int, BlockShape]:
    """Return the sizes of the feed-forward blocks of a canonical graph by layer."""

    shapes = {}
    for index, block in enumerate(calls(graph_module.graph, FFN)):
        up = arguments(block)["up"].meta["val"]
        shapes[block.meta.get("layer", index)] = BlockShape(int(up.shape[0]), int(up.shape[1]))
    return shapes
