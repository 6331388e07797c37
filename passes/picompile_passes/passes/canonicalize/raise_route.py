"""Raises a router's arithmetic to `route`, and recognizes its rule by the values that it computes.

Models write the choice of experts in many ways: a top-k of logits, of scores or of scores with a bias; masks of groups,
scatters, sorts. The pass does not compare expressions: it evaluates the router's arithmetic on random logits, and
compares the gains with those of each rule of the dialect that the numbers in the expression allow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from picompile_passes.base import Pass, Stage
from picompile_passes.dialect import OPERATORS
from picompile_passes.dialect.route import GROUP_SCORES, NORMALIZED, SCORES
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.nodes import calls, is_call
from picompile_passes.graph.operands import LINEAR, ROUTE
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.passes.canonicalize.captured_experts import EXPERT_GAINS
from picompile_passes.passes.canonicalize.forms import Forms, on_cpu

_aten = torch.ops.aten
# Logits are a normal distribution times the first number plus the second: ordinary ones, ones that choose sharply, and
# ones whose scores are so small that a number added to their sum shows.
_SAMPLES = ((1.0, 0.0), (6.0, 0.0), (1.0, 2.0), (2.0, -18.0))
# And ones whose sigmoids are all 1: experts that are chosen by their logits differ still, by their scores no more.
_SATURATED = (1.0, 30.0)
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class RaiseRoute(Pass):
    """Raises the arithmetic of a router between its logits and `expert_gains` to one `route`.

    1. The logits are the value, with one column for each expert, that all ways from the tokens to the gains lead
       through; the nearest to the tokens that a rule fits. Arithmetic before it stays as it is.
    2. A parameter [G] in the arithmetic is the bias of the choice, or the scale of the experts.
    3. `chosen`, groups, `eps` are numbers of the arithmetic. `scale` is the ratio of its gains to those of the rule.
    4. A choice by logits is told from one by their scores where scores are equal: sigmoids of large logits.

    A router that no rule fits is an error.
    """

    name: ClassVar[str] = "raise-route"
    requires: ClassVar[Stage] = Stage.CAPTURED
    ensures: ClassVar[Stage] = Stage.CAPTURED

    def rewrite(self, rewriter: Rewriter) -> None:
        """Raise every router. Raises `UnsupportedGraphError` for one that no rule fits."""
        routers = list(calls(rewriter.graph, EXPERT_GAINS))
        # Forms take as long as all else, and most models have no router.
        forms = Forms(rewriter.graph_module) if routers else None
        found = [] if forms is None else [(node, _router(forms, node)) for node in routers]
        for node, (logits, rule) in found:
            args = (logits, *(_vector(rewriter, vector, node) for vector in rule.vectors), *rule.numbers)
            new = rewriter.call(ROUTE, args, before=node, sources=(node,))
            rewriter.replace(node, new)


@dataclass(frozen=True)
class _Rule:
    """Arguments of a `route` behind the logits: the nodes of bias and expert_scale, and the others."""

    vectors: tuple[Node | None, Node | None]
    numbers: tuple[Any, ...]


@dataclass(frozen=True)
class _Arithmetic:
    """The arithmetic of a router: the calls between `logits` and `gains`, in order, and its parameters."""

    forms: Forms
    logits: Node
    gains: Node
    calls: tuple[Node, ...]
    parameters: tuple[Node, ...]

    def evaluate(self, values: dict[Node, Tensor]) -> Tensor:
        """Return the gains, [tokens, experts], for `values` of the logits and the parameters."""
        known: dict[Node, Any] = dict(values)
        for call in self.calls:
            known[call] = self._run(call, known)
        gains: Tensor = known[self.gains]
        return gains.reshape(self.forms.tokens, -1)

    def _run(self, call: Node, known: dict[Node, Any]) -> Any:
        def value(argument: Node) -> Any:
            return known[argument] if argument in known else self.forms.known(argument)

        target: Any = call.target
        return target(*torch.fx.node.map_arg(call.args, value), **torch.fx.node.map_arg(on_cpu(call.kwargs), value))

    def numbers(self) -> list[float]:
        """Return all numbers in the arithmetic."""
        found: list[float] = []

        def collect(value: Any) -> None:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found.append(float(value))
            elif isinstance(value, (list, tuple)):
                for each in value:
                    collect(each)
            elif isinstance(value, Node) and self.forms.is_known(value):
                known = self.forms.known(value)
                if isinstance(known, Tensor) and known.numel() == 1:
                    found.append(float(known))

        for call in self.calls:
            collect((*call.args, *call.kwargs.values()))
        return found


def _router(forms: Forms, gains: Node) -> tuple[Node, _Rule]:
    """Return the logits of a router, and its rule. Raises `UnsupportedGraphError` where no rule fits."""
    for logits in _cuts(forms, gains):
        arithmetic = _arithmetic(forms, logits, gains)
        rule = None if arithmetic is None else _recognize(arithmetic)
        if rule is not None:
            return logits, rule
    raise UnsupportedGraphError(
        f"the graph cannot be expressed in the dialect: {gains.name}: the router before it chooses experts by no rule "
        "that is known"
    )


def _experts(gains: Node) -> int:
    """Return how many experts the gains are of."""
    count: int = gains.args[2]  # type: ignore[assignment]
    return count


def _cuts(forms: Forms, gains: Node) -> list[Node]:
    """Return the values with a column for each expert that the gains are made of, those nearest to the tokens first."""
    experts, found, stack = _experts(gains), set[Node](), list(gains.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in found or forms.is_known(node) or node.op != "call_function":
            continue
        found.add(node)
        if not is_call(node, LINEAR):
            stack.extend(node.all_input_nodes)
    order = {node: number for number, node in enumerate(gains.graph.nodes)}
    return sorted((node for node in found if _has_columns(forms, node, experts)), key=order.__getitem__)


def _has_columns(forms: Forms, node: Node, experts: int) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape[-1:] != (experts,):
        return False
    return forms.columns(node) == experts


def _arithmetic(forms: Forms, logits: Node, gains: Node) -> _Arithmetic | None:
    """Return the arithmetic between `logits` and `gains`; None where other values of tokens are in it."""
    found, parameters, stack = {gains}, set[Node](), list(gains.all_input_nodes)
    while stack:
        node = stack.pop()
        if node is logits or node in found or forms.is_known(node):
            continue
        if node.op == "get_attr":
            if node.meta["val"].numel() != _experts(gains):
                return None
            parameters.add(node)
            continue
        if node.op != "call_function" or is_call(node, LINEAR) or not node.all_input_nodes:
            return None
        found.add(node)
        stack.extend(node.all_input_nodes)
    order = [node for node in gains.graph.nodes if node in found]
    return _Arithmetic(
        forms, logits, gains, tuple(order), tuple(node for node in gains.graph.nodes if node in parameters)
    )


def _recognize(arithmetic: _Arithmetic) -> _Rule | None:
    """Return the rule by which the arithmetic computes gains; None for an unknown one."""
    generator = torch.Generator().manual_seed(0)
    forms, samples, expected = arithmetic.forms, list[dict[Node, Tensor]](), list[Tensor]()
    for factor, shift in (*_SAMPLES, _SATURATED):
        values = {
            node: torch.randn(node.meta["val"].shape, generator=generator) * 0.3 + 1 for node in arithmetic.parameters
        }
        shape = forms.sample_shape(arithmetic.logits)
        values[arithmetic.logits] = torch.randn(shape, generator=generator) * factor + shift
        samples.append(values)
        try:
            expected.append(arithmetic.evaluate(values))
        except (IndexError, RuntimeError):
            return None
    for vectors, numbers in _candidates(arithmetic):
        # Which of equal scores is the first, a model does not say.
        count = len(samples) if numbers[1] == "identity" else len(_SAMPLES)
        scale = _scale(arithmetic.logits, samples[:count], expected[:count], vectors, numbers)
        if scale is not None:
            return _Rule(vectors, (*numbers[:3], scale, *numbers[3:]))
    return None


def _candidates(arithmetic: _Arithmetic) -> Iterator[tuple[tuple[Node | None, Node | None], tuple[Any, ...]]]:
    """Yield rules: the nodes of bias and expert_scale, and the other arguments but for the logits and the scale."""
    index, experts = arithmetic.gains.args[0], _experts(arithmetic.gains)
    chosen = int(index.meta["val"].shape[-1])  # type: ignore[union-attr]
    numbers = arithmetic.numbers()
    whole = sorted({int(number) for number in numbers if 1 < number < experts and number == int(number)})
    groups: list[tuple[int, int, str]] = [(1, 1, "max")]
    groups += [
        (count, kept, score)
        for count in whole
        if experts % count == 0
        for kept in (1, *whole)
        if kept < count and chosen <= experts // count * kept
        for score in GROUP_SCORES
        if score == "max" or experts // count > 1
    ]
    below_one = [number for number in sorted(set(numbers), reverse=True) if 0 < number < 1]
    small = (*(number for number in below_one if number < 1e-3), 0.0)
    added = {"sum": small, "sigmoid_sum": small, "sparse_mixer": (*below_one, 0.0)}
    vectors = [*permutations((*arithmetic.parameters, None), 2)] if arithmetic.parameters else [(None, None)]
    for pair, scores, normalized, grouping in product(vectors, SCORES, NORMALIZED, groups):
        if {*pair} - {None} != {*arithmetic.parameters}:
            continue
        # The gain of one expert is 1 however it is normalized; a logit of 0 over itself is no number.
        if (scores, normalized) == ("identity", "sum"):
            continue
        if normalized == "sparse_mixer" and (scores != "identity" or pair[0] is not None or grouping[0] > 1):
            continue
        for eps in added.get(normalized, (0.0,)):
            yield pair, (chosen, scores, normalized, eps, *grouping)


def _scale(
    logits: Node,
    samples: Sequence[dict[Node, Tensor]],
    expected: Sequence[Tensor],
    vectors: tuple[Node | None, Node | None],
    numbers: tuple[Any, ...],
) -> float | None:
    """Return the scale with which a rule gives the expected gains; None where none does."""
    scale: float | None = None
    for values, gains in zip(samples, expected, strict=True):
        operands = (None if node is None else values[node].flatten() for node in vectors)
        given = values[logits].reshape(gains.shape)
        made = OPERATORS["route"].eager(given, *operands, *numbers[:3], 1.0, *numbers[3:])
        if scale is None:
            scale = _rounded(float(gains.sum() / made.sum()))
        if not torch.allclose(made * scale, gains, rtol=_TOLERANCE, atol=0.0):
            return None
    return scale


def _rounded(scale: float) -> float:
    """Return a number of few digits that a sum of rounded ones stands for, or the number itself."""
    few = float(f"{scale:.4g}")
    return few if abs(few - scale) < 1e-5 * abs(scale) else scale


def _vector(rewriter: Rewriter, parameter: Node | None, before: Node) -> Node | None:
    """Return a parameter as a vector [experts]."""
    if parameter is None or parameter.meta["val"].dim() == 1:
        return parameter
    return rewriter.call(_aten.reshape.default, (parameter, [-1]), before=before, sources=(parameter,))
