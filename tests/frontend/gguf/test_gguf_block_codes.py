"""The codes, scales and minima of GGML's blocks, against what the `gguf` package makes of the same bytes."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize

from helpers.gguf_blocks import HALVES, random_blocks
from helpers.weight_formats import weights_of_row
from picompile.frontend.gguf import blocks
from picompile.frontend.gguf.block_codes import STORED, read_codes
from picompile.frontend.gguf.blocks import UNPACKED, repack, unpack
from picompile_passes.formats import FORMATS
from picompile_passes.formats.packing import dequantize_rows

Array = npt.NDArray[np.uint8]

ROWS, COLUMNS = 37, 512


# The largest codes of types that do not use all codes of their format.
MOST = {"TQ1_0": 2, **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"), 5)}


def some_blocks(type_name: str) -> Array:
    """Return random blocks [rows, blocks, bytes]."""
    return random_blocks(np.random.default_rng(0), type_name, ROWS, COLUMNS)


def unpacked(data: Array, type_name: str) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return dequantize(data.reshape(ROWS, -1), GGMLQuantizationType[type_name])


def test_types_with_a_format_are_unpacked_as_well() -> None:
    assert set(STORED) == set(HALVES) <= UNPACKED


@pytest.mark.parametrize("type_name", HALVES)
def test_codes_and_their_grid_have_the_numbers_of_blocks(type_name: str) -> None:
    data, form = some_blocks(type_name), FORMATS[STORED[type_name]]
    codes, grid = read_codes(data.reshape(ROWS, -1), type_name, data.shape[2], form)
    assert codes.shape == (ROWS, COLUMNS // form.group, form.group)
    codes = codes.view(torch.int8) if form.data_bits == 8 else codes
    assert form.least_code <= int(codes.min())
    assert int(codes.max()) == MOST.get(type_name, form.highest)
    np.testing.assert_array_equal(grid.values(codes).view(ROWS, COLUMNS).numpy(), unpacked(data, type_name))


@pytest.mark.parametrize("type_name", HALVES)
def test_blocks_are_repacked_bit_for_bit(monkeypatch: pytest.MonkeyPatch, type_name: str) -> None:
    """A few rows at a time, which are the same as all at once."""
    data, name = some_blocks(type_name), STORED[type_name]
    monkeypatch.setattr(blocks, "_STEP_ELEMENTS", 7 * COLUMNS)
    packed = repack(data.reshape(ROWS, -1), type_name, COLUMNS)
    assert packed is not None
    assert packed.shape == (ROWS, FORMATS[name].row_bytes(COLUMNS))
    expected = unpacked(data, type_name)
    np.testing.assert_array_equal(dequantize_rows(packed, name, COLUMNS).numpy(), expected)
    np.testing.assert_array_equal(unpack(data.reshape(ROWS, -1), type_name, COLUMNS).numpy(), expected)
    # With the numbers of the format in float64: what float32 makes of them is rounded.
    exact = np.stack([weights_of_row(name, row, COLUMNS) for row in packed[:3].numpy()])
    np.testing.assert_allclose(expected[:3], exact, rtol=2**-22, atol=2**-22 * np.abs(exact).max())


@pytest.mark.parametrize("exponent", [0, 255])
def test_powers_of_two_that_ours_have_not_are_refused(exponent: int) -> None:
    """2^-127 is below the numbers that float32 has whole, and 255 stands for none."""
    data = some_blocks("MXFP4")
    assert repack(data.reshape(ROWS, -1), "MXFP4", COLUMNS) is not None
    data[5, 3, 0] = exponent
    assert repack(data.reshape(ROWS, -1), "MXFP4", COLUMNS) is None


@pytest.mark.parametrize(("exponent", "is_finite"), [(252, True), (253, False), (254, False)])
def test_powers_of_two_that_make_infinite_weights_are_refused(exponent: int, is_finite: bool) -> None:
    data = some_blocks("MXFP4")
    data[5, 3, :2] = exponent, 0x77
    assert np.isfinite(unpacked(data, "MXFP4")).all() == is_finite
    assert (repack(data.reshape(ROWS, -1), "MXFP4", COLUMNS) is not None) == is_finite


@pytest.mark.parametrize(("type_name", "place"), [(name, place) for name in HALVES for place in HALVES[name]])
@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E00])
def test_scales_that_are_no_numbers_are_damage(type_name: str, place: int, half: int) -> None:
    data = some_blocks(type_name)
    data[5, 1, place : place + 2] = np.array([half], "<u2").view(np.uint8)
    with pytest.raises(ValueError, match="scales that are no numbers"):
        repack(data.reshape(ROWS, -1), type_name, COLUMNS)
