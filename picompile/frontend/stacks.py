"""Stacks of experts' matrices, of which checkpoints have a tensor for each expert.

transformers 5 has the matrices of all experts of a layer in one parameter, and puts it together as it loads: first the
matrices of one kind, expert by expert, and then gate and up of each expert, one below the other. Its rules are in its
library; here those that say this are found, and a `TensorHeader` with parts stands for the parameter.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from picompile.errors import UnsupportedModelError
from picompile.frontend.tensor_file import TensorHeader
from picompile.frontend.weight_values import DTYPES

_EXPERT = re.compile(r"\.experts\.(\d{1,6})\.")


def expert_number(name: str) -> int | None:
    """Return which expert the tensor `name` of a checkpoint is of, None for one of no expert."""
    found = _EXPERT.findall(name)
    return int(found[-1]) if found else None


def makes_stack(converter: WeightConverter) -> bool:
    """Return whether transformers makes a stack of experts of the tensors that `converter` takes, and nothing else."""
    kinds = [type(operation) for operation in converter.operations]
    dims = [getattr(operation, "dim", None) for operation in converter.operations]
    one = len(converter.target_patterns) == 1
    if kinds == [MergeModulelist]:
        return one and dims == [0] and len(converter.source_patterns) == 1
    return one and kinds == [MergeModulelist, Concatenate] and dims == [0, 1]


@dataclass
class Stack:
    """The tensors of one stack, as they are found: by their kind, and by the number of the expert."""

    converter: WeightConverter
    found: dict[str, dict[int, TensorHeader]] = field(default_factory=dict)

    def add(self, pattern: str, expert: int, header: TensorHeader) -> TensorHeader:
        """Take the tensor that `pattern` of the converter matched, and return it, or one that is there already."""
        return self.found.setdefault(pattern, {}).setdefault(expert, header)

    def header(self, folder: Path, name: str, shape: tuple[int, ...]) -> TensorHeader:
        """Return the header of the parameter `name`, which has the first dimension of `shape`.

        Raises `UnsupportedModelError` for an expert that is missing or one too many, and for matrices of several
        shapes.
        """
        kinds = [self.found.get(pattern, {}) for pattern in self.converter.source_patterns]
        experts = range(shape[0] if shape else 0)
        for pattern, kind in zip(self.converter.source_patterns, kinds, strict=True):
            missing = next((number for number in experts if number not in kind), None)
            if missing is not None:
                what = pattern.replace("\\", "").replace("*", str(missing))
                raise UnsupportedModelError(f"{folder}: no tensor {what} for {name}, which config.json asks for")
            if others := [header.name for number, header in kind.items() if number not in experts]:
                raise UnsupportedModelError(
                    f"{folder}: holds {others[0]}, but config.json makes {len(experts)} experts"
                )
        parts = tuple(tuple(kind[number] for kind in kinds) for number in experts)
        return _joined(name, parts)


def _joined(name: str, parts: tuple[tuple[TensorHeader, ...], ...]) -> TensorHeader:
    """Return the header of a stack of matrices, whose parts are those of one expert each, one below the other."""
    like = parts[0]
    for part, first in ((part, first) for each in parts for part, first in zip(each, like, strict=True)):
        if len(part.shape) != 2 or part.shape != first.shape or part.shape[1] != like[0].shape[1]:
            raise UnsupportedModelError(
                f"{part.file}: {part.name} is {list(part.shape)}, and {like[0].name} is {list(like[0].shape)}: "
                "experts' matrices must be alike"
            )
        if part.dtype not in DTYPES:
            raise UnsupportedModelError(f"{part.file}: {part.name} is {part.dtype}; only {', '.join(DTYPES)} are read")
    dtypes = {part.dtype for each in parts for part in each}
    # Numbers of several dtypes are exact in the widest.
    dtype = dtypes.pop() if len(dtypes) == 1 else "F32"
    shape = (len(parts), sum(part.shape[0] for part in like), like[0].shape[1])
    return TensorHeader(like[0].file, dtype, shape, name, parts=parts)


def stacked(
    folder: Path, stacks: Mapping[str, Stack], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, TensorHeader]:
    """Return the headers of all `stacks`, by the names of their parameters, which have the `shapes`."""
    return {name: stack.header(folder, name, shapes[name]) for name, stack in stacks.items()}
