"""Which matrices of a program lie in panels: those that are only multiplied with whole, by a CPU without a GPU."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.fx import GraphModule

from helpers.kernels.lowered import Runner
from picompile.testing import GraphShape, build, random_weights
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import Lowered, lower
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import EMBEDDING, LINEAR
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline

SHAPE = GraphShape(hidden=64, heads=4, kv_heads=4, ffn=96, vocab=112, layers=2)
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def quantized(quant: str = "q8") -> GraphModule:
    """Return a graph whose predictors have ranks 16 and 24: the second one has no whole panels."""
    passes = (InsertPredictors("learned", ranks={0: 16, 1: 24}), Quantize(quant))
    return Pipeline(passes)(build(SHAPE)).graph_module


def tied() -> GraphModule:
    """Return a graph whose head is its table of embeddings."""
    graph_module = quantized()
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
    graph_module = quantized()
    found = in_panels(lowered(graph_module))
    projections = [str(node.args[1]) for node in calls(graph_module.graph, LINEAR)]
    # Four projections of each layer, the head, and both matrices of the first predictor.
    assert sum(found.values()) == len(projections) + 2 == 4 * SHAPE.layers + 1 + 2
    by_rows = [name for name, is_in_panels in found.items() if not is_in_panels]
    # The table of embeddings, the neurons of each layer, and the second predictor.
    assert len(by_rows) == 1 + SHAPE.layers + 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: lowered(quantized("f16")),
        lambda: lowered(quantized(), "cuda"),
        lambda: lowered(quantized(), panels=False),
    ],
    ids=["f16", "gpu", "off"],
)
def test_no_panels(make: Callable[[], Lowered]) -> None:
    assert not any(in_panels(make()).values())


def test_a_second_partition_of_the_cpu_reads_panels_as_well() -> None:
    assert in_panels(lowered(quantized(), "cpu")) == in_panels(lowered(quantized()))


def test_a_table_that_is_also_the_head_stays_in_rows() -> None:
    separate, shared = (in_panels(lowered(each)) for each in (quantized(), tied()))
    assert len(shared) == len(separate) - 1
    assert sum(shared.values()) == sum(separate.values()) - 1


@pytest.mark.slow("compiles two programs per format; one format is fast", but=("q4]",))
@pytest.mark.parametrize("quant", ["q8", "q4", "q4m"])
def test_programs_of_both_layouts_compute_the_same(tmp_path: Path, quant: str) -> None:
    graph_module = quantized(quant)
    weights, logits = random_weights(graph_module), []
    for panels in (True, False):
        program = lowered(graph_module, panels=panels)
        runner = Runner(tmp_path / f"{panels}.so", program, graph_module, weights)
        steps = [runner.run("decode", [token]) for token in IDS]
        logits.append(torch.cat([step for step in steps if step is not None]))
    assert not torch.equal(*logits)
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 1e-5


def test_a_batch_has_the_bits_of_decoding(tmp_path: Path) -> None:
    """A step for several sequences gives each the bits that it has alone, in panels as in rows."""
    graph_module = quantized("q4")
    runner = Runner(tmp_path / "host.so", lowered(graph_module), graph_module, random_weights(graph_module))
    alone = []
    for slot in range(3):
        runner.slot, runner.position = slot, 0
        alone.append(runner.run("decode", [IDS[slot]]))
    runner.forget()
    together = runner.run_batch(IDS[:3], [0, 0, 0], [0, 1, 2])
    assert torch.equal(together, torch.cat([each for each in alone if each is not None]))
