"""Sensitivities against the Fisher information that finite differences give; limits of one price, and its search."""

import math
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node

from picompile.errors import UnsupportedModelError, UsageError
from picompile.progress import NoProgress
from picompile.skipping import sensitivities
from picompile.skipping.limits import limits_at, no_limits, saved_weights, skipping_sites
from picompile.skipping.search import Rise, SkippingSearch
from picompile.skipping.sensitivities import measure_sensitivities
from picompile.streaming import new_states, run_segment, split_layers, streamed_perplexity
from picompile.testing import RandomWeights, random_weights
from picompile_passes.dialect.neurons import neuron_outputs
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import SPARSE_FFN

_WINDOWS = [torch.randint(0, 97, (24,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(6)]


def test_a_limit_is_where_a_byte_costs_its_price() -> None:
    sensitivities = {"predictors.layers.0.gate_limits": torch.tensor([0.5, 2.0, 1.0, 0.0])}
    limits = limits_at(sensitivities, {"predictors.layers.0.gate_limits": 64}, 0.25).tensors
    # A neuron that the text did not show to matter counts as a hundredth of the median.
    expected = torch.tensor([4.0, 1.0, 2.0, 2.0 / (0.01 * 0.5)])
    torch.testing.assert_close(limits["predictors.layers.0.gate_limits"], expected)


def _search(graph, weights, bound: float, **more) -> SkippingSearch:
    sensitivities = measure_sensitivities(graph, weights, _WINDOWS[:2], 0, NoProgress())
    return SkippingSearch(graph, weights, sensitivities, _WINDOWS[2:], bound, NoProgress(), **more)


def test_the_largest_limits_within_the_bound(limited: Callable[[str], GraphModule]) -> None:
    graph = limited("qwen2")
    weights = random_weights(graph, seed=2)
    found = {bound: _search(graph, weights, bound).run() for bound in (0.001, 0.05)}
    assert found[0.001].price < found[0.05].price
    assert all(found[0.001].left_out[name] <= share for name, share in found[0.05].left_out.items())
    assert sum(found[0.05].left_out.values()) > 0
    whole = streamed_perplexity(graph, no_limits(graph).weights(weights), _WINDOWS[2:])
    for bound, each in found.items():
        perplexity = streamed_perplexity(graph, each.limits.weights(weights), _WINDOWS[2:])
        assert perplexity == pytest.approx(each.perplexity)
        assert math.log(perplexity / whole) == pytest.approx(each.rise.nats, abs=1e-6)
        assert each.rise.within(bound)


def test_what_was_tried_is_not_tried_again(limited: Callable[[str], GraphModule]) -> None:
    graph = limited("qwen2")
    weights = random_weights(graph, seed=2)
    kept: list[dict[int, Rise]] = []
    first = _search(graph, weights, 0.05, save=lambda tried: kept.append(dict(tried)))
    found = first.run()
    assert [len(each) for each in kept] == list(range(1, len(kept) + 1))
    again: list[dict[int, Rise]] = []
    second = _search(graph, weights, 0.05, tried=kept[-1], save=lambda tried: again.append(dict(tried)))
    assert second.run().price == found.price
    assert not again
    # The neighbour of the step that was found is too far.
    assert not min(rise.within(0.05) for rise in kept[-1].values())


def test_damaged_weights(limited: Callable[[str], GraphModule]) -> None:
    graph = limited("qwen2")
    weights = random_weights(graph, seed=2)
    search = _search(graph, weights, 0.05)
    tensors = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    next(tensor for name, tensor in tensors.items() if "down_proj" in name).fill_(math.nan)
    search.weights = RandomWeights(tensors)
    with pytest.raises(UnsupportedModelError, match="not finite"):
        search.run()


def test_places_that_a_model_has(
    canonical: Callable[[str], GraphModule], limited: Callable[[str], GraphModule]
) -> None:
    for name, is_gated in (("qwen2", True), ("opt-pre-norm", False)):
        saved = saved_weights(limited(name))
        for node in calls(limited(name).graph, SPARSE_FFN):
            limits, hidden = arguments(node), arguments(node)["down"].meta["val"].shape[1]
            assert saved[str(limits["output_limits"].target)] == hidden
            assert (limits["gate_limits"] is not None) == is_gated
            assert not is_gated or saved[str(limits["gate_limits"].target)] == 2 * hidden
    with pytest.raises(UsageError, match="nothing of this model can be skipped at gate"):
        skipping_sites(canonical("opt-pre-norm"), ("gate",))


_TOKEN, _DRAWS = 7, 400


def _logits(graph: GraphModule, weights, shifts: dict[Node, tuple[int, float]], seen: dict[Node, list[torch.Tensor]]):
    """Return the logits of one token, with a neuron's output shifted; keep gates and other factors in `seen`."""

    def shifted(node: Node):
        def block(x, mask, neurons, gate, up, down, gate_bias, up_bias, down_bias, activation, up_activation, *_):
            hidden = neuron_outputs(x, gate, up, gate_bias, up_bias, activation, up_activation)
            if gate is not None:
                seen[node] = [torch.nn.functional.linear(x, up, up_bias)]
            if node in shifts:
                neuron, change = shifts[node]
                hidden[:, neuron] += change
            return torch.nn.functional.linear(hidden, down.T, down_bias)

        return block

    states, found = new_states(graph, [[_TOKEN]]), []
    replace = {node: shifted(node) for node in calls(graph.graph, SPARSE_FFN)}
    for segment in split_layers(graph):
        nodes = graph.graph.output_node().all_input_nodes
        run_segment(segment, weights, states, lambda _, value: found.append(value.double()), nodes, replace=replace)
    return found[0][0]


@pytest.mark.slow("takes a difference per weight; one family is fast", but=("qwen2",))
@pytest.mark.parametrize("name", ["llama-relu", "qwen2", "opt-pre-norm"])
def test_the_diagonal_of_the_fisher_information(name: str, limited: Callable[[str], GraphModule]) -> None:
    graph = limited(name)
    weights = no_limits(graph).weights(random_weights(graph, seed=3))
    found = measure_sensitivities(graph, weights, [[_TOKEN]] * _DRAWS, 0, NoProgress())
    seen: dict[Node, list[torch.Tensor]] = {}
    p = _logits(graph, weights, {}, seen).softmax(-1)
    for node in calls(graph.graph, SPARSE_FFN):
        values, fisher = arguments(node), []
        neurons = range(0, values["up"].meta["val"].shape[0], 5)
        for neuron in neurons:
            step = 1e-2
            up, low = (_logits(graph, weights, {node: (neuron, sign * step)}, {}) for sign in (1, -1))
            slope = (up - low) / (2 * step)
            fisher.append(float((p * (slope - (p * slope).sum()) ** 2).sum()))
        exact = torch.tensor(fisher)
        own = found[str(values["output_limits"].target)][::5].square()
        assert float(own.sum() / exact.sum()) == pytest.approx(1.0, abs=0.2)
        assert float(torch.corrcoef(torch.stack([own.sqrt(), exact.sqrt()]))[0, 1]) > 0.9
        if values["gate"] is None:
            assert values["gate_limits"] is None
            continue
        # A gate is multiplied with the other factor: so is what its neuron's sensitivity is to it.
        factor = seen[node][0][0, ::5].abs()
        gates = found[str(values["gate_limits"].target)][::5]
        torch.testing.assert_close(gates, own.sqrt() * factor, rtol=1e-4, atol=1e-7)


@pytest.mark.slow("measures sensitivities twice")
def test_windows_that_memory_holds_one_at_a_time(
    limited: Callable[[str], GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = limited("qwen2")
    weights = random_weights(graph, seed=3)
    windows = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8]]
    together = measure_sensitivities(graph, weights, windows, 0, NoProgress())
    monkeypatch.setattr(sensitivities, "_MOST_BYTES", 1)
    alone = measure_sensitivities(graph, weights, windows, 0, NoProgress())
    assert together.keys() == alone.keys()
    for name, values in together.items():
        # Tokens are drawn in another order for neither: the head reads one window after another in both.
        torch.testing.assert_close(alone[name], values, rtol=1e-4, atol=1e-8)


@pytest.mark.slow("captures three models")
def test_every_value_with_a_limit_has_a_sensitivity(limited: Callable[[str], GraphModule]) -> None:
    for name in ("llama-relu", "opt-pre-norm", "falcon-7b"):
        graph = limited(name)
        found = measure_sensitivities(graph, random_weights(graph, seed=3), [[3, 1, 4]], 0, NoProgress())
        wanted = {
            str(node.target): node.meta["val"].shape for node in graph.graph.nodes if "_limits" in str(node.target)
        }
        assert {key: value.shape for key, value in found.items()} == wanted
        assert all(bool((value >= 0).all()) and bool(value.isfinite().all()) for value in found.values())
