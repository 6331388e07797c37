"""Tensors of a model that are parts of a file's tensors, or numbers of its metadata: entries for where they lie."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from picompile.frontend.gguf.header import GgufHeader, TensorEntry
from picompile.frontend.gguf.tensor_types import FLOAT32

# xIELU's parameters, which files list for all layers.
XIELU = ("alpha_n", "alpha_p")
_HEAD_NORMS = re.compile(r"(blk\.[0-9]+\.attn_[qk]_norm)\.weight")
_MOST_HEADS = 1024
_FUSED = re.compile(r"(blk\.[0-9]+\.)attn_qkv(\.(?:weight|bias))")


def with_views(header: GgufHeader, names: Mapping[str, str], parameters: Mapping[str, tuple[int, ...]]) -> GgufHeader:
    """Return `header` with entries for the parameters that are parts of others.

    Rows of a fused projection are queries, keys and values one after the other, where the model has three matrices.
    `names` are the parameters' names by those of tensors, and `parameters` their shapes.
    """
    tensors: dict[str, TensorEntry] = {}
    for name, entry in header.tensors.items():
        parts = {} if name in names else _parts(entry, names, parameters)
        tensors |= parts if parts and not parts.keys() & header.tensors.keys() else {name: entry}
    return replace(header, tensors=tensors | _xielu(header, names, parameters))


def _parts(
    entry: TensorEntry, names: Mapping[str, str], parameters: Mapping[str, tuple[int, ...]]
) -> dict[str, TensorEntry]:
    """Return entries for the parts of a tensor that is no parameter, none for a tensor that has no such parts."""
    if match := _FUSED.fullmatch(entry.name):
        parts = [f"{match[1]}attn_{letter}{match[2]}" for letter in "qkv"]
        shapes = [parameters.get(names.get(part, ""), ()) for part in parts]
        counts = [shape[0] if shape else 0 for shape in shapes]
    elif (match := _HEAD_NORMS.fullmatch(entry.name)) and len(entry.shape) == 2:
        counts = [1] * min(entry.shape[0], _MOST_HEADS)
        parts = [f"{match[1]}.{head}.weight" for head in range(len(counts))]
        shapes = [parameters.get(names.get(part, ""), ()) for part in parts]
    else:
        return {}
    if sum(counts) != entry.shape[0] or not all(counts) or not all(shapes):
        return {}
    row_bytes = entry.size_bytes // entry.shape[0]
    found, start = {}, entry.offset
    for part, shape, count in zip(parts, shapes, counts, strict=True):
        stored = (count, *entry.shape[1:]) if len(shape) == len(entry.shape) else entry.shape[1:]
        found[part] = replace(entry, name=part, shape=stored, offset=start, size_bytes=count * row_bytes)
        start += count * row_bytes
    return found


def _xielu(
    header: GgufHeader, names: Mapping[str, str], parameters: Mapping[str, tuple[int, ...]]
) -> dict[str, TensorEntry]:
    """Return entries for xIELU's numbers of each layer."""
    found = {}
    for name, parameter in names.items():
        block, _, key = name.partition(".xielu.")
        place = header.arrays.get(f"xielu.{key}")
        layer = int(block.removeprefix("blk.")) if key in XIELU else 0
        if place is not None and place.kind == FLOAT32 and layer < place.count:
            shape = parameters[parameter]
            if math.prod(shape) == 1:
                offset = place.offset + 4 * layer
                found[name] = TensorEntry(name, type="F32", shape=shape, offset=offset, size_bytes=4, file=header.file)
    return found
