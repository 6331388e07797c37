"""Whether embedding and head of a GGUF file are one matrix."""

import mmap

from picompile.frontend.gguf.header import GgufHeader

# Falcon and BLOOM share the matrices of embedding and head, and converters write both of them.
_TIED_WITH_BOTH = ("falcon", "bloom", "starcoder", "mpt")
_COMPARED_BYTES = 1 << 20


def is_tied(header: GgufHeader, architecture: str) -> bool:
    """Return whether the head's matrix is the embedding's: the file has none, or in some architectures an equal one."""
    tied = "output.weight" not in header.tensors
    if not tied and architecture in _TIED_WITH_BOTH:
        tied = _equal_data(header, "token_embd.weight", "output.weight")
    return tied


def _equal_data(header: GgufHeader, left: str, right: str) -> bool:
    """Return whether two tensors are of the same type and bytes."""
    one, other = header.tensors[left], header.tensors[right]
    if (one.type, one.shape) != (other.type, other.shape):
        return False
    if one.file != other.file:
        return False
    with one.file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for start in range(0, one.size_bytes, _COMPARED_BYTES):
            size = min(_COMPARED_BYTES, one.size_bytes - start)
            first, second = one.offset + start, other.offset + start
            if data[first : first + size] != data[second : second + size]:
                return False
    return True
