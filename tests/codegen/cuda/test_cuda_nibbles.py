"""Codes of four and six bits as GPUs unpack them: which weights they are, and how many instructions that takes."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.emulator import Emulated
from helpers.support import ROOT
from picompile_codegen import cuda
from picompile_codegen.specs import EmbeddingSpec
from picompile_passes.dialect.formats import GroupGrid, pack_codes
from picompile_passes.weight_formats import FORMATS, GROUP, ZERO_STEPS

sys.path.insert(0, str(ROOT / "benchmarks"))

from cuda_instructions import WEIGHTS, longest_loops

SCALES = np.array([1, -1, 0.1, 65504, -65504, 2**-14, 2**-24, -3 * 2**-24, 0], np.float16)
PLACES = 8
SOURCE = (
    """
extern "C" __global__ void __launch_bounds__(32) nibbles(const uint *__restrict__ words, float *__restrict__ out) {
  int i = blockIdx.x * 32 + threadIdx.x;
"""
    + "".join(f"  out[i * {PLACES} + {place}] = pi_nibble(words[i], {4 * place});\n" for place in range(PLACES))
    + "}\n"
)
# All instructions for 128 weights, and those of the integer pipe: counted, and a few more for another release of NVRTC.
BOUNDS = {
    "q4": {
        "linear 8192x8192": (470, 170),
        "ffn masked 11008x4096, hidden": (510, 180),
        "ffn exact 11008x4096, hidden": (510, 180),
        "ffn masked 11008x4096, down": (495, 195),
    },
    # The zero of a group is one more read, which its weights share.
    "q4m": {
        "linear 8192x8192": (485, 175),
        "ffn masked 11008x4096, hidden": (525, 180),
        "ffn exact 11008x4096, hidden": (525, 180),
        "ffn masked 11008x4096, down": (525, 205),
    },
    # Seven more of integers put the codes of eight weights together: two shifts of high bits, one of low ones, and two
    # for each word of four codes.
    "q6": {
        "linear 8192x8192": (570, 270),
        "ffn masked 11008x4096, hidden": (610, 270),
        "ffn exact 11008x4096, hidden": (610, 270),
        "ffn masked 11008x4096, down": (605, 295),
    },
}
# What leaves so many blocks of 256 threads the registers of a multiprocessor, down's behind that of the others.
FOUR, THREE, TWO = 64, 80, 128
REGISTERS = {"q4": (FOUR, THREE), "q4m": (THREE, THREE), "q6": (THREE, TWO)}


def test_every_nibble_in_every_place(tmp_path: Path) -> None:
    """Each place has each value, beside all ones, all zeros and random bits: bit for bit the weight times 2^-22."""
    rng = np.random.default_rng(5)
    values = np.arange(16, dtype=np.uint64)
    words = []
    for place in range(PLACES):
        for around in (0, 0xFFFFFFFF, *rng.integers(0, 2**32, 2)):
            words += [int(around) & ~(15 << 4 * place) | int(value) << 4 * place for value in values]
    given = np.array(words, np.uint32)
    out = np.full((len(given), PLACES), np.nan, np.float32)
    kernel = Emulated(cuda.cuda_source([]).text + SOURCE, tmp_path / "nibbles.so")
    kernel.launch("nibbles", (len(given) // 32, 1, 1), (32, 1, 1), [given, out])
    expected = (given[:, None] >> (4 * np.arange(PLACES, dtype=np.uint32)) & 15).astype(np.float32) - np.float32(8)
    np.testing.assert_array_equal((out * np.float32(2**22)).view(np.uint32), expected.view(np.uint32))


def test_weights_have_the_bits_of_their_product_with_the_scale(tmp_path: Path) -> None:
    """All nibbles in all places of a group, with scales down to the smallest half and up to the largest."""
    rows, dim = 16 * len(SCALES), 32
    nibbles = (np.arange(16)[:, None] + np.arange(dim)) % 16
    nibbles = np.tile(nibbles, (len(SCALES), 1)).astype(np.uint8)
    data = np.zeros((rows, 64), np.uint8)
    data[:, :16] = nibbles[:, :16] | nibbles[:, 16:] << 4
    row_scales = np.repeat(SCALES, 16)
    # The scales of a row lie behind its weights.
    data[:, 16:18] = row_scales.view(np.uint8).reshape(-1, 2)
    kernel = cuda.write_kernel(EmbeddingSpec(format="q4", vocab=rows, dim=dim, rows=rows, offset=0))
    workbench = CudaWorkbench(tmp_path / "embedding.so", [kernel])
    found = workbench.run(kernel, {"ids": np.arange(rows, dtype=np.int32), "w": data}, tokens=rows)["y"]
    expected = (nibbles.astype(np.float32) - np.float32(8)) * row_scales.astype(np.float32)[:, None]
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("format_name", ["q4m", "q6"])
def test_every_code_in_every_place(tmp_path: Path, format_name: str) -> None:
    """All codes in all places of five groups, beside others, and with all zeros of q4m: bit for bit the weights."""
    form, groups = FORMATS[format_name], 5
    row, group, place = np.ogrid[:256, :groups, :GROUP]
    codes = torch.from_numpy((row + 7 * group + 11 * place) % (form.highest + 1)).to(torch.float32)
    zero = torch.from_numpy((row + 51 * group)[..., 0] % 256 / ZERO_STEPS).to(torch.float32)
    scale = torch.from_numpy(np.resize(SCALES, (256, groups))).to(torch.float32)
    grid = GroupGrid(form, scale, zero if form.zero is None else torch.full_like(zero, form.zero))
    dim = groups * GROUP
    data = torch.zeros(256, form.row_bytes(dim), dtype=torch.uint8)
    pack_codes(codes, grid, dim, data)
    kernel = cuda.write_kernel(EmbeddingSpec(format=format_name, vocab=256, dim=dim, rows=256, offset=0))
    workbench = CudaWorkbench(tmp_path / "embedding.so", [kernel])
    found = workbench.run(kernel, {"ids": np.arange(256, dtype=np.int32), "w": data.numpy()}, tokens=256)["y"]
    expected = grid.values(codes).view(256, dim).numpy()
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.slow("compiles with NVRTC; the kernels of one artifact are fast")
@pytest.mark.parametrize("format_name", BOUNDS)
@pytest.mark.parametrize("sm", [89, 90])
def test_instructions_for_128_weights(tmp_path: Path, sm: int, format_name: str) -> None:
    """Three for a weight, one of them of integers, and the rest; with a shift for each it was 640, 341 of integers."""
    found = longest_loops(format_name, sm, tmp_path)
    # Bits in their place are subnormal numbers, which such instructions take for zeros.
    assert b".ftz" not in (tmp_path / "device.ptx").read_bytes()
    assert set(found) == set(BOUNDS[format_name])
    for name, (loop, launch) in found.items():
        total, integer = loop.per(WEIGHTS)
        most, most_integer = BOUNDS[format_name][name]
        # Whoever counts the wrong loop finds fewer: a product, a conversion and a mask for each weight.
        assert 3 * WEIGHTS < total <= most, f"{name}: {total}"
        assert WEIGHTS < integer <= most_integer, f"{name}: {integer}"
        assert launch["registers"] <= REGISTERS[format_name][name.endswith("down")], name
        assert launch["local_bytes"] == 0, name
