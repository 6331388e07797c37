"""GPTQ: AutoGPTQ's and GPTQModel's checkpoints, of 2, 3, 4 and 8 bits.

A weight is (code - zero) × scale, zero and scale those of the group of its input and of its output. `qweight`, int32
[inputs × bits / 32, outputs], has the codes of an output in its column; `qzeros`, int32 [groups, outputs × bits / 32],
the zeros of a group in its row, less 1 in the checkpoint format `gptq` and as they are in `gptq_v2`. One is subtracted
from and added to whole int32, as GPTQModel does: a zero of 0 borrows from its neighbour. With 3 bits, whose integers
cross words, it does so for each integer.

Which format a matrix has is known from its zeros where these are all in the middle: files of several tools have zeros
of `gptq_v2` and say `gptq` (vllm-project/vllm#38966). Other zeros are read as the config says, unless the weights would
then be a step away from the mean of 0 that weights have.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from picompile.errors import UnsupportedModelError
from picompile.frontend.stored.grouped import (
    PARTS,
    Grouping,
    check_parts,
    fitting_grouping,
    groupings,
)
from picompile.frontend.stored.integers import IntegerMatrix
from picompile.frontend.stored.record import Found, Method, Settings, StoredFiles, StoredMatrix
from picompile.frontend.stored.words import WHOLE, WORD_BITS, unpack, words_of

_BITS = (2, 3, 4, 8)
_FORMATS = ("gptq", "gptq_v2")
# Codes of a matrix by which the reading of its zeros is checked, and the largest standard error of their mean.
_SAMPLED = 1 << 18
_MOST_ERROR = 0.05
# Integers of more bits have steps that are small beside the weights, and a mean says nothing.
_MOST_CHECKED_BITS = 4


@dataclass(frozen=True)
class GptqConfig:
    """A GPTQ config: the groupings of its matrices, and what it says of all of them.

    `less_one` is whether zeros are stored less 1, `symmetric` whether they are all in the middle, `ordered` whether
    groups are not of inputs side by side, so that each matrix needs its `g_idx`.
    """

    groupings: list[Grouping]
    less_one: bool
    symmetric: bool
    ordered: bool


def _open(settings: Settings) -> Callable[[StoredFiles], Found]:
    form = settings.get("checkpoint_format", "format", default="gptq")
    if form not in _FORMATS or settings.get("is_marlin_format"):
        settings.refuse(f"in the format {form if form not in _FORMATS else 'marlin'!r:.40}")
    settings.without("rotation", "adapter", "planar")
    if settings.get("pack_dtype", default="int32") != "int32":
        settings.refuse(f"with pack_dtype {settings.get('pack_dtype')!r:.40}")
    dynamic = settings.get("dynamic", default={})
    if not isinstance(dynamic, dict):
        settings.refuse(f"with dynamic {dynamic!r:.40}")
    # A pattern that begins with -: names modules that are not quantized.
    overrides = {pattern: override for pattern, override in dynamic.items() if not str(pattern).startswith("-:")}
    return find_gptq(
        GptqConfig(
            groupings(settings, _BITS, overrides),
            less_one=form == "gptq",
            symmetric=settings.get("sym", default=True) is True,
            ordered=bool(settings.get("desc_act", default=False)),
        )
    )


def find_gptq(config: GptqConfig) -> Callable[[StoredFiles], Found]:
    """Return the function that finds the matrices of a GPTQ checkpoint; it raises `UnsupportedModelError`."""

    def find(files: StoredFiles) -> Found:
        matrices: dict[str, StoredMatrix] = {}
        mislabelled = denied = 0
        for module in list(files.modules("qweight")):
            reader = _reader(files, module, config)
            mislabelled += reader.less_one != config.less_one
            denied += config.symmetric and not reader.symmetric
            matrices[module] = files.matrix(module, PARTS, reader.shape, reader.numbers)
        notes = []
        if mislabelled:
            has, said = ("as they are", "less 1") if config.less_one else ("less 1", "as they are")
            notes.append(
                f"the zeros of {mislabelled} of {len(matrices)} matrices are stored {has}, as their values show, "
                f"and not {said}, as quantization_config says"
            )
        if denied:
            notes.append(
                f"{denied} of {len(matrices)} matrices have zeros of their own, though quantization_config says sym"
            )
        return Found(matrices, notes=tuple(notes))

    return find


@dataclass(frozen=True)
class _Reader:
    """Reads one matrix of `shape` [outputs, inputs]."""

    files: StoredFiles
    module: str
    grouping: Grouping
    shape: tuple[int, int]
    less_one: bool
    symmetric: bool = True

    def numbers(self) -> IntegerMatrix:
        """Return the matrix. Raises as `StoredMatrix.numbers` does."""
        words, bits = self.files.read(self.module, "qweight"), self.grouping.bits

        def codes(start: int, stop: int) -> Tensor:
            return unpack(words[words_of(start, bits) : words_of(stop, bits)], bits, stop - start)

        scales = self.files.scales(self.module, "scales")
        return IntegerMatrix(bits, codes, self._zeros(self.less_one), scales, self._groups(len(scales)))

    def settled(self, config: GptqConfig) -> "_Reader":
        """Return the reader by whose reading of the zeros the matrix makes sense."""
        middle = 1 << (self.grouping.bits - 1)
        stored = self._zeros(less_one=False)
        low, high = (int(end) for end in torch.aminmax(stored))
        if low == high and low in (middle, middle - 1):
            return replace(self, less_one=low == middle - 1)
        if low == high and config.symmetric:
            raise UnsupportedModelError(
                f"{self._file}: the zeros of {self.module} are all {low}, but sym in quantization_config asks for "
                f"{middle}, or {middle - 1} where they are stored less 1; use another checkpoint"
            )
        self._check_mean()
        return replace(self, symmetric=False)

    @property
    def _file(self) -> object:
        return self.files.headers[f"{self.module}.qweight"].file

    def _zeros(self, less_one: bool) -> Tensor:
        """Return the zero of each group and output, int16 [groups, outputs]."""
        stored, bits, outputs = self.files.read(self.module, "qzeros"), self.grouping.bits, self.shape[0]
        if less_one and WORD_BITS % bits == 0:
            ones = sum(1 << place for place in range(0, WORD_BITS, bits))
            # int32 wraps around, as it did when 1 was subtracted.
            stored = (stored.to(torch.int64) + ones).to(torch.int32)
        zeros = unpack(stored.T, bits, outputs).T
        if less_one and WORD_BITS % bits:
            zeros = (zeros + 1) % (1 << bits)
        return zeros

    def _groups(self, count: int) -> Tensor:
        """Return the group of each input; raises for a `g_idx` that cannot be one."""
        inputs, size = self.shape[1], self.grouping.group_size
        side_by_side = self.grouping.of_inputs(inputs)
        if self.files.part(self.module, "g_idx") is None:
            return side_by_side
        groups = self.files.read(self.module, "g_idx").to(torch.int64)
        if not bool(groups.any()):
            # Kernels take a g_idx of zeros for one that was never filled.
            return side_by_side
        if not bool(((groups >= 0) & (groups < count)).all()):
            raise UnsupportedModelError(f"{self._file}: {self.module}.g_idx names groups that there are not")
        most = int(torch.bincount(groups).max())
        if size != -1 and most > size:
            raise UnsupportedModelError(
                f"{self._file}: {self.module}.g_idx has {most} inputs in a group, and quantization_config {size}"
            )
        return groups

    def _check_mean(self) -> None:
        """Refuse zeros that would move all weights by a step, as those of the other checkpoint format do."""
        bits, inputs = self.grouping.bits, min(self.shape[1], max(WHOLE, _SAMPLED // self.shape[0] // WHOLE * WHOLE))
        if bits > _MOST_CHECKED_BITS:
            return
        codes = unpack(self.files.read(self.module, "qweight")[: words_of(inputs, bits)], bits, inputs)
        groups = self._groups(self.files.headers[f"{self.module}.scales"].shape[0])[:inputs]
        means = [
            (codes - self._zeros(less_one)[groups]).to(torch.float32).mean(dim=0)
            for less_one in (self.less_one, not self.less_one)
        ]
        own, other = (abs(float(mean.mean())) for mean in means)
        # A few outputs say nothing of the others.
        if own > 0.75 and other < 0.25 and float(means[0].std()) < _MOST_ERROR * math.sqrt(self.shape[0]):
            label, right = _FORMATS if self.less_one else _FORMATS[::-1]
            raise UnsupportedModelError(
                f"{self._file}: as {label}, which quantization_config says, weights of {self.module} have a mean of "
                f"{own:.2f} steps, and as {right} one of {other:.2f}; set checkpoint_format to {right}"
            )


def _reader(files: StoredFiles, module: str, config: GptqConfig) -> _Reader:
    """Return the reader of a matrix whose tensors have been checked against each other."""
    check_parts(files, module)
    rows, outputs = files.headers[f"{module}.qweight"].shape

    def shapes(grouping: Grouping) -> dict[str, tuple[int, ...]]:
        inputs = rows * WORD_BITS // grouping.bits
        groups = grouping.groups(inputs)
        return {
            "g_idx": (inputs,),
            "qzeros": (groups, words_of(outputs, grouping.bits)),
            "scales": (groups, outputs),
        }

    grouping = fitting_grouping(files, module, config.groupings, shapes)
    inputs = rows * WORD_BITS // grouping.bits
    file, indices = files.headers[f"{module}.qweight"].file, files.part(module, "g_idx")
    if outputs * grouping.bits % WORD_BITS or (inputs % WHOLE and WORD_BITS % grouping.bits):
        raise UnsupportedModelError(f"{file}: {module}.qweight is {[rows, outputs]}: integers that end within an int32")
    if config.ordered and grouping.group_size != -1 and indices is None:
        raise UnsupportedModelError(f"{file}: no {module}.g_idx, which desc_act in quantization_config asks for")
    if indices is not None and indices.dtype not in ("I32", "I64"):
        raise UnsupportedModelError(f"{file}: {module}.g_idx is {indices.dtype}; I32 is read")
    if 0 in (rows, outputs):
        raise UnsupportedModelError(f"{file}: {module}.qweight is {[rows, outputs]}: an empty matrix")
    return _Reader(files, module, grouping, (outputs, inputs), config.less_one).settled(config)


METHOD = Method(
    names=("gptq",),
    title="GPTQ",
    summary="gptq of 2, 3, 4 and 8 bits",
    marks=(".qweight",),
    open=_open,
)
