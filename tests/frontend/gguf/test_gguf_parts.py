"""Models that are split over several GGUF files, and folders that hold a model."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter

from helpers.gguf_files import save_example
from picompile.errors import PicompileError
from picompile.frontend.gguf.model import open_gguf
from picompile.frontend.gguf.parts import file_format
from picompile.frontend.hf import open_checkpoint
from picompile.frontend.model_file import gguf_file, is_gguf, opened_gguf


def split(file: Path, folder: Path, count: int = 3) -> list[Path]:
    """Write `file` in parts, as llama.cpp's gguf-split does: metadata in the first alone, tensors in turn."""
    reader, parts = GGUFReader(file), []
    tensors = [reader.tensors[start::count] for start in range(count)]
    for number, own in enumerate(tensors):
        part = folder / f"model-{number + 1:05}-of-{count:05}.gguf"
        writer = GGUFWriter(part, "llama")
        if number == 0:
            for field in reader.fields.values():
                if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                    writer.add_key_value(field.name, field.contents(), field.types[0], *field.types[1:2])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in own:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(part)
    return parts


def refused(model: Path, says: str) -> None:
    with pytest.raises(PicompileError) as caught:
        open_gguf(model)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_in_parts_is_the_whole_one(tmp_path: Path) -> None:
    whole = open_gguf(save_example(tmp_path))
    (tmp_path / "split").mkdir()
    first, *_ = split(whole.header.file, tmp_path / "split")
    opened = open_gguf(first)
    assert opened.config == whole.config and opened.fingerprint() == whole.fingerprint()
    assert opened.tensors.keys() == whole.tensors.keys()
    for name in whole.tensors:
        assert torch.equal(opened.load(name), whole.load(name))


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    first, second, third = split(save_example(tmp_path), tmp_path)
    refused(second, f"part 2 of 3; name the first one, {first}")
    kept = second.read_bytes()
    shutil.copy(third, second)
    refused(first, f"{second}: not part 2 of 3: its split.no is 2 and its split.count 3")
    second.write_bytes(kept)
    names = [[tensor.name for tensor in GGUFReader(part).tensors] for part in (first, second)]
    own, other = next((a, b) for a in names[1] for b in names[0] if len(a) == len(b))
    second.write_bytes(kept.replace(own.encode(), other.encode()))
    refused(first, f"a part of another model: {other} is in another part too")
    second.write_bytes(kept.replace(b"split.no", b"split.mo"))
    refused(first, f"{second}: not part 2 of 3: its split.no is None")
    second.write_bytes(kept[:-64])
    refused(first, f"{second}: cut")
    second.unlink()
    refused(first, f"{second}: part 2 of 3 is missing")
    renamed = first.rename(tmp_path / "first.gguf")
    refused(renamed, "whose name must be NAME-00001-of-00003.gguf")


def test_a_count_of_tensors(tmp_path: Path) -> None:
    first, *_ = split(save_example(tmp_path), tmp_path, 2)
    data = first.read_bytes()
    at = data.index(b"split.tensors.count") + len("split.tensors.count") + 4
    first.write_bytes(data[:at] + (99).to_bytes(4, "little") + data[at + 4 :])
    refused(first, "tensors, but split.tensors.count is 99: a part is of another model")


def test_a_changed_part_is_read_again(tmp_path: Path) -> None:
    first, second, _ = split(save_example(tmp_path), tmp_path)
    opened = opened_gguf(first)
    assert opened_gguf(first) is opened
    second.write_bytes(second.read_bytes())
    assert opened_gguf(first) is not opened


def test_parts_behind_links(tmp_path: Path) -> None:
    """A hub's cache has files by their hashes, and links with their names in another folder."""
    whole = save_example(tmp_path)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, part in enumerate(split(whole, tmp_path)):
        blob = part.rename(tmp_path / "blobs" / f"hash{number}")
        (tmp_path / "snapshot" / part.name).symlink_to(blob)
    assert opened_gguf(tmp_path / "snapshot").fingerprint() == open_gguf(whole).fingerprint()
    assert open_checkpoint(tmp_path / "snapshot").facts.name == "model"


def test_a_folder_stands_for_its_one_model(tmp_path: Path) -> None:
    file = save_example(tmp_path)
    assert gguf_file(tmp_path) == file and is_gguf(tmp_path)
    first, *_ = split(file, tmp_path)
    assert gguf_file(tmp_path) is None and not is_gguf(tmp_path), "two models"
    file.unlink()
    assert gguf_file(tmp_path) == first
    assert opened_gguf(tmp_path).header.file == first
    (tmp_path / "config.json").write_text("{}")
    assert not is_gguf(tmp_path)


@pytest.mark.parametrize(("number", "name"), [(3, "Q4_1"), (15, "Q4_K_M"), (0, "F32"), (9999, None), (None, None)])
def test_the_format_that_a_file_calls_its_own(tmp_path: Path, number: int | None, name: str | None) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    if number is not None:
        writer.add_file_type(number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert file_format(tmp_path / "model.gguf") == name
