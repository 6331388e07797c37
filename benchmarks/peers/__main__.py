"""picompile against llama.cpp, PowerInfer, PyTorch and OpenVINO on this machine's processor.

    pip install matplotlib                                   # beside picompile
    pip install llama-cpp-python openvino safetensors        # into any Python; --peer-python names it
    python -m benchmarks.peers --work build/bench --quick
    python -m benchmarks.peers --work build/bench --peer-python ~/peers/bin/python
    python -m benchmarks.peers --work build/bench --program PowerInfer=~/PowerInfer/build/bin/main --sweeps decode

All have the weights of one checkpoint of `synth`. Sweeps:

decode    a token after 128 others, 2 threads and 1: every contender
prefill   512 tokens, 2 threads
context   decode with 128 to 4096 tokens in the cache
batch     decode 1 to 32 sequences at a time, tokens of all of them together

Contenders, and what each is:

picompile   learned, exact and none are its predictors; `learned` are those that synth makes
llama.cpp   llama-cpp-python's build; a GGUF file that is q4_0 or f16 in all matrices; SiLU or GELU in place of ReLU
llama-bench, ik_llama.cpp, PowerInfer
            programs that you have built; their paths are given by --program NAME=PATH, and what they print is read.
            PowerInfer's is `main`, the others' llama-bench; q4_0 or f16 in all matrices, and for PowerInfer `learned`'s
            predictors in the same format
OpenVINO    a stateful model as optimum-intel makes it, f16, int8 or int4 weights (q4_0's numbers), KV cache f16
torch       transformers' model, weights bfloat16 or float16, sdpa, DynamicCache

A group is a point of a sweep. In each of its rounds every contender is measured once, in turn, in a process that stays
loaded (built programs load it anew); behind each of picompile's turns the memory's bandwidth is measured, as
`picompile bench` does. Figures are medians over the rounds. Who is not installed is left out, and the table says so.

Every group goes into the JSON file when it is done. A run that was broken off goes on behind the last one, unless the
code generator has changed since, or the target or the peers are others; `--anew` starts over. Measuring takes half an
hour on two cores; the files that are missing are made before. Another rate of firing is another model: `--active`.
"""

import argparse
import json
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.peers.contender import Workers, measure_group, prepare
from benchmarks.peers.engines import PROGRAMS, SWEEPS
from benchmarks.peers.files import Files, LeftOutError
from benchmarks.peers.plan import Group, Scale, groups
from benchmarks.peers.plot import plot
from benchmarks.peers.tables import tables
from benchmarks.script import argument_parser
from picompile.machine.host import cpu_name

_QUICK = ("decode", "prefill")
# Engines whose threads wait for each other by spinning collapse when another process takes a core.
_QUIET = 0.5


def main() -> None:
    options = _arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    file = options.json or options.work / ("peers-quick.json" if options.quick else "peers.json")
    scale = Scale(options.shape, options.active, formats=options.formats, quick=options.quick)
    planned = groups(scale, options.sweeps or (_QUICK if options.quick else SWEEPS))
    files = Files(options.work, options.target, options.peer_python, options.as_is, dict(options.program))
    stored = {} if options.anew else _stored(file, files)
    left = [group for group in planned if group.key not in stored]
    _prepare(left, files)
    if options.prepare:
        return
    if left and (load := os.getloadavg()[0]) > _QUIET:
        print(f"this machine is busy (load {load:.1f}): the figures will say little", file=sys.stderr)
    with closing(Workers(files)) as workers:
        for number, group in enumerate(left, 1):
            start = time.monotonic()
            measured = measure_group(group, options.rounds or scale.rounds(group.sweep), workers)
            for label, why in measured["left_out"].items():
                print(f"{label} is left out: {why}", file=sys.stderr)
            if measured["results"]:
                stored[group.key] = measured
                _store(file, files, stored)
            print(f"{number}/{len(left)} {group.key}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    results = [stored[group.key] for group in planned if group.key in stored]
    if not results:
        sys.exit("nothing could be measured")
    if options.plot:
        plot(results, options.plot)
    print(tables(results))


def _arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, "--plot")
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="where checkpoints and artifacts are")
    parser.add_argument("--quick", action="store_true", help="decode and prefill, 2 threads; only the ends of --sweeps")
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, help="default: all")
    parser.add_argument("--formats", nargs="+", default=["q4", "f16"], choices=["q4", "f16"])
    parser.add_argument("--shape", default="reglu-1.3b", help="shape for synth: a name, or a LLaMA's config.json")
    parser.add_argument("--active", type=float, default=0.10, help="share of the neurons that fire")
    parser.add_argument("--target", default="native", help="picompile's --target")
    parser.add_argument("--peer-python", default=sys.executable, help="the Python of llama.cpp and OpenVINO")
    parser.add_argument(
        "--program", type=_program, action="append", default=[], metavar="NAME=PATH",
        help=f"a built program, and the engine that it is: {', '.join(PROGRAMS)}",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, help="rounds of each group; default: 5 of decode, 3 of the rest")
    parser.add_argument("--json", type=Path, help="default: peers.json, or peers-quick.json, in the work folder")
    parser.add_argument("--anew", action="store_true", help="measure again even what the JSON file has")
    parser.add_argument("--prepare", action="store_true", help="only make the files")
    parser.add_argument("--as-is", action="store_true", help="use artifacts even if the code generator has changed")
    return parser.parse_args()


def _program(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    found = Path(path).expanduser().resolve()
    if name not in PROGRAMS:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(PROGRAMS)}")
    if not os.access(found, os.X_OK) or found.is_dir():
        raise argparse.ArgumentTypeError(f"{found} is not a program")
    return name, found


def _prepare(left: list[Group], files: Files) -> None:
    """Makes files before anything is measured. Who has none is left out when its turn comes, with the reason."""
    for group in left:
        for contender in group.contenders:
            try:
                prepare(contender, group.model, files)
            except LeftOutError as error:
                print(f"{contender.label}: {error}", file=sys.stderr, flush=True)


def _stored(file: Path, files: Files) -> dict[str, Any]:
    """Groups of a run that was broken off; none of one that measured other code."""
    if not file.exists():
        return {}
    content = json.loads(file.read_text())
    if content.get("options") != files.options:
        print(f"{file} is of another target or other peers: measuring all anew", file=sys.stderr)
        return {}
    if content["sources"] != files.sources and not files.as_is:
        print(f"{file} is of another state of the code generator: measuring all anew", file=sys.stderr)
        return {}
    found: dict[str, Any] = content["groups"]
    return found


def _store(file: Path, files: Files, stored: dict[str, Any]) -> None:
    machine = {"processor": cpu_name(), "cores": len(os.sched_getaffinity(0))}
    unfinished = file.with_suffix(".unfinished")
    content = {"machine": machine, "sources": files.sources, "options": files.options, "groups": stored}
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(file)


if __name__ == "__main__":
    main()
