"""The time of a prompt is that of its slower side, counted from the plan."""

import re
from dataclasses import replace

import pytest

from helpers.families import config_of
from picompile.errors import DoesNotFitError, UsageError
from picompile.frontend.hf import capture_config
from picompile.machine.targets import TARGETS
from picompile.placement import counting
from picompile.placement.firing import Firing, LayerFiring
from picompile.placement.machine import machine_of
from picompile.placement.model_bytes import ModelBytes, Packing
from picompile.placement.plan import MemoryRow, Plan
from picompile.placement.planning import PlanOptions, make_plan
from picompile.placement.prompts import (
    ANSWER_TOKENS,
    PCIE_EFFICIENCY,
    TENSOR_EFFICIENCY,
    gain_with_answer,
    prompt_estimate,
)
from picompile.quantities import parse_bytes
from picompile.synth.shapes import find_shape
from picompile_codegen.lowering import slices
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower
from picompile_codegen.lowering.placement import Placement
from picompile_codegen.lowering.program import tensor_bytes
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline

TARGET = TARGETS["4090"]
GIB = 2**30


@pytest.fixture(scope="module")
def model() -> ModelBytes:
    config = find_shape("llama-13b").config
    return counting.shape_bytes("llama-13b", config, Packing("q8", "learned", 4096, chunk=512))


def plan_for(model: ModelBytes, gpu_bytes: int, host_bytes: int = 64 * GIB) -> Plan:
    import numpy as np

    layers = tuple(LayerFiring(np.full(layer.neurons, 0.1), np.arange(layer.neurons)) for layer in model.layers)
    machine = machine_of(TARGET, gpu_bytes, host_bytes, 50e9)
    return make_plan(model, Firing(layers, "a curve"), PlanOptions("4090", machine))


def test_both_sides_are_counted(model: ModelBytes) -> None:
    plan = plan_for(model, 8 * GIB)
    found = prompt_estimate(model, plan, TARGET, 1100, 512)
    layers = list(zip(plan.layers, model.layers, strict=True))
    assert {placed.attention for placed, _ in layers} == {"accelerator"}
    cold = sum((placed.neurons - placed.hot_neurons) * layer.neuron_bytes for placed, layer in layers)
    assert (found.chunks, found.copied_bytes) == (3, cold)
    assert found.copy_s == pytest.approx(3 * cold / (plan.machine.pcie_bytes_per_s * PCIE_EFFICIENCY))
    # The embedding and the head have 2 of 100 weights.
    flops = found.arithmetic_s * TARGET.tensor_flops_per_s * TENSOR_EFFICIENCY
    assert flops == pytest.approx(2 * model.parameters * 1100, rel=0.04)
    slower = max(found.copy_s, found.arithmetic_s) + found.cache_s
    assert slower < found.total_s < slower + found.copy_s / 8
    small, large = (prompt_estimate(model, plan, TARGET, 1024, chunk) for chunk in (64, 512))
    assert small.copy_s == pytest.approx(8 * large.copy_s) and small.arithmetic_s == large.arithmetic_s
    gain = gain_with_answer(plan, found)
    dense_s = found.dense_s + ANSWER_TOKENS / max(plan.baselines.values())
    assert gain == pytest.approx(dense_s / (found.total_s + ANSWER_TOKENS / plan.tokens_per_s))
    all_hot = prompt_estimate(model, plan_for(model, 40 * GIB), TARGET, 512, 512)
    assert (all_hot.copied_bytes, all_hot.copy_s, all_hot.dense_s) == (0, 0, all_hot.arithmetic_s)
    assert all_hot.total_s == all_hot.arithmetic_s


def test_what_cannot_be_said(model: ModelBytes) -> None:
    plan = plan_for(model, 8 * GIB)
    with pytest.raises(UsageError, match="5000 tokens are more than the context, 4096"):
        prompt_estimate(model, plan, TARGET, 5000, 512)
    with pytest.raises(UsageError, match="tensor cores of target 4090 is not known"):
        prompt_estimate(model, plan, replace(TARGET, tensor_flops_per_s=0.0), 500, 512)
    with pytest.raises(UsageError, match="prompts would be read on the host"):
        prompt_estimate(model, plan_for(model, 0), TARGET, 500, 512)


def test_stages_are_those_of_the_lowered_program(model: ModelBytes) -> None:
    layer = model.layers[0]
    for neurons in (1, 64, 1000, 5000, 9900, layer.neurons):
        parts = list(slices.slices_of(neurons, layer.neuron_bytes))
        assert sum(count for _, count in parts) == neurons
        assert [start for start, _ in parts] == [sum(count for _, count in parts[:i]) for i in range(len(parts))]
        assert min(count for _, count in parts) > 0.6 * max(count for _, count in parts)
        assert 2 * max(count for _, count in parts) * layer.neuron_bytes <= model.staging_bytes


@pytest.mark.slow("lowers models")
def test_what_comes_from_the_host_is_what_the_program_copies() -> None:
    """The bytes are the same, but for norms, which both sides have; some layers have parts on both sides."""
    captured = capture_config(config_of("llama-relu", 3))
    packing = Packing("q4", "exact", 40, 1, "f16", 16)
    model = counting.count_bytes("small", captured, packing)
    plan = plan_for(model, GIB)
    placed = [
        replace(plan.layers[0], attention="host", kv_cache="host", hot_neurons=0),
        replace(plan.layers[1], attention="accelerator", kv_cache="host", hot_neurons=64),
        replace(plan.layers[2], attention="host", kv_cache="host", hot_neurons=128),
    ]
    plan = replace(plan, layers=tuple(placed), memory=(MemoryRow("accelerator", "hot neurons", 1),))
    hot = {layer.layer: range(layer.hot_neurons) for layer in placed}
    passes = (*CANONICALIZE, InsertPredictors("exact"), Partition(hot), Quantize("q4"))
    placement = Placement(frozenset({1}), frozenset(), frozenset(), head=True)
    lowered = lower(Pipeline(passes)(captured).graph_module, LowerOptions(40, 16, "float16", 1, "cuda", placement))
    calls = [call for call in lowered.program.functions["prefill_last"] if call.op == "upload"]
    norm_bytes = 2 * model.hidden * 4
    assert prompt_estimate(model, plan, TARGET, 16, 16).copied_bytes - 2 * norm_bytes == sum(
        call.args[-1].shape[0] for call in calls if call.args[-1].shape is not None
    )
    # A layer's cache at a time, in memory that all layers take in turns.
    buffers = lowered.program.buffers
    borrowed = {name: buffers[name] for name in buffers if name.startswith("prefill_last.") and "borrowed" in name}
    assert len(borrowed) == 2 * 3
    of_layer = sum(tensor_bytes(each.dtype, each.shape) for each in borrowed.values()) // 3
    assert of_layer == model.lent_bytes
    assert 0 < 2 * buffers["staging.0"].shape[0] <= model.staging_bytes


def test_memory_is_kept_for_caches_that_are_lent(model: ModelBytes) -> None:
    """Nothing is lent where the GPU has all of them, or nothing at all."""
    for gpu_bytes, lends in ((40 * GIB, False), (0, False), (3 * GIB, True)):
        plan = plan_for(model, gpu_bytes)
        staging = {row.device: row.bytes for row in plan.memory if row.what == "staging"}
        caches = {layer.kv_cache for layer in plan.layers}
        assert ("host" in caches and bool(plan.taken_bytes("accelerator"))) == lends
        gpu = model.staging_bytes + (model.lent_bytes if lends else 0) if gpu_bytes else 0
        assert (staging.get("accelerator", 0), staging.get("host", 0)) == (gpu, model.lent_bytes if lends else 0)
    # For each chunk, what comes before it as well.
    of_position = (
        sum(layer.kv_cache == "host" for layer in plan.layers) * model.layers[0].kv_cache_bytes / model.context
    )
    found = prompt_estimate(model, plan, TARGET, 1100, 512)
    assert found.cache_bytes == round(of_position * (512 + 1024 + 2 * 1100))
    assert found.cache_s == pytest.approx(found.cache_bytes * found.copy_s / (3 * found.copied_bytes))


def test_a_gpu_too_small_for_copies_of_caches_is_left_out(model: ModelBytes) -> None:
    """It has room for some neurons, and none for what the host would lend it."""
    needed = (model.staging_bytes + model.workspace_bytes + model.table_bytes) / 0.95
    for share in (0.1, 0.5, 0.9):
        plan = plan_for(model, int(needed + share * model.lent_bytes))
        assert not plan.taken_bytes("accelerator")
        assert "staging" not in {row.what for row in plan.memory}
    small = plan_for(model, int(needed + 40 * model.lent_bytes))
    assert {layer.kv_cache for layer in small.layers} == {"host"} and small.taken_bytes("accelerator")


def test_a_host_that_can_hold_everything_needs_no_room_for_what_it_would_lend(model: ModelBytes) -> None:
    """Beside a GPU for fewer neurons than a copy of a cache takes of the host."""
    whole, needed = plan_for(model, 0).taken_bytes("host"), model.staging_bytes + model.workspace_bytes
    gpu_bytes = int((needed + model.table_bytes + 1.2 * model.lent_bytes) / 0.95)
    plan = plan_for(model, gpu_bytes, int((whole + 0.1 * model.lent_bytes) / 0.95))
    assert not plan.taken_bytes("accelerator") and plan.taken_bytes("host") == whole
    with pytest.raises(DoesNotFitError) as caught:
        plan_for(model, gpu_bytes, int((whole - 0.5 * model.lent_bytes) / 0.95))
    named = re.search(r"--host-memory ([\d.]+MiB)", str(caught.value))
    assert named is not None
    # Rounded up to a hundredth of a MiB.
    assert 0 < parse_bytes(named[1], "--host-memory") * 0.95 - whole < 0.02 * 2**20
