"""Whatever the pieces, the file has them all, and is written in aligned blocks."""

import random
from pathlib import Path

import pytest

from picompile.artifact import files as block_file
from picompile.artifact.files import BlockFile


@pytest.mark.parametrize("sizes", [[], [63, 1], [1] * 200, [64, 64, 64], [10, 300, 5, 0, 133]])
def test_written_tensors_are_those_given(sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_file, "BLOCK_BYTES", 64)
    pieces = [random.randbytes(size) for size in sizes]
    path, ends = tmp_path / "file", []
    path.write_bytes(b"what was there before, and longer" * 100)
    with BlockFile(path) as file:
        for piece in pieces:
            file.write(memoryview(piece))
            ends.append(path.stat().st_size)
    assert path.read_bytes() == b"".join(pieces)
    assert all(end % 64 == 0 for end in ends)


def test_data_of_other_items_is_written_as_bytes(tmp_path: Path) -> None:
    with BlockFile(tmp_path / "file") as file:
        file.write(memoryview(b"12345678").cast("H"))
    assert (tmp_path / "file").read_bytes() == b"12345678"


def test_a_failure_passes_and_closes_the_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError), BlockFile(tmp_path / "file") as file:
        file.write(b"some")
        raise KeyError
    assert (tmp_path / "file").read_bytes() == b""
    with pytest.raises(ValueError, match="closed"):
        file._file.write(b"more")
