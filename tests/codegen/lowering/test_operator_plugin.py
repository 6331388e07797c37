"""An operator of an installed package: found by name, verified, lowered, and the same compiled as in eager PyTorch."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.fx import GraphModule

from helpers.installed import install
from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.lowered import Runner, relative_error
from picompile.testing import OPT, build, random_weights, run
from picompile_codegen import cuda
from picompile_codegen.lowering import operators
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower
from picompile_passes import plugins
from picompile_passes.dialect import OPERATORS
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.nodes import calls
from picompile_passes.graph.operands import ADD
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline, verifying
from picompile_passes.verify.structure import check_arguments

PLUGIN = """
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from tvm import tirx

from picompile_codegen.cpu import vector
from picompile_codegen.cpu.tensor import bind, parallel
from picompile_codegen.cuda import memory
from picompile_codegen.cuda.function import blocks_for
from picompile_codegen.lowering.function import dimension
from picompile_codegen.specs.arguments import KernelSpec, floats, floats_out
from picompile_passes.dialect import Call, operator
from picompile_passes.graph.nodes import arguments

EXPRESSION = "t0 = sigmoid(x1); mul(x0, t0)"


def sign_is_known(call: Call) -> Iterator[str]:
    if call.values["sign"] not in (-1, 1):
        yield f"has the sign {call.values['sign']}"


@operator(
    part="pointwise",
    dimensions={"x": "TD", "y": "TD"},
    result="TD",
    checks=(sign_is_known,),
    namespace="picompile_gating",
)
def gated(x: Tensor, y: Tensor, sign: int = 1) -> Tensor:
    return sign * x * y.sigmoid()


@dataclass(frozen=True)
class GatedSpec(KernelSpec):
    named = "gated_{dim}_r{rows}"

    dim: int
    rows: int

    def declare(self):
        yield floats("a", self.rows, self.dim)
        yield floats("b", self.rows, self.dim)
        yield floats_out("y", self.rows, self.dim)

    def bodies(self):
        return {"cpu": on_cpu, "cuda": on_gpu}


def on_cpu(spec, function):
    a, b, y = function["a"], function["b"], function["y"]
    with parallel(function.tokens(spec.rows), when_worth=spec.rows > 1) as t:

        def block(c, valid):
            values = [vector.load(each, t, c, valid=valid) for each in (a, b)]
            vector.store(y, t, c, value=vector.compute(EXPRESSION, values), valid=valid)

        vector.blocks(spec.dim, block)


def on_gpu(spec, function):
    a, b, y = function["a"], function["b"], function["y"]
    with function.launch(grid=(blocks_for(spec.dim, 64), spec.rows), block=64) as place:
        t, i = place.block_y, bind(place.block * 64 + place.thread)
        with memory.when(tirx.And(t < function.tokens(spec.rows), i < spec.dim)):
            y[t, i] = memory.compute(EXPRESSION, [a[t, i], b[t, i]])


def lower_gated(node, function):
    values, spec = arguments(node), GatedSpec(dimension(node), function.rows)
    a, b = function.value(values["x"]), function.value(values["y"])
    function.call(spec, {"a": a, "b": b, "y": function.result(node)})
"""
KERNELS = ("[picompile.operator_kernels]", "gated = picompile_gating:lower_gated")
OPTIONS = LowerOptions(context=16, chunk=4, kv_dtype="float32")


@pytest.fixture(scope="module")
def gated_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GraphModule]:
    """A quantized graph in which the operator stands for the last addition; its package is installed."""
    points = ("gated = picompile_gating:gated", *KERNELS)
    folder = install(tmp_path_factory.mktemp("site"), "picompile_gating", PLUGIN, "picompile.operators", points)
    sys.path.insert(0, folder)
    assert "gated" in list(OPERATORS) and "picompile_gating" not in sys.modules
    graph_module = build(OPT)
    rewriter = Rewriter(graph_module, "testing")
    *_, addition = calls(graph_module.graph, ADD)
    gated = rewriter.call(OPERATORS["gated"].target, addition.args, before=addition, sources=(addition,))
    rewriter.replace(addition, gated)
    graph_module.graph.eliminate_dead_code()
    passes = (InsertPredictors("none"), Quantize("f16"))
    yield Pipeline(passes, hook=verifying)(graph_module).graph_module
    sys.path.remove(folder)
    OPERATORS._known.pop("gated")
    sys.modules.pop("picompile_gating")


def test_a_graph_that_calls_it_is_lowered(gated_model: GraphModule) -> None:
    calls_of = [call.kernel for call in lower(gated_model, OPTIONS).program.functions["decode"] if call.op == "gated"]
    assert calls_of == [f"gated_{OPT.hidden}_r1"]


def test_its_own_checks_and_its_dimensions_are_verified(gated_model: GraphModule) -> None:
    (node,) = calls(gated_model.graph, OPERATORS["gated"].target)
    x, y = node.args
    wide = next(each for each in gated_model.graph.nodes if each.meta["val"].shape[1:] == (OPT.vocab,))
    for wrong, message in (((x, y, 2), "has the sign 2"), ((x, wide), f"but x makes that {OPT.vocab} a {OPT.hidden}")):
        node.args = wrong
        faults = [fault.message for fault in check_arguments(gated_model) if fault.node is node]
        node.args = (x, y)
        assert len(faults) == 1 and faults[0].endswith(message)


def test_a_package_may_lack_the_kernel(gated_model: GraphModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda **_: [])
    known = operators._lowerings()._known
    monkeypatch.setattr(operators._lowerings(), "_known", {name: known[name] for name in known if name != "gated"})
    with pytest.raises(UnsupportedGraphError, match="there is no kernel for picompile_gating"):
        lower(gated_model, OPTIONS)


@pytest.mark.slow("compiles a program")
def test_the_compiled_program_is_the_eager_graph(gated_model: GraphModule, tmp_path: Path) -> None:
    weights, ids = random_weights(gated_model), [3, 1, 4, 1]
    runner = Runner(tmp_path / "host.so", lower(gated_model, OPTIONS), gated_model, weights)
    expected = run(gated_model, weights, torch.tensor(ids))
    assert relative_error(runner.score(ids, 4), expected) < 1e-5


@pytest.mark.slow("compiles a kernel for the emulation")
def test_its_kernel_for_gpus(gated_model: GraphModule, tmp_path: Path) -> None:
    spec = sys.modules["picompile_gating"].GatedSpec(70, 3)
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(2, 70)).astype(np.float32) for _ in range(2))
    found = CudaWorkbench(tmp_path).run(cuda.write_kernel(spec), {"a": a, "b": b}, tokens=2)["y"]
    np.testing.assert_allclose(found[:2], a / (1 + np.exp(-b)), rtol=1e-5)
