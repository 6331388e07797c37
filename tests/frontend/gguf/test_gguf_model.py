"""GGUF files as models: every architecture against the model that was written, and against transformers' reader."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from helpers.gguf_files import (
    EXAMPLES,
    POWERINFER_EXAMPLES,
    build,
    byte_level_metadata,
    quantizable_types,
    save_example,
    write_example,
    write_file,
)
from helpers.gguf_models import check_logits
from helpers.products import sampled
from picompile.errors import UnsupportedModelError, UsageError
from picompile.frontend.gguf.model import open_gguf

# transformers has no processor for Falcon, so that several groups of heads are in a wrong order there.
NOT_READ_BY_TRANSFORMERS = ("falcon-40b",)


def read_by_transformers(file: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    checkpoint = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    tensors: dict[str, torch.Tensor] = checkpoint["tensors"]
    return tensors


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_architecture(tmp_path: Path, name: str) -> None:
    model, file = build(EXAMPLES[name]), save_example(tmp_path, name)
    opened = open_gguf(file)
    state = model.state_dict()
    for parameter, tensor in opened.tensors.items():
        values = opened.load(parameter)
        assert (tensor.dtype, values.dtype) == ("F32", torch.float32)
        assert tensor.shape == tuple(values.shape)
        # Logarithms and sums with 1 are rounded; all else is the same.
        torch.testing.assert_close(values, state[parameter], rtol=1e-6, atol=2e-7)
    check_logits(model, opened)
    if name not in NOT_READ_BY_TRANSFORMERS:
        theirs = read_by_transformers(file, model)
        assert theirs.keys() == opened.tensors.keys()
        for parameter, values in theirs.items():
            assert torch.equal(values, opened.load(parameter)), parameter


@pytest.mark.parametrize("type_name", quantizable_types())
def test_every_type_that_can_be_written(tmp_path: Path, type_name: str) -> None:
    model, file = build(EXAMPLES["llama"]), save_example(tmp_path, "llama", type_name)
    opened = open_gguf(file)
    theirs = read_by_transformers(file, model)
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for parameter, tensor in opened.tensors.items():
        values = opened.load(parameter)
        assert torch.equal(values.float(), theirs[parameter])
        matrix = "norm" not in parameter
        assert tensor.type == (type_name if matrix else "F32")
        assert values.dtype == (plain.get(type_name, torch.float32) if matrix else torch.float32)


@sampled(
    name=POWERINFER_EXAMPLES, type_name=["F32", "F16", "Q8_0"], slow="has each model and each type; pairs are alike"
)
def test_powerinfer(tmp_path: Path, name: str, type_name: str) -> None:
    predictors = {}
    for layer in range(2):
        predictors |= {f"blk.{layer}.fc1.weight": np.ones((32, 96)), f"blk.{layer}.fc2.weight": np.ones((160, 32))}
    more = {"powerinfer.sparse_threshold": 0.5, "tensors": predictors}
    model = build(POWERINFER_EXAMPLES[name])
    opened = open_gguf(save_example(tmp_path, name, type_name, powerinfer=True, **more))
    for parameter, values in model.state_dict().items():
        if parameter in opened.tensors:
            tolerance = {"F32": 0.0, "F16": 1 / 2**11, "Q8_0": 1 / 200}[type_name] * float(values.abs().max())
            torch.testing.assert_close(opened.load(parameter).float(), values, rtol=0, atol=tolerance)
    if type_name == "F32":
        check_logits(model, opened)
    assert opened.config["architectures"] == [POWERINFER_EXAMPLES[name].model_class]
    assert not any("fc1.weight" in tensor.sources[0] for tensor in opened.tensors.values())


def test_fingerprints(tmp_path: Path) -> None:
    digest = open_gguf(save_example(tmp_path, "llama", "Q8_0")).fingerprint()
    other = {**byte_level_metadata(), "general.name": "another name"}
    assert open_gguf(save_example(tmp_path, "llama", "Q8_0", **other)).fingerprint() != digest  # another end of text
    file = save_example(tmp_path, "llama", "Q8_0", **{"general.name": "another name"})
    assert open_gguf(file).fingerprint() == digest
    entry = open_gguf(file).header.tensors["blk.1.ffn_up.weight"]
    changed = bytearray(file.read_bytes())
    changed[entry.offset + entry.size_bytes - 1] ^= 1
    file.write_bytes(changed)
    assert open_gguf(file).fingerprint() != digest


def refused(file: Path, says: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        open_gguf(file)
    assert says in str(caught.value) and "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_models_that_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        open_gguf(tmp_path / "model.gguf")
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
        ("vocab_size", 299, "makes model.embed_tokens.weight [300, 96], but its metadata make it [299, 96]"),
    ):
        refused(save_example(tmp_path, **{f"llama.{key}": value}), says)
    for name in ("t5", "deci", "mistral", "general", "tokenizer", "qwen35", "gemma4"):
        write_file(tmp_path / "model.gguf", name, {}, {"token_embd.weight": np.ones((3, 32))})
        refused(tmp_path / "model.gguf", f"GGUF models of the architecture {name} are not supported; supported are")
    # A part of each head is turned where the class turns all.
    for name, head_dim in (("qwen2", 24), ("qwen3", 32), ("llama", 24)):
        lengths = {f"{name}.attention.{part}_length": head_dim for part in ("key", "value")}
        open_gguf(save_example(tmp_path, name, **lengths, **{f"{name}.rope.dimension_count": head_dim}))
        file = save_example(tmp_path, name, **lengths, **{f"{name}.rope.dimension_count": head_dim // 2})
        refused(file, f"turns {head_dim} numbers of each head")
    for name in ("phi3", "starcoder2", "stablelm", "nemotron"):
        file = save_example(tmp_path, name, **{f"{name}.attention.head_count": 100})
        refused(file, "100 heads, but only 96 numbers for all of them")


def test_values_that_no_model_has(tmp_path: Path) -> None:
    name, file = "model.layers.1.mlp.up_proj.weight", tmp_path / "model.gguf"
    model = build(EXAMPLES["llama"])
    with torch.no_grad():
        model.get_parameter(name)[3, 5] = float("nan")
    write_example(file, EXAMPLES["llama"], model, "F16")
    opened = open_gguf(file)
    opened.load("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(UnsupportedModelError, match=r"up_proj.weight has NaN or infinite values: the file is damaged"):
        opened.load(name)
    with pytest.raises(UnsupportedModelError, match=r"up_proj.weight has NaN"):
        opened.packed(name, "f16")
    with torch.no_grad():
        model.get_parameter(name)[3, 5] = 70_000.0
    write_example(file, EXAMPLES["llama"], model)
    with pytest.raises(UnsupportedModelError, match=r"up_proj.weight has values up to 7e\+04, and weights are kept in"):
        open_gguf(file).load(name)


def test_tensors_that_are_one_too_many_or_of_other_sizes(tmp_path: Path) -> None:
    odd, no_place = "blk.1.attn_nova.weight", "which the model that its metadata describes has no place for"
    file = save_example(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"blk.1.attn_norm.weight", odd.encode()))
    refused(file, f"holds {odd}, {no_place}")
    refused(save_example(tmp_path, tensors={"blk.0.ffn_other.weight": np.ones((3, 3))}), f"other.weight, {no_place}")
    open_gguf(save_example(tmp_path, tensors={"blk.1.attn_rot_embd.weight": np.ones(3)}))
    file.write_bytes(whole.replace(b"blk.1.attn_norm.weight", b"blk.2.attn_norm.weight"))
    refused(file, "says 2 layers, but has tensors of layer 2")
    opened = open_gguf(save_example(tmp_path, "llama-tied", tensors={"output.weight": np.ones((300, 96))}))
    assert opened.config["tie_word_embeddings"] is False and "lm_head.weight" in opened.tensors
    more = {"blk.0.ffn_down.weight": np.ones((96, 160))}
    refused(save_example(tmp_path, "llama", powerinfer=True, tensors=more), "two tensors for one parameter")
    write_example(file, EXAMPLES["llama"], build(EXAMPLES["llama"]), without="blk.1.attn_norm.weight")
    refused(file, "has no tensor for model.layers.1.input_layernorm.weight, which its metadata ask for")


@pytest.mark.parametrize(("name", "part"), [("llama", "attn_q"), ("falcon-40b", "attn_qkv")])
def test_rows_that_cannot_be_put_in_order(tmp_path: Path, name: str, part: str) -> None:
    """A matrix of as many numbers in another shape is refused when the file is opened, before any of it is read."""
    file, tensor = save_example(tmp_path, name), f"blk.1.{part}.weight"
    rows, columns = open_gguf(file).header.tensors[tensor].shape
    data, at = file.read_bytes(), file.read_bytes().index(tensor.encode()) + len(tensor) + 4
    assert int.from_bytes(data[at : at + 8], "little") == columns
    for dims in ((2 * rows, columns // 2), (columns * rows // 3, 3)):
        changed = b"".join(dim.to_bytes(8, "little") for dim in dims)
        file.write_bytes(data[:at] + changed + data[at + 16 :])
        refused(file, "but its metadata make it")


def test_types_without_numbers(tmp_path: Path) -> None:
    file, name = save_example(tmp_path), b"blk.0.attn_norm.weight"
    data = file.read_bytes()
    at = data.index(name) + len(name) + 4 + 8
    assert int.from_bytes(data[at : at + 4], "little") == 0
    file.write_bytes(data[:at] + (26).to_bytes(4, "little") + data[at + 4 :])
    refused(file, "blk.0.attn_norm.weight is I32; read are F32, F16, BF16 and IQ1_M")
