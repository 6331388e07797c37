"""Raises feed-forward blocks to `ffn`, and recognizes activation functions by their values.

Models write the same activation in many ways (GELU's tanh form alone has four in common use), so the pass does not
compare expressions: it evaluates the expression on a grid and compares the values with those of every activation of the
dialect. A piecewise function breaks at the constants of its expression, or at values computed from them. The grid is
therefore dense everywhere and holds every constant and its neighbours; two different functions of the dialect differ
there by far more than rounding.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node

from picompile_passes.base import Pass, Stage
from picompile_passes.dialect.activations import ACTIVATIONS, PARAMETRIC, Activation, parse_activation
from picompile_passes.graph.axes import axes_of
from picompile_passes.graph.layers import operator_part
from picompile_passes.graph.nodes import arguments, calls, is_call
from picompile_passes.graph.operands import (
    FFN,
    LINEAR,
    RESHAPE,
    RMS_NORM,
    ROUTE,
    TRANSPOSE,
    Projection,
    SharedConstants,
    expert_count,
    input_rows,
)
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.graph.values import same_shape
from picompile_passes.passes.canonicalize.forms import Forms, on_cpu

# Approximations of GELU differ by 5e-4, rounding by 1e-6; the order of the table matters for equal functions only.
_TOLERANCE = 1e-5
_GRID = torch.cat([torch.linspace(-12.0, 12.0, 24_001), torch.tensor([-1e4, -1e3, -100.0, 100.0, 1e3, 1e4])])


def recognize_activation(function: Callable[[Tensor], Tensor], constants: Sequence[float]) -> str | None:
    """Return the text of the activation that `function` (elementwise, float32) computes; None for an unknown one.

    `constants` are the numbers that occur in its expression: each may be a parameter of an activation.
    """
    grid = _grid(constants)
    values = function(grid)
    if values.dtype != grid.dtype:
        return None
    for activation in _candidates(constants):
        if torch.allclose(activation.function(grid), values, rtol=_TOLERANCE, atol=_TOLERANCE):
            return activation.text
    return None


def _candidates(constants: Sequence[float]) -> Iterator[Activation]:
    """Yield the activations without parameters, then those whose parameters are among `constants`."""
    yield from ACTIVATIONS.values()
    # 1 is a factor, and 0 a summand, that is not written.
    numbers = sorted({*map(abs, constants), *constants})
    others = sorted({*numbers, 0.0, 1.0})
    for (_, *further), make in PARAMETRIC.values():
        yield from (make(*parameters) for parameters in product(numbers, *[others for _ in further]))


def _grid(constants: Sequence[float]) -> Tensor:
    exact = torch.tensor([0.0, *constants], dtype=torch.float32)
    below, above = (torch.nextafter(exact, torch.full_like(exact, side)) for side in (-torch.inf, torch.inf))
    # And well beyond what may be a bound.
    return torch.cat([_GRID, exact, below, above, exact - 1, exact + 1, 2 * exact, -2 * exact])


_aten = torch.ops.aten
_CONSTANTS_LIKE = (_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default)
_CONSTANTS_BESIDE = (_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default)
# Elementwise operators that torch does not tag as such.
_UNTAGGED = (
    *_CONSTANTS_LIKE,
    _aten._to_copy.default,
    _aten.hardswish.default,
    _aten.log_sigmoid.default,
    _aten.masked_fill.Tensor,
    _aten.special_erf.default,
    _aten.special_expit.default,
    _aten.to.dtype,
    _aten.where.Scalar,
    _aten.where.ScalarOther,
    _aten.where.ScalarSelf,
)


@dataclass(frozen=True)
class RaiseFFN(Pass):
    """Raises a feed-forward block to one `ffn`.

    The pass starts at a down projection and goes back through elementwise operators to the one or two linears that they
    start from; these must read the same value.

    1. `down(act(up(x)))` → `ffn` without gate.
    2. `down(act(gate(x)) · act'(up(x)))` → `ffn` with gate. The gate is the factor whose activation is not the
       identity; where both are activations (dReLU), the first.
    3. Parts of one fused linear count as linears of their own.
    4. `down(h · gains)`, where `down(h)` is a block by 1 or 2 whose neurons are those of all experts, and gains are of
       a `route` → `ffn` with `gains`; `… + gains @ b` → with `expert_bias`. Other blocks of that layer, as of a shared
       expert, stay linears and arithmetic: predictors and placements are of one block a layer.
    5. `down(rms_norm(h, w, eps))`, where `down(h)` is a block by 1 or 2 → `ffn` with `norm_eps`, whose down has the
       rows `down · w`, as BitNet b1.58 has it. A norm of something else stays as it is.

    Activations are recognized by their values, however they are written. A block with an unknown one, or with another
    product of its gate and up, is left as linears and arithmetic.
    """

    name: ClassVar[str] = "raise-ffn"
    requires: ClassVar[Stage] = Stage.CAPTURED
    ensures: ClassVar[Stage] = Stage.CAPTURED

    def rewrite(self, rewriter: Rewriter) -> None:
        """Raise every block of two or three linears."""
        forms = Forms(rewriter.graph_module)
        found = [block for node in calls(rewriter.graph, LINEAR) if (block := _block(forms, node)) is not None]
        of_experts = {block.down for block in found if block.experts is not None}
        of_experts |= {node for node in calls(rewriter.graph, FFN) if expert_count(node)}
        depths = _mixers_before(rewriter.graph) if of_experts else {}
        taken, constants = {depths[node] for node in of_experts}, SharedConstants(rewriter)
        for block in found:
            if block.experts is not None or depths.get(block.down) not in taken:
                block.emit(rewriter, constants)


@dataclass(frozen=True)
class _RaisedFfn:
    """One feed-forward block. Without a gate, `activation` applies to up."""

    x: Node
    gate: Projection | None
    up: Projection
    down: Node
    activation: str
    up_activation: str
    norm: "_Norm | None" = None
    experts: "_Experts | None" = None

    def emit(self, rewriter: Rewriter, constants: SharedConstants) -> None:
        """Puts the `ffn` in the place of the down projection."""
        gate_weight, gate_bias = (None, None) if self.gate is None else self.gate.rows(rewriter, constants, self.down)
        up_weight, up_bias = self.up.rows(rewriter, constants, self.down)
        _, weight, down_bias = self.down.args
        down_weight = _down_rows(rewriter, weight, self.down)  # type: ignore[arg-type]
        biases = (gate_bias, up_bias, down_bias)
        args: tuple[Any, ...] = (self.x, gate_weight, up_weight, down_weight, *biases)
        args += (self.activation, self.up_activation)
        linears = [projection.linear for projection in (self.gate, self.up) if projection is not None]
        if self.norm is not None:
            scaled = self.norm.scaled(rewriter, down_weight, self.down)
            args = (*args[:3], scaled, *args[4:], self.norm.eps)
            linears.append(self.norm.node)
        last = self.down
        if self.experts is not None:
            last = self.experts.last
            args = (*args, None, self.experts.gains, self.experts.bias_rows(rewriter))
        new = rewriter.call(FFN, args, before=last, sources=(self.down, *linears))
        rewriter.replace(last, new)


@dataclass(frozen=True)
class _Norm:
    """A root mean square norm across the neurons of a block: the call of `rms_norm`, its weight [F], and its eps."""

    node: Node
    weight: Node
    eps: float

    def scaled(self, rewriter: Rewriter, down: Node, before: Node) -> Node:
        """Return the rows of down [F, D], each times its neuron's weight."""
        column = rewriter.call(_aten.unsqueeze.default, (self.weight, 1), before=before, sources=(self.weight,))
        return rewriter.call(_aten.mul.Tensor, (down, column), before=before, sources=(down, self.weight))


@dataclass(frozen=True)
class _Experts:
    """The `route` that makes the gains of a block, and the addition of its experts' biases, if there is one.

    `last` is the node that the block takes the place of: the addition, or the down projection.
    """

    gains: Node
    last: Node
    bias: Node | None

    @classmethod
    def of(cls, forms: Forms, down: Node, gains: Node) -> "_Experts":
        for total in down.users:
            if is_call(total, _aten.add.Tensor) and len(total.all_input_nodes) == 2 and not total.kwargs:
                (bias,) = (node for node in total.all_input_nodes if node is not down)
                if is_call(bias, LINEAR) and bias.args[2] is None and forms.same(bias.args[0]) is gains:  # type: ignore[arg-type]
                    return cls(gains, total, bias)
        return cls(gains, down, None)

    def bias_rows(self, rewriter: Rewriter) -> Node | None:
        """Return the bias of each expert, [experts, columns]."""
        return None if self.bias is None else input_rows(rewriter, self.bias.args[1], self.last)  # type: ignore[arg-type]


def _mixers_before(graph: Graph) -> dict[Node, int]:
    """Return through how many mixers the tokens go at most before each value: what tells the layers of blocks."""
    depths: dict[Node, int] = {}
    for node in graph.nodes:
        before = max((depths[source] for source in node.all_input_nodes), default=0)
        depths[node] = before + (operator_part(node) == "mixer")
    return depths


def _down_rows(rewriter: Rewriter, weight: Node, before: Node) -> Node:
    """Return the rows of down, one for each neuron; where it is a stack [G, D, S] of experts' as few moves of that."""
    stack = axes_of(weight)
    if stack is None or stack.axes not in (((1,), (0, 2)), ((2,), (0, 1))):
        return input_rows(rewriter, weight, before)
    rows = stack.parameter
    if stack.axes == ((1,), (0, 2)):
        rows = rewriter.call(TRANSPOSE, (rows, 1, 2), before=before, sources=(weight,))
    shape = list(weight.meta["val"].shape[::-1])
    return rewriter.call(RESHAPE, (rows, shape), before=before, sources=(weight,))


def _gains(forms: Forms, hidden: Node) -> tuple[Node, Node] | None:
    """Return the neurons' outputs before they are multiplied by gains of experts, and the gains; else None."""
    if not is_call(hidden, _aten.mul.Tensor) or not all(isinstance(factor, Node) for factor in hidden.args):
        return None
    for outputs, gains in (hidden.args, hidden.args[::-1]):
        moved = None if forms.is_known(gains) else forms.moved(gains, flat=True)  # type: ignore[arg-type]
        if moved is None or not is_call(moved[0], ROUTE) or moved[1] is not None:
            continue
        if outputs.meta["val"].shape[-2:-1] == gains.meta["val"].shape[-2:-1] and gains.meta["val"].shape[-1] == 1:  # type: ignore[union-attr]
            return outputs, moved[0]  # type: ignore[return-value]
    return None


def _block(forms: Forms, down: Node) -> _RaisedFfn | None:
    """The block that ends in the linear `down`; None where it ends none."""
    hidden = forms.same(down.args[0])  # type: ignore[arg-type]
    if (found := _gains(forms, hidden)) is not None:
        block = _block_of(forms, down, forms.same(found[0]))
        return None if block is None else replace(block, experts=_Experts.of(forms, down, found[1]))
    if not is_call(hidden, RMS_NORM):
        return _block_of(forms, down, hidden)
    values = arguments(hidden)
    normed = forms.same(values["x"])
    if values["groups"] != 1 or values["weight"].meta["val"].dim() != 1:
        return None
    block = _block_of(forms, down, normed)
    return None if block is None else replace(block, norm=_Norm(hidden, values["weight"], float(values["eps"])))


def _block_of(forms: Forms, down: Node, hidden: Node) -> _RaisedFfn | None:
    """The block whose hidden value is `hidden`; None where it is of none."""
    leaves = list(_leaves(forms, hidden))
    if hidden in leaves or not 1 <= len(leaves) <= 2:
        return None
    projections = [_projection(forms, leaf) for leaf in leaves]
    if any(projection is None for projection in projections):
        return None
    inputs = {forms.same(projection.linear.args[0]) for projection in projections}  # type: ignore[union-attr, arg-type]
    if len(inputs) != 1:
        return None
    x = projections[0].linear.args[0]  # type: ignore[union-attr]
    return _plain(forms, down, hidden, x) if len(leaves) == 1 else _gated(forms, down, hidden, x)


def _plain(forms: Forms, down: Node, hidden: Node, x: Any) -> _RaisedFfn | None:
    activated = _activated(forms, hidden)
    return (
        None
        if activated is None
        else _RaisedFfn(x, gate=None, up=activated[0], down=down, activation=activated[1], up_activation="identity")
    )


def _gated(forms: Forms, down: Node, hidden: Node, x: Any) -> _RaisedFfn | None:
    if not is_call(hidden, _aten.mul.Tensor) or not all(isinstance(factor, Node) for factor in hidden.args):
        return None
    # A gate of one column is one for all neurons.
    if not same_shape(*(factor.meta["val"].shape[-1:] for factor in hidden.args)):  # type: ignore[union-attr]
        return None
    first, second = (_activated(forms, forms.same(factor)) for factor in hidden.args)  # type: ignore[arg-type]
    if first is None or second is None:
        return None
    is_up = parse_activation(first[1]).name in ("identity", "clamped_linear")
    gate, up = (second, first) if is_up else (first, second)
    return _RaisedFfn(x, gate=gate[0], up=up[0], down=down, activation=gate[1], up_activation=up[1])


def _activated(forms: Forms, node: Node) -> tuple[Projection, str] | None:
    """The projection whose result elementwise operators turn into `node`, and the activation they make.

    None where there are several projections, or the activation is none of the dialect's.
    """
    leaves = list(_leaves(forms, node))
    projection = _projection(forms, leaves[0]) if len(leaves) == 1 else None
    if projection is None or not _has_numbers(forms, node):
        return None
    text = recognize_activation(lambda grid: _evaluate(forms, node, leaves[0], grid), _constants(forms, node))
    return None if text is None else (projection, text)


def _projection(forms: Forms, leaf: Node) -> Projection | None:
    moved = None if forms.is_known(leaf) else forms.moved(leaf, flat=True)
    return Projection(*moved) if moved is not None and is_call(moved[0], LINEAR) else None


def _is_elementwise(node: Node) -> bool:
    """Whether `node` is an operator that works on each element alone."""
    target = node.target
    if is_call(node, *_CONSTANTS_BESIDE):
        return not node.args[1]
    return target in _UNTAGGED or (isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags)


def _inputs(forms: Forms, node: Node) -> list[Node]:
    """Return the inputs of an elementwise operator, seen through reshapes; constants are left out."""
    return [forms.same(value) for value in node.all_input_nodes if not forms.is_known(value)]


def _region(forms: Forms, node: Node) -> Iterator[Node]:
    """`node` and the elementwise operators it is made by, back to values that are made by others. Each once."""
    seen, stack = set(), [node]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        yield current
        if _is_elementwise(current):
            stack.extend(_inputs(forms, current))


def _leaves(forms: Forms, node: Node) -> Iterator[Node]:
    return (current for current in _region(forms, node) if not _is_elementwise(current))


def _has_numbers(forms: Forms, node: Node) -> bool:
    """Whether every known value in the expression of `node` is one number for all."""
    known = (
        forms.known(value)
        for current in filter(_is_elementwise, _region(forms, node))
        for value in filter(forms.is_known, current.all_input_nodes)
    )
    return all(isinstance(number, Tensor) and number.numel() == 1 for number in known)


def _constants(forms: Forms, node: Node) -> list[float]:
    """All numbers in the expression of `node`."""
    numbers: list[float] = []
    for current in _region(forms, node):
        if _is_elementwise(current):
            numbers += [float(a) for a in current.args if isinstance(a, (int, float)) and not isinstance(a, bool)]
            for value in current.all_input_nodes:
                if forms.is_known(value):
                    numbers.append(float(forms.known(value)))
    return numbers


def _evaluate(forms: Forms, node: Node, leaf: Node, grid: Tensor) -> Tensor:
    """The expression of `node` with `grid` for its leaf."""
    if node is leaf:
        return grid

    def value(argument: Node) -> Any:
        return forms.known(argument) if forms.is_known(argument) else _evaluate(forms, forms.same(argument), leaf, grid)

    target: Any = node.target
    kwargs = on_cpu(node.kwargs)
    result: Tensor = target(*torch.fx.node.map_arg(node.args, value), **torch.fx.node.map_arg(kwargs, value))
    return result
