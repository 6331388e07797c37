"""Finding the method of a quantized checkpoint, and reading its matrices one at a time."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from picompile.errors import UnsupportedModelError
from picompile.frontend.stored.record import Found, Method, NotReadError, Settings, SomeRows, StoredFiles
from picompile.frontend.tensor_file import TensorHeader, read_tensor
from picompile_passes.formats import FORMATS
from picompile_passes.graph.weight_source import take_rows
from picompile_passes.plugins import members

METHODS = sorted(
    (value for value in members("picompile.frontend.stored", skip=("matrices",)) if isinstance(value, Method)),
    key=lambda method: method.title.lower(),
)
# Matrices by which is known whether a format keeps all of them.
_SAMPLES = 3


@dataclass(frozen=True)
class FoundMethod:
    """The method of a checkpoint and, in `find`, the function that finds its matrices."""

    method: Method
    find: Callable[[StoredFiles], Found]


def find_method(raw: Mapping[str, Any]) -> FoundMethod | None:
    """Return how the checkpoint with the config.json `raw` is quantized, None where it is not.

    Raises `UnsupportedModelError`, naming it, for a method or a variant that is not read.
    """
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    if not quantization:
        return None
    if not isinstance(quantization, dict):
        raise _not_read(quantization)
    name = _name(quantization)
    method = next((method for method in METHODS if name in method.names), None)
    if method is None:
        raise _not_read(name)
    try:
        return FoundMethod(method, method.open(Settings(name, quantization)))
    except NotReadError as error:
        raise _not_read(error) from error


def _name(quantization: Mapping[str, Any]) -> str:
    """Return the method's name; early configs of bitsandbytes have none."""
    if quantization.get("load_in_4bit") is True or quantization.get("load_in_8bit") is True:
        return "bitsandbytes"
    return str(quantization.get("quant_method", "unknown"))


def _not_read(what: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the checkpoint is quantized ({str(what)[:100]}); read are {', '.join(method.summary for method in METHODS)}; "
        "use the original, unquantized one"
    )


def quantized_part(headers: Mapping[str, TensorHeader]) -> str | None:
    """Return the name of a tensor that only a quantized checkpoint has, None where there is none."""
    marks = tuple(mark for method in METHODS for mark in method.marks)
    return next((name for name in headers if name.endswith(marks)), None)


class StoredMatrices:
    """The tensors of a quantized checkpoint, as if it were not.

    `headers` has NAME.weight, F32 [outputs, inputs], in place of the tensors that hold a matrix, and all other tensors
    as they are, but for those that have no effect on weights. `notes` are facts that a user should know.
    """

    def __init__(self, found: FoundMethod, stored: Mapping[str, TensorHeader]) -> None:
        """Check `stored`, the headers of the checkpoint's files; `UnsupportedModelError` for shapes that do not fit."""
        self.title = found.method.title
        result = found.find(StoredFiles(stored))
        parts = {part for matrix in result.matrices.values() for part in matrix.parts}
        self.notes = result.notes
        self.headers = {name: header for name, header in stored.items() if name not in parts | result.unused}
        self._matrices = {matrix.header.name: matrix for matrix in result.matrices.values()}
        for name, matrix in self._matrices.items():
            if name in self.headers:
                part = min(matrix.parts)
                raise UnsupportedModelError(f"{matrix.header.file}: holds {name} and {part}: two weights")
            self.headers[name] = matrix.header

    def is_quantized(self, name: str) -> bool:
        """Return whether the tensor `name` is a quantized matrix; `load` and `packed` are for these alone."""
        return name in self._matrices

    def load(self, name: str) -> Tensor:
        """Return NAME.weight, float32 [outputs, inputs]: what the stored numbers stand for.

        Raises `KeyError` for a name that there is not, `UnsupportedModelError` for files that cannot be read and scales
        that are NaN or infinite.
        """
        return self._matrices[name].numbers().values()

    def load_rows(self, name: str, rows: Tensor) -> Tensor:
        """Return `rows` of what `load` returns, counted over all matrices: float32 [n, columns]. Raises as it does."""
        numbers = self._matrices[name].numbers()
        return numbers.values_of(rows) if isinstance(numbers, SomeRows) else take_rows(numbers.values(), rows)

    def is_turned(self, name: str) -> bool:
        """Return whether the matrix `name` is a stack of transposes, whose rows are packed."""
        return self._matrices[name].turned

    def stored_format(self, name: str) -> str | None:
        """Return the format of ours that has the numbers of NAME.weight, None where none has. Raises as `load` does."""
        return self._matrices[name].numbers().stored_format()

    def packed(self, name: str, format_name: str, rows: Tensor | None = None) -> Tensor | None:
        """Return the rows of NAME.weight in a format of ours, uint8 [outputs, row bytes], where it has their numbers.

        None where it has not. `rows` are the numbers of those that are wanted, all if it is None. Raises as `load`
        does.
        """
        numbers = self._matrices[name].numbers()
        if rows is not None and isinstance(numbers, SomeRows):
            return numbers.packed(format_name, rows)
        packed = numbers.packed(format_name)
        return packed if packed is None or rows is None else take_rows(packed, rows)

    def rounds_again(self, format_name: str, transposed: bool = False) -> str | None:
        """Return the method's name where the format rounds matrices a second time, else None. Reads a few of them.

        With `transposed` it is asked of their columns, of which none is packed as it is.
        """
        if transposed:
            return self.title if FORMATS[format_name].scale and self._matrices else None
        names = list(self._matrices)
        sampled = names[:: max(1, len(names) // _SAMPLES)][:_SAMPLES]
        return self.title if any(self.packed(name, format_name) is None for name in sampled) else None

    def without_zero_biases(self, expected: Container[str]) -> dict[str, TensorHeader]:
        """Return `headers` but for biases that are zero and not among the names `expected`.

        Old versions of AutoGPTQ wrote one beside every matrix.
        """
        biases = [f"{name.removesuffix('.weight')}.bias" for name in self._matrices]
        unwanted = {
            name
            for name in biases
            if name in self.headers and name not in expected and not bool(_read(self.headers[name]).any())
        }
        return {name: header for name, header in self.headers.items() if name not in unwanted}


def _read(header: TensorHeader) -> Tensor:
    return read_tensor(header.file, header.name)
