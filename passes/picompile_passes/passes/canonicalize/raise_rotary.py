"""Raises rotary position embeddings of queries and keys to `rotary`, and folds what scales them into the attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from picompile_passes.base import Pass, Stage
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.nodes import arguments, calls, is_call, positions_input
from picompile_passes.graph.operands import ATTENTION, LAYER_NORM, LINEAR, RMS_NORM, ROTARY, SharedConstants
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.graph.values import same_shape
from picompile_passes.passes.canonicalize.forms import Form, Forms, Term

# Reading a rotary position embedding out of the form of a query or key.
#
# A rotated head has elements c·x[a] ∓ s·x[b], c = g·cos(position · f), s = g·sin(position · f): a pair of elements (a,
# b) for each frequency f, and a common factor g. How a model orders the pairs (halves, as Llama, or neighbours, as
# GPT-J), whether it leaves some elements as they are, and where it multiplies by g shows in the form and nowhere else.
# Elements that do not turn have a factor of their own: those that YaRN and LongRoPE turn are scaled, the rest is not.


# The sampled factors are float32 cosines and sines, times a factor of a few float32 roundings.
_TOLERANCE = 1e-5


class _RotationParts(NamedTuple):
    """A value as cosine · x[own] + sine · x[other]. Columns [heads, d]; factors [tokens, heads, d]."""

    own: Tensor
    other: Tensor
    cosine: Tensor
    sine: Tensor


@dataclass(frozen=True)
class Rotation:
    """A value of heads of d elements, each turned by position · frequency and multiplied by `factor`.

    Pairs that do not turn are multiplied by `still_factor`. Elements are in the half-split order of the dialect's
    `rotary`: `order` [d] says which element of the value stands at each place, `columns` [heads · d] which column of
    the root it is made from. `cosine` and `sine` [tokens, d/2] are of the first halves, without the factors; both are
    None where nothing turns.
    """

    columns: Tensor
    order: Tensor
    factor: float
    still_factor: float = 1.0
    cosine: Tensor | None = None
    sine: Tensor | None = None

    def turns_by(self, frequencies: Tensor, tolerance: float = _TOLERANCE) -> bool:
        """Whether `frequencies` give the sampled cosines and sines at all positions."""
        if self.cosine is None or self.sine is None:
            return False
        angle = torch.arange(self.cosine.shape[0], dtype=torch.float32).unsqueeze(-1) * frequencies
        return _close(angle.cos(), self.cosine, tolerance) and _close(angle.sin(), self.sine, tolerance)

    def frequencies(self) -> Tensor:
        """The frequencies [d/2], float64, as exactly as the sample has them: the longer, the better.

        The angle at position 1 gives each to 1e-7; each later position, four times as far, tells it four times better,
        as long as the estimate is good enough to know how many whole turns lie between.
        """
        if self.cosine is None or self.sine is None:
            raise ValueError("nothing turns")
        angles = torch.atan2(self.sine.double(), self.cosine.double())
        estimate, position = angles[1], 1
        while (position := min(4 * position, angles.shape[0] - 1)) > 1:
            turned = torch.remainder(angles[position] - position * estimate + torch.pi, 2 * torch.pi) - torch.pi
            estimate = estimate + turned / position
            if position == angles.shape[0] - 1:
                break
        return estimate


def read_rotation(form: Form, columns: int, heads: int) -> Rotation | None:
    """The rotation that `form`, [tokens, heads · d] of a root with `columns` columns, is; None where it is none."""
    parts = _parts(form, columns, heads)
    if parts is None:
        return None
    turning = (parts.sine[:, 0] != 0).any(dim=0)
    first_factors = parts.cosine[0, 0]
    still_factor = float(first_factors[~turning][0]) if not turning.all() else 1.0
    factor = float(first_factors[turning][0]) if turning.any() else still_factor
    factors = torch.where(turning, factor, still_factor)
    own, other, cosine, sine = parts.own, parts.other, parts.cosine / factors, parts.sine / factors
    if not turning.any() and _close(cosine, torch.ones_like(cosine)) and not sine.any():
        return Rotation(own.flatten(), torch.arange(own.shape[1]), factor)
    halves = _halves(own[0], other[0], turning)
    if halves is None:
        return None
    first, second = halves
    order = torch.cat(halves)
    rotation = Rotation(
        own[:, order].flatten(), order, factor, still_factor, cosine=cosine[:, 0, first], sine=-sine[:, 0, first]
    )
    expected = _rebuilt(rotation, own, first, second)
    return rotation if _agrees(expected, _RotationParts(own, other, cosine, sine)) else None


def _parts(form: Form, columns: int, heads: int) -> _RotationParts | None:
    """Sums the terms of each element by the columns they read; None where there are more than two."""
    tokens = form.shape.numel() // (form.shape[-1])
    shape = (len(form.terms), tokens, heads, -1)
    index = torch.stack([term.index for term in form.terms]).reshape(shape)
    factor = torch.stack([term.factor for term in form.terms]).reshape(shape)
    column = index - columns * torch.arange(tokens).reshape(1, tokens, 1, 1)
    if not bool((column == column[:, :1]).all()) or not factor[:, 0].any():
        return None
    column = column[:, 0]
    own = column.gather(0, factor[:, 0].abs().argmax(dim=0, keepdim=True))[0]
    used = (factor != 0).any(dim=1) & (column != own)
    other = torch.where(used, column, own).gather(0, used.int().argmax(dim=0, keepdim=True))[0]
    if not bool(((column == other) | ~used).all()):
        return None
    mine = (column == own).unsqueeze(1)
    zero = torch.zeros((), dtype=factor.dtype)
    return _RotationParts(
        own, other, torch.where(mine, factor, zero).sum(dim=0), torch.where(mine, zero, factor).sum(dim=0)
    )


def _halves(own: Tensor, other: Tensor, turning: Tensor) -> tuple[Tensor, Tensor] | None:
    """The elements of one head that make the first halves, and those that make the second, pair by pair.

    The first of a pair stands ahead of the second; the frequencies of pairs that turn backwards are negative.
    """
    place = {int(column): number for number, column in enumerate(own)}
    partners = [(int(number), place.get(int(other[number]), -1)) for number in turning.nonzero()]
    pairs = [pair for pair in partners if pair[0] < pair[1]]
    still = (~turning).nonzero().flatten()
    if 2 * len(pairs) + len(still) != len(own) or len(still) % 2:
        return None
    first, second = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return torch.cat([first, still[: len(still) // 2]]), torch.cat([second, still[len(still) // 2 :]])


def _rebuilt(rotation: Rotation, own: Tensor, first: Tensor, second: Tensor) -> _RotationParts:
    """The parts that a value turned by `rotation` has, its factors left out."""
    heads, size = own.shape
    cosine, sine = (
        torch.zeros(rotation.cosine.shape[0], heads, size, dtype=torch.float64)  # type: ignore[union-attr]
        for _ in range(2)
    )
    other = torch.empty_like(own)
    for half, opposite, sign in ((first, second, -1.0), (second, first, 1.0)):
        cosine[:, :, half] = rotation.cosine.unsqueeze(1)  # type: ignore[union-attr]
        sine[:, :, half] = sign * rotation.sine.unsqueeze(1)  # type: ignore[union-attr]
        other[:, half] = own[:, opposite]
    return _RotationParts(own, other, cosine, sine)


def _agrees(expected: _RotationParts, found: _RotationParts) -> bool:
    """Whether the factors are the same everywhere, and the columns wherever a sine reads them."""
    turning = (found.sine != 0).any(dim=0)
    same_columns = bool(((expected.other == found.other) | ~turning).all())
    return same_columns and _close(expected.cosine, found.cosine) and _close(expected.sine, found.sine)


def _close(left: Tensor, right: Tensor, tolerance: float = _TOLERANCE) -> bool:
    return torch.allclose(left.double(), right.double(), rtol=0.0, atol=tolerance)


# Raises rotary position embeddings of queries and keys to `rotary`, and folds what scales them into the attention.


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
    3. Heads that are turned before a norm of each → `rotary` in front of the norm.
    4. q or k whose elements come from several projections, some of them for all heads together, as in multi-head latent
       attention (arXiv 2405.04434) → the sum of the projections, each with rows of zeros for the others' elements.
    5. The frequencies become one constant, shared by all layers that have the same.
    """

    name: ClassVar[str] = "raise-rotary"
    requires: ClassVar[Stage] = Stage.CAPTURED
    ensures: ClassVar[Stage] = Stage.CAPTURED

    def rewrite(self, rewriter: Rewriter) -> None:
        """Read all rotations before the first change, because forms hold for an unchanged graph only."""
        reader = _RotationReader(rewriter.graph_module)
        found = [(node, reader.read(node)) for node in calls(rewriter.graph, ATTENTION)]
        norms = [(node, reader.read_norm(node)) for node in calls(rewriter.graph, RMS_NORM, LAYER_NORM)]
        emitter = _RotaryEmitter(rewriter)
        for node, side in norms:
            if side is not None:
                emitter.emit_norm(node, side)
        for node, sides in found:
            if sides is not None:
                emitter.emit(node, *sides)


@dataclass(frozen=True)
class _RotatedSide:
    """A query or key made of columns of `roots`, laid side by side: `columns` has how many each of them has.

    `frequencies` are exact, None where nothing turns.
    """

    roots: tuple[Node, ...]
    columns: tuple[int, ...]
    rotation: Rotation
    frequencies: Tensor | None


class _RotationReader:
    """Reads rotations. Remembers frequencies: those that occur in the graph, and those that had to be fitted."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._graph_module = graph_module
        self._forms = Forms(graph_module, lookups=True)
        angles = list(self._angles_at_one())
        self._frequencies = torch.cat([torch.zeros(1), *angles, *(-angle for angle in angles)])

    def read(self, node: Node) -> tuple[_RotatedSide, _RotatedSide] | None:
        """Return how q and k of the attention `node` are made; None where they are plain columns of other values.

        Raises `UnsupportedGraphError` where they are made in another way than by turning and scaling.
        """
        q, k, _, heads, kv_heads = node.args[:5]
        if all(self._forms.moved(value) is not None for value in (q, k)):  # type: ignore[arg-type]
            return None
        sides = (self._side(node, q, heads), self._side(node, k, kv_heads))  # type: ignore[arg-type]
        if not torch.equal(sides[0].rotation.order, sides[1].rotation.order):
            raise UnsupportedGraphError(f"{node.name} ({node.target}): its query and key turn in different ways")
        return sides

    def read_norm(self, node: Node) -> _RotatedSide | None:
        """Return how the heads that the norm `node` takes are turned; None where it takes none, or plain columns.

        A norm of one group may be of whole tokens, which only a sum of terms, as every rotation is, tells from heads.
        Raises `UnsupportedGraphError` as `read` does, and where pairs of elements are no halves of a head: a norm's
        weights have the order of the elements.
        """
        x, groups = node.args[0], arguments(node)["groups"]
        if not self._forms.is_linear(x) or self._forms.moved(x) is not None:  # type: ignore[arg-type]
            return None
        if groups == 1 and len(self._forms.form(x).terms) == 1:  # type: ignore[arg-type]
            return None
        columns = self._forms.columns(self._forms.root(x))  # type: ignore[arg-type]
        if groups == 1 and read_rotation(self._forms.form(x), columns, 1) is None:  # type: ignore[arg-type]
            return None
        side = self._side(node, x, groups)  # type: ignore[arg-type]
        if not torch.equal(side.rotation.order, torch.arange(len(side.rotation.order))):
            raise UnsupportedGraphError(f"{node.name} ({node.target}): its heads turn in neighbouring pairs")
        return side

    def _side(self, node: Node, value: Node, heads: int) -> _RotatedSide:
        roots, form = _joined_form(self._forms, value)
        columns = tuple(self._forms.columns(root) for root in roots)
        rotation = read_rotation(form, sum(columns), heads)
        if rotation is None or any(root.meta["val"].shape[-1] != own for root, own in zip(roots, columns, strict=True)):
            names = " and ".join(root.name for root in roots)
            raise UnsupportedGraphError(
                f"{value.name} ({value.target}): what lies between {names} and {node.name} is no rotary embedding"
            )
        if len(roots) > 1 and (other := next((root for root in roots if not is_call(root, LINEAR)), None)) is not None:
            raise UnsupportedGraphError(
                f"{other.name} ({other.target}): a part of a query or key must be a projection, or all of it one value"
            )
        return _RotatedSide(roots, columns, rotation, self._exact(rotation, node, value, heads))

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
        roots, form = _joined_form(forms, value)
        rotation = read_rotation(form, sum(map(forms.columns, roots)), heads)
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


def _joined_form(forms: Forms, value: Node) -> tuple[tuple[Node, ...], Form]:
    """Return the roots of `value`, and its form over their columns side by side, [tokens, all columns]."""
    by_root = forms.by_root(value)
    roots = tuple(by_root)
    if not roots:
        # All of it is zeros, or known.
        return (forms.root(value),), forms.form(value)
    if len(roots) == 1:
        return roots, Form(roots[0], by_root[roots[0]])
    widths = [forms.columns(root) for root in roots]
    starts = [sum(widths[:number]) for number in range(len(widths))]
    terms = []
    for root, width, start in zip(roots, widths, starts, strict=True):
        for term in by_root[root]:
            index, factor = (part.reshape(forms.tokens, -1) for part in (term.index, term.factor))
            # What an element does not have is nowhere: at the column 0 of its own token.
            index = torch.where(factor.any(0), index, width * torch.arange(forms.tokens).unsqueeze(-1))
            index = index // width * sum(widths) + start + index % width
            terms.append(Term(index.reshape(term.index.shape), term.factor))
    return roots, Form(roots[0], tuple(terms))


class _RotaryEmitter:
    """Makes the new nodes."""

    def __init__(self, rewriter: Rewriter) -> None:
        self._rewriter = rewriter
        self._constants = SharedConstants(rewriter)
        self._positions = positions_input(rewriter.graph)

    def emit(self, node: Node, query: _RotatedSide, key: _RotatedSide) -> None:
        """Gives the attention `node` new q and k and folds constant factors into its scale."""
        q, k, _, heads, kv_heads, scale = node.args[:6]
        for name, old, side, count in (("q", q, query, heads), ("k", k, key, kv_heads)):
            value, factor = self._columns(side, node), side.rotation.factor
            if side.frequencies is None:
                scale *= factor  # type: ignore[operator]
            else:
                frequencies = self._constants.get("inverse_frequency", side.frequencies, node)
                args = (value, self._positions, frequencies, count, factor, side.rotation.still_factor)
                value = self._rewriter.call(ROTARY, args, before=node, sources=(old, node))  # type: ignore[arg-type]
            self._rewriter.set_argument(node, name, value)
        self._rewriter.set_argument(node, "scale", scale)

    def emit_norm(self, node: Node, side: _RotatedSide) -> None:
        """Gives the norm `node` a new x."""
        if side.frequencies is None:
            return
        frequencies = self._constants.get("inverse_frequency", side.frequencies, node)
        groups = arguments(node)["groups"]
        factors = side.rotation.factor, side.rotation.still_factor
        args = (self._columns(side, node), self._positions, frequencies, groups, *factors)
        turned = self._rewriter.call(ROTARY, args, before=node, sources=(node.args[0], node))  # type: ignore[arg-type]
        self._rewriter.set_argument(node, "x", turned)

    def _columns(self, side: _RotatedSide, node: Node) -> Node:
        """The columns of the roots that a rotation reads, in its order."""
        if len(side.roots) > 1:
            return self._sum(side, node)
        (value,) = side.roots
        if not torch.equal(side.rotation.columns, torch.arange(side.columns[0])):
            table = self._constants.get("columns", side.rotation.columns, node)
            value = self._rewriter.call(_aten.index_select.default, (value, -1, table), before=node, sources=(value,))
        return self._shaped(value, node)

    def _sum(self, side: _RotatedSide, node: Node) -> Node:
        """The sum of projections of all elements, each of which has zeros for the elements of the others."""
        total: Node | None = None
        start = 0
        for root, width in zip(side.roots, side.columns, strict=True):
            columns = side.rotation.columns - start
            mine = (columns >= 0) & (columns < width)
            value = self._shaped(self._rows(root, torch.where(mine, columns, 0), mine, node), node)
            added = (total, value)
            total = (
                value
                if total is None
                else self._rewriter.call(_aten.add.Tensor, added, before=node, sources=side.roots)
            )
            start += width
        assert total is not None
        return total

    def _rows(self, projection: Node, rows: Tensor, kept: Tensor, node: Node) -> Node:
        """`projection` by `rows` of its weights, of which those that are not `kept` are zeros."""
        x, weight, bias = projection.args

        def call(op: Any, *args: Any) -> Node:
            return self._rewriter.call(op, args, before=node, sources=(projection,))

        table = self._constants.get("rows", rows, node)
        mask = self._constants.get("kept_rows", kept.to(torch.float32), node)
        weight = call(
            _aten.mul.Tensor, call(_aten.index_select.default, weight, 0, table), call(_aten.unsqueeze.default, mask, 1)
        )
        if bias is not None:
            bias = call(_aten.mul.Tensor, call(_aten.index_select.default, bias, 0, table), mask)
        return call(LINEAR, x, weight, bias)

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
