"""Time and peak memory of profiling a model of a 7B shape, measured on a few of its layers.

    python benchmarks/profile_memory.py --work build/profile-memory

Makes a checkpoint of the shape with `--layers` layers, profiles it, and prints JSON. A layer's time is that between the
files of two; the estimate for the whole model is its layers times that, plus the rest. Memory does not depend on the
number of layers. Takes 4 GB of disk, and about 10 minutes of two cores for each layer.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

from _tools import picompile, watch

from picompile.synth import SHAPES


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-7b")
    parser.add_argument("--layers", type=int, default=2, help="at least 2")
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--samples", type=int, default=32_768)
    parser.add_argument("--work", type=Path, default=Path("build/profile-memory"))
    return parser.parse_args()


def _checkpoint(options: argparse.Namespace) -> Path:
    folder: Path = options.work / f"{options.shape}-{options.layers}-layers"
    if not folder.exists():
        options.work.mkdir(parents=True, exist_ok=True)
        config = options.work / "config.json"
        config.write_text(json.dumps({**SHAPES[options.shape].config, "num_hidden_layers": options.layers}))
        picompile("synth", "--shape", config, "--active", 0.1, "-o", folder)
    return folder


def main() -> None:
    options = _arguments()
    model, output = _checkpoint(options), options.work / "profile"
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "picompile", "profile", str(model), "-o", str(output)]
    result = watch([*command, "--tokens", str(options.tokens), "--samples", str(options.samples)])
    if result.returncode:
        sys.exit(result.returncode)
    ended = [path.stat().st_mtime for path in sorted((output / "layers").iterdir())]
    layer_s = (ended[-1] - ended[0]) / (len(ended) - 1)
    layers = SHAPES[options.shape].layers
    print(
        json.dumps(
            {
                "tokens": options.tokens,
                "samples": options.samples,
                "peak_anonymous_bytes": result.anonymous_bytes,
                "peak_resident_bytes": result.resident_bytes,
                "seconds": round(result.seconds, 1),
                "layer_seconds": round(layer_s, 1),
                "layers": layers,
                "estimated_hours": round((result.seconds + (layers - options.layers) * layer_s) / 3600, 2),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
