"""Which quantized checkpoints are read: methods by name, variants that are refused, and whole models."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.fx import Graph, GraphModule

import picompile_runtime
from helpers.quantized_files import Maker, Scheme, save_quantized
from helpers.quantized_numbers import KINDS
from helpers.reference import eager_logits, relative_error, rounded
from helpers.small_models import small_config, small_model
from helpers.support import ROOT, save_tiny_llama
from picompile.compile import compile_model
from picompile.compile.weights import warn_of_rounding
from picompile.config import CompileOptions
from picompile.errors import UnsupportedModelError
from picompile.frontend.captured import Captured
from picompile.frontend.hf import open_checkpoint
from picompile.frontend.stored import find_method
from picompile.frontend.stored.matrices import METHODS
from picompile.progress import NoProgress

_PACKED = KINDS["packed-4"].config


def _weights(**changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", **changes}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"quant_method": "hqq"}, "quantized (hqq)"),
        ({"quant_method": "torchao"}, "quantized (torchao)"),
        ("int8", "quantized (int8)"),
        ({"bits": 4}, "quantized (unknown)"),
        ({"quant_method": "gptq", "bits": 5}, "quantized (gptq with 5 bits)"),
        ({"quant_method": "gptq", "bits": True}, "quantized (gptq with True bits)"),
        ({"quant_method": "awq", "bits": 8}, "quantized (awq with 8 bits)"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "groups of 0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 33}, "groups of 33"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "many"}, "groups of 'many'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq of version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "version": "exllama"}, "awq of version 'exllama'"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "awq of the backend 'llm-awq'"),
        ({"quant_method": "auto-round", "bits": 4, "super_bits": 6}, "auto-round with super_bits 6"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "without zero_point"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq in the format 'marlin'"),
        ({"quant_method": "gptq", "bits": 3, "checkpoint_format": "gptq_p"}, "gptq in the format 'gptq_p'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "gptq in the format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down": {"bits": 6}}}, "gptq with 6 bits"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": ["down"]}, "gptq with dynamic ['down']"),
        ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "gptq with rotation 'hadamard'"),
        ({"quant_method": "gptq", "bits": 4, "adapter": {"name": "lora"}}, "gptq with adapter"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int64"}, "gptq with pack_dtype 'int64'"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv_fast"}, "awq in the format 'gemv_fast'"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:llm_compressor"}, "in the format"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "auto-round with data_type 'mx_fp'"),
        ({"quant_method": "auto-round", "bits": 4, "act_bits": 8}, "auto-round with act_bits 8"),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"a": 3}}, "auto-round with an override 3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "fp8 with weight_block_size [128]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "fp8 with blocks of 0"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt with quant_algo 'NVFP4'"),
        ({**_PACKED, "format": "marlin-24"}, "compressed-tensors in the format 'marlin-24'"),
        ({**_PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "compressed-tensors with sparsity_config"),
        ({**_PACKED, "transform_config": {"config_groups": {"u": {}}}}, "compressed-tensors with transform_config"),
        ({**_PACKED, "config_groups": {"group_0": []}}, "compressed-tensors with config_groups"),
        (_weights(num_bits=16), "compressed-tensors with 16 bits"),
        (_weights(group_size="all"), "compressed-tensors with groups of 'all'"),
        (_weights(strategy="token"), "compressed-tensors with the strategy 'token'"),
        (_weights(strategy="block"), "compressed-tensors with block_structure None"),
    ],
)
def test_other_methods_are_refused(quantization: Any, says: str) -> None:
    assert find_method({}) is None and find_method({"quantization_config": None}) is None
    with pytest.raises(UnsupportedModelError) as caught:
        find_method({"quantization_config": quantization})
    assert says in str(caught.value) and "use the original, unquantized one" in str(caught.value)
    assert all(method.summary in str(caught.value) for method in METHODS)


def test_the_documentation_names_all_methods() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    table = page[page.index("### Quantized checkpoints") : page.index("## targets, doctor")]
    named = re.findall(r"^\| `([^|]+)` \|", table, flags=re.MULTILINE)
    assert sorted(name for row in named for name in row.split("`, `")) == sorted(n for m in METHODS for n in m.names)


def test_matrices_whose_rows_are_inputs_are_refused(tmp_path: Path) -> None:
    """GPT-2's are; a square one would pass for its transpose."""
    model = small_model(small_config("gpt2"))
    width, name = model.config.n_embd, "transformer.h.0.attn.c_proj"
    model.save_pretrained(tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    weight = tensors.pop(f"{name}.weight")
    (tmp_path / "other").mkdir()
    save_quantized(tmp_path / "other", Scheme(), {name: (width, width)})
    parts = load_file(tmp_path / "other" / "model.safetensors")
    tensors |= {key: part for key, part in parts.items() if key.startswith(name)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert weight.shape == (width, width)
    with pytest.raises(UnsupportedModelError, match=r"c_proj\.\w+, a part of a quantized matrix, but neither"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": Scheme().config}))
    with pytest.raises(UnsupportedModelError, match=r"c_proj\.weight is quantized, which is not read for"):
        open_checkpoint(tmp_path)


def save_quantized_model(folder: Path, make: Maker, config: Any) -> Any:
    """Save a Llama whose linears, but for the head, are random quantized matrices; return it with their values."""
    from transformers import AutoModelForCausalLM

    save_tiny_llama(folder, intermediate_size=192, num_key_value_heads=4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tensors = load_file(folder / "model.safetensors")
    for seed, name in enumerate([name for name in tensors if "_proj.weight" in name]):
        tensors.pop(name)
        parts, weight = make(*model.get_parameter(name).shape, seed)
        model.get_parameter(name).data = weight.float()
        tensors |= {f"{name.removesuffix('.weight')}.{part}": value.contiguous() for part, value in parts.items()}
    # The head's and embeddings' values are as a compiled model has them.
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name] = tensors[name].half()
        model.get_parameter(name).data = tensors[name].float()
    save_file(tensors, folder / "model.safetensors")
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "quantization_config": config}))
    return model


_MODELS = {
    "gptq": (Scheme().make, Scheme().config),
    "gptq-v2-labelled-v1": (Scheme(sym=True, less_one=False).make, Scheme(sym=True).config),
    "gptq-3": (Scheme(bits=3).make, Scheme(bits=3).config),
    "awq": (Scheme("awq").make, Scheme("awq").config),
    **{name: (KINDS[name].make, KINDS[name].config) for name in ("fp8-blocks", "packed-4-zeros", "nvfp4", "nf4")},
}


@pytest.mark.parametrize("name", ["gptq-v2-labelled-v1", "nf4"])
def test_the_weights_of_a_model(tmp_path: Path, name: str) -> None:
    model = save_quantized_model(tmp_path, *_MODELS[name])
    checkpoint = open_checkpoint(tmp_path)
    assert bool(checkpoint.warnings) == (name == "gptq-v2-labelled-v1")
    for parameter, expected in model.named_parameters():
        assert torch.equal(checkpoint.weights.load(parameter).float(), expected), parameter


def test_the_loss_of_a_second_rounding_is_said(tmp_path: Path) -> None:
    """Where down projections have a row for each neuron in an artifact, they are rounded where others are not."""
    said: list[str] = []

    class Listening(NoProgress):
        def say(self, text: str) -> None:
            said.append(text)

    model = save_quantized_model(tmp_path, *_MODELS["awq"])
    checkpoint = open_checkpoint(tmp_path)
    captured = Captured(GraphModule(torch.nn.Module(), Graph()), checkpoint.weights, checkpoint.facts)
    for quant in ("q4", "q4m", "f16"):
        warn_of_rounding(captured, quant, Listening(), by_neurons=True)
    before = len(said)
    warn_of_rounding(captured, "q4m", Listening(), by_neurons=False)
    assert len(said) == before
    losses = [float(re.findall(r"squared error of ([\d.e-]+)", line)[0]) for line in said]
    assert [line.split(", which")[0] for line in said] == [
        "most weights of the model are AWQ",
        "down projections of the model are AWQ",
    ]
    projections = {name: weight.detach() for name, weight in model.named_parameters() if "_proj" in name}
    down = [weight.T for name, weight in projections.items() if "down_proj" in name]
    for loss, matrices, quant in ((losses[0], list(projections.values()), "q4"), (losses[1], down, "q4m")):
        error = sum(float((rounded(weight, quant) - weight).square().sum()) for weight in matrices)
        assert loss == pytest.approx(error / sum(float(weight.square().sum()) for weight in matrices), rel=0.25)


# The format that keeps the numbers of each, where one does.
_KEPT = {"gptq": "q4m", "gptq-v2-labelled-v1": "q4", "gptq-3": "q4", "awq": "q4m", "packed-4-zeros": "q4m"}
_KEPT |= {"packed-8": "q8", "nvfp4": "nvfp4", "fp8-blocks": "fp8", "nf4-nested": "nf4"}


@pytest.mark.slow("compiles a model")
@pytest.mark.parametrize("name", _KEPT)
def test_numbers_are_kept_without_an_option(tmp_path: Path, name: str) -> None:
    """But for activations, of 16 bits, the compiled model is the checkpoint."""
    kept_as = _MODELS.get(name) or (KINDS[name].make, KINDS[name].config)
    model = save_quantized_model(tmp_path / "model", *kept_as)
    compile_model(tmp_path / "model", tmp_path / "artifact", CompileOptions(context=64, predictor="none"))
    report = json.loads((tmp_path / "artifact" / "report.json").read_text())
    kept = Counter(report["weight_formats"].values())
    assert kept[_KEPT[name]] == 2 * 7, kept
    ids = [3, 5, 7, 11, 13, 17, 19]
    with picompile_runtime.load(tmp_path / "artifact", threads=1) as engine:
        found = torch.from_numpy(engine.prefill(ids).copy())
    assert relative_error(found, eager_logits(model, ids)[-1].view_as(found)) < 2.5e-3


@pytest.mark.slow("compiles a model")
@pytest.mark.parametrize("name", ["packed-4-order", "int-zeros", "fp4"])
def test_what_has_no_format_is_in_q8(tmp_path: Path, name: str) -> None:
    """A checkpoint of which no matrix can be kept is not rounded to 4 bits."""
    save_quantized_model(tmp_path / "model", KINDS[name].make, KINDS[name].config)
    compile_model(tmp_path / "model", tmp_path / "artifact", CompileOptions(context=64, predictor="none"))
    report = json.loads((tmp_path / "artifact" / "report.json").read_text())
    assert Counter(report["weight_formats"].values()) == {"q8": 2 * 7, "f16": 2}
    assert report["rounding"]["method"] == "stored"


@pytest.mark.slow("compiles a model")
@pytest.mark.parametrize("name", _MODELS)
def test_a_compiled_model_gives_the_tokens_of_its_values(tmp_path: Path, name: str) -> None:
    """Values are numbers of float16, so that nothing is rounded."""
    model = save_quantized_model(tmp_path / "model", *_MODELS[name])
    compile_model(tmp_path / "model", tmp_path / "artifact", CompileOptions(quant="f16", context=64, predictor="exact"))
    ids = [3, 5, 7]
    with picompile_runtime.load(tmp_path / "artifact", threads=1) as engine:
        logits = [torch.from_numpy(engine.prefill(ids).copy())]
        while len(logits) < 20:
            ids.append(int(logits[-1].argmax()))
            logits.append(torch.from_numpy(engine.decode(ids[-1]).copy()))
    expected = eager_logits(model, ids)[2:]
    assert relative_error(torch.stack(logits).view_as(expected), expected) < 5e-3
    # Equal tokens, but for ties.
    best, taken = (
        expected.max(dim=1).values,
        expected.gather(1, torch.stack(logits).view_as(expected).argmax(1, keepdim=True)),
    )
    assert float((best - taken.squeeze(1)).max()) < 5e-3 * float(expected.abs().max())
