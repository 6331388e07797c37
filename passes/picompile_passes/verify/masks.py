"""Rules of masks and of the predictors that make them."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from picompile_passes.deciding import deciding_side, deciding_weights, stream_of
from picompile_passes.dialect import parse_activation
from picompile_passes.nodes import arguments, calls, is_call
from picompile_passes.operands import PREDICT, SPARSE_FFN
from picompile_passes.predictors import PredictorKind, predictor_kind
from picompile_passes.propagate import value_text
from picompile_passes.verify.neurons import table_of
from picompile_passes.verify.rule import Fault


def check_masks(graph_module: GraphModule) -> Iterator[Fault]:
    """Each block's mask comes from a `predict` of its layer; its rows name columns of that mask.

    The predictor reads the block's input. One with weights of its own may read what the norm reads that makes this
    input, or the input of the block of the layer before.
    """
    for node in calls(graph_module.graph, SPARSE_FFN):
        values = arguments(node)
        mask, neurons = values["mask"], values["neurons"]
        if not is_call(mask, PREDICT):
            yield Fault(node, f"its mask {mask} comes from no predict")
            continue
        if mask.meta.get("layer") != node.meta.get("layer"):
            yield Fault(node, f"its mask {mask.name} is of layer {mask.meta.get('layer')}")
        if arguments(mask)["x"] not in _inputs(node, values, predictor_kind(arguments(mask)["kind"])):
            yield Fault(node, f"its mask {mask.name} is predicted from another input")
        rows, columns = int(values["up"].meta["val"].shape[0]), int(mask.meta["val"].shape[1])
        if neurons is None and rows != columns:
            yield Fault(node, f"has {rows} neurons, but its mask {columns}")
        if neurons is not None:
            yield from _check_table(node, table_of(graph_module, neurons), columns)


def _inputs(node: Node, block: dict[str, Any], kind: PredictorKind) -> list[Node]:
    """What a predictor of `kind` may read for the block `node`."""
    if kind.parameters is None:
        return [block["x"]]
    stream = stream_of(block["x"])
    return [block["x"], *([] if stream is None else [stream]), *_inputs_before(node.graph, node.meta["layer"])]


def _inputs_before(graph: Graph, layer: int) -> Iterator[Node]:
    """The x of the blocks of the layer before `layer`."""
    return (arguments(node)["x"] for node in calls(graph, SPARSE_FFN) if node.meta.get("layer") == layer - 1)


def _check_table(node: Node, table: Tensor | None, columns: int) -> Iterator[Fault]:
    if table is None:
        yield Fault(node, "its neurons are no table of the module")
    elif table.numel() and not 0 <= int(table.min()) <= int(table.max()) < columns:
        yield Fault(node, f"its neurons are {int(table.min())} to {int(table.max())}, but its mask has {columns}")


def check_predictors(graph_module: GraphModule) -> Iterator[Fault]:
    """A predictor reads the block's own weights, as its kind does, or weights of its own that fit one another.

    `exact` decides as the block's activation does; `none` reads the block's up.
    """
    for node in calls(graph_module.graph, SPARSE_FFN):
        block, predictor = arguments(node), arguments(arguments(node)["mask"])
        kind, weights = predictor_kind(predictor["kind"]), list(predictor["weights"])
        if kind.parameters is not None:
            yield from _check_parameters(node, kind, predictor)
        elif kind.name == "none":
            if weights != [block["up"]]:
                yield Fault(node, "its predictor none does not read its up")
        elif weights != (deciding := deciding_weights(block, with_bias=kind.reads_bias)):
            yield Fault(node, f"its predictor {kind.name} reads {weights}, not its {deciding_side(block)} {deciding}")
        if kind.name == "exact":
            yield from _check_exact(node, block, predictor)


def _check_parameters(node: Node, kind: PredictorKind, predictor: dict[str, Any]) -> Iterator[Fault]:
    """Every dimension has one size: of the mask, of the input, of the rank."""
    weights, parameters = predictor["weights"], kind.parameters or {}
    if len(weights) != len(parameters):
        yield Fault(node, f"its predictor {kind.name} has {len(weights)} weights, not {', '.join(parameters)}")
        return
    mask = arguments(node)["mask"]
    sizes = {"F": int(mask.meta["val"].shape[1]), "D": int(predictor["x"].meta["val"].shape[1])}
    for (name, letters), weight in zip(parameters.items(), weights, strict=True):
        value = weight.meta["val"]
        if value.dim() != len(letters):
            yield Fault(node, f"{name} of its predictor is {value_text(value)}, not of {len(letters)} dimensions")
            continue
        expected = [sizes.setdefault(letter, int(size)) for letter, size in zip(letters, value.shape, strict=True)]
        if list(value.shape) != expected:
            yield Fault(node, f"{name} of its predictor is {value_text(value)}, not {expected}")


def _check_exact(node: Node, block: dict[str, Any], predictor: dict[str, Any]) -> Iterator[Fault]:
    activation = parse_activation(block["activation"])
    if not activation.sparse:
        yield Fault(node, f"its predictor is exact, but {activation.text} is never silent")
    elif predictor["threshold"] != activation.threshold:
        yield Fault(node, f"its threshold is {predictor['threshold']}, {activation.text}'s {activation.threshold}")
