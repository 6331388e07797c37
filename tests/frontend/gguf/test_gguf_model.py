"""GGUF files as models: every architecture against the model that was written, and against transformers' reader."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.gguf_files import (
    EXAMPLES,
    POWERINFER_EXAMPLES,
    Example,
    build,
    byte_level_metadata,
    quantizable_types,
    write_example,
)
from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.gguf import GgufModel, open_gguf
from picompile.frontend.gguf.model_config import model_classes

# transformers has no processor for Falcon, so that several groups of heads are in a wrong order there.
NOT_READ_BY_TRANSFORMERS = ("falcon-40b",)


def loaded(opened: GgufModel) -> nn.Module:
    """The model that the config describes, with the weights of the file."""
    config_class, model_class = model_classes(opened.config)
    model: nn.Module = model_class(config_class.from_dict(dict(opened.config))).eval()
    state = {name: opened.load(name) for name in opened.tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all(name == "lm_head.weight" for name in missing)
    model.tie_weights()
    return model


def read_by_transformers(file: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tensors: dict[str, torch.Tensor] = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)[
        "tensors"
    ]
    return tensors


def written(folder: Path, example: Example, type_name: str = "F32", **more: Any) -> tuple[nn.Module, Path]:
    model, file = build(example), folder / "model.gguf"
    write_example(file, example, model, type_name, **more)
    return model, file


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_architecture(tmp_path: Path, name: str) -> None:
    model, file = written(tmp_path, EXAMPLES[name])
    opened = open_gguf(file)
    state = model.state_dict()
    for parameter, tensor in opened.tensors.items():
        values = opened.load(parameter)
        assert (tensor.dtype, values.dtype) == ("F32", torch.float32)
        assert tensor.shape == tuple(values.shape)
        # Logarithms and sums with 1 are rounded; all else is the same.
        torch.testing.assert_close(values, state[parameter], rtol=1e-6, atol=2e-7)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected, found = model(input_ids=ids).logits, loaded(opened)(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    if name not in NOT_READ_BY_TRANSFORMERS:
        theirs = read_by_transformers(file, model)
        assert theirs.keys() == opened.tensors.keys()
        for parameter, values in theirs.items():
            assert torch.equal(values, opened.load(parameter)), parameter


@pytest.mark.parametrize("type_name", quantizable_types())
def test_every_type_that_can_be_written(tmp_path: Path, type_name: str) -> None:
    model, file = written(tmp_path, EXAMPLES["llama"], type_name)
    opened = open_gguf(file)
    theirs = read_by_transformers(file, model)
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for parameter, tensor in opened.tensors.items():
        values = opened.load(parameter)
        assert torch.equal(values.float(), theirs[parameter])
        matrix = "norm" not in parameter
        assert tensor.type == (type_name if matrix else "F32")
        assert values.dtype == (plain.get(type_name, torch.float32) if matrix else torch.float32)


@pytest.mark.parametrize("type_name", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("name", POWERINFER_EXAMPLES)
def test_powerinfer(tmp_path: Path, name: str, type_name: str) -> None:
    more = {"powerinfer.sparse_threshold": 0.5, "tensors": {}}
    for layer in range(2):
        more["tensors"] |= {f"blk.{layer}.fc1.weight": np.ones((32, 96)), f"blk.{layer}.fc2.weight": np.ones((160, 32))}
    model, file = written(tmp_path, POWERINFER_EXAMPLES[name], type_name, **more)
    opened = open_gguf(file)
    for parameter, values in model.state_dict().items():
        if parameter in opened.tensors:
            tolerance = (
                0.0 if type_name == "F32" else float(values.abs().max()) / (2**11 if type_name == "F16" else 200)
            )
            torch.testing.assert_close(opened.load(parameter).float(), values, rtol=0, atol=tolerance)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected, found = model(input_ids=ids).logits, loaded(opened)(input_ids=ids).logits
    if type_name == "F32":
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    assert opened.config["architectures"] == [POWERINFER_EXAMPLES[name].model_class]
    assert not any("fc1.weight" in tensor.sources[0] for tensor in opened.tensors.values())


def test_fingerprints(tmp_path: Path) -> None:
    model, file = written(tmp_path, EXAMPLES["llama"], "Q8_0")
    digest = open_gguf(file).fingerprint()
    data = file.read_bytes()
    other = tmp_path / "other.gguf"
    write_example(other, EXAMPLES["llama"], model, "Q8_0", **byte_level_metadata(), **{"general.name": "another name"})
    assert open_gguf(other).fingerprint() != digest  # its end of text is another token
    write_example(other, EXAMPLES["llama"], model, "Q8_0", **{"general.name": "another name"})
    assert open_gguf(other).fingerprint() == digest
    entry = open_gguf(file).header.tensors["blk.1.ffn_up.weight"]
    changed = bytearray(data)
    changed[entry.offset + entry.size_bytes - 1] ^= 1
    other.write_bytes(changed)
    assert open_gguf(other).fingerprint() != digest


def refused(file: Path, says: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        open_gguf(file)
    assert says in str(caught.value) and "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_models_that_are_not_read(tmp_path: Path) -> None:
    example, file = EXAMPLES["llama"], tmp_path / "model.gguf"
    model = build(example)
    with pytest.raises(UsageError, match="no such file"):
        open_gguf(file)
    odd = {"tensors": {"blk.0.ffn_other.weight": np.ones((3, 3))}}
    write_example(file, example, model, **odd)
    refused(file, "holds blk.0.ffn_other.weight, which the model that its metadata describes has no place for")
    write_example(file, example, model, **{"split.count": 3})
    refused(file, "one part of a model in several files")
    for key, value, says in (
        ("block_count", 3, "says 3 layers, but has no tensors of layer 2"),
        ("block_count", 1, "says 1 layers, but has tensors of layer 1"),
        ("embedding_length", 192, "but its metadata make it"),
        ("attention.head_count", 0, "no embedding_length or attention.head_count"),
        ("attention.head_count_kv", [2, 1], "differs between layers"),
        ("attention.layer_norm_rms_epsilon", -1.0, "not a number from 0"),
        ("attention.layer_norm_rms_epsilon", 0.0, "is 0, and must be above it"),
        ("attention.value_length", 20, "keys and values differ"),
        ("rope.freq_base", 0.0, "is 0, and must be above it"),
        ("context_length", 0, "its metadata make no config: max_position_embeddings must be"),
        ("feed_forward_length", "96", "llama.feed_forward_length is a text, not a number"),
    ):
        write_example(file, example, model, **{f"llama.{key}": value})
        refused(file, says)


def test_other_architectures(tmp_path: Path) -> None:
    from helpers.gguf_files import write_file

    for name in ("t5", "deci", "mistral", "general", "tokenizer", "clip", "qwen35"):
        write_file(tmp_path / "model.gguf", name, {}, {"token_embd.weight": np.ones((3, 32))})
        refused(tmp_path / "model.gguf", f"GGUF models of the architecture {name} are not supported; supported are")


def test_values_that_no_model_has(tmp_path: Path) -> None:
    example, file = EXAMPLES["llama"], tmp_path / "model.gguf"
    model = build(example)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 5] = float("nan")
    write_example(file, example, model, "F16")
    opened = open_gguf(file)
    opened.load("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(UnsupportedModelError, match=r"up_proj.weight has NaN or infinite values: the file is damaged"):
        opened.load("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(UnsupportedModelError, match=r"up_proj.weight has NaN"):
        opened.packed("model.layers.1.mlp.up_proj.weight", "f16")
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.up_proj.weight")[3, 5] = 70_000.0
    write_example(file, example, model)
    with pytest.raises(UnsupportedModelError, match=r"up_proj.weight has values up to 7e\+04, and weights are kept in"):
        open_gguf(file).load("model.layers.0.mlp.up_proj.weight")


def test_tensors_that_are_one_too_many_or_of_other_sizes(tmp_path: Path) -> None:
    example, file = EXAMPLES["llama"], tmp_path / "model.gguf"
    write_example(file, example, build(example))
    file.write_bytes(file.read_bytes().replace(b"blk.1.attn_norm.weight", b"blk.1.attn_nova.weight"))
    refused(file, "holds blk.1.attn_nova.weight, which the model that its metadata describes has no place for")
    write_example(file, example, build(example), tensors={"blk.1.attn_rot_embd.weight": np.ones(3)})
    open_gguf(file)
    file.write_bytes(file.read_bytes().replace(b"blk.1.attn_norm.weight", b"blk.2.attn_norm.weight"))
    refused(file, "says 2 layers, but has tensors of layer 2")
    head = build(EXAMPLES["llama-tied"])
    write_example(file, EXAMPLES["llama-tied"], head, tensors={"output.weight": np.ones((300, 96))})
    opened = open_gguf(file)
    assert opened.config["tie_word_embeddings"] is False and "lm_head.weight" in opened.tensors
    write_example(file, example, build(example), **{"llama.vocab_size": 299})
    refused(file, "token_embd.weight makes model.embed_tokens.weight [300, 96], but its metadata make it [299, 96]")


def test_two_tensors_for_one_parameter(tmp_path: Path) -> None:
    example, file = POWERINFER_EXAMPLES["llama"], tmp_path / "model.gguf"
    write_example(file, example, build(example), "F32", tensors={"blk.0.ffn_down.weight": np.ones((96, 160))})
    refused(file, "two tensors for one parameter")


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_a_part_of_each_head_is_turned_where_the_class_turns_all(tmp_path: Path, name: str) -> None:
    example, file = EXAMPLES[name], tmp_path / "model.gguf"
    model = build(example)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    lengths = {f"{name}.attention.{part}_length": head_dim for part in ("key", "value")}
    write_example(file, example, model, **lengths, **{f"{name}.rope.dimension_count": head_dim})
    open_gguf(file)
    write_example(file, example, model, **lengths, **{f"{name}.rope.dimension_count": head_dim // 2})
    refused(file, f"turns {head_dim} numbers of each head")


@pytest.mark.parametrize("name", ["phi3", "starcoder2", "stablelm", "nemotron"])
def test_more_heads_than_numbers(tmp_path: Path, name: str) -> None:
    example, file = EXAMPLES[name], tmp_path / "model.gguf"
    write_example(file, example, build(example), **{f"{name}.attention.head_count": 100})
    refused(file, "100 heads, but only 96 numbers for all of them")


@pytest.mark.parametrize("name", ["llama", "falcon-40b"])
def test_rows_that_cannot_be_put_in_order(tmp_path: Path, name: str) -> None:
    """A matrix of as many numbers in another shape is refused when the file is opened, before any of it is read."""
    example, file = EXAMPLES[name], tmp_path / "model.gguf"
    model = build(example)
    write_example(file, example, model)
    tensor = "blk.1.attn_qkv.weight" if name == "falcon-40b" else "blk.1.attn_q.weight"
    rows, columns = open_gguf(file).header.tensors[tensor].shape
    data, at = file.read_bytes(), file.read_bytes().index(tensor.encode()) + len(tensor) + 4
    assert int.from_bytes(data[at : at + 8], "little") == columns
    for dims in ((2 * rows, columns // 2), (columns * rows // 3, 3)):
        changed = b"".join(dim.to_bytes(8, "little") for dim in dims)
        file.write_bytes(data[:at] + changed + data[at + 16 :])
        refused(file, "but its metadata make it")


def test_types_without_numbers(tmp_path: Path) -> None:
    example, file = EXAMPLES["llama"], tmp_path / "model.gguf"
    write_example(file, example, build(example))
    entry = open_gguf(file).header.tensors["blk.0.attn_norm.weight"]
    name = b"blk.0.attn_norm.weight"
    data = file.read_bytes()
    at = data.index(name) + len(name) + 4 + 8
    assert int.from_bytes(data[at : at + 4], "little") == 0 and entry.type == "F32"
    file.write_bytes(data[:at] + (26).to_bytes(4, "little") + data[at + 4 :])
    refused(file, "blk.0.attn_norm.weight is I32; read are F32, F16, BF16 and IQ1_M")


def test_a_missing_tensor(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    example, file = EXAMPLES["llama"], tmp_path / "model.gguf"
    model = build(example)
    add = GGUFWriter.add_tensor

    def all_but_one(writer: Any, name: str, *values: Any, **more: Any) -> None:
        if name != "blk.1.attn_norm.weight":
            add(writer, name, *values, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "add_tensor", all_but_one)
        write_example(file, example, model)
    refused(file, "has no tensor for model.layers.1.input_layernorm.weight, which its metadata ask for")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_example(tmp_path / "model.gguf", EXAMPLES["llama"], build(EXAMPLES["llama"]))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match=r"needs the package gguf: pip install picompile\[gguf\]"):
        open_gguf(tmp_path / "model.gguf")
