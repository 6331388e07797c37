"""Programs whose blocks leave out neurons below limits, against the same graphs in eager PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule, Interpreter, Node

from helpers.kernels.lowered import Runner
from helpers.kernels.regions import Regions, check_step, every_region
from picompile.testing import GraphShape, build, random_weights, run
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import Lowered, lower
from picompile_codegen.lowering.program import FfnPart
from picompile_passes.dialect import parse_activation
from picompile_passes.dialect.ops import kept_outputs
from picompile_passes.graph.materialize import materialize
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import SPARSE_FFN
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline

OPTIONS = LowerOptions(context=32, chunk=5, kv_dtype="float32", sequences=4)
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
SEQUENCES = ([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8])


@dataclass(frozen=True)
class Case:
    """A model with limits in the blocks of some layers, of which those of `hot` are split."""

    shape: GraphShape
    predictors: InsertPredictors
    hot: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def graph(self, limits: bool = True) -> GraphModule:
        """The quantized graph; without `limits` that of the same weights."""
        predictors = self.predictors if limits else replace(self.predictors, gate_limits=(), output_limits=())
        return Pipeline((predictors, Partition(self.hot), Quantize("f16")))(build(self.shape)).graph_module


CASES = {
    # Every way in which a block's neurons may be known, and each kind of limits.
    "gated": Case(
        GraphShape(hidden=72, heads=3, ffn=77, vocab=90, layers=5, activation="silu"),
        InsertPredictors(
            "none",
            kinds={3: "learned", 4: "sign"},
            ranks={3: 5},
            thresholds={3: -0.1, 4: 0.45},
            gate_limits=(0, 2, 3, 4),
            output_limits=(1, 2, 3),
        ),
        {2: tuple(range(0, 75, 2)), 3: tuple(range(30, 68))},
    ),
    "swiglu": Case(
        GraphShape(hidden=72, heads=3, ffn=77, vocab=50, layers=2, activation="silu"),
        InsertPredictors("none", gate_limits=(0,), output_limits=(0, 1)),
    ),
    "plain": Case(
        GraphShape(hidden=66, heads=3, ffn=131, vocab=50, layers=2, gated=False, activation="gelu"),
        InsertPredictors("none", output_limits=(0, 1)),
        {1: tuple(range(30, 68))},
    ),
    "sparse": Case(
        GraphShape(hidden=72, heads=3, ffn=77, vocab=50, layers=2, activation="fatrelu(0.05)"),
        InsertPredictors("exact", gate_limits=(0,), output_limits=(0, 1)),
    ),
}


@dataclass(frozen=True)
class Compiled:
    case: Case
    graph: GraphModule
    lowered: Lowered
    runner: Runner

    def expected(self, tokens: list[int], limits: bool = True) -> torch.Tensor:
        """Eager logits [T, V]."""
        graph_module = self.graph if limits else self.case.graph(limits=False)
        return run(graph_module, random_weights(graph_module), torch.tensor(tokens))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Compiled]:
    """Compiles each case once."""
    known: dict[str, Compiled] = {}

    def compile_(name: str) -> Compiled:
        if name not in known:
            graph_module = CASES[name].graph()
            with every_region():
                lowered = lower(graph_module, OPTIONS)
            path: Path = tmp_path_factory.mktemp(name) / "host.so"
            runner = Runner(path, lowered, graph_module, random_weights(graph_module))
            known[name] = Compiled(CASES[name], graph_module, lowered, runner)
        return known[name]

    return compile_


def relative_error(measured: torch.Tensor, expected: torch.Tensor) -> float:
    assert measured.isfinite().all(), "something was read that this step did not write"
    return float((measured - expected).norm() / expected.norm())


@pytest.mark.slow("compiles programs that take seconds each; a SwiGLU model is fast")
@pytest.mark.parametrize("name", list(CASES))
def test_decoding_equals_the_eager_graph(name: str, compiled: Callable[[str], Compiled]) -> None:
    program = compiled(name)
    expected = program.expected(IDS)
    measured = [program.runner.decode(IDS, threads) for threads in (1, 3)]
    assert relative_error(measured[0], expected) < 1e-5
    assert torch.equal(measured[0], measured[1])
    # The limits matter.
    assert relative_error(measured[0], program.expected(IDS, limits=False)) > 1e-3


@pytest.mark.slow("compiles programs that take seconds each; a SwiGLU model is fast", but=("swiglu",))
@pytest.mark.parametrize("name", ["swiglu", "plain", "sparse"])
def test_prompts_equal_the_eager_graph(name: str, compiled: Callable[[str], Compiled]) -> None:
    """Neurons below their limits add nothing there either; these models have no masks, which prompts do without."""
    program = compiled(name)
    expected, runner = program.expected(IDS), program.runner
    runner.position = 0
    scored = [runner.run("score", IDS[start : start + 5]) for start in range(0, len(IDS), 5)]
    assert relative_error(torch.cat([row for row in scored if row is not None])[: len(IDS)], expected) < 1e-5


@pytest.mark.slow("compiles programs that take seconds each; a SwiGLU model is fast")
def test_prompts_of_masked_blocks_have_limits_and_every_neuron(compiled: Callable[[str], Compiled]) -> None:
    program = compiled("gated")
    every = replace(program.case.predictors, kinds={}, ranks={}, thresholds={})
    graph_module = replace(program.case, predictors=every).graph()
    expected, runner = run(graph_module, random_weights(graph_module), torch.tensor(IDS)), program.runner
    runner.position = 0
    runner.run("prefill", IDS[:5])
    last = runner.run("prefill_last", IDS[5:9])
    assert last is not None
    assert relative_error(last, expected[8:9]) < 1e-5


@pytest.mark.slow("compiles programs that take seconds each; a SwiGLU model is fast", but=("swiglu",))
@pytest.mark.parametrize("name", list(CASES))
def test_several_sequences_have_the_bits_of_decoding(name: str, compiled: Callable[[str], Compiled]) -> None:
    runner = compiled(name).runner
    alone = []
    for tokens in SEQUENCES:
        runner.forget()
        alone.append(runner.decode(tokens))
    runner.forget()
    for step in range(max(map(len, SEQUENCES))):
        going = [number for number, tokens in enumerate(SEQUENCES) if step < len(tokens)]
        logits = runner.run_batch([SEQUENCES[number][step] for number in going], [step] * len(going), going)
        for row, number in enumerate(going):
            assert torch.equal(logits[row], alone[number][step])


@pytest.mark.slow("compiles programs that take seconds each; a SwiGLU model is fast", but=("swiglu",))
@pytest.mark.parametrize("name", list(CASES))
def test_no_two_tasks_of_a_region_meet(name: str, compiled: Callable[[str], Compiled], regions: Regions) -> None:
    runner = compiled(name).runner
    for function, start, end in (("prefill", 0, 5), ("decode", 5, 6), ("score", 6, 9)):
        runner.position = start
        runner.prepare(IDS[start:end])
        check_step(runner, function, regions)


def counts_of(graph_module: GraphModule) -> dict[str, list[int]]:
    """For each block by name: neurons computed and kept over all of IDS, as eager PyTorch says."""
    found: dict[str, list[int]] = {}

    class Observer(Interpreter):
        def run_node(self, node: Node) -> object:
            if node.target is SPARSE_FFN:
                values = {name: self.env.get(value, value) for name, value in arguments(node).items()}
                computed = values["mask"] if values["neurons"] is None else values["mask"][:, values["neurons"]]
                if values["gate_limits"] is not None and arguments(arguments(node)["mask"])["kind"] in (
                    "none",
                    "exact",
                ):
                    first = torch.nn.functional.linear(values["x"], values["gate"], values["gate_bias"])
                    activated = parse_activation(values["activation"]).function(first)
                    computed = computed & (activated.abs() > values["gate_limits"])
                names = ("x", "mask", "neurons", "gate", "up", "gate_bias", "up_bias", "activation", "up_activation")
                kept = kept_outputs(*(values[name] for name in (*names, "gate_limits", "output_limits")))
                found[node.name] = [int(computed.sum()), int((kept != 0).sum())]
            return super().run_node(node)

    with torch.no_grad():
        module = materialize(graph_module, random_weights(graph_module))
        Observer(module).run(torch.tensor(IDS), torch.arange(len(IDS)))
    return found


@pytest.mark.slow("compiles programs that take seconds each; a SwiGLU model is fast", but=("swiglu",))
@pytest.mark.parametrize("name", list(CASES))
def test_counts_are_those_of_the_eager_graph(name: str, compiled: Callable[[str], Compiled]) -> None:
    program = compiled(name)
    program.runner.stats()
    program.runner.decode(IDS)
    stats = program.runner.stats().tolist()
    expected = counts_of(program.graph)
    assert stats == [expected[block.name] for block in calls(program.graph.graph, SPARSE_FFN)]
    assert all(
        kept < len(IDS) * part.neurons for (_, kept), part in zip(stats, program.lowered.program.ffn, strict=True)
    )


def parts_of(lowered: Lowered) -> list[tuple[int, str, int, int]]:
    return [(part.layer, part.part, part.rows, part.kept_rows) for part in lowered.program.ffn]


@pytest.mark.slow("compiles programs that take seconds each; a SwiGLU model is fast")
def test_rows_that_are_read_of_kept_neurons_only(compiled: Callable[[str], Compiled]) -> None:
    """Down where outputs have limits; up as well where a mask names neurons that their gates may leave out."""
    assert parts_of(compiled("gated").lowered) == [
        *((0, "all", 2, 0), (1, "all", 3, 1), (2, "hot", 2, 1), (2, "cold", 2, 1)),
        *((3, "hot", 3, 1), (3, "cold", 3, 1), (4, "all", 3, 2)),
    ]
    assert parts_of(compiled("plain").lowered) == [(0, "all", 2, 1), (1, "hot", 2, 1), (1, "cold", 2, 1)]
    assert parts_of(compiled("sparse").lowered) == [(0, "all", 2, 1), (1, "all", 2, 1)]


def test_parts_without_limits_are_written_as_before() -> None:
    part = FfnPart(1, "all", 77, "none", 0, rows=3)
    assert part.to_json() == {"layer": 1, "part": "all", "neurons": 77, "predictor": "none", "stats_row": 0}
    assert replace(part, kept_rows=1).to_json() == part.to_json() | {"rows": 3, "kept_rows": 1}


@pytest.mark.slow("compiles programs that take seconds each; a SwiGLU model is fast")
def test_kernels_of_gates_that_decide(compiled: Callable[[str], Compiled]) -> None:
    """The gate is a tensor of its own, in decoding and for prompts; the limits are vectors of float32."""
    lowered = compiled("gated").lowered
    for function in ("decode", "prefill", "batch"):
        kernels = {call.layer: call.kernel for call in lowered.program.functions[function] if call.op == "ffn"}
        assert all(kernels[layer].startswith("ffn_exact_") for layer in (0, 2))
        assert kernels[0].endswith("_silu_limitsg")
        assert kernels[1].startswith("ffn_dense_")
        assert kernels[1].endswith("_silu_limitso")
        assert "limitsgo" in kernels[3]
