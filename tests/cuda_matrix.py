"""Compiles the CUDA kernels of many models for every architecture, and checks what the compiler made of them.

python tests/cuda_matrix.py [--sm 75,80,86,89,90,120]

Of each model half of the neurons are hot, or more of them in one layer than in the next. Everything else is on the GPU,
or on the host, in the formats, predictors and caches of MODELS. Prints a line for each architecture, and one for each
fault, and ends with 1 where there is one: a kernel uses local memory, reads what others write by a load that may give
an old value, or waits without a fence (tests/helpers/ptx/loads.py and machine_code.py).
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from helpers.families import build, save
from helpers.ptx.device_code import code_in_folder
from helpers.ptx.machine_code import machine_faults
from helpers.ptx.syntax import parse
from helpers.weight_formats import ROW_FORMATS
from picompile.compile.passes import pipeline_passes, run_passes
from picompile.config import CompileOptions
from picompile.frontend.captured import Captured
from picompile.frontend.hf import load_model
from picompile.progress import NoProgress
from picompile_codegen.cuda.build import build_cuda
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower
from picompile_codegen.lowering.placement import ON_HOST, Placement
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition


class Model(NamedTuple):
    """A variant of tests/helpers/families.py, and what of it is compiled."""

    variant: str
    quant: str
    predictor: str = "auto"
    kv_dtype: str = "float16"
    sequences: int = 1


MODELS = (
    *(
        Model("llama-relu", quant, predictor, sequences=1 if predictor == "none" else 3)
        for quant in ROW_FORMATS
        for predictor in ("exact", "none", "learned", "sign")
    ),
    *(Model("llama-relu", "f16", "exact", kv_dtype) for kv_dtype in ("float32", "q8")),
    Model("falcon-7b", "f16"),
    *(
        Model(name, "q4")
        for name in ("opt-post-norm", "opt-pre-norm", "falcon-40b", "bamboo", "mistral-window", "qwen2")
    ),
)
CONTEXT, CHUNK, RANK = 64, 16, 24


def kernels_of(model: Model) -> dict[str, Any]:
    """The CUDA kernels by name: those of layers that are alike, those that other layers share, and those for what the
    host has."""
    with tempfile.TemporaryDirectory() as folder:
        save(model.variant, build(model.variant), Path(folder))
        captured = load_model(Path(folder))
    layers = range(captured.facts.layers)
    found: dict[str, Any] = {}
    everything = Placement.all_of(len(layers))
    for alike, placement in ((True, everything), (False, everything), (True, ON_HOST)):
        steps = {layer: 2 if alike else 2 + layer for layer in layers}
        hot = {layer: range(0, captured.facts.ffn, step) for layer, step in steps.items()}
        found |= _lowered(model, captured, hot, placement)
    return found


def _lowered(model: Model, captured: Captured, hot: dict[int, range], placement: Placement) -> dict[str, Any]:
    layers = range(captured.facts.layers)
    ranks = dict.fromkeys(layers, RANK) if model.predictor == "learned" else {}
    options = CompileOptions(target="4090", quant=model.quant)
    passes = [
        Partition(hot) if isinstance(each, Partition) else each
        for each in pipeline_passes(options, InsertPredictors(model.predictor, ranks=ranks))
    ]
    graph_module = run_passes(captured, passes, NoProgress())
    lowered = lower(graph_module, LowerOptions(CONTEXT, CHUNK, model.kv_dtype, model.sequences, "cuda", placement))
    return {kernel.name: kernel for kernel in lowered.accelerator_built.values()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sm", default="75,80,86,89,90,120")
    options = parser.parse_args()
    kernels = {name: kernel for model in MODELS for name, kernel in kernels_of(model).items()}
    is_wrong = False
    for sm in map(int, options.sm.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            build_cuda(kernels.values(), Path(folder), sm)
            code = code_in_folder(Path(folder))
        made, functions = code.description["kernels"], parse(code.ptx)
        faults = [*code.wrong_loads(functions), *machine_faults(code, functions)]
        launches = [launch for of_kernel in made.values() for launch in of_kernel]
        most = {key: max(launch[key] for launch in launches) for key in ("registers", "shared_bytes", "local_bytes")}
        text = ", ".join(f"{key} {value} at most" for key, value in most.items())
        print(f"sm_{sm}: {len(made)} kernels, {len(launches)} launches; {text}", flush=True)
        for fault in faults:
            print(f"  {fault}", flush=True)
        is_wrong |= bool(faults)
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
