"""Time and peak memory of `profile` and `train` on a model of a 7B shape, measured on a few of its layers.

    python -m benchmarks.cpu.profile_memory --work build/profile-memory [--train "--rank 832"]

Makes a checkpoint of the shape with `--layers` layers, profiles it, trains predictors for it with the options that
`--train` gives, and prints JSON. A layer's time is that between the files of two; the estimate for the whole model is
its layers times that, plus the rest. Memory does not depend on the number of layers. Takes 4 GB of disk, and
about 3 minutes of two cores for each layer of the profile and 18 of one core for each that is trained.
"""

import argparse
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import few_layers, watch
from benchmarks.script import argument_parser
from picompile.synth.shapes import SHAPES


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, tokens=65_536, samples=32_768, work=Path("build/profile-memory"))
    parser.add_argument("--shape", default="llama-7b")
    parser.add_argument("--layers", type=int, default=2, help="at least 2")
    parser.add_argument("--train", metavar="OPTIONS", help="train as well; --accuracy-bound off is given")
    return parser.parse_args()


def main() -> None:
    options = _arguments()
    model, output = few_layers(options.shape, options.layers, options.work), options.work / "profile"
    size = ["--tokens", str(options.tokens), "--samples", str(options.samples)]
    found = {"tokens": options.tokens, "samples": options.samples}
    found["profile"] = _run(options, ["profile", str(model), "-o", str(output), *size], output, output / "layers")
    if options.train is not None:
        folder = options.work / "predictors"
        words = ["train", str(model), "--profile", str(output), "-o", str(folder), "--accuracy-bound", "off"]
        found["train"] = _run(options, [*words, *shlex.split(options.train)], folder, folder / "work" / "layers")
    print(json.dumps(found, indent=1))


def _run(options: argparse.Namespace, words: list[str], output: Path, layer_files: Path) -> dict[str, Any]:
    """Runs a command of picompile, which writes a file into `layer_files` for each layer."""
    shutil.rmtree(output, ignore_errors=True)
    result = watch([sys.executable, "-m", "picompile", *words])
    if result.returncode:
        sys.exit(f"picompile {' '.join(words)} ended with {result.returncode}")
    ended = sorted(path.stat().st_mtime for path in layer_files.iterdir())
    layer_s = (ended[-1] - ended[0]) / (len(ended) - 1)
    layers = SHAPES[options.shape].layers
    return {
        "peak_anonymous_bytes": result.anonymous_bytes,
        "peak_resident_bytes": result.resident_bytes,
        "seconds": round(result.seconds, 1),
        "layer_seconds": round(layer_s, 1),
        "layers": layers,
        "estimated_hours": round((result.seconds + (layers - options.layers) * layer_s) / 3600, 2),
    }


if __name__ == "__main__":
    main()
