"""Raises rotary position embeddings of queries and keys to `rotary`, and folds what scales them into the attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile_passes.base import Pass, Stage
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.nodes import calls
from picompile_passes.graph.operands import ATTENTION, ROTARY, SharedConstants
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.graph.values import same_shape
from picompile_passes.passes.canonicalize.forms import Forms
from picompile_passes.passes.canonicalize.rotation import Rotation, read_rotation

_aten = torch.ops.aten

# Tables of cosines and sines are compared with what fitted frequencies give at this many positions. The tables' own
# rounding of the angle grows to 2e-5 there.
_FIT_TOKENS = 256
_FIT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class RaiseRotary(Pass):
    """Raises rotary position embeddings of q and k to `rotary`, and folds their scale into the attention.

    The pass starts at an attention and looks at everything between it and the roots of its q and k.

    1. q or k turned by position · frequency → `rotary` of the root's columns. Where the pairs of elements are not
       halves of a head, q and k are reordered alike, which leaves q · k as it is.
    2. q or k times a constant → q or k, and the attention's scale times the constant.
    3. The frequencies become one constant, shared by all layers that have the same.
    """

    name: ClassVar[str] = "raise-rotary"
    requires: ClassVar[Stage] = Stage.CAPTURED
    ensures: ClassVar[Stage] = Stage.CAPTURED

    def rewrite(self, rewriter: Rewriter) -> None:
        """Read all rotations before the first change, because forms hold for an unchanged graph only."""
        reader = _RotationReader(rewriter.graph_module)
        found = [(node, reader.read(node)) for node in calls(rewriter.graph, ATTENTION)]
        emitter = _RotaryEmitter(rewriter)
        for node, sides in found:
            if sides is not None:
                emitter.emit(node, *sides)


@dataclass(frozen=True)
class _RotatedSide:
    """A query or key made of `columns` columns of `root`. `frequencies` are exact, None where nothing turns."""

    root: Node
    columns: int
    rotation: Rotation
    frequencies: Tensor | None


class _RotationReader:
    """Reads rotations. Remembers frequencies: those that occur in the graph, and those that had to be fitted."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._graph_module = graph_module
        self._forms = Forms(graph_module, lookups=True)
        self._frequencies = torch.cat([torch.zeros(1), *self._angles_at_one()])

    def read(self, node: Node) -> tuple[_RotatedSide, _RotatedSide] | None:
        """How q and k of the attention `node` are made; None where they are plain columns of other values already.

        Raises `UnsupportedGraphError` where they are made in another way than by turning and scaling.
        """
        q, k, _, heads, kv_heads = node.args[:5]
        if all(self._forms.moved(value) is not None for value in (q, k)):  # type: ignore[arg-type]
            return None
        sides = (self._side(node, q, heads), self._side(node, k, kv_heads))  # type: ignore[arg-type]
        if not torch.equal(sides[0].rotation.order, sides[1].rotation.order):
            raise UnsupportedGraphError(f"{node.name} ({node.target}): its query and key turn in different ways")
        return sides

    def _side(self, node: Node, value: Node, heads: int) -> _RotatedSide:
        root = self._forms.root(value)
        columns = self._forms.columns(root)
        rotation = read_rotation(self._forms.form(value), columns, heads)
        if rotation is None or root.meta["val"].shape[-1] != columns:
            raise UnsupportedGraphError(
                f"{value.name} ({value.target}): what lies between {root.name} and {node.name} is no rotary embedding"
            )
        return _RotatedSide(root, columns, rotation, self._exact(rotation, node, value, heads))

    def _exact(self, rotation: Rotation, node: Node, value: Node, heads: int) -> Tensor | None:
        """The frequencies in full precision: those of the graph nearest to what the sample shows, or fitted ones."""
        if rotation.cosine is None:
            return None
        nearest = (self._frequencies - rotation.frequencies().unsqueeze(-1)).abs().argmin(dim=-1)
        if rotation.turns_by(self._frequencies[nearest]):
            return self._frequencies[nearest]
        fitted = self._fit(value, heads)
        if fitted is None:
            raise UnsupportedGraphError(f"{node.name} ({node.target}): it does not turn evenly with the position")
        self._frequencies = torch.cat([self._frequencies, fitted])
        return fitted

    def _fit(self, value: Node, heads: int) -> Tensor | None:
        """The frequencies behind tables of cosines and sines, from a longer sample."""
        forms = Forms(self._graph_module, _FIT_TOKENS, lookups=True)
        rotation = read_rotation(forms.form(value), forms.columns(forms.root(value)), heads)
        if rotation is None or rotation.cosine is None:
            return None
        fitted = rotation.frequencies().to(torch.float32)
        return fitted if rotation.turns_by(fitted, _FIT_TOLERANCE) else None

    def _angles_at_one(self) -> Iterator[Tensor]:
        """The angles at position 1 of all cosines that depend on positions alone: frequencies as the model has them."""
        for node in calls(self._graph_module.graph, _aten.cos.default):
            if self._forms.is_known(node):
                angle = self._forms.known(node.all_input_nodes[0])
                if angle.numel() % self._forms.tokens == 0:
                    yield angle.to(torch.float32).reshape(self._forms.tokens, -1)[1]


class _RotaryEmitter:
    """Makes the new nodes."""

    def __init__(self, rewriter: Rewriter) -> None:
        self._rewriter = rewriter
        self._constants = SharedConstants(rewriter)
        self._positions = next(n for n in rewriter.graph.nodes if n.op == "placeholder" and n.target == "positions")

    def emit(self, node: Node, query: _RotatedSide, key: _RotatedSide) -> None:
        """Gives the attention `node` new q and k and folds constant factors into its scale."""
        q, k, _, heads, kv_heads, scale = node.args[:6]
        for name, old, side, count in (("q", q, query, heads), ("k", k, key, kv_heads)):
            value, factor = self._columns(side, node), side.rotation.factor
            if side.frequencies is None:
                scale *= factor  # type: ignore[operator]
            else:
                frequencies = self._constants.get("inverse_frequency", side.frequencies, node)
                args = (value, self._positions, frequencies, count, factor)
                value = self._rewriter.call(ROTARY, args, before=node, sources=(old, node))  # type: ignore[arg-type]
            self._rewriter.set_argument(node, name, value)
        self._rewriter.set_argument(node, "scale", scale)

    def _columns(self, side: _RotatedSide, node: Node) -> Node:
        """The columns of the root that a rotation reads, in its order."""
        value = side.root
        if not torch.equal(side.rotation.columns, torch.arange(side.columns)):
            table = self._constants.get("columns", side.rotation.columns, node)
            value = self._rewriter.call(_aten.index_select.default, (value, -1, table), before=node, sources=(value,))
        return self._shaped(value, node)

    def _shaped(self, value: Node, node: Node) -> Node:
        """`value` with the dimensions that the attention `node` has before the last: the tokens, and others of size 1.

        Between a root and its attention those come, go and change places with the tokens.
        """
        shape, wanted = value.meta["val"].shape[:-1], node.meta["val"].shape[:-1]
        if same_shape(shape, wanted):
            return value
        singles = [dim for dim, size in enumerate(shape) if isinstance(size, int) and size == 1]
        for dim in reversed(singles):
            value = self._rewriter.call(_aten.squeeze.dim, (value, dim), before=node, sources=(value,))
        for _ in wanted[1:]:
            value = self._rewriter.call(_aten.unsqueeze.default, (value, 0), before=node, sources=(value,))
        return value
