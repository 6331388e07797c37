"""From how many firing neurons on a batch is faster with every neuron computed.

    python benchmarks/batch.py [--threads N] [--tokens 2 4 8 32] [--rates 0.1 0.2 0.4 0.6] [--rounds 12]

The gated block of some tokens, 5632 × 2048, whose masks name random neurons at each rate: each token by its own mask,
as the kernel does where these name few, against all neurons in tiles, as it does where they name many. Prints a table
for each format: µs a token by masks, in tiles, and the bandwidth that was read in between. The layers take turns, and
are together larger than any cache.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from kernels import Case, arguments_of, best_isa

from picompile_codegen import cpu
from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.build.isa import ISAS, targeting
from picompile_codegen.cpu import ffn as ffn_batch
from picompile_codegen.specs import FfnSpec
from picompile_runtime.bench.bandwidth import MemoryReader
from picompile_runtime.devices.cpu.native import CallList, HostLibrary

_NEURONS, _DIM = 5632, 2048
_BY_MASKS, _IN_TILES = 100, -1


def _kernel(format: str, rows: int, percent: int) -> Case:
    """The block for `rows` tokens that computes all neurons beyond this share of them."""
    blocks, share = ffn_batch.DENSE_BLOCKS, ffn_batch.DENSE_PERCENT
    ffn_batch.DENSE_BLOCKS, ffn_batch.DENSE_PERCENT = 0, percent
    try:
        kernel = cpu.write_kernel(FfnSpec(
            kind="masked", format=format, neurons=_NEURONS, dim=_DIM, rows=rows, gated=True, activation="relu",
            up_activation="identity", gate_bias=True, up_bias=True, down_bias=False,
        ))  # fmt: skip
    finally:
        ffn_batch.DENSE_BLOCKS, ffn_batch.DENSE_PERCENT = blocks, share
    return Case(f"{percent}", kernel)


class _Block:
    """One kernel with copies of the weights, and the masks and the number of tokens that they share."""

    def __init__(self, case: Case, folder: Path, isa: str) -> None:
        path = folder / f"{case.label}.so"
        build_host_library([case.kernel], path, ISAS[isa])
        self.library = HostLibrary(path)
        sets = list(arguments_of(case, np.random.default_rng(0)))
        self.shared = sets[0]
        self.shared["gate_bias"][:] = self.shared["up_bias"][:] = 1.0
        names = [*case.kernel.params]
        self.calls: CallList = self.library.bind([(case.kernel.name, [s[name] for name in names]) for s in sets])

    def us_a_token(self, tokens: int, threads: int) -> float:
        self.shared["step"][0] = tokens
        start = time.perf_counter()
        self.library.run(self.calls, threads)
        return 1e6 * (time.perf_counter() - start) / len(self.calls) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--formats", nargs="+", default=["q4", "f16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2, 4, 8, 32])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.2, 0.4, 0.6])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--isa", choices=ISAS, default=best_isa(), help="what is compiled for; default: the best here")
    options = parser.parse_args()
    for format in options.formats:
        _measure(format, options)


def _measure(format: str, options: argparse.Namespace) -> None:
    rows = max(options.tokens)
    with targeting(ISAS[options.isa]), tempfile.TemporaryDirectory() as folder:
        masks, tiles = (
            _Block(_kernel(format, rows, percent), Path(folder), options.isa) for percent in (_BY_MASKS, _IN_TILES)
        )
        reader = MemoryReader(masks.library, options.threads)
        print(f"\n{format}, {options.threads} threads, {options.isa}\n")
        print("| tokens | firing | by masks | in tiles | GB/s |\n| --- | --- | --- | --- | --- |")
        rng = np.random.default_rng(1)
        for tokens in options.tokens:
            for rate in options.rates:
                masks.shared["mask"][:] = rng.random((rows, _NEURONS)) < rate
                times: list[list[float]] = [[], []]
                speeds = []
                for _ in range(options.rounds):
                    speeds.append(float(np.median(reader.read())) / 1e9)
                    for block, found in zip((masks, tiles), times, strict=True):
                        found.append(block.us_a_token(tokens, options.threads))
                medians = " | ".join(f"{statistics.median(found):.0f}" for found in times)
                print(f"| {tokens} | {rate:.0%} | {medians} | {statistics.median(speeds):.0f} |", flush=True)


if __name__ == "__main__":
    main()
