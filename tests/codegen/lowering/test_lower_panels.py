"""Which matrices of a program lie in panels: those of which no neurons are read alone, by a CPU without a GPU."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.fx import GraphModule

from helpers.kernels.lowered import Runner, quantized, relative_error
from picompile.testing import GraphShape, random_weights, run
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import Lowered, lower
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import EMBEDDING, LINEAR
from picompile_passes.passes.insert_predictors import InsertPredictors

SHAPE = GraphShape(hidden=64, heads=4, kv_heads=4, ffn=96, vocab=112, layers=2)
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def graph(form: str = "q8") -> GraphModule:
    """Return a graph whose predictors have ranks 16 and 24: the second one has no whole panels."""
    return quantized(SHAPE, InsertPredictors("learned", ranks={0: 16, 1: 24}), form=form)


def tied() -> GraphModule:
    """Return a graph whose head is its table of embeddings."""
    graph_module = graph()
    (table,) = (arguments(node)["weight"] for node in calls(graph_module.graph, EMBEDDING))
    head = list(calls(graph_module.graph, LINEAR))[-1]
    head.update_arg(1, table)
    graph_module.graph.eliminate_dead_code()
    return graph_module


def lowered(
    graph_module: GraphModule, accelerator: Literal["cpu", "cuda"] | None = None, *, panels: bool = True
) -> Lowered:
    return lower(graph_module, LowerOptions(32, 8, "float32", 3, accelerator, panels=panels))


def in_panels(program: Lowered) -> Mapping[str, bool]:
    """Return whether each matrix lies in panels, by its shape: a panel for sixteen rows."""
    tensors, found = program.weights.tensors, {}
    for name in program.weights.formats():
        rows = sum(int(node.meta["val"].shape[0]) for node in tensors[name].nodes)
        assert tensors[name].shape[0] in (rows, rows // 16)
        found[name] = tensors[name].shape[0] != rows
    return found


def test_what_is_multiplied_whole_lies_in_panels() -> None:
    found = in_panels(lowered(graph()))
    # Four projections of each layer, the head, the table of embeddings, and both matrices of the first predictor.
    assert sum(found.values()) == len(list(calls(graph().graph, LINEAR))) + 3 == 4 * SHAPE.layers + 1 + 1 + 2
    # The neurons of each layer, and the second predictor.
    assert len(found) - sum(found.values()) == SHAPE.layers + 2
    assert in_panels(lowered(graph(), "cpu")) == found, "so it is for a second partition of the CPU"
    shared = in_panels(lowered(tied()))
    assert (len(shared), sum(shared.values())) == (len(found) - 1, sum(found.values()) - 1), "a table is the head's too"
    for program in (lowered(graph("f16")), lowered(graph(), "cuda"), lowered(graph(), panels=False)):
        assert not any(in_panels(program).values())


def test_blocks_that_compute_every_neuron_lie_in_panels() -> None:
    """Each of their matrices on its own, and with it all of the model."""
    graph_module = quantized(SHAPE, InsertPredictors("none"), form="q4_k")
    program = lowered(graph_module)
    assert len(in_panels(program)) == (4 + 3) * SHAPE.layers + 2
    assert all(in_panels(program).values())
    kernels = {call.kernel for call in program.program.functions["decode"] if call.op == "ffn"}
    assert kernels == {"ffn_whole_q4_k_96x64_r1_gated_relu_panels_counted"}
    with pytest.raises(UnsupportedGraphError, match="its matrices are not in panels, as its down matrix is packed for"):
        lowered(quantized(SHAPE, InsertPredictors("none"), form="q8"), panels=False)


@pytest.mark.parametrize(
    ("shape", "kind", "accelerator", "name"),
    [
        (SHAPE, "exact", None, "model.layers.0.mlp.gate_proj.weight"),
        (SHAPE, "none", "cuda", "model.embed.weight"),
        (replace(SHAPE, vocab=113), "none", None, "model.embed.weight"),
        (replace(SHAPE, hidden=72), "none", None, "model.layers.0.q_proj.weight"),
    ],
)
def test_formats_without_rows_are_refused_where_rows_are_read(
    shape: GraphShape, kind: str, accelerator: Literal["cpu", "cuda"] | None, name: str
) -> None:
    graph_module = quantized(shape, InsertPredictors(kind), form="q4_k")
    with pytest.raises(UnsupportedGraphError, match=f"^{name}: no kernel reads single rows of q4_k, only panels of 16"):
        lowered(graph_module, accelerator)


@pytest.mark.slow("compiles two programs per format, which takes seconds; kernels of both layouts are fast")
@pytest.mark.parametrize("form", ["q8", "q4", "q4m", "mxfp4"])
def test_programs_of_both_layouts_compute_the_same(tmp_path: Path, form: str) -> None:
    """And a step for several sequences gives each the bits that it has alone."""
    graph_module = graph(form)
    weights, logits = random_weights(graph_module), []
    for panels in (True, False):
        program = lowered(graph_module, panels=panels)
        runner = Runner(tmp_path / f"{panels}.so", program, graph_module, weights)
        logits.append(runner.check_sequences([IDS, IDS[3:5], IDS[:1]])[0])
    assert not torch.equal(*logits)
    assert relative_error(logits[0], logits[1]) < 1e-5


@pytest.mark.slow("compiles a program per format, which takes seconds", but=("q4_k",))
@pytest.mark.parametrize("form", ["q8", "q4m", "q4_k", "q2_k", "iq4_xs", "nvfp4", "fp8", "nf4"])
def test_programs_with_activations_of_two_bytes_compute_what_the_graph_does(tmp_path: Path, form: str) -> None:
    """With one token at a time, several sequences, and chunks. With one byte the logits are off by hundredths."""
    graph_module = quantized(replace(SHAPE, activation="silu"), InsertPredictors("none"), form=form)
    weights = random_weights(graph_module)
    options = LowerOptions(32, 8, "float32", 3, activation_bytes=2)
    runner = Runner(tmp_path / "host.so", lower(graph_module, options), graph_module, weights)
    expected = run(graph_module, weights, torch.tensor(IDS))
    assert relative_error(runner.check_sequences([IDS, IDS[3:5], IDS[:1]])[0], expected) < 4e-4
    assert relative_error(runner.score(IDS, 8), expected) < 4e-4
