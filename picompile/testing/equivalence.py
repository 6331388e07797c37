"""Comparisons of graphs: by their structure, as a value that can be kept, and by the logits that they compute."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import assume, currently_in_test_context
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn import functional as F

from picompile.testing.weights import RandomWeights, random_weights, vocabulary
from picompile_passes.dialect import parse_activation
from picompile_passes.dialect.neurons import neuron_gains, neuron_outputs
from picompile_passes.dialect.route import SCORES
from picompile_passes.graph.materialize import WeightSource, materialize, node_values
from picompile_passes.graph.nodes import arguments, is_call
from picompile_passes.graph.operands import FFN, PREDICT, ROUTE, SPARSE_FFN
from picompile_passes.graph.values import value_text
from picompile_passes.predictors import predictor_kind


def structure(graph_module: GraphModule) -> Sequence[tuple[Any, ...]]:
    """All that makes up a graph: nodes in order, with targets, arguments and metadata, and the module's tensors.

    Taken before and after something, it tells whether the graph was changed, its metadata and the contents of its
    tensors included. A copy that shares its tensors has the same structure; the stage is no part of it.
    """
    tensors: list[tuple[str, Tensor]] = [*graph_module.named_parameters(remove_duplicate=False)]
    tensors += graph_module.named_buffers(remove_duplicate=False)
    # Torch counts up a tensor's version when it is written to.
    versions = sorted((name, id(tensor), tensor._version) for name, tensor in tensors)
    return [*map(_node, graph_module.graph.nodes), *versions]


def _node(node: Node) -> tuple[Any, ...]:
    meta = {key: value_text(value) if key == "val" else repr(value) for key, value in node.meta.items()}
    return node.name, node.op, node.target, str(node.args), str(node.kwargs), meta


# Where a model jumps: the smallest change of a value makes a neuron fire that was silent.
#
# FATReLU jumps at its threshold, and so does a block whose predictor compares with one, and a router where two experts
# have nearly the same score. Two right ways to compute one model may then differ, because a float32 rounding brought a
# value to the other side.


# Far more than float32 rounds the values of a small model by.
_NEAR = 1e-5

_aten = torch.ops.aten
_COMPARISONS = tuple(
    getattr(op, form) for op in (_aten.gt, _aten.ge, _aten.lt, _aten.le) for form in ("Scalar", "Tensor")
)


def near_jump(graph_module: GraphModule, tokens: Tensor) -> bool:
    """Whether a neuron or a choice of experts lies next to a jump, for `tokens` int64 [T].

    `graph_module` must have real weights.
    """
    values = node_values(graph_module, tokens)
    return any(_is_near_jump(node, values) for node in graph_module.graph.nodes)


def _is_near_jump(node: Node, values: dict[str, Any]) -> bool:
    if not is_call(node, FFN, SPARSE_FFN, PREDICT, ROUTE, _aten.threshold.default, *_COMPARISONS):
        return False
    known = {name: map_arg(value, lambda read: values[read.name]) for name, value in arguments(node).items()}
    if is_call(node, FFN, SPARSE_FFN):
        return _block_is_near(known)
    if is_call(node, PREDICT):
        return _predictor_is_near(known)
    if is_call(node, ROUTE):
        return _route_is_near(known)
    x, threshold, *_ = known.values()
    return _compares_near(x, threshold)


def _block_is_near(values: dict[str, Any]) -> bool:
    side = "up" if values["gate"] is None else "gate"
    threshold = parse_activation(values["activation"]).threshold
    first = F.linear(values["x"], values[side], values[f"{side}_bias"])
    if _compares_near(first, threshold):
        return True
    # A block of `ffn` has no limits.
    gate_limits, output_limits = values.get("gate_limits"), values.get("output_limits")
    if gate_limits is not None and _compares_near(
        parse_activation(values["activation"]).function(first).abs(), gate_limits
    ):
        return True
    if output_limits is None:
        return False
    names = ("x", "gate", "up", "gate_bias", "up_bias", "activation", "up_activation")
    return _compares_near(neuron_outputs(*(values[name] for name in names)).abs(), output_limits)


def _predictor_is_near(values: dict[str, Any]) -> bool:
    if values["kind"] == "exact":
        # It jumps where its block does.
        return False
    evaluate, x, threshold = predictor_kind(values["kind"]).evaluate, values["x"], values["threshold"]
    # Sums of large values are rounded by as much more.
    near = _NEAR * max(1.0, float(x.abs().max()))
    # A rounding moves what is compared with the threshold; where signs are counted, it moves x past 0.
    dx, dt = (near, 0.0) if values["kind"] == "sign" else (0.0, near)
    below, above = (evaluate(x + side * dx, values["weights"], threshold + side * dt) for side in (-1, 1))
    differs = below != above
    if values["gains"] is not None:
        differs &= neuron_gains(values["gains"], differs.shape[-1]) != 0
    return bool(differs.any())


def _route_is_near(values: dict[str, Any]) -> bool:
    """Whether an expert, or a group of them, that is chosen has nearly the score of one that is not."""
    score = SCORES[values["scores"]](values["logits"])
    choice = score if values["bias"] is None else score + values["bias"]
    grouped = choice.unflatten(-1, (values["groups"], -1))
    best = grouped.topk(1 if values["group_score"] == "max" else 2, dim=-1).values.sum(-1)
    # Experts of groups that are not chosen are compared too: that gives up a few draws more.
    return any(_is_close_call(x, n) for x, n in ((choice, values["chosen"]), (best, values["chosen_groups"])))


def _is_close_call(scores: Tensor, chosen: int) -> bool:
    """Whether the last of the `chosen` highest scores of a row is nearly the next one's."""
    if chosen >= scores.shape[-1]:
        return False
    ordered = scores.sort(dim=-1, descending=True).values
    near = _NEAR * max(1.0, float(scores.abs().max()))
    return bool((ordered[..., chosen - 1] - ordered[..., chosen] < near).any())


def _compares_near(x: Any, threshold: Any) -> bool:
    """Whether a value of `x` is next to the threshold of a jump: at 0 there is none, the value is 0 on both sides."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return False
    distance = (x - threshold).abs()
    return bool(((distance < _NEAR) & (torch.as_tensor(threshold) != 0)).any())


# Whether two graphs compute the same logits, in eager PyTorch.


TOLERANCES: Mapping[torch.dtype, float] = {
    # Sums in another order differ by some 1e-7 of their terms, and a few layers make some 1e-6 of that. An eps of 1e-6
    # for one of 1e-5, as small a fault as there is, moves the logits by more.
    torch.float32: 2e-5,
    # Every intermediate value is rounded by up to 2^-11 = 5e-4, and a few layers add up some ten of these. Of 150 small
    # models of transformers half were off by 8e-4, and the worst by 5e-3.
    torch.float16: 1e-2,
    # As with float16, but the roundings are of 2^-8 = 4e-3. Half of the same models were off by 8e-3, all but one by
    # less than 7e-2.
    torch.bfloat16: 1e-1,
}
"""The tolerance of logits computed in a dtype, relative to the largest expected one."""

# How many draws of tokens a difference is looked for in, where a jump may explain it each time.
_TRIES = 5
# Two computations may be off the exact one to either side, and by other roundings.
_ROUNDING_ROOM = 4.0


def run(graph_module: GraphModule, weights: WeightSource, tokens: int | Tensor = 6) -> Tensor:
    """Logits float32 [T, V] of `graph_module` in eager PyTorch, for tokens at positions 0 to T - 1.

    `tokens` are ids int64 [T], or their number T: then they are always the same ones.
    """
    ids = torch.arange(tokens) * 7 % vocabulary(graph_module) if isinstance(tokens, int) else tokens
    return _logits(materialize(graph_module, weights), ids)


def assert_equivalent(
    before: GraphModule | nn.Module,
    after: GraphModule,
    *,
    weights: WeightSource | None = None,
    tokens: Sequence[int] = (1, 2, 9),
    dtype: torch.dtype = torch.float32,
    bound: float | None = None,
    seed: int = 0,
) -> None:
    """Raises `AssertionError` unless `before` and `after` compute the same logits.

    Both run with the same `weights`, on random tokens, as many as each of `tokens` says. `before` is a graph module, or
    any other module that has real weights and is called as before(tokens int64 [T], positions int64 [T]) → logits
    [T, V]. By default the weights are random ones of `dtype`; for another module its own parameters, by their names.

    Every logit must be within a tolerance of the largest expected one. Graphs compute in float32, whatever the weights
    are; another module computes in `dtype`, and the tolerance is that of `TOLERANCES`. With `bound`, the relative error
    of the logits of a run, in the 2-norm, may be as large as that: for passes that round, or skip what may matter.

    A model that amplifies roundings, as a norm of a few numbers that are nearly equal does, may be off by more than the
    tolerance: by as much as float32 is off float64 in `before`, with some room.

    Where the logits differ and a neuron or a router of `before` lies next to a jump (see `jumps`), that may be no
    fault: other tokens are tried. If that is so each time, a test of hypothesis gives up the example; elsewhere it is
    an error.
    """
    reference: nn.Module = before
    if isinstance(before, GraphModule):
        weights = random_weights(before, seed, dtype) if weights is None else weights
        reference, dtype = materialize(before, weights), torch.float32
    elif weights is None:
        weights = RandomWeights(dict(before.named_parameters()))
    result, tolerance = materialize(after, weights), TOLERANCES[dtype]
    known = reference if isinstance(reference, GraphModule) else result
    entries = vocabulary(known)
    ids = torch.Generator().manual_seed(seed)
    stages = f"{_describe(before)} and {_describe(after)}"
    for count in tokens:
        for _ in range(_TRIES):
            drawn = torch.randint(entries, (count,), generator=ids)
            expected, actual = _logits(reference, drawn), _logits(result, drawn)
            fault = _fault(expected, actual, tolerance, bound)
            if fault is not None and bound is None and isinstance(reference, GraphModule):
                # A model may amplify roundings: what they do to the reference itself, they may do to the result.
                noise = _ROUNDING_ROOM * _rounding_error(reference, drawn, expected)
                fault = _fault(expected, actual, max(tolerance, noise), bound)
            if fault is None:
                break
            message = f"{stages} differ, {count} tokens, seed {seed}: {fault}"
            if bound is not None or not near_jump(known, drawn):
                raise AssertionError(message)
        else:
            _give_up(message)


def _rounding_error(reference: nn.Module, tokens: Tensor, logits: Tensor) -> float:
    """Return how far `logits` are off those that `reference` computes in float64, relative to the largest of these.

    It is 0 where some operator of the reference knows no float64.
    """
    try:
        exact = _logits(copy.deepcopy(reference).double(), tokens)
    except (RuntimeError, TypeError, ValueError):
        return 0.0
    return float((logits - exact).abs().max() / exact.abs().max().clamp(min=1e-6))


def _give_up(message: str) -> None:
    """Ends the example, where hypothesis drew one; raises `AssertionError` elsewhere."""
    if currently_in_test_context():
        assume(False)
    raise AssertionError(f"{message}; a neuron lay next to a jump in each of {_TRIES} draws, which may be why")


def _logits(module: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = module(tokens, torch.arange(len(tokens)))
    return logits.to(torch.float32)


def _fault(expected: Tensor, actual: Tensor, tolerance: float, bound: float | None) -> str | None:
    """Return a description of the fault in the logits `actual` [tokens, vocabulary], or None."""
    if actual.shape != expected.shape:
        return f"logits are {list(actual.shape)}, not {list(expected.shape)}"
    for name, logits in (("an expected", expected), ("a computed", actual)):
        if not logits.isfinite().all():
            return f"{name} logit is not finite, {_place(~logits.isfinite())}"
    difference = (actual - expected).abs()
    if bound is not None:
        error = float((actual - expected).norm() / expected.norm().clamp(min=1e-6))
        return None if error <= bound else f"relative error {error:.3g} in the 2-norm, where bound={bound:g}"
    largest = float(expected.abs().max().clamp(min=1e-6))
    if float(difference.max()) <= tolerance * largest:
        return None
    ratio = float(difference.max()) / largest
    return f"off by {ratio:.3g} of the largest logit {largest:.3g}, tolerance {tolerance:g}, {_place(difference)}"


def _place(values: Tensor) -> str:
    """Return the position of the largest of `values` [T, V]."""
    token, entry = divmod(int(values.to(torch.float32).argmax()), values.shape[1])
    return f"at token {token}, vocabulary entry {entry}"


def _describe(module: nn.Module) -> str:
    if isinstance(module, GraphModule):
        return f"the graph of stage {module.meta.get('stage', 'unknown')}"
    return f"module {type(module).__name__}"
