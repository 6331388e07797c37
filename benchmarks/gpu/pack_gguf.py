"""The head of a GGUF file for llama.cpp, and what its tensors are: the GPU's machine makes their random weights.

All matrices are in q4_0, whose rows have the bytes of q4's. The text of the model means nothing.
"""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.peers.gguf import Array, begin, llama_tensors
from picompile.synth.shapes import ModelShape, tensor_shapes

_FORMAT = "q4_0"


class _Shapes:
    """The tensors of a shape, which have no values."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def __getitem__(self, name: str) -> Array:
        raise KeyError(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]


def pack_gguf(shape: ModelShape, folder: Path) -> str:
    """Write a zip file into `folder`, from which `weights.write_gguf` makes a whole one; return its name."""
    name, config = f"{shape.name}.gguf.zip", dict(shape.config)
    tensors = list(llama_tensors(_Shapes(dict(tensor_shapes(shape))), config))
    made: list[dict[str, Any]] = [
        {
            "kind": "matrix" if tensor.is_matrix else "ones",
            "dtype": str(tensor.dtype(_FORMAT)),
            "shape": tensor.stored_shape(_FORMAT),
            "columns": tensor.shape[-1],
            "role": _FORMAT,
            "format": _FORMAT,
        }
        for tensor in tensors
    ]
    with TemporaryDirectory() as work:
        header = Path(work) / "header"
        begin(header, config, tensors, _FORMAT, vocabulary=True, powerinfer=False).close()
        with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            archive.write(header, "header")
            archive.writestr("tensors.json", json.dumps(made))
    return name
