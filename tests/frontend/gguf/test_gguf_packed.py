"""Blocks of GGML's types: unpacked as the `gguf` package does, and repacked as ours with the same numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.gguf_files import EXAMPLES, POWERINFER_EXAMPLES, build, write_example
from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf import GgufModel, open_gguf
from picompile.frontend.gguf.blocks import UNPACKED, row_bytes, unpack
from picompile_passes.dialect.formats import FORMATS, dequantize_rows

TYPE_OF = {"q8": "Q8_0", "q4": "Q4_0", "f16": "F16"}


@pytest.mark.parametrize("type_name", sorted(UNPACKED))
def test_unpacking_random_blocks(type_name: str) -> None:
    from gguf import GGMLQuantizationType, dequantize

    rows, columns = 37, 512
    data = np.random.default_rng(3).integers(0, 256, (rows, row_bytes(type_name, columns)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantize(data, GGMLQuantizationType[type_name])
    np.testing.assert_array_equal(unpack(data, type_name, columns).numpy(), expected)


def test_unpacking_takes_many_rows_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from picompile.frontend.gguf import blocks

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
    example, file = EXAMPLES["llama"], tmp_path / "model.gguf"
    write_example(file, example, build(example), TYPE_OF[format_name])
    opened = open_gguf(file)
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


@pytest.mark.parametrize("format_name", TYPE_OF)
@pytest.mark.parametrize("name", POWERINFER_EXAMPLES)
def test_down_projections_of_powerinfer_are_ours(tmp_path: Path, name: str, format_name: str) -> None:
    example, file = POWERINFER_EXAMPLES[name], tmp_path / "model.gguf"
    write_example(file, example, build(example), TYPE_OF[format_name])
    opened = open_gguf(file)
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
    file = tmp_path / "model.gguf"
    write_example(file, EXAMPLES["falcon-40b"], build(EXAMPLES["falcon-40b"]), "Q4_0")
    opened = open_gguf(file)
    check_packed(opened, "transformer.h.1.self_attention.query_key_value.weight", "q4", transposed=False)
    write_example(file, EXAMPLES["gpt2"], build(EXAMPLES["gpt2"]), "Q4_0")
    assert open_gguf(file).packed("transformer.h.0.attn.c_attn.weight", "q4") is None


@pytest.mark.parametrize(("at", "value", "says"), [(2, 0x80, None), (1, 0x7C, "NaN or infinite")])
def test_bytes_that_ours_have_not(tmp_path: Path, at: int, value: int, says: str | None) -> None:
    """-128 is no number of q8; a scale that is infinite or NaN is damage."""
    example, file, name = EXAMPLES["llama"], tmp_path / "model.gguf", "model.layers.0.mlp.up_proj.weight"
    write_example(file, example, build(example), "Q8_0")
    entry = open_gguf(file).header.tensors["blk.0.ffn_up.weight"]
    data = bytearray(file.read_bytes())
    data[entry.offset + at] = value
    file.write_bytes(data)
    if says is None:
        assert open_gguf(file).packed(name, "q8") is None
        assert float(open_gguf(file).load(name)[0, 0]) != 0
    else:
        with pytest.raises(UnsupportedModelError, match=says):
            open_gguf(file).packed(name, "q8")
