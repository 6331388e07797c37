"""benchmarks/prompt_counts.py, on a small shape of which a part is hot."""

import sys
from pathlib import Path

import pytest

from helpers.support import ROOT
from picompile_codegen.cuda import write_kernel
from picompile_codegen.cuda.build import build_cuda
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower
from picompile_codegen.lowering.placement import ON_HOST, Placement
from picompile_codegen.specs import LinearSpec

sys.path.insert(0, str(ROOT / "benchmarks"))

import prompt_counts
from _gpu_models import ModelOptions, model_graph
from _gpu_split import Split
from _sass import disassemble, loops_with

from picompile.synth.shapes import find_shape


@pytest.mark.parametrize("on_gpu", [True, False])
def test_copies_and_launches_are_those_of_the_program(on_gpu: bool) -> None:
    shape = find_shape("tiny-reglu")
    placement = Placement.all_of(shape.layers) if on_gpu else ON_HOST
    split = Split(dict.fromkeys(range(shape.layers), 64), placement, 0.5)
    graph = model_graph(shape, ModelOptions("q4", 0.5, 32, 64, 89, ()), split, dense=False)
    lowered = lower(graph, LowerOptions(64, 16, "float16", 1, "cuda", split.placement))
    cold = prompt_counts.host_weight_bytes(lowered)
    assert cold > 0
    assert prompt_counts.copied_bytes(lowered, "prefill_last") == cold
    assert prompt_counts.copied_bytes(lowered, "decode") == 0
    device = [call for call in lowered.program.functions["decode"] if call.device == "device"]
    assert len(device) < prompt_counts.launches(lowered, "decode") < 3 * len(device)


def test_instructions_are_those_of_loops_that_multiply(tmp_path: Path) -> None:
    build_cuda([write_kernel(LinearSpec(format="q4", n=1024, k=1024, rows=64, bias=False))], tmp_path, 89)
    loops = [loop for text in disassemble(tmp_path / "device.cubin").values() for loop in loops_with(text, "HMMA")]
    assert loops and all(0 < loop["HMMA"] < sum(loop.values()) for loop in loops)
