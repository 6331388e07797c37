"""Weight formats: what packing and unpacking leave of a matrix, where the bytes of a row lie, and grids of groups."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.graphs import PROFILE
from picompile_passes.formats import E8M0, FLOAT16, FORMATS, GROUP, Codec, packing, predictor_format
from picompile_passes.formats.packing import dequantize_rows, quantize_rows

QUANTIZED = [name for name, form in FORMATS.items() if form.scale_bytes]


def matrix(rows: int, columns: int, seed: int, mean: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) + mean


def in_groups(weight: Tensor) -> Tensor:
    """Return the weights in groups, with zeros behind the last column: [rows, groups, 32]."""
    rows, columns = weight.shape
    padded = torch.zeros(rows, -(-columns // GROUP) * GROUP)
    padded[:, :columns] = weight
    return padded.view(rows, -1, GROUP)


@PROFILE
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 300),
    seed=st.integers(0, 100),
    mean=st.sampled_from((0.0, 3.0, -3.0)),
    name=st.sampled_from([*FORMATS]),
)
def test_weights_are_off_by_half_a_step_at_most(rows: int, columns: int, seed: int, mean: float, name: str) -> None:
    form, weight = FORMATS[name], matrix(rows, columns, seed, mean)
    packed = quantize_rows(weight, name)
    assert (packed.shape, packed.dtype) == ((rows, form.row_bytes(columns)), torch.uint8)
    found = dequantize_rows(packed, name, columns)
    assert (found.shape, found.dtype) == (weight.shape, torch.float32)
    error = in_groups(found - weight).abs()
    if not form.scale_bytes:
        assert (error <= 2**-11 * in_groups(weight).abs()).all()
        return
    groups = in_groups(weight)
    if form.table:
        grid = packing.group_grid(groups, form)
        values = grid.values(torch.arange(len(form.table)).expand(*grid.scale.shape, -1))
        assert torch.equal(error.amax(-1), (groups[..., None] - values.unsqueeze(-2)).abs().amin(-1).amax(-1))
        return
    step = groups.abs().amax(-1) / {"q8": 127, "q6": 32, "q4": 8}.get(name, 1)
    # What is as far from zero as the extreme, on the other side, is a whole step off.
    most = {"q8": 0.5, "q6": 1.0, "q4": 1.0, "q4m": 0.5 + 1 / 32}[name]
    if name == "q4m":
        step = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 15
    # Scales are rounded to float16, which counts as often as a code has steps.
    rounding = 2**-11 * max(form.highest, 16)
    assert (error.amax(-1) <= step * (most + rounding)).all()


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 160, 330])
def test_zeros_stay_zeros_and_padding_is_no_weight(columns: int) -> None:
    """Values that float16 cannot hold stay finite, and more bits make a smaller error."""
    zeros, weight = torch.zeros(2, columns), matrix(30, columns, 0)
    huge = torch.full((1, columns), 1e30) * torch.tensor([1.0, -1.0]).repeat(columns)[:columns]
    errors = {}
    for name in FORMATS:
        assert torch.equal(dequantize_rows(quantize_rows(zeros, name), name, columns), zeros)
        packed = quantize_rows(weight, name)
        assert torch.equal(packed, torch.cat([quantize_rows(row[None], name) for row in weight]))
        assert dequantize_rows(quantize_rows(huge, name), name, columns).isfinite().all()
        errors[name] = float((dequantize_rows(packed, name, columns) - weight).norm())
    if columns >= 160:
        assert all(errors[finer] < errors[name] for name, form in FORMATS.items() for finer in form.finer)


@PROFILE
@given(columns=st.integers(1, 2000), name=st.sampled_from([*FORMATS]))
def test_parts_of_a_row_follow_one_another(columns: int, name: str) -> None:
    form = FORMATS[name]
    groups = form.padded_columns(columns) // GROUP
    high, zero = form.high_offset_bytes(columns), form.zero_offset_bytes(columns)
    scale, end = form.scale_offset_bytes(columns), form.row_bytes(columns)
    assert groups * GROUP * form.data_bits <= 8 * zero < groups * GROUP * form.data_bits + 8 * 32
    assert high <= zero
    assert high == groups * 16 or form.data_bits >= 8
    assert zero + groups * form.zero_bytes <= scale < zero + groups * form.zero_bytes + 16
    assert scale + groups * form.scale_bytes <= end < scale + groups * form.scale_bytes + 64
    # Eight scales are one aligned load, and eight zeros end before the scales do.
    assert end % 64 == 0
    assert not form.scale_bytes or scale % 16 == 0
    assert not form.zero_bytes or zero + -(-groups // 8) * 8 <= scale


def codes_of(name: str, columns: int) -> tuple[Tensor, packing.GroupGrid]:
    """Return random codes of one row [1, groups, 32] and a grid for them: scales 2, 4, 8, … and odd zeros."""
    form, groups = FORMATS[name], -(-columns // GROUP)
    generator = torch.Generator().manual_seed(columns)
    codes = torch.randint(form.lowest, form.highest + 1, (1, groups, GROUP), generator=generator)
    scale = 2.0 ** (torch.arange(groups) % 9 + 1).unsqueeze(0)
    zero = torch.full_like(scale, form.zero) if form.zero is not None else (torch.arange(groups) * 7 % 241) / 16
    return codes, packing.GroupGrid(form, scale, zero.view(1, groups))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("columns", [32, 96, 160, 352])
def test_layout_of_codes(name: str, columns: int) -> None:
    """Every code below a byte is found by arithmetic on the bytes of the row, as are zeros and scales."""
    codes, grid = codes_of(name, columns)
    form, groups = FORMATS[name], columns // GROUP
    packed = torch.zeros(1, form.row_bytes(columns), dtype=torch.uint8)
    packing.pack_codes(codes.to(torch.float32), grid, columns, packed)
    assert torch.equal(dequantize_rows(packed, name, columns), grid.values(codes).view(1, columns))
    if name == "q8":
        return
    row = packed[0].numpy()
    for g in range(groups):
        for i in range(GROUP):
            code = int(row[g * 16 + i % 16]) >> 4 * (i // 16) & 15
            if form.has_planes:
                high = row[groups * 16 + g // 4 * 32 + g % 2 * 16 + i % 16]
                code |= (int(high) >> (g // 2 % 2 * 4 + i // 16 * 2) & 3) << 4
            assert code == int(codes[0, g, i])
    data = groups * 16 + (-(-groups // 4) * 32 if form.has_planes else 0)
    assert form.zero_offset_bytes(columns) == data
    zeros = groups if form.zero is None else 0
    assert row[data : data + zeros].tolist() == [g * 7 % 241 for g in range(zeros)]
    start = data + -(-zeros // 16) * 16
    end = start + form.scale_bytes * groups
    stored = row[start:end]
    scales = np.exp2(stored - 127.0) if form.scale == E8M0 else stored.view(np.float16)
    assert scales.tolist() == grid.scale[0].tolist()
    assert not row[data + zeros : start].any()
    assert not row[end:].any()


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_grid_spans_its_group(name: str) -> None:
    groups = torch.stack([matrix(1, GROUP, seed, mean)[0] for seed, mean in ((0, 0.0), (1, 5.0), (2, -5.0))])
    form = FORMATS[name]
    grid = packing.group_grid(groups, form)
    extremes = groups.gather(1, groups.abs().argmax(1, keepdim=True))[:, 0]
    nearest = grid.nearest(groups)
    found = nearest.gather(1, groups.abs().argmax(1, keepdim=True))[:, 0]
    assert torch.allclose(found, extremes, rtol={"q4m": 2e-2, "mxfp4": 0.25}.get(name, 5e-3))
    assert torch.equal(nearest, grid.values(grid.codes(groups)))
    assert torch.equal(grid.nearest(nearest), nearest)
    # Half of the span: values inside are nearer, and those outside are at its end.
    half = packing.group_grid(groups, FORMATS[name], shrink=0.5)
    if form.scale == E8M0:
        # Of half the span and all of it the better one was chosen.
        assert ((half.scale == grid.scale) | (half.scale == grid.scale / 2)).all()
        return
    assert torch.allclose(half.scale, grid.scale / 2, rtol=1e-3)
    assert half.nearest(groups).abs().max() < 0.6 * nearest.abs().max()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_zeros_of_one_sided_groups_are_at_an_end(sign: float) -> None:
    groups = sign * torch.linspace(0.5, 1.5, GROUP).unsqueeze(0)
    grid = packing.group_grid(groups, FORMATS["q4m"])
    assert grid.zero.tolist() == [0.0 if sign > 0 else 15.0]
    assert torch.allclose(grid.scale, torch.tensor([1.5 / 15]), rtol=1e-3)
    assert (grid.nearest(torch.zeros(1, GROUP)) == 0).all()


def test_predictors_have_six_bits_at_least() -> None:
    assert all(FORMATS[predictor_format(name)].bits > 6 for name in FORMATS)
    assert predictor_format("q4", "q4") == "q4"


# Sign, exponent and mantissa of E2M1 ("FP4") in the OCP Microscaling Formats (MX) Specification v1.0, section 5.3.3.
E2M1 = [
    (-1) ** (code >> 3) * (0.5 * (code & 1) if code & 6 == 0 else 2 ** ((code >> 1 & 3) - 1) * (1 + 0.5 * (code & 1)))
    for code in range(16)
]


def test_mxfp4_is_that_of_the_specification() -> None:
    row = torch.zeros(1, FORMATS["mxfp4"].row_bytes(GROUP), dtype=torch.uint8)
    row[0, :16] = torch.tensor([code | (15 - code) << 4 for code in range(16)])
    for exponent in (1, 100, 127, 250):
        row[0, 16] = exponent
        expected = torch.tensor([*E2M1, *E2M1[::-1]], dtype=torch.float64) * 2.0 ** (exponent - 127)
        assert dequantize_rows(row, "mxfp4", GROUP).double().tolist() == [expected.tolist()]


def test_mxfp4_rounds_to_the_nearest_number_and_to_the_even_one_of_two() -> None:
    """With 6 in the group its scale is 1; between two numbers the one without a last bit is taken."""
    values = sorted(set(E2M1))
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    even = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    group = torch.tensor([6.0, *middles, *[m * 1.001 for m in middles]] + [0.0] * (31 - 2 * len(middles)))
    found = dequantize_rows(quantize_rows(group[None], "mxfp4"), "mxfp4", GROUP)[0].tolist()
    expected = {m: even[round(np.searchsorted([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], abs(m))) + 1] for m in middles}
    count = len(middles)
    assert [abs(v) for v in found[1 : 1 + count]] == [expected[m] for m in middles]
    beyond = [a if abs(a) > abs(b) else b for a, b in pairwise(values)]
    assert found[1 + count : 1 + 2 * count] == beyond


def test_mxfp4_has_the_scale_of_the_specification_or_a_nearer_one() -> None:
    groups = matrix(200, GROUP, 0)
    grid = packing.group_grid(groups, FORMATS["mxfp4"])
    given = torch.exp2(groups.abs().amax(-1).log2().floor() - 2)
    assert set((grid.scale / given).tolist()) == {1.0, 2.0}
    plain = packing.GroupGrid(grid.form, given, grid.zero)
    assert ((grid.nearest(groups) - groups).norm(dim=-1) <= (plain.nearest(groups) - groups).norm(dim=-1)).all()


def test_a_table_of_large_numbers_and_float16_scales() -> None:
    form = Codec(
        "nf", 4, FLOAT16, highest=15, table=(-127, -88, -66, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127)
    )
    groups = matrix(40, GROUP, 1)
    grid = packing.group_grid(groups, form)
    levels = torch.tensor(form.table) * grid.scale[:, None]
    nearest = (groups[..., None] - levels[:, None]).abs().amin(-1)
    assert torch.allclose((grid.nearest(groups) - groups).abs(), nearest, atol=1e-6)
