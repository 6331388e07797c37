"""Which node runs on which device, for models of each kind whose layers are split in every way."""

from collections import Counter
from dataclasses import replace

import pytest
from torch.fx import Node

from picompile.testing import LLAMA, OPT, GraphShape, build
from picompile_codegen.lowering.placement import ON_HOST, Placement, place
from picompile_passes.graph.nodes import arguments, constant_nodes, is_call
from picompile_passes.graph.operands import (
    ADD,
    ATTENTION,
    EMBEDDING,
    LAYER_NORM,
    LINEAR,
    PREDICT,
    RMS_NORM,
    ROTARY,
    SPARSE_FFN,
)
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.pipeline import Pipeline

LAYERS = 4
EVERY = frozenset(range(LAYERS))
# Split, cold, hot, and in one piece that nobody placed.
HOT = {0: (1, 2, 3), 1: (), 2: range(40)}
SHAPES = {
    "llama": replace(LLAMA, layers=LAYERS),
    "opt": replace(OPT, layers=LAYERS),
    "parallel": replace(LLAMA, layers=LAYERS, parallel=True),
}


def nodes_of(shape: GraphShape, kind: str = "learned") -> list[Node]:
    ranks = dict.fromkeys(range(LAYERS), 4) if kind == "learned" else {}
    graph_module = Pipeline((InsertPredictors(kind, ranks=ranks), Partition(HOT)))(build(shape)).graph_module
    constant = constant_nodes(graph_module.graph)
    return [node for node in graph_module.graph.nodes if node.op == "call_function" and node not in constant]


def on_device(nodes: list[Node], placement: Placement) -> list[Node]:
    devices = place(nodes, placement)
    return [node for node in nodes if devices[node] == "accelerator"]


def moved(nodes: list[Node], placement: Placement) -> list[Node]:
    """Nodes that are on the device for this placement, not only for their neurons."""
    hot = set(on_device(nodes, ON_HOST))
    return [node for node in on_device(nodes, placement) if node not in hot]


def counts(nodes: list[Node]) -> Counter[str]:
    """How many there are of each operator."""
    return Counter(str(node.target).split(".")[1] for node in nodes)


def parts(nodes: list[Node]) -> list[tuple[int, str]]:
    return [(node.meta["layer"], node.meta.get("neurons", "all")) for node in nodes if is_call(node, SPARSE_FFN)]


@pytest.mark.parametrize("name", list(SHAPES))
def test_nothing_but_hot_neurons_and_everything(name: str) -> None:
    """Hot parts are on the device whatever the placement, embeddings and cold neurons on the host."""
    nodes = nodes_of(SHAPES[name])
    device = on_device(nodes, ON_HOST)
    assert parts(device) == [(0, "hot"), (2, "hot")]
    assert len(device) == 2
    devices = place(nodes, Placement.all_of(LAYERS))
    host = [node for node in devices if devices[node] == "host"]
    assert parts(host) == [(0, "cold"), (1, "cold"), (3, "all")]
    others = [node for node in host if not is_call(node, SPARSE_FFN, EMBEDDING)]
    # OPT adds the embeddings of tokens and positions, of which there are two.
    added = SHAPES[name].gated is False
    assert [is_call(node, ADD) and is_call(node.all_input_nodes[0], EMBEDDING) for node in others] == [True] * added


@pytest.mark.parametrize("name", list(SHAPES))
def test_attention_of_one_layer(name: str) -> None:
    """Its four projections, its norms and its additions, and nothing of another layer."""
    nodes = nodes_of(SHAPES[name])
    for layer in range(LAYERS):
        mine = moved(nodes, Placement(frozenset({layer})))
        found = counts(mine)
        # The sum of the parts of a split block is an addition, too.
        expected = {"linear": 4, "norm": 1 if SHAPES[name].parallel else 2, "add": 3 if layer == 0 else 2}
        norms = found["rms_norm"] + found["layer_norm"]
        assert {"linear": found["linear"], "norm": norms, "add": found["add"]} == expected
        assert sum(found.values()) == sum(expected.values())
        (attention,) = (node for node in nodes if is_call(node, ATTENTION) and arguments(node)["layer"] == layer)
        sources = [arguments(attention)[each] for each in ("q", "k", "v")]
        sources = [arguments(node)["x"] if is_call(node, ROTARY) else node for node in sources]
        assert set(sources) | set(attention.users) <= set(mine)


@pytest.mark.parametrize("name", list(SHAPES))
def test_cache_of_one_layer(name: str) -> None:
    """The nodes that read and write the cache move, and the rotations before them."""
    nodes = nodes_of(SHAPES[name])
    for layer in range(LAYERS):
        mine = moved(nodes, Placement(caches=frozenset({layer})))
        assert counts(mine) == ({"rotary": 2, "attention": 1} if SHAPES[name].gated else {"attention": 1})
        assert all(arguments(node)["layer"] == layer for node in mine if is_call(node, ATTENTION))
        assert all(user in mine for node in mine if is_call(node, ROTARY) for user in node.users)


def test_predictors() -> None:
    """One of its own weights is where it is placed, whatever its block is; one that is split is where its part is."""
    nodes = nodes_of(SHAPES["llama"])
    for layer in range(LAYERS):
        mine = moved(nodes, Placement(predictors=frozenset({layer})))
        assert [(node.target, node.meta["layer"]) for node in mine] == [(PREDICT, layer)]
    for placement in (ON_HOST, Placement.all_of(LAYERS)):
        devices = place(nodes_of(SHAPES["llama"], "exact"), placement)
        blocks = [node for node in devices if is_call(node, SPARSE_FFN)]
        assert all(devices[arguments(block)["mask"]] == devices[block] for block in blocks)


@pytest.mark.parametrize("last", ["a block", "attention"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_head_alone(name: str, last: str) -> None:
    """The last norm and the projection to the vocabulary, whatever the last layer has."""
    nodes = nodes_of(SHAPES[name])
    if last == "attention":
        block = next(node for node in reversed(nodes) if is_call(node, SPARSE_FFN))
        (total,) = block.users
        total.replace_all_uses_with(next(node for node in total.all_input_nodes if node is not block))
        nodes = [node for node in nodes if node not in (total, block)]
    norm, head = moved(nodes, Placement(head=True))
    assert is_call(norm, RMS_NORM, LAYER_NORM)
    assert is_call(head, LINEAR)
    assert [user.op for user in head.users] == ["output"]
    assert list(norm.users) == [head]


@pytest.mark.parametrize("placement", [ON_HOST, Placement(frozenset({0, 1}), EVERY), Placement(head=True)], ids=str)
@pytest.mark.parametrize("name", list(SHAPES))
def test_with_streams_the_device_has_all_layers(name: str, placement: Placement) -> None:
    """The host keeps the embeddings, and the head unless the device has it anyway."""
    nodes = nodes_of(SHAPES[name])
    without, streams = place(nodes, placement), place(nodes, placement, streams=True)
    everything = place(nodes, replace(Placement.all_of(LAYERS), head=placement.head))
    kept = {node for node in nodes if everything[node] == "host" and not is_call(node, SPARSE_FFN)}
    assert {node for node in nodes if streams[node] == "host"} == kept
    assert all(without[node] == "host" for node in kept)
    # A plan may leave everything to the host: nothing comes to a device that has nothing.
    cold = [node for node in nodes if node.meta.get("neurons") != "hot"]
    assert set(place(cold, ON_HOST, streams=True).values()) == {"host"}
