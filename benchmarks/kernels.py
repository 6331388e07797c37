"""Measures the kernels of decode alone, in bytes of weights per second, next to the machine's memory bandwidth.

    python benchmarks/kernels.py [--threads N] [--formats f16 q8 q4] [--seconds S]

Weights are copied until they are far larger than any cache, and the copies take turns, so that every byte comes from
memory, as it does when a model decodes. Times are the least of many repetitions.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from picompile_codegen import kernels
from picompile_codegen.build import build_host_library
from picompile_codegen.kernels import Kernel
from picompile_codegen.kernels.kernel import KernelFunction
from picompile_codegen.kernels.tensor import local, loop, parallel
from picompile_codegen.kernels.vector import LANES, at, splat, total
from picompile_runtime.memory import aligned_zeros
from picompile_runtime.native import CallList, HostLibrary

# Larger than the third-level cache of any desktop processor.
_WORKING_SET_BYTES = 192 * 2**20
_READ_BYTES = 16 * 2**20
_FIRING = 0.10


@dataclass(frozen=True)
class Case:
    """A kernel to measure and the share of its weights that a call reads."""

    label: str
    kernel: Kernel
    share: float = 1.0


def read_kernel() -> Kernel:
    """Adds up _READ_BYTES of float32: what reading costs when there is nothing else to do."""
    blocks, chains = 256, 8
    size = _READ_BYTES // 4 // blocks
    function = KernelFunction("read", _READ_BYTES)
    with function:
        x, y = function.floats("x", blocks, size), function.floats("y", blocks)
        with parallel(blocks) as block:
            sums = local(chains * LANES)
            for i in range(chains):
                sums[at(i * LANES)] = splat(0.0)
            with loop(0, size // (chains * LANES)) as step:
                for i in range(chains):
                    sums[at(i * LANES)] = sums[at(i * LANES)] + x[block, at((step * chains + i) * LANES)]
            y[block] = total(sum((sums[at(i * LANES)] for i in range(1, chains)), sums[at(0)]))
    return function.kernel()


def cases(format_name: str) -> Iterator[Case]:
    """What a model of hidden size 2048 and 5632 neurons a layer runs for each token."""
    for n, k in ((2048, 2048), (5632, 2048), (32000, 2048)):
        kernel = kernels.linear(format=format_name, n=n, k=k, rows=1, bias=False)
        yield Case(f"linear {n}x{k}", kernel)
    for kind, share in (("exact", (1 + 2 * _FIRING) / 3), ("dense", 1.0)):
        kernel = kernels.ffn(
            kind=kind, format=format_name, neurons=5632, dim=2048, rows=1, gated=True, activation="relu",
            up_activation="identity", gate_bias=kind == "exact", up_bias=False, down_bias=False,
        )  # fmt: skip
        yield Case(f"ffn {kind}" + (f" {_FIRING:.0%}" if kind == "exact" else ""), kernel, share)


def weights_of(kernel: Kernel) -> list[str]:
    """The matrices of a kernel, by the names of their data."""
    return [argument.name for argument in kernel.arguments if argument.name.endswith(".data")]


def fill(kernel: Kernel, rng: np.random.Generator) -> dict[str, NDArray[np.generic]]:
    """Arguments: weights of random bits that are finite numbers, and a bias that lets a tenth of the neurons fire."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for argument in kernel.arguments:
        name, _, part = argument.name.partition(".")
        if part == "scale":
            arrays[argument.name] = arrays[f"{name}.data"].view(np.float16).reshape(argument.shape)
            continue
        array = aligned_zeros(argument.shape, np.dtype(argument.dtype))
        arrays[argument.name] = array
        if part == "data":
            # Bytes below 0x3c: as float16, in any place, less than 1.06.
            array.view(np.uint8)[:] = rng.integers(0, 0x3C, (1024, 1), np.uint8).repeat(
                array.nbytes // array.shape[0], 1
            )[np.arange(array.shape[0]) % 1024]
        elif name == "gate_bias":
            array[:] = np.where(rng.random(argument.shape) < _FIRING, 1.0, -1.0)
        elif name == "x" and "gate_bias" not in kernel.params:
            array[:] = rng.uniform(-1, 1, argument.shape)
    return arrays


def copies(kernel: Kernel, rng: np.random.Generator) -> Iterator[dict[str, NDArray[np.generic]]]:
    """Arguments with as many copies of the weights as make the working set."""
    arrays = fill(kernel, rng)
    size = sum(arrays[name].nbytes for name in weights_of(kernel))
    for _ in range(max(1, _WORKING_SET_BYTES // size)):
        other = dict(arrays)
        for name in weights_of(kernel):
            data = aligned_zeros(arrays[name].shape, arrays[name].dtype)
            data[:] = arrays[name]
            other[name] = data
            scale = name.replace(".data", ".scale")
            if scale in arrays:
                other[scale] = data.view(np.float16).reshape(arrays[scale].shape)
        yield other


def least_seconds(library: HostLibrary, calls: CallList, threads: int, limit_s: float) -> float:
    """The least time of one call, in as many runs as fit in `limit_s`."""
    best, end = float("inf"), time.perf_counter() + limit_s
    while time.perf_counter() < end:
        seconds = np.zeros(len(calls))
        library.run(calls, threads, seconds)
        best = min(best, float(seconds.min()))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--formats", nargs="+", default=["f16", "q8", "q4"])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each kernel")
    options = parser.parse_args()
    table = {form: list(cases(form)) for form in options.formats}
    reader = read_kernel()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "host.so"
        build_host_library([reader, *(case.kernel for form in table.values() for case in form)], path)
        measure(HostLibrary(path), reader, table, options.threads, options.seconds)


def measure(
    library: HostLibrary, reader: Kernel, table: dict[str, list[Case]], threads: int, limit_s: float
) -> None:
    """Prints a line for each case."""
    rng = np.random.default_rng(0)

    def gigabytes_per_s(kernel: Kernel, bytes_read: Callable[[dict[str, NDArray[np.generic]]], float]) -> float:
        sets = list(copies(kernel, rng)) if weights_of(kernel) else [fill(kernel, rng) for _ in range(12)]
        calls = library.bind([(kernel.name, [arrays[name] for name in kernel.params]) for arrays in sets])
        seconds = least_seconds(library, calls, threads, limit_s)
        return bytes_read(sets[0]) / seconds / 1e9

    read = gigabytes_per_s(reader, lambda arrays: _READ_BYTES)
    print(f"{threads} threads; reading memory: {read:.1f} GB/s")
    print(f"{'':4} {'kernel':20} {'GB/s':>6} {'of reading':>10}")
    for form, form_cases in table.items():
        for case in form_cases:

            def weight_bytes(arrays: dict[str, NDArray[np.generic]], case: Case = case) -> float:
                return case.share * sum(arrays[name].nbytes for name in weights_of(case.kernel))

            speed = gigabytes_per_s(case.kernel, weight_bytes)
            print(f"{form:4} {case.label:20} {speed:6.1f} {speed / read:10.0%}")


if __name__ == "__main__":
    main()
