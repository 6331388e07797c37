"""Tensors besides the decoder, and biases that are not there: as transformers loads them, and never in silence."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.canonical import canonicalize
from helpers.reference import eager_logits
from helpers.small_models import small_config, small_model
from picompile import UnsupportedModelError, UsageError
from picompile.frontend.hf import load_model, open_checkpoint
from picompile_passes.graph.materialize import materialize

_FILE = "model.safetensors"
_LAYER = "model.layers.0"


def _saved(folder: Path, more: Mapping[str, Tensor], model_type: str = "llama", **options: object) -> Path:
    """Save a small model with tensors too many. They are of names alone: their shapes do not matter."""
    small_model(small_config(model_type, **options)).save_pretrained(folder)
    save_file(load_file(folder / _FILE) | dict(more), folder / _FILE)
    return folder


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["v_head.summary.weight", "v_head.summary.bias"], "a value or classification head"),
        (["score.weight"], "a value or classification head"),
        ([f"{_LAYER}.self_attn.{side}_scale" for side in "kvq"], "scales of a quantized KV cache"),
        ([f"{_LAYER}.self_attn.k_proj.k_scale"], "scales of a quantized KV cache"),
        (["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"], "guess further tokens"),
        (["model.mtp_layers.0.input_proj.weight"], "guess further tokens"),
        # A whole layer behind the last one, which has parts of its own.
        (["model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight"], "guess further tokens"),
        (["medusa_heads.0.0.linear.weight"], "guess further tokens"),
    ],
)
def test_other_parts_are_left_out_in_one_line(names: list[str], said: str, tmp_path: Path) -> None:
    opened = open_checkpoint(_saved(tmp_path, {name: torch.ones(2) for name in names}))
    assert not set(names) & set(opened.weights.names())
    (line,) = opened.warnings
    assert said in line and any(name in line for name in names) and "\n" not in line
    assert (f"and {len(names) - 1} more" in line) == (len(names) > 1)


def test_layers_that_the_config_declares_as_further_ones(tmp_path: Path) -> None:
    more = {"model.layers.2.mlp.up_proj.weight": torch.ones(2)}
    with pytest.raises(UnsupportedModelError, match="no place for"):
        open_checkpoint(_saved(tmp_path, more))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert any("guess further tokens" in line for line in open_checkpoint(tmp_path).warnings)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{_LAYER}.self_attn.q_norm.weight", "holds .*q_norm.* no place for"),
        (f"{_LAYER}.self_attn.q_proj.bias", "holds .*q_proj.bias, .* no place for"),
        (f"{_LAYER}.mlp.up_proj.weight_scale", "holds .*weight_scale"),
        ("lm_head.bias", "holds lm_head.bias"),
        ("vision_tower.patch.weight", "holds vision_tower"),
        (f"{_LAYER}.self_attn.q_proj.lora_A.weight", "an adapter .*merge"),
    ],
)
def test_everything_else_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(_saved(tmp_path, {name: torch.ones(2)}))


def test_an_adapter_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "peft_type": "LORA"}')
    with pytest.raises(UnsupportedModelError, match=r"an adapter \(LoRA\) of org/base; merge it"):
        open_checkpoint(tmp_path)
    # What a merge leaves behind beside the model itself.
    assert not open_checkpoint(_saved(tmp_path, {})).warnings
    # transformers would put it on the model.
    save_file({"x": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UnsupportedModelError, match="an adapter"):
        open_checkpoint(tmp_path)


def test_a_folder_of_folders_names_those_with_a_model(tmp_path: Path) -> None:
    _saved(tmp_path / "text_encoder", {})
    with pytest.raises(UsageError, match=r"no config.json in it; .*; text_encoder in it has one"):
        open_checkpoint(tmp_path)


def _without(folder: Path, *parts: str) -> None:
    tensors = {name: each for name, each in load_file(folder / _FILE).items() if not any(p in name for p in parts)}
    save_file(tensors, folder / _FILE)


def test_biases_of_queries_keys_and_values_alone(tmp_path: Path) -> None:
    """As checkpoints have them that were Qwen2's and are Llama's now: the output has none, which is zero."""
    _without(_saved(tmp_path, {}, attention_bias=True), "o_proj.bias")
    opened = open_checkpoint(tmp_path)
    assert opened.warnings == (
        f"{tmp_path.name}: has no {_LAYER}.self_attn.o_proj.bias and 1 more, which config.json asks for: "
        "these biases are zero",
    )
    bias = f"{_LAYER}.self_attn.o_proj.bias"
    assert bias in set(opened.weights.names())
    assert torch.equal(opened.weights.load(bias), torch.zeros(opened.weights.shape(bias)))
    assert opened.weights.packed(bias, "q8") is None


@pytest.mark.slow("captures a model")
def test_missing_biases_are_zeros_to_transformers_too(tmp_path: Path) -> None:
    _without(_saved(tmp_path, {}, attention_bias=True), "o_proj.bias")
    captured, ids = load_model(tmp_path), [3, 1, 4, 1, 5, 92, 6]
    graph = materialize(canonicalize(captured.graph_module), captured.weights)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(graph(torch.tensor(ids), torch.arange(len(ids))), eager_logits(eager, ids))


@pytest.mark.parametrize("missing", [("layers.0.self_attn.o_proj.bias",), ("_proj.bias",)], ids=["one layer", "all"])
def test_biases_that_are_missing_otherwise(missing: tuple[str, ...], tmp_path: Path) -> None:
    _without(_saved(tmp_path, {}, attention_bias=True), *missing)
    with pytest.raises(UnsupportedModelError, match=r"no tensor .*_proj\.bias, which config.json asks for"):
        open_checkpoint(tmp_path)
