"""Which matrices of a program lie in panels.

On a CPU, those of which no neurons are read alone. For a GPU, of these, those in formats without rows and those of
blocks that compute every neuron.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.fx import GraphModule

from helpers.kernels.lowered import Runner, quantized, relative_error
from picompile.testing import GraphShape, build, random_weights, run
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import Lowered, lower
from picompile_codegen.lowering.placement import Placement
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import EMBEDDING, LINEAR
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize

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
    found = in_panels(lowered(quantized(SHAPE, InsertPredictors("none"), form="q8"), panels=False))
    assert {name for name, lies in found.items() if lies} == {name for name in found if ".mlp." in name}


def hot(form: str, predictor: str = "none", **options: bool) -> GraphModule:
    """Return a graph all of whose neurons are an accelerator's."""
    passes = [Partition(dict.fromkeys(range(SHAPE.layers), range(SHAPE.ffn))), Quantize(form, **options)]
    graph_module = InsertPredictors(predictor)(build(SHAPE)).graph_module
    for each in passes:
        graph_module = each(graph_module).graph_module
    return graph_module


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_an_accelerator_reads_formats_without_rows_in_panels(accelerator: Literal["cpu", "cuda"]) -> None:
    """Projections of the same input are one there, and what the host reads of them lies in the same panels."""
    everything = Placement.all_of(SHAPE.layers)
    graph_module = hot("q4_k", head="q6_k", hot_by_outputs=True)
    program = lower(graph_module, LowerOptions(32, 8, "float32", 3, accelerator, everything))
    assert all(in_panels(program).values())
    called = {call.kernel for call in program.program.functions["decode"] if call.device == "accelerator"}
    assert {name for name in called if name.startswith("ffn")} == {"ffn_whole_q4_k_96x64_r1_gated_relu_panels_counted"}
    projections = {name for name in called if name.startswith("linear_q4_k")}
    assert any("192x64_r1_panels" in name for name in projections) == (accelerator == "cuda")
    assert all("panels" in name for name in called if name.startswith("linear"))


def test_hot_blocks_are_packed_by_neurons_unless_told() -> None:
    program = lower(hot("q8"), LowerOptions(32, 8, "float32", 1, "cuda", Placement.all_of(SHAPE.layers)))
    assert not any(in_panels(program).values())
    assert "layers.0.ffn.neurons.hot" in in_panels(program)
    with pytest.raises(UnsupportedGraphError, match=r"layers\.0\.ffn\.neurons.*: no kernel reads single rows of q4_k"):
        lower(hot("q4_k"), LowerOptions(32, 8, "float32", 1, "cuda", Placement.all_of(SHAPE.layers)))


@pytest.mark.parametrize(
    ("shape", "kind", "accelerator", "name"),
    [
        (SHAPE, "exact", None, "model.layers.0.mlp.gate_proj.weight"),
        (replace(SHAPE, vocab=113), "none", "cuda", "model.embed.weight"),
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


@pytest.mark.slow("compiles a program per format, which takes seconds; test_compile_stored.py has a fast one")
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
