"""Time and peak memory of calibrated rounding on a model of a 7B shape, measured on a few of its layers.

    python -m benchmarks.cpu.rounding_memory --work build/rounding-memory [--tokens 65536] [--kill]

Makes a checkpoint of the shape with `--layers` layers, compiles it with calibrated rounding, and prints JSON. A layer's
time is that between the files of two; memory does not depend on the number of layers. With `--kill` the command is
killed behind the first layer and run again, and what it ends with is compared with what the whole run gave. Takes 5 GB
of disk, and about 7 minutes of two cores a layer with 65,536 tokens.
"""

import argparse
import hashlib
import itertools
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import few_layers, watch
from benchmarks.script import argument_parser


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, tokens=65_536, work=Path("build/rounding-memory"))
    parser.add_argument("--shape", default="llama-7b")
    parser.add_argument("--layers", type=int, default=2, help="at least 2")
    parser.add_argument("--quant", default="q4")
    parser.add_argument("--kill", action="store_true", help="kill a second run, and go on")
    return parser.parse_args()


def _command(options: argparse.Namespace, model: Path, work: Path) -> list[str]:
    words = ["compile", model, "-o", options.work / "artifact", "--overwrite", "--quant", options.quant, "--work", work]
    words += ["--rounding", "calibrated", "--rounding-tokens", options.tokens]
    return [sys.executable, "-m", "picompile", *map(str, words)]


def _hashes(work: Path) -> dict[str, str]:
    files = sorted((work / "rounding" / "layers").iterdir())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main() -> None:
    options = _arguments()
    model, work = few_layers(options.shape, options.layers, options.work), options.work / "whole"
    shutil.rmtree(work, ignore_errors=True)
    result = watch(_command(options, model, work))
    if result.returncode:
        sys.exit(f"picompile ended with {result.returncode}")
    ended = sorted(path.stat().st_mtime for path in (work / "rounding" / "layers").iterdir())
    found: dict[str, Any] = {
        "tokens": options.tokens,
        "quant": options.quant,
        "peak_anonymous_bytes": result.anonymous_bytes,
        "peak_resident_bytes": result.resident_bytes,
        "seconds": round(result.seconds, 1),
        "between_files_seconds": [round(b - a, 1) for a, b in itertools.pairwise(ended)],
    }
    if options.kill:
        found["same_bytes_after_kill"] = _killed(options, model) == _hashes(work)
    print(json.dumps(found, indent=1))


def _killed(options: argparse.Namespace, model: Path) -> dict[str, str]:
    """Kill a run behind its first layer, run it again, and return the hashes of its files."""
    work = options.work / "killed"
    shutil.rmtree(work, ignore_errors=True)
    command = _command(options, model, work)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        # The state behind a layer is written after the layer's file.
        while process.poll() is None and not (work / "rounding" / "state.safetensors").exists():
            time.sleep(0.2)
        time.sleep(5)
        process.send_signal(signal.SIGKILL)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return _hashes(work)


if __name__ == "__main__":
    main()
