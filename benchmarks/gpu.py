"""Checks and measures what `gpu_pack.py` packed, on a machine with a GPU, PyTorch, numpy and tokenizers.

    python benchmarks/gpu.py build/gpu [--only checks kernels models ablation] [--models SHAPE:QUANT ...] [--json FILE]

Before all: the machine, and whether host and GPU see what the other writes, 10,000 times in turn. Where they do not,
only kernels that need no host are checked.

1. `checks`: every kernel of the pack against eager PyTorch in float64, within 1e-3 of the largest value: random inputs,
   poisoned outputs, guards around all small arguments. So is a small model, split over both devices and all on the
   GPU, and the tokens that it chooses; and the bundled model against the tokens that a CPU has chosen.
2. `kernels`: the time of each kernel whose speed matters, as a share of the bandwidth of copies within the GPU's memory
   (read and written bytes), measured in the same run; weights take turns so that they come from memory. Kernels that
   read prompts also with weights in memory of the host. And cuBLAS.
3. `models`: decode and prompt speed with a budget of GPU memory, of the hybrid engine, of dense layer offloading (the
   layers that do not fit computed on the CPU by the same kernels, and copied to the GPU by PyTorch: it is held against
   the faster one), and of a smaller model all on the CPU and all on the GPU. Weights are made here from a seed: see
   `_gpu_weights.py`.
4. `ablation`: dense layer offloading; with predictors and sparse operators; with the hybrid engine, which neurons are
   hot being chosen blindly; with the ones chosen that fire most often.

The first alone is short enough for compute-sanitizer:

    compute-sanitizer --target-processes all --error-exitcode 1 python benchmarks/gpu.py build/gpu --only checks

Kernels that are wrong are run under it once more anyway, where it is installed, and what it says is in the results.

After `--seconds` no more is begun, and what runs is ended. The tables come last, also then, and also at SIGTERM; and of
them the bars. `--tables A.json B.json` shows those of several runs as one. The exit code is 1 where anything is wrong;
a missed bar is no error.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_BEGIN_S = time.monotonic()
_ROOT = Path(__file__).resolve().parents[1]
for _name in ("runtime", "passes"):
    sys.path.append(str(_ROOT / _name))

from _gpu_order import PARTS, default_threads, first_units, memory_unit, model_units, most_bytes  # noqa: E402
from _gpu_report import empty_results, line, merged, text_of  # noqa: E402
from _gpu_sanitizer import sanitize  # noqa: E402
from _gpu_units import BLOCKED, Unit, run  # noqa: E402

SCHEMA = 3
_NOT_DONE = "was not come to"
_FOLDER = "picompile-gpu"
# Bytes that checks and their code take of a folder.
_LEAST_BYTES = 2**28

Result = dict[str, Any]


def main() -> None:
    options = _arguments()
    if options.tables:
        results = merged([json.loads(path.read_text()) for path in options.tables])
        print(text_of(results))
    else:
        results = empty_results(SCHEMA, bool(options.device_library))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        _run(options, results)
    if any(row["is_right"] is False for name in ("kernels", "checks", "models", "failed") for row in results[name]):
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path, nargs="?", default=Path("build/gpu"), help="what gpu_pack.py wrote")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", metavar="SHAPE:QUANT", help="of those in the pack; all without it")
    parser.add_argument("--case", metavar="LABEL", help="check this kernel alone")
    parser.add_argument("--seconds", type=float, default=540, help="for all; what is left is reported as not measured")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one variant of a model")
    parser.add_argument("--active", type=float, default=0.05, help="share of the neurons that are computed for a token")
    parser.add_argument("--threads", type=int, nargs="+", help="of the CPU, in turn; 8 and 16 without it")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512, 1536], help="tokens of the prompts")
    parser.add_argument("--depth", type=int, default=512, help="tokens in the cache where decoding is measured")
    parser.add_argument("--tokens", type=int, default=32, help="decoded tokens of a round")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of a model, beside the first one")
    parser.add_argument("--work", type=Path, help="where weights are made; memory, if it has room, without it")
    parser.add_argument("--json", type=Path, help="where the results go as well")
    parser.add_argument("--tables", type=Path, nargs="+", metavar="FILE", help="run nothing; results of earlier runs")
    parser.add_argument("--device-library", help="a stand-in for libcuda.so.1; times mean nothing then")
    return parser.parse_args()


def _run(options: argparse.Namespace, results: Result) -> None:
    """Fills `results`, and prints them however it ends."""
    pack = json.loads((options.pack / "pack.json").read_text())
    if pack["schema"] != SCHEMA:
        sys.exit(f"{options.pack}: is of schema {pack['schema']}, and this script knows {SCHEMA}; pack it again")
    options.threads, given = options.threads or default_threads(), options.work
    options.work = _work(given, 0)
    # Stamps say that weights, which are not hashed, are whole: where they can be written, and gone with the run.
    cache = options.work.with_name(f"{_FOLDER}.cache")
    os.environ["XDG_CACHE_HOME"] = str(cache)
    first, models = first_units(options, pack), [] if options.case else model_units(options, pack)
    left = [*first, *(unit for group in models for unit in group)]
    try:
        _do(first, options, results, left)
        if results["machine"] is None:
            return
        _save(options.json, results)
        sanitize(results["kernels"], options, _BEGIN_S + options.seconds)
        _save(options.json, results)
        if (memory := memory_unit(models)) is not None:
            _do([memory], options, results, left)
            # Only now: memory that was used once is there.
            options.work = _work(given, most_bytes(models))
        for group in models:
            _do(group, options, results, left)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for unit in left:
            _add(results, unit, unit.row(None, _NOT_DONE))
        print(text_of(results), flush=True)
        _save(options.json, results)
        for folder in (options.work, cache):
            shutil.rmtree(folder, ignore_errors=True)
        if results["machine"] is None:
            _say("nothing was measured: there is no GPU that can be used")
        elif _is_blocked(results):
            _say(f"{BLOCKED}; nothing of the hybrid engine can work, and none of it was measured")
    if results["machine"] is None:
        sys.exit(1)


def _do(units: list[Unit], options: argparse.Namespace, results: Result, left: list[Unit]) -> None:
    """Does units by one process, if none fails; removes them from `left`."""
    if _is_blocked(results):
        blocked = [unit for unit in units if unit.needs_exchange]
        for unit in blocked:
            _add(results, unit, unit.row(None, BLOCKED))
            left.remove(unit)
        units = [unit for unit in units if not unit.needs_exchange]
    for unit, row in run(units, options, _BEGIN_S + options.seconds):
        if row is not None:
            _add(results, unit, row)
            _save(options.json, results)
        elif unit in left:
            left.remove(unit)
        if row is None and results["machine"] is None:
            return


def _is_blocked(results: Result) -> bool:
    return any(row["label"] == "ping_pong" and row["is_right"] is False for row in results["failed"])


def _work(given: Path | None, needed: int) -> Path:
    """A folder, not there yet, for the largest of the models: in memory if there is room."""
    places = [given] if given else [Path("/dev/shm"), Path(tempfile.gettempdir())]
    place = next((each for each in places if _has_room(each, needed)), places[-1])
    place.mkdir(parents=True, exist_ok=True)
    # Always the same one: what a run that was killed has left is found by the next.
    work = place / _FOLDER
    shutil.rmtree(work, ignore_errors=True)
    if needed:
        _say(f"weights are made in {work}: {needed / 1e9:.1f} GB of {shutil.disk_usage(place).free / 1e9:.1f}")
    return work


def _has_room(place: Path, needed: int) -> bool:
    """Whether so many bytes are free in a folder, and code that lies there may run."""
    if not place.is_dir() or os.statvfs(place).f_flag & os.ST_NOEXEC:
        return False
    return shutil.disk_usage(place).free > max(needed, _LEAST_BYTES)


def _add(results: Result, unit: Unit, row: Result) -> None:
    if "traceback" in row:
        _say(row["traceback"])
    if unit.table == "facts" and "reason" not in row:
        results.update(row)
        _say(str(row))
        return
    row = {"label": unit.kind, **row} if unit.table == "facts" else row
    results["failed" if unit.table == "facts" else unit.table].append(row)
    _say(line(row, results))


def _save(path: Path | None, results: Result) -> None:
    """Again and again, whole each time, so that what is killed has left what it knew."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(results, indent=1) + "\n")
        os.replace(new, path)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
