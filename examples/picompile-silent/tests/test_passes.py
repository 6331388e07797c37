"""Each pass under picompile's property suite in one line, and what that cannot know of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from picompile_silent import CountWeightBytes, DropSilentNeurons
from picompile_silent.firing import FiringCounter
from torch import Tensor
from torch.fx import GraphModule

from picompile.testing import TOLERANCES, GraphShape, build, check_pass, graphs, random_weights, run, shapes
from picompile_passes.base import Stage
from picompile_passes.errors import PassOptionError
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.materialize import materialize
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ATTENTION, EMBEDDING, FFN, LINEAR, PREDICT, RMS_NORM, SPARSE_FFN
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline

SHAPE = GraphShape(hidden=24, heads=3, kv_heads=1, ffn=40, vocab=50, layers=2)
WriteCounts = Callable[[Mapping[int, Sequence[int]]], str]


@pytest.fixture(scope="session")
def write(tmp_path_factory: pytest.TempPathFactory) -> WriteCounts:
    """`write(counts)`: the path of a file of these counts."""
    folder = tmp_path_factory.mktemp("counts")

    def write_counts(counts: Mapping[int, Sequence[int]]) -> str:
        path = folder / "counts.json"
        path.write_text(json.dumps({str(layer): list(numbers) for layer, numbers in counts.items()}))
        return str(path)

    return write_counts


def neurons(graph_module: GraphModule) -> dict[int, int]:
    """Layer → how many neurons its block has."""
    blocks = calls(graph_module.graph, FFN, SPARSE_FFN)
    return {block.meta["layer"]: int(arguments(block)["up"].meta["val"].shape[0]) for block in blocks}


def notes(graph_module: GraphModule, op: torch._ops.OpOverload) -> list[dict[str, int]]:
    return [node.meta["notes"] for node in calls(graph_module.graph, op)]


# The property suite.


def test_count_weight_bytes() -> None:
    check_pass(CountWeightBytes(), may_refuse=False)


def test_drop_silent_neurons(write: WriteCounts) -> None:
    def passes(graph_module: GraphModule) -> st.SearchStrategy[DropSilentNeurons]:
        lists = {
            layer: st.lists(st.integers(0, 3), min_size=n, max_size=n) for layer, n in neurons(graph_module).items()
        }
        return st.builds(DropSilentNeurons, st.fixed_dictionaries({}, optional=lists).map(write), st.integers(1, 4))

    check_pass(passes, graphs=graphs(Stage.CANONICAL), may_refuse=False)


# count-weight-bytes


def test_bytes_and_flops_are_those_of_the_shapes() -> None:
    noted = CountWeightBytes()(build(SHAPE)).graph_module
    assert notes(noted, EMBEDDING) == [{"weight_bytes": 24 * 4, "flops": 0}]
    assert notes(noted, RMS_NORM)[0] == {"weight_bytes": 24 * 4, "flops": 0}
    # Query, key and value; then the head.
    assert notes(noted, LINEAR)[0] == {"weight_bytes": 24 * 24 * 4, "flops": 2 * 24 * 24}
    assert notes(noted, LINEAR)[1] == {"weight_bytes": 8 * 24 * 4, "flops": 2 * 8 * 24}
    assert notes(noted, LINEAR)[-1] == {"weight_bytes": 50 * 24 * 4, "flops": 2 * 50 * 24}
    # Each of 3 heads multiplies 8 numbers twice, though there is one key head.
    assert notes(noted, ATTENTION)[0] == {"weight_bytes": 0, "flops_per_visible_token": 2 * 3 * (8 + 8)}
    assert notes(noted, FFN)[0] == {"weight_bytes": 3 * 40 * 24 * 4, "flops": 2 * 3 * 40 * 24}


def test_biases_are_read_and_not_multiplied() -> None:
    noted = CountWeightBytes()(build(GraphShape(hidden=24, heads=3, ffn=40, gated=False))).graph_module
    assert notes(noted, LINEAR)[0] == {"weight_bytes": (24 * 24 + 24) * 4, "flops": 2 * 24 * 24}
    assert notes(noted, FFN)[0] == {"weight_bytes": (2 * 40 * 24 + 40 + 24) * 4, "flops": 2 * 2 * 40 * 24}


def test_packed_rows_are_counted_with_their_padding() -> None:
    pipeline = Pipeline((InsertPredictors("exact"), Partition({0: range(10)}), Quantize("q8"), CountWeightBytes()))
    noted = pipeline(build(SHAPE)).graph_module
    # 24 columns are padded to 32 and have one scale: 34 bytes, and 64 by the alignment of rows.
    assert notes(noted, EMBEDDING) == [{"weight_bytes": 64, "flops": 0}]
    assert notes(noted, LINEAR)[0]["weight_bytes"] == 24 * 64
    # The gate is the predictor's.
    assert [note["weight_bytes"] for note in notes(noted, PREDICT)] == [n * 64 for n in (10, 30, 40)]
    assert [note["weight_bytes"] for note in notes(noted, SPARSE_FFN)] == [2 * n * 64 for n in (10, 30, 40)]
    assert [note["flops"] for note in notes(noted, SPARSE_FFN)] == [2 * 2 * n * 24 for n in (10, 30, 40)]


def test_notes_show_in_dumps() -> None:
    from picompile_passes.graph.dump import graph_text

    text = graph_text(CountWeightBytes()(build(SHAPE)).graph_module)
    assert "layer 0, part block, weight_bytes 11520, flops 5760" in text


# drop-silent-neurons


def fired(graph_module: GraphModule, weights: object, tokens: Tensor) -> dict[int, list[int]]:
    """Layer → how often each of its neurons fires."""
    predicted = InsertPredictors("exact")(graph_module).graph_module
    counter = FiringCounter(materialize(predicted, weights))
    with torch.no_grad():
        counter.run(tokens, torch.arange(len(tokens)))
    return {layer: counts.tolist() for layer, counts in counter.counts.items()}


# Not fatrelu, which jumps: a product of fewer rows is rounded differently, and a neuron may then fire or not.
sparse_shapes = st.sampled_from(["relu", "relu2", "relu6"]).flatmap(lambda name: shapes(activation=name))


@given(sparse_shapes, st.integers(0, 2**16), st.integers(1, 6))
def test_nothing_is_lost_on_the_text_that_was_counted(
    write: WriteCounts, shape: GraphShape, seed: int, count: int
) -> None:
    """With biases and without, with a gate and without, with fused matrices too: the right rows stay.

    A block with a norm across its neurons keeps them all, and so does a block of experts.
    """
    graph_module = build(shape)
    weights = random_weights(graph_module, seed)
    tokens = torch.randint(shape.vocab, (count,), generator=torch.Generator().manual_seed(seed))
    counts = fired(graph_module, weights, tokens)
    smaller = DropSilentNeurons(write(counts))(graph_module).graph_module
    whole = shape.ffn_norm or shape.experts > 0
    assert neurons(smaller) == {
        layer: len(numbers) if whole else max(1, sum(map(bool, numbers))) for layer, numbers in counts.items()
    }
    before, after = run(graph_module, weights, tokens), run(smaller, weights, tokens)
    assert float((after - before).abs().max()) <= TOLERANCES[torch.float32] * float(before.abs().max())


def test_what_fires_at_least_so_often_stays(write: WriteCounts) -> None:
    graph_module = build(GraphShape(ffn=4, layers=2))
    counts = {0: [2, 0, 1, 5], 1: [9, 9, 9, 9]}
    smaller = DropSilentNeurons(write(counts), at_least=2)(graph_module).graph_module
    assert tables(smaller) == {"layer_0_firing_neurons": [0, 3]}
    first, second = calls(smaller.graph, FFN)
    assert first.meta["notes"] == {"silent_dropped": 2}
    assert second.name in {node.name for node in calls(graph_module.graph, FFN)}


def test_the_neuron_that_fires_most_stays(write: WriteCounts) -> None:
    graph_module = build(GraphShape(ffn=3, layers=2))
    smaller = DropSilentNeurons(write({0: [0, 2, 1], 1: [0, 0, 0]}), at_least=10)(graph_module).graph_module
    assert tables(smaller) == {"layer_0_firing_neurons": [1], "layer_1_firing_neurons": [0]}


def test_a_second_run_takes_its_rows_from_the_whole_block(write: WriteCounts) -> None:
    path = write({0: [0, 1, 2, 3], 1: [0, 1, 2, 3]})
    weights = random_weights(graph_module := build(GraphShape(ffn=4)))
    once, more = DropSilentNeurons(path), DropSilentNeurons(path, at_least=3)
    at_once = more(graph_module).graph_module
    in_two_steps = more(once(graph_module).graph_module).graph_module
    assert list(tables(in_two_steps).values()) == [[3], [3]]
    assert torch.equal(run(in_two_steps, weights), run(at_once, weights))
    assert not once(at_once).modified


def tables(graph_module: GraphModule) -> dict[str, list[int]]:
    return {name: buffer.tolist() for name, buffer in graph_module.named_buffers() if "firing" in name}


WRONG = {
    "firing counts {path}: not JSON": "{",
    "firing counts {path}: must be a JSON object": "[1]",
    "firing counts {path}: 'first' is not a layer number": '{"first": [1]}',
    "firing counts {path}: layer 0 must be a list": '{"0": [1, -1]}',
    "firing counts {path}: layer 1 must be a list": '{"0": [1], "1": []}',
}


@pytest.mark.parametrize(("message", "text"), WRONG.items())
def test_a_wrong_file_is_told_when_the_pass_is_made(tmp_path: Path, message: str, text: str) -> None:
    path = tmp_path / "counts.json"
    path.write_text(text)
    with pytest.raises(PassOptionError) as error:
        DropSilentNeurons(str(path))
    assert str(error.value).startswith(message.format(path=path))
    assert len(str(error.value).splitlines()) == 1


def test_other_options_are_checked_when_the_pass_is_made(tmp_path: Path, write: WriteCounts) -> None:
    with pytest.raises(PassOptionError, match="no-such-file: No such file or directory"):
        DropSilentNeurons(str(tmp_path / "no-such-file"))
    with pytest.raises(PassOptionError, match="option at_least of pass drop-silent-neurons: 0 is not 1 or more"):
        DropSilentNeurons(write({}), at_least=0)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({2: [1]}, "no layer 2 of the model has neurons"),
        ({0: [1] * 40, 1: [1] * 39}, "layer 1 has 40 neurons, not 39"),
    ],
)
def test_counts_of_another_model_are_refused(
    write: WriteCounts, counts: Mapping[int, Sequence[int]], message: str
) -> None:
    with pytest.raises(PassOptionError, match=message):
        DropSilentNeurons(write(counts))(build(SHAPE))


# Counting


def test_firings_are_counted_by_hand() -> None:
    """Two neurons, of which the first fires for tokens 1 and 2, and the second for token 2."""
    b = GraphBuilder()
    embedded = b.call(EMBEDDING, b.tokens, b.parameter("embed", 3, 2), 0)
    attended = b.call(ATTENTION, embedded, embedded, embedded, 1, 1, 1.0, 0, 1, layer=0)
    up, down = b.parameter("up", 2, 2), b.parameter("down", 2, 2)
    block = b.call(FFN, attended, None, up, down, None, None, None, "relu", "identity", layer=0)
    graph_module = b.finish(b.call(LINEAR, block, b.parameter("head", 3, 2), None))
    weights = random_weights(graph_module)
    weights.tensors["embed"] = torch.tensor([[0.0, 0.0], [1.0, -1.0], [1.0, 1.0]])
    weights.tensors["up"] = torch.eye(2)
    assert fired(graph_module, weights, torch.tensor([0, 1, 2, 0, 1])) == {0: [3, 1]}


def test_windows_belong_to_one_text() -> None:
    from picompile_silent.firing import windows

    assert [piece.tolist() for piece in windows([[1, 2, 3], [], [4]], 2)] == [[1, 2], [3], [4]]
