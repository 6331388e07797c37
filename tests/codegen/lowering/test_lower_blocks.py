"""Programs whose blocks follow masks or leave out neurons below limits, against the same graphs in eager PyTorch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Interpreter, Node
from tvm.tirx import Cast

from helpers.kernels.lowered import Runner, quantized, relative_error
from helpers.kernels.regions import Regions, check_step, every_region
from picompile.testing import TESTING_KINDS, GraphShape, build, random_weights, run, with_predictors
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import loop
from picompile_codegen.lowering.ffn import PREDICTOR_LOWERINGS, mask_buffer
from picompile_codegen.lowering.function import Function, LowerOptions, dimension
from picompile_codegen.lowering.lower import Lowered, lower
from picompile_codegen.lowering.program import FfnPart, ProgramCall
from picompile_codegen.specs import KernelSpec
from picompile_codegen.specs.arguments import Declaration, floats, mask
from picompile_passes import plugins
from picompile_passes.dialect import parse_activation
from picompile_passes.dialect.sparse_ffn import SparseFfnOperands
from picompile_passes.errors import RegistryError, UnsupportedGraphError
from picompile_passes.graph.materialize import materialize
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ADD, DEQUANTIZE, PREDICT, QUANTIZE, SPARSE_FFN
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize

OPTIONS = LowerOptions(context=32, chunk=5, kv_dtype="float32")
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
SEQUENCES = ([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8])


@dataclass(frozen=True)
class Case:
    """A model and what its layers leave out; those of `hot` are split, and have these neurons in the hot part."""

    shape: GraphShape
    predictors: InsertPredictors
    hot: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @property
    def limited(self) -> bool:
        return bool(self.predictors.gate_limits or self.predictors.output_limits)

    def graph(self, predictors: InsertPredictors | None = None) -> GraphModule:
        """The quantized graph; with other `predictors`, one of the same weights."""
        return quantized(self.shape, predictors or self.predictors, Partition(self.hot))

    def eager(self, tokens: list[int], **changes: object) -> torch.Tensor:
        """Logits [T, V] by PyTorch, after changes of what is left out."""
        graph_module = self.graph(replace(self.predictors, **changes))
        return run(graph_module, random_weights(graph_module), torch.tensor(tokens))


# Every split is into as many neurons, so that there are fewer kernels to compile.
SOME, OTHER = tuple(range(0, 75, 2)), tuple(range(30, 68))
SMALL = GraphShape(hidden=72, heads=3, ffn=77, vocab=50, layers=2)
CASES = {
    # Every kind of predictor side by side, and every input that a learned one may have.
    "gated": Case(
        replace(SMALL, vocab=90, layers=7),
        InsertPredictors(
            "learned",
            kinds={1: "sign", 2: "learned-relu", 3: "exact", 4: "none"},
            ranks={0: 5, 2: 33, 5: 5, 6: 5},
            inputs={2: "stream", 5: "previous", 6: "previous"},
            thresholds={0: -0.1, 1: 0.48, 2: 0.2},
        ),
    ),
    "plain": Case(
        GraphShape(hidden=66, heads=3, ffn=131, vocab=50, layers=3, gated=False, activation="relu2"),
        InsertPredictors("sign", kinds={0: "learned-relu", 2: "learned"}, ranks={0: 20, 2: 9}, inputs={2: "stream"}),
    ),
    # Split: masks that both parts read, row by row by their tables, and predictors that are split themselves.
    "parts": Case(
        replace(SMALL, layers=4, activation="silu", parallel=True),
        InsertPredictors("learned", kinds={1: "sign", 3: "none"}, ranks={0: 12, 2: 40}, inputs={2: "previous"}),
        {0: SOME, 1: OTHER, 2: OTHER, 3: SOME},
    ),
    # Every way in which a block's neurons may be known, and each kind of limits.
    "limits and masks": Case(
        replace(SMALL, vocab=90, layers=5, activation="silu"),
        InsertPredictors(
            "none",
            kinds={3: "learned", 4: "sign"},
            ranks={3: 5},
            thresholds={3: -0.1, 4: 0.45},
            gate_limits=(0, 2, 3, 4),
            output_limits=(1, 2, 3),
        ),
        {2: SOME, 3: OTHER},
    ),
    "swiglu": Case(replace(SMALL, activation="silu"), InsertPredictors("none", gate_limits=(0,), output_limits=(0, 1))),
    "plain with limits": Case(
        GraphShape(hidden=66, heads=3, ffn=131, vocab=50, layers=2, gated=False, activation="gelu"),
        InsertPredictors("none", output_limits=(0, 1)),
        {1: OTHER},
    ),
    "sparse": Case(
        replace(SMALL, activation="fatrelu(0.05)"), InsertPredictors("exact", gate_limits=(0,), output_limits=(0, 1))
    ),
}
# What prompts do without.
NO_MASKS = {"kind": "none", "kinds": {}, "ranks": {}, "inputs": {}, "thresholds": {}}


@cache
def lowered(name: str) -> Lowered:
    with every_region():
        return lower(CASES[name].graph(), replace(OPTIONS, sequences=4 if CASES[name].limited else 1))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runner]:
    """Compiles each case once."""

    @cache
    def compile_(name: str) -> Runner:
        graph_module = CASES[name].graph()
        path = tmp_path_factory.mktemp("program") / "host.so"
        return Runner(path, lowered(name), graph_module, random_weights(graph_module))

    return compile_


def of(program: Lowered, operator: str, function: str = "decode") -> list[ProgramCall]:
    """The calls of `function` that come from `operator`."""
    return [call for call in program.program.functions[function] if call.op == operator]


compiles = pytest.mark.slow("compiles programs that take seconds each; a SwiGLU model is fast", but=("swiglu",))


@compiles
@pytest.mark.parametrize("name", list(CASES))
def test_decoding_equals_the_eager_graph(name: str, compiled: Callable[[str], Runner]) -> None:
    case, runner = CASES[name], compiled(name)
    expected = case.eager(IDS)
    measured = {threads: runner.decode(IDS, threads) for threads in (1, 2, 3)}
    assert relative_error(measured[1], expected) < 1e-5
    assert torch.equal(measured[1].argmax(dim=1), expected.argmax(dim=1))
    assert torch.equal(measured[1], measured[2])
    assert torch.equal(measured[1], measured[3])
    # What is left out matters: every neuron would have given other logits.
    left_out = {"gate_limits": (), "output_limits": ()} if case.limited else NO_MASKS
    assert relative_error(measured[1], case.eager(IDS, **left_out)) > (1e-3 if case.limited else 1e-2)


@compiles
@pytest.mark.parametrize("name", list(CASES))
def test_prompts_have_every_neuron_above_its_limits(name: str, compiled: Callable[[str], Runner]) -> None:
    expected, runner = CASES[name].eager(IDS, **NO_MASKS), compiled(name)
    # The last chunk has one token; rows past it are not of this step.
    assert relative_error(runner.score(IDS, 5), expected) < 1e-5
    runner.position = 0
    runner.run("prefill", IDS[:5])
    last = runner.run("prefill_last", IDS[5:9])
    assert last is not None
    assert relative_error(last, expected[8:9]) < 1e-5


@compiles
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].limited])
def test_several_sequences_have_the_bits_of_decoding(name: str, compiled: Callable[[str], Runner]) -> None:
    compiled(name).check_sequences(SEQUENCES)


@pytest.mark.slow("compiles a program")
@compiles
@pytest.mark.parametrize("name", list(CASES))
def test_no_two_tasks_of_a_region_meet(name: str, compiled: Callable[[str], Runner], regions: Regions) -> None:
    runner = compiled(name)
    for function, start, end in (("prefill", 0, 5), ("prefill_last", 5, 8), ("decode", 8, 9), ("score", 9, 11)):
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
                kind = arguments(arguments(node)["mask"])["kind"]
                if values["gate_limits"] is not None and kind in ("none", "exact"):
                    first = torch.nn.functional.linear(values["x"], values["gate"], values["gate_bias"])
                    activated = parse_activation(values["activation"]).function(first)
                    computed = computed & (activated.abs() > values["gate_limits"])
                kept = SparseFfnOperands(**values).kept_outputs()
                found[node.name] = [int(computed.sum()), int((kept != 0).sum())]
            return super().run_node(node)

    with torch.no_grad():
        module = materialize(graph_module, random_weights(graph_module))
        Observer(module).run(torch.tensor(IDS), torch.arange(len(IDS)))
    return found


@compiles
@pytest.mark.parametrize("name", list(CASES))
def test_counts_are_those_of_the_eager_graph(name: str, compiled: Callable[[str], Runner]) -> None:
    """Computed: neurons of the mask that are rows of the part; then those of them that send something down."""
    runner, graph_module = compiled(name), CASES[name].graph()
    runner.stats()
    runner.decode(IDS)
    stats, parts = runner.stats().tolist(), lowered(name).program.ffn
    blocks = list(calls(graph_module.graph, SPARSE_FFN))
    assert [part.predictor for part in parts] == [arguments(arguments(block)["mask"])["kind"] for block in blocks]
    expected = counts_of(graph_module)
    assert stats == [expected[block.name] for block in blocks]
    counted = [(*each, len(IDS) * part.neurons) for each, part in zip(stats, parts, strict=True)]
    if CASES[name].limited:
        assert all(kept < most for _, kept, most in counted)
    else:
        assert any(0 < computed < most for computed, _, most in counted)


# ---- on paper ----


def test_calls_and_weight_bytes_of_predictors() -> None:
    """One call for each mask, in decoding alone; bytes as if every neuron were computed."""
    program = lowered("gated")
    predictors = of(program, "predict")
    assert [call.layer for call in predictors] == [0, 1, 2, 5, 6]
    assert predictors[0].kernel == predictors[3].kernel, "layers that differ in their thresholds share a kernel"
    assert not any(of(program, "predict", function) for function in ("prefill", "prefill_last", "score"))
    assert [call.layer for call in of(lowered("parts"), "predict")] == [0, 1, 1, 2]
    # f16: rows of 96 columns (72 padded) take 192 bytes, of 32 columns 64, and of 64 columns 128. Biases are float32.
    learned, sign, relu = 5 * 192 + 77 * 64 + 77 * 4, 77 * 64, 33 * 192 + 77 * 128 + 77 * 4
    assert [call.weight_bytes for call in predictors[:3]] == [learned, sign, relu]
    assert [call.weight_bytes for call in of(program, "ffn")] == [77 * 3 * 192] * 7


def test_rows_that_are_read_of_kept_neurons_only() -> None:
    """Down where outputs have limits; up as well where a mask names neurons that their gates may leave out."""

    def parts(name: str) -> list[tuple[int, str, int, int]]:
        return [(part.layer, part.part, part.rows, part.kept_rows) for part in lowered(name).program.ffn]

    assert parts("limits and masks") == [
        *((0, "all", 2, 0), (1, "all", 3, 1), (2, "hot", 2, 1), (2, "cold", 2, 1)),
        *((3, "hot", 3, 1), (3, "cold", 3, 1), (4, "all", 3, 2)),
    ]
    assert parts("plain with limits") == [(0, "all", 2, 1), (1, "hot", 2, 1), (1, "cold", 2, 1)]
    assert parts("sparse") == [(0, "all", 2, 1), (1, "all", 2, 1)]
    part = FfnPart(1, "all", 77, "none", 0, rows=3)
    assert part.to_json() == {"layer": 1, "part": "all", "neurons": 77, "predictor": "none", "stats_row": 0}
    assert replace(part, kept_rows=1).to_json() == part.to_json() | {"rows": 3, "kept_rows": 1}


def test_prompts_leave_out_nodes_that_only_predictors_need() -> None:
    graph_module = CASES["plain"].graph()
    predict = next(iter(calls(graph_module.graph, PREDICT)))
    with graph_module.graph.inserting_before(predict):
        (x, *rest) = predict.args
        twice = graph_module.graph.call_function(ADD, (x, x))
    twice.meta.update(x.meta)
    predict.args = (twice, *rest)
    changed, before = lower(graph_module, OPTIONS), lowered("plain")
    counts = {name: len(of(changed, "add", name)) - len(of(before, "add", name)) for name in changed.program.functions}
    assert counts == {"decode": 1, "prefill": 0, "prefill_last": 0, "score": 0}


# ---- kernels of packages, and what cannot be lowered ----


def of_testing_kind() -> GraphModule:
    graph_module = with_predictors(InsertPredictors("none")(build()).graph_module, TESTING_KINDS[0], 0.1)
    return Quantize("f16")(graph_module).graph_module


def lower_linear(node: Node, function: Function) -> None:
    """The kernel of a package, made of ours: every neuron of an even number."""
    even = function.shared.weights.computed("even", (1,), lambda _: torch.zeros(1))
    function.call(EvenNeurons(dimension(node)), {"unused": even, "mask": mask_buffer(node, function)})


@dataclass(frozen=True)
class EvenNeurons(KernelSpec):
    named = "even_{neurons}"

    neurons: int

    def declare(self) -> Iterator[Declaration]:
        yield floats("unused", 1)
        yield mask("mask", 1, self.neurons, "out")

    def bodies(self) -> Mapping[str, Callable[[Any, Any], None]]:
        return {"cpu": name_even_neurons}


def name_even_neurons(spec: "EvenNeurons", function: KernelFunction) -> None:
    with loop(0, spec.neurons) as neuron:
        function["mask"][0, neuron] = Cast("uint8", neuron % 2 == 0)


def offer(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    points = [EntryPoint(TESTING_KINDS[0], value, "picompile.predictor_kernels") for value in values]
    monkeypatch.setattr(plugins, "entry_points", lambda group: [each for each in points if each.group == group])
    monkeypatch.setattr(PREDICTOR_LOWERINGS, "_known", dict(PREDICTOR_LOWERINGS._known))


def test_kernel_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block behind it follows the mask that it makes."""
    offer(monkeypatch, f"{__name__}:lower_linear")
    program = lower(of_testing_kind(), OPTIONS)
    predictors, blocks = of(program, "predict"), of(program, "ffn")
    assert [call.kernel for call in predictors] == ["even_40"] * 2
    assert all(call.kernel.startswith("ffn_masked") for call in blocks)
    for predictor, block in zip(predictors, blocks, strict=True):
        assert predictor.args[-1] in block.args
        assert program.program.buffers[predictor.args[-1].name].shape == (1, 40)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ((), UnsupportedGraphError, "no kernel for predictor kind 'testing-linear'"),
        (("no_such_module:f",), RegistryError, "does not import: No module named 'no_such_module'"),
        (("one:f", "two:f"), RegistryError, "two predictor kernels are called testing-linear: one:f .* and two:f"),
    ],
)
def test_faulty_packages(
    monkeypatch: pytest.MonkeyPatch, values: tuple[str, ...], error: type[Exception], message: str
) -> None:
    offer(monkeypatch, *values)
    with pytest.raises(error, match=message):
        lower(of_testing_kind(), OPTIONS)


@pytest.mark.parametrize("kind", ["exact", "none"])
def test_matrices_of_a_block_in_two_formats(kind: str) -> None:
    graph_module = InsertPredictors(kind)(build()).graph_module
    block = next(iter(calls(graph_module.graph, SPARSE_FFN)))
    gate = arguments(block)["gate"]
    with graph_module.graph.inserting_after(gate):
        packed = graph_module.graph.call_function(QUANTIZE, (gate, "q8"))
    with graph_module.graph.inserting_after(packed):
        other = graph_module.graph.call_function(DEQUANTIZE, (packed, "q8", 24))
    other.meta.update(gate.meta)
    gate.replace_all_uses_with(other, lambda user: user is not packed)
    # Rows of one format would be read as if they were of the other.
    with pytest.raises(UnsupportedGraphError, match=r"q8 and f16|f16 and q8"):
        lower(Quantize("f16")(graph_module).graph_module, OPTIONS)
