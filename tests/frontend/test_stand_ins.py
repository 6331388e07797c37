"""Files that are not what their names say: pointers of Git LFS, and web pages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from picompile.errors import PicompileError, UnsupportedModelError, UsageError
from picompile.frontend.gguf.header import read_header
from picompile.frontend.json_file import read_json_object, read_text
from picompile.frontend.model_file import require_model
from picompile.frontend.stand_ins import refuse_stand_in
from picompile.frontend.tensor_file import headers_of
from picompile.frontend.tokenizer.read import read_tokenizer

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n"
PAGE = "\n<!DOCTYPE HTML>\n<html><head><title>Sign in</title></head></html>"
READERS: list[tuple[str, Callable[[Path], Any], type[PicompileError]]] = [
    ("model.safetensors", headers_of, UnsupportedModelError),
    ("config.json", read_json_object, UnsupportedModelError),
    ("chat_template.jinja", lambda file: read_text(file, 1000), UnsupportedModelError),
    ("tokenizer.model", lambda file: read_tokenizer(file.parent, 10), UnsupportedModelError),
    ("model.gguf", read_header, UsageError),
    ("model.gguf", require_model, UsageError),
]


@pytest.mark.parametrize(("content", "says"), [(POINTER, "run `git lfs pull`"), (PAGE, "is a web page, ")])
@pytest.mark.parametrize(("name", "reads", "kind"), READERS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_every_reader_says_what_stands_there(
    tmp_path: Path, name: str, reads: Callable[[Path], Any], kind: type[PicompileError], content: str, says: str
) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(kind) as caught:
        reads(file)
    assert str(caught.value).startswith(f"{file}: is a ") and says in str(caught.value)
    assert "not the file itself" in str(caught.value) and "\n" not in str(caught.value)


def test_other_files_are_left_to_their_readers(tmp_path: Path) -> None:
    for content in (b"", b"{}", b"GGUF", b"version 1", b"<s>"):
        (tmp_path / "file").write_bytes(content)
        refuse_stand_in(tmp_path / "file")
    refuse_stand_in(tmp_path / "missing")
    refuse_stand_in(tmp_path)
