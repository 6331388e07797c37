"""Measures the kernels of decode alone, in bytes of weights per second, next to the machine's memory bandwidth.

    python -m benchmarks.cpu.kernels [--formats f16 q8 q4] [--firing 0.1 0.5] [--tokens 1 8] [--only TEXT] [--isa NAME]

Weights exist in so many copies that together they are larger than any cache, and the copies take turns. So every byte
comes from memory, as it does when a model decodes. A time is the least of many calls. The bandwidth is that of the best
stretch of memory that was read before and after a kernel's turn, with the same threads. Kernels for several tokens are
those of a step for several sequences; for them µs a token alone are shown, since tokens share weights.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.script import argument_parser, heading, row
from picompile.machine.targets import find_native_target
from picompile_codegen import cpu
from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.build.isa import ISAS, targeting
from picompile_codegen.cpu.kernel import Kernel
from picompile_codegen.lowering.program import tensor_bytes
from picompile_codegen.specs import ExpertsSpec, FfnSpec, LinearSpec
from picompile_passes.formats.panels import block_has_panels, has_panels
from picompile_runtime.bench.bandwidth import MemoryReader
from picompile_runtime.devices.cpu.native import HostLibrary, seconds_of
from picompile_runtime.devices.memory import aligned_zeros

# Several times the third-level cache of a desktop processor.
_WORKING_SET_BYTES = 192 * 2**20
# Bytes below this make numbers below 1.06 in every format of weights and caches: nothing is infinite.
_BYTES_BELOW = 0x3C
Arguments = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class Case:
    """A kernel to measure for `tokens` tokens, of whose neurons a share fires, and the share of weights read."""

    label: str
    kernel: Kernel
    tokens: int = 1
    firing: float = 1.0
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


def decoding(form: str, tokens: int, firing: Sequence[float]) -> Iterator[Case]:
    """Yield the kernels that a model of hidden size 2048 with 5632 neurons a layer runs for each token."""
    several = f", {tokens} tokens" if tokens > 1 else ""
    for n, k in ((576, 576), (2048, 2048), (5632, 2048), (32000, 2048)):
        panels = has_panels(form, n)
        rowwise = tokens > 1 and not panels
        linear = LinearSpec(format=form, n=n, k=k, rows=tokens, bias=False, rowwise=rowwise, panels=panels)
        yield Case(f"linear {n}x{k}{several}", cpu.write_kernel(linear), tokens)
    for kind in ("exact", "masked", "dense"):
        kernel = cpu.write_kernel(FfnSpec(
            kind=kind, format=form, neurons=5632, dim=2048, rows=tokens, gated=True, activation="relu",
            up_activation="identity", gate_bias=True, up_bias=True, down_bias=False,
            rowwise=tokens > 1 and kind != "masked",
        ))  # fmt: skip
        for part in firing if kind != "dense" else (1.0,):
            share = {"exact": (1 + 2 * part) / 3, "masked": part, "dense": 1.0}[kind]
            title = f"ffn {kind}{several}" + (f" {part:.0%}" if kind != "dense" else "")
            yield Case(title, kernel, tokens, part, share)
    if block_has_panels((form,) * 3, 1024, 2048):
        yield experts(form, tokens, several)


def experts(form: str, tokens: int, several: str) -> Case:
    """Return the block of a layer of OLMoE: 64 experts of 1024 neurons, of which a token chooses 8."""
    kernel = cpu.write_kernel(ExpertsSpec(
        formats=(form,) * 3, neurons=64 * 1024, experts=64, chosen=8, dim=2048, rows=tokens, gated=True,
        activation="silu", up_activation="identity", gate_bias=False, up_bias=False, down_bias=False,
    ))  # fmt: skip
    return Case(f"experts 8 of 64{several}", kernel, tokens, 8 / 64, 1 - (1 - 8 / 64) ** tokens)


def arguments_of(case: Case, rng: np.random.Generator) -> Iterator[Arguments]:
    """Yield the arguments of calls that differ in the copy of the weights, as many as make the working set.

    x is zero, so that the biases alone decide which neurons fire. Tokens choose experts by chance.
    """
    shared = {each.name: aligned_zeros(each.shape, np.dtype(each.dtype)) for each in case.kernel.arguments}
    for name, array in shared.items():
        if name in case.matrices:
            some = rng.integers(0, _BYTES_BELOW, 2**20, np.uint8)
            array.view(np.uint8).reshape(-1)[:] = np.resize(some, array.nbytes)
        elif name == "mask":
            array[:] = rng.random(array.shape) < case.firing
        elif name == "gains":
            chosen = np.arange(array.shape[1]) < round(case.firing * array.shape[1])
            array[:] = rng.permuted(np.tile(chosen, (len(array), 1)), axis=1)
        elif name == "gate_bias" and "mask" not in shared:
            array[:] = np.where(rng.random(array.shape) < case.firing, 1.0, -1.0)
        elif name in ("gate_bias", "up_bias"):
            array[:] = 1.0
        elif name == "step":
            array.reshape(-1)[0] = case.tokens
    for _ in range(max(1, int(_WORKING_SET_BYTES / (case.share * case.matrix_bytes)))):
        arrays = dict(shared)
        for name in case.matrices:
            arrays[name] = aligned_zeros(shared[name].shape, shared[name].dtype)
            arrays[name][:] = shared[name]
            if (scale := name.replace(".data", ".scale")) in shared:
                # Scales of weights lie behind them, in memory of the same copy.
                arrays[scale] = arrays[name].view(np.float16)
        yield arrays


def seconds(library: HostLibrary, case: Case, threads: int, limit_s: float) -> float:
    """Return the least time of a call within `limit_s`."""
    copies, name = arguments_of(case, np.random.default_rng(0)), case.kernel.name
    calls = library.bind([(name, [arrays[each] for each in case.kernel.params]) for arrays in copies])
    best, end, stamps = float("inf"), time.perf_counter() + limit_s, np.zeros((len(calls), 2), np.int64)
    while time.perf_counter() < end:
        library.run(calls, threads, stamps)
        best = min(best, float(seconds_of(stamps).min()))
    return best


def best_isa() -> str:
    """The best instruction set that this machine has."""
    target = find_native_target()
    if target is None:
        raise SystemExit("there is no code for this machine")
    return target.isas[0]


def main() -> None:
    """Builds all kernels into one library and prints a line for each."""
    parser = argument_parser(__doc__, threads=os.cpu_count(), firing=[0.1], tokens=[1])
    parser.add_argument("--formats", nargs="+", default=["f16", "q8", "q4"])
    parser.add_argument("--only", default="", help="measure the kernels whose name in the table has this text")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds for each kernel")
    parser.add_argument("--isa", choices=ISAS, default=best_isa(), help="instruction set; default: the best here")
    options = parser.parse_args()
    isa = ISAS[options.isa]
    with targeting(isa), tempfile.TemporaryDirectory() as folder:
        cases = [
            (name, case)
            for name, tokens in itertools.product(options.formats, options.tokens)
            for case in decoding(name, tokens, options.firing)
            if options.only in case.label
        ]
        path = Path(folder) / "host.so"
        # Two shares of inputs are two cases of one kernel.
        build_host_library(list({case.kernel.name: case.kernel for _, case in cases}.values()), path, isa)
        library = HostLibrary(path)
        reader = MemoryReader(library, options.threads)
        print(f"{options.threads} threads, {isa.name}\n")
        print(heading("format", "kernel", "µs a token", "GB/s", "reading", "share"))
        before = reader.read().max()
        for name, case in cases:
            call_s = seconds(library, case, options.threads, options.seconds)
            after = reader.read().max()
            speed, bandwidth = case.share * case.matrix_bytes / call_s, float(max(before, after))
            speeds = (f"{speed / 1e9:.1f}", f"{bandwidth / 1e9:.1f}", f"{speed / bandwidth:.0%}")
            shown = speeds if case.tokens == 1 else ("", speeds[1], "")
            print(row(name, case.label, f"{1e6 * call_s / case.tokens:.1f}", *shown), flush=True)
            before = after


if __name__ == "__main__":
    main()
