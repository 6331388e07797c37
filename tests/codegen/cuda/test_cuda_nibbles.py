"""Codes of four and six bits as GPUs unpack them: which weights they are, and how many instructions that takes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.ptx.instructions import WEIGHTS, longest_loops
from picompile_codegen.specs import EmbeddingSpec
from picompile_passes.formats import E8M0, FORMATS, GROUP, ZERO_STEPS
from picompile_passes.formats.grids import GroupGrid
from picompile_passes.formats.packing import pack_codes

SCALES = np.array([1, -1, 0.1, 65504, -65504, 2**-14, 2**-24, -3 * 2**-24, 0], np.float16)
POWERS = np.exp2([0, -1, 13, -24, 120, -125]).astype(np.float32)
LOOPS = (
    "linear 8192x8192",
    *(
        f"ffn {kind} 11008x4096, {part}"
        for kind, part in (("masked", "hidden"), ("exact", "hidden"), ("masked", "down"))
    ),
)
# All instructions for 128 weights of each loop, and those of the integer pipe: counted, and a few more for another
# release of NVRTC. The zero of a group of q4m is one more read, which its weights share. Seven more of integers put the
# codes of eight weights of q6 together: two shifts of high bits, one of low ones, and two for each word of four codes.
BOUNDS = {
    "q4": ((470, 170), (510, 180), (510, 180), (495, 195)),
    "q4m": ((485, 175), (525, 180), (525, 180), (525, 205)),
    "q6": ((570, 270), (610, 270), (610, 270), (605, 295)),
}
# What leaves so many blocks of 256 threads the registers of a multiprocessor, down's behind that of the others.
FOUR, THREE, TWO = 64, 80, 128
REGISTERS = {"q4": (FOUR, THREE), "q4m": (THREE, THREE), "q6": (THREE, TWO)}


@pytest.mark.parametrize("format_name", [*BOUNDS, "mxfp4"])
def test_every_code_in_every_place(workbench: CudaWorkbench, format_name: str) -> None:
    """All codes in all places of five groups, beside others, and with all zeros of q4m: bit for bit the weights."""
    form, groups = FORMATS[format_name], 5
    row, group, place = np.ogrid[:256, :groups, :GROUP]
    codes = torch.from_numpy((row + 7 * group + 11 * place) % (form.highest + 1)).to(torch.float32)
    zero = torch.from_numpy((row + 51 * group)[..., 0] % 256 / ZERO_STEPS).to(torch.float32)
    scale = torch.from_numpy(np.resize(POWERS if form.scale == E8M0 else SCALES, (256, groups))).to(torch.float32)
    grid = GroupGrid(form, scale, zero if form.zero is None else torch.full_like(zero, form.zero))
    dim = groups * GROUP
    data = torch.zeros(256, form.row_bytes(dim), dtype=torch.uint8)
    pack_codes(codes, grid, dim, data)
    spec = EmbeddingSpec(format=format_name, vocab=256, dim=dim, rows=256, offset=0)
    found = workbench.run(spec, {"ids": np.arange(256, dtype=np.int32), "w": data.numpy()}, tokens=256)["y"]
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
    assert set(found) == set(LOOPS)
    for name, (most, most_integer) in zip(LOOPS, BOUNDS[format_name], strict=True):
        loop, launch = found[name]
        total, integer = loop.per(WEIGHTS)
        # Whoever counts the wrong loop finds fewer: a product, a conversion and a mask for each weight.
        assert 3 * WEIGHTS < total <= most, f"{name}: {total}"
        assert WEIGHTS < integer <= most_integer, f"{name}: {integer}"
        assert launch["registers"] <= REGISTERS[format_name][name.endswith("down")], name
        assert launch["local_bytes"] == 0, name
