"""Predictors out of a GGUF file, by the `gguf` package; in the guarded process only."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor, dequantize, gguf_reader

from picompile.predictors.powerinfer.handover import Part, RefusedError


def read_gguf(file: str, magic: str, tensors: Mapping[str, Sequence[object]]) -> list[Part]:
    """The tensors of `file` that `tensors` names: our name → its name there and its shape.

    `magic` is what the file starts with. Raises `RefusedError`, or whatever the reader comes up with.
    """
    # PowerInfer's files differ from others in their first four bytes, for which the reader knows one value only.
    gguf_reader.GGUF_MAGIC = int.from_bytes(magic.encode("ascii"), "little")
    found = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    return [_part(ours, str(theirs), tuple(shape), found) for ours, (theirs, shape) in tensors.items()]  # type: ignore[arg-type]


def _part(ours: str, theirs: str, shape: tuple[int, ...], found: Mapping[str, ReaderTensor]) -> Part:
    tensor = found.get(theirs)
    if tensor is None or tuple(int(size) for size in reversed(tensor.shape)) != shape:
        raise RefusedError(f"{theirs} is read otherwise by the gguf package than by its header")

    def load() -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        return values

    return Part(ours, shape, "F16", load, theirs)
