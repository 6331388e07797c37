"""Counts what a prompt takes on a GPU: bytes over the bus, launches, instructions. It needs no GPU, and no weights.

    python -m benchmarks.gpu.prompt_counts [--shape llama-70b] [--target 4090] [--firing 5%] [--quant q4]

The model is split as `picompile plan` splits it, and lowered as `picompile compile` lowers it. Counted are

- the bytes that the copies of one chunk bring over the bus, beside those of all weights that are with the host;
- launches of a step and of a chunk, divided by the layers;
- of each kernel of a chunk that multiplies on tensor cores, the instructions of its loop. A multiprocessor has four
  schedulers; each issues one instruction of a warp in a cycle, and its tensor core takes the multiplication of 16
  tokens by 8 outputs by 16 columns for --cycles cycles: 32 on consumer GPUs since Ampere, with float32 sums, by 165.2
  TFLOP/s of an RTX 4090 with 128 multiprocessors at 2.52 GHz. So a loop is within that limit where all of its
  instructions together are fewer than its multiplications times so many cycles.

Times are predicted from these by `picompile.placement.prompts`, none is measured.
"""

import json
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

from benchmarks.gpu.models import ModelOptions, model_graph, model_split
from benchmarks.gpu.sass import disassemble, loops_with
from benchmarks.gpu.split import Planned
from benchmarks.script import argument_parser
from picompile.artifact.code import Code, build_code
from picompile.machine import TARGETS, native_target
from picompile.progress import NoProgress
from picompile.synth.shapes import find_shape
from picompile_codegen.build.isa import ISAS
from picompile_codegen.cuda.build import build_cuda
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import Lowered, lower

CHUNK, CONTEXT, RANK = 512, 4096, 1024
MULTIPLICATION = "HMMA"


def lowered_model(
    shape_name: str, quant: str, planned: Planned, sm: int, draws: int = 0, sequences: int = 1
) -> tuple[Lowered, int]:
    """The program of a shape that is split for a machine, and how many layers it has.

    Without `draws` layers have the plan's neurons, else one of so many random numbers around their mean, in turns.
    """
    shape = find_shape(shape_name)
    options = ModelOptions(quant, 1.0, RANK, CONTEXT, sm, (), planned)
    split = model_split(shape, options, f"hybrid_{planned.target}")
    if draws:
        drawn = Random(0)
        factors = [drawn.uniform(0.6, 1.3) for _ in range(draws)]
        counts = [max(64, min(shape.ffn - 64, round(split.hot_mean * each) // 64 * 64)) for each in factors]
        split = replace(split, hot={layer: counts[layer % draws] for layer in split.hot})
    graph = model_graph(shape, options, split, dense=False)
    return lower(graph, LowerOptions(CONTEXT, CHUNK, "float16", sequences, "cuda", split.placement)), shape.layers


def launches(lowered: Lowered, function: str) -> int:
    """Launches on the device of one call of a function; copies are none."""
    grids = {kernel.name: len(kernel.grids) for kernel in lowered.accelerator_built.values()}
    return sum(grids[call.kernel] for call in lowered.program.functions[function] if call.device == "accelerator")


def copied_bytes(lowered: Lowered, function: str) -> int:
    """Bytes that the copies of one call of a function bring over the bus."""
    calls = [call for call in lowered.program.functions[function] if call.op == "upload"]
    return sum(call.args[-1].shape[0] for call in calls if call.args[-1].shape is not None)


def host_weight_bytes(lowered: Lowered) -> int:
    """Bytes of the weights that stay with the host and that the device needs."""
    tensors = lowered.weights.tensors
    return sum(tensors[name].shape[0] * tensors[name].shape[1] for name in lowered.program.streamed)


def main() -> None:
    parser = argument_parser(__doc__, cycles=32, sequences=1)
    parser.add_argument("--shape", default="llama-70b")
    parser.add_argument(
        "--target", default="4090", choices=sorted(name for name in TARGETS if TARGETS[name].vram_bytes)
    )
    parser.add_argument("--firing", default="5%")
    parser.add_argument("--quant", default="q4")
    parser.add_argument("--draws", type=int, default=0, help="random numbers of hot neurons, 0 for the plan's")
    options = parser.parse_args()
    sm = TARGETS[options.target].sm
    assert sm is not None
    started = time.monotonic()
    planned = Planned(options.target, options.firing)
    lowered, layers = lowered_model(options.shape, options.quant, planned, sm, options.draws, options.sequences)
    lowered_s = time.monotonic() - started
    of_host, copied = host_weight_bytes(lowered), copied_bytes(lowered, "prefill_last")
    print(f"{options.shape}, {options.quant}, {options.target}, {options.firing} firing")
    times = copied / max(of_host, 1)
    print(
        f"weights of the host {of_host / 1e9:.2f} GB; a prompt of {CHUNK} copies {copied / 1e9:.2f} GB ({times:.3f} x)"
    )
    for function in ("decode", "prefill_last"):
        count = launches(lowered, function)
        print(f"{function}: {count} launches on the GPU, {count / layers:.1f} a layer")
    kernels = list(lowered.accelerator_built.values())
    kinds = Counter(kernel.name.partition("_")[0] for kernel in kernels)
    print(f"{len(kernels)} kernels for the GPU: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        build_cuda(kernels, Path(folder), sm)
        built_s, size = time.monotonic() - started, Path(folder, "device.cubin").stat().st_size
        print(f"captured and lowered in {lowered_s:.0f} s; CUDA code made in {built_s:.0f} s, {size / 2**20:.1f} MiB")
        native, started = native_target(), time.monotonic()
        build_code([Code(ISAS[native.isas[0]], "host.so")], lowered, Path(folder), NoProgress())
        size = Path(folder, "host.so").stat().st_size
        print(
            f"{len(lowered.built)} kernels for the host in {time.monotonic() - started:.0f} s, {size / 2**20:.2f} MiB"
        )
        described = json.loads(Path(folder, "device.json").read_text())["kernels"]
        functions = disassemble(Path(folder, "device.cubin"))
    print("| kernel | registers | instructions | multiplications | of the limit |\n| --- | --- | --- | --- | --- |")
    shown = set()
    for each in described.values():
        for launch in each:
            for operations in loops_with(functions[launch["symbol"]], MULTIPLICATION):
                total, products = sum(operations.values()), operations[MULTIPLICATION]
                row = (launch["registers"], total, products, total / (products * options.cycles))
                if row not in shown:
                    shown.add(row)
                    print(f"| {launch['symbol']} | {row[0]} | {total} | {products} | {row[3]:.0%} |")


if __name__ == "__main__":
    main()
