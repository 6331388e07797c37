"""Every byte is counted, and in the right place: against packed tensors, and from a config.json alone."""

import functools
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule

from helpers.families import SQUARED, VARIANTS, config_of
from picompile.artifact.files import weights_bytes
from picompile.choices import KV_DTYPES, QUANTIZATIONS
from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.hf import capture_config
from picompile.placement.counting import count_bytes, graph_bytes, shape_bytes
from picompile.placement.firing import estimate_rank, firing_of_curve
from picompile.placement.model_bytes import SPLIT_BYTES, LayerBytes, LayerLaunches, ModelBytes, Packing
from picompile.predictors.store import LayerPredictor, Predictors, block_shapes
from picompile.synth.shapes import SHAPES, find_config, plain_shape, tensor_shapes
from picompile.testing import GraphShape, build
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
    """Return the program that compiling for an accelerator leads to, by the passes themselves: weights lie in rows."""
    canonical = Pipeline(CANONICALIZE)(captured(config)).graph_module
    if hot is None:
        hot = {layer: range(block.neurons) for layer, block in block_shapes(canonical).items()}
    graph_module = Pipeline((insert, Partition(hot), Quantize(packing.quant)))(canonical).graph_module
    kv_dtype = KV_DTYPES[packing.kv_dtype or "f16"]
    return lower(graph_module, LowerOptions(packing.context, packing.chunk, kv_dtype, packing.sequences, panels=False))


def learned(rank: int, layers: int) -> Predictors:
    """Predictors as a folder would have them."""
    of_layers = [LayerPredictor(layer, "learned", "block", rank) for layer in range(layers)]
    return Predictors(Path("given"), tuple(of_layers), {})


def all_bytes(counted: ModelBytes) -> int:
    apart = counted.embedding_bytes + counted.head_bytes + counted.table_bytes + counted.workspace_bytes
    return apart + sum(layer_bytes(layer) + layer.kv_cache_bytes for layer in counted.layers)


def layer_bytes(layer: LayerBytes) -> int:
    return layer.attention_bytes + layer.predictor_bytes + layer.neurons * layer.neuron_bytes + layer.shared_bytes


@pytest.mark.slow("packs a model per family; one plain one is fast", but=("opt-post-norm",))
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


@pytest.mark.slow("lowers a model per family; one is fast", but=("llama-relu",))
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


@pytest.mark.parametrize("sequences", [2, 80])
def test_an_artifact_for_several_sequences_takes_no_more_than_is_counted(sequences: int) -> None:
    """Exactly the caches; of the workspace it is an estimate."""
    config, packing = config_of("llama-relu", 2), Packing("q4", "exact", 100, sequences)
    counted = count_bytes("llama", captured(config), packing)
    program = lowered(config, packing, InsertPredictors("exact")).program
    assert program.sequences == sequences
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


@pytest.mark.parametrize("name", ["opt-175b", "llama-70b"])
def test_large_shapes(name: str) -> None:
    shape = SHAPES[name]
    counted = shape_bytes(*find_config(name), Packing("f16", "learned", 2048), firing_of_curve("opt", 2, shape.ffn))
    assert counted.parameters == sum(map(math.prod, dict(tensor_shapes(shape)).values()))
    assert len(counted.layers) == shape.layers
    # Half of the bytes are parameters of predictors, whose biases are wider; at most 6 % of all.
    share = sum(layer.predictor_bytes for layer in counted.layers) / 2 / counted.parameters
    assert 0.055 < share < 0.06005


def test_a_gate_with_limits_is_read_in_full() -> None:
    """Up and down of a neuron are read if its gate is above its limit; each limit is a float32 beside its rows."""
    # Vectors of 80 float32 are whole cache lines, to which tensors are padded.
    shape, row_bytes = GraphShape(hidden=24, heads=3, ffn=80, layers=1, activation="silu"), 64

    def layer_with(**limits: tuple[int, ...]) -> LayerBytes:
        insert = InsertPredictors("none", **limits)
        (layer,) = graph_bytes("limited", build(shape), Packing("f16", "none", context=64), insert).layers
        return layer

    for limits, gating_bytes in (
        ({}, 3 * row_bytes),
        ({"output_limits": (0,)}, 3 * row_bytes + 4),
        ({"gate_limits": (0,)}, row_bytes + 4),
        ({"gate_limits": (0,), "output_limits": (0,)}, row_bytes + 4),
    ):
        layer = layer_with(**limits)
        assert layer.neuron_bytes == 3 * row_bytes + 4 * len(limits)
        assert layer.gating_bytes == gating_bytes
        assert layer.shared_bytes == layer_with().shared_bytes


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


@pytest.mark.parametrize(
    ("packing", "culprit"),
    [
        ({"quant": "q9"}, "'q9'; known are f16, q8, q6, q4m, q4, mxfp4$"),
        ({"quant": "q4_k"}, "unknown quantization 'q4_k'"),
        ({"predictor": "oracle"}, "oracle"),
        ({"kv_dtype": "f8"}, "f8"),
        ({"predictor_quant": "q5"}, "unknown quantization 'q5' of predictors"),
        ({"context": 0}, "context"),
        ({"sequences": 0}, "sequences"),
        ({"chunk": 1}, "chunk"),
        ({"context": 385}, "385 .* 384 positions"),
    ],
)
def test_wrong_packings_are_refused(packing: dict[str, Any], culprit: str) -> None:
    with pytest.raises(UsageError, match=culprit):
        shape_bytes("llama", config_of("llama-relu", 2), Packing(**packing))


def test_models_without_layers_and_contexts_that_kernels_cannot_count_are_refused() -> None:
    for layers in (None, 0, -1, "2", True, 2.0, 10_000, 10**9):
        with pytest.raises(UnsupportedModelError, match="num_hidden_layers must be a whole number above 0"):
            shape_bytes("odd", {**config_of("opt-pre-norm", 2), "num_hidden_layers": layers}, Packing(context=9))
    with pytest.raises(UsageError, match="no kernels can be made for a context of 2000000000 tokens"):
        count_bytes("llama", captured(config_of("llama-relu", 2)), Packing(context=2_000_000_000))


def drawn_packing(predictor: str) -> Packing:
    """A packing with the rest at random: contexts of one and of several parts, one sequence and more."""
    return Packing(
        random.choice(QUANTIZATIONS),
        predictor,
        context=random.choice((1, 9, 40, 200, 384)),
        sequences=random.choice((1, 1, 3, 70)),
        kv_dtype=random.choice((None, "f16", "f32", "q8")),
        chunk=random.choice((2, 16, 64)),
        predictor_quant=random.choice(("auto", *QUANTIZATIONS)),
    )


# A form of layer each: gated, two norms of one residual stream, plain, gated on both sides.
PLAIN = {
    "tiny-reglu": {},
    "tiny-falcon": {},
    "tiny-opt": {},
    "tiny-drelu": {},
    "falcon-new": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "silu": {"hidden_act": "silu", "tie_word_embeddings": True, "num_key_value_heads": None, "rope_scaling": None},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


@pytest.mark.slow("captures a model per form; one is fast", but=("tiny-reglu",))
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_config_has_the_bytes_of_the_captured_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"falcon-new": "tiny-falcon", "silu": "tiny-reglu", "biases": "tiny-reglu"}.get(name, name)
    config = {**find_config(base)[1], **PLAIN[name], "num_hidden_layers": 5}
    predictors = PREDICTORS[0 if name != "silu" else 1 :]
    packings = [drawn_packing(predictor) for predictor in random.sample(predictors, 2)]
    firing = random.choice((None, firing_of_curve("10%", 3, 1000)))
    assert plain_shape(name, config) is not None
    found = [shape_bytes(name, config, packing, firing) for packing in packings]
    monkeypatch.setattr("picompile.placement.counting.plain_shape", lambda *given: None)
    assert found == [shape_bytes(name, config, packing, firing) for packing in packings]


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 23},
        {"num_key_value_heads": 3},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
        {"hidden_act": "snake"},
    ],
)
def test_other_configs_are_captured(change: dict[str, Any]) -> None:
    plain = find_config("tiny-reglu")[1]
    assert plain_shape("plain", plain) is not None
    assert plain_shape("other", {**plain, **change}) is None


def test_many_query_heads_of_one_key_head_take_a_launch_more() -> None:
    config = config_of("llama-relu", 2) | {"num_attention_heads": 12, "num_key_value_heads": 1, "head_dim": 24}
    packing = Packing("q4", "none", 300, kv_dtype=random.choice(("f16", "f32", "q8")))
    # Attention itself, and the key that several blocks wait for.
    assert shape_bytes("model", config, packing).layers[0].launches.kv_cache == 2


@pytest.mark.slow("plans in a process of its own, which imports torch")
def test_a_plan_of_a_named_shape_starts_no_transformers() -> None:
    """It would take two seconds to import. A machine needs neither PyTorch nor the solver."""
    options = "--shape opt-175b --firing opt --target 4090 --host-memory 512GiB"
    code = f"""
import sys
from picompile.cli import main
from picompile.placement.machine import machine_of
assert not {{"highspy", "torch"}} & set(sys.modules)
assert main("plan {options}".split()) == 0
print("transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
