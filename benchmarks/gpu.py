"""Checks and measures what `gpu_pack.py` packed, on a machine with a GPU, PyTorch, numpy and tokenizers.

    python benchmarks/gpu.py first build/gpu --results FOLDER [--asked SECONDS] [--shm 100G] [--memory 128]
    python benchmarks/gpu.py second build/gpu --results FOLDER
    python benchmarks/gpu.py more build/gpu --results FOLDER
    python benchmarks/gpu.py case build/gpu 'linear q4'
    python benchmarks/gpu.py tables FOLDER/first.json FOLDER/second.json

`first` says whether results are right, and the speed of the kernels that matter most; `second` measures the model of
70 billion parameters, and llama.cpp with the same memory; `more` has what is left. Each keeps a clock: its parts end at
the times of `_gpu_schedule.py`, whatever happens, and a line is printed for each result as it comes. `case` checks one
kernel alone, and `tables` shows the results of several runs as one.

The results are in FOLDER: `first.json` is written again after each row, and `first.txt` has what was printed. The last
line says whether everything was right; the exit code is 1 if anything was wrong. A bar that is missed is no error.
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

_BEGIN_S = time.monotonic()
_ROOT = Path(__file__).resolve().parents[1]
for _name in ("runtime", "passes"):
    sys.path.append(str(_ROOT / _name))

from _gpu_growth import touch  # noqa: E402
from _gpu_prepared import LARGE, Writers, enlarge, prepare_gguf, prepared, work_folder  # noqa: E402
from _gpu_report import merged, text_of  # noqa: E402
from _gpu_run import Run  # noqa: E402
from _gpu_schedule import SCHEDULES, active_of, case_units, clock, parts_of  # noqa: E402
from _gpu_sources import SCHEMA, sources_digest  # noqa: E402
from _gpu_units import Workers  # noqa: E402
from peers_llama_gguf import LlamaShape  # noqa: E402

Result = dict[str, Any]
_PLANNED = "hybrid_4090"
# The host's part of a model is in memory once more beside the file of its weights, and so are PyTorch and the engine.
_BESIDE_SHARE, _BESIDE_S = 0.7, 60.0


def main() -> None:
    options = _arguments()
    verbs: Mapping[str, Callable[[argparse.Namespace], None]] = {
        "case": _case, "tables": _tables, "write": _write, **dict.fromkeys(SCHEDULES, _scheduled),
    }  # fmt: skip
    verbs[options.verb](options)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in SCHEDULES:
        _add_schedule(verbs.add_parser(verb))
    case = verbs.add_parser("case", help="check one kernel")
    _add_common(case)
    case.add_argument("label")
    tables = verbs.add_parser("tables", help="show the results of several runs as one")
    tables.add_argument("files", type=Path, nargs="+")
    write = verbs.add_parser("write", help="prepare the weights of a model: `first` and `second` start this")
    _add_common(write)
    write.add_argument("--model", required=True)
    write.add_argument("--quant", required=True)
    write.add_argument("--variant")
    write.add_argument("--gguf", action="store_true", help="for llama.cpp")
    return parser.parse_args()


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    parser.add_argument("--results", type=Path, required=True, help="a folder for what is found")
    parser.add_argument("--asked", type=float, help="when the machine was asked for: `date +%%s` at that time")
    parser.add_argument("--shm", metavar="SIZE", help="remount /dev/shm with this size first; needs root")
    parser.add_argument("--memory", metavar="GIB", help="how far the machine's memory grows, if it grows as it is used")
    parser.add_argument("--pretend", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all times of the schedule")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pack", type=Path, help="what gpu_pack.py wrote")
    parser.add_argument("--work", type=Path, help="where weights are made; /dev/shm, if it has room, without it")
    parser.add_argument("--active", type=float, default=0.05, help="share of the neurons that are computed for a token")
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
    with Run(options, None, clock(None, _BEGIN_S, 1.0)) as run, Workers(options) as workers:
        run.do(units, workers)
    sys.exit(run.is_wrong)


def _write(options: argparse.Namespace) -> None:
    pack, wanted = _pack(options), (options.model, options.quant)
    entries = [each for each in pack["models"] if (each["model"], each["quant"]) == wanted]
    options.work = work_folder(options.work, 0)
    if options.gguf:
        prepare_gguf(LlamaShape.of(options.model, entries[0]["shape"]), options.work)
        return
    (entry,) = (each for each in entries if each["variant"] == options.variant)
    _cache_beside(options.work)
    with prepared(options.pack / entry["file"], options.work / LARGE, active=options.active, skew=True):
        pass
    print(touch(int(_BESIDE_SHARE * entry["weight_bytes"]), _BESIDE_S))


def _cache_beside(work: Path) -> None:
    """Keep the stamps that say that weights are whole, which are not hashed, beside them instead of in the home."""
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")


def _scheduled(options: argparse.Namespace) -> None:
    pack = _pack(options)
    refused = enlarge(options.shm) if options.shm else None
    large = next((each for each in pack["models"] if each["variant"] == _PLANNED), None)
    # The weights, and llama.cpp's.
    needed = sum(each or 0 for each in (large and large["weight_bytes"], large and large["dense_bytes"]))
    options.work = work_folder(options.work, needed)
    _cache_beside(options.work)
    if options.memory:
        os.environ["PICOMPILE_MEMORY_GIB"] = options.memory
    times = clock(options.asked if options.verb == "first" else None, _BEGIN_S, options.scale)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    writers = Writers(options)
    with Run(options, options.results / options.verb, times) as run:
        if refused:
            run.say(f"/dev/shm keeps its size: {refused}")
        if large and options.verb != "more" and not options.pretend:
            writers.start(large, active_of(large, options.active))
        try:
            with Workers(options) as workers:
                run.do_parts(parts_of(options.verb, options, pack), workers)
        finally:
            if options.verb != "first" or run.is_wrong:
                writers.end()
                shutil.rmtree(options.work, ignore_errors=True)
            else:
                run.say(f"{options.work} keeps the weights for the second command, which removes them")
    sys.exit(run.is_wrong)


if __name__ == "__main__":
    main()
