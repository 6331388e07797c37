"""Damaged and forged GGUF files: one line, or a model, within seconds and little memory."""

import time
from pathlib import Path

import numpy as np
import pytest

from helpers.gguf_files import byte_level_metadata, damaged, refusal, save_example, write_file
from picompile.errors import UnsupportedModelError
from picompile.frontend.gguf.header import read_header as read_bounded
from picompile.frontend.gguf.model import GgufModel, open_gguf

BOUND_S = 5.0


@pytest.mark.parametrize("powerinfer", [False, True])
def test_damaged_files(tmp_path: Path, powerinfer: bool) -> None:
    file = save_example(tmp_path, "llama", "Q8_0", powerinfer, **byte_level_metadata())
    refused = 0
    for what, changed in damaged(file, 180, seed=11):
        file.write_bytes(changed)
        started_s = time.monotonic()
        line = refusal(file)
        assert time.monotonic() - started_s < BOUND_S, what
        assert line is None or ("\n" not in line and line.isprintable() and len(line) < 700), what
        refused += line is not None
    # Others have changes in tokens, in names of no effect, and in numbers of the data.
    assert refused > 70


def test_arrays_with_more_elements_than_a_vocabulary(tmp_path: Path) -> None:
    file = save_example(tmp_path, **{"some.numbers": [1] * 3000})
    with pytest.raises(Exception, match=r"3,000 elements in some\.numbers; at most 2,000 are read"):
        read_bounded(file, most_elements=2000)
    assert read_bounded(file, most_elements=3000).arrays["some.numbers"].count == 3000


@pytest.mark.parametrize("key", ["context_length", "feed_forward_length", "vocab_size", "attention.head_count_kv"])
def test_values_out_of_proportion(tmp_path: Path, key: str) -> None:
    for value in (2**31 - 1, 2**20, 0, "many", [1.5, 2.0], True, -0.5):
        file = save_example(tmp_path, **{f"llama.{key}": value})
        started_s = time.monotonic()
        line = refusal(file)
        assert time.monotonic() - started_s < BOUND_S
        assert line is None or "\n" not in line
        # Zero stands for a default of llama.cpp, and any length of texts makes a model.
        assert line is not None or value == 0 or (key == "context_length" and type(value) is int)
    assert "block_count" in str(refusal(save_example(tmp_path, **{"llama.block_count": 2**31 - 1})))


def test_a_file_that_is_no_file(tmp_path: Path) -> None:
    for data in (b"", b"GGUF", np.zeros(1000, np.uint8).tobytes()):
        (tmp_path / "model.gguf").write_bytes(data)
        assert "GGUF file" in str(refusal(tmp_path / "model.gguf"))
    (tmp_path / "model.gguf").unlink()
    (tmp_path / "model.gguf").mkdir()
    assert "no such file" in str(refusal(tmp_path / "model.gguf"))


def test_a_tensor_for_each_of_many_layers(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    tensors = {f"blk.{layer}.attn_norm.weight": np.ones(1) for layer in range(9000)}
    metadata = {"llama.block_count": 9000, "llama.embedding_length": 32, "llama.attention.head_count": 1}
    write_file(file, "llama", metadata, {"token_embd.weight": np.ones((4, 32)), **tensors})
    started_s = time.monotonic()
    assert "block_count is 9000; 1 to 1000 layers are read" in str(refusal(file))
    write_file(file, "llama", metadata | {"llama.block_count": 1000}, dict(list(tensors.items())[:1000]))
    assert refusal(file) is not None
    assert time.monotonic() - started_s < 2 * BOUND_S


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    file = save_example(tmp_path)
    opened = open_gguf(file)
    file.write_bytes(file.read_bytes()[:-4096])
    parameters = {name: tensor.shape for name, tensor in opened.tensors.items()}
    with pytest.raises(UnsupportedModelError, match="has become shorter"):
        GgufModel(opened.header, opened.config, parameters)


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (139, "is of tensor type 139, IQ4_K of ik_llama.cpp, which is not read; take a file of llama.cpp's types"),
        (399, "type 399, Q8_K_R8 of ik_llama.cpp"),
        (36, "type 36, I2_S of ik_llama.cpp"),
        (31, "type 31, Q4_0_4_4, which llama.cpp has no longer; convert the model anew"),
        (77, "type 77, which is not known"),
        (15, "which Q8_K cannot have"),
        (41, "has dimensions [96], which Q1_0 cannot have"),
    ],
)
def test_types_that_are_not_read(tmp_path: Path, number: int, says: str) -> None:
    file, name = save_example(tmp_path), b"blk.0.attn_norm.weight"
    data = file.read_bytes()
    at = data.index(name) + len(name) + 4 + 8
    file.write_bytes(data[:at] + number.to_bytes(4, "little") + data[at + 4 :])
    assert says in (refusal(file) or "")


@pytest.mark.parametrize(
    ("more", "architecture", "says"),
    [
        ({"general.type": "adapter"}, "llama", "an adapter (LoRA), which changes another model (general.type)"),
        ({"general.type": "mmproj"}, "clip", "a projector of images or sound, and no language model"),
        ({}, "clip", "a projector of images or sound"),
        ({"general.type": "imatrix"}, "", "an importance matrix, and no model"),
        ({"general.type": "vocab"}, "llama", "of the type vocab, and no model"),
        ({}, "controlvector", "a control vector, which changes another model"),
    ],
)
def test_files_that_are_no_models(tmp_path: Path, more: dict[str, str], architecture: str, says: str) -> None:
    write_file(tmp_path / "model.gguf", architecture, more, {"a.weight": np.ones((3, 32))})
    assert says in (refusal(tmp_path / "model.gguf") or "")
