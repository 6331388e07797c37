"""Counts the instructions that CUDA kernels of decode take for 128 weights, by disassembly. It needs no GPU.

For each kernel its longest inner loop over weights is counted, with all that the loop does beside multiplying: reads,
addresses, and for each row the sum over a warp. `integer` are the instructions of the integer pipe, which has half the
rate of the others (`sass.py` lists them). A multiprocessor issues four instructions a cycle and two for the integer
pipe, so no kernel takes fewer cycles than the larger of all / 4 and integer / 2.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from helpers.ptx.sass import Count, disassemble, weight_loops
from picompile_codegen import cuda
from picompile_codegen.cuda.build import build_cuda
from picompile_codegen.cuda.function import CudaKernel
from picompile_codegen.specs import FfnSpec, LinearSpec
from picompile_passes.formats import FORMATS, LOW_BITS

WEIGHTS = 128


def kernels(format_name: str) -> dict[str, tuple[CudaKernel, int]]:
    """The kernels of one token that read the most weights: which of its launches is meant, too."""
    linear = cuda.write_kernel(LinearSpec(format=format_name, n=8192, k=8192, rows=1, bias=False))
    ffn = {
        kind: cuda.write_kernel(FfnSpec(
            kind=kind, format=format_name, neurons=11008, dim=4096, rows=1, gated=True, activation="relu",
            up_activation="identity", gate_bias=False, up_bias=False, down_bias=False,
        ))
        for kind in ("masked", "exact")
    }  # fmt: skip
    return {
        "linear 8192x8192": (linear, 0),
        "ffn masked 11008x4096, hidden": (ffn["masked"], 0),
        "ffn exact 11008x4096, hidden": (ffn["exact"], 0),
        "ffn masked 11008x4096, down": (ffn["masked"], 1),
    }


def longest_loops(format_name: str, sm: int, folder: Path) -> dict[str, tuple[Count, Mapping[str, int]]]:
    """The longest inner loop of each kernel, and what `device.json` says of its launch, by the kernel's name above."""
    asked = kernels(format_name)
    build_cuda([kernel for kernel, _ in asked.values()], folder, sm)
    launches = json.loads((folder / "device.json").read_text())["kernels"]
    functions = disassemble(folder / "device.cubin")
    found = {}
    for name, (kernel, number) in asked.items():
        launch = launches[kernel.name][number]
        loops = weight_loops(functions[launch["symbol"]], _read_bits(format_name))
        # The loop that adds up slices reads as many bytes in a turn, and does little with them.
        found[name] = max(loops, key=lambda loop: (sum(loop.operations.values()), loop.weights)), launch
    return found


def _read_bits(format_name: str) -> int:
    """Return how many bits a lane reads for each weight."""
    form = FORMATS[format_name]
    # The 16 bytes that have the high bits of a group have those of another, which another lane computes.
    return 2 * LOW_BITS if form.has_planes else form.data_bits
