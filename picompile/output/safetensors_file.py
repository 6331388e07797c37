"""The header of a safetensors file, for writers that put one tensor after another into the file.

The format is a u64 length, a JSON header of that length, and the tensors' data
(https://github.com/huggingface/safetensors). `safetensors.torch.save_file` needs all tensors in memory at once, and
copies them.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any

# A tensor's name, its dtype as safetensors calls it (`F16`), its shape, and its size in bytes.
TensorRecord = tuple[str, str, tuple[int, ...], int]


def safetensors_header(
    tensors: Iterable[TensorRecord], metadata: Mapping[str, str] | None = None, alignment_bytes: int = 8
) -> bytes:
    """Return the bytes before the data of a safetensors file: the length and the JSON header.

    Args:
        tensors: The tensors in the order of their data, which follow each other without gaps.
        metadata: Texts for the header's `__metadata__`; the entry is left out if there are none.
        alignment_bytes: The header is padded with spaces so that the data begin at a multiple of this.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape, size_bytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size_bytes]}
        offset += size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // alignment_bytes) * alignment_bytes - 8
    return struct.pack("<Q", padded) + text.ljust(padded)
