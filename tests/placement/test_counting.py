"""Every byte is counted, and in the right place: against the packed tensors, and against artifacts on disk."""

import functools
import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.fx import GraphModule

from helpers.families import SQUARED, VARIANTS, config_of
from helpers.support import BUNDLED_MODEL, BuildOnce, compile_for_test
from picompile.artifact.files import weights_bytes
from picompile.choices import KV_DTYPES, QUANTIZATIONS
from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.hf import capture_config, load_model
from picompile.placement.counting import SPLIT_BYTES, count_bytes, shape_bytes
from picompile.placement.firing import estimate_rank, firing_of_curve
from picompile.placement.model_bytes import LayerBytes, LayerLaunches, ModelBytes, Packing
from picompile.predictors import LayerPredictor, Predictors
from picompile.synth import SHAPES, find_config
from picompile.synth.shapes import tensor_shapes
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import Lowered, lower
from picompile_codegen.lowering.program import tensor_bytes
from picompile_passes.base import Pass
from picompile_passes.passes.canonicalize import CANONICALIZE
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from picompile_passes.passes.quantize import Quantize
from picompile_passes.pipeline import Pipeline

PREDICTORS = ("exact", "none", "learned", "sign")

# Captures take a second and give the same every time.
capture_once = functools.cache(lambda text: capture_config(json.loads(text)))


@pytest.fixture(autouse=True, scope="module")
def _captured_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("picompile.frontend.hf.capture_config", lambda config: capture_once(json.dumps(config)))
        yield


def captured(config: Mapping[str, Any]) -> GraphModule:
    return capture_once(json.dumps(config))


def silent(config: Mapping[str, Any]) -> bool:
    """Whether its activation leaves neurons silent, as predictor `exact` needs."""
    known = [config.get(key) for key in ("hidden_act", "activation_function", "activation")]
    return any(name in ("relu", "fatrelu") for name in known)


def lowered(config: Mapping[str, Any], packing: Packing, insert: Pass, hot: Mapping[int, Any] | None = None) -> Lowered:
    """Return the program that compiling leads to, by the passes themselves."""
    passes = (*CANONICALIZE, insert, *([Partition(hot)] if hot is not None else []), Quantize(packing.quant))
    graph_module = Pipeline(passes)(captured(config)).graph_module
    kv_dtype = KV_DTYPES[packing.kv_dtype or "f16"]
    return lower(graph_module, LowerOptions(packing.context, packing.chunk, kv_dtype, packing.batch))


def learned(rank: int, layers: int) -> Predictors:
    """Predictors as a folder would have them."""
    of_layers = [LayerPredictor(layer, "learned", "block", rank) for layer in range(layers)]
    return Predictors(Path("given"), tuple(of_layers), {})


def all_bytes(counted: ModelBytes) -> int:
    apart = counted.embedding_bytes + counted.head_bytes + counted.table_bytes + counted.workspace_bytes
    return apart + sum(layer_bytes(layer) + layer.kv_cache_bytes for layer in counted.layers)


def layer_bytes(layer: LayerBytes) -> int:
    return layer.attention_bytes + layer.predictor_bytes + layer.neurons * layer.neuron_bytes + layer.shared_bytes


@pytest.mark.slow("packs a model per family; one gated and one plain are fast", but=("llama-relu", "opt-post-norm"))
@pytest.mark.parametrize("name", VARIANTS)
def test_counted_bytes_add_up_to_the_artifact(name: str) -> None:
    config = config_of(name, 2)
    for predictor in random.sample(PREDICTORS[0 if silent(config) else 1 :], 2):
        packing = Packing(random.choice(QUANTIZATIONS), predictor, random.randint(1, 200), kv_dtype="f16")
        given = learned(random.randint(1, 50), 2) if predictor == "learned" else None
        counted = count_bytes(name, captured(config), packing, given)
        of = lowered(config, packing, given.insert_pass() if given else InsertPredictors(predictor))
        packed = weights_bytes(list(of.weights.tensors.values()))
        assert all_bytes(counted) == packed + of.program.state_bytes + of.program.arena_bytes
        assert counted.predictor == predictor
        assert [layer.neurons for layer in counted.layers] == [part.neurons for part in of.program.ffn]
        assert all(layer.attention_bytes > 0 and layer.shared_bytes >= 0 for layer in counted.layers)


def test_a_layer_predicts_early_if_its_predictor_reads_the_layer_before() -> None:
    reads = ("block", "previous", "stream")
    given = Predictors(Path("given"), tuple(LayerPredictor(n, "learned", reads[n], 5) for n in range(3)), {})
    model = count_bytes("llama-relu", captured(config_of("llama-relu", 3)), Packing(context=64), given)
    assert [layer.predicts_early for layer in model.layers] == [False, True, False]
    assert not any(
        layer.predicts_early for layer in shape_bytes("x", config_of("llama-relu", 3), Packing(context=64)).layers
    )


@pytest.mark.slow("lowers a model per family; one gated and one plain are fast", but=("llama-relu", "opt-pre-norm"))
@pytest.mark.parametrize(
    "name", ["llama-relu", "opt-post-norm", "opt-pre-norm", "falcon-40b", "falcon-serial", "qwen2", *SQUARED]
)
def test_a_shape_has_the_bytes_of_its_model(name: str) -> None:
    """Their first layers differ: what is before and behind the layers is elsewhere in each."""
    config = config_of(name, random.choice((1, 3, 4)))
    predictor = random.choice(("auto", *PREDICTORS[1:]))
    packing = Packing(random.choice(QUANTIZATIONS), predictor, random.randint(1, 200), random.randint(1, 5))
    assert shape_bytes(name, config, packing) == count_bytes(name, captured(config), packing)


def test_bytes_of_a_gated_model() -> None:
    """A ReGLU model of 96 columns and 200 neurons in f16, by hand."""
    counted = shape_bytes("llama", config_of("llama-relu", 3), Packing("f16", "exact", 50))
    assert counted.layers == (counted.layers[0],) * 3
    assert counted.layers[0] == LayerBytes(
        attention_bytes=2 * 96 * (96 + 48 + 48 + 96) + 4 * (96 + 96),
        predictor_bytes=0,
        neurons=200,
        neuron_bytes=3 * 192,
        gating_bytes=192,
        shared_bytes=0,
        kv_cache_bytes=2 * 50 * 48 * 2,
        # Projections to q, k and v; that behind attention, with its addition and a norm; the other addition and norm.
        launches=LayerLaunches(3, 1, 0, 2),
    )
    assert counted.embedding_bytes == counted.head_bytes == 503 * 192
    # Cosines and sines of 50 · 12 angles, padded to 64 bytes, and the final norm.
    assert counted.table_bytes == 2 * 4 * 608 + 4 * 96
    assert (counted.tied, counted.hidden) == (False, 96)


def test_bytes_of_a_model_with_biases() -> None:
    counted = shape_bytes("opt", config_of("opt-pre-norm", 2), Packing("f16", "exact", 64))
    layer = counted.layers[1]
    assert (layer.neuron_bytes, layer.gating_bytes) == (2 * 640 + 4, 640 + 4)
    # The bias of down; 864 biases of up are a multiple of 64 bytes.
    assert layer.shared_bytes == 4 * 320
    assert layer.attention_bytes == 4 * (2 * 320 * 320 + 4 * 320) + 4 * 4 * 320
    # The table of positions; that of tokens is the head.
    assert (counted.embedding_bytes, counted.head_bytes, counted.tied) == (386 * 640, 503 * 640, True)


def test_bytes_of_predictors() -> None:
    config = config_of("llama-relu", 2)
    with_weights = count_bytes("llama", captured(config), Packing("f16", "none", 9), learned(64, 2)).layers[1]
    # 200 biases are padded to 208.
    assert with_weights.predictor_bytes == 2 * 64 * (96 + 200) + 4 * 208
    assert (with_weights.neuron_bytes, with_weights.gating_bytes, with_weights.number_bytes) == (3 * 192, 0, 4)
    packing = Packing("f16", "sign", 9, kv_dtype="f16")
    signs = shape_bytes("llama", config, packing).layers[0]
    of = lowered(config, packing, InsertPredictors("sign"))
    (rows, row_bytes) = next(tensor.shape for name, tensor in of.weights.tensors.items() if name.endswith(".signs"))
    assert (rows, row_bytes) == (200, signs.gating_bytes)
    assert (signs.neuron_bytes, signs.predictor_bytes, signs.number_bytes) == (3 * 192 + row_bytes, 0, 0)
    none = shape_bytes("llama", config, Packing("f16", "none", 9)).layers[0]
    assert none.gating_bytes == none.neuron_bytes == 3 * 192


def test_more_sequences_take_caches_and_activations() -> None:
    config = config_of("falcon-40b", 2)
    one, many = (shape_bytes("falcon", config, Packing("q4", "exact", 100, batch)) for batch in (1, 7))
    assert many.layers[0].kv_cache_bytes == 7 * one.layers[0].kv_cache_bytes
    assert many.layers[0].neuron_bytes == one.layers[0].neuron_bytes
    # At least the logits and the stream of six tokens more.
    assert many.workspace_bytes >= one.workspace_bytes + 6 * 4 * (503 + 320)
    assert all_bytes(many) - all_bytes(one) == 6 * 2 * one.layers[0].kv_cache_bytes + (
        many.workspace_bytes - one.workspace_bytes
    )


@pytest.mark.parametrize("batch", [2, 80])
def test_an_artifact_for_several_sequences_takes_no_more_than_is_counted(batch: int) -> None:
    """Exactly the caches; of the workspace it is an estimate."""
    config, packing = config_of("llama-relu", 2), Packing("q4", "exact", 100, batch)
    counted = count_bytes("llama", captured(config), packing)
    program = lowered(config, packing, InsertPredictors("exact")).program
    assert program.sequences == batch
    assert sum(layer.kv_cache_bytes for layer in counted.layers) == program.state_bytes
    assert program.arena_bytes <= counted.workspace_bytes < 3 * program.arena_bytes


def test_fatrelu_has_a_wide_cache() -> None:
    wide = shape_bytes("prosparse", config_of("prosparse", 2), Packing(context=10))
    assert wide.layers[0].kv_cache_bytes == 2 * 10 * 96 * 4
    narrow = shape_bytes("prosparse", config_of("prosparse", 2), Packing(context=10, kv_dtype="f16"))
    assert narrow.layers[0].kv_cache_bytes == 2 * 10 * 96 * 2


@pytest.mark.slow("draws and lowers ten models")
@settings(max_examples=10)
@given(data=st.data())
def test_parts_of_a_split_layer_take_no_more_than_counted(data: st.DataObject) -> None:
    config = config_of(data.draw(st.sampled_from(("llama-relu", "opt-post-norm", "falcon-serial", "bamboo"))), 2)
    predictor = data.draw(st.sampled_from(PREDICTORS))
    packing = Packing(data.draw(st.sampled_from(QUANTIZATIONS)), predictor, 16, kv_dtype="f16")
    given = learned(24, 2) if predictor == "learned" else None
    layer = count_bytes("model", captured(config), packing, given).layers[1]
    hot = data.draw(st.sets(st.integers(0, layer.neurons - 1)) | st.just(set(range(layer.neurons))))
    insert = given.insert_pass() if given else InsertPredictors(predictor)
    of = lowered(config, packing, insert, {1: sorted(hot)})
    parts = [part for part in of.program.ffn if part.layer == 1]
    found = part_bytes(of, 1)
    assert {part.part: part.neurons for part in parts}.get("hot", 0) == len(hot)
    assert sum(part.neurons for part in parts) == layer.neurons
    for part in parts:
        shared = layer.shared_bytes if part is parts[0] else 0
        least = part.neurons * layer.neuron_bytes
        assert least <= found[part.part] <= least + part.neurons * layer.number_bytes + shared + SPLIT_BYTES


def part_bytes(of: Lowered, layer: int) -> dict[str, int]:
    """Return the bytes that only the parts of a layer read, by part; a row-local predictor's bytes are its part's."""
    parameters = {kernel.name: kernel.params for kernel in of.kernels}
    parts = iter(of.program.ffn)
    sizes: dict[str, int] = {}
    waiting: set[str] = set()
    for call in of.program.functions["decode"]:
        for parameter, argument in zip(parameters[call.kernel], call.args, strict=True):
            own = call.op == "ffn" or parameter == "signs"
            if argument.space == "weight" and own:
                waiting.add(argument.name)
        if call.op == "ffn":
            part = next(parts)
            found = [of.weights.tensors[name] for name in waiting]
            if part.layer == layer:
                sizes[part.part] = sum(tensor_bytes(tensor.dtype, tensor.shape) for tensor in found)
            waiting.clear()
    return sizes


@pytest.mark.slow("compiles the bundled model")
def test_counted_bytes_are_those_of_an_artifact_on_disk(build_once: BuildOnce) -> None:
    # Plans are for GPUs, whose programs check no drafts.
    options = {"quant": "f16", "draft_tokens": 0}
    artifact = build_once("bundled-plan", lambda folder: compile_for_test(BUNDLED_MODEL, folder, **options))
    program = json.loads((artifact / "program.json").read_text())
    whole, packing = load_model(BUNDLED_MODEL), Packing("f16", "exact", program["context"])
    counted = count_bytes("bundled", whole.graph_module, packing)
    with safe_open(artifact / "weights.safetensors", "pt") as file:
        weights = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 (a handle is no mapping)
    caches = sum(tensor_bytes(tensor["dtype"], tuple(tensor["shape"])) for tensor in program["state"].values())
    assert all_bytes(counted) == weights + caches + program["arena_bytes"]
    assert counted.parameters == whole.facts.parameters
    assert counted == shape_bytes("bundled", json.loads((BUNDLED_MODEL / "config.json").read_text()), packing)


@pytest.mark.parametrize("name", ["opt-175b", "llama-70b"])
def test_large_shapes(name: str) -> None:
    shape = SHAPES[name]
    counted = shape_bytes(*find_config(name), Packing("f16", "learned", 2048), firing_of_curve("opt", 2, shape.ffn))
    assert counted.parameters == sum(map(math.prod, dict(tensor_shapes(shape)).values()))
    assert len(counted.layers) == shape.layers
    # Half of the bytes are parameters of predictors, whose biases are wider; at most 6 % of all.
    share = sum(layer.predictor_bytes for layer in counted.layers) / 2 / counted.parameters
    assert 0.055 < share < 0.06005


def test_estimated_ranks() -> None:
    layer = 3 * 4096 * 11008 + 4 * 4096 * 4096
    rank = estimate_rank(4096, 11008, layer)
    used = rank * (4096 + 11008) + 11008
    assert rank % 32 == 0
    assert used <= 0.06 * layer < used + 32 * (4096 + 11008)
    # Where many fire alike, training starts from more than the budget allows; with all of the model it does not.
    assert estimate_rank(4096, 11008, layer, firing_of_curve("30%", 1, 11008)) == rank
    free = [estimate_rank(4096, 11008, 1e12, firing_of_curve(curve, 1, 11008)) for curve in ("3%", "30%")]
    assert rank < free[0] < free[1] < 4096
    assert estimate_rank(8, 3, 1.0) == 1


@pytest.mark.parametrize("layers", [None, 0, -1, "2", True, 2.0, 10_000, 10**9])
def test_wrong_numbers_of_layers_are_refused(layers: object) -> None:
    with pytest.raises(UnsupportedModelError, match="num_hidden_layers must be a whole number above 0"):
        shape_bytes("odd", {**config_of("opt-pre-norm", 2), "num_hidden_layers": layers}, Packing(context=9))


@pytest.mark.parametrize(
    ("packing", "message"),
    [
        ({"quant": "q5"}, "unknown quantization 'q5'; known are f16, q8, q6, q4m, q4"),
        ({"predictor": "oracle"}, "unknown predictor 'oracle'; known are auto, exact"),
        ({"kv_dtype": "f8"}, "unknown KV cache type 'f8'"),
        ({"predictor_quant": "q5"}, "unknown quantization 'q5' of predictors; known are auto, f16, q8"),
        ({"context": 0}, "the context must be at least 1, not 0"),
        ({"batch": 0}, "the batch must be at least 1, not 0"),
        ({"chunk": 1}, "the chunk must be at least 2, not 1"),
        ({"context": 385}, "a context of 385 tokens is more than the model's 384 positions"),
    ],
)
def test_wrong_packings_are_refused(packing: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shape_bytes("llama", config_of("llama-relu", 2), Packing(**packing))


def test_a_context_that_kernels_cannot_count_is_refused() -> None:
    with pytest.raises(UsageError, match="no kernels can be made for a context of 2000000000 tokens"):
        count_bytes("llama", captured(config_of("llama-relu", 2)), Packing(context=2_000_000_000))
