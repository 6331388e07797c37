"""Files that appear whole or not at all, and tensors in them that are written and read one at a time."""

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from picompile.errors import UsageError
from picompile.frontend.checkpoint import READ_ERRORS, one_line, open_file
from picompile.output import appearing_file

_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """JSON as people and `diff` read it."""
    with appearing_file(path) as file:
        # Names of files need not be text.
        file.write((json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "replace"))


def read_notes(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty where there is none that can be read, so that what it notes is made again."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file. Unlike `safetensors.torch.save_file` it makes no copy of all the data in memory."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with appearing_file(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def read_tensors(path: Path, only: str | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, or the one called `only`, in memory of their own, and the file's metadata.

    Raises `UsageError` for a file that is missing, cut or damaged.
    """
    with _opened(path) as file:
        names = [name for name in file.keys() if only in (None, name)]  # noqa: SIM118 (no mapping)
        # Copied, since sums depend on how numbers lie in memory: a run that goes on must not differ.
        return {name: file.get_tensor(name).clone() for name in names}, dict(file.metadata() or {})


def read_kinds(path: Path) -> dict[str, str]:
    """What a file's tensors are, from its header: `F16 [700, 192]`. Raises `UsageError` as `read_tensors` does."""
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return {name: f"{found.get_dtype()} {list(found.get_shape())}" for name, found in slices.items()}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with open_file(path) as file:
            yield file
    except READ_ERRORS as error:
        raise UsageError(f"{path}: missing or damaged: {one_line(error)}") from error
