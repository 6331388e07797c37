"""The sparsity from which on the sparse feed-forward kernel beats the dense one.

    python -m benchmarks.cpu.sparsity [--threads N] [--formats f16 q4] [--plot docs/images/sparsity.png] [--json FILE]

The gated block of one token, at 4096 × 4096 and 4096 × 11008: `masked` with masks of each sparsity against `dense`.
Neurons are drawn at random, and every call has others: masks of one sparsity are disjoint until all neurons had their
turn, over so many copies of the weights that together they are larger than any cache. So every byte comes from memory,
as it does when a model decodes. Kernels take turns; a time is the median over the calls of all rounds.

The sparse kernel's list of firing neurons is made from the mask in the time that is measured; the mask is given.
For comparison: by the PowerInfer paper (arXiv 2312.12456), general sparse kernels beat dense ones only from 87 %
sparsity on.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.cpu.kernel_calls import KernelCalls
from benchmarks.cpu.kernels import Case, arguments_of, best_isa
from benchmarks.script import argument_parser, markdown, write_json
from picompile_codegen import cpu
from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.build.isa import ISAS, targeting
from picompile_codegen.specs import FfnSpec
from picompile_runtime.bench.bandwidth import MemoryReader
from picompile_runtime.devices.cpu.native import HostLibrary

SPARSITIES = (0.0, 0.3, 0.5, 0.7, 0.87, 0.9, 0.95, 0.99)
SHAPES = ((4096, 4096), (4096, 11008))
_GENERAL_KERNELS = 0.87
Row = dict[str, Any]


def feed_forward(kind: str, format: str, dim: int, neurons: int) -> Case:
    """One block; biases of 1 and an input of 0, so that every neuron that is computed fires."""
    kernel = cpu.write_kernel(FfnSpec(
        kind=kind, format=format, neurons=neurons, dim=dim, rows=1, gated=True, activation="relu",
        up_activation="identity", gate_bias=True, up_bias=True, down_bias=False,
    ))  # fmt: skip
    return Case(f"ffn {kind} {dim}x{neurons}", kernel)


def bound(library: HostLibrary, case: Case) -> KernelCalls:
    calls = KernelCalls(library, case.kernel, arguments_of(case, np.random.default_rng(0)))
    for name in ("gate_bias", "up_bias"):
        calls.shared[name][:] = 1.0
    return calls


def masks(neurons: int, sparsity: float, rng: np.random.Generator) -> Iterator[NDArray[np.uint8]]:
    """Masks [1, neurons] without end, each with the same number of ones."""
    count = max(1, round(neurons * (1 - sparsity)))
    while True:
        order = rng.permutation(neurons)
        for start in range(0, neurons - count + 1, count):
            mask = np.zeros((1, neurons), np.uint8)
            mask[0, order[start : start + count]] = 1
            yield mask


def measure(library: HostLibrary, cases: Mapping[str, Case], options: argparse.Namespace) -> list[Row]:
    """Rows of one format and shape: dense, and masked by sparsity."""
    dense, masked = (bound(library, cases[kind]) for kind in ("dense", "masked"))
    mask = masked.shared["mask"]
    neurons = mask.shape[1]
    turns = {sparsity: masks(neurons, sparsity, np.random.default_rng(1)) for sparsity in SPARSITIES}
    times: dict[float | None, list[float]] = {sparsity: [] for sparsity in (None, *SPARSITIES)}
    for _ in range(options.rounds):
        times[None] += dense.seconds(options.threads).tolist()
        for sparsity in SPARSITIES:
            # As many calls of each: sparse ones are short.
            mask[:] = next(turns[sparsity])
            times[sparsity] += masked.seconds(options.threads).tolist()
    of_dense = statistics.median(times[None])
    return [
        {"sparsity": sparsity, "seconds": statistics.median(times[sparsity]), "dense_seconds": of_dense}
        | {"of_dense": statistics.median(times[sparsity]) / of_dense}
        for sparsity in SPARSITIES
    ]


def table(rows: Sequence[Row]) -> str:
    """Time relative to dense: a row for each sparsity, a column for each kernel."""
    labels = list(dict.fromkeys(row["label"] for row in rows))
    found = {(row["label"], row["sparsity"]): row for row in rows}
    lines = [["dense", *(f"{found[label, 0.0]['dense_seconds'] * 1e3:.2f} ms" for label in labels)]]
    for sparsity in SPARSITIES:
        lines.append([f"{sparsity:.0%}", *(f"{found[label, sparsity]['of_dense']:.1%}" for label in labels)])
    return markdown(["sparsity", *labels], lines)


def plot(rows: Sequence[Row], file: Path) -> None:
    """Time relative to dense over sparsity."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.8, 4.6), layout="constrained")
    styles = (("o-", "#1f6fb4"), ("s--", "#1f6fb4"), ("o-", "#c4541c"), ("s--", "#c4541c"))
    labels = dict.fromkeys(row["label"] for row in rows)
    for label, (style, color) in zip(labels, styles * len(labels), strict=False):
        points = [(100 * row["sparsity"], row["of_dense"]) for row in rows if row["label"] == label]
        axes.plot(*zip(*points, strict=True), style, color=color, label=label, markersize=4)
    axes.plot([0, 100], [1, 0], ":", color="#777777", label="bytes that are read")
    axes.axhline(1, color="#333333", linewidth=0.8)
    axes.axvline(100 * _GENERAL_KERNELS, color="#3a8a4d", linewidth=0.8)
    note = "general sparse kernels\nare faster from here on\n(PowerInfer paper)"
    axes.annotate(note, (100 * _GENERAL_KERNELS, 1.0), xytext=(-4, -4), textcoords="offset points",
                  ha="right", va="top", fontsize=8, color="#3a8a4d")  # fmt: skip
    axes.set(xlabel="neurons that are not computed, %", ylabel="time relative to dense", xlim=(0, 100), ylim=(0, None))
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.legend(fontsize=8, frameon=False, loc="lower left")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argument_parser(__doc__, "--plot", "--json", threads=os.cpu_count(), rounds=40)
    parser.add_argument("--formats", nargs="+", default=["f16", "q4"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, type=_shape, metavar="DIMxNEURONS")
    parser.add_argument("--isa", choices=ISAS, default=best_isa(), help="instruction set; default: the best here")
    options = parser.parse_args()
    isa = ISAS[options.isa]
    with targeting(isa), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "host.so"
        cases = {
            (format, shape): {kind: feed_forward(kind, format, *shape) for kind in ("dense", "masked")}
            for format in options.formats
            for shape in options.shapes
        }
        build_host_library([case.kernel for pair in cases.values() for case in pair.values()], path, isa)
        library = HostLibrary(path)
        reader, speeds, rows = MemoryReader(library, options.threads), [], []
        for (format, (dim, neurons)), pair in cases.items():
            label = f"{format}, {dim} × {neurons}"
            speeds.append(float(np.median(reader.read())))
            rows += [{"label": label} | row for row in measure(library, pair, options)]
    result = {"threads": options.threads, "isa": isa.name, "bandwidth_bytes_per_s": speeds, "rows": rows}
    write_json(options.json, result)
    if options.plot:
        plot(rows, options.plot)
    print(table(rows))
    slowest, fastest = min(speeds) / 1e9, max(speeds) / 1e9
    print(f"\n{options.threads} threads, {isa.name}; reading memory: {slowest:.1f} to {fastest:.1f} GB/s")


def _shape(text: str) -> tuple[int, int]:
    dim, neurons = text.split("x")
    return int(dim), int(neurons)


if __name__ == "__main__":
    main()
