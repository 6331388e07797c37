"""The config and the tensors that GPTQ and AWQ have in common: `qweight`, `qzeros`, `scales`, groups and overrides."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from picompile.errors import UnsupportedModelError
from picompile.frontend.stored.record import FLOAT_DTYPES, Settings, StoredFiles

PARTS = ("qweight", "qzeros", "scales", "g_idx")
_MOST_GROUP = 1 << 20


@dataclass(frozen=True)
class Grouping:
    """Bits of integers, and inputs of a group: -1 for all."""

    bits: int
    group_size: int

    def of_inputs(self, inputs: int) -> Tensor:
        """Return the group of each input where groups are of inputs side by side, int64 [inputs]."""
        return torch.arange(inputs) // (inputs if self.group_size == -1 else self.group_size)

    def groups(self, inputs: int) -> int:
        """Return the number of groups."""
        return 1 if self.group_size == -1 else -(-inputs // self.group_size)


def groupings(settings: Settings, bits: tuple[int, ...], overrides: Mapping[str, Any]) -> list[Grouping]:
    """Return the groupings that matrices of a checkpoint may have: the config's own, then those of its overrides.

    `overrides` are configs of single modules by patterns of their names. Which of them a matrix has is known from the
    shapes of its tensors. Raises `NotReadError` for bits that are not among `bits`, and for sizes that no group has.
    """
    own = _grouping(
        settings, settings.get("bits", "w_bit"), settings.get("group_size", "q_group_size", default=128), bits
    )
    found = {own: None}
    for override in overrides.values():
        if not isinstance(override, dict):
            settings.refuse(f"with an override {override!r:.40}")
        changed = Settings(settings.method, override)
        # 16 bits and more are those of modules that are not quantized.
        if changed.get("bits", default=own.bits) in (16, 32):
            continue
        size = changed.get("group_size", default=own.group_size)
        found[_grouping(settings, changed.get("bits", default=own.bits), size, bits)] = None
    return list(found)


def _grouping(settings: Settings, bits: object, size: object, read: tuple[int, ...]) -> Grouping:
    checked = settings.whole("with %s bits", bits, lambda value: value in read)
    groups = settings.whole("with groups of %s", size, lambda value: value == -1 or 8 <= value <= _MOST_GROUP)
    if groups % 8 and groups != -1:
        settings.refuse(f"with groups of {groups}")
    return Grouping(checked, groups)


def check_parts(files: StoredFiles, module: str) -> None:
    """Check that a matrix has all its tensors, of two dimensions and of dtypes that are read."""
    first = files.headers[f"{module}.qweight"]
    for part, dtypes in (("qzeros", ("I32",)), ("scales", FLOAT_DTYPES)):
        files.needed(module, part, "qweight", dtypes)
    if first.dtype != "I32":
        raise UnsupportedModelError(f"{first.file}: {module}.qweight is {first.dtype}; I32 is read")
    for part in ("qweight", "qzeros", "scales"):
        header = files.headers[f"{module}.{part}"]
        if len(header.shape) != 2:
            raise UnsupportedModelError(
                f"{header.file}: {module}.{part} is {header.dtype} {list(header.shape)}; a matrix is read"
            )


def fitting_grouping(
    files: StoredFiles,
    module: str,
    candidates: list[Grouping],
    shapes: Callable[[Grouping], Mapping[str, tuple[int, ...]]],
) -> Grouping:
    """Return the first of `candidates` for which the tensors of a matrix have the shapes that it asks for.

    Raises `UnsupportedModelError`, with what the first one asks for, where none does.
    """
    misfits = [_misfit(files, module, shapes(candidate)) for candidate in candidates]
    for candidate, misfit in zip(candidates, misfits, strict=True):
        if misfit is None:
            return candidate
    part, needed = misfits[0] or ("qweight", ())
    header = files.headers[f"{module}.{part}"]
    stored, own = list(files.headers[f"{module}.qweight"].shape), candidates[0]
    raise UnsupportedModelError(
        f"{header.file}: {module}.{part} is {list(header.shape)}, but integers {stored} of {own.bits} bits in "
        f"groups of {own.group_size}, as quantization_config has them, need {list(needed)}"
    )


def _misfit(
    files: StoredFiles, module: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, tuple[int, ...]] | None:
    for part, shape in shapes.items():
        header = files.part(module, part)
        if header is not None and header.shape != shape:
            return part, shape
    return None
