"""The tensors of a weights.safetensors file: where each lies. The file itself is mapped and never copied.

Only the header is read here (https://github.com/huggingface/safetensors#format): eight bytes of length, then JSON.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping

from picompile_runtime.errors import ArtifactError
from picompile_runtime.fields import Fields, parse_object
from picompile_runtime.memory import ALIGNMENT, Tensor

_MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_DTYPES = {"U8": "uint8", "I8": "int8", "I32": "int32", "I64": "int64", "F16": "float16", "F32": "float32"}


def read_header(memory: mmap.mmap, where: str) -> Mapping[str, Tensor]:
    """Every tensor of a mapped safetensors file, by name; its offset is that in the file.

    Raises ArtifactError if a tensor does not lie inside the file, at a multiple of 64 bytes.
    """
    size = int.from_bytes(memory[:8], "little")
    start = 8 + size
    if len(memory) < 8 or size > _MOST_HEADER_BYTES or start > len(memory):
        raise ArtifactError(f"{where}: is not a safetensors file (header of {size} bytes in {len(memory)})")
    header = parse_object(memory[8:start], where)
    header.data.pop("__metadata__", None)
    return {name: _tensor(entry, start, len(memory)) for name, entry in header.members().items()}


def _tensor(entry: Fields, start: int, end: int) -> Tensor:
    if (dtype := _DTYPES.get(entry.text("dtype"))) is None:
        raise entry.wrong("dtype", f"one of {', '.join(_DTYPES)}")
    span = entry.data.get("data_offsets")
    if not isinstance(span, list) or len(span) != 2 or not all(type(offset) is int and offset >= 0 for offset in span):
        raise entry.wrong("data_offsets", "two offsets")
    tensor = Tensor(dtype, entry.shape("shape"), start + span[0])
    if span[1] - span[0] != tensor.size_bytes or tensor.offset + tensor.size_bytes > end:
        raise entry.wrong("data_offsets", f"the place of {tensor.size_bytes} bytes inside the file")
    if tensor.offset % ALIGNMENT:
        raise ArtifactError(f"{entry.where}: lies at byte {tensor.offset}, which is no multiple of {ALIGNMENT}")
    return tensor
