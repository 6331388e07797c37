"""GPTQ and AWQ: every layout against the formula in float64, exact repacking, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.quantized_files import Scheme, save_quantized
from helpers.small_models import small_config, small_model
from picompile.errors import UnsupportedModelError
from picompile.frontend.checkpoint import read_headers
from picompile.frontend.hf import open_checkpoint
from picompile.frontend.json_file import read_json_object
from picompile.frontend.quantized import QuantizedTensors, find_layout
from picompile_passes.formats import FORMATS
from picompile_passes.formats.packing import dequantize_rows

SCHEMES = {
    "gptq": Scheme(),
    "gptq-sym": Scheme(sym=True),
    "gptq-v2": Scheme(checkpoint_format="gptq_v2"),
    "gptq-8": Scheme(bits=8),
    "gptq-8-sym": Scheme(bits=8, sym=True),
    "gptq-order": Scheme(desc_act=True),
    "gptq-one-group": Scheme(group_size=-1),
    "gptq-large-groups": Scheme(group_size=128, scale_dtype=torch.bfloat16),
    "awq": Scheme("awq"),
    "awq-float32": Scheme("awq", group_size=64, scale_dtype=torch.float32),
}
REPACKED = {"gptq": ("q8",), "gptq-v2": ("q8",), "gptq-sym": ("q8", "q4"), "gptq-one-group": ("q8",), "awq": ("q8",)}
SHAPES = {"model.layers.0.mlp.up_proj": (40, 96), "lm_head": (64, 352)}


def opened(folder: Path) -> QuantizedTensors:
    layout = find_layout(read_json_object(folder / "config.json"))
    assert layout is not None
    return QuantizedTensors(layout, read_headers(folder))


@pytest.mark.parametrize("name", SCHEMES)
def test_every_layout(tmp_path: Path, name: str) -> None:
    scheme = SCHEMES[name]
    weights = save_quantized(tmp_path, scheme, SHAPES)
    tensors = opened(tmp_path)
    assert set(tensors.headers) == {*weights, "norm.weight"}
    assert tensors.headers["norm.weight"].dtype == "F16" and not tensors.is_quantized("norm.weight")
    for parameter, expected in weights.items():
        assert tensors.is_quantized(parameter)
        assert (tensors.headers[parameter].dtype, tensors.headers[parameter].shape) == ("F32", tuple(expected.shape))
        found = tensors.load(parameter)
        # A float16 has 11 bits and a difference of integers 9: together they fit into a float32.
        exact = scheme.scale_dtype != torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=0 if exact else 1e-7, atol=0)
        # Rows are repacked where that is exact.
        for form in ("q8", "q4", "f16"):
            packed = tensors.packed(parameter, form)
            assert (packed is not None) == (form in REPACKED.get(name, ())), form
            if packed is not None:
                outputs, inputs = expected.shape
                assert packed.shape == (outputs, FORMATS[form].row_bytes(inputs))
                assert torch.equal(dequantize_rows(packed, form, inputs), found)


def test_what_is_rounded_a_second_time(tmp_path: Path) -> None:
    for name, said in (("awq", "AWQ"), ("gptq-sym", None), ("gptq", "GPTQ")):
        save_quantized(tmp_path, SCHEMES[name], SHAPES)
        assert (opened(tmp_path).rounds_again("q4"), opened(tmp_path).rounds_again("q8")) == (said, None)


def test_zeros_of_zero_borrow_from_their_neighbours(tmp_path: Path) -> None:
    """GPTQModel subtracts 1 from each integer of a word at once, and adds it again."""
    weights = save_quantized(tmp_path, Scheme(checkpoint_format="gptq_v2"), {"up": (16, 32)})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["up.qzeros"][0, 0] &= ~0xF0
    save_file(tensors, file)
    expected = opened(tmp_path).load("up.weight")
    assert not torch.equal(expected.double(), weights["up.weight"])
    tensors["up.qzeros"] = (tensors["up.qzeros"].long() - 0x11111111).to(torch.int32)
    save_file(tensors, file)
    config = Scheme().config
    layout = find_layout({"quantization_config": config})
    assert layout is not None and layout.less_one
    assert torch.equal(QuantizedTensors(layout, read_headers(tmp_path)).load("up.weight"), expected)


def test_zero_biases_are_left_out_where_the_model_has_none(tmp_path: Path) -> None:
    save_quantized(tmp_path, Scheme(), {"up": (16, 32), "down": (32, 16)} | {"gate": (16, 32)})
    file = tmp_path / "model.safetensors"
    biases = {"up.bias": torch.zeros(16), "gate.bias": torch.zeros(16), "down.bias": torch.ones(32)}
    save_file(load_file(file) | biases, file)
    headers = opened(tmp_path).without_zero_biases({"gate.bias"})
    assert {name for name in headers if name.endswith("bias")} == {"gate.bias", "down.bias"}


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantized (bitsandbytes)"),
        ({"quant_method": "fp8"}, "quantized (fp8)"),
        ("int8", "quantized (int8)"),
        ({"bits": 4}, "quantized (unknown)"),
        ({"quant_method": "gptq", "bits": 3}, "quantized (gptq with 3 bits)"),
        ({"quant_method": "gptq", "bits": True}, "quantized (gptq with True bits)"),
        ({"quant_method": "awq", "bits": 8}, "quantized (awq with 8 bits)"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "groups of 0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "many"}, "groups of 'many'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq of version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "without zero_point"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq in the format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*down": {}}}, "dynamic bits"),
        ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "gptq with rotation 'hadamard'"),
        ({"quant_method": "gptq", "bits": 4, "adapter": {"name": "lora"}}, "gptq with adapter"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int64"}, "gptq with pack_dtype 'int64'"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv_fast"}, "awq in the format 'gemv_fast'"),
    ],
)
def test_other_methods_are_refused(quantization: Any, says: str) -> None:
    assert find_layout({}) is None and find_layout({"quantization_config": None}) is None
    with pytest.raises(UnsupportedModelError) as caught:
        find_layout({"quantization_config": quantization})
    assert says in str(caught.value) and "use the original, unquantized one" in str(caught.value)


def _without(part: str) -> Any:
    return lambda tensors: tensors.pop(f"up.{part}")


def _as(part: str, change: Any) -> Any:
    return lambda tensors: tensors.update({f"up.{part}": change(tensors[f"up.{part}"]).contiguous()})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without("scales"), "holds up.qweight, but no up.scales"),
        (_without("qzeros"), "holds up.qweight, but no up.qzeros"),
        (_as("qweight", lambda t: t.long()), "the integers of up are I64; I32 is read"),
        (_as("qweight", lambda t: t[:-1]), "up.g_idx is [96], but integers [11, 16] in groups of 32 need [88]"),
        (_as("qzeros", lambda t: t[:, :-1]), "up.qzeros is [3, 1], but integers [12, 16]"),
        (_as("scales", lambda t: t[:-1]), "up.scales is [2, 16]"),
        (_as("scales", lambda t: t.int()), "up.scales is I32"),
        (_as("scales", lambda t: t[0]), "up.scales is F16 [16]"),
        (_as("scales", lambda t: t / 0), "up.scales has NaN or infinite values"),
        (_as("g_idx", lambda t: t + 1), "up.g_idx names groups that there are not"),
        (_as("g_idx", lambda t: t - 1), "up.g_idx names groups that there are not"),
        (lambda tensors: tensors.update({"up.weight": torch.ones(16, 96)}), "two weights"),
    ],
)
def test_damaged_checkpoints(tmp_path: Path, change: Any, says: str) -> None:
    save_quantized(tmp_path, Scheme(), {"up": (16, 96)})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(UnsupportedModelError) as caught:
        opened(tmp_path).load("up.weight")
    assert says in str(caught.value) and "\n" not in str(caught.value)


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
    with pytest.raises(UnsupportedModelError, match=r"but config\.json has no quantization_config"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": Scheme().config}))
    with pytest.raises(UnsupportedModelError, match=r"c_proj\.weight is quantized, which is not read for"):
        open_checkpoint(tmp_path)


def test_tensors_and_files_that_are_not_there(tmp_path: Path) -> None:
    save_quantized(tmp_path, Scheme(desc_act=True), {"up": (16, 96)})
    tensors = opened(tmp_path)
    for name in ("norm.weight", "up.qweight", "nothing"):
        with pytest.raises(KeyError):
            tensors.load(name)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != "up.g_idx"}, file)
    with pytest.raises(UnsupportedModelError, match=r"no up\.g_idx, which desc_act in quantization_config asks for"):
        opened(tmp_path)
    file.write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"cannot read up\.qweight"):
        tensors.load("up.weight")
