"""Programs whose blocks are of experts, in bundles of neurons and in panels, against eager PyTorch."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Interpreter, Node

from helpers.kernels.lowered import Runner, quantized, relative_error
from helpers.kernels.regions import Regions, check_step, every_region
from picompile.testing import GraphShape, random_weights
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import Lowered, lower
from picompile_codegen.lowering.program import FfnPart, ProgramCall
from picompile_passes.dialect.route import SCORES
from picompile_passes.dialect.sparse_ffn import SparseFfnOperands
from picompile_passes.errors import UnsupportedGraphError
from picompile_passes.graph.materialize import materialize
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import ROUTE, SPARSE_FFN
from picompile_passes.passes.insert_predictors import InsertPredictors

# Eight tokens are multiplied in tiles, and four each by itself.
CHUNK = 8
OPTIONS = LowerOptions(context=32, chunk=CHUNK, kv_dtype="float32", sequences=3)
LENGTH = 12
SEQUENCES = ([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8])

# No panel has all rows of an expert.
MIXTURE = GraphShape(hidden=72, heads=3, ffn=45, experts=7, chosen=2, vocab=50, layers=2)
SHAPES = {
    "silu": replace(MIXTURE, activation="silu", normalized="sum"),
    "relu": replace(MIXTURE, activation="relu", normalized="sum", fused=True, router_bias=True, scores="sigmoid"),
    "shared": replace(MIXTURE, gated=False, activation="relu2", shared=64, scores="sqrt_softplus"),
    "biased": replace(
        MIXTURE, activation="silu", expert_bias=True, turned=True, scores="identity", normalized="softmax"
    ),
    "panels": replace(MIXTURE, hidden=96, ffn=48, activation="silu", expert_bias=True, scores="softmax"),
}
# The largest relative error: activations are bytes where weights are, and plain blocks of this size are off by 0.03.
FORMATS = {"f16": 1e-5, "q8": 6e-2, "q4": 6e-2}
CASES = [(name, form) for name in SHAPES for form in (FORMATS if name in ("silu", "relu", "panels") else ("f16",))]


def graph(name: str, form: str) -> GraphModule:
    return quantized(SHAPES[name], InsertPredictors(), form=form)


class Observer(Interpreter):
    """Runs a graph on some tokens. `gap` is how far apart, in its scores' deviations, the last expert that a router
    chooses and the first that it does not are at least; `counts` has of each block the neurons computed and kept."""

    def __init__(self, name: str, form: str) -> None:
        graph_module = graph(name, form)
        super().__init__(materialize(graph_module, random_weights(graph_module)))
        self.gap, self.counts = float("inf"), list[list[int]]()

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        self.gap, self.counts = float("inf"), []
        return self.run(torch.tensor(tokens), torch.arange(len(tokens)))  # type: ignore[no-any-return]

    def run_node(self, node: Node) -> Any:
        if node.target in (SPARSE_FFN, ROUTE):
            values = {name: self.env.get(value, value) for name, value in arguments(node).items()}
            if node.target is ROUTE:
                choice = SCORES[values["scores"]](values["logits"]) + (0 if values["bias"] is None else values["bias"])
                ordered, chosen = choice.sort(descending=True).values, values["chosen"]
                gaps = (ordered[:, chosen - 1] - ordered[:, chosen]) / choice.std(dim=1)
                self.gap = min(self.gap, float(gaps.min()))
            else:
                block = SparseFfnOperands(**values)
                gains = block.neuron_gains()
                assert gains is not None
                computed, kept = block.mask & (gains != 0), block.kept_outputs()
                self.counts.append([int(computed.sum()), int((kept != 0).sum())])
        return super().run_node(node)


@cache
def clear_text(name: str, form: str) -> list[int]:
    """Return tokens whose experts do not depend on rounding."""
    observer, random = Observer(name, form), Random(7)
    texts = ([random.randrange(MIXTURE.vocab) for _ in range(LENGTH)] for _ in range(60))

    def gap(text: list[int]) -> float:
        observer.logits(text)
        return observer.gap

    return max(texts, key=gap)


@cache
def lowered(name: str, form: str) -> Lowered:
    with every_region():
        return lower(graph(name, form), OPTIONS)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Runner]:
    """Compiles each case once."""

    @cache
    def compile_(name: str, form: str) -> Runner:
        graph_module = graph(name, form)
        path = tmp_path_factory.mktemp("program") / "host.so"
        return Runner(path, lowered(name, form), graph_module, random_weights(graph_module))

    return compile_


compiles = pytest.mark.slow("compiles programs that take seconds each; one is fast", but=("relu-f16",))
every_case = pytest.mark.parametrize(("name", "form"), CASES)


@compiles
@every_case
def test_decoding_equals_the_eager_graph(name: str, form: str, compiled: Callable[[str, str], Runner]) -> None:
    runner, text = compiled(name, form), clear_text(name, form)
    expected = Observer(name, form).logits(text)
    measured = {threads: runner.decode(text, threads) for threads in (1, 2, 3)}
    assert relative_error(measured[1], expected) < FORMATS[form]
    assert torch.equal(measured[1], measured[2])
    assert torch.equal(measured[1], measured[3])


@compiles
@every_case
def test_prompts_equal_the_eager_graph(name: str, form: str, compiled: Callable[[str, str], Runner]) -> None:
    runner, text = compiled(name, form), clear_text(name, form)
    expected = Observer(name, form).logits(text)
    # The last chunk has four tokens; rows past them are not of this step.
    assert relative_error(runner.score(text, CHUNK), expected) < FORMATS[form]
    runner.position = 0
    runner.run("prefill", text[:CHUNK])
    last = runner.run("prefill_last", text[CHUNK:])
    assert last is not None
    assert relative_error(last, expected[-1:]) < FORMATS[form]


@compiles
@every_case
def test_several_sequences_have_the_bits_of_decoding(
    name: str, form: str, compiled: Callable[[str, str], Runner]
) -> None:
    compiled(name, form).check_sequences(SEQUENCES)


@pytest.mark.slow("compiles programs")
@pytest.mark.parametrize(("name", "form"), [("relu", "q8"), ("biased", "f16"), ("panels", "q8")])
def test_no_two_tasks_of_a_region_meet(
    name: str, form: str, compiled: Callable[[str, str], Runner], regions: Regions
) -> None:
    runner = compiled(name, form)
    for function, start, end in (("prefill", 0, 8), ("prefill_last", 8, 11), ("decode", 11, 12), ("score", 4, 12)):
        runner.position = start
        runner.prepare(clear_text(name, form)[start:end])
        check_step(runner, function, regions)


@pytest.mark.slow("compiles programs; one is fast", but=("relu",))
@pytest.mark.parametrize("name", list(SHAPES))
def test_counts_are_those_of_the_eager_graph(name: str, compiled: Callable[[str, str], Runner]) -> None:
    runner, observer = compiled(name, "f16"), Observer(name, "f16")
    runner.stats()
    runner.decode(clear_text(name, "f16"))
    observer.logits(clear_text(name, "f16"))
    assert runner.stats().tolist() == observer.counts


# ---- on paper ----


def of(program: Lowered, operator: str, function: str = "decode") -> list[ProgramCall]:
    """The calls of `function` that come from `operator`."""
    return [call for call in program.program.functions[function] if call.op == operator]


def test_calls_bytes_and_counts_are_those_of_the_chosen_experts() -> None:
    program = lowered("relu", "q8")
    assert [call.layer for call in of(program, "route")] == [0, 1]
    assert [call.kernel for call in of(program, "ffn")] == ["ffn_exact_q8_315x72_r1_gated_relu_2of7"] * 2
    # q8: rows of 72 columns, padded to 96, and three scales, to whole 64 bytes.
    row_bytes = program.weights.tensors["layers.0.ffn.neurons"].shape[1]
    for function, rows in (("decode", 1), ("batch", 3), ("score", CHUNK)):
        experts = min(7, 2 * rows)
        assert [call.weight_bytes for call in of(program, "ffn", function)] == [experts * 45 * 3 * row_bytes] * 2
    part = FfnPart(1, "all", 90, "exact", 1, rows=2, experts=7, chosen=2)
    assert program.program.ffn[1] == part
    assert part.to_json() == {
        "layer": 1,
        "part": "all",
        "neurons": 90,
        "predictor": "exact",
        "stats_row": 1,
        "experts": 7,
        "chosen": 2,
    }


def test_experts_in_panels_have_a_kernel_of_their_own() -> None:
    program = lowered("panels", "q8")
    assert all(call.kernel.startswith("experts_2of7_ffn_whole_q8_336x96_r1_") for call in of(program, "ffn"))
    matrices = [tensor.shape for name, tensor in program.weights.tensors.items() if ".0.mlp.experts." in name]
    whole = sum(shape[0] * shape[1] for shape in matrices if len(shape) == 2)
    assert of(program, "ffn")[0].weight_bytes == whole * 2 // 7
    assert program.program.ffn[0] == FfnPart(0, "all", 96, "none", 0, rows=3, experts=7, chosen=2)


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_accelerators_are_refused(accelerator: str) -> None:
    with pytest.raises(UnsupportedGraphError, match="the CPU alone computes experts so far; compile for a target"):
        lower(graph("silu", "f16"), replace(OPTIONS, accelerator=accelerator))


def test_each_block_has_its_own_gains() -> None:
    program = lowered("silu", "f16")
    blocks = list(calls(graph("silu", "f16").graph, SPARSE_FFN))
    assert len({arguments(block)["gains"] for block in blocks}) == len(of(program, "route")) == 2
