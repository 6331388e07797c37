"""picompile against llama.cpp, PyTorch and OpenVINO on this machine's processor.

    pip install llama-cpp-python openvino safetensors        # into any Python; --peer-python names it
    python benchmarks/peers.py --work build/bench --quick
    python benchmarks/peers.py --work build/bench --peer-python ~/peers/bin/python --plot docs/images/peers.png

All have the weights of one checkpoint of `synth`. Sweeps:

decode    a token after 128 others, 2 threads and 1: every contender
prefill   512 tokens, 2 threads
context   decode with 128 to 4096 tokens in the cache
batch     decode 1 to 32 sequences at a time, tokens of all of them together
opt       decode, the OPT shape
firing    decode where 3 to 100 % of the neurons fire

Contenders, and what each is:

picompile   learned, exact and none are its predictors; `learned` are those that synth makes
llama.cpp   llama-cpp-python's build; a GGUF file that is q4_0 or f16 in all matrices; SiLU or GELU in place of ReLU
OpenVINO    a stateful model as optimum-intel makes it, f16, int8 or int4 weights (q4_0's numbers), KV cache f16
torch       transformers' model, weights bfloat16 or float16, sdpa, DynamicCache

A group is a point of a sweep. In each of its rounds every contender is measured once, in turn, in a process that stays
loaded; behind each of picompile's turns the memory's bandwidth is measured, as `picompile bench` does. Figures are
medians over the rounds. Who is not installed is left out, and the table says so.

Every group goes into the JSON file when it is done. A run that was broken off goes on behind the last one;
`--anew` starts over. Measuring takes half an hour on two cores; the files that are missing are made before, some forty
minutes and 50 GB of disk in all. Those of other firing rates are made when their turn comes and deleted after it,
unless `--keep`: 5 minutes each.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from peers_contender import Workers, measure_group
from peers_files import Files, LeftOutError
from peers_plan import SWEEPS, Group, Model, Scale, groups
from peers_plot import plot
from peers_tables import tables

from picompile.measure.host import cpu_name

_QUICK = ("decode", "prefill", "context", "batch")


def main() -> None:
    options = _arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    file = options.json or options.work / "peers.json"
    scale = Scale(options.shape, options.opt_shape, options.active, formats=options.formats, quick=options.quick)
    planned = groups(scale, options.sweeps or (_QUICK if options.quick else SWEEPS))
    stored = {} if options.anew or not file.exists() else json.loads(file.read_text())["groups"]
    files = Files(options.work, options.target, options.peer_python, options.as_is)
    base = {Model(scale.shape, scale.active), Model(scale.opt_shape, scale.active)}
    left = [group for group in planned if group.key not in stored]
    _prepare([group for group in left if group.model in base], files)
    if options.prepare:
        return
    workers = Workers(files)
    try:
        for number, group in enumerate(left, 1):
            start = time.monotonic()
            stored[group.key] = measure_group(group, options.rounds, workers)
            _store(file, stored)
            print(f"{number}/{len(left)} {group.key}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            is_last = all(other.model != group.model for other in left[number:])
            if is_last and group.model not in base and not options.keep:
                workers.close()
                files.remove(group.model)
    finally:
        workers.close()
    measured = [stored[group.key] for group in planned]
    if options.plot:
        plot(measured, options.plot)
    print(tables(measured))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="where checkpoints and artifacts are")
    parser.add_argument("--quick", action="store_true", help="ends of the sweeps, no other checkpoint, 3 rounds")
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS)
    parser.add_argument("--formats", nargs="+", default=["q4", "f16"], choices=["q4", "f16"])
    parser.add_argument("--shape", default="reglu-1.3b")
    parser.add_argument("--opt-shape", default="opt-1.3b")
    parser.add_argument("--active", type=float, default=0.10)
    parser.add_argument("--target", default="native", help="what picompile compiles for")
    parser.add_argument("--peer-python", default=sys.executable, help="the Python of llama.cpp and OpenVINO")
    parser.add_argument("--rounds", type=int, help="of each group; 5, or 3 of a quick run")
    parser.add_argument("--json", type=Path, help="default: peers.json in the work folder")
    parser.add_argument("--plot", type=Path, help="draw a picture")
    parser.add_argument("--anew", action="store_true", help="measure again what the JSON file has")
    parser.add_argument("--prepare", action="store_true", help="only make the files")
    parser.add_argument("--as-is", action="store_true", help="take artifacts though the code generator has changed")
    parser.add_argument("--keep", action="store_true", help="keep the files of other firing rates")
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.quick else 5)
    return options


def _prepare(left: list[Group], files: Files) -> None:
    """Makes files before anything is measured. Who has none is left out when its turn comes, with the reason."""
    for group in left:
        for contender in group.contenders:
            try:
                files.command(contender, group.model_of(contender))
            except LeftOutError as error:
                print(f"{contender.label}: {error}", file=sys.stderr, flush=True)


def _store(file: Path, stored: dict[str, Any]) -> None:
    machine = {"processor": cpu_name(), "cores": len(os.sched_getaffinity(0))}
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"machine": machine, "groups": stored}, indent=1) + "\n")
    unfinished.replace(file)


if __name__ == "__main__":
    main()
