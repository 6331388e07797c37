"""Weight formats: what packing and unpacking leave of a matrix, where the bytes of a row lie, and grids of groups."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.graphs import PROFILE
from helpers.weight_formats import E2M1, ROW_FORMATS, codes_of_row, random_rows, row_parts, weights_of_row
from picompile_passes.formats import (
    E8M0,
    FLOAT16,
    FORMATS,
    GROUP,
    INT8,
    Codec,
    ScaleType,
    grids,
    packing,
    predictor_format,
)
from picompile_passes.formats.packing import dequantize_rows, quantize_rows

# Of each format so many.
FEW = settings(PROFILE, max_examples=PROFILE.max_examples // 2)
QUANTIZED = [name for name, form in FORMATS.items() if form.scale_bytes]


def matrix(rows: int, columns: int, seed: int, mean: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) + mean


def in_groups(weight: Tensor, group: int = GROUP) -> Tensor:
    """Return the weights in groups, with zeros behind the last column: [rows, groups, `group`]."""
    rows, columns = weight.shape
    padded = torch.zeros(rows, -(-columns // GROUP) * GROUP)
    padded[:, :columns] = weight
    return padded.view(rows, -1, group)


def step_of(groups: Tensor, form: Codec) -> Tensor:
    """Return the step of codes that spans each group, [rows, groups], before it is rounded to a scale."""
    if form.has_zeros:
        return (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / form.highest
    return groups.abs().amax(-1) / max(form.highest - form.zero, form.zero - form.lowest)


def blocks_of(values: Tensor, form: Codec) -> Tensor:
    """Return for each group the largest magnitude of `values` [rows, groups] in its block of 256 weights."""
    each = 256 // form.group
    padded = F.pad(values.abs(), (0, -values.shape[1] % each)).view(len(values), -1, each)
    return padded.amax(-1).repeat_interleave(each, dim=1)[:, : values.shape[1]]


@pytest.mark.parametrize("name", FORMATS.builtin)
@FEW
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 300),
    seed=st.integers(0, 100),
    mean=st.sampled_from((0.0, 3.0, -3.0)),
)
def test_weights_are_off_by_half_a_step_at_most(name: str, rows: int, columns: int, seed: int, mean: float) -> None:
    form, weight = FORMATS[name], matrix(rows, columns, seed, mean)
    packed = quantize_rows(weight, name)
    assert (packed.shape, packed.dtype) == ((rows, form.row_bytes(columns)), torch.uint8)
    found = dequantize_rows(packed, name, columns)
    assert (found.shape, found.dtype) == (weight.shape, torch.float32)
    error = in_groups(found - weight, form.group).abs()
    if not form.scale_bytes:
        assert (error <= 2**-11 * in_groups(weight).abs()).all()
        return
    groups = in_groups(weight, form.group)
    if form.table:
        grid = grids.group_grid(groups, form)
        values = grid.values(torch.arange(len(form.table)).expand(*grid.scale.shape, -1))
        nearest = (groups[..., None] - values.unsqueeze(-2)).abs().amin(-1)
        # Zeros that rows are padded with are no weights, and some tables have no 0.
        assert torch.equal((found - weight).abs(), nearest.view(rows, -1)[:, :columns])
        return
    if form.fitted and form.has_zeros:
        # Lines that leave the least error reach further or less far than the group; test_compiled.py has their errors.
        assert (error.amax(-1) <= 2.5 * step_of(groups, form) + 0.01 * groups.abs().amax()).all()
        return
    step, codes = step_of(groups, form), max(form.highest, 16)
    # Where one side of zero has no code as far from it as the extreme is, what is there is a whole step off.
    most = 0.5 + (1 / 32 if form.zero is None else 0.0 if form.has_zeros or name == "q8" else 0.5)
    # Scales are rounded to float16, which counts as often as a code has steps. So are minima, and the factors of both.
    bound = step * (most + 2**-11 * codes)
    if form.minimum:
        bound += 2**-11 * groups.amin(-1).abs()
    # Whole numbers of scales and minima have the largest of their block for a step of 127 or of 255.
    if form.scale.in_blocks:
        bound += (0.5 / 127 + 2**-11) * codes * blocks_of(step, form)
    if form.minimum and form.minimum.in_blocks:
        bound += (0.5 / 255 + 2**-11) * blocks_of(groups.amin(-1).clamp(max=0), form)
    assert (error.amax(-1) <= bound).all()


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


@pytest.mark.parametrize("name", QUANTIZED)
@FEW
@given(columns=st.integers(1, 2000))
def test_parts_of_a_row_follow_one_another(name: str, columns: int) -> None:
    form, (parts, row_bytes) = FORMATS[name], row_parts(name, columns)
    planes = [part for part in parts.values() if part.name.startswith("plane")]
    if form.data_bits < 8:
        assert [form.plane_offset_bytes(plane, columns) for plane in form.planes] == [part.start for part in planes]
    assert form.zero_offset_bytes(columns) == planes[-1].end
    assert form.scale_offset_bytes(columns) == parts["scales"].start
    factors = [part for part in parts.values() if part.name.endswith("factors")]
    assert not factors or form.factor_offset_bytes(columns) == factors[0].start
    assert form.row_bytes(columns) == row_bytes
    # A plane ends behind the low bits, where others follow.
    assert form.data_bits != 6 or form.high_offset_bytes(columns) == parts["plane 1"].start
    # Where rows are read alone, eight scales are one aligned load, and eight zeros end before the scales do.
    if form.rows:
        assert row_bytes % 64 == parts["scales"].start % 16 == 0
        assert parts["zeros"].count == 0 or parts["zeros"].start + -(-columns // 256) * 8 <= parts["scales"].start


@pytest.mark.parametrize("name", FORMATS.builtin)
@pytest.mark.parametrize("columns", [1, 100, 256, 500, 1024])
def test_bits_of_a_weight_are_those_of_its_parts(name: str, columns: int) -> None:
    """A row has the bits of its weights, and less than an alignment for each of its parts beside that."""
    form = FORMATS[name]
    used, taken = form.bits * form.padded_columns(columns) / 8, form.row_bytes(columns)
    if columns == 1024:
        assert used <= taken < used + (64 + 16 if form.rows else 4)
    assert used <= taken <= used + 64 + 2 * 32


def numbers_of(kind: ScaleType, groups: int, group: int) -> Tensor | grids.BlockScales:
    """Return scales or minima of one row, [1, groups], that are all exact, most of them different."""
    number = torch.arange(groups).unsqueeze(0)
    if not kind.in_blocks:
        return 2.0 ** (number % 9 + 1)
    whole = number * 37 % 256 - (128 if kind == INT8 else 0)
    factor = torch.arange(-(-groups * group // 256)).unsqueeze(0)
    return grids.BlockScales(whole.to(torch.int16), (-0.5) ** factor)


def codes_of(name: str, columns: int) -> tuple[Tensor, grids.GroupGrid]:
    """Return random codes of one row [1, groups, weights] and a grid for them, with many scales and odd zeros."""
    form = FORMATS[name]
    groups = -(-columns // GROUP) * GROUP // form.group
    generator = torch.Generator().manual_seed(columns)
    codes = torch.randint(form.lowest, form.highest + 1, (1, groups, form.group), generator=generator)
    minimum = None if form.minimum is None else numbers_of(form.minimum, groups, form.group)
    grid = grids.GroupGrid.of_parts(form, numbers_of(form.scale, groups, form.group), minimum)
    return codes, grid if form.zero is not None else replace(grid, zero=(torch.arange(groups) * 7 % 241)[None] / 16)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("columns", [32, 96, 160, 352])
def test_layout_of_codes(name: str, columns: int) -> None:
    """Codes, zeros and scales are found by arithmetic on the bytes of the row, and nothing is between them."""
    codes, grid = codes_of(name, columns)
    parts, row_bytes = row_parts(name, columns)
    packed = torch.zeros(1, row_bytes, dtype=torch.uint8)
    packing.pack_codes(codes.to(torch.float32), grid, columns, packed)
    assert torch.equal(dequantize_rows(packed, name, columns), grid.values(codes).view(1, columns))
    row = packed[0].numpy()
    assert codes_of_row(name, row, columns).tolist() == (codes.flatten() + 128 * (name == "q8")).tolist()
    assert weights_of_row(name, row, columns).tolist() == grid.values(codes).flatten().tolist()
    for part in parts.values():
        row[part.start : part.end] = 0
    assert not row.any()


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("columns", [20, 256, 330])
def test_each_format_is_a_formula_in_float64(name: str, columns: int) -> None:
    """Of rows with any bytes, those too that rounding does not make."""
    rows = random_rows(np.random.default_rng(columns), name, 5, columns)
    expected = np.stack([weights_of_row(name, row, columns) for row in rows])
    found = dequantize_rows(torch.from_numpy(rows), name, columns).numpy()
    # A product of three numbers is rounded, and so is its sum with a minimum.
    np.testing.assert_allclose(found, expected, rtol=2**-23, atol=2**-23 * np.abs(expected).max())


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_grid_spans_its_group(name: str) -> None:
    groups = torch.stack([matrix(1, GROUP, seed, mean)[0] for seed, mean in ((0, 0.0), (1, 5.0), (2, -5.0))])
    form = FORMATS[name]
    grid = grids.group_grid(groups, form)
    extremes = groups.gather(1, groups.abs().argmax(1, keepdim=True))[:, 0]
    nearest = grid.nearest(groups)
    found = nearest.gather(1, groups.abs().argmax(1, keepdim=True))[:, 0]
    assert torch.allclose(found, extremes, rtol={"q4m": 2e-2, "mxfp4": 0.25}.get(name, 5e-3))
    assert torch.equal(nearest, grid.values(grid.codes(groups)))
    assert torch.equal(grid.nearest(nearest), nearest)
    # Half of the span: values inside are nearer, and those outside are at its end.
    half = grids.group_grid(groups, FORMATS[name], shrink=0.5)
    if form.scale == E8M0:
        # Of half the span and all of it the better one was chosen.
        assert ((half.scale == grid.scale) | (half.scale == grid.scale / 2)).all()
        return
    assert torch.allclose(half.scale, grid.scale / 2, rtol=1e-3)
    assert half.nearest(groups).abs().max() < 0.6 * nearest.abs().max()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_zeros_of_one_sided_groups_are_at_an_end(sign: float) -> None:
    groups = sign * torch.linspace(0.5, 1.5, GROUP).unsqueeze(0)
    grid = grids.group_grid(groups, FORMATS["q4m"])
    assert grid.zero.tolist() == [0.0 if sign > 0 else 15.0]
    assert torch.allclose(grid.scale, torch.tensor([1.5 / 15]), rtol=1e-3)
    assert (grid.nearest(torch.zeros(1, GROUP)) == 0).all()


def test_predictors_have_six_bits_at_least() -> None:
    assert all(FORMATS[predictor_format(name)].bits > 6 for name in ROW_FORMATS)
    assert predictor_format("q4", "q4") == "q4"


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
    grid = grids.group_grid(groups, FORMATS["mxfp4"])
    given = torch.exp2(groups.abs().amax(-1).log2().floor() - 2)
    assert set((grid.scale / given).tolist()) == {1.0, 2.0}
    plain = grids.GroupGrid(grid.form, given, grid.zero)
    assert ((grid.nearest(groups) - groups).norm(dim=-1) <= (plain.nearest(groups) - groups).norm(dim=-1)).all()


def test_a_table_of_large_numbers_and_float16_scales() -> None:
    form = Codec(
        "nf", 4, FLOAT16, highest=15, table=(-127, -88, -66, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127)
    )
    groups = matrix(40, GROUP, 1)
    grid = grids.group_grid(groups, form)
    levels = torch.tensor(form.table) * grid.scale[:, None]
    nearest = (groups[..., None] - levels[:, None]).abs().amin(-1)
    assert torch.allclose((grid.nearest(groups) - groups).abs(), nearest, atol=1e-6)
