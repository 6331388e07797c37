"""Sensitivities against the Fisher information that finite differences give."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node

from picompile.progress import NoProgress
from picompile.skipping import sensitivities
from picompile.skipping.limits import no_limits
from picompile.skipping.sensitivities import measure_sensitivities
from picompile.streaming import new_states, run_segment, split_layers
from picompile.testing import random_weights
from picompile_passes.dialect.ops import neuron_outputs
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import SPARSE_FFN

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


def test_every_value_with_a_limit_has_a_sensitivity(limited: Callable[[str], GraphModule]) -> None:
    for name in ("llama-relu", "opt-pre-norm", "falcon-7b"):
        graph = limited(name)
        found = measure_sensitivities(graph, random_weights(graph, seed=3), [[3, 1, 4]], 0, NoProgress())
        wanted = {
            str(node.target): node.meta["val"].shape for node in graph.graph.nodes if "_limits" in str(node.target)
        }
        assert {key: value.shape for key, value in found.items()} == wanted
        assert all(bool((value >= 0).all()) and bool(value.isfinite().all()) for value in found.values())
