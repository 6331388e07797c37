import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.weight_formats import ROW_FORMATS
from picompile.testing import LLAMA, OPT, GraphShape, build, random_weights, run
from picompile_passes.dialect import dequantize_rows, quantize_rows
from picompile_passes.graph.materialize import materialize, node_values
from picompile_passes.graph.nodes import calls
from picompile_passes.graph.operands import PREDICT
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition

FEW = settings(max_examples=20) if settings.default.derandomize else settings()
SHAPES = [
    LLAMA,
    OPT,
    GraphShape(activation="fatrelu(0.02)", fused=True),
    GraphShape(gated=False, bias=False, parallel=True),
]


@pytest.mark.parametrize(("shape", "seed"), [(shape, number % 2) for number, shape in enumerate(SHAPES)], ids=repr)
def test_about_half_of_the_neurons_fire(shape, seed):
    graph_module = InsertPredictors()(build(shape)).graph_module
    values = node_values(materialize(graph_module, random_weights(graph_module, seed)), torch.arange(40))
    shares = [float(values[mask.name].float().mean()) for mask in calls(graph_module.graph, PREDICT)]
    assert len(shares) == 2
    assert all(0.3 < share < 0.7 for share in shares)


def test_a_parameter_is_the_same_in_every_graph_that_reads_it():
    before = build(LLAMA)
    after = Partition({0: (1, 2)})(InsertPredictors()(before).graph_module).graph_module
    one, other = random_weights(before, 5).tensors, random_weights(after, 5).tensors
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], random_weights(before, 7).tensors["lm_head.weight"])


def test_loaded_files_are_remembered_as_verified():
    graph_module = build(LLAMA)
    weights = random_weights(graph_module, dtype=torch.bfloat16)
    assert set(weights.names()) == dict(graph_module.named_parameters()).keys()
    assert weights.shape("lm_head.weight") == (50, 24)
    assert weights.load("lm_head.weight").dtype == torch.bfloat16
    assert weights.loaded == ["lm_head.weight"]
    with pytest.raises(KeyError):
        weights.load("none")


def packed_again(matrix, form):
    """Return a matrix [rows, columns] after it was quantized to `form` and back."""
    return dequantize_rows(quantize_rows(matrix, form), form, matrix.shape[1])


@FEW
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    seed=st.integers(0, 100),
    form=st.sampled_from(ROW_FORMATS),
    chosen=st.randoms(use_true_random=False),
)
def test_packing_changes_nothing_along_rows_or_columns(rows, columns, seed, form, chosen):
    graph_module = build(GraphShape(hidden=2 * columns, heads=1, kv_heads=1, ffn=rows, layers=1))
    weights = random_weights(graph_module, seed, representable=form)
    matrix = weights.tensors["model.layers.0.mlp.up_proj.weight"][:, :columns]
    order = torch.tensor(chosen.sample(range(rows), chosen.randint(1, rows)))
    for part in (matrix, matrix.T, matrix[order], matrix[order].T, matrix.T[:, order], matrix.flip(1)):
        # Bit for bit, but for the sign of zero.
        assert torch.equal(packed_again(part, form), part)


@pytest.mark.parametrize(("form", "shape"), [(form, OPT if form == "q4m" else LLAMA) for form in ROW_FORMATS], ids=repr)
def test_representable_weights_are_of_the_usual_size(form, shape):
    graph_module = build(shape)
    usual, special = (random_weights(graph_module, representable=name) for name in (None, form))
    for name, tensor in usual.tensors.items():
        if tensor.dim() == 2:
            assert 0.3 < float(special.tensors[name].std() / tensor.std()) < 2
            assert special.tensors[name].unique().numel() >= 3
            assert form == "f16" or not torch.equal(packed_again(tensor, form), tensor)
        else:
            assert torch.equal(special.tensors[name], tensor)
    assert run(graph_module, special).isfinite().all()
    with pytest.raises(ValueError, match="no weights are known to be representable in 'q5', only in f16, q8"):
        random_weights(graph_module, representable="q5")
