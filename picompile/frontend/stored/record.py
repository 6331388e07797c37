"""The records of stored quantized matrices: a method's declaration, the files it reads, and the matrices it finds."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from picompile.errors import UnsupportedModelError
from picompile.frontend.tensor_file import TensorHeader, read_tensor

FLOAT_DTYPES = ("F16", "BF16", "F32")


class NotReadError(Exception):
    """A variant of a method that is not read; the text names it."""


class Numbers(Protocol):
    """The numbers of one matrix, as its method stores them."""

    def values(self) -> Tensor:
        """Return what they stand for, float32 [outputs, inputs]."""
        ...

    def stored_format(self) -> str | None:
        """Return the smallest format of ours that has them, as `packed` asks for it; None where there is none."""
        ...

    def packed(self, format_name: str) -> Tensor | None:
        """Return the rows packed as a format of ours, uint8 [outputs, row bytes], where that rounds nothing; else None.

        Scales of float32 or bfloat16 may become float16, where each weight is within 2^-11 of what it was.
        """
        ...


@runtime_checkable
class SomeRows(Protocol):
    """The numbers of many matrices, of which some rows can be read without the others."""

    some_rows: bool

    def values_of(self, rows: Tensor) -> Tensor:
        """Return some rows of what `Numbers.values` returns, counted over all matrices: float32 [n, columns]."""
        ...

    def packed(self, format_name: str, rows: Tensor | None = None) -> Tensor | None:
        """Return what `Numbers.packed` returns, of `rows` alone."""
        ...


def as_float16(scales: Tensor) -> Tensor | None:
    """Return scales as float16; None where one of them is not within 2^-11 of what it was.

    Scales of rows of zeros, as tools write them, may be below 2^-24 of the largest one, and become 0.
    """
    halves, sizes = scales.to(torch.float16), scales.to(torch.float64).abs()
    off = (halves.to(torch.float64) - scales.to(torch.float64)).abs()
    is_near = (off <= sizes * 2.0**-11) | (sizes <= sizes.max() * 2.0**-24)
    return halves if bool(is_near.all()) and bool(torch.isfinite(halves).all()) else None


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [outputs, inputs] that takes the place of its `parts`, tensors of the checkpoint.

    `numbers` reads them; it raises `UnsupportedModelError` for files that cannot be read and values that no matrix has.
    With `turned` it is a stack of transposes [experts, inputs, outputs], whose rows are packed as those of all experts.
    """

    header: TensorHeader
    parts: frozenset[str]
    numbers: Callable[[], Numbers]
    turned: bool = False


@dataclass(frozen=True)
class Found:
    """The matrices of a checkpoint by the names of their modules, or of their parameters where a module has several.

    `unused` are tensors that have no effect on weights, such as scales of activations. `notes` are facts that a user
    should know: half a sentence each.
    """

    matrices: Mapping[str, StoredMatrix]
    unused: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


class StoredFiles:
    """The tensors of a checkpoint's files, by `headers`."""

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        self.headers = dict(headers)

    def modules(self, part: str) -> Iterator[str]:
        """Return the modules that have a tensor MODULE.part, in the order of the headers."""
        return (name.removesuffix(f".{part}") for name in self.headers if name.endswith(f".{part}"))

    def part(self, module: str, part: str) -> TensorHeader | None:
        """Return the header of MODULE.part, None where there is none."""
        return self.headers.get(f"{module}.{part}")

    def needed(self, module: str, part: str, beside: str, dtypes: Iterable[str]) -> TensorHeader:
        """Return the header of MODULE.part, of one of `dtypes`, which stands beside MODULE.beside.

        Raises `UnsupportedModelError` where it is missing or of another dtype.
        """
        header, first = self.part(module, part), self.headers[f"{module}.{beside}"]
        if header is None:
            raise UnsupportedModelError(f"{first.file}: holds {module}.{beside}, but no {module}.{part}")
        if header.dtype not in dtypes:
            read = " or ".join(dtypes)
            raise UnsupportedModelError(f"{header.file}: {module}.{part} is {header.dtype}; {read} is read")
        return header

    def read(self, module: str, part: str) -> Tensor:
        """Return MODULE.part, mapped from its file: it must not be written to."""
        name = f"{module}.{part}"
        return read_tensor(self.headers[name].file, name)

    def scales(self, module: str, part: str) -> Tensor:
        """Return MODULE.part, which has scales. Raises `UnsupportedModelError` for values that are not finite."""
        scales = self.read(module, part)
        if not bool(torch.isfinite(scales.to(torch.float32)).all()):
            file = self.headers[f"{module}.{part}"].file
            raise UnsupportedModelError(f"{file}: {module}.{part} has NaN or infinite values: it is damaged")
        return scales

    def matrix(
        self, module: str, parts: Iterable[str], shape: tuple[int, int], numbers: Callable[[], Numbers]
    ) -> StoredMatrix:
        """Return the matrix of `shape` [outputs, inputs] that is made of those of `parts` that are there."""
        names = [f"{module}.{part}" for part in parts if f"{module}.{part}" in self.headers]
        file = self.headers[names[0]].file
        if 0 in shape:
            raise UnsupportedModelError(f"{file}: {names[0]} is {list(self.headers[names[0]].shape)}: an empty matrix")
        header = TensorHeader(file, "F32", shape, f"{module}.weight", quantized=True)
        return StoredMatrix(header, frozenset(names), numbers)


@dataclass(frozen=True)
class Settings:
    """The contents of a quantization config, and the name of its method."""

    method: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def get(self, *keys: str, default: Any = None) -> Any:
        """Return the value of the first of `keys` that is there and not null."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), default)

    def refuse(self, odd: str) -> NoReturn:
        """Raise the error for a variant: `odd` goes on behind the method's name, as in "with 5 bits"."""
        raise NotReadError(f"{self.method} {odd}")

    def whole(self, what: str, value: object, accepts: Callable[[int], bool]) -> int:
        """Return `value`, a whole number that `accepts`; refuse any other, with `what` and %s for the value."""
        if type(value) is not int or not accepts(value):
            self.refuse(what % f"{value!r:.20}")
        return value

    def without(self, *keys: str) -> None:
        """Refuse a config in which one of `keys`, which change what matrices stand for, is set."""
        for key in keys:
            if value := self.values.get(key):
                self.refuse(f"with {key} {value!r:.40}")


@dataclass(frozen=True)
class Method:
    """A method by which checkpoints are quantized.

    `names` are those that `quant_method` has for it; `title` is its name in sentences, `summary` what of it is read.
    `marks` are the ends of tensors' names that no other kind of checkpoint has. `open` takes the quantization config
    and returns the function that finds the matrices; it raises `NotReadError` for variants that are not read.
    """

    names: tuple[str, ...]
    title: str
    summary: str
    marks: tuple[str, ...]
    open: Callable[[Settings], Callable[[StoredFiles], Found]]


# Scales by which an engine may quantize activations; kernels of ours have their own. Those of keys and values are left
# out of any checkpoint: `frontend/left_out.py`.
_OF_ACTIVATIONS = (
    *("input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "activation_scale"),
    *("output_scale", "output_zero_point"),
)


def activation_scales(files: StoredFiles) -> frozenset[str]:
    """Return the names of tensors that have scales of activations, not of weights."""
    return frozenset(name for name in files.headers if name.rpartition(".")[2] in _OF_ACTIVATIONS)
