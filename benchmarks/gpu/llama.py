"""llama.cpp with CUDA as a peer of `benchmarks.gpu`: dense layers, as many on the GPU as a budget of memory holds.

Where there is a network, all that a pack needs in one command, of what PyPI has: sources, CUDA's compiler and cuBLAS.
It takes 25 to 45 minutes of one core the first time, and half a minute later; CMake and a C++ compiler must be there.

    python -m benchmarks.gpu.llama all -o build/llama.tar.xz --sm 90

Or step by step: sources of llama.cpp, as PyPI has them in llama-cpp-python, and of these what is needed.

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    python -m benchmarks.gpu.llama trim llama_cpp_python-0.3.36.tar.gz -o build/llama_cpp.tar.xz

Where there is CUDA's compiler, here or on the machine with the GPU. `carry` packs a build; tar unpacks it there:

    python -m benchmarks.gpu.llama build build/llama_cpp.tar.xz -o build/llama --sm 90
    python -m benchmarks.gpu.llama carry build/llama -o build/llama_built.tar.xz

On the machine with the GPU. Shapes by name are those of a pack (`benchmarks.gpu.pack`), or a JSON file has the fields:

    python -m benchmarks.gpu.llama gguf --shape llama-70b --pack build/gpu -o /dev/shm/llama-70b.gguf
    python -m benchmarks.gpu.llama bench build/llama /dev/shm/llama-70b.gguf --budget 0.3333
    python -m benchmarks.gpu tables build/gpu.json build/llama.json

A small one, to see that the programs work; with `--cpu` in place of `--sm 90` no CUDA is needed:

    python -m benchmarks.gpu.llama gguf --shape small --hidden 256 --ffn 704 --layers 3 --heads 8 --kv-heads 4 \\
        --vocab 512 -o build/small.gguf
    build/llama/bin/llama-completion -m build/small.gguf -p Hello -n 16 -no-cnv --temp 0

`build`, `carry`, `gguf` and `bench` need numpy and nothing of picompile. Nothing of llama.cpp is in this repository.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.llama_bench import WAYS, BenchOptions, bench, layers_that_fit
from benchmarks.gpu.llama_build import BuildError, BuildOptions, binaries, build, carry
from benchmarks.gpu.llama_gguf import LlamaShape, ShapeError, facts_of, write_gguf
from benchmarks.gpu.llama_sources import SourceError, trim
from benchmarks.gpu.llama_toolkit import PackageError, sources, toolkit
from benchmarks.gpu.report import empty_results, line
from benchmarks.gpu.sources import SCHEMA

_NUMBERS = ("hidden", "ffn", "layers", "heads", "kv-heads", "head-dim", "vocab")


def main() -> None:
    options = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    verbs: Mapping[str, Callable[[argparse.Namespace], None]] = {
        "all": _all, "trim": _trim, "build": _build, "carry": _carry, "gguf": _gguf, "bench": _bench,
    }  # fmt: skip
    try:
        verbs[options.verb](options)
    except (BuildError, PackageError, ShapeError, SourceError, OSError) as error:
        sys.exit(str(error))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    whole = verbs.add_parser("all", help="fetch from PyPI, build and pack what another machine runs")
    whole.add_argument("-o", "--output", type=Path, required=True)
    whole.add_argument("--sm", type=int, default=90, help="compute capability times ten; an H100's and an H200's is 90")
    whole.add_argument("--folder", type=Path, default=Path("build"), help="where sources, compiler and build are kept")
    whole.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    trimmed = verbs.add_parser("trim", help="the sources that are needed, from llama-cpp-python's source distribution")
    trimmed.add_argument("source", type=Path)
    trimmed.add_argument("-o", "--output", type=Path, required=True)
    built = verbs.add_parser("build", help="build what trim wrote")
    built.add_argument("archive", type=Path)
    built.add_argument("-o", "--output", type=Path, required=True)
    built.add_argument("--sm", type=int, default=90, help="compute capability times ten; an H100's and an H200's is 90")
    built.add_argument("--cpu", action="store_true", help="without CUDA")
    built.add_argument("--flash", action="store_true", help="with the kernels of flash attention, which take long")
    built.add_argument("--cublas", type=Path, help="a folder with include and lib, where cuBLAS is not found")
    built.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    carried = verbs.add_parser("carry", help="pack a build for another machine")
    carried.add_argument("folder", type=Path)
    carried.add_argument("-o", "--output", type=Path, required=True)
    _add_model_verbs(verbs)
    return parser.parse_args()


def _add_model_verbs(verbs: Any) -> None:
    made = verbs.add_parser("gguf", help="a model of random weights in q4_0")
    made.add_argument("--shape", default="small", help="a name in the pack, a JSON file, or the name of a new shape")
    made.add_argument("--pack", type=Path, default=Path("build/gpu"), help="what benchmarks.gpu.pack wrote")
    for name in _NUMBERS:
        made.add_argument(f"--{name}", type=int)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("-o", "--output", type=Path, required=True)
    run, default = verbs.add_parser("bench", help="llama-bench for a budget"), BenchOptions(0)
    run.add_argument("folder", type=Path, help="of a build")
    run.add_argument("model", type=Path, help="what gguf wrote")
    run.add_argument("--budget", type=float, required=True, help="bytes of GPU memory, or up to 1 a share of the model")
    run.add_argument("-p", "--prompts", type=_counts, default=default.prompts)
    run.add_argument("-n", "--tokens", type=int, default=default.tokens)
    run.add_argument("-t", "--threads", type=_counts, default=default.threads)
    run.add_argument("-r", "--repeats", type=int, default=default.repeats)
    run.add_argument("--context", type=int, default=default.context, help="tokens whose keys the budget has room for")
    run.add_argument("--limit", type=float, default=default.limit_s, help="seconds for each way")
    run.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    run.add_argument("--json", type=Path, default=Path("build/llama.json"))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _all(options: argparse.Namespace) -> None:
    archive, folder = options.folder / "llama_cpp.tar.xz", options.folder / "llama"
    options.folder.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
        trim(sources(options.folder), archive)
    asked = BuildOptions(options.sm, options.jobs, toolkit=toolkit(options.folder / "cuda"))
    print(json.dumps(build(archive, folder, asked)))
    print(f"{options.output}: {carry(folder, options.output) / 2**20:.1f} MiB")


def _trim(options: argparse.Namespace) -> None:
    facts = trim(options.source, options.output)
    print(f"{options.output}: {options.output.stat().st_size} bytes; {json.dumps(facts)}")


def _build(options: argparse.Namespace) -> None:
    sm = None if options.cpu else options.sm
    print(
        json.dumps(
            build(options.archive, options.output, BuildOptions(sm, options.jobs, options.flash, options.cublas))
        )
    )
    for name, size in binaries(options.output):
        print(f"{size:>12} {name}")


def _carry(options: argparse.Namespace) -> None:
    print(f"{options.output}: {carry(options.folder, options.output)} bytes")


def _gguf(options: argparse.Namespace) -> None:
    shape, begin_s = _shape(options), time.monotonic()
    size = write_gguf(shape, options.seed, options.output)
    seconds = time.monotonic() - begin_s
    print(f"{options.output}: {size} bytes in {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s")


def _shape(options: argparse.Namespace) -> LlamaShape:
    """Return the shape in a JSON file or the pack; numbers on the command line take precedence."""
    given = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in _NUMBERS}
    given = {name: value for name, value in given.items() if value is not None}
    path, pack = Path(options.shape), options.pack / "pack.json"
    if path.is_file():
        return LlamaShape.of(path.stem, json.loads(path.read_text()) | given)
    packed = json.loads(pack.read_text())["models"] if pack.is_file() else []
    known = {entry["model"]: entry["shape"] for entry in packed}
    if options.shape not in known and "hidden" not in given:
        sys.exit(
            f"no shape {options.shape}: {pack} has {', '.join(known) or 'none'}; name a JSON file, or give numbers"
        )
    return LlamaShape.of(options.shape, known.get(options.shape, {}) | given)


def _bench(options: argparse.Namespace) -> None:
    facts = json.loads(facts_of(options.model).read_text())
    budget = options.budget * facts["dense_bytes"] if options.budget <= 1 else options.budget
    fit = layers_that_fit(facts, int(budget), options.context)
    print(f"{budget / 1e9:.2f} GB hold {'nothing' if fit is None else f'{fit} layers and the head'}", file=sys.stderr)
    asked = BenchOptions(
        int(budget), options.prompts, options.tokens, options.threads, options.repeats, options.context, options.limit,
        options.ways,
    )  # fmt: skip
    results = empty_results(SCHEMA, stand_in=False)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for rows in bench(options.folder, options.model, facts, asked):
        results["models"] = rows
        new = options.json.with_name(f"{options.json.name}.new")
        new.write_text(json.dumps(results, indent=1) + "\n")
        new.replace(options.json)
    for row in results["models"]:
        print(line(row, results))


if __name__ == "__main__":
    main()
