"""Rounding and packing of rows in compiled code, on all cores: `native/rounding.c`.

`packing.py` and `grids.py` are the reference. Packing gives the same bytes; rounding searches the same scales and
minima, and may differ from it where two of them are equally good.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from picompile_passes.formats import rounding_library
from picompile_passes.formats.codec import E8M0, FLOAT16, ZERO_STEPS, Codec, ScaleType
from picompile_passes.formats.grids import STEPS, GroupGrid

_MOST_PLANES = 2
# Rows of a task have about so many weights, and what it rounds is this long in float32.
_TASK_WEIGHTS = 1 << 18
# The types of scales and shifts in C, and of weights that are read as they are.
_FLOAT16, _E8M0, _IN_BLOCKS, _SIXTEENTHS = 1, 2, 3, 4
_GIVEN = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _Format(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("columns", "row_bytes", "zero_offset", "scale_offset", "factor_offset")),
        *((name, ctypes.c_int32) for name in ("bits", "group", "planes")),
        ("plane_bits", ctypes.c_int32 * _MOST_PLANES),
        *((name, ctypes.c_int32) for name in ("lowest", "highest", "scale", "shift", "steps")),
        ("zero", ctypes.c_float),
    )


def _kind(scale: ScaleType | None) -> int:
    if scale is None:
        return 0
    return _IN_BLOCKS if scale.in_blocks else {FLOAT16: _FLOAT16, E8M0: _E8M0}[scale]


def _format(form: Codec, columns: int, steps: int) -> _Format:
    found = _Format(
        columns=form.padded_columns(columns),
        row_bytes=form.row_bytes(columns),
        zero_offset=form.zero_offset_bytes(columns),
        scale_offset=form.scale_offset_bytes(columns),
        factor_offset=form.factor_offset_bytes(columns),
        bits=form.data_bits,
        group=form.group,
        lowest=form.lowest,
        highest=form.highest,
        scale=_kind(form.scale),
        shift=_SIXTEENTHS if form.zero is None else _kind(form.minimum),
        steps=steps,
        zero=form.zero or 0.0,
    )
    if form.data_bits < 8:
        found.planes = len(form.planes)
        for number, plane in enumerate(form.planes):
            found.plane_bits[number] = plane.bits
    return found


def rounds(form: Codec) -> bool:
    """Return whether compiled code rounds to `form`: whole numbers of 8 bits or fewer."""
    return (form.fitted or (form.data_bits == 8 and not form.table)) and rounding_library.library() is not None


def round_rows(weight: Tensor, form: Codec) -> Tensor:
    """Return `weight` [rows, columns], rounded and packed as uint8 [rows, row bytes], on all cores."""
    code, (rows, columns) = rounding_library.library(), weight.shape
    assert code is not None
    # Zeros would be written by threads that then keep the cores busy, waiting for more.
    packed = torch.empty(rows, form.row_bytes(columns), dtype=torch.uint8)
    layout = _format(form, columns, STEPS if form.fitted else 0)
    values = (weight if weight.dtype in _GIVEN else weight.to(torch.float32)).contiguous()
    kind, width = ctypes.c_int32(_GIVEN[values.dtype]), ctypes.c_int64(columns)

    def task(start: int, stop: int) -> None:
        given, target = (ctypes.c_void_p(each[start].data_ptr()) for each in (values, packed))
        if not code.pi_round_rows(ctypes.byref(layout), given, kind, ctypes.c_int64(stop - start), width, target):
            raise MemoryError(f"rounding {rows} rows of {columns} weights")

    in_tasks(rows, columns, task)
    return packed


def turn(packed: Tensor, parts: Sequence[tuple[int, int, int]], panels: Tensor) -> None:
    """Lay rows out as panels, on all cores: uint8 [rows, row bytes] → uint8 [panels, panel bytes].

    Of each part (start, end, unit) of a row, a panel has `unit` bytes of all its rows side by side.
    """
    code, rows = rounding_library.library(), len(packed) // len(panels)
    assert code is not None

    def task(start: int, stop: int) -> None:
        given, target = ctypes.c_void_p(packed[start * rows].data_ptr()), ctypes.c_void_p(panels[start].data_ptr())
        sizes = [ctypes.c_int64(size) for size in (stop - start, rows, packed.shape[1], panels.shape[1])]
        for part in parts:
            code.pi_turn_part(given, *sizes, *map(ctypes.c_int64, part), target)

    in_tasks(len(panels), rows * packed.shape[1], task)


def in_tasks(rows: int, columns: int, task: Callable[[int, int], None]) -> None:
    """Run `task(start, stop)` for runs of rows, on all cores."""
    step = max(1, _TASK_WEIGHTS // max(1, columns))
    runs = [(start, min(rows, start + step)) for start in range(0, rows, step)]
    if len(runs) == 1:
        task(*runs[0])
        return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for done in [pool.submit(task, *run) for run in runs]:
            done.result()


def pack_rows(codes: Tensor, grid: GroupGrid, columns: int, packed: Tensor) -> None:
    """Write rows of codes uint8 [rows, columns padded] and their grid to `packed` uint8 [rows, row bytes]."""
    code, form, rows = rounding_library.library(), grid.form, len(codes)
    assert code is not None
    groups, blocks = form.groups(columns), form.blocks(columns)
    factors = torch.zeros(rows, 2, blocks)
    whole, below = (torch.zeros(rows, groups, dtype=torch.int16) for _ in range(2))
    for number, (parts, numbers) in enumerate(((grid.scale_parts, whole), (grid.minimum_parts, below))):
        if parts is not None:
            numbers[:] = parts.whole
            factors[:, number] = parts.factor
    if grid.scale_parts is None:
        # Factors of minima alone: they come first.
        factors = factors.flip(1).contiguous()
    if form.zero is None:
        below[:] = (grid.zero * ZERO_STEPS).to(torch.int16)
    shift = grid.zero if grid.minimum is None else grid.minimum
    tensors = [codes.contiguous(), grid.scale.contiguous(), shift.contiguous(), whole, below, factors]
    given, *others = [ctypes.c_void_p(each.data_ptr()) for each in tensors]
    layout = _format(form, columns, 0)
    code.pi_pack_rows(ctypes.byref(layout), given, ctypes.c_int64(rows), *others, ctypes.c_void_p(packed.data_ptr()))
