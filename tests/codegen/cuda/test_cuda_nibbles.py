"""Weights of q4 as GPUs unpack them: which numbers they are, and how many instructions that takes."""

import sys
from pathlib import Path

import numpy as np
import pytest

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.emulator import Emulated
from helpers.support import ROOT
from picompile_codegen import cuda
from picompile_codegen.specs import EmbeddingSpec

sys.path.insert(0, str(ROOT / "benchmarks"))

from cuda_instructions import WEIGHTS, longest_loops

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
    "linear 8192x8192": (470, 170),
    "ffn masked 11008x4096, hidden": (510, 180),
    "ffn exact 11008x4096, hidden": (510, 180),
    "ffn masked 11008x4096, down": (495, 195),
}
# What leaves four blocks of 256 threads the registers of a multiprocessor, and three.
REGISTERS = {name: 80 if name.endswith("down") else 64 for name in BOUNDS}


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
    scales = np.array([1, -1, 0.1, 65504, -65504, 2**-14, 2**-24, -3 * 2**-24, 0], np.float16)
    rows, dim = 16 * len(scales), 32
    nibbles = (np.arange(16)[:, None] + np.arange(dim)) % 16
    nibbles = np.tile(nibbles, (len(scales), 1)).astype(np.uint8)
    data = np.zeros((rows, 64), np.uint8)
    data[:, :16] = nibbles[:, :16] | nibbles[:, 16:] << 4
    row_scales = np.repeat(scales, 16)
    # The scales of a row lie behind its weights.
    data[:, 16:18] = row_scales.view(np.uint8).reshape(-1, 2)
    kernel = cuda.write_kernel(EmbeddingSpec(format="q4", vocab=rows, dim=dim, rows=rows, offset=0))
    workbench = CudaWorkbench(tmp_path / "embedding.so", [kernel])
    found = workbench.run(kernel, {"ids": np.arange(rows, dtype=np.int32), "w": data}, tokens=rows)["y"]
    expected = (nibbles.astype(np.float32) - np.float32(8)) * row_scales.astype(np.float32)[:, None]
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("sm", [89, 90])
def test_instructions_for_128_weights(tmp_path: Path, sm: int) -> None:
    """Three for a weight, one of them of integers, and the rest; with a shift for each it was 640, 341 of integers."""
    found = longest_loops("q4", sm, tmp_path)
    # Bits in their place are subnormal numbers, which such instructions take for zeros.
    assert b".ftz" not in (tmp_path / "device.ptx").read_bytes()
    assert set(found) == set(BOUNDS)
    for name, (loop, launch) in found.items():
        total, integer = loop.per(WEIGHTS)
        # Whoever counts the wrong loop finds fewer: a product, a conversion and a mask for each weight.
        assert 3 * WEIGHTS < total <= BOUNDS[name][0], f"{name}: {total}"
        assert WEIGHTS < integer <= BOUNDS[name][1], f"{name}: {integer}"
        assert launch["registers"] <= REGISTERS[name], name
        assert launch["local_bytes"] == 0, name
