"""The header check, against the gguf package and against forged files. No other process, and no torch."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers.powerinfer_files import TYPES, Sizes, mutations, random_predictors, write_gguf
from picompile.errors import UsageError
from picompile.frontend.gguf.header import read_header
from picompile.frontend.gguf.tensor_types import TENSOR_TYPES
from picompile.predictors.powerinfer.importer import check_by_config
from picompile.predictors.powerinfer.sources import find_source

SIZES = Sizes(hidden=96, neurons=200, ranks=(32, 64))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.powerinfer.gguf"
    write_gguf(path, random_predictors(SIZES, 1), threshold=0.25)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As much of a model as the check by config.json reads."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text('{"hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2}')
    return folder


def test_tensor_types_are_those_of_the_gguf_package() -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    for number, (name, block, block_bytes) in TENSOR_TYPES.items():
        kind = GGMLQuantizationType(number)
        assert (kind.name, GGML_QUANT_SIZES[kind]) == (name, (block, block_bytes))


@pytest.mark.parametrize("type_name", TYPES)
def test_header_says_what_was_written(tmp_path: Path, type_name: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, random_predictors(SIZES, 2), type_name, threshold=-0.5)
    header = read_header(path)
    assert header.values["powerinfer.sparse_threshold"] == -0.5
    assert header.elements == 80
    for layer, rank in enumerate(SIZES.ranks):
        fc1, fc2 = (header.tensors[f"blk.{layer}.{part}.weight"] for part in ("fc1", "fc2"))
        assert (fc1.type, fc1.shape, fc2.shape) == (type_name, (rank, 96), (200, rank))
    embedding = header.tensors["token_embd.weight"]
    data = np.frombuffer(path.read_bytes(), np.float16, 35, embedding.offset)
    assert (data == 1).all() and embedding.size_bytes == 70


def test_source_of_a_file(file: Path) -> None:
    source = find_source(file)
    assert source.threshold == 0.25
    assert source.shapes == {0: {"fc1": (32, 96), "fc2": (200, 32)}, 1: {"fc1": (64, 96), "fc2": (200, 64)}}
    assert find_source(file.parent) == source


def test_forged_headers_are_refused_or_change_nothing(file: Path, model: Path, tmp_path: Path) -> None:
    whole = find_source(file)
    places = {entry.name: entry for parts in whole.tensors.values() for entry in parts.values()}
    refused = 0
    for mutation in mutations(file, 400, seed=3):
        path = tmp_path / "forged.gguf"
        path.write_bytes(mutation.data)
        try:
            source = find_source(path)
            check_by_config(path, source.shapes, model)
        except UsageError as error:
            refused += 1
            assert str(error).startswith(f"{path}: ") and len(str(error)) < 400 and str(error).isprintable(), (
                mutation.name
            )
            continue
        found = {entry.name: entry for parts in source.tensors.values() for entry in parts.values()}
        assert found == places, mutation.name
    # What is left are flips in data, and in metadata and names that nobody reads.
    assert refused > 280


def test_nested_arrays_are_not_followed(tmp_path: Path, file: Path) -> None:
    nested = [m for m in mutations(file, 1, seed=0) if m.name.startswith("arrays in arrays")]
    assert len(nested[1].data) - len(nested[0].data) > 10 * sys.getrecursionlimit()
    for mutation in nested:
        path = tmp_path / "nested.gguf"
        path.write_bytes(mutation.data)
        with pytest.raises(UsageError, match="is an array of type 9; only numbers and strings"):
            read_header(path)


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_other_alignments(tmp_path: Path, alignment: int) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "aligned.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for layer in range(3):
        writer.add_tensor(f"blk.{layer}.fc1.weight", np.full((3, 5), layer, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for layer, entry in enumerate(read_header(path).tensors.values()):
        assert entry.offset % alignment == 0
        assert (np.frombuffer(path.read_bytes(), np.float32, 15, entry.offset) == layer).all()
    data = path.read_bytes()
    for forged in (0, 1, 12, 2**31):
        at = data.index(b"general.alignment") + len("general.alignment") + 4
        path.write_bytes(data[:at] + forged.to_bytes(4, "little") + data[at + 4 :])
        with pytest.raises(UsageError, match="not a power of two"):
            read_header(path)


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    for name in ("model.gguf", "model_0.pt"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(UsageError, match="not a file"):
            find_source(tmp_path)
        (tmp_path / name).unlink()


def test_many_elements_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    write_gguf(path, random_predictors(SIZES, 4))
    data = path.read_bytes()
    key = b"many.elements"
    value = len(key).to_bytes(8, "little") + key + (9).to_bytes(4, "little") + (0).to_bytes(4, "little")
    count = int.from_bytes(data[16:24], "little") + 1
    path.write_bytes(
        data[:16] + count.to_bytes(8, "little") + value + (2 << 20).to_bytes(8, "little") + bytes(2 << 20) + data[24:]
    )
    with pytest.raises(UsageError, match=r"2,097,152 elements in many\.elements; at most 1,000,000 are read"):
        read_header(path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", "no such file or folder"),
        ("empty.gguf", "0 bytes are no GGUF file"),
        ("empty", "neither *.gguf nor model_0.pt is there"),
        ("two", "holds 2 GGUF files; name one of them"),
    ],
)
def test_places_without_predictors(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    for letter in "ab":
        (tmp_path / "two" / f"{letter}.gguf").touch()
    with pytest.raises(UsageError) as caught:
        find_source(tmp_path / name)
    assert says in str(caught.value)


def test_models_without_predictors_and_gpu_splits(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    for name, says in (("blk.0.gpu_idx", "a GPU split"), ("blk.0.ffn_up.weight", "a model without predictors")):
        writer = GGUFWriter(tmp_path / "other.gguf", "generic.gpu_index")
        writer.add_tensor(name, np.zeros(64, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(UsageError, match=says):
            find_source(tmp_path / "other.gguf")
