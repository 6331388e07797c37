"""Leaves out the small inputs of projections."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.fx import Node

from picompile_passes.base import Effect, Pass, Stage
from picompile_passes.dialect import parse_activation
from picompile_passes.dialect.expressions import ExpressionStep, Operand, expression_text
from picompile_passes.errors import PassOptionError, UnsupportedGraphError
from picompile_passes.graph.nodes import arguments, calls, constant_nodes, is_call
from picompile_passes.graph.operands import (
    ADD,
    ATTENTION,
    DEQUANTIZE,
    ELEMENTWISE,
    FFN,
    LAYER_NORM,
    LINEAR,
    PREDICTORS,
    RMS_NORM,
    ROTARY,
    SPARSE_FFN,
    SPARSE_LINEAR,
    input_rows,
    makes_logits,
)
from picompile_passes.graph.rewriter import Rewriter

SITES = ("qkv", "attention_output", "ffn_input", "down")
"""The projections whose inputs may be left out; `SkipInputs` says which they are."""


@dataclass(frozen=True)
class SkipInputs(Pass):
    """Leaves out inputs of projections that are small: the projection reads no weights for them.

    1. `linear(x, weight, bias)` becomes `sparse_linear(x, transpose(weight), limits, bias)`. `limits` is a new
       parameter `predictors.layers.LAYER.SITE_limits`, one number for each input, whose values come from the weight
       source; projections of a site that read one value have one parameter.
    2. Site `qkv`: the projections that make queries, keys and values, behind which there may be norms, rotary
       embeddings and arithmetic. They must read one value.
    3. Site `attention_output`: the projection that reads what attention gives, maybe normalized or gated.
    4. Site `ffn_input`: `ffn(x, …)` becomes a `sparse_linear` for gate and for up, an `elementwise` with the
       activations, and a `sparse_linear` for down. The block must have no predictor: so this comes before
       `insert-predictors`, and other layers may have predictors all the same.
    5. Site `down`, beside `ffn_input`: the outputs of neurons that are small are left out too; without it those that
       are zero.

    An input is read where its magnitude is above its limit (see the operator `sparse_linear`). Limits below zero leave
    out nothing.
    """

    name: ClassVar[str] = "skip-inputs"
    requires: ClassVar[Stage] = Stage.CANONICAL
    ensures: ClassVar[None] = None

    default_effect: ClassVar[Effect] = Effect.SKIPS

    sites: Mapping[int, tuple[str, ...]] = field(
        default_factory=dict,
        metadata={
            "help": f"layer → projections whose small inputs are left out: {', '.join(SITES)}",
            "example": "(0:(qkv,attention_output),1:(qkv,))",
        },
    )

    def __post_init__(self) -> None:
        """Raise `PassOptionError` for a site that there is not, and for `down` without `ffn_input`."""
        # Sorted, so that equal options make equal passes whatever order they came in.
        given = {layer: tuple(dict.fromkeys(names)) for layer, names in sorted(self.sites.items())}
        object.__setattr__(self, "sites", given)
        for layer, names in given.items():
            for name in names:
                if name not in SITES:
                    raise self._wrong(layer, f"{name!r} is not one of {', '.join(SITES)}")
            if "down" in names and "ffn_input" not in names:
                raise self._wrong(layer, "down needs ffn_input beside it")

    def rewrite(self, rewriter: Rewriter) -> None:
        """Apply the rules.

        Raises `PassOptionError` for a layer that the graph does not have, `UnsupportedGraphError` for a site that is
        not found, or whose matrices are quantized already.
        """
        attentions = {arguments(node)["layer"]: node for node in calls(rewriter.graph, ATTENTION)}
        for layer, names in self.sites.items():
            if layer not in attentions:
                raise self._wrong(layer, "the graph has no attention of that number")
            if "qkv" in names:
                self._replace(rewriter, layer, "qkv", _before(attentions[layer]))
            if "attention_output" in names:
                self._replace(rewriter, layer, "attention_output", _behind(attentions[layer]))
            if "ffn_input" in names:
                self._split_block(rewriter, layer, skips_down="down" in names)

    def _replace(self, rewriter: Rewriter, layer: int, site: str, found: Sequence[Node]) -> None:
        """Replace the projections of a site; those that are replaced already stay as they are."""
        if not found:
            raise _unsupported(layer, site, "there is no projection")
        if len({arguments(node)["x"] for node in found}) > 1:
            raise _unsupported(layer, site, "its projections read different values")
        known = [arguments(node)["limits"] for node in found if is_call(node, SPARSE_LINEAR)]
        left = [node for node in found if is_call(node, LINEAR)]
        if not left:
            return
        size = int(arguments(left[0])["x"].meta["val"].shape[1])
        limits = known[0] if known else _parameter(rewriter, layer, site, size, left)
        for node in left:
            x, weight, bias = arguments(node).values()
            if is_call(weight, DEQUANTIZE):
                raise _unsupported(layer, site, f"{weight.name} is quantized already")
            rows = input_rows(rewriter, weight, node)
            call = (x, rows, limits, bias)
            rewriter.replace(node, rewriter.call(SPARSE_LINEAR, call, before=node, sources=(node,), layer=layer))

    def _split_block(self, rewriter: Rewriter, layer: int, *, skips_down: bool) -> None:
        """Write a feed-forward block as projections that leave out inputs."""
        block = _block(rewriter, layer)
        if block is None:
            return
        values = arguments(block)
        if values["norm_eps"] is not None:
            raise _unsupported(layer, "ffn_input", "its block has a norm across the neurons")

        def project(x: Node, rows: Node, limits: Node, bias: Node | None) -> Node:
            return rewriter.call(SPARSE_LINEAR, (x, rows, limits, bias), before=block, sources=(block,), layer=layer)

        x, neurons = values["x"], int(values["up"].meta["val"].shape[0])
        limits = _parameter(rewriter, layer, "ffn_input", int(x.meta["val"].shape[1]), [block])
        sides = [side for side in ("gate", "up") if values[side] is not None]
        products = [
            project(x, input_rows(rewriter, values[side], block), limits, values[f"{side}_bias"]) for side in sides
        ]
        hidden = products[0]
        activations = [values["activation"], values["up_activation"]][: len(sides)]
        if expression := _expression(activations):
            hidden = rewriter.call(ELEMENTWISE, (products, expression), before=block, sources=(block,))
        if skips_down:
            down_limits = _parameter(rewriter, layer, "down", neurons, [block])
        else:
            down_limits = rewriter.constant(f"layer_{layer}_down_limits", torch.zeros(neurons), sources=(block,))
        rewriter.replace(block, project(hidden, values["down"], down_limits, values["down_bias"]))

    def _wrong(self, layer: int, fault: str) -> PassOptionError:
        return PassOptionError(f"option sites of pass {self.name}: layer {layer}: {fault}")


def _unsupported(layer: int, site: str, why: str) -> UnsupportedGraphError:
    return UnsupportedGraphError(f"layer {layer}: {why}: leave {site} out of the sites of skip-inputs")


def _parameter(rewriter: Rewriter, layer: int, site: str, size: int, sources: Sequence[Node]) -> Node:
    return rewriter.parameter(f"{PREDICTORS}{layer}.{site}_limits", [size], sources=sources)


def _block(rewriter: Rewriter, layer: int) -> Node | None:
    """Return the feed-forward block of a layer, None where it is written as projections already."""
    of_layer = [
        node
        for node in calls(rewriter.graph, FFN, SPARSE_FFN, SPARSE_LINEAR)
        if node.meta.get("layer") == layer and (is_call(node, FFN, SPARSE_FFN) or _reads(node, "ffn_input"))
    ]
    if not of_layer:
        raise _unsupported(layer, "ffn_input", "there is no feed-forward block")
    if is_call(of_layer[0], SPARSE_FFN):
        raise _unsupported(layer, "ffn_input", "its block has a predictor")
    return of_layer[0] if is_call(of_layer[0], FFN) else None


def _reads(node: Node, site: str) -> bool:
    """Return whether the limits of a `sparse_linear` are those of `site`."""
    return str(arguments(node)["limits"].target).endswith(f".{site}_limits")


def _before(attention: Node) -> list[Node]:
    """Return the projections that make queries, keys and values; none where any of these comes from elsewhere."""
    values, constants = arguments(attention), constant_nodes(attention.graph)
    found: dict[Node, None] = {}
    waiting = [values[name] for name in "vkq"]
    while waiting:
        node = waiting.pop()
        if is_call(node, LINEAR, SPARSE_LINEAR):
            found[node] = None
        elif is_call(node, ROTARY, RMS_NORM, LAYER_NORM, ELEMENTWISE, ADD):
            waiting += [value for value in _computed_from(node) if value not in constants]
        else:
            return []
    return list(found)


def _computed_from(node: Node) -> Iterator[Node]:
    """Yield the values that a norm, rotary embedding or arithmetic turns into another; no positions."""
    values: Mapping[str, Any] = arguments(node)
    if is_call(node, ELEMENTWISE):
        yield from values["inputs"]
    elif is_call(node, ADD):
        yield from (values["self"], values["other"])
    else:
        yield values["x"]


def _behind(attention: Node) -> list[Node]:
    """Return the projection that reads what attention gives, maybe normalized or gated; none where it is not one."""
    found: dict[Node, None] = {}
    waiting = [attention]
    while waiting:
        for user in waiting.pop().users:
            if is_call(user, LINEAR, SPARSE_LINEAR):
                found[user] = None
            elif is_call(user, ELEMENTWISE, RMS_NORM, LAYER_NORM):
                waiting.append(user)
            else:
                return []
    if len(found) > 1 or any(makes_logits(node) for node in found):
        return []
    return list(found)


def _expression(activations: Sequence[str]) -> str:
    """Return the product of the activations of x0, x1 … as an expression; empty where that is x0 itself."""
    steps: list[ExpressionStep] = []
    factors: list[Operand] = []
    for number, text in enumerate(activations):
        x, activation = f"x{number}", parse_activation(text)
        factor = x
        if activation.name == "fatrelu":
            steps.append(ExpressionStep("where_greater", (x, activation.threshold, x, 0.0)))
        elif activation.name != "identity":
            steps.append(ExpressionStep(activation.name, (x,)))
        if activation.name != "identity":
            factor = f"t{len(steps) - 1}"
        factors.append(factor)
    if len(factors) > 1:
        steps.append(ExpressionStep("mul", tuple(factors)))
    return expression_text(steps) if steps else ""
