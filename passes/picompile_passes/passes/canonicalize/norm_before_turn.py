"""Moves norms of heads in front of the rotary position embeddings that they stand behind."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from picompile_passes.base import Pass, Stage
from picompile_passes.graph.nodes import arguments, attribute, calls, has_real_data
from picompile_passes.graph.operands import RMS_NORM
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.passes.canonicalize.forms import Forms
from picompile_passes.passes.canonicalize.raise_rotary import read_rotation


@dataclass(frozen=True)
class NormBeforeTurn(Pass):
    """Moves a norm of heads whose elements all have one weight in front of the turn of these heads.

    1. `rms_norm(turned(x), w, eps)` → `turned(rms_norm(x, w, eps))`, since a turn leaves the mean square of a head as
       it is. Only where the turned pairs are no halves of a head, as in Llama 4: `raise-rotary` reorders the elements
       of queries and keys, and could not if a norm came behind.
    """

    name: ClassVar[str] = "norm-before-turn"
    requires: ClassVar[Stage] = Stage.CAPTURED
    ensures: ClassVar[Stage] = Stage.CAPTURED

    def rewrite(self, rewriter: Rewriter) -> None:
        """Find all norms before the first change, because forms hold for an unchanged graph only."""
        # Forms take as long as all else, and the weights of most norms are a checkpoint's.
        norms = [node for node in calls(rewriter.graph, RMS_NORM) if _is_constant(rewriter.graph_module, node)]
        forms = Forms(rewriter.graph_module, lookups=True) if norms else None
        found = [] if forms is None else [(node, list(_between(forms, node))) for node in norms if _turns(forms, node)]
        for node, (root, *between) in found:
            _move(rewriter, root, node, between)


def _is_constant(graph_module: GraphModule, norm: Node) -> bool:
    """Return whether the weight of a norm is made of numbers that are known."""
    made_of = _made_of(arguments(norm)["weight"])
    read = (attribute(graph_module, str(node.target)) for node in made_of if node.op == "get_attr")
    return all(node.op != "placeholder" for node in made_of) and all(map(has_real_data, read))


def _made_of(value: Node) -> list[Node]:
    """Return `value` and all that it is made of, in the order of the graph."""
    seen, stack = set[Node](), [value]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return [node for node in value.graph.nodes if node in seen]


def _turns(forms: Forms, norm: Node) -> bool:
    """Return whether a norm of one weight takes heads that are turned whole, in pairs that are no halves."""
    values = arguments(norm)
    x, groups = values["x"], values["groups"]
    if not forms.is_known(values["weight"]) or not forms.is_linear(x):
        return False
    weight, form = forms.known(values["weight"]), forms.form(x)
    if bool((weight != weight[0]).any()) or len(form.terms) == 1:
        return False
    columns = forms.columns(forms.root(x))
    rotation = read_rotation(form, columns, groups)
    if rotation is None or rotation.cosine is None or (rotation.factor, rotation.still_factor) != (1.0, 1.0):
        return False
    halves = torch.equal(rotation.order, torch.arange(len(rotation.order)))
    size = len(rotation.order)
    # Each head turns within itself.
    heads = (rotation.columns.reshape(groups, size) // size == torch.arange(groups).unsqueeze(1)).all()
    return not halves and columns == groups * size and bool(heads)


def _between(forms: Forms, norm: Node) -> Iterator[Node]:
    """Yield the root of a norm's input, and then what lies between it and the norm."""
    x = arguments(norm)["x"]
    root, stack, seen = forms.root(x), [x], set[Node]()
    yield root
    while stack:
        node = stack.pop()
        if node not in seen and node is not root and not forms.is_known(node):
            seen.add(node)
            yield node
            stack.extend(node.all_input_nodes)


def _move(rewriter: Rewriter, root: Node, norm: Node, between: list[Node]) -> None:
    """Make the turn `between` read the norm of `root`, and what reads the norm read the turn."""
    values = arguments(norm)
    first = next(node for node in rewriter.graph.nodes if node in between)
    args = (root, values["weight"], values["eps"], values["groups"])
    for node in _made_of(values["weight"]):
        first.prepend(node)
    normed = rewriter.call(RMS_NORM, args, before=first, sources=(norm,))
    for node in between:
        node.replace_input_with(root, normed)
    rewriter.changed(first)
    rewriter.replace(norm, values["x"])
