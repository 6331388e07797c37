"""Raises arithmetic that has no operator of its own to `elementwise`, as many steps as possible at once."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from picompile_passes.base import Pass, Stage
from picompile_passes.dialect.expressions import ExpressionStep, Operand, expression_text
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.nodes import arguments, constant_nodes, is_call, positions_input
from picompile_passes.graph.operands import ADD, ELEMENTWISE, EMBEDDING, SharedConstants
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.graph.values import same_shape
from picompile_passes.passes.canonicalize.forms import Forms
from picompile_passes.passes.canonicalize.layout import HeadLayout

_aten = torch.ops.aten

_LEAST_THRESHOLD = 15.0

# emit(write, operands): writes the steps of one operator of torch, and returns the name of its result.
_Write = Callable[..., Operand]
_Emit = Callable[[_Write, Mapping[str, Any]], Operand]


def _binary(function: str, left: str = "self", right: str = "other") -> _Emit:
    def emit(write: _Write, values: Mapping[str, Any]) -> Operand:
        second = values[right]
        if values.get("alpha", 1) != 1:
            second = write("mul", second, values["alpha"])
        return write(function, values[left], second)

    return emit


def _unary(function: str) -> _Emit:
    return lambda write, values: write(function, values["self"])


def _gelu(write: _Write, values: Mapping[str, Any]) -> Operand:
    return write("gelu_tanh" if values["approximate"] == "tanh" else "gelu", values["self"])


def _power(write: _Write, values: Mapping[str, Any]) -> Operand:
    x, exponent = values["self"], values["exponent"]
    if exponent == -0.5:
        return write("div", 1.0, write("sqrt", x))
    if exponent == 0.5:
        return write("sqrt", x)
    if exponent != int(exponent) or not 1 <= abs(exponent) <= 4:
        raise ValueError(f"a power of {exponent}")
    result: Operand = x
    for _ in range(abs(int(exponent)) - 1):
        result = write("mul", result, x)
    return result if exponent > 0 else write("div", 1.0, result)


def _softplus(write: _Write, values: Mapping[str, Any]) -> Operand:
    beta, threshold = float(values["beta"]), float(values["threshold"])
    # Behind the threshold torch leaves out log(1 + e^-x), which is then smaller than what float32 rounds.
    if beta <= 0 or threshold < _LEAST_THRESHOLD:
        raise ValueError(f"softplus with a threshold of {threshold}")
    if beta == 1:
        return write("softplus", values["self"])
    return write("div", write("softplus", write("mul", values["self"], beta)), beta)


def _clamp(write: _Write, values: Mapping[str, Any]) -> Operand:
    low, high = (values.get(names[0], values.get(names[1])) for names in (("min", "min_val"), ("max", "max_val")))
    result: Operand = values["self"]
    if low is not None:
        result = write("maximum", result, low)
    return result if high is None else write("minimum", result, high)


_EMITS: dict[OpOverload, _Emit] = {
    _aten.add.Tensor: _binary("add"),
    _aten.add.Scalar: _binary("add"),
    _aten.sub.Tensor: _binary("sub"),
    _aten.sub.Scalar: _binary("sub"),
    _aten.rsub.Scalar: _binary("sub", "other", "self"),
    _aten.mul.Tensor: _binary("mul"),
    _aten.mul.Scalar: _binary("mul"),
    _aten.div.Tensor: _binary("div"),
    _aten.div.Scalar: _binary("div"),
    _aten.maximum.default: _binary("maximum"),
    _aten.max.other: _binary("maximum"),
    _aten.min.other: _binary("minimum"),
    _aten.minimum.default: _binary("minimum"),
    _aten.neg.default: lambda write, values: write("mul", values["self"], -1.0),
    _aten.abs.default: _unary("abs"),
    _aten.sqrt.default: _unary("sqrt"),
    _aten.rsqrt.default: lambda write, values: write("div", 1.0, write("sqrt", values["self"])),
    _aten.reciprocal.default: lambda write, values: write("div", 1.0, values["self"]),
    _aten.square.default: lambda write, values: write("mul", values["self"], values["self"]),
    _aten.exp.default: _unary("exp"),
    _aten.expm1.default: lambda write, values: write("sub", write("exp", values["self"]), 1.0),
    _aten.erf.default: _unary("erf"),
    _aten.softplus.default: _softplus,
    _aten.tanh.default: _unary("tanh"),
    _aten.sigmoid.default: _unary("sigmoid"),
    _aten.relu.default: _unary("relu"),
    _aten.relu6.default: _unary("relu6"),
    _aten.silu.default: _unary("silu"),
    _aten.gelu.default: _gelu,
    _aten.pow.Tensor_Scalar: _power,
    _aten.clamp.default: _clamp,
    _aten.clamp_min.default: _clamp,
    _aten.clamp_max.default: _clamp,
    _aten.hardtanh.default: _clamp,
}
_WHERE = _aten.where.self
# Operators that give every token the same.
_EXPANSIONS = (_aten.expand.default, _aten.unsqueeze.default, _aten.broadcast_to.default, _aten.expand_as.default)
# The largest table of a value for each position that becomes a constant: 100,000 positions of 2,000 numbers.
_MOST_TABLE_ELEMENTS = 1 << 28
# Comparisons, as which two operands are compared by "greater", and whether the two values of `where` change places.
_COMPARISONS: dict[OpOverload, tuple[str, str, bool]] = {
    _aten.gt.Scalar: ("self", "other", False),
    _aten.gt.Tensor: ("self", "other", False),
    _aten.lt.Scalar: ("other", "self", False),
    _aten.lt.Tensor: ("other", "self", False),
    _aten.le.Scalar: ("self", "other", True),
    _aten.le.Tensor: ("self", "other", True),
    _aten.ge.Scalar: ("other", "self", True),
    _aten.ge.Tensor: ("other", "self", True),
}


def is_pointwise(node: Node) -> bool:
    """Return whether `node` calls an operator that works on each element by itself."""
    if is_call(node, _WHERE):
        return True
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


@dataclass(frozen=True)
class RaiseElementwise(Pass):
    """Raises regions of pointwise operators to one `elementwise` each.

    1. A pointwise operator on values, with those that it alone uses → one `elementwise`. Sums of two values stay as
       they are, unless they end such a region.
    2. A region on values of each head, [1, H, T, d] or [1, T, H, d], works on [1, T, H · d].
    3. A number, a vector for the last dimension, or one number for each token is an operand of the region. A row for
       each position is an `embedding` of a table of them. What depends on positions in another way cannot be expressed.
    """

    name: ClassVar[str] = "raise-elementwise"
    requires: ClassVar[Stage] = Stage.CAPTURED
    ensures: ClassVar[Stage] = Stage.CAPTURED

    def rewrite(self, rewriter: Rewriter) -> None:
        """Find regions from their ends, which come last, to their beginnings."""
        rewriter.graph.eliminate_dead_code()
        finder = _RegionFinder(rewriter)
        regions = finder.regions()
        constants = SharedConstants(rewriter)
        for region in regions:
            _emit(rewriter, finder, constants, region)


@dataclass
class _Region:
    """Operators that become one `elementwise`: `end` makes the value that others read."""

    end: Node
    nodes: set[Node] = field(default_factory=set)


class _RegionFinder:
    def __init__(self, rewriter: Rewriter) -> None:
        self.graph = rewriter.graph
        self.forms = Forms(rewriter.graph_module)
        self.constant = constant_nodes(rewriter.graph)
        self._places = {node: place for place, node in enumerate(rewriter.graph.nodes)}

    def regions(self) -> list[_Region]:
        taken: set[Node] = set()
        found: list[_Region] = []
        for node in reversed(list(self.graph.nodes)):
            if node in taken or not self._is_pointwise(node):
                continue
            region = self._grown(node)
            if all(self._is_sum(inside) for inside in region.nodes):
                continue
            taken |= region.nodes
            found.append(region)
        return found[::-1]

    def _grown(self, end: Node) -> _Region:
        """Return the region that ends in `end`: operands belong to it where nothing outside of it reads them."""
        region = _Region(end, {end})
        waiting: list[tuple[int, Node]] = []
        seen = {end}

        def push(node: Node) -> None:
            for operand in node.all_input_nodes:
                if operand not in seen:
                    seen.add(operand)
                    heappush(waiting, (-self._places[operand], operand))

        push(end)
        while waiting:
            _, node = heappop(waiting)
            inside = all(user in region.nodes for user in node.users)
            if inside and (self._is_pointwise(node) or self._is_comparison(node)) and self._fits(node, end):
                region.nodes.add(node)
                push(node)
        return region

    def is_value(self, node: Node) -> bool:
        """Return whether the value of `node` depends on the tokens."""
        # What is not in the table was made here, of values.
        if node not in self._places:
            return True
        return self.unexpanded(node) not in self.constant and not self.forms.is_known(node)

    def unexpanded(self, node: Node) -> Node:
        """Return the constant that `node` is for every token; `node` itself where it is none."""
        inner = node
        while is_call(inner, *_EXPANSIONS):
            inner = inner.args[0]  # type: ignore[assignment]
        return inner if inner in self.constant else node

    def _is_pointwise(self, node: Node) -> bool:
        if node.op != "call_function" or not self.is_value(node):
            return False
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return False
        if node.target is _WHERE:
            condition = node.args[0]
            return isinstance(condition, Node) and self._is_comparison(condition)
        return node.target in _EMITS

    def _is_comparison(self, node: Node) -> bool:
        return is_call(node, *_COMPARISONS) and self.is_value(node)

    def _is_sum(self, node: Node) -> bool:
        """Return whether `node` is the sum of two values of its size, which the dialect has an operator for."""
        return (
            is_call(node, ADD)
            and not node.kwargs
            and all(isinstance(value, Node) and self.is_value(value) for value in node.args)
            and all(self.forms.columns(value) == self.forms.columns(node) for value in node.all_input_nodes)
        )

    def _fits(self, node: Node, end: Node) -> bool:
        """Return whether `node` has the shape of `end`, or one element for each of its rows."""
        shape, whole = node.meta["val"].shape, end.meta["val"].shape
        return same_shape(shape, whole) or same_shape(shape, (*whole[:-1], 1))


def _emit(rewriter: Rewriter, finder: _RegionFinder, constants: SharedConstants, region: _Region) -> None:
    writer = _ExpressionWriter(rewriter, finder, constants, region)
    for node in (node for node in list(rewriter.graph.nodes) if node in region.nodes):
        writer.add(node)
    inputs, text = writer.finish(region.end)
    layout = HeadLayout.of(region.end)

    def call(op: OpOverload, *args: Any) -> Node:
        return rewriter.call(op, args, before=region.end, sources=(region.end,))

    if layout is None:
        rewriter.replace(region.end, call(ELEMENTWISE, inputs, text))
        return
    flat = [layout.flat(call, value) if finder.is_value(value) else layout.vector(call, value) for value in inputs]
    rewriter.replace(region.end, layout.restored(call, call(ELEMENTWISE, flat, text)))


class _ExpressionWriter:
    """Writes the expression of one region."""

    def __init__(self, rewriter: Rewriter, finder: _RegionFinder, constants: SharedConstants, region: _Region) -> None:
        self._rewriter, self._finder, self._constants, self._region = rewriter, finder, constants, region
        self._layout = HeadLayout.of(region.end)
        self._inputs: list[Node] = []
        self._steps: list[ExpressionStep] = []
        self._names: dict[Node, Operand] = {}

    def add(self, node: Node) -> None:
        """Append the steps of `node`, whose operands are known."""
        if is_call(node, *_COMPARISONS):
            return
        try:
            if node.target is _WHERE:
                self._names[node] = self._where(node)
            else:
                values = {name: self._operand(value) for name, value in arguments(node).items()}
                self._names[node] = _EMITS[node.target](self._write, values)  # type: ignore[index]
        except ValueError as error:
            raise UnsupportedGraphError(f"{node.name} ({node.target}): {error}, which is not supported") from error

    def finish(self, end: Node) -> tuple[list[Node], str]:
        """Return the inputs of the region and the text of its expression."""
        last = f"t{len(self._steps) - 1}"
        if self._names[end] != last:
            self._write("mul", self._names[end], 1.0)
        return self._inputs, expression_text(self._steps)

    def _where(self, node: Node) -> Operand:
        condition, yes, no = node.args
        left, right, swapped = _COMPARISONS[condition.target]  # type: ignore[union-attr, index]
        compared = arguments(condition)  # type: ignore[arg-type]
        values = [self._operand(value) for value in (compared[left], compared[right], yes, no)]
        if swapped:
            values[2], values[3] = values[3], values[2]
        return self._write("where_greater", *values)

    def _write(self, function: str, *operands: Operand) -> Operand:
        if any(isinstance(operand, float) and not math.isfinite(operand) for operand in operands):
            raise ValueError("a number that is not finite")
        step = ExpressionStep(
            function, tuple(operand if isinstance(operand, str) else float(operand) for operand in operands)
        )
        if step not in self._steps:
            self._steps.append(step)
        return f"t{self._steps.index(step)}"

    def _operand(self, value: Any) -> Any:
        if not isinstance(value, Node):
            return value
        if value not in self._names:
            self._names[value] = self._leaf(value)
        return self._names[value]

    def _leaf(self, node: Node) -> Operand:
        """Return the operand for a value that comes from outside the region."""
        if not self._finder.is_value(node):
            if self._finder.forms.is_known(node):
                known = self._known(node)
                if isinstance(known, float):
                    return known
                node = known
            else:
                node = self._vector(self._finder.unexpanded(node))
        self._inputs.append(node)
        return f"x{len(self._inputs) - 1}"

    def _known(self, node: Node) -> float | Node:
        """Return the number that a known value is everywhere, or a constant vector for its last dimension."""
        value = torch.as_tensor(self._finder.forms.known(node)).to(torch.float32)
        if value.numel() and bool((value == value.flatten()[0]).all()):
            return float(value.flatten()[0])
        if self._layout is not None and value.shape[-1:] != (1,) and value.shape[:-1].numel() == 1:
            return self._constants.get("vector", value.reshape(-1).clone(), node)
        rows = value.reshape(-1, value.shape[-1]) if value.dim() else value.reshape(1, 1)
        if not bool((rows == rows[0]).all()):
            return self._table(node, len(rows))
        return self._constants.get("vector", rows[0].clone(), node)

    def _table(self, node: Node, rows: int) -> Node:
        """Return the lookup, by position, of a known value that has a row for each token."""
        most = self._finder.forms.most_tokens
        width = int(node.meta["val"].shape[-1])
        if rows != self._finder.forms.tokens or most is None or most * width > _MOST_TABLE_ELEMENTS:
            raise ValueError(f"it takes {node.name}, which depends on positions")
        table = torch.as_tensor(Forms(self._rewriter.graph_module, most).known(node)).to(torch.float32)
        if table.numel() != most * width:
            raise ValueError(f"it takes {node.name}, a constant of several rows")
        weight = self._constants.get("positions", table.reshape(most, width).clone(), node)
        positions = positions_input(self._rewriter.graph)
        args = (positions, weight, 0)
        return self._rewriter.call(EMBEDDING, args, before=self._region.end, sources=(node,))

    def _vector(self, node: Node) -> Node:
        """Return the vector [D] or [1] that a constant is for the last dimension."""
        shape = node.meta["val"].shape
        if self._layout is not None:
            return node
        length = int(shape[-1]) if len(shape) else 1
        if math.prod(shape) != length:
            raise ValueError(f"it takes {node.name}, a constant of several rows")
        if len(shape) == 1:
            return node
        return self._rewriter.call(_aten.reshape.default, (node, [length]), before=self._region.end, sources=(node,))
