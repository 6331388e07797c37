"""Matrices of small numbers with a scale for each block of rows and columns: FP8, FP4 and INT8."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from picompile.errors import UnsupportedModelError
from picompile.frontend.stored.record import StoredFiles, as_float16
from picompile_passes.formats import E8M0, FORMATS, Codec
from picompile_passes.formats.grids import GroupGrid, has_powers
from picompile_passes.formats.packing import pack_codes

F8_DTYPES = ("F8_E4M3", "F8_E5M2")
# Rows that are read at a time, at most.
_ROWS = 128


@dataclass(frozen=True)
class Coded:
    """Numbers as codes of the format `form`: `rows` gives those of some rows, uint8 or int8 [rows, inputs].

    Scales of the format are `unit` times those of the numbers. Codes of `no_numbers` are NaN.
    """

    form: str
    rows: Callable[[int, int], Tensor]
    unit: float = 1.0
    no_numbers: tuple[int, ...] = ()

    def packed(self, shape: tuple[int, int], scales: Tensor) -> Tensor | None:
        """Return the rows of a matrix packed, uint8 [outputs, row bytes]; None where one of its codes is NaN.

        `scales` are float32 [outputs, groups], exact in the format's type of scales.
        """
        form, (outputs, inputs) = FORMATS[self.form], shape
        packed = torch.zeros(outputs, form.row_bytes(inputs), dtype=torch.uint8)
        for start in range(0, outputs, _ROWS):
            stop = min(outputs, start + _ROWS)
            codes = self.rows(start, stop)
            if any(bool((codes == code).any()) for code in self.no_numbers):
                return None
            codes = F.pad(codes, (0, form.padded_columns(inputs) - inputs))
            grid = GroupGrid.of_parts(form, scales[start:stop])
            pack_codes(codes.reshape(stop - start, -1, form.group), grid, inputs, packed[start:stop])
        return packed


@dataclass(frozen=True)
class ScaledBlocks:
    """A matrix of weights (number - zero) × scale, zero and scale those of a block of rows and columns.

    `rows` returns the numbers of the rows from its first to before its second argument, float32 [rows, inputs].
    `scales` and `zeros`, if there are any, are float32 [blocks of rows, blocks of columns], for blocks of `block`.
    `coded` are the numbers as codes of a format of ours, None where none has them.
    """

    rows: Callable[[int, int], Tensor]
    shape: tuple[int, int]
    scales: Tensor
    block: tuple[int, int]
    zeros: Tensor | None = None
    coded: Coded | None = None

    def values(self) -> Tensor:
        """Return the weights, float32 [outputs, inputs]."""
        values = torch.empty(self.shape, dtype=torch.float32)
        for start, stop, blocks in self._steps():
            numbers = self.rows(start, stop)
            if self.zeros is not None:
                numbers = numbers - self._spread(self.zeros[blocks])
            torch.mul(numbers, self._spread(self.scales[blocks]), out=values[start:stop])
        return values

    def _steps(self) -> Iterator[tuple[int, int, slice]]:
        """Give runs of rows, and their rows of blocks: one for all of a run, or one for each of its rows."""
        outputs, height = self.shape[0], self.block[0]
        if height == 1:
            for start in range(0, outputs, _ROWS):
                stop = min(outputs, start + _ROWS)
                yield start, stop, slice(start, stop)
            return
        for block, first in enumerate(range(0, outputs, height)):
            last = min(outputs, first + height)
            for start in range(first, last, _ROWS):
                yield start, min(last, start + _ROWS), slice(block, block + 1)

    def stored_format(self) -> str | None:
        """Return the format that has these weights; None where there is none."""
        return None if self.coded is None or self._grid(FORMATS[self.coded.form]) is None else self.coded.form

    def packed(self, format_name: str) -> Tensor | None:
        """Return the rows packed, uint8 [outputs, row bytes], where the format has all weights; else None."""
        if self.coded is None or self.coded.form != format_name:
            return None
        grid = self._grid(FORMATS[format_name])
        return None if grid is None else self.coded.packed(self.shape, grid.scale)

    def _grid(self, form: Codec) -> GroupGrid | None:
        """Return the scales of groups of rows; None where a group has several, or the format has not all of them."""
        (outputs, inputs), (height, width) = self.shape, self.block
        if self.coded is None or self.zeros is not None or (width < inputs and width % form.group):
            return None
        wanted = self.scales * self.coded.unit
        if form.scale == E8M0:
            is_power = bool((torch.frexp(wanted).mantissa == 0.5).all())
            scales = wanted if is_power and has_powers(wanted, form) else None
        else:
            scales = as_float16(wanted)
        if scales is None:
            return None
        rows = torch.arange(outputs) // height
        groups = (torch.arange(form.groups(inputs)) * form.group // width).clamp_(max=scales.shape[1] - 1)
        return GroupGrid.of_parts(form, scales.to(torch.float32)[rows][:, groups])

    def _spread(self, blocks: Tensor) -> Tensor:
        """Return the number of its block for each column, [rows, inputs]."""
        if blocks.shape[1] == 1:
            return blocks
        return blocks.repeat_interleave(self.block[1], dim=1)[:, : self.shape[1]]


def grid_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Return how many blocks a matrix of `shape` has, along rows and along columns."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def matrix_shape(files: StoredFiles, module: str, part: str) -> tuple[int, int]:
    """Return the shape of MODULE.part, which is a matrix. Raises `UnsupportedModelError` where it is none."""
    header = files.headers[f"{module}.{part}"]
    if len(header.shape) != 2:
        raise UnsupportedModelError(f"{header.file}: {module}.{part} is {list(header.shape)}; a matrix is read")
    return header.shape[0], header.shape[1]


def numbers_of(files: StoredFiles, module: str, part: str) -> Callable[[int, int], Tensor]:
    """Return `ScaledBlocks.rows` for a tensor [outputs, inputs] that holds one number in each element."""
    stored = files.read(module, part)
    if stored.dtype == torch.int8:
        return lambda start, stop: stored[start:stop].to(torch.float32)
    # Half the time of a conversion.
    table = torch.arange(256, dtype=torch.uint8).view(stored.dtype).to(torch.float32)
    return lambda start, stop: look_up(stored[start:stop].view(torch.uint8), table.view(-1, 1))


def codes_of(files: StoredFiles, module: str) -> Coded | None:
    """Return the codes of MODULE.weight, None where they are neither bytes nor E4M3."""
    stored = files.read(module, "weight")
    if stored.dtype == torch.int8:
        return Coded("q8", lambda start, stop: stored[start:stop])
    if stored.dtype != torch.float8_e4m3fn:
        return None
    codes, step = stored.view(torch.uint8), FORMATS["fp8"].table_step
    return Coded("fp8", lambda start, stop: codes[start:stop], unit=1 / step, no_numbers=(0x7F, 0xFF))


def look_up(codes: Tensor, table: Tensor) -> Tensor:
    """Return `table` [256, n] at bytes [rows, columns], [rows, columns × n]."""
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(len(codes), -1)


def pair_table(numbers: Tensor, *, low_first: bool) -> Tensor:
    """Return the two of 16 `numbers` whose codes a byte has in its halves, [256, 2], for `look_up`."""
    high, low = numbers.repeat_interleave(16), numbers.repeat(16)
    return torch.stack((low, high) if low_first else (high, low), dim=1)


def fitting_block(
    files: StoredFiles, module: str, shape: tuple[int, int], scale_part: str, candidates: list[tuple[int, int]]
) -> tuple[int, int]:
    """Return the one of `candidates`, sizes of blocks, by which a matrix has as many blocks as MODULE.scale_part says.

    Sizes of -1 are those of the whole matrix. Scales of the exact shape come before those that have it but for sizes
    of 1: [1, n] is a row of blocks, even if the matrix has n rows. Raises `UnsupportedModelError` where none fits.
    """
    header = files.headers[f"{module}.{scale_part}"]
    sizes = [(rows if rows > 0 else shape[0], columns if columns > 0 else shape[1]) for rows, columns in candidates]
    grids = [grid_shape(shape, block) for block in sizes]
    fitting = [block for block, grid in zip(sizes, grids, strict=True) if grid == tuple(header.shape)]
    fitting += [
        block for block, grid in zip(sizes, grids, strict=True) if _without_ones(grid) == _without_ones(header.shape)
    ]
    if fitting:
        return fitting[0]
    blocks = " or ".join(str(list(grid)) for grid in grids) or "settings of its weights"
    raise UnsupportedModelError(
        f"{header.file}: {module}.{scale_part} is {list(header.shape)}, but a matrix of {list(shape)} needs {blocks}"
    )


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
