"""The bytes and launches derived from the numbers of a config.json equal those of the captured and lowered graph."""

import functools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.families import SQUARED, VARIANTS, config_of
from picompile.choices import QUANTIZATIONS
from picompile.frontend.hf import capture_config
from picompile.placement.counting import lowered_shape_bytes, shape_bytes
from picompile.placement.derived_bytes import derive_bytes
from picompile.placement.firing import firing_of_curve
from picompile.placement.model_bytes import Packing
from picompile.placement.shape_outline import outline_of_config
from picompile.synth import find_config
from picompile_passes.dialect.activations import ACTIVATIONS, parse_activation
from picompile_passes.silence import SPARSE_ACTIVATIONS, silences_neurons

PREDICTORS = ("auto", "none", "learned", "learned-relu", "sign")

# Captures take a second and give the same every time.
capture_once = functools.cache(lambda text: capture_config(json.loads(text)))


@pytest.fixture(autouse=True, scope="module")
def _captured_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("picompile.frontend.hf.capture_config", lambda config: capture_once(json.dumps(config)))
        yield


def derived(config: dict[str, Any], packing: Packing, **more: Any) -> Any:
    """Return the bytes derived from the numbers alone, which must be known."""
    outline = outline_of_config(config)
    assert outline is not None
    return derive_bytes("model", outline, packing, **more)


def drawn_packing(quant: str, predictor: str) -> Packing:
    """A packing with the rest at random: contexts of one and of several parts, one sequence and more."""
    return Packing(
        quant,
        predictor,
        context=random.choice((1, 9, 40, 200, 384)),
        batch=random.choice((1, 1, 3, 70)),
        kv_dtype=random.choice((None, "f16", "f32", "q8")),
        chunk=random.choice((2, 16, 64)),
        predictor_quant=random.choice(("auto", *QUANTIZATIONS)),
    )


@pytest.mark.slow("lowers a model per family; one gated and one plain are fast", but=("llama-relu", "opt-pre-norm"))
@pytest.mark.parametrize("quant", QUANTIZATIONS)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in SQUARED])
def test_every_family_is_derived_as_it_is_lowered(name: str, quant: str) -> None:
    config = config_of(name, random.choice((2, 5)))
    packing = drawn_packing(quant, random.choice(PREDICTORS))
    assert derived(config, packing) == lowered_shape_bytes("model", config, packing)


@pytest.mark.parametrize("predictor", ["exact", *PREDICTORS])
def test_every_predictor_is_derived_as_it_is_lowered(predictor: str) -> None:
    for name in ("llama-relu", "opt-post-norm"):
        config, packing = config_of(name, random.choice((1, 3))), drawn_packing(random.choice(QUANTIZATIONS), predictor)
        firing = random.choice((None, firing_of_curve("10%", 3, 1000)))
        assert derived(config, packing, firing=firing) == lowered_shape_bytes("model", config, packing, firing)


@pytest.mark.parametrize("kv_dtype", ["f16", "f32", "q8"])
def test_many_query_heads_of_one_key_head_take_a_launch_more(kv_dtype: str) -> None:
    config = config_of("llama-relu", 2) | {"num_attention_heads": 12, "num_key_value_heads": 1, "head_dim": 24}
    packing = Packing("q4", "none", 300, kv_dtype=kv_dtype)
    found = derived(config, packing)
    assert found == lowered_shape_bytes("model", config, packing)
    # Attention itself, and the key that several blocks wait for.
    assert found.layers[0].launches.kv_cache == 2


@pytest.mark.slow("lowers a large model; another is fast", but=("opt-6.7b",))
# Of each form of layer one; all named shapes take minutes to lower.
@pytest.mark.parametrize("name", ["opt-6.7b", "falcon-7b"])
def test_named_shapes_are_derived_as_they_are_lowered(name: str) -> None:
    config = dict(find_config(name)[1])
    packing = Packing("q4", "learned", 1000, 3)
    firing = firing_of_curve("opt", 2, 1000)
    assert derived(config, packing, firing=firing) == lowered_shape_bytes("model", config, packing, firing)


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": None},
        {"tie_word_embeddings": None},
        {"head_dim": 23},
        {"num_key_value_heads": 3},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
        {"rms_norm_eps": None},
    ],
)
def test_configs_with_unknown_fields_have_no_outline(change: dict[str, Any]) -> None:
    assert outline_of_config(config_of("llama-relu", 2) | change) is None


def test_models_whose_bytes_only_lowering_knows() -> None:
    relu, silu = (outline_of_config(config_of(name, 2)) for name in ("llama-relu", "qwen2"))
    assert relu is not None and silu is not None
    assert derive_bytes("model", silu, Packing(predictor="exact")) is None
    # More elements than kernels can count.
    assert derive_bytes("model", relu, Packing(context=2_000_000_000)) is None


def test_a_plan_of_a_shape_needs_no_torch() -> None:
    """It would take seconds to import."""
    options = "--shape opt-175b --firing opt --target 4090 --host-memory 512GiB"
    code = f"""
import sys
from picompile.cli import main
assert main("plan {options}".split()) == 0
print([name for name in ("torch", "transformers", "tvm") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_sparse_activations_are_those_of_the_dialect() -> None:
    assert tuple(name for name, activation in ACTIVATIONS.items() if activation.sparse) == SPARSE_ACTIVATIONS
    for text in (*ACTIVATIONS, "fatrelu(0.05)"):
        assert silences_neurons(text) == parse_activation(text).sparse


def test_shape_bytes_are_the_same_derived_and_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    config, packing = config_of("llama-relu", 2), Packing(context=9)
    known = shape_bytes("model", config, packing)
    monkeypatch.setattr("picompile.placement.counting.derive_bytes", lambda *given: None)
    assert shape_bytes("model", config, packing) == known
