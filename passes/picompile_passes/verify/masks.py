"""Rules of masks, of the predictors that make them, and of the parts of a partition."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from picompile_passes.dialect import parse_activation
from picompile_passes.graph.nodes import arguments, attribute, calls, is_call
from picompile_passes.graph.operands import (
    ADD,
    DEQUANTIZE,
    INDEX_SELECT,
    NEURON_OPERANDS,
    PREDICT,
    QUANTIZE,
    SPARSE_FFN,
    gating_side,
    gating_weights,
    stream_of,
)
from picompile_passes.graph.values import value_text
from picompile_passes.predictors import PredictorKind, predictor_kind
from picompile_passes.verify.rule import Fault


def check_masks(graph_module: GraphModule) -> Iterator[Fault]:
    """Each block's mask comes from a `predict` of its layer; its rows name columns of that mask.

    The predictor reads the block's input, and its gains if it has any. One with weights of its own may read what the
    norm reads that makes this input, or the input of the block of the layer before.
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
        if arguments(mask)["gains"] not in (None, values["gains"]):
            yield Fault(node, f"its mask {mask.name} is of other gains than its own")
        rows, columns = int(values["up"].meta["val"].shape[0]), int(mask.meta["val"].shape[1])
        if neurons is None and rows != columns:
            yield Fault(node, f"has {rows} neurons, but its mask {columns}")
        if neurons is not None:
            yield from _check_table(node, table_of(graph_module, neurons), columns)


def _inputs(node: Node, block: dict[str, Any], kind: PredictorKind) -> list[Node]:
    """Return the values that a predictor of `kind` may read for the block `node`."""
    if kind.parameters is None:
        return [block["x"]]
    stream = stream_of(block["x"])
    return [block["x"], *([] if stream is None else [stream]), *_inputs_before(node.graph, node.meta["layer"])]


def _inputs_before(graph: Graph, layer: int) -> Iterator[Node]:
    """Yield the x of the blocks of the layer before `layer`."""
    return (arguments(node)["x"] for node in calls(graph, SPARSE_FFN) if node.meta.get("layer") == layer - 1)


def _check_table(node: Node, table: Tensor | None, columns: int) -> Iterator[Fault]:
    if table is None:
        yield Fault(node, "its neurons are no table of the module")
    elif table.numel() and not 0 <= int(table.min()) <= int(table.max()) < columns:
        yield Fault(node, f"its neurons are {int(table.min())} to {int(table.max())}, but its mask has {columns}")


def check_predictors(graph_module: GraphModule) -> Iterator[Fault]:
    """A predictor reads the weights of the block that its kind reads, or weights of its own whose sizes agree.

    `exact` has the threshold of the block's activation; `none` reads the block's up.
    """
    for node in calls(graph_module.graph, SPARSE_FFN):
        block, predictor = arguments(node), arguments(arguments(node)["mask"])
        kind, weights = predictor_kind(predictor["kind"]), list(predictor["weights"])
        if kind.parameters is not None:
            yield from _check_parameters(node, kind, predictor)
        elif kind.name == "none":
            if weights != [block["up"]]:
                yield Fault(node, "its predictor none does not read its up")
        elif weights != (gating := gating_weights(block, with_bias=kind.reads_bias)):
            yield Fault(node, f"its predictor {kind.name} reads {weights}, not its {gating_side(block)} {gating}")
        if kind.name == "exact":
            yield from _check_exact(node, block, predictor)


def _check_parameters(node: Node, kind: PredictorKind, predictor: dict[str, Any]) -> Iterator[Fault]:
    """Each of the dimensions F, D and R has one size in the mask, the input and all weights."""
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


@dataclass(frozen=True)
class _SelectedRows:
    """Rows of one weight: all rows of `source` where `table` is None, else those that `table` names."""

    source: Node
    table: Node | None


def check_parts(graph_module: GraphModule) -> Iterator[Fault]:
    """A layer has one block, or a hot and a cold part.

    The parts are added; each selects the rows of all its weights by one table, from the same whole; the tables are
    disjoint and cover every neuron; `down_bias` is with one of them at most.
    """
    layers: dict[int, list[Node]] = {}
    for node in calls(graph_module.graph, SPARSE_FFN):
        layers.setdefault(node.meta["layer"], []).append(node)
    for parts in layers.values():
        if len(parts) > 1:
            yield from _check_split(graph_module, parts)


def _check_split(graph_module: GraphModule, parts: list[Node]) -> Iterator[Fault]:
    kinds = [part.meta.get("neurons") for part in parts]
    if sorted(map(str, kinds)) != ["cold", "hot"]:
        yield Fault(parts[-1], f"the layer's parts are {kinds}, not one hot and one cold")
        return
    hot, cold = parts
    if not any(is_call(user, ADD) and set(user.all_input_nodes) == {hot, cold} for user in hot.users):
        yield Fault(hot, f"it and {cold.name} are not added")
    if arguments(hot)["down_bias"] is not None and arguments(cold)["down_bias"] is not None:
        yield Fault(cold, f"down_bias is here and in {hot.name} too")
    selections = [_selection(part) for part in parts]
    for part, selection in zip(parts, selections, strict=True):
        yield from _check_one_table(part, selection)
    for name in selections[0] | selections[1]:
        sources = [selection[name].source if name in selection else None for selection in selections]
        if sources[0] is not sources[1]:
            yield Fault(cold, f"{name} is not selected from the same weight as in {hot.name}")
    tables = [table_of(graph_module, selection["up"].table) for selection in selections]
    yield from _check_cover(cold, tables, int(selections[0]["up"].source.meta["val"].shape[0]))


def _selection(part: Node) -> dict[str, _SelectedRows]:
    """Return where the rows of each weight of `part` come from, those of its row-local predictor included."""
    values = arguments(part)
    found = {name: _rows(values[name]) for name in NEURON_OPERANDS if values[name] is not None}
    predictor = arguments(values["mask"])
    if predictor_kind(predictor["kind"]).row_local:
        found |= {f"predictor weight {i}": _rows(weight) for i, weight in enumerate(predictor["weights"])}
    return found


def _check_one_table(part: Node, selection: dict[str, _SelectedRows]) -> Iterator[Fault]:
    table = selection["up"].table
    for name, rows in selection.items():
        if rows.table is None or rows.table is not table:
            yield Fault(part, f"{name} is selected by {rows.table}, but up by {table}")
    values = arguments(part)
    row_local = predictor_kind(arguments(values["mask"])["kind"]).row_local
    expected = None if row_local else table
    if values["neurons"] is not expected:
        yield Fault(part, f"its neurons are {values['neurons']}, not {expected}")


def _check_cover(part: Node, tables: list[Tensor | None], neurons: int) -> Iterator[Fault]:
    known = [table for table in tables if table is not None]
    if len(known) != len(tables):
        yield Fault(part, "a part's rows are selected by no table of the module")
        return
    rows = torch.cat(known)
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < neurons:
        yield Fault(part, f"a table names a neuron outside 0 to {neurons - 1}")
        return
    uses = torch.bincount(rows, minlength=neurons)
    if (uses > 1).any():
        yield Fault(part, f"neuron {int((uses > 1).nonzero()[0])} is in the layer's parts more than once")
    if (uses == 0).any():
        yield Fault(part, f"neuron {int((uses == 0).nonzero()[0])} is in no part of the layer")


def _rows(weight: Node) -> _SelectedRows:
    while is_call(weight, QUANTIZE, DEQUANTIZE):
        weight = weight.all_input_nodes[0]
    if not is_call(weight, INDEX_SELECT):
        return _SelectedRows(weight, None)
    values = arguments(weight)
    return _SelectedRows(values["self"], values["index"])


def table_of(graph_module: GraphModule, node: Node | None) -> Tensor | None:
    """Return the int64 table that `node` reads, or None where it reads no table of the module."""
    if node is None or node.op != "get_attr":
        return None
    table = attribute(graph_module, str(node.target))
    return table if table.dtype == torch.int64 and table.dim() == 1 and not table.is_meta else None
