"""JSON and safetensors files that appear whole or not at all, written and read one tensor at a time."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from picompile.errors import UsageError
from picompile.frontend.tensor_file import opened
from picompile.output import atomic_file
from picompile.output.files import json_bytes, safetensors_header

_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path`, as one atomic replacement.

    Bytes in file names that are not UTF-8 are replaced by `?`.
    """
    with atomic_file(path) as file:
        file.write(json_bytes(content, errors="replace"))


def read_notes(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or an empty one if it cannot be read, so that its contents are made again."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` to a safetensors file. Unlike `safetensors.torch.save_file`, this copies no data in memory."""
    records = [(name, _DTYPES[tensor.dtype], tuple(tensor.shape), tensor.nbytes) for name, tensor in tensors.items()]
    with atomic_file(path) as file:
        file.write(safetensors_header(records, metadata))
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def read_tensors(path: Path, only: str | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return copies of the tensors of a safetensors file, and the file's metadata.

    Args:
        path: The file.
        only: The name of the only tensor to read; None reads all.

    Raises:
        UsageError: The file is missing, truncated or damaged.
    """
    with opened(path, "missing or damaged", UsageError) as file:
        names = [name for name in file.keys() if only in (None, name)]  # noqa: SIM118 (no mapping)
        # Copied, because sums depend on the memory layout: a run that is resumed must give the same bytes.
        return {name: file.get_tensor(name).clone() for name in names}, dict(file.metadata() or {})
