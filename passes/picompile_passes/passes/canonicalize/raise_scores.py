"""Raises attention that a model writes out, as products and a softmax, to torch's own operator for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from picompile_passes.base import Pass, Stage
from picompile_passes.graph.nodes import arguments, calls, is_call, positions_input
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.passes.canonicalize.forms import Forms
from picompile_passes.passes.canonicalize.raise_elementwise import is_pointwise

_aten = torch.ops.aten
_SOFTMAX = (_aten.softmax.int, _aten._softmax.default)
_PRODUCTS = (_aten.matmul.default, _aten.bmm.default)
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.expand.default)
_SCALED_DOT_PRODUCT = _aten.scaled_dot_product_attention.default

# What the product of queries and keys is set to, to see what becomes of it. Scores may be cut off at a bound.
_SAMPLES = (1.0, -2.0, 0.375, 1e4, -1e4)


@dataclass(frozen=True)
class RaiseScores(Pass):
    """Raises `softmax(f(q · kᵀ)) · v` to `scaled_dot_product_attention(q, k, v, mask, scale)`.

    1. f multiplies by a number and adds what depends on positions alone, in any order and by any operators: the number
       is the scale, and f of zero is the mask.
    2. `baddbmm(bias, q, kᵀ)` is q · kᵀ plus a bias, which must depend on positions alone.

    Products of any other kind stay as they are.
    """

    name: ClassVar[str] = "raise-scores"
    requires: ClassVar[Stage] = Stage.CAPTURED
    ensures: ClassVar[Stage] = Stage.CAPTURED

    def rewrite(self, rewriter: Rewriter) -> None:
        """Read all scores before the first change, because forms hold for an unchanged graph only."""
        softmaxes = list(calls(rewriter.graph, *_SOFTMAX))
        if not softmaxes:
            return
        forms = Forms(rewriter.graph_module)
        for scores in [found for node in softmaxes if (found := _read(forms, node)) is not None]:
            _emit(rewriter, forms, scores)


@dataclass(frozen=True)
class _Scores:
    """`result` is the product of the weights and v; `chain` leads from `product` to the softmax's argument."""

    result: Node
    product: Node
    chain: tuple[Node, ...]
    scale: float

    @property
    def values(self) -> Node:
        """The node v."""
        v: Node = self.result.args[1]  # type: ignore[assignment]
        return v


def _read(forms: Forms, softmax: Node) -> _Scores | None:
    result = _product_of_weights(softmax)
    over_last = softmax.args[1] in (-1, softmax.meta["val"].dim() - 1)
    if result is None or not over_last:
        return None
    chain = tuple(_chain(forms, softmax.args[0]))  # type: ignore[arg-type]
    if not chain or not _is_product(chain[-1], forms):
        return None
    scale = _scale(forms, chain)
    return None if scale is None else _Scores(result, chain[-1], chain[::-1], scale)


def _product_of_weights(softmax: Node) -> Node | None:
    """Return the one product of the weights and the values; views may lie between."""
    node = softmax
    while len(node.users) == 1:
        (user,) = node.users
        if is_call(user, *_PRODUCTS):
            return user if user.args[0] is node else None
        if not is_call(user, *_VIEWS):
            return None
        node = user
    return None


def _chain(forms: Forms, node: Node) -> Iterator[Node]:
    """Yield the operators from the argument of a softmax back to the product of queries and keys."""
    while True:
        yield node
        if _is_product(node, forms):
            return
        unknown = [value for value in node.all_input_nodes if not forms.is_known(value)]
        if len(unknown) != 1 or not (is_pointwise(node) or is_call(node, *_VIEWS, _aten.masked_fill.Scalar)):
            return
        node = unknown[0]


def _is_product(node: Node, forms: Forms) -> bool:
    if is_call(node, *_PRODUCTS):
        return not any(forms.is_known(value) for value in node.all_input_nodes)
    return is_call(node, _aten.baddbmm.default) and forms.is_known(node.args[0])  # type: ignore[arg-type]


def _scale(forms: Forms, chain: tuple[Node, ...]) -> float | None:
    """Return the number that the product is multiplied by, None where more becomes of it."""
    zero, *others = (_evaluate(forms, chain, number) for number in (0.0, *_SAMPLES))
    shown = zero > -1e9
    if not shown.any():
        return None
    factors = [(other - zero)[shown.expand_as(other)] / number for other, number in zip(others, _SAMPLES, strict=True)]
    scale = float(factors[0].flatten()[0])
    constant = all(torch.allclose(factor, torch.full_like(factor, scale), rtol=1e-4, atol=1e-6) for factor in factors)
    return scale if constant else None


def _evaluate(forms: Forms, chain: tuple[Node, ...], number: float) -> Tensor:
    """Return the argument of the softmax where every product is `number`."""
    product = chain[-1]
    value: Any = torch.full(forms.sample_shape(product), number)
    if is_call(product, _aten.baddbmm.default):
        values = arguments(product)
        value = values["alpha"] * value + values["beta"] * forms.known(values["self"])
    known = {product: value}
    for node in chain[-2::-1]:
        known[node] = forms.run(node, known)
    result: Tensor = known[chain[0]].to(torch.float64)
    return result


def _emit(rewriter: Rewriter, forms: Forms, scores: _Scores) -> None:
    product, result = scores.product, scores.result
    q, keys = product.args[-2:]
    mask = _mask(rewriter, forms, scores)
    while mask.meta["val"].dim() > result.meta["val"].dim():
        mask = rewriter.call(_aten.squeeze.dim, (mask, 0), before=result, sources=(mask,))
    k = rewriter.call(_aten.transpose.int, (keys, -2, -1), before=result, sources=(product,))
    sides: list[Node] = [q, k, scores.values]  # type: ignore[list-item]
    for index, side in enumerate(sides):
        while sides[index].meta["val"].dim() < result.meta["val"].dim():
            wider = (sides[index], 0)
            sides[index] = rewriter.call(_aten.unsqueeze.default, wider, before=result, sources=(side,))
    attended = rewriter.call(_SCALED_DOT_PRODUCT, (*sides, mask), before=result, sources=(result, product))
    attended.kwargs = {"scale": scores.scale}
    rewriter.replace(result, attended)


def _mask(rewriter: Rewriter, forms: Forms, scores: _Scores) -> Node:
    """Return the chain with a zero for the product: what is added to every score, and what hides some."""
    product = scores.product

    def call(op: Any, *args: Any) -> Node:
        return rewriter.call(op, args, before=scores.result, sources=(product,))

    # A zero for each pair of positions, of each head.
    positions = positions_input(rewriter.graph)
    row = call(_aten.mul.Scalar, positions, 0.0)
    heads = torch.zeros(*forms.sample_shape(product)[:-2], 1, 1)
    zero = call(_aten.add.Tensor, call(_aten.unsqueeze.default, row, -1), row)
    zero = call(_aten.add.Tensor, rewriter.constant("zeros", heads, sources=(product,)), zero)
    if is_call(product, _aten.baddbmm.default):
        values = arguments(product)
        zero = call(_aten.add.Tensor, call(_aten.mul.Scalar, values["self"], values["beta"]), zero)
    made: dict[Node, Node] = {product: zero}
    for node in scores.chain[1:]:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda value: made.get(value, value))
        made[node] = call(node.target, *args)
        made[node].kwargs = kwargs
    return made[scores.chain[-1]]
