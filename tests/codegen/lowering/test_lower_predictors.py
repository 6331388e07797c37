"""Programs whose feed-forward blocks follow a mask, against the same graphs in eager PyTorch."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint

import pytest
import torch
from torch.fx import GraphModule, Interpreter, Node
from tvm.tirx import Cast

from helpers.kernels.lowered import Runner
from helpers.kernels.regions import Regions, check_step, every_region
from picompile.testing import TESTING_KINDS, GraphShape, build, random_weights, run, with_predictors
from picompile_codegen.cpu.kernel import KernelFunction
from picompile_codegen.cpu.tensor import loop
from picompile_codegen.lowering import ffn as lower_predict
from picompile_codegen.lowering.ffn import mask_buffer
from picompile_codegen.lowering.function import Function, LowerOptions, dimension
from picompile_codegen.lowering.lower import Lowered, lower
from picompile_codegen.lowering.program import ProgramCall, ProgramTensor, tensor_bytes
from picompile_codegen.specs import PackageSpec
from picompile_codegen.specs.arguments import Declaration, floats, mask
from picompile_passes.dialect.ops import neuron_outputs
from picompile_passes.errors import RegistryError, UnsupportedGraphError
from picompile_passes.graph.materialize import materialize
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ADD, DEQUANTIZE, PREDICT, QUANTIZE, SPARSE_FFN
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline

OPTIONS = LowerOptions(context=32, chunk=5, kv_dtype="float32")
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@dataclass(frozen=True)
class Case:
    """A model and the predictors of its layers; those of `hot` are split, and have these neurons in the hot part."""

    shape: GraphShape
    predictors: InsertPredictors
    hot: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def graph(self, dense: bool = False) -> GraphModule:
        """The quantized graph; `dense` one without predictors, of the same weights."""
        predictors = InsertPredictors("none") if dense else self.predictors
        passes = (predictors, Partition(self.hot), Quantize("f16"))
        return Pipeline(passes)(build(self.shape)).graph_module


_SOME, _OTHER = tuple(range(0, 75, 2)), tuple(range(30, 68))
CASES = {
    # Every kind side by side, and every input that a learned one may have.
    "gated": Case(
        GraphShape(hidden=72, heads=3, ffn=77, vocab=90, layers=7),
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
        GraphShape(hidden=72, heads=3, ffn=77, vocab=50, layers=4, activation="silu", parallel=True),
        InsertPredictors("learned", kinds={1: "sign", 3: "none"}, ranks={0: 12, 2: 40}, inputs={2: "previous"}),
        {0: _SOME, 1: _OTHER, 2: _OTHER, 3: _SOME},
    ),
}


@dataclass(frozen=True)
class Compiled:
    case: Case
    lowered: Lowered
    runner: Runner

    def expected(self, tokens: list[int], dense: bool = False) -> torch.Tensor:
        """Eager logits [T, V]."""
        graph_module = self.case.graph(dense)
        return run(graph_module, random_weights(graph_module), torch.tensor(tokens))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Compiles each case once."""
    known: dict[str, Compiled] = {}

    def compile_(name: str) -> Compiled:
        if name not in known:
            graph_module = CASES[name].graph()
            with every_region():
                lowered = lower(graph_module, OPTIONS)
            path = tmp_path_factory.mktemp(name) / "host.so"
            known[name] = Compiled(
                CASES[name], lowered, Runner(path, lowered, graph_module, random_weights(graph_module))
            )
        return known[name]

    return compile_


def of(program: Lowered, operator: str, function: str = "decode") -> list[ProgramCall]:
    """The calls of `function` that come from `operator`."""
    return [call for call in program.program.functions[function] if call.op == operator]


def relative_error(measured: torch.Tensor, expected: torch.Tensor) -> float:
    assert measured.isfinite().all(), "something was read that this step did not write"
    return float((measured - expected).norm() / expected.norm())


@pytest.mark.slow("compiles a program per kind; one kind is fast", but=("gated",))
@pytest.mark.parametrize("name", list(CASES))
def test_decoding_equals_eager_predicted_graph(name: str, compiled: object) -> None:
    program: Compiled = compiled(name)  # type: ignore[operator]
    expected = program.expected(IDS)
    measured = {threads: program.runner.decode(IDS, threads) for threads in (1, 2, 3)}
    assert relative_error(measured[1], expected) < 1e-5
    assert torch.equal(measured[1].argmax(dim=1), expected.argmax(dim=1))
    assert torch.equal(measured[1], measured[2])
    assert torch.equal(measured[1], measured[3])
    # The masks matter: every neuron would have given other logits.
    assert relative_error(measured[1], program.expected(IDS, dense=True)) > 1e-2


@pytest.mark.slow("compiles a program per kind; decoding with one kind is fast")
@pytest.mark.parametrize("name", list(CASES))
def test_prompts_are_read_with_every_neuron(name: str, compiled: object) -> None:
    program: Compiled = compiled(name)  # type: ignore[operator]
    expected, runner = program.expected(IDS, dense=True), program.runner
    runner.position = 0
    scored = [runner.run("score", IDS[start : start + 5]) for start in range(0, len(IDS), 5)]
    rows = torch.cat([row for row in scored if row is not None])
    # The last chunk has one token; rows past it are not of this step.
    assert relative_error(rows[: len(IDS)], expected) < 1e-5
    runner.position = 0
    runner.run("prefill", IDS[:5])
    last = runner.run("prefill_last", IDS[5:9])
    assert last is not None
    assert relative_error(last, expected[8:9]) < 1e-5


@pytest.mark.slow("runs regions task by task; one of limits and one of sequences are fast")
@pytest.mark.parametrize("name", list(CASES))
def test_no_two_tasks_of_a_region_meet(name: str, compiled: object, regions: Regions) -> None:
    runner = compiled(name).runner  # type: ignore[operator]
    for function, start, end in (("prefill", 0, 5), ("prefill_last", 5, 8), ("decode", 8, 9), ("score", 9, 11)):
        runner.position = start
        runner.prepare(IDS[start:end])
        check_step(runner, function, regions)


def observed_counts(graph_module: GraphModule, tokens: int) -> dict[str, list[int]]:
    """For each block by name: neurons computed and fired over all of IDS, as eager PyTorch says."""
    found: dict[str, list[int]] = {}

    class Observer(Interpreter):
        def run_node(self, node: Node) -> object:
            if node.target is SPARSE_FFN:
                values = {name: self.env.get(value, value) for name, value in arguments(node).items()}
                mask = values["mask"] if values["neurons"] is None else values["mask"][:, values["neurons"]]
                names = ("x", "gate", "up", "gate_bias", "up_bias", "activation", "up_activation")
                hidden = neuron_outputs(*(values[name] for name in names))
                found[node.name] = [int(mask.sum()), int(((hidden != 0) & mask).sum())]
            return super().run_node(node)

    with torch.no_grad():
        module = materialize(graph_module, random_weights(graph_module))
        Observer(module).run(torch.tensor(IDS), torch.arange(tokens))
    return found


@pytest.mark.slow("compiles a program per kind; decoding with one kind is fast")
@pytest.mark.parametrize("name", list(CASES))
def test_counts_are_those_of_the_masks(name: str, compiled: object) -> None:
    """Computed: neurons of the mask that are rows of the part; fired: those of them whose h is not zero."""
    program: Compiled = compiled(name)  # type: ignore[operator]
    program.runner.stats()
    program.runner.decode(IDS)
    stats = program.runner.stats()
    graph_module = program.case.graph()
    blocks = list(calls(graph_module.graph, SPARSE_FFN))
    assert [part.predictor for part in program.lowered.program.ffn] == [
        arguments(arguments(block)["mask"])["kind"] for block in blocks
    ]
    expected = observed_counts(graph_module, len(IDS))
    assert stats.tolist() == [expected[block.name] for block in blocks]
    assert any(
        0 < computed < len(IDS) * part.neurons
        for (computed, _), part in zip(stats, program.lowered.program.ffn, strict=True)
    )


@pytest.mark.slow("compiles a program of plain blocks; other kinds are fast", but=("gated", "parts"))
@pytest.mark.parametrize("name", list(CASES))
def test_no_buffer_is_overwritten_while_it_is_needed(name: str, compiled: object) -> None:
    """From a buffer's first call to its last no other buffer of those calls lies where it does: masks wait for two
    parts, and inputs of blocks for the predictor of the next layer."""
    program = compiled(name).lowered.program  # type: ignore[operator]
    for calls_ in program.functions.values():
        touched = [{arg.name for arg in call.args if arg.space == "buffer"} for call in calls_]
        names = set().union(*touched)
        lives = {name: [i for i, used in enumerate(touched) if name in used] for name in names}
        for a, b in itertools.combinations(sorted(names), 2):
            together = lives[a][0] <= lives[b][-1] and lives[b][0] <= lives[a][-1]
            assert not together or disjoint(program.buffers[a], program.buffers[b]), (a, b)


def disjoint(a: ProgramTensor, b: ProgramTensor) -> bool:
    ends = [(tensor.offset or 0) + tensor_bytes(tensor.dtype, tensor.shape) for tensor in (a, b)]
    return ends[0] <= (b.offset or 0) or ends[1] <= (a.offset or 0)


def test_every_mask_has_one_call_in_decoding(compiled: object) -> None:
    """One for each mask, in decoding alone; layers that differ in their thresholds share a kernel."""
    lowered: Lowered = compiled("gated").lowered  # type: ignore[operator]
    predictors = of(lowered, "predict")
    assert [call.layer for call in predictors] == [0, 1, 2, 5, 6]
    assert predictors[0].kernel == predictors[3].kernel
    assert not any(of(lowered, "predict", function) for function in ("prefill", "prefill_last", "score"))
    split: Lowered = compiled("parts").lowered  # type: ignore[operator]
    assert [call.layer for call in of(split, "predict")] == [0, 1, 1, 2]


def test_weight_bytes_of_predictors_and_blocks(compiled: object) -> None:
    """Predictors in full; blocks as if every neuron were computed."""
    lowered: Lowered = compiled("gated").lowered  # type: ignore[operator]
    learned, sign, relu = of(lowered, "predict")[:3]
    # f16: rows of 96 columns (72 padded) take 192 bytes, of 32 columns 64, and of 64 columns 128. Biases are float32.
    assert learned.weight_bytes == 5 * 192 + 77 * 64 + 77 * 4
    assert sign.weight_bytes == 77 * 64
    assert relu.weight_bytes == 33 * 192 + 77 * 128 + 77 * 4
    assert [call.weight_bytes for call in of(lowered, "ffn")] == [77 * 3 * 192] * 7


def test_prompts_leave_out_nodes_that_only_predictors_need() -> None:
    graph_module = CASES["plain"].graph()
    predict = next(iter(calls(graph_module.graph, PREDICT)))
    with graph_module.graph.inserting_before(predict):
        (x, *rest) = predict.args
        twice = graph_module.graph.call_function(ADD, (x, x))
    twice.meta.update(x.meta)
    predict.args = (twice, *rest)
    lowered, before = lower(graph_module, OPTIONS), lower(CASES["plain"].graph(), OPTIONS)
    counts = {name: len(of(lowered, "add", name)) - len(of(before, "add", name)) for name in lowered.program.functions}
    assert counts == {"decode": 1, "prefill": 0, "prefill_last": 0, "score": 0}


def of_testing_kind() -> GraphModule:
    graph_module = with_predictors(InsertPredictors("none")(build()).graph_module, TESTING_KINDS[0], 0.1)
    return Quantize("f16")(graph_module).graph_module


def test_kind_without_a_kernel() -> None:
    with pytest.raises(UnsupportedGraphError, match="no CPU kernel for predictor kind 'testing-linear'"):
        lower(of_testing_kind(), OPTIONS)


def lower_linear(node: Node, function: Function) -> None:
    """The kernel of a package, made of ours: every neuron of an even number."""
    even = function.shared.weights.computed("even", (1,), lambda _: torch.zeros(1))
    kernel = function.kernel(EvenNeurons(dimension(node)))
    function.call(kernel, {"unused": even, "mask": mask_buffer(node, function)}, op="predict")


@dataclass(frozen=True)
class EvenNeurons(PackageSpec):
    neurons: int

    @property
    def name(self) -> str:
        return f"even_{self.neurons}"

    def declare(self) -> Iterator[Declaration]:
        yield floats("unused", 1)
        yield mask("mask", 1, self.neurons, "out")

    def write(self, function: KernelFunction) -> None:
        with loop(0, self.neurons) as neuron:
            function["mask"][0, neuron] = Cast("uint8", neuron % 2 == 0)


def offer(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    points = [EntryPoint(TESTING_KINDS[0], value, lower_predict.ENTRY_POINT_GROUP) for value in values]
    found = {(lower_predict.ENTRY_POINT_GROUP, TESTING_KINDS[0]): points}
    monkeypatch.setattr(lower_predict, "entry_points", lambda *, group, name: found.get((group, name), []))


def test_kernel_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block behind it follows the mask that it makes."""
    offer(monkeypatch, f"{__name__}:lower_linear")
    lowered = lower(of_testing_kind(), OPTIONS)
    predictors, blocks = of(lowered, "predict"), of(lowered, "ffn")
    assert [call.kernel for call in predictors] == ["even_40"] * 2
    assert all(call.kernel.startswith("ffn_masked") for call in blocks)
    for predictor, block in zip(predictors, blocks, strict=True):
        assert predictor.args[-1] in block.args
        assert lowered.program.buffers[predictor.args[-1].name].shape == (1, 40)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("no_such_module:f",), "does not import: No module named 'no_such_module'"),
        (("one:f", "two:f"), "two packages offer a kernel for predictor kind 'testing-linear': one:f and two:f"),
    ],
)
def test_faulty_packages(monkeypatch: pytest.MonkeyPatch, values: tuple[str, ...], message: str) -> None:
    offer(monkeypatch, *values)
    with pytest.raises(RegistryError, match=message):
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
