"""Rehearses both commands of benchmarks.gpu with a pack, without a GPU: on the stand-in, kernels in emulation.

    python tests/gpu_rehearsal.py build/gpu [--scale 5]

The small kernels, the model checks, the bundled model and llama.cpp are the pack's. What would take hours has the sizes
of toys, under the names that the schedule asks for: the kernels whose speed is measured, and the large model. Times
mean nothing, and parts have `--scale` times as long as on a GPU. It ends with 1 if anything is wrong, if a part had to
be ended, or if llama.cpp does not run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import environment
from benchmarks.gpu.cases import Case, pack_kernels, speed_cases
from benchmarks.gpu.sources import tracked_bytes
from benchmarks.gpu.units import LATE, NOT_DONE
from helpers.fake_cuda.fixtures import compile_driver
from helpers.gpu_packs import emulated_kernels, stand_in, tiny_models

# The largest that a toy has of each size. Rows of chunks keep their tiles.
_MOST = {
    "n": 96, "k": 64, "neurons": 96, "mask_columns": 96, "count": 96, "dim": 64, "rank": 32, "vocab": 2100,
    "context": 70, "rows": 20, "columns": 40, "size": 10_048, "row_bytes": 32,
}  # fmt: skip
# What a rehearsal cannot have: a GPU of PyTorch's to copy to, and of llama.cpp's.
_EXPECTED = ("PyTorch sees no GPU", "llama.cpp found no GPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path, help="what benchmarks.gpu.pack wrote")
    parser.add_argument("--scale", type=float, default=5.0, help="how many times as long parts may take")
    options = parser.parse_args()
    pack = options.pack.resolve()
    index = json.loads((pack / "pack.json").read_text())
    size = sum(path.stat().st_size for path in pack.rglob("*") if path.is_file())
    print(
        f"{options.pack}, of commit {index['commit']}: {size / 2**20:.1f} MiB, {tracked_bytes() / 2**20:.1f} beside it"
    )
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        begin = time.monotonic()
        toy = _toy_pack(pack, index, folder / "pack")
        compile_driver(folder / "cuda")
        print(f"toys and emulated kernels: {time.monotonic() - begin:.0f} s", flush=True)
        wrong = [problem for verb in ("first", "second") for problem in _command(verb, toy, folder, options.scale)]
    print("\n".join(wrong) or "both commands ran, and all that they found is right")
    sys.exit(bool(wrong))


def _toy_pack(pack: Path, index: Mapping[str, Any], folder: Path) -> Path:
    folder.mkdir()
    kept = {"small.zip", index["host"], *(each["file"] for each in (*index["checks"], *index["bundled"]))}
    for name in (*kept, *filter(None, [index["llama"]])):
        (folder / name).symlink_to(pack / name)
    toys = [_toy(case) for case in speed_cases()]
    groups = [group for group in index["kernels"] if group["folder"] == "small"]
    groups.append({"folder": "speed", "cases": pack_kernels(toys, folder / "speed.zip", index["sm"])})
    models = list(tiny_models(folder, "q4", ("hybrid", "layers_dense")).values())
    (folder / "pack.json").write_text(json.dumps({**index, "kernels": groups, "models": models}))
    emulated_kernels(folder)
    return folder


def _toy(case: Case) -> Case:
    """Return the same kernel with small sizes."""
    parameters = {
        name: min(value, _MOST[name]) if name in _MOST and isinstance(value, int) else value
        for name, value in case.parameters.items()
    }
    if "head_dim" in parameters:
        parameters |= {"heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 16}
    return Case(case.label, case.op, parameters, case.speed, case.shares[:2], case.streamed)


def _command(verb: str, pack: Path, folder: Path, scale: float) -> Iterator[str]:
    """Run one command, and yield what is wrong with it."""
    results, begin = folder / "results", time.monotonic()
    where = ["--results", str(results), "--work", str(folder / "work"), "--scale", str(scale)]
    where += ["--device-library", str(folder / "cuda" / "libcuda.so.1")]
    asked = ["--asked", str(time.time())] if verb == "first" else []
    command = [sys.executable, "-m", "benchmarks.gpu", verb, str(pack), *where, *asked]
    done = subprocess.run(command, env=environment(**stand_in(pack)), check=False)
    print(f"{verb}: {time.monotonic() - begin:.0f} s", flush=True)
    if done.returncode:
        yield f"{verb}: ended with {done.returncode}"
    found = json.loads((results / f"{verb}.json").read_text())
    for row in (row for name in ("kernels", "checks", "models", "failed") for row in found[name]):
        reason = row.get("reason", "")
        if row["is_right"] is False or (reason and not any(text in reason for text in _EXPECTED)):
            note = " (a part was too short; try a larger --scale)" if reason in (LATE, NOT_DONE) else ""
            yield f"{verb}: {row.get('label', row.get('variant'))}: {reason or 'wrong'}{note}"
    names = sorted(path.name for path in results.iterdir())
    print(f"{results.name}: {', '.join(names)}; {len(names)} files of 8")
    if len(names) > 8:
        yield f"{verb}: {len(names)} files of results are more than come back"


if __name__ == "__main__":
    main()
