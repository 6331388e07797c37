"""A weight source over a GGUF file, as a compilation reads one."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from torch import Tensor

from picompile.frontend.gguf.blocks import PLAIN
from picompile.frontend.gguf.header import GgufHeader
from picompile.frontend.gguf.model import GgufModel
from picompile.frontend.gguf.tensors import GgufTensor
from picompile.frontend.weight_values import DTYPES
from picompile_passes.formats import COARSE_BITS, FORMATS


class GgufWeights:
    """A `WeightSource` over `opened`: the parameter `name` is its tensor `names[name]`.

    `match_names` of `frontend/checkpoint.py` makes `names` of `opened.tensors`, which have what it asks of headers.
    """

    def __init__(self, opened: GgufModel, names: Mapping[str, str]) -> None:
        self._opened = opened
        self._names = dict(names)

    def names(self) -> Iterable[str]:
        """Return the names of the model's parameters."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the parameter `name`. Raises `KeyError` for a name that there is not."""
        return self._opened.tensors[self._names[name]].shape

    def load(self, name: str) -> Tensor:
        """Return the parameter `name`, as `GgufModel.load` does: it must not be written to."""
        return self._opened.load(self._names[name])

    def load_rows(self, name: str, rows: Tensor) -> Tensor:
        """Return some rows of the parameter `name`, as `GgufModel.load_rows` does: they must not be written to."""
        return self._opened.load_rows(self._names[name], rows)

    def packed(
        self, name: str, format_name: str, transposed: bool = False, rows: Tensor | None = None
    ) -> Tensor | None:
        """Return the rows of the parameter `name` without rounding them again, or None, as `GgufModel.packed` does."""
        return self._opened.packed(self._names[name], format_name, transposed, rows)

    def rounds_again(self, format_name: str, transposed: bool = False) -> str | None:
        """Return the type of most numbers, such as Q4_K, that the format rounds again although it has 6 bits or fewer.

        None where it does not, and for formats of more than `COARSE_BITS`: their rounding is small beside the first.
        With `transposed` it is asked of matrices whose columns are packed as rows.
        """
        sizes: Counter[str] = Counter()
        for stored in self._names.values():
            sizes[self._opened.tensors[stored].type] += math.prod(self._opened.tensors[stored].shape)
        most = max(sizes, key=lambda kind: sizes[kind])
        keeps = not transposed and most in FORMATS[format_name].ggml
        again = FORMATS[format_name].bits <= COARSE_BITS and most not in PLAIN and not keeps
        return most if again else None

    def stored(self) -> Mapping[str, str | None]:
        """Return the format that has the numbers of each quantized matrix, by parameter; None where there is none."""
        tensors = {name: self._opened.tensors[stored] for name, stored in self._names.items()}
        quantized = [
            name for name, tensor in tensors.items() if tensor.type not in PLAIN and len(tensor.shape) in (2, 3)
        ]
        turned = self.turned()
        return {name: self._opened.stored_format(self._names[name], name in turned) for name in quantized}

    def turned(self) -> frozenset[str]:
        """Return the parameters whose matrices the file has transposed."""
        return frozenset(name for name, stored in self._names.items() if self._opened.is_turned(stored))

    @property
    def header(self) -> GgufHeader:
        """The file's header, with entries for parameters that are parts of tensors."""
        return self._opened.header

    def tensors(self, names: Iterable[str]) -> dict[str, GgufTensor]:
        """Return how the parameters `names` are made of tensors of the file."""
        return {name: self._opened.tensors[self._names[name]] for name in names}

    def close(self) -> None:
        """Do nothing: the file is unmapped with the last tensor that lies in it."""

    @property
    def dtype(self) -> str:
        """`f32`, `f16` or `bf16`: the dtype that most numbers have when they are loaded."""
        sizes = dict.fromkeys(DTYPES, 0)
        for stored in self._names.values():
            tensor = self._opened.tensors[stored]
            sizes[tensor.dtype] += math.prod(tensor.shape)
        return DTYPES[max(sizes, key=lambda dtype: sizes[dtype])]
