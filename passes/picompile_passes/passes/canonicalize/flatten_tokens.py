"""Leaves only operators of the dialect: no views, no batch dimension, no positions that the graph computes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node

from picompile_passes.base import Pass, Stage, stage_of
from picompile_passes.dialect import Operator, operator_of
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.layers import mark_layers
from picompile_passes.graph.nodes import arguments, calls, constant_nodes
from picompile_passes.graph.operands import (
    ADD,
    ATTENTION,
    ELEMENTWISE,
    EMBEDDING,
    FFN,
    INDEX_SELECT,
    LAYER_NORM,
    LINEAR,
    RMS_NORM,
    SharedConstants,
    makes_constants,
)
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.graph.values import same_shape, value_text
from picompile_passes.passes.canonicalize.forms import Forms


@dataclass(frozen=True)
class FlattenTokens(Pass):
    """Rebuilds the graph from its output back, one dialect operator for one, on values [tokens, features].

    1. An argument that is all columns of another value in order, however reshaped → that value.
    2. An argument that is some columns of a `linear` → a `linear` with those rows of weight and bias. Equal tables are
       one constant, and equal columns of one linear one linear. Columns of an `elementwise` are the `elementwise` of
       those columns of its inputs, and so are those of a norm where each group's stay together.
    3. Ids that are the tokens → the tokens; ids that are positions plus a constant → the positions, and the constant
       goes into the embedding's offset.
    4. Each value gets the marks of its layer and its part of the model (`graph/layers.py`). A layer has one block.
    5. Anything else on the way to the output cannot be expressed: `UnsupportedGraphError` names it.
    """

    name: ClassVar[str] = "flatten-tokens"
    requires: ClassVar[Stage] = Stage.CAPTURED
    ensures: ClassVar[Stage] = Stage.CANONICAL

    def rewrite(self, rewriter: Rewriter) -> None:
        """Rebuild the graph and mark its layers; one that is canonical already stays as it is."""
        output = next(node for node in rewriter.graph.nodes if node.op == "output")
        builder = _FlatBuilder(rewriter)
        result = builder.build(output.args[0])
        if rewriter.changes:
            output.args = (result,)
        if stage_of(rewriter.graph_module) < Stage.CANONICAL:
            rewriter.changed(output)
            rewriter.graph.eliminate_dead_code()
            mark_layers(rewriter.graph)
            _check_blocks(rewriter.graph)


class _FlatBuilder:
    """Makes the flat counterpart of every value that the output needs."""

    def __init__(self, rewriter: Rewriter) -> None:
        self._rewriter = rewriter
        self._forms = Forms(rewriter.graph_module)
        self._constant = constant_nodes(rewriter.graph)
        self._flat: dict[Node, Node] = {}
        self._constants = SharedConstants(rewriter)
        self._parts: dict[tuple[Node, Node], Node] = {}

    def build(self, value: Any) -> Node:
        """The flat counterpart of `value`, the logits."""
        if not isinstance(value, Node):
            raise UnsupportedGraphError(f"the graph cannot be expressed in the dialect: it returns {value}")
        root = self._forms.root(value)
        if root.target is not LINEAR and root.target is not ELEMENTWISE:
            raise _unsupported(root, "it makes the logits, which only a linear does")
        needed = self._needed(value)
        nodes = list(self._rewriter.graph.nodes)
        for node in nodes:
            if node in needed:
                self._flat[node] = self._counterpart(node)
        return self._resolve(value, nodes[-1])

    def _needed(self, value: Node) -> set[Node]:
        """The roots that `value` is made of, and those that they are made of. All must be operators of the dialect."""
        needed: set[Node] = set()
        stack = [value]
        while stack:
            root = self._forms.root(stack.pop())
            if root in needed:
                continue
            _check_operator(root, self._forms)
            _check_weights(root, self._forms)
            needed.add(root)
            stack.extend(self._values(root))
        return needed

    def _values(self, node: Node) -> list[Node]:
        """Return the values among the arguments of an operator of the dialect."""
        if node.target is ELEMENTWISE:
            return [value for value in node.args[0] if value not in self._constant]  # type: ignore[union-attr, misc]
        values = arguments(node)
        return [values[name] for name in _operator(node).values if values[name] is not None]

    def _counterpart(self, node: Node) -> Node:
        named = arguments(node)
        args = list(named.values()) if node.kwargs else list(node.args)
        if node.target is EMBEDDING:
            args[0], args[2] = self._ids(node)
        elif node.target is ELEMENTWISE:
            values = self._values(node)
            args[0] = [self._resolve(value, node) if value in values else value for value in args[0]]  # type: ignore[union-attr, arg-type]
        else:
            for position, name in enumerate(named):
                if name in _operator(node).values and named[name] is not None:
                    args[position] = self._resolve(named[name], node)
        if args == list(node.args) and node.meta["val"].dim() == 2:
            return node
        return self._rewriter.call(node.target, args, before=node, sources=(node,))  # type: ignore[arg-type]

    def _resolve(self, value: Node, user: Node) -> Node:
        """The flat value that has exactly the columns of `value`."""
        moved = None if self._forms.is_known(value) else self._forms.moved(value)
        if moved is None:
            raise _unsupported(self._culprit(value), f"{user.name} takes it, but it is not just columns of a value")
        root, table = moved
        flat = self._flat[root]
        if table is None:
            return flat
        part = self._part(flat, table, root)
        if part is None:
            raise _unsupported(value, f"it takes some of the columns of {root.name}, which is no linear")
        return part

    def _culprit(self, value: Node) -> Node:
        """Return the value, on the way from its root, that is no longer just columns of the root."""
        while True:
            parents = [parent for parent in value.all_input_nodes if isinstance(parent.meta.get("val"), Tensor)]
            unknown = [parent for parent in parents if not self._forms.is_known(parent)]
            spoiled = [parent for parent in unknown if self._forms.moved(parent) is None]
            if self._forms.is_known(value) or self._forms.root(value) is value or not spoiled:
                return value
            value = spoiled[0]

    def _part(self, flat: Node, table: Tensor, root: Node) -> Node | None:
        """The flat value with only the columns `table` of `flat`, placed before `root`; None where there is none."""
        rows = self._constants.get("rows", table, root)
        if (flat, rows) not in self._parts:
            args = self._part_arguments(flat, table, root)
            if args is None:
                return None
            self._parts[flat, rows] = self._rewriter.call(flat.target, args, before=root, sources=(root,))  # type: ignore[arg-type]
        return self._parts[flat, rows]

    def _part_arguments(self, flat: Node, table: Tensor, root: Node) -> list[Any] | None:
        """The arguments with which the operator of `flat` gives only the columns `table`; None where it cannot."""

        def selected(constant: Node | None) -> Node | None:
            args = (constant, 0, self._constants.get("rows", table, root))
            return None if constant is None else self._rewriter.call(INDEX_SELECT, args, before=root, sources=(root,))

        values = arguments(flat)
        if flat.target is LINEAR:
            return [values["x"], selected(values["weight"]), selected(values["bias"])]
        if flat.target is ADD:
            sides = [self._part(values[name], table, root) for name in ("self", "other")]
            return None if None in sides else sides
        if flat.target is EMBEDDING:
            args = (values["weight"], 1, self._constants.get("rows", table, root))
            weight = self._rewriter.call(INDEX_SELECT, args, before=root, sources=(root,))
            return [values["ids"], weight, values["offset"]]
        if flat.target in (RMS_NORM, LAYER_NORM):
            groups = _kept_groups(table, values["groups"], int(flat.meta["val"].shape[-1]))
            x = None if groups is None else self._part(values["x"], table, root)
            vectors = [selected(values[name]) for name in ("weight", "bias") if name in values] if x else []
            return None if x is None else [x, *vectors, values["eps"], groups]
        if flat.target is not ELEMENTWISE or flat.meta["val"].shape[-1] == 1:
            return None
        inputs = []
        for value in values["inputs"]:
            shape = value.meta["val"].shape
            if shape[-1] == 1:
                inputs.append(value)
            else:
                inputs.append(selected(value) if len(shape) == 1 else self._part(value, table, root))
        return None if None in inputs else [inputs, values["expression"]]

    def _ids(self, node: Node) -> tuple[Node, int]:
        """The placeholder that the ids of an embedding are, and the embedding's offset."""
        values = arguments(node)
        ids, offset = values["ids"], values["offset"]
        tokens, positions = (n for n in self._rewriter.graph.nodes if n.op == "placeholder")
        sample = torch.arange(self._forms.tokens)
        if not self._forms.is_known(ids):
            form = self._forms.form(ids)
            if form.root is tokens and len(form.terms) == 1 and torch.equal(form.terms[0].index.flatten(), sample):
                return tokens, offset
            raise _unsupported(node, "its ids are not the tokens")
        shift = self._forms.known(ids).flatten() - sample
        if not bool((shift == shift[0]).all()):
            raise _unsupported(node, "its ids are not the positions plus a constant")
        return positions, offset + int(shift[0])


def _kept_groups(table: Tensor, groups: int, columns: int) -> int | None:
    """Return how many whole groups of columns `table` names, in whatever order; None where it takes them apart."""
    width = columns // groups
    if table.numel() % width:
        return None
    parts = table.reshape(-1, width).sort(dim=-1).values
    whole = parts[:, :1] // width * width + torch.arange(width)
    return len(parts) if torch.equal(parts, whole) else None


def _operator(node: Node) -> Operator:
    operator = operator_of(node.target)
    assert operator is not None
    return operator


def _check_operator(node: Node, forms: Forms) -> None:
    if node.target is ELEMENTWISE:
        if node.meta["val"].shape[-1] != forms.columns(node):
            raise _unsupported(node, "it works on each head, not on all features of a token")
        return
    operator = operator_of(node.target)
    is_dense = operator is not None and "dense" in operator.forms
    if operator is None or not is_dense or (node.target is ADD and (node.kwargs or len(node.args) != 2)):
        raise _unsupported(node, "it has no counterpart in the dialect")
    named = arguments(node)
    values = [named[name] for name in operator.values if named[name] is not None]
    if not all(isinstance(value, Node) for value in values):
        raise _unsupported(node, "it takes a number where the dialect takes a value")
    if node.target is ADD and not all(forms.columns(value) == forms.columns(node) for value in values):
        raise _unsupported(node, "it adds values of different shapes")
    if node.meta["val"].dtype != torch.float32:
        raise _unsupported(node, f"it is {node.meta['val'].dtype}, not float32")
    if node.meta["val"].shape[-1] != forms.columns(node):
        raise _unsupported(node, "it works on each head, not on all features of a token")
    if node.target is ATTENTION and not same_shape(node.meta["val"].shape[-2:-1], forms.tokens_shape):
        raise _unsupported(node, "it attends to other dimensions than the tokens")


def _check_weights(node: Node, forms: Forms) -> None:
    """Whether all that `node` takes besides values is constant, of the form that the dialect has it in."""
    if node.target is ELEMENTWISE:
        return
    operator = _operator(node)
    for name, letters in operator.dimensions.items():
        weight = arguments(node)[name]
        is_value = name in operator.values or (node.target is EMBEDDING and name == "ids")
        if not isinstance(weight, Node) or is_value or weight.op == "placeholder":
            continue
        if weight.meta["val"].dim() != len(letters):
            raise _unsupported(node, f"its {name} is {value_text(weight.meta['val'])}")
        for part in _made_of(weight):
            if part.op != "get_attr" and not makes_constants(part.target):
                raise _unsupported(part, f"the {name} of {node.name} is not computed from parameters alone")


def _check_blocks(graph: Graph) -> None:
    """Refuse a layer with several blocks, and a block before the first layer: what follows names blocks by layers."""
    taken = set[int]()
    for block in calls(graph, FFN):
        if block.meta["part"] != "block":
            raise _unsupported(block, "a feed-forward block before the first attention")
        if block.meta["layer"] in taken:
            raise _unsupported(block, f"a second feed-forward block of layer {block.meta['layer']}")
        taken.add(block.meta["layer"])


def _made_of(constant: Node) -> Iterator[Node]:
    """`constant` and all that it is computed from."""
    seen, stack = set(), [constant]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
            yield node


def _unsupported(node: Node, why: str) -> UnsupportedGraphError:
    return UnsupportedGraphError(f"the graph cannot be expressed in the dialect: {node.name} ({node.target}): {why}")
