"""The step graph of a decoded token: which part of a layer waits for which, where it runs, and when.

It is one networkx graph. The length of its longest path is the token's time (`token_s`). The earliest start of
each step gives the timeline that reports draw (`schedule`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx

from picompile.placement.plan import PlanLayer

# A step as (layer, part); the layer is None for the output head and the transfers around it.
StepName = tuple[int | None, str]

DEVICES = ("gpu", "host", "link")


@dataclass(frozen=True)
class Step:
    """One step of a token. `layer` is None for the output head and the transfers around it; times in seconds."""

    layer: int | None
    part: str
    device: str
    start_s: float
    end_s: float


def plan_graph(layers: Sequence[PlanLayer], head: tuple[str, float], switch_s: float) -> nx.DiGraph:
    """Return the steps of a token: nodes `StepName` with `device` and `seconds`, edges to the steps that wait for them.

    An edge has the `seconds` of the step that it leads to, so that the longest path takes the token's time.

    Hot and cold neurons of a layer run side by side; the layer's transfers follow both, and the next layer's prediction
    too if some of it is hidden: then it is made behind the hot neurons, while the host computes. A transfer of
    `switch_s` is made where the stream changes sides, and from the host at the beginning and back to it at the end.

    Args:
        layers: the layers as planned.
        head: where the output head runs, gpu or host, and its seconds.
        switch_s: seconds of a transfer of the stream.
    """
    # Imported where it is used: reading a plan needs no graph.

    graph: nx.DiGraph = nx.DiGraph()
    last, side = _add(graph, [], None, "begin", "host", 0.0), "host"
    for number, layer in enumerate(layers):
        if layer.attention != side:
            last, side = _add(graph, [last], number, "switch", "link", switch_s), layer.attention
        parts = [("attention", layer.attention), ("kv_cache", layer.kv_cache)]
        if not layer.predict_hidden_s:
            parts.append(("predict", layer.predictor))
        for part, device in parts:
            last = _add(graph, [last], number, part, device, getattr(layer, f"{part}_s"))
        hot = _add(graph, [last], number, "hot", "gpu", layer.hot_s)
        cold = _add(graph, [last], number, "cold", "host", layer.cold_s)
        after = layers[number + 1] if number + 1 < len(layers) else None
        if after is not None and after.predict_hidden_s:
            hot = _add(graph, [hot], number + 1, "predict", "gpu", after.predict_s)
        last = _add(graph, [hot, cold], number, "exchange", "link", layer.exchange_s)
    device, seconds = head
    if device != side:
        last = _add(graph, [last], None, "switch", "link", switch_s)
    last = _add(graph, [last], None, "head", device, seconds)
    if device != "host":
        _add(graph, [last], None, "end", "link", switch_s)
    return graph


def schedule(graph: nx.DiGraph) -> list[Step]:
    """Return when each step runs at the earliest, in order of the starts; steps that take no time are left out."""
    ends: dict[StepName, float] = {}
    steps = []
    for node in nx.topological_sort(graph):
        start = max((ends[before] for before in graph.predecessors(node)), default=0.0)
        ends[node] = start + graph.nodes[node]["seconds"]
        if ends[node] > start:
            steps.append(Step(node[0], node[1], graph.nodes[node]["device"], start, ends[node]))
    return sorted(steps, key=lambda step: step.start_s)


def token_s(graph: nx.DiGraph) -> float:
    """Return the length of the longest path in seconds."""
    # A token begins with a step of no time, so that every other has an edge that leads to it.
    return float(nx.dag_longest_path_length(graph, weight="seconds"))


def _add(
    graph: nx.DiGraph,
    after: Sequence[StepName],
    layer: int | None,
    part: str,
    device: str,
    seconds: float,
) -> StepName:
    node = (layer, part)
    graph.add_node(node, device=device, seconds=seconds)
    graph.add_edges_from(((before, node) for before in after), seconds=seconds)
    return node
