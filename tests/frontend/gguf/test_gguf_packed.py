"""Blocks of GGML's types: unpacked as the `gguf` package does, and repacked as ours with the same numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize

from helpers.gguf_files import POWERINFER_EXAMPLES, save_example
from helpers.products import sampled
from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf import blocks
from picompile.frontend.gguf.blocks import UNPACKED, row_bytes, unpack
from picompile.frontend.gguf.model import GgufModel, open_gguf
from picompile.frontend.gguf.weights import GgufWeights
from picompile_passes.formats import FORMATS
from picompile_passes.formats.packing import dequantize_rows

TYPE_OF = {"q8": "Q8_0", "q4": "Q4_0", "f16": "F16"}


@pytest.mark.parametrize("type_name", sorted(UNPACKED))
def test_unpacking_random_blocks(type_name: str) -> None:
    rows, columns = 37, 512
    data = np.random.default_rng(3).integers(0, 256, (rows, row_bytes(type_name, columns)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantize(data, GGMLQuantizationType[type_name])
    np.testing.assert_array_equal(unpack(data, type_name, columns).numpy(), expected)


def test_unpacking_takes_many_rows_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(4).integers(0, 100, (100, row_bytes("Q4_K", 256)), dtype=np.uint8)
    whole = unpack(data, "Q4_K", 256)
    monkeypatch.setattr(blocks, "_STEP_ELEMENTS", 256 * 7)
    assert torch.equal(unpack(data, "Q4_K", 256), whole)


def check_packed(opened: GgufModel, name: str, format_name: str, transposed: bool) -> None:
    expected = opened.load(name)
    expected = expected.T if transposed else expected
    rows, columns = expected.shape
    packed = opened.packed(name, format_name, transposed)
    assert packed is not None
    assert packed.shape == (rows, FORMATS[format_name].row_bytes(columns)) and packed.dtype == torch.uint8
    assert torch.equal(dequantize_rows(packed, format_name, columns), expected.float())
    used = FORMATS[format_name].scale_offset_bytes(columns) + columns // 32 * FORMATS[format_name].scale_bytes
    assert not packed[:, used:].any()


@pytest.mark.parametrize("format_name", TYPE_OF)
def test_rows_are_repacked_bit_for_bit(tmp_path: Path, format_name: str) -> None:
    opened = open_gguf(save_example(tmp_path, "llama", TYPE_OF[format_name]))
    for name, tensor in opened.tensors.items():
        if len(tensor.shape) == 1:
            assert opened.packed(name, format_name) is None
            continue
        check_packed(opened, name, format_name, transposed=False)
        for other in set(TYPE_OF) - {format_name}:
            assert opened.packed(name, other) is None
        if format_name == "f16":
            check_packed(opened, name, format_name, transposed=True)
        else:
            assert opened.packed(name, format_name, transposed=True) is None


@sampled(name=POWERINFER_EXAMPLES, format_name=TYPE_OF, slow="has each model and each format; pairs are alike")
def test_down_projections_of_powerinfer_are_ours(tmp_path: Path, name: str, format_name: str) -> None:
    opened = open_gguf(save_example(tmp_path, name, TYPE_OF[format_name], powerinfer=True))
    downs = [name for name, tensor in opened.tensors.items() if "ffn_down_t.weight" in tensor.sources[0]]
    assert len(downs) == 2
    for parameter in downs:
        check_packed(opened, parameter, format_name, transposed=True)
        if format_name == "f16":
            check_packed(opened, parameter, format_name, transposed=False)
        else:
            assert opened.packed(parameter, format_name) is None
    others = [name for name, tensor in opened.tensors.items() if len(tensor.shape) == 2 and name not in downs]
    for parameter in others:
        if opened.tensors[parameter].type == TYPE_OF[format_name]:
            check_packed(opened, parameter, format_name, transposed=False)


def test_fused_and_transposed_projections(tmp_path: Path) -> None:
    """Falcon's rows are moved as they are packed; BLOOM's and GPT-2's are left to be quantized anew."""
    opened = open_gguf(save_example(tmp_path, "falcon-40b", "Q4_0"))
    check_packed(opened, "transformer.h.1.self_attention.query_key_value.weight", "q4", transposed=False)
    opened = open_gguf(save_example(tmp_path, "gpt2", "Q4_0"))
    assert opened.packed("transformer.h.0.attn.c_attn.weight", "q4") is None


def test_bytes_that_ours_have_not(tmp_path: Path) -> None:
    """A scale that is infinite or NaN is damage; -128, which no rounding to q8 makes, is a number as others are."""
    file, name = save_example(tmp_path, "llama", "Q8_0"), "model.layers.0.mlp.up_proj.weight"
    entry = open_gguf(file).header.tensors["blk.0.ffn_up.weight"]
    whole, at = file.read_bytes(), entry.offset
    file.write_bytes(whole[: at + 2] + b"\x80" + whole[at + 3 :])
    packed = open_gguf(file).packed(name, "q8")
    assert packed is not None and packed[0, 0] == 0x80
    assert torch.equal(
        dequantize_rows(packed, "q8", open_gguf(file).tensors[name].shape[1]), open_gguf(file).load(name)
    )
    file.write_bytes(whole[: at + 1] + b"\x7c" + whole[at + 2 :])
    with pytest.raises(UnsupportedModelError, match="NaN or infinite"):
        open_gguf(file).packed(name, "q8")


@pytest.mark.parametrize(("type_name", "dtype"), [("F32", "f32"), ("F16", "f16"), ("BF16", "bf16"), ("Q4_0", "f32")])
def test_a_file_as_a_weight_source(tmp_path: Path, type_name: str, dtype: str) -> None:
    # PowerInfer left llama.cpp before there was BF16.
    opened = open_gguf(save_example(tmp_path, "llama", type_name, powerinfer=type_name != "BF16"))
    weights = GgufWeights(opened, {"down": "model.layers.1.mlp.down_proj.weight", "norm": "model.norm.weight"})
    assert list(weights.names()) == ["down", "norm"]
    assert weights.shape("down") == (96, 160) and weights.dtype == dtype
    assert torch.equal(weights.load("down"), opened.load("model.layers.1.mlp.down_proj.weight"))
    packed = weights.packed("down", "q4", transposed=True)
    assert (packed is not None) == (type_name == "Q4_0")
    if packed is not None:
        assert torch.equal(dequantize_rows(packed, "q4", 96), weights.load("down").T)
    weights.close()
    with pytest.raises(KeyError):
        weights.shape("up")


def test_types_that_are_rounded_a_second_time(tmp_path: Path) -> None:
    for stored, rounds in (("Q4_1", {"q4"}), ("Q5_1", {"q4"}), ("Q4_0", set()), ("F16", set())):
        opened = open_gguf(save_example(tmp_path, "llama", stored))
        weights = GgufWeights(opened, {name: name for name in opened.tensors})
        assert {quant for quant in ("q4", "q8") if weights.rounds_again(quant) == stored} == rounds, stored
