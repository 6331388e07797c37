"""Seconds from a config.json to a quantized graph, with every stage verified and no weight read, by number of layers.

python -m benchmarks.cpu.passes --shape reglu-1.3b --layers 12,24,48,96 [--repetitions 3] [--by-pass]

Every time is that of a process of its own: capture, passes (verifiers included), and the whole process, in which Python
imports torch and transformers. Every block is split into a hot and a cold part, every second neuron of it hot.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

from benchmarks.script import argument_parser, heading, row


def measure(shape: str, layers: int) -> dict[str, object]:
    """One run in this process."""
    start = time.perf_counter()
    from picompile.compile.passes import pipeline_passes
    from picompile.config import CompileOptions
    from picompile.frontend.hf import capture_config
    from picompile.synth.shapes import find_shape
    from picompile_passes.base import Pass
    from picompile_passes.pipeline import Pipeline, Timings, each, verifying

    config = {**find_shape(shape).config, "num_hidden_layers": layers}
    neurons = find_shape(shape).ffn
    imported = time.perf_counter()
    graph_module = capture_config(config)
    captured = time.perf_counter()
    hot = {layer: range(0, neurons, 2) for layer in range(layers)}
    passes: tuple[Pass, ...] = tuple(pipeline_passes(CompileOptions(hot=hot)))
    timings = Timings()
    quantized = Pipeline(passes, hook=each(verifying, timings))(graph_module).graph_module
    done = time.perf_counter()
    return {
        "import_s": imported - start,
        "capture_s": captured - imported,
        "passes_s": done - captured,
        "captured_nodes": len(graph_module.graph.nodes),
        "quantized_nodes": len(quantized.graph.nodes),
        "by_pass": dict(timings.seconds),
    }


def run(shape: str, layers: int) -> dict[str, object]:
    """One run in a process of its own, whose time is `process_s`."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.cpu.passes", "--shape", shape, "--layers", str(layers), "--one"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {**json.loads(done.stdout), "process_s": time.perf_counter() - start}


def main() -> None:
    parser = argument_parser(__doc__, repetitions=3)
    parser.add_argument("--shape", default="reglu-1.3b")
    parser.add_argument("--layers", default="12,24,48,96", help="numbers of layers")
    parser.add_argument("--by-pass", action="store_true", help="also the time of each pass, without its verification")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    counts = [int(text) for text in options.layers.split(",")]
    if options.one:
        print(json.dumps(measure(options.shape, counts[0])))
        return
    columns = (
        "layers",
        "nodes captured",
        "nodes quantized",
        "capture s",
        "passes s",
        "process s",
        "process ms a layer",
    )
    print(heading(*columns))
    for layers in counts:
        runs = [run(options.shape, layers) for _ in range(options.repetitions)]
        median = {key: statistics.median(float(str(r[key])) for r in runs) for key in runs[0] if key.endswith("_s")}
        nodes = (runs[0]["captured_nodes"], runs[0]["quantized_nodes"])
        seconds = (f"{median[key]:.1f}" for key in ("capture_s", "passes_s", "process_s"))
        print(row(layers, *nodes, *seconds, f"{1e3 * median['process_s'] / layers:.0f}"))
        if options.by_pass:
            print({name: round(float(s), 2) for name, s in dict(runs[0]["by_pass"]).items()}, file=sys.stderr)  # type: ignore[call-overload]


if __name__ == "__main__":
    main()
