"""Layer by layer gives what the whole graph gives."""

import functools
import gc
import itertools
import math
import weakref
from collections.abc import Callable

import pytest
import torch
import transformers
from hypothesis import given, settings
from torch import Tensor
from torch.fx import GraphModule, Node

from helpers.families import VARIANTS, VOCABULARY
from picompile.errors import UsageError
from picompile.frontend.hf import capture_config
from picompile.progress import NoProgress
from picompile.streaming import new_states, run_segment, split_layers, stream_windows, streamed_perplexity
from picompile.testing import RandomWeights, graphs, random_weights
from picompile.testing.weights import LOW_RANK_KIND, vocabulary, with_predictors
from picompile_passes.graph.materialize import WeightSource, materialize
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import FFN, PREDICT, RMS_NORM, SPARSE_FFN
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.passes.canonicalize import canonicalize
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize

Canonical = Callable[[str], GraphModule]

# What differs in the order of operators; capture takes a second for each.
NAMES = ["llama-relu", "llama3-silu-tied", "opt-post-norm", "falcon-7b", "falcon-40b"]

# Of float32, after two layers; the matrices are multiplied in another memory order.
_TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def canonical() -> Canonical:
    """The canonical graph of a variant of tests/helpers/families.py."""

    @functools.cache
    def make(name: str) -> GraphModule:
        variant = VARIANTS[name]
        config = getattr(transformers, variant.model_class).config_class(**variant.config).to_dict()
        return canonicalize(capture_config(config | {"architectures": [variant.model_class]} | dict(variant.rename)))

    return make


def draw_windows(lengths: tuple[int, ...], ids: int = VOCABULARY) -> list[list[int]]:
    return [torch.randint(ids, (length,)).tolist() for length in lengths]


def whole(graph_module: GraphModule, weights: WeightSource, windows: list[list[int]]) -> list[Tensor]:
    eager = materialize(graph_module, weights)
    with torch.no_grad():
        return [eager(torch.tensor(ids), torch.arange(len(ids))) for ids in windows]


def layerwise(graph_module: GraphModule, weights: WeightSource, windows: list[list[int]]) -> list[Tensor]:
    logits: list[Tensor] = []
    stream_windows(graph_module, weights, windows, lambda _, value: logits.append(value))
    return logits


def assert_same(graph_module: GraphModule, weights: WeightSource, windows: list[list[int]]) -> None:
    expected, found = (run(graph_module, weights, windows) for run in (whole, layerwise))
    assert len(found) == len(windows)
    for left, right in zip(expected, found, strict=True):
        assert left.shape == right.shape and left.abs().max() > 0
        assert (left - right).abs().max() <= _TOLERANCE * left.abs().max()


@pytest.mark.slow("exports a model per family; one family is fast", but=("llama-relu",))
@pytest.mark.parametrize("name", NAMES)
def test_every_family_gives_the_whole_graphs_logits(name: str, canonical: Canonical) -> None:
    graph = canonical(name)
    assert_same(graph, random_weights(graph, seed=4, dtype=torch.float16), draw_windows((1, 17, 2)))
    # A segment a layer, and one vector a token between.
    segments = split_layers(graph)
    assert [len(segment.blocks) for segment in segments] == [0, 1, 1, 0]
    assert [segment.title for segment in segments] == ["embedding", "layer 0", "layer 1", "head"]
    for before, after in itertools.pairwise(segments):
        assert before.outputs == after.inputs
        assert len(before.outputs) == 1
    assert segments[-1].outputs == tuple(graph.graph.output_node().all_input_nodes)


@given(graphs())
@settings(max_examples=6)
def test_random_graphs(graph: GraphModule) -> None:
    assert_same(graph, random_weights(graph, seed=2), draw_windows((5, 3), vocabulary(graph)))


def test_predicted_partitioned_and_quantized_graphs(canonical: Canonical) -> None:
    graph = InsertPredictors()(canonical("llama-relu")).graph_module
    weights = random_weights(graph, seed=6)
    assert_same(graph, weights, draw_windows((9,)))
    graph = Partition({0: (3, 1, 77), 1: tuple(range(150))})(graph).graph_module
    assert [len(segment.blocks) for segment in split_layers(graph)] == [0, 2, 2, 0]
    assert_same(graph, weights, draw_windows((9,)))
    assert_same(Quantize("q8")(graph).graph_module, weights, draw_windows((9,)))


def test_a_predictor_that_reads_the_layer_before(canonical: Canonical) -> None:
    graph = with_predictors(InsertPredictors()(canonical("llama-relu")).graph_module, LOW_RANK_KIND.name, 0.0, rank=5)
    first, second = calls(graph.graph, PREDICT)
    Rewriter(graph, "testing").set_argument(second, "x", arguments(first)["x"])
    segments = split_layers(graph)
    assert len(segments[1].outputs) == 2
    assert arguments(first)["x"] in segments[1].outputs
    weights = random_weights(graph, seed=8)
    assert_same(graph, weights, draw_windows((4, 31)))
    # It would not do to recompute the mask of the second layer from another x.
    Rewriter(graph, "testing").set_argument(second, "x", arguments(list(calls(graph.graph, SPARSE_FFN))[1])["x"])
    own = whole(graph, weights, [[3, 5, 9]])[0]
    Rewriter(graph, "testing").set_argument(second, "x", arguments(first)["x"])
    assert not torch.allclose(own, layerwise(graph, weights, [[3, 5, 9]])[0])


@pytest.mark.slow("runs a model layer by layer")
def test_one_segments_weights_are_held_at_a_time(canonical: Canonical) -> None:
    graph = canonical("llama3-silu-tied")
    random = random_weights(graph, dtype=torch.float16)
    held: list[weakref.ref[Tensor]] = []

    class Counting(RandomWeights):
        def load(self, name: str) -> Tensor:
            tensor = super().load(name).clone()
            held.append(weakref.ref(tensor))
            return tensor

    weights = Counting(random.tensors)
    states = new_states(graph, draw_windows((6, 6)))
    segments = split_layers(graph)
    for number, segment in enumerate(segments):
        before = len(weights.loaded)
        run_segment(segment, weights, states)
        own = [f".{number - 1}." in name for name in weights.loaded[before:]]
        assert all(own) if segment.blocks else not any(own)
        gc.collect()
        assert not any(ref() is not None for ref in held)
    # The embedding is the head too, and is read for each.
    assert weights.loaded.count("model.embed_tokens.weight") == 2


def test_observed_nodes_come_in_order_and_what_is_behind_them_is_not_run(canonical: Canonical) -> None:
    graph = canonical("llama-relu")
    weights = random_weights(graph)
    block = next(iter(calls(graph.graph, FFN)))
    norm = next(iter(calls(graph.graph, RMS_NORM)))
    windows = draw_windows((3, 8))
    seen: list[tuple[Node, int]] = []
    stream_windows(graph, weights, windows, lambda node, value: seen.append((node, len(value))), nodes=[block, norm])
    assert seen == [(norm, 3), (block, 3), (norm, 8), (block, 8)]
    assert not any(".1." in name for name in weights.loaded)


def test_perplexity(canonical: Canonical) -> None:
    graph = canonical("llama-relu")
    weights, windows = random_weights(graph, seed=3), draw_windows((70, 1, 2, 9))
    losses = []
    for ids, logits in zip(windows, whole(graph, weights, windows), strict=True):
        rows = logits.double().log_softmax(-1)
        losses += [-float(rows[t, ids[t + 1]]) for t in range(len(ids) - 1)]
    assert len(losses) == 69 + 0 + 1 + 8
    expected = math.exp(sum(losses) / len(losses))
    assert streamed_perplexity(graph, weights, windows, NoProgress()) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(UsageError, match="at least 2 tokens"):
        streamed_perplexity(graph, weights, [[3], []])


def test_a_window_may_have_one_token_more_than_the_model_has_positions(canonical: Canonical) -> None:
    graph, positions = canonical("opt-post-norm"), VARIANTS["opt-post-norm"].config["max_position_embeddings"]
    weights, windows = random_weights(graph, seed=4), draw_windows((positions + 1,))
    assert math.isfinite(streamed_perplexity(graph, weights, windows))
