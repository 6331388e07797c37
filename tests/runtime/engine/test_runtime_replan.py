"""Programs in which the host computes hot neurons of the GPU: which calls change, and that all pass their checks."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from torch.fx import GraphModule

from picompile.testing import GraphShape, build, random_weights
from picompile_codegen.build.interfaces import interfaces
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import Lowered, lower
from picompile_codegen.lowering.placement import Placement
from picompile_passes.graph.materialize import evaluate_constant
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline
from picompile_runtime.artifact.call_order import Interfaces, check_against
from picompile_runtime.artifact.fields import Fields
from picompile_runtime.artifact.interfaces import KernelInterface, parse_interfaces
from picompile_runtime.artifact.program import Argument, Call, Program, read_program
from picompile_runtime.devices.memory import Tensor, aligned_zeros
from picompile_runtime.engine import layout
from picompile_runtime.engine.layout import accelerator_need, fit_accelerator
from picompile_runtime.engine.loaded_program import LoadedProgram
from picompile_runtime.engine.replan import compute_on_host, split_anew

SEQUENCES, NEURONS = 3, 76
DECODING = ("decode", "batch")
HOT = {0: tuple(range(0, 75, 2)), 1: tuple(range(30, 68))}
LEARNED = InsertPredictors("learned", ranks={0: 5, 1: 5})


@dataclass(frozen=True)
class Case:
    """A model, its predictors, the format of its weights, and the neurons of its hot parts."""

    shape: GraphShape
    predictors: InsertPredictors = LEARNED
    form: str = "f16"
    hot: Mapping[int, Sequence[int]] = field(default_factory=lambda: HOT)


def shape(activation: str = "relu", **more: bool) -> GraphShape:
    return GraphShape(hidden=72, heads=3, ffn=NEURONS, vocab=50, layers=2, activation=activation, **more)


CASES = {
    "gated": Case(shape()),
    "q4, a prediction from the layer before": Case(shape(), replace(LEARNED, inputs={1: "previous"}), "q4"),
    "biases": Case(shape("relu2", gated=False)),
    "limits": Case(shape("silu"), replace(LEARNED, gate_limits=(0, 1), output_limits=(0, 1))),
    # The second layer has no hot part.
    "one layer": Case(shape(), hot={0: HOT[0], 1: ()}),
    # Here parts decide for themselves.
    "exact": Case(shape(), InsertPredictors("exact")),
    "sign": Case(shape(), InsertPredictors("sign", thresholds={0: 0.48, 1: 0.48})),
    "none": Case(shape(), InsertPredictors("none")),
}
MOVABLE = ("gated", "q4, a prediction from the layer before", "biases", "limits")


@dataclass(frozen=True)
class ForGpu:
    """A program for a GPU, its weights and its kernels."""

    graph: GraphModule
    lowered: Lowered
    program: Program
    tensors: Mapping[str, Tensor]
    kernels: Interfaces

    def weight(self, argument: Argument) -> NDArray[np.generic]:
        """Return what the file would have of a weight."""
        source, tensor = random_weights(self.graph), self.lowered.weights.tensors[argument.name]
        whole = tensor.produce(lambda node: evaluate_constant(self.graph, node, source)).numpy()
        first, view = argument.view.offset, argument.view
        content = np.ascontiguousarray(whole).reshape(-1).view(np.uint8)[first : first + view.size_bytes]
        aligned = aligned_zeros(content.shape, np.uint8)
        aligned[:] = content
        return aligned.view(view.dtype).reshape(view.shape)

    def moving(self, *layers: int) -> LoadedProgram:
        """Return the program with the hot matrices of some layers left with the host."""
        names = frozenset(f"layers.{layer}.ffn.neurons.hot" for layer in layers)
        return compute_on_host(self.program, self.tensors, self.kernels, names)

    def check(self, found: LoadedProgram) -> dict[str, NDArray[np.uint8]]:
        """Check the calls of a program as they are checked when it is loaded; return the weights that were made."""
        made = found.contents(self.weight)

        def weight(argument: Argument) -> NDArray[np.generic]:
            return made[argument.name].view(argument.view.dtype) if argument.name in made else self.weight(argument)

        check_against(found.program, self.kernels, weight, "program.json")
        return made


@pytest.fixture(scope="module")
def for_gpu() -> Callable[[str], ForGpu]:
    """Lowers each case once."""
    known: dict[str, ForGpu] = {}

    def lower_it(name: str) -> ForGpu:
        if name not in known:
            case = CASES[name]
            passes = (case.predictors, Partition(case.hot), Quantize(case.form))
            graph = Pipeline(passes)(build(case.shape)).graph_module
            lowered = lower(graph, LowerOptions(32, 16, "float32", SEQUENCES, "cuda", Placement.all_of(2)))
            tensors = {each.name: Tensor(each.dtype, each.shape) for each in lowered.weights.tensors.values()}
            program = read_program(json.dumps(lowered.program.to_json()).encode(), tensors, "program.json")
            built = {"host": lowered.built, "device": lowered.accelerator_built}
            kernels = {
                device: parse_interfaces(Fields(interfaces(of_device.values()), device))
                for device, of_device in built.items()
            }
            known[name] = ForGpu(graph, lowered, program, tensors, kernels)
        return known[name]

    return lower_it


def blocks(program: Program, function: str, device: str) -> list[Call]:
    return [call for call in program.calls(function, device) if call.op == "ffn"]


def layers_of(program: Program, function: str, device: str) -> list[int | None]:
    return [call.layer for call in blocks(program, function, device)]


@pytest.mark.parametrize("moved", [(1,), (0, 1)])
@pytest.mark.parametrize("name", MOVABLE)
def test_the_host_computes_all_neurons_of_a_layer(
    for_gpu: Callable[[str], ForGpu], name: str, moved: tuple[int, ...]
) -> None:
    """In functions that decode; those that read prompts are the same calls."""
    case = for_gpu(name)
    found = case.moving(*moved)
    case.check(found)
    kept = [layer for layer in (0, 1) if layer not in moved]
    for function in found.program.functions:
        if function not in DECODING:
            assert found.program.functions[function] == case.program.functions[function]
            continue
        assert layers_of(found.program, function, "device") == kept
        assert layers_of(found.program, function, "host") == [0, 1]
        for before, call in zip(
            blocks(case.program, function, "host"), blocks(found.program, function, "host"), strict=True
        ):
            assert (call != before) == (call.layer in moved)
    names = [f"layers.{layer}.ffn.neurons.hot" for layer in moved]
    assert found.program.streamed == case.program.streamed | set(names)
    assert found.computed_bytes == sum(case.tensors[name].size_bytes for name in names)
    # The bytes that a step reads are those of before.
    for function in DECODING:
        read = [sum(call.weight_bytes for call in each.functions[function]) for each in (case.program, found.program)]
        assert read[0] == read[1]


@pytest.mark.parametrize("name", MOVABLE)
def test_the_cold_neurons_come_first(for_gpu: Callable[[str], ForGpu], name: str) -> None:
    """In the mask, in the matrices, and in everything else that a neuron has."""
    case = for_gpu(name)
    found = case.moving(1)
    made = case.check(found)
    cold = [neuron for neuron in range(NEURONS) if neuron not in HOT[1]]
    assert made["replan.1.table"].view(np.int32).tolist() == [*cold, *HOT[1]]
    assert found.joined == {"replan.1.neurons": ("layers.1.ffn.neurons.cold", "layers.1.ffn.neurons.hot")}
    assert found.loading_order(["norm", "layers.1.ffn.neurons.hot", "replan.1.table", "replan.1.neurons"]) == [
        "layers.1.ffn.neurons.cold",
        "layers.1.ffn.neurons.hot",
        "norm",
    ]
    (call,) = (call for call in blocks(found.program, "batch", "host") if call.layer == 1)
    parameters = case.kernels["host"][call.kernel].parameters
    args = {parameter.name: argument for parameter, argument in zip(parameters, call.args, strict=True)}
    assert args["mask"].view.shape == (SEQUENCES * NEURONS,)
    assert args["neuron_w.data"].view.size_bytes == found.tensors["replan.1.neurons"].size_bytes
    (before,) = (call for call in blocks(case.program, "batch", "device") if call.layer == 1)
    parameters = case.kernels["device"][before.kernel].parameters
    hot = {parameter.name: argument for parameter, argument in zip(parameters, before.args, strict=True)}
    of_neurons = [each for each in ("gate_bias", "up_bias", "gate_limits", "output_limits") if each in args]
    assert bool(of_neurons) == (name in ("biases", "limits"))
    for each in of_neurons:
        np.testing.assert_array_equal(made[args[each].name].view(np.float32)[len(cold) :], case.weight(hot[each]))


def test_what_the_gpu_adds_is_the_bias_of_down_or_nothing(for_gpu: Callable[[str], ForGpu]) -> None:
    case = for_gpu("gated")
    made = case.check(case.moving(0))
    zeros = [content for weight, content in made.items() if weight.startswith("replan.zeros.")]
    assert len(zeros) == len(DECODING) and not any(content.any() for content in zeros)
    case = for_gpu("biases")
    made = case.check(case.moving(0))
    biases = [made[f"replan.0.bias.{rows}"].view(np.float32).reshape(rows, -1) for rows in (1, SEQUENCES)]
    assert (biases[1] == biases[0]).all() and biases[0].any()


@pytest.mark.parametrize("name", ["exact", "sign", "none"])
def test_parts_that_decide_for_themselves_stay(for_gpu: Callable[[str], ForGpu], name: str) -> None:
    """The GPU reads their weights over the bus."""
    case = for_gpu(name)
    found = case.moving(0, 1)
    assert not found.joined and not found.made and found.computed_bytes == 0
    assert found.program.functions == case.program.functions
    assert found.program.streamed >= {"layers.0.ffn.neurons.hot", "layers.1.ffn.neurons.hot"}


def test_a_layer_without_a_cold_part_stays(for_gpu: Callable[[str], ForGpu]) -> None:
    """Statistics of the other are those of the whole layer."""
    case = for_gpu("one layer")
    found = case.moving(0, 1)
    case.check(found)
    assert list(found.joined) == ["replan.0.neurons"]
    ffn = for_gpu("gated").moving(1).program.ffn
    parts = [(0, "cold", NEURONS - len(HOT[0])), (0, "hot", len(HOT[0])), (1, "all", NEURONS)]
    assert [(part.layer, part.part, part.neurons) for part in ffn] == parts


def test_programs_without_room_stay(for_gpu: Callable[[str], ForGpu]) -> None:
    """Neither in kernels, as older artifacts have them, nor in masks, nor for the names of weights that are made."""
    case = for_gpu("gated")
    for name in ("columns", "count"):
        kernels = {
            device: {kernel: for_fewer(interface, name) for kernel, interface in of_device.items()}
            for device, of_device in case.kernels.items()
        }
        assert not replace(case, kernels=kernels).moving(0, 1).joined
    buffers = {
        name: replace(tensor, shape=(SEQUENCES, NEURONS - 1)) if name.endswith("mask.sent") else tensor
        for name, tensor in case.program.buffers.items()
    }
    assert not replace(case, program=replace(case.program, buffers=buffers)).moving(0, 1).joined
    tensors = {**case.tensors, "replan.zeros": Tensor("float32", (1,))}
    assert not split_anew(case.program, case.program, tensors, case.kernels, 0).joined


def for_fewer(interface: KernelInterface, name: str) -> KernelInterface:
    """Return a kernel whose parameter counts fewer neurons than all."""
    parameters = (replace(each, below=NEURONS) if each.name == name else each for each in interface.parameters)
    return replace(interface, parameters=tuple(parameters))


def test_a_program_that_is_split_anew_fits(for_gpu: Callable[[str], ForGpu], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is free: made weights take memory as well, and more weights move for them. Where they do not fit, the
    GPU reads over the bus.
    """
    monkeypatch.setattr(layout, "_SPARED_BYTES", 0)
    monkeypatch.setattr(layout, "_PIECE_BYTES", 1)
    case = for_gpu("gated")
    need = accelerator_need(case.program, case.tensors)
    hot = {f"layers.{layer}.ffn.neurons.hot" for layer in (0, 1)}
    hot_bytes = sum(case.tensors[name].size_bytes for name in hot)

    def lacking(size_bytes: int) -> tuple[Program, LoadedProgram]:
        moved = fit_accelerator(case.program, case.tensors, need.total - size_bytes, may_move=True)
        return moved, split_anew(case.program, moved, case.tensors, case.kernels, need.total - size_bytes)

    for room in (0, 64, 1000):
        joined = []
        for size_bytes in (1, hot_bytes // 2 + room, hot_bytes + 2000 + room):
            _, found = lacking(size_bytes)
            case.check(found)
            assert accelerator_need(found.program, found.tensors).total <= need.total - size_bytes
            assert len(found.joined) == len(hot & found.program.streamed)
            joined.append(len(found.joined))
        assert joined == [0, 1, 2]
    moved, found = lacking(need.weights)
    assert found == LoadedProgram(moved, case.tensors)
