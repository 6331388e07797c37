"""Rules of the parts of a partition: which neurons each has."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile_passes.nodes import arguments, attribute, calls, is_call
from picompile_passes.operands import ADD, DEQUANTIZE, INDEX_SELECT, NEURON_ROWS, QUANTIZE, SPARSE_FFN
from picompile_passes.predictors import predictor_kind
from picompile_passes.verify.rule import Fault


@dataclass(frozen=True)
class _Rows:
    """Rows of one weight: all of `source` where `table` is None, else those that `table` names."""

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
    devices = [part.meta.get("device") for part in parts]
    if sorted(map(str, devices)) != ["cold", "hot"]:
        yield Fault(parts[-1], f"the layer's parts are on {devices}, not one hot and one cold")
        return
    hot, cold = parts
    if not any(is_call(user, ADD) and set(user.all_input_nodes) == {hot, cold} for user in hot.users):
        yield Fault(hot, f"it and {cold.name} are not added")
    if arguments(hot)["down_bias"] is not None and arguments(cold)["down_bias"] is not None:
        yield Fault(cold, f"down_bias is here and in {hot.name} too")
    selections = [_selection(part) for part in parts]
    for part, selection in zip(parts, selections, strict=True):
        yield from _check_one_table(part, selection)
    for name, rows in selections[0].items():
        if name not in selections[1] or selections[1][name].source is not rows.source:
            yield Fault(cold, f"{name} is not selected from the same weight as in {hot.name}")
    tables = [table_of(graph_module, selection["up"].table) for selection in selections]
    yield from _check_cover(cold, tables, int(selections[0]["up"].source.meta["val"].shape[0]))


def _selection(part: Node) -> dict[str, _Rows]:
    """Where the rows of each weight of `part` come from, its row-local predictor's included."""
    values = arguments(part)
    found = {name: _rows(values[name]) for name in NEURON_ROWS if values[name] is not None}
    predictor = arguments(values["mask"])
    if predictor_kind(predictor["kind"]).row_local:
        found |= {f"predictor weight {i}": _rows(weight) for i, weight in enumerate(predictor["weights"])}
    return found


def _check_one_table(part: Node, selection: dict[str, _Rows]) -> Iterator[Fault]:
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


def _rows(weight: Node) -> _Rows:
    while is_call(weight, QUANTIZE, DEQUANTIZE):
        weight = weight.all_input_nodes[0]
    if not is_call(weight, INDEX_SELECT):
        return _Rows(weight, None)
    values = arguments(weight)
    return _Rows(values["self"], values["index"])


def table_of(graph_module: GraphModule, node: Node | None) -> Tensor | None:
    """The int64 table that `node` reads, or None where it reads none that is there."""
    if node is None or node.op != "get_attr":
        return None
    table = attribute(graph_module, str(node.target))
    return table if table.dtype == torch.int64 and table.dim() == 1 and not table.is_meta else None
