"""AWQ: AutoAWQ's checkpoints of 4 bits in the version `gemm`.

A weight is (code - zero) × scale, zero and scale those of the group of its input and of its output. `qweight`, int32
[inputs, outputs / 8], and `qzeros`, int32 [groups, outputs / 8], have eight outputs in an int32, of which output i lies
at place 0, 4, 1, 5, 2, 6, 3, 7.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from picompile.frontend.stored.grouped import PARTS, Grouping, check_parts, fitting_grouping, groupings
from picompile.frontend.stored.integers import IntegerMatrix
from picompile.frontend.stored.record import Found, Method, Settings, StoredFiles, StoredMatrix
from picompile.frontend.stored.words import WORD_BITS, unpack

_BITS = 4
_PER_WORD = WORD_BITS // _BITS
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def _open(settings: Settings) -> Callable[[StoredFiles], Found]:
    version, zero_point = settings.get("version", default="gemm"), settings.values.get("zero_point", True)
    if str(version).lower() != "gemm" or zero_point is not True:
        settings.refuse(f"of version {version!r:.20}, or without zero_point")
    if settings.get("backend") == "llm-awq":
        settings.refuse("of the backend 'llm-awq'")
    form = settings.get("checkpoint_format", "format", default="gemm")
    if str(form).lower() != "gemm":
        settings.refuse(f"in the format {form!r:.40}")
    return find_awq(groupings(settings, (_BITS,), {}))


def find_awq(candidates: list[Grouping]) -> Callable[[StoredFiles], Found]:
    """Return the function that finds the matrices of an AWQ checkpoint; it raises `UnsupportedModelError`."""

    def find(files: StoredFiles) -> Found:
        return Found({module: _matrix(files, module, candidates) for module in list(files.modules("qweight"))})

    return find


def _matrix(files: StoredFiles, module: str, candidates: list[Grouping]) -> StoredMatrix:
    check_parts(files, module)
    inputs, columns = files.headers[f"{module}.qweight"].shape
    outputs = columns * _PER_WORD

    def shapes(grouping: Grouping) -> dict[str, tuple[int, ...]]:
        groups = grouping.groups(inputs)
        return {"qzeros": (groups, columns), "scales": (groups, outputs)}

    grouping = fitting_grouping(files, module, candidates, shapes)

    def numbers() -> IntegerMatrix:
        words, zeros = files.read(module, "qweight"), _unpack_outputs(files.read(module, "qzeros"))
        return IntegerMatrix(
            _BITS,
            lambda start, stop: _unpack_outputs(words[start:stop]),
            zeros,
            files.scales(module, "scales"),
            grouping.of_inputs(inputs),
        )

    return files.matrix(module, PARTS[:3], (outputs, inputs), numbers)


def _unpack_outputs(words: Tensor) -> Tensor:
    """Return the integers of int32 [rows, n], int16 [rows, 8 n], in the order of the outputs."""
    integers = unpack(words.reshape(1, -1), _BITS, _PER_WORD).view(_PER_WORD, *words.shape)
    return integers[torch.tensor(_PLACES)].permute(1, 2, 0).reshape(len(words), -1)


METHOD = Method(names=("awq",), title="AWQ", summary="awq of 4 bits (gemm)", marks=(".qweight",), open=_open)
