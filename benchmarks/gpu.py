"""Checks and measures what `gpu_pack.py` packed, on a machine with a GPU, PyTorch, numpy and tokenizers.

    python benchmarks/gpu.py build/gpu [--only checks kernels models ablation] [--models SHAPE:QUANT ...] [--json FILE]

1. `checks`: every kernel of the pack against eager PyTorch in float64, within 1e-3 of the largest value: random inputs,
   poisoned outputs, guards around all small arguments. So is a small model, split over both devices and all on the
   GPU, and the tokens that it chooses.
2. `kernels`: the time of each kernel whose speed matters, as a share of the bandwidth of copies within the GPU's memory
   (read and written bytes), measured in the same run; weights take turns so that they come from memory. And cuBLAS.
3. `models`: decode speed with a budget of GPU memory, of the hybrid engine, of dense layer offloading (the layers that
   do not fit computed on the CPU by the same kernels, and copied to the GPU by PyTorch: it is held against the faster
   one), and of a smaller model all on the CPU and all on the GPU. Weights are made here from a seed: see
   `_gpu_weights.py`.
4. `ablation`: dense layer offloading; with predictors and sparse operators; with the hybrid engine, which neurons are
   hot being chosen blindly; with the ones chosen that fire most often.

The first alone is short enough for compute-sanitizer:

    compute-sanitizer --target-processes all --error-exitcode 1 python benchmarks/gpu.py build/gpu --only checks

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before PyTorch is imported, which takes its time.
_BEGIN_S = time.monotonic()
_ROOT = Path(__file__).resolve().parents[1]
for _name in ("runtime", "passes"):
    sys.path.append(str(_ROOT / _name))

from _gpu_report import empty_results, line, merged, text_of  # noqa: E402
from _gpu_units import Unit, run  # noqa: E402

SCHEMA = 2
_PARTS = ("checks", "kernels", "models", "ablation")
# Variant, whether the neurons that fire most are the hot ones, and the parts that ask for it: what bars need is first.
_VARIANTS = (
    ("hybrid", True, ("models", "ablation")),
    ("layers_dense", True, ("models", "ablation")),
    ("copied", True, ("models", "ablation")),
    ("layers", True, ("ablation",)),
    ("hybrid", False, ("ablation",)),
    ("cpu", True, ("models",)),
    ("gpu", True, ("models",)),
)
_OF_MODEL = ("model", "quant", "budget", "dense_bytes", "hot", "resident_layers")

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
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--models", nargs="+", metavar="SHAPE:QUANT", help="of those in the pack; all without it")
    parser.add_argument("--seconds", type=float, default=540, help="for all; what is left is reported as not measured")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one variant of a model")
    parser.add_argument("--active", type=float, default=0.05, help="share of the neurons that are computed for a token")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="decoded tokens of a round")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of a model, beside the first one")
    parser.add_argument("--work", type=Path, help="where weights are made; memory, if it has room, without it")
    parser.add_argument("--json", type=Path, help="where the results go as well")
    parser.add_argument("--tables", type=Path, nargs="+", metavar="FILE", help="run nothing; results of earlier runs")
    parser.add_argument("--device-library", help="a stand-in for libcuda.so.1; nothing is timed then")
    return parser.parse_args()


def _run(options: argparse.Namespace, results: Result) -> None:
    """Fills `results`, and prints them however it ends."""
    pack = json.loads((options.pack / "pack.json").read_text())
    if pack["schema"] != SCHEMA:
        sys.exit(f"{options.pack}: is of schema {pack['schema']}, and this script knows {SCHEMA}; pack it again")
    if options.device_library:
        options.only = ["checks"]
    groups = list(_groups(options, pack))
    options.work = _work(options, groups)
    left = [unit for group in groups for unit in group]
    try:
        for unit, row in (found for group in groups for found in run(group, options, _BEGIN_S + options.seconds)):
            if row is not None:
                _add(results, unit, row)
                _save(options.json, results)
                continue
            left.remove(unit)
            if results["machine"] is None:
                break
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for unit in left:
            _add(results, unit, {**unit.facts, "is_right": None, "reason": "was not come to"})
        print(text_of(results), flush=True)
        _save(options.json, results)
        shutil.rmtree(options.work, ignore_errors=True)
    if results["machine"] is None:
        sys.exit("nothing was measured: there is no GPU that can be used")


def _groups(options: argparse.Namespace, pack: Result) -> Iterator[list[Unit]]:
    """What is to be done: each list by a process of its own."""
    kernels = {group["folder"]: group for group in pack["kernels"]}
    first = [Unit("machine", "facts", {"folder": pack["kernels"][0]["folder"]}, {})]
    if "checks" in options.only:
        first += _cases(kernels["small"])
        for entry in pack["checks"]:
            label = f"{entry['model']} {entry['quant']} {entry['variant']}"
            first.append(Unit("check", "checks", entry, {"label": label}))
    if "kernels" in options.only and "speed" in kernels:
        first += [Unit("limits", "facts", {"folder": "speed"}, {}), *_cases(kernels["speed"])]
    yield first
    names = dict.fromkeys(f"{entry['model']}:{entry['quant']}" for entry in pack["models"])
    for name in options.models or names:
        if name not in names:
            sys.exit(f"{options.pack}: has no model {name}, but {', '.join(names)}")
        entries = {row["variant"]: row for row in pack["models"] if f"{row['model']}:{row['quant']}" == name}
        yield from _variants(options, entries)


def _cases(group: Result) -> list[Unit]:
    folder = {"folder": group["folder"]}
    return [Unit("kernel", "kernels", case | folder, {"label": case["label"], **folder}) for case in group["cases"]]


def _variants(options: argparse.Namespace, entries: dict[str, Result]) -> Iterator[list[Unit]]:
    """The units of a model, whose variants `entries` are."""
    for variant, skew, parts in _VARIANTS:
        entry = entries.get("layers_dense" if variant == "copied" else variant)
        # With no hot neurons there are none to be chosen.
        if entry is None or not set(parts) & set(options.only) or not (skew or entry["hot"]):
            continue
        facts = {key: entry[key] for key in _OF_MODEL} | {"variant": variant, "skew": skew, "active": options.active}
        yield [
            Unit("copied" if variant == "copied" else "model", "models", entry | {"skew": skew}, facts, options.limit)
        ]


def _work(options: argparse.Namespace, groups: list[list[Unit]]) -> Path:
    """A folder, not there yet, for the largest of the models: in memory if there is room."""
    needed = max(unit.content.get("weight_bytes", 0) for group in groups for unit in group)
    places = [options.work] if options.work else [Path("/dev/shm"), Path(tempfile.gettempdir())]
    place = next((each for each in places if each.is_dir() and shutil.disk_usage(each).free > needed), places[-1])
    place.mkdir(parents=True, exist_ok=True)
    # Always the same one: what a run that was killed has left is found by the next.
    work = place / "picompile-gpu"
    shutil.rmtree(work, ignore_errors=True)
    _say(f"weights are made in {work}: {needed / 1e9:.1f} GB of {shutil.disk_usage(place).free / 1e9:.1f}")
    return work


def _add(results: Result, unit: Unit, row: Result) -> None:
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
