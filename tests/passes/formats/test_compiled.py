"""Compiled rounding and packing against the same in PyTorch, and what fitted scales gain."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.graphs import PROFILE
from picompile_passes.formats import FORMATS, grids, packing, rounding_library
from picompile_passes.formats.packing import dequantize_rows, quantize_rows

FITTED = [name for name in FORMATS.builtin if FORMATS[name].fitted]
SCALED = [name for name in FORMATS.builtin if FORMATS[name].scale]
# One group, part of one, blocks that are not whole, and whole ones.
COLUMNS = (32, 17, 300, 576, 1024)


def matrix(rows: int, columns: int, seed: int) -> Tensor:
    """Rows of several sizes and means; one is zeros, one begins with zeros, one has no number below 0."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator) + 0.1
    weight[0], weight[1 % rows, : columns // 2], weight[2 % rows] = 0.0, 0.0, weight[2 % rows].abs()
    return weight


def error_of(packed: Tensor, weight: Tensor, name: str) -> float:
    """Return the error that fitting makes least, over what it would be if all weights were 0."""
    form, (rows, columns) = FORMATS[name], weight.shape

    def groups(values: Tensor) -> Tensor:
        padded = torch.zeros(rows, form.padded_columns(columns))
        padded[:, :columns] = values
        return padded.view(rows, -1, form.group)

    size = groups(weight).square().mean(-1, keepdim=True).sqrt() + groups(weight).abs()
    off = groups(dequantize_rows(packed, name, columns) - weight)
    return float((size * off.square()).sum() / (size * groups(weight).square()).sum())


def in_pytorch(weight: Tensor, name: str) -> Tensor:
    packed = torch.zeros(len(weight), FORMATS[name].row_bytes(weight.shape[1]), dtype=torch.uint8)
    packing.round_block(weight, FORMATS[name], packed)
    return packed


def test_there_is_compiled_code() -> None:
    """Everything here would compare PyTorch with itself without it."""
    assert rounding_library.library() is not None


@pytest.mark.parametrize("name", FITTED)
@pytest.mark.parametrize("columns", COLUMNS)
def test_compiled_code_rounds_as_well_as_pytorch(name: str, columns: int) -> None:
    weight = matrix(40, columns, seed=columns)
    found, expected = (
        error_of(packed, weight, name) for packed in (quantize_rows(weight, name), in_pytorch(weight, name))
    )
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", FITTED)
def test_fitted_grids_leave_less_than_those_that_span(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(60, 512, seed=3)
    fitted = error_of(quantize_rows(weight, name), weight, name)
    monkeypatch.setattr(packing, "fitted_grid", grids.group_grid)
    assert fitted < 0.97 * error_of(in_pytorch(weight, name), weight, name)


@pytest.mark.parametrize("name", FITTED)
def test_weights_on_a_grid_stay(name: str) -> None:
    """What was rounded once is rounded to itself, but for scales that are rounded twice."""
    weight = matrix(30, 512, seed=5)
    once = dequantize_rows(quantize_rows(weight, name), name, 512)
    twice = dequantize_rows(quantize_rows(once, name), name, 512)
    assert float((twice - once).norm() / once.norm()) < 0.15 * float((once - weight).norm() / weight.norm())


@pytest.mark.parametrize("name", SCALED)
@settings(PROFILE, max_examples=10)
@given(columns=st.integers(1, 700), seed=st.integers(0, 100))
def test_compiled_code_packs_the_bytes_that_pytorch_does(name: str, columns: int, seed: int) -> None:
    form, weight = FORMATS[name], matrix(5, columns, seed)
    groups = torch.zeros(5, form.padded_columns(columns))
    groups[:, :columns] = weight
    groups = groups.view(5, -1, form.group)
    grid = grids.group_grid(groups, form)
    codes = grid.codes(groups)
    found, expected = (torch.zeros(5, form.row_bytes(columns), dtype=torch.uint8) for _ in range(2))
    packing.pack_codes(codes, grid, columns, found)
    packing.pack_in_pytorch(codes, grid, columns, expected)
    assert torch.equal(found, expected)


def test_threads_change_nothing() -> None:
    weight = matrix(1500, 1024, seed=1)
    rows = [quantize_rows(weight[start : start + 100], "q4_k") for start in range(0, 1500, 100)]
    assert torch.equal(quantize_rows(weight, "q4_k"), torch.cat(rows))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_dtype_are_read(dtype: torch.dtype) -> None:
    """Numbers below the least normal float16 too: those of the second half are a millionth of the others."""
    weight = matrix(64, 96, seed=3).to(torch.float64)
    weight[32:] *= 1e-6
    given = weight.to(dtype)
    for name in ("q4", "q4_k", "q8"):
        assert torch.equal(quantize_rows(given, name), quantize_rows(given.float(), name))
    wide = torch.tensor([[0.0, -0.0, 65504.0, -6e-8] * 8]).to(dtype)
    assert torch.equal(quantize_rows(wide, "q8"), in_pytorch(wide.float(), "q8"))


@pytest.mark.parametrize("columns", COLUMNS)
def test_q8_is_what_pytorch_makes(columns: int) -> None:
    weight = matrix(40, columns, seed=columns)
    assert torch.equal(quantize_rows(weight, "q8"), in_pytorch(weight, "q8"))


def test_without_gcc_pytorch_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(9, 96, seed=2)
    monkeypatch.setattr(rounding_library, "library", lambda: None)
    assert torch.equal(quantize_rows(weight, "q4_k"), in_pytorch(weight, "q4_k"))
