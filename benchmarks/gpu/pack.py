"""Packs what `benchmarks.gpu` runs, on a machine with picompile and without a GPU.

    python -m benchmarks.gpu.pack -o build/gpu --sm 90 [--llama PATH] [--budget 0.333]

The pack is a folder of some MB: kernels as cubin and PTX with a list of cases, artifacts of whole models without their
weights, the bundled model with its weights and the tokens that this machine's processor chooses with it, and, with
`--llama`, a llama-bench that you have built for CUDA, with the shared libraries beside it. The pack names the commit
and the sources that it was made from, and `benchmarks.gpu` refuses others. `make gpu-pack` makes it and rehearses both
commands. It says nothing of speed: nothing in it has run on a GPU until `benchmarks.gpu` has run there.
"""

import argparse
import json
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.gpu.cases import pack_kernels, small_cases, speed_cases
from benchmarks.gpu.models import ModelOptions, pack_model
from benchmarks.gpu.pack_bundled import BundledOptions, pack_bundled
from benchmarks.gpu.pack_gguf import pack_gguf
from benchmarks.gpu.prepared import LLAMA_PROGRAM
from benchmarks.gpu.sources import SCHEMA, commit, sources_digest, tracked_bytes
from benchmarks.gpu.split import Planned
from benchmarks.script import argument_parser
from picompile.machine.targets import TARGETS
from picompile.synth.shapes import find_shape, shape_from_config
from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.build.isa import ISAS

# The models of the two commands. Not Llama 7B: its attention, which comes first, takes a third of the bytes, and no
# neuron is hot then.
MODELS, VARIANTS = ("llama-70b:q4",), ("hybrid", "layers_dense")
# Of these also what is planned for a GPU that people have at home, by how neurons of such a model fire.
PLANNED = {"llama-70b": Planned("4090", "reglu-70b")}
BUNDLED = ROOT / "models" / "tiny-reglu"
# Of the model that is compared with eager PyTorch: odd sizes, heads that share keys, two layers.
CHECK_CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 192, "intermediate_size": 704, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_act": "relu", "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
CHECK_BUDGET, CHECK_RANK, CHECK_CONTEXT = 0.6, 32, 96
# The library of the host for what no artifact is needed for. It has no kernels, so any machine of the kind runs it.
HOST, _HOST_ISA = "host.so", "x86-64-v3"
# The repository and the pack may have so many bytes: 64 MiB can be carried, and two are spared.
MOST_CARRIED_BYTES = 62 * 2**20
# The file of a pack with a build of llama.cpp.
LLAMA = "llama.tar.xz"


def main() -> None:
    options = arguments()
    begin = time.monotonic()
    options.output.mkdir(parents=True, exist_ok=True)
    # An earlier pack may have had other files, and all files here are carried.
    for path in (*options.output.glob("*.zip"), *options.output.glob("*.tar.xz")):
        path.unlink()
    if options.llama is None:
        _say("no llama.cpp: the pack has no peer; --llama PATH takes a llama-bench that was built for CUDA")
    elif not options.llama.is_file():
        sys.exit(f"{options.llama}: no program; --llama takes the path of a llama-bench that was built for CUDA")
    build_host_library((), options.output / HOST, ISAS[_HOST_ISA])
    kernels = []
    for name, cases in (("small", list(small_cases())), ("speed", [] if options.small else list(speed_cases()))):
        _say(f"{len(cases)} kernels: {name}")
        if cases:
            packed = pack_kernels(cases, options.output / f"{name}.zip", options.sm)
            kernels.append({"folder": name, "cases": packed})
    index = {
        "schema": SCHEMA,
        "commit": commit(),
        "sources": sources_digest(),
        "sm": options.sm,
        "host": HOST,
        "kernels": kernels,
        "checks": list(checks(options)),
        "bundled": list(_bundled(options)),
        "models": [entry for text in options.models for entry in _models(text, options)],
        "llama": None if options.llama is None else pack_program(options.llama, options.output / LLAMA),
    }
    (options.output / "pack.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    pack_bytes = sum(path.stat().st_size for path in options.output.rglob("*") if path.is_file())
    repository_bytes = tracked_bytes()
    _say(
        f"{options.output}: {pack_bytes / 2**20:.1f} MiB, {time.monotonic() - begin:.0f} s; with the "
        f"{repository_bytes / 2**20:.1f} MiB of the repository {(pack_bytes + repository_bytes) / 2**20:.1f} MiB"
    )
    if pack_bytes + repository_bytes > MOST_CARRIED_BYTES:
        sys.exit(f"that is more than {MOST_CARRIED_BYTES / 2**20:.0f} MiB, which can be carried: leave something out")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; those of the command line, if none are `given`."""
    parser = argument_parser(__doc__, context=2048)
    parser.add_argument("-o", "--output", type=Path, default=Path("build/gpu"))
    parser.add_argument(
        "--sm", type=int, default=90, help="compute capability times ten; an H100's and an H200's is 90"
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS), metavar="SHAPE:QUANT")
    parser.add_argument(
        "--llama", type=Path, metavar="PATH", help="a built llama-bench; libraries beside it are packed"
    )
    parser.add_argument("--budget", type=float, default=1 / 3, help="share of the dense model that the GPU may hold")
    parser.add_argument(
        "--isas",
        nargs="+",
        default=list(TARGETS["h100"].isas),
        help="instruction sets of the models; checks use the last",
    )
    parser.add_argument("--small", action="store_true", help="leave out kernels whose speed is measured")
    parser.add_argument("--bundled", type=Path, default=BUNDLED, help="a model folder, packed with its weights")
    return parser.parse_args(given)


def pack_program(program: Path, output: Path) -> str:
    """Pack a built llama-bench with the shared libraries beside it; return the name of the archive."""
    with tarfile.open(output, "w:xz") as archive:
        archive.add(program.resolve(), LLAMA_PROGRAM)
        for path in sorted(program.resolve().parent.glob("*.so*")):
            archive.add(path, path.name)
    return output.name


def _models(text: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    given, _, quant = text.partition(":")
    shape = find_shape(given)
    if shape.activation != "relu" or shape.config["model_type"] != "llama":
        sys.exit(f"{given}: only the shapes of Llama with ReLU are measured")
    # Predictors of 6 % of the parameters at most, and ranks that are read in whole cache lines.
    rank, planned = max(32, shape.hidden // 8 // 32 * 32), PLANNED.get(given)
    isas = tuple(options.isas)
    settings = ModelOptions(quant or "q4", options.budget, rank, options.context, options.sm, isas, planned)
    variants = list(VARIANTS)
    if planned is not None:
        variants += [f"{variant}_{planned.target}" for variant in ("hybrid", "layers_dense")]
    name = None if options.llama is None else pack_gguf(shape, options.output)
    for variant in variants:
        _say(f"{shape.name} {quant}: {variant}")
        yield pack_model(shape, settings, variant, options.output) | {"gguf": name}


def checks(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Pack the model that is compared with eager PyTorch, split and all on the GPU; yield its entries."""
    shape, isas = shape_from_config("check", CHECK_CONFIG), tuple(options.isas[-1:])
    for quant in ("f16", "q8", "q4"):
        settings = ModelOptions(quant, CHECK_BUDGET, CHECK_RANK, CHECK_CONTEXT, options.sm, isas)
        for variant in ("hybrid", "gpu"):
            _say(f"check {quant}: {variant}")
            yield pack_model(shape, settings, variant, options.output)


def _bundled(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """For the row of the targets that has this compute capability, with the same instruction sets as all of them."""
    target = next((row.name for row in TARGETS.values() if row.architecture == f"sm_{options.sm}"), None)
    if target is None:
        _say(f"no bundled model: no target has compute capability {options.sm / 10}")
        return
    _say(f"bundled model, for {target}")
    yield from pack_bundled(BundledOptions(options.bundled, target), options.output)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
