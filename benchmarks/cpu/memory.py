"""Time and peak memory of compiling, profiling, training and rounding.

    python -m benchmarks.cpu.memory compile MODEL --quant q4 [--limit-gb 6]
    python -m benchmarks.cpu.memory profile [--tokens 65536] [--train "--rank 832"]
    python -m benchmarks.cpu.memory rounding [--tokens 65536]

`compile` compiles a model, inside a limit of all mapped memory if there is one. The others make a checkpoint of a 7B
shape with `--layers` layers, and profile it, and train predictors for it with the options that `--train` gives, or
compile it with calibrated rounding. A layer's time is that between the files of two; the estimate for the whole model
is its layers times that, plus the rest. Memory does not depend on the number of layers.

A layer takes two cores about 3 minutes of the profile and 7 of rounding, and one core 18 of training; a checkpoint
takes 4 GB of disk. Results are JSON.
"""

import argparse
import itertools
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.cpu.commands import picompile
from benchmarks.script import argument_parser
from picompile.synth.shapes import SHAPES

_PICOMPILE = (sys.executable, "-m", "picompile")


def _memory(pid: int) -> Iterator[tuple[int, int]]:
    """Yield the anonymous and the resident bytes of a process and of each that it has started.

    From counters that the kernel keeps. `smaps_rollup` walks all pages: of a process of 3 GB that takes half of a core,
    and stops the process meanwhile.
    """
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                memory = each.memory_info()
                yield memory.rss - memory.shared, memory.rss


@dataclass(frozen=True)
class Watched:
    """The result of a process. Bytes are peaks; `anonymous_bytes` leaves out mapped files."""

    seconds: float
    anonymous_bytes: int
    resident_bytes: int
    returncode: int


def watch(command: list[str], limit_bytes: int | None = None) -> Watched:
    """Runs a command and samples the memory of all its processes together, up to 50 times a second.

    Pages that several of them share, such as libraries, are counted in each.

    `limit_bytes` is set on the process with RLIMIT_AS, which counts every mapped byte, files and libraries included.
    """
    prefix = ["prlimit", f"--as={limit_bytes}"] if limit_bytes else []
    start = time.monotonic()
    process = subprocess.Popen([*prefix, *command], stdout=subprocess.DEVNULL)
    peaks = np.zeros(2, np.int64)
    while process.poll() is None:
        np.maximum(peaks, np.sum([(0, 0), *_memory(process.pid)], axis=0), out=peaks)
        time.sleep(0.02)
    anonymous_bytes, resident_bytes = peaks.tolist()
    return Watched(time.monotonic() - start, anonymous_bytes, resident_bytes, process.wait())


def few_layers(shape: str, layers: int, work: Path) -> Path:
    """Return a checkpoint in `work` of the first `layers` layers of a shape, 10 % of whose neurons fire."""
    folder = work / f"{shape}-{layers}-layers"
    if not folder.exists():
        work.mkdir(parents=True, exist_ok=True)
        config = work / "config.json"
        config.write_text(json.dumps({**SHAPES[shape].config, "num_hidden_layers": layers}))
        picompile("synth", "--shape", config, "--active", 0.1, "-o", folder)
    return folder


def _peaks(result: Watched) -> dict[str, Any]:
    return {
        "seconds": round(result.seconds, 1),
        "peak_anonymous_bytes": result.anonymous_bytes,
        "peak_resident_bytes": result.resident_bytes,
    }


def _run(words: list[object], layer_files: Path) -> dict[str, Any]:
    """Run a command of picompile, which writes a file into `layer_files` for each layer."""
    result = watch([*_PICOMPILE, *map(str, words)])
    if result.returncode:
        sys.exit(f"picompile {' '.join(map(str, words))} ended with {result.returncode}")
    ended = sorted(path.stat().st_mtime for path in layer_files.iterdir())
    return _peaks(result) | {"between_files_seconds": [round(b - a, 1) for a, b in itertools.pairwise(ended)]}


def _estimated(options: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Add a layer's time, and the hours that the whole shape would take."""
    layers, between = SHAPES[options.shape].layers, found["between_files_seconds"]
    layer_s = sum(between) / len(between)
    hours = (found["seconds"] + (layers - options.layers) * layer_s) / 3600
    return found | {"layer_seconds": round(layer_s, 1), "layers": layers, "estimated_hours": round(hours, 2)}


def measure_compile(options: argparse.Namespace) -> dict[str, Any]:
    limit = int(options.limit_gb * 1e9) if options.limit_gb else None
    with tempfile.TemporaryDirectory(prefix="picompile-memory-", dir=options.model.resolve().parent) as folder:
        words = ["compile", options.model, "-o", f"{folder}/artifact", "--quant", options.quant]
        result = watch([*_PICOMPILE, *map(str, words)], limit)
    return _peaks(result) | {"returncode": result.returncode, "limit_bytes": limit}


def measure_profile(options: argparse.Namespace) -> dict[str, Any]:
    model, output = few_layers(options.shape, options.layers, options.work), options.work / "profile"
    predictors = options.work / "predictors"
    for folder in (output, predictors):
        shutil.rmtree(folder, ignore_errors=True)
    words = ["profile", model, "-o", output, "--tokens", options.tokens, "--samples", options.samples]
    found: dict[str, Any] = {"profile": _estimated(options, _run(words, output / "layers"))}
    if options.train is not None:
        words = [
            "train",
            model,
            "--profile",
            output,
            "-o",
            predictors,
            "--accuracy-bound",
            "off",
            *shlex.split(options.train),
        ]
        found["train"] = _estimated(options, _run(words, predictors / "work" / "layers"))
    return {"tokens": options.tokens, "samples": options.samples, **found}


def measure_rounding(options: argparse.Namespace) -> dict[str, Any]:
    model, work = few_layers(options.shape, options.layers, options.work), options.work / "whole"
    shutil.rmtree(work, ignore_errors=True)
    words = ["compile", model, "-o", options.work / "artifact", "--overwrite", "--quant", options.quant, "--work", work]
    words += ["--rounding", "calibrated", "--rounding-tokens", options.tokens]
    found = _run(words, work / "rounding" / "layers")
    return {"tokens": options.tokens, "quant": options.quant, **found}


_MEASURES: Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "compile": measure_compile, "profile": measure_profile, "rounding": measure_rounding,
}  # fmt: skip


def main() -> None:
    parser = argument_parser(
        __doc__, shape="llama-7b", layers=2, tokens=65_536, samples=32_768, quant="q4", work=Path("build/memory")
    )
    parser.add_argument("what", choices=_MEASURES)
    parser.add_argument("model", type=Path, nargs="?", help="the model to compile (`compile` only)")
    parser.add_argument("--limit-gb", type=float, help="RLIMIT_AS of `compile`: all mapped memory, in GB")
    parser.add_argument("--train", metavar="OPTIONS", help="of `profile`: train as well; --accuracy-bound off is given")
    options = parser.parse_args()
    if (options.what == "compile") != (options.model is not None):
        parser.error("`compile` takes a model, and the others take none")
    found = _MEASURES[options.what](options)
    print(json.dumps(found, indent=1))
    sys.exit(found.get("returncode", 0))


if __name__ == "__main__":
    main()
