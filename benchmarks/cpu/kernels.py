"""Measures the kernels of decode alone, in bytes of weights per second, next to the machine's memory bandwidth.

    python -m benchmarks.cpu.kernels [--threads N] [--formats f16 q8 q4] [--only TEXT] [--seconds S] [--isa NAME]

Weights exist in so many copies that together they are larger than any cache, and the copies take turns. So every byte
comes from memory, as it does when a model decodes. A time is the least of many calls. The bandwidth is that of the best
stretch of memory that was read before and after a kernel's turn, with the same threads.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.cpu.kernel_calls import Arguments, KernelCalls, copied_arguments, fill_with_bytes
from benchmarks.script import argument_parser
from picompile.machine.targets import find_native_target
from picompile_codegen import cpu
from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.build.isa import ISAS, targeting
from picompile_codegen.cpu.kernel import Kernel
from picompile_codegen.lowering.program import tensor_bytes
from picompile_codegen.specs import FfnSpec, LinearSpec
from picompile_codegen.weight_panels import has_panels
from picompile_runtime.bench.bandwidth import MemoryReader
from picompile_runtime.devices.cpu.native import HostLibrary

# Several times the third-level cache of a desktop processor.
_WORKING_SET_BYTES = 192 * 2**20
_FIRING = 0.10


@dataclass(frozen=True)
class Case:
    """A kernel to measure, and the share of its weights that a call reads."""

    label: str
    kernel: Kernel
    share: float = 1.0

    @property
    def matrices(self) -> list[str]:
        """The arguments whose bytes are counted."""
        return [name for name in self.kernel.params if name.endswith(".data")]

    @property
    def matrix_bytes(self) -> int:
        """The bytes of these."""
        found = (argument for argument in self.kernel.arguments if argument.name in self.matrices)
        return sum(tensor_bytes(argument.dtype, argument.shape) for argument in found)


def decoding(format_name: str) -> Iterator[Case]:
    """Yield the kernels that a model of hidden size 2048 with 5632 neurons a layer runs for each token."""
    for n, k in ((576, 576), (2048, 2048), (5632, 2048), (32000, 2048)):
        panels = has_panels(format_name, n)
        kernel = cpu.write_kernel(LinearSpec(format=format_name, n=n, k=k, rows=1, bias=False, panels=panels))
        yield Case(f"linear {n}x{k}", kernel)
    for kind in ("exact", "masked", "dense"):
        kernel = cpu.write_kernel(FfnSpec(
            kind=kind, format=format_name, neurons=5632, dim=2048, rows=1, gated=True, activation="relu",
            up_activation="identity", gate_bias=True, up_bias=True, down_bias=False,
        ))  # fmt: skip
        share = {"exact": (1 + 2 * _FIRING) / 3, "masked": _FIRING, "dense": 1.0}[kind]
        yield Case(f"ffn {kind}" + (f" {_FIRING:.0%}" if share < 1 else ""), kernel, share)


def arguments_of(case: Case, rng: np.random.Generator) -> list[Arguments]:
    """Arguments of a kernel, with as many copies of its weights as make the working set.

    x is zero, so that the biases alone decide which neurons fire: a tenth of them.
    """

    def fill(name: str, array: NDArray[Any]) -> None:
        if name in case.matrices:
            fill_with_bytes(array, rng)
        elif name == "mask":
            array[:] = rng.random(array.shape) < _FIRING
        elif name == "gate_bias" and "mask" not in case.kernel.params:
            array[:] = np.where(rng.random(array.shape) < _FIRING, 1.0, -1.0)
        elif name in ("gate_bias", "up_bias"):
            array[:] = 1.0

    copies = max(1, int(_WORKING_SET_BYTES / (case.share * case.matrix_bytes)))
    return list(copied_arguments(case.kernel, fill, case.matrices, copies))


def bytes_per_s(library: HostLibrary, case: Case, threads: int, limit_s: float) -> float:
    """Bytes of weights that a call reads, over the least time of a call within `limit_s`."""
    calls = KernelCalls(library, case.kernel, arguments_of(case, np.random.default_rng(0)))
    best, end = float("inf"), time.perf_counter() + limit_s
    while time.perf_counter() < end:
        best = min(best, float(calls.seconds(threads).min()))
    return case.share * case.matrix_bytes / best


def best_isa() -> str:
    """The best instruction set that this machine has."""
    target = find_native_target()
    if target is None:
        raise SystemExit("there is no code for this machine")
    return target.isas[0]


def main() -> None:
    """Builds all kernels into one library and prints a line for each."""
    parser = argument_parser(__doc__, threads=os.cpu_count())
    parser.add_argument("--formats", nargs="+", default=["f16", "q8", "q4"])
    parser.add_argument("--only", default="", help="measure the kernels whose name in the table has this text")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds for each kernel")
    parser.add_argument("--isa", choices=ISAS, default=best_isa(), help="instruction set; default: the best here")
    options = parser.parse_args()
    isa = ISAS[options.isa]
    with targeting(isa):
        table = [(name, case) for name in options.formats for case in decoding(name) if options.only in case.label]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "host.so"
        # Two shares of inputs are two cases of one kernel.
        build_host_library(list({case.kernel.name: case.kernel for _, case in table}.values()), path, isa)
        library = HostLibrary(path)
        reader = MemoryReader(library, options.threads)
        print(f"{options.threads} threads, {isa.name}\n{'':4} {'kernel':28} {'GB/s':>6} {'reading':>8} {'share':>6}")
        before = reader.read().max()
        for name, case in table:
            speed = bytes_per_s(library, case, options.threads, options.seconds)
            after = reader.read().max()
            bandwidth = float(max(before, after))
            print(f"{name:4} {case.label:28} {speed / 1e9:6.1f} {bandwidth / 1e9:8.1f} {speed / bandwidth:6.0%}")
            before = after


if __name__ == "__main__":
    main()
