"""One safetensors file: what tensors it has, and one of them at a time. Its errors say which file, and why."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from picompile.errors import PicompileError, UnsupportedModelError
from picompile.frontend.messages import one_line
from picompile.frontend.stand_ins import refuse_stand_in


@dataclass(frozen=True)
class TensorHeader:
    """A tensor's place, dtype and shape. `dtype` is safetensors' name; `name` is the tensor's in its file.

    With `quantized` it is a matrix that other tensors of the file stand for, and `name` that of its weight. With
    `parts` it is a stack of matrices: one for each expert, whose parts lie one below the other.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    name: str = ""
    quantized: bool = False
    parts: "tuple[tuple[TensorHeader, ...], ...]" = ()


@contextmanager
def opened(
    file: Path, what: str = "truncated or damaged", kind: type[PicompileError] = UnsupportedModelError
) -> Iterator[Any]:
    """Open a file, as safetensors does. Raise as `explaining` does."""
    with explaining(file, what, kind), safe_open(str(file), framework="pt", device="cpu") as handle:
        yield handle


@contextmanager
def explaining(file: Path, what: str, kind: type[PicompileError] = UnsupportedModelError) -> Iterator[None]:
    """Raise `kind` where the block cannot read the file, or make anything of its content; `what` says so."""
    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        refuse_stand_in(file, kind)
        raise kind(f"{file}: {what}: {one_line(error)}") from error


def headers_of(
    file: Path, what: str = "truncated or damaged", kind: type[PicompileError] = UnsupportedModelError
) -> dict[str, TensorHeader]:
    """Return the headers of all tensors of a file by name. Raise as `opened` does."""
    with opened(file, what, kind) as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (a handle is no mapping)
        return {name: TensorHeader(file, s.get_dtype(), tuple(s.get_shape()), name) for name, s in slices.items()}


def read_tensor(file: Path, name: str, kind: type[PicompileError] = UnsupportedModelError) -> Tensor:
    """Return a tensor, mapped from the file: it must not be written to. Raise as `opened` does."""
    with opened(file, f"cannot read {name}", kind) as handle:
        tensor: Tensor = handle.get_tensor(name)
    return tensor
