"""The time of a step for several sequences, against tiles of a chunk.

    python -m benchmarks.cpu.batch [--threads N] [--tokens 1 2 4 8 16 32] [--rate 0.1] [--rounds 12]

A projection 2048 × 2048 and the gated block of 5632 × 2048 for some tokens, as `batch` computes them: each token gets
the bits that it gets alone. The projection's weights lie in panels, where their format has any, or in rows. The block
is dense, `exact`, or follows masks that name random neurons at the rate. Beside them kernels of weights in rows that
read a chunk of a prompt, in tiles, whose sums come in another order. Prints a table for each format: µs a token, and
the bandwidth of the memory that was measured in between. Each kernel goes through copies of its weights that are
together larger than any cache.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.cpu.kernel_calls import KernelCalls
from benchmarks.cpu.kernels import Case, arguments_of, best_isa
from benchmarks.script import argument_parser, heading, row
from picompile_codegen import cpu
from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.build.isa import ISAS, targeting
from picompile_codegen.specs import FfnSpec, LinearSpec
from picompile_codegen.weight_panels import has_panels
from picompile_runtime.bench.bandwidth import MemoryReader
from picompile_runtime.devices.cpu.native import HostLibrary

_NEURONS, _DIM = 5632, 2048


def _cases(format_name: str, rows: int) -> list[Case]:
    """Return the kernels, each with the title of its column."""

    def linear(title: str, *, rowwise: bool = False, panels: bool = False) -> Case:
        spec = LinearSpec(format=format_name, n=_DIM, k=_DIM, rows=rows, bias=False, rowwise=rowwise, panels=panels)
        return Case(title, cpu.write_kernel(spec))

    def block(title: str, kind: str, rowwise: bool) -> Case:
        return Case(title, cpu.write_kernel(FfnSpec(
            kind=kind, format=format_name, neurons=_NEURONS, dim=_DIM, rows=rows, gated=True, activation="relu",
            up_activation="identity", gate_bias=True, up_bias=True, down_bias=False, rowwise=rowwise,
        )))  # fmt: skip

    in_panels = [linear("projection in panels", panels=True)] if has_panels(format_name, _DIM) else []
    return [
        *in_panels,
        linear("projection in rows", rowwise=True),
        linear("projection in tiles"),
        block("dense block", "dense", True),
        block("block in tiles", "dense", False),
        block("exact block, half firing", "exact", True),
        block("masked block", "masked", False),
    ]


class _Bound:
    """One kernel with copies of its weights, and the arguments that they share."""

    def __init__(self, case: Case, folder: Path, isa: str, rate: float) -> None:
        path = folder / f"{case.kernel.name}.so"
        build_host_library([case.kernel], path, ISAS[isa])
        self.library, rng = HostLibrary(path), np.random.default_rng(0)
        self.calls = KernelCalls(self.library, case.kernel, arguments_of(case, rng))
        self.shared = self.calls.shared
        # x is zero, so that biases alone decide: of `exact` half of the neurons fire, and all that a mask names.
        if "gate_bias" in self.shared:
            fires = rng.random(self.shared["gate_bias"].shape) < (1.0 if "mask" in self.shared else 0.5)
            self.shared["gate_bias"][:] = np.where(fires, 1.0, -1.0)
        if "mask" in self.shared:
            self.shared["mask"][:] = rng.random(self.shared["mask"].shape) < rate

    def us_a_token(self, tokens: int, threads: int) -> float:
        self.shared["step"][0] = tokens
        return 1e6 * float(self.calls.seconds(threads).mean()) / tokens


def main() -> None:
    parser = argument_parser(__doc__, threads=os.cpu_count(), tokens=[1, 2, 4, 8, 16, 32], rounds=12)
    parser.add_argument("--formats", nargs="+", default=["q4", "f16"])
    parser.add_argument("--rate", type=float, default=0.1, help="share of the neurons that masks name")
    parser.add_argument("--isa", choices=ISAS, default=best_isa(), help="instruction set; default: the best here")
    options = parser.parse_args()
    for format_name in options.formats:
        _measure(format_name, options)


def _measure(format_name: str, options: argparse.Namespace) -> None:
    rows = max(options.tokens)
    with targeting(ISAS[options.isa]), tempfile.TemporaryDirectory() as folder:
        cases = _cases(format_name, rows)
        bound = [_Bound(case, Path(folder), options.isa, options.rate) for case in cases]
        reader = MemoryReader(bound[0].library, options.threads)
        print(f"\n{format_name}, {options.threads} threads, {options.isa}, masks of {options.rate:.0%}\n")
        print(heading("tokens", *(case.label for case in cases), "GB/s"))
        for tokens in options.tokens:
            times: list[list[float]] = [[] for _ in cases]
            speeds = []
            for _ in range(options.rounds):
                speeds.append(float(np.median(reader.read())) / 1e9)
                for block, found in zip(bound, times, strict=True):
                    found.append(block.us_a_token(tokens, options.threads))
            medians = (f"{statistics.median(found):.0f}" for found in (*times, speeds))
            print(row(tokens, *medians), flush=True)


if __name__ == "__main__":
    main()
