import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from picompile.testing import LLAMA, OPT, RandomWeights, build, random_weights, run
from picompile_passes.dialect import quantize_rows
from picompile_passes.errors import PassesError
from picompile_passes.formats import FORMATS, packing
from picompile_passes.graph.builder import GraphBuilder
from picompile_passes.graph.materialize import evaluate_constant, materialize, node_values
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import (
    ADD,
    DEQUANTIZE,
    EMBEDDING,
    FFN,
    INDEX_SELECT,
    LINEAR,
    PREDICT,
    QUANTIZE,
    TRANSPOSE,
)
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def compiled(shape=OPT, form="q4"):
    graph_module = InsertPredictors()(build(shape)).graph_module
    return Quantize(form)(Partition({0: (3, 30, 4)})(graph_module).graph_module).graph_module


class Sizes(TorchDispatchMode):
    """Notes how many bytes each new float32 tensor takes."""

    def __init__(self) -> None:
        super().__init__()
        self.float32_bytes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.float32_bytes.append(result.nbytes)
        return result


@pytest.mark.parametrize("dtype", DTYPES)
def test_materialized_parameters_are_the_checkpoints_in_float32(dtype):
    """And the graph runs with any number of tokens."""
    graph_module = build(LLAMA)
    weights = random_weights(graph_module, dtype=dtype)
    real = materialize(graph_module, weights)
    for name, parameter in real.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, weights.tensors[name].to(torch.float32))
    assert real.inverse_frequency is graph_module.inverse_frequency
    assert all(parameter.is_meta for parameter in graph_module.parameters())
    assert sorted(weights.loaded) == sorted(weights.tensors)
    assert [tuple(run(graph_module, weights, tokens).shape) for tokens in (1, 2, 17)] == [(1, 50), (2, 50), (17, 50)]


def test_weights_of_a_predictor_are_loaded_by_their_names():
    graph_module = InsertPredictors("learned", ranks={0: 3, 1: 2})(build(OPT)).graph_module
    after = Quantize("q8")(graph_module).graph_module
    weights = random_weights(after)
    of_predictors = [name for name in weights.tensors if name.startswith("predictors.")]
    assert len(of_predictors) == 6
    weights.tensors |= {name: weights.tensors[name].to(torch.float16) for name in of_predictors}
    first, _ = calls(after.graph, PREDICT)
    fc1, _, bias = arguments(first)["weights"]
    given = weights.tensors["predictors.layers.0.fc1"], weights.tensors["predictors.layers.0.bias"]
    packed = evaluate_constant(after, arguments(fc1)["packed"], weights)
    assert torch.equal(packed, quantize_rows(given[0], "q8"))
    assert torch.equal(evaluate_constant(after, bias, weights), given[1].to(torch.float32))
    assert weights.loaded == ["predictors.layers.0.fc1", "predictors.layers.0.bias"]
    assert torch.equal(materialize(after, weights).get_parameter("predictors.layers.0.bias"), given[1].float())


def test_what_cannot_be_loaded_is_named():
    graph_module = build(LLAMA)
    weights = random_weights(graph_module)
    wrong = RandomWeights(weights.tensors | {"lm_head.weight": torch.zeros(3, 24)})
    with pytest.raises(PassesError, match=r"lm_head.weight is \[3, 24\] in the weights but \[50, 24\] in the graph"):
        materialize(graph_module, wrong)
    with pytest.raises(PassesError, match=r"tokens .* is not constant"):
        evaluate_constant(graph_module, graph_module.graph.output_node().args[0], weights)
    del weights.tensors["model.norm.weight"]
    with pytest.raises(PassesError, match=r"the weights hold no tensor 'model.norm.weight', which the graph reads"):
        materialize(graph_module, weights)


@pytest.mark.slow("materializes a model per format", but=("f16-", "fp8-", "q8-", "q4m-", "q4_k-", "iq2-"))
@pytest.mark.parametrize(("form", "dtype"), [(form, DTYPES[number % 3]) for number, form in enumerate(FORMATS)])
def test_constants_are_what_the_eager_graph_computes(form, dtype):
    graph_module = compiled(form=form)
    weights = random_weights(graph_module, dtype=dtype)
    values = node_values(materialize(graph_module, weights), torch.arange(2))
    nodes = list(calls(graph_module.graph, QUANTIZE, DEQUANTIZE, INDEX_SELECT, TRANSPOSE))
    assert len(nodes) > 20
    for node in nodes:
        value = evaluate_constant(graph_module, node, weights)
        assert value.is_contiguous()
        assert torch.equal(value, values[node.name]), node.name


def test_rows_are_selected_before_they_become_float32():
    graph_module = build(LLAMA)
    rewriter = Rewriter(graph_module, "test")
    (block, *_) = calls(graph_module.graph, FFN)
    up = arguments(block)["up"]
    table = rewriter.constant("table", torch.tensor([7, 3]))
    selected = rewriter.call(INDEX_SELECT, (up, 0, table), before=block, sources=())
    weights = random_weights(graph_module, dtype=torch.bfloat16)
    with Sizes() as sizes:
        value = evaluate_constant(graph_module, selected, weights)
    assert torch.equal(value, weights.tensors["model.layers.0.mlp.up_proj.weight"][[7, 3]].float())
    assert max(sizes.float32_bytes) == 2 * 24 * 4


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_a_stack_are_selected_before_they_become_float32(transposed):
    b = GraphBuilder()
    stack = b.parameter("stack", 3, 8, 5) if transposed else b.parameter("stack", 3, 5, 8)
    moved = b.call(torch.ops.aten.transpose.int, stack, 1, 2) if transposed else stack
    rows = b.call(torch.ops.aten.flatten.using_ints, moved, 0, 1)
    selected = b.call(INDEX_SELECT, rows, 0, b.constant("table", torch.tensor([7, 3])), name="selected")
    graph_module = b.finish(b.call(LINEAR, b.call(EMBEDDING, b.tokens, b.parameter("embed", 9, 8), 0), selected, None))
    weights = random_weights(graph_module, dtype=torch.bfloat16)
    node = next(node for node in graph_module.graph.nodes if node.name == "selected")
    with Sizes() as sizes:
        value = evaluate_constant(graph_module, node, weights)
    expected = weights.tensors["stack"]
    expected = expected.transpose(1, 2) if transposed else expected
    assert torch.equal(value, expected.reshape(15, 8)[[7, 3]].float())
    assert max(sizes.float32_bytes) == 2 * 8 * 4


def test_packing_goes_by_blocks_of_rows(monkeypatch):
    """Blocks that do not divide the rows give the bytes that one block gives."""
    weight = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole = {form: quantize_rows(weight, form) for form in FORMATS}
    monkeypatch.setattr(packing, "_BLOCK_ELEMENTS", 7 * 40 + 1)
    for form, expected in whole.items():
        assert torch.equal(quantize_rows(weight, form), expected)
        assert torch.equal(quantize_rows(weight.T.contiguous().T, form), expected)


def test_only_what_a_constant_needs_is_loaded_and_once():
    graph_module = build(OPT)
    rewriter = Rewriter(graph_module, "test")
    head = graph_module.graph.output_node().args[0]
    weight = head.args[1]
    both = rewriter.call(ADD, (weight, weight), before=head, sources=())
    four = rewriter.call(ADD, (both, both), before=head, sources=())
    weights = random_weights(graph_module, dtype=torch.float16)
    value = evaluate_constant(graph_module, four, weights)
    assert torch.equal(value, weights.tensors["model.embed.weight"].float() * 4)
    assert weights.loaded == ["model.embed.weight"]


def test_a_weight_is_freed_before_the_next_is_loaded():
    graph_module = build(LLAMA)
    rewriter = Rewriter(graph_module, "test")
    (first, second) = calls(graph_module.graph, FFN)
    table = rewriter.constant("table", torch.tensor([7, 3]))
    rows = [
        rewriter.call(INDEX_SELECT, (arguments(block)["up"], 0, table), before=first, sources=())
        for block in (first, second)
    ]
    total = rewriter.call(ADD, rows, before=first, sources=())
    weights = random_weights(graph_module)
    alive = []

    class Fresh(RandomWeights):
        def load(self, name):
            assert [tensor() for tensor in alive if tensor() is not None] == []
            tensor = super().load(name).to(torch.bfloat16)
            alive.append(weakref.ref(tensor))
            return tensor

    evaluate_constant(graph_module, total, Fresh(weights.tensors))
    assert len(alive) == 2
