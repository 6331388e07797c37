"""Checks and measures what `pack.py` packed, on a machine with a GPU, PyTorch, numpy and tokenizers.

    python -m benchmarks.gpu first build/gpu --results FOLDER [--asked SECONDS] [--shm 100G] [--memory 128]
    python -m benchmarks.gpu second build/gpu --results FOLDER
    python -m benchmarks.gpu case build/gpu 'linear q4'
    python -m benchmarks.gpu ready build/gpu
    python -m benchmarks.gpu tables FOLDER/first.json FOLDER/second.json

`first` says whether results are right, and the speed of the kernels that matter most; `second` measures the model of
70 billion parameters, and llama.cpp with the same memory. Each keeps a clock: its parts end at the times of
`schedule.py`, whatever happens, and a line is printed for each result as it comes.
`case` checks one kernel alone, `ready` says whether the pack was made from these sources, and `tables` shows the
results of several runs as one.

The results are in FOLDER: `first.json` is written again after each row, and `first.txt` has what was printed. The last
line says whether everything was right; the exit code is 1 if anything was wrong, and 2 if something that must be right
was not measured. A bar that is missed is no error.
Weights stay in `--work` for the second command, which removes them.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.growth import touch
from benchmarks.gpu.prepared import LARGE, Writer, enlarge, has_room, prepare_gguf, prepared, work_folder
from benchmarks.gpu.report import merged, text_of
from benchmarks.gpu.run import Run
from benchmarks.gpu.schedule import PLANNED, SCHEDULES, Clock, active_of, case_units, clock, parts_of
from benchmarks.gpu.sources import SCHEMA, sources_digest
from benchmarks.gpu.units import Workers

_BEGIN_S = time.monotonic()
Result = dict[str, Any]
_SCHEDULED = {
    "first": "say whether results are right, and time 16 kernels",
    "second": "measure the model of 70 billion parameters, and llama.cpp",
}
# The host's part of a model is in memory once more beside the file of its weights, and so are PyTorch and the engine.
_BESIDE_SHARE, _BESIDE_S = 0.7, 60.0


def main() -> None:
    options = _arguments()
    verbs: Mapping[str, Callable[[argparse.Namespace], None]] = {
        "case": _case, "ready": _ready, "tables": _tables, "write": _write, **dict.fromkeys(SCHEDULES, _scheduled),
    }  # fmt: skip
    verbs[options.verb](options)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in _SCHEDULED.items():
        _add_schedule(verbs.add_parser(verb, help=text), verb)
    case = verbs.add_parser("case", help="check one kernel")
    _add_common(case)
    case.add_argument("label", help="the kernel's name in the pack; a wrong one lists all")
    ready = verbs.add_parser("ready", help="say whether a pack was made from these sources")
    ready.add_argument("pack", type=Path, help="folder that benchmarks.gpu.pack wrote")
    tables = verbs.add_parser("tables", help="show the results of several runs as one")
    tables.add_argument("files", type=Path, nargs="+")
    write = verbs.add_parser("write", help="prepare the weights of a model: `first` and `second` start this")
    _add_common(write)
    write.add_argument("--model", required=True)
    write.add_argument("--quant", required=True)
    write.add_argument("--variant", required=True)
    return parser.parse_args()


def _add_schedule(parser: argparse.ArgumentParser, verb: str) -> None:
    _add_common(parser)
    parser.add_argument("--results", type=Path, required=True, help="folder for the results")
    parser.set_defaults(asked=None)
    if verb == "first":
        parser.add_argument("--asked", type=float, help="output of `date +%%s` when the machine was asked for")
    parser.add_argument("--shm", metavar="SIZE", help="remount /dev/shm with this size first; needs root")
    parser.add_argument("--memory", metavar="GIB", help="memory promised for the machine, if it begins with less")
    parser.add_argument("--pretend", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--scale", type=float, default=1.0, help="multiply all times of the schedule (default: 1)")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pack", type=Path, help="folder that benchmarks.gpu.pack wrote")
    parser.add_argument("--work", type=Path, help="folder for weights (default: /dev/shm if it has room, else /tmp)")
    parser.add_argument(
        "--active", type=float, default=0.05, help="share of neurons computed for a token (default: 0.05)"
    )
    parser.add_argument("--device-library", help="a stand-in for libcuda.so.1; times mean nothing then")


def _tables(options: argparse.Namespace) -> None:
    print(text_of(merged([json.loads(path.read_text()) for path in options.files])))


def _pack(options: argparse.Namespace) -> Result:
    pack: Result = json.loads((options.pack / "pack.json").read_text())
    if pack["schema"] != SCHEMA:
        sys.exit(f"{options.pack}: is of schema {pack['schema']}, and this script knows {SCHEMA}; pack it again")
    if pack["sources"] != sources_digest():
        sys.exit(f"{options.pack}: was packed at commit {pack['commit']}, and these are other sources; pack it again")
    return pack


def _case(options: argparse.Namespace) -> None:
    pack, options.pretend = _pack(options), None
    units = case_units(pack, options.label)
    options.work = work_folder(options.work, 0)
    with Run(options, None, Clock(_BEGIN_S)) as run, Workers(options, has_spare=False) as workers:
        run.do(units, workers)
    sys.exit(run.exit_code)


def _ready(options: argparse.Namespace) -> None:
    pack = _pack(options)
    print(f"{options.pack}: ready; it was packed at commit {pack['commit']} from the sources that are here")


def _write(options: argparse.Namespace) -> None:
    """Write weights, use as much memory as the engine will, and give that back; then a file for a packed llama.cpp."""
    pack, wanted, begin_s = _pack(options), (options.model, options.quant, options.variant), time.monotonic()
    (entry,) = (each for each in pack["models"] if (each["model"], each["quant"], each["variant"]) == wanted)
    options.work = work_folder(options.work, 0)
    _cache_beside(options.work)
    # Whoever measures meanwhile comes first.
    os.nice(19)
    with prepared(options.pack / entry["file"], options.work / LARGE, active=options.active):
        print(f"weights of {entry['weight_bytes'] / 1e9:.1f} GB after {time.monotonic() - begin_s:.1f} s")
        print(f"memory: {touch(int(_BESIDE_SHARE * entry['weight_bytes']), _BESIDE_S)}")
    if pack["llama"] is None:
        return
    output = prepare_gguf(options.pack / entry["gguf"], options.work)
    print(f"llama.cpp's file of {output.stat().st_size / 1e9:.1f} GB after {time.monotonic() - begin_s:.1f} s")


def _cache_beside(work: Path) -> None:
    """Keep the stamps that say that weights are whole, which are not hashed, beside them instead of in the home."""
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")


def _scheduled(options: argparse.Namespace) -> None:
    pack = _pack(options)
    refused = enlarge(options.shm) if options.shm else None
    large = next((each for each in pack["models"] if each["variant"] == PLANNED), None)
    # The weights, and llama.cpp's.
    files = ("weight_bytes", "dense_bytes") if pack["llama"] else ("weight_bytes",)
    needed = sum(large[key] for key in files) if large else 0
    options.work = work_folder(options.work, needed)
    _cache_beside(options.work)
    if options.memory:
        os.environ["PICOMPILE_MEMORY_GIB"] = options.memory
    times = clock(options.asked, _BEGIN_S, options.scale) if options.verb == "first" else Clock(_BEGIN_S, options.scale)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    writer = Writer(options)
    run = Run(options, options.results / options.verb, times)
    try:
        with run, Workers(options) as workers:
            run.say(f"{options.verb}: pack of commit {pack['commit']}, weights in {options.work}")
            if refused:
                run.say(f"/dev/shm keeps its size: {refused}")
            if not has_room(options.work.parent, needed):
                run.say(f"{options.work.parent} has no room for {needed / 1e9:.1f} GB of weights")
            elif large and not options.pretend:
                writer.start(large, active_of(large, options.active), pack["llama"] is not None)
            run.do_parts(parts_of(options.verb, options, pack), workers)
            run.results["writer"] = writer.said()
            run.say(f"the writer of weights: {'; '.join(writer.said()[-3:]) or 'nothing so far'}")
            if options.verb == "first" and not run.exit_code:
                run.say(f"{options.work} keeps the weights for the second command, which removes them")
    finally:
        # Only now: it takes seconds, and the tables are printed.
        if options.verb != "first" or run.exit_code:
            writer.end()
            shutil.rmtree(options.work, ignore_errors=True)
    sys.exit(run.exit_code)


if __name__ == "__main__":
    main()
