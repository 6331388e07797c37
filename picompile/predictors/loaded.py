"""Predictors that were read and found whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from picompile.checkpoint.headers import READ_ERRORS, TensorHeader, one_line, open_file
from picompile.errors import UsageError
from picompile.predictors.layer import PARTS, LayerPredictor, tensor_name
from picompile.predictors.overlay import OverlayWeights

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from picompile_passes.materialize import WeightSource
    from picompile_passes.passes.insert_predictors import InsertPredictors


class BlockShape(NamedTuple):
    """Sizes of a feed-forward block: its neurons, and what it reads."""

    neurons: int
    hidden: int


@dataclass(frozen=True)
class Predictors:
    """A predictor for every layer.

    `path` is what was loaded. `fingerprint` and `name` say of which model they are, `model_parameters` how many that
    has, None where nobody wrote it down.
    `gate` is what training recorded of the accuracy gate, `curves` the trade-offs of each layer.
    """

    path: Path
    layers: tuple[LayerPredictor, ...]
    headers: Mapping[str, TensorHeader]
    fingerprint: str | None = None
    name: str | None = None
    model_parameters: int | None = None
    gate: Mapping[str, Any] = field(default_factory=dict)
    curves: Sequence[Mapping[str, Any]] = ()

    @property
    def parameters(self) -> int:
        """How many parameters all predictors have together."""
        return sum(layer.parameters for layer in self.layers)

    def tensor(self, layer: int, part: str) -> Tensor:
        """`fc1` [rank, hidden], `fc2` [neurons, rank] or `bias` [neurons] of a learned predictor, mapped from its file.

        Raises `KeyError` where there is none, `UsageError` where the file has changed since.
        """
        name = tensor_name(layer, part)
        header = self.headers[name]
        try:
            with open_file(header.file) as handle:
                tensor: Tensor = handle.get_tensor(name)
        except READ_ERRORS as error:
            raise UsageError(f"{header.file}: cannot read {name}: {one_line(error)}") from error
        return tensor

    def weights(self, base: "WeightSource") -> OverlayWeights:
        """`base` and the learned predictors' tensors, under the names that `insert_pass` gives their parameters."""
        shapes = {f"predictors.{name}": header.shape for name, header in self.headers.items()}

        def load(name: str) -> Tensor:
            _, _, layer, part = name.split(".")
            return self.tensor(int(layer), part)

        return OverlayWeights(base, shapes, load)

    def insert_pass(self) -> "InsertPredictors":
        """The pass that puts these predictors into a canonical graph."""
        from picompile_passes.passes.insert_predictors import InsertPredictors

        learned = [layer for layer in self.layers if layer.learned]
        return InsertPredictors(
            kind="auto",
            kinds={layer.layer: layer.kind for layer in self.layers},
            ranks={layer.layer: layer.rank for layer in learned if layer.rank is not None},
            inputs={layer.layer: layer.input for layer in learned if layer.input is not None},
            thresholds={layer.layer: layer.threshold for layer in self.layers if layer.kind not in ("exact", "none")},
        )

    def require_model(self, fingerprint: str | None, blocks: Mapping[int, BlockShape]) -> None:
        """Raises `UsageError` where these are predictors of another model.

        `blocks` are the feed-forward blocks of the model by layer, as `block_shapes` finds them. A fingerprint of None,
        here or there, is not compared.
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


def block_shapes(graph_module: "GraphModule") -> dict[int, BlockShape]:
    """The feed-forward blocks of a canonical graph by layer."""
    from picompile_passes.nodes import arguments, calls
    from picompile_passes.operands import FFN

    shapes = {}
    for number, block in enumerate(calls(graph_module.graph, FFN)):
        up = arguments(block)["up"].meta["val"]
        shapes[block.meta.get("layer", number)] = BlockShape(int(up.shape[0]), int(up.shape[1]))
    return shapes
