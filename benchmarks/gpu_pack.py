"""Packs what `benchmarks/gpu.py` runs, on a machine with picompile and without a GPU.

    python benchmarks/gpu_pack.py -o build/gpu --sm 90 [--models llama-7b:f16 llama-70b:q4] [--budget 0.333]

The pack is a folder of some MB: kernels as cubin and PTX with a list of cases, and artifacts of whole models without
their weights. It says nothing of speed: nothing in it has run on a GPU until `gpu.py` has run there.
"""

import argparse
import sys
from pathlib import Path

from _gpu_cases import pack_kernels, small_cases, speed_cases
from _gpu_models import VARIANTS, ModelOptions, pack_model, write_index

from picompile.synth import find_shape
from picompile.targets import TARGETS

SCHEMA = 1
# Of the model that is compared with eager PyTorch: odd sizes, heads that share keys, two layers.
CHECK_CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 192, "intermediate_size": 704, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_act": "relu", "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
CHECK_BUDGET, CHECK_RANK, CHECK_CONTEXT = 0.6, 32, 96


def main() -> None:
    options = _arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    kernels = []
    for name, cases in (("small", list(small_cases())), ("speed", [] if options.small else list(speed_cases()))):
        if cases:
            _say(f"{len(cases)} kernels: {name}")
            kernels.append(
                {"folder": name, "cases": pack_kernels(cases, options.output / name / "kernels", options.sm)}
            )
    models = []
    for text in options.models:
        models += _models(text, options)
    checks = _checks(options)
    write_index(
        options.output, {"schema": SCHEMA, "sm": options.sm, "kernels": kernels, "checks": checks, "models": models}
    )
    size = sum(path.stat().st_size for path in options.output.rglob("*") if path.is_file())
    _say(f"{options.output}: {size / 1e6:.1f} MB")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("build/gpu"))
    parser.add_argument(
        "--sm", type=int, default=90, help="compute capability times ten; 90 is an H100's and an H200's"
    )
    parser.add_argument(
        "--models", nargs="*", default=["llama-7b:f16", "llama-7b:q4", "llama-70b:q4"], metavar="SHAPE:QUANT"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--budget", type=float, default=1 / 3, help="share of the dense model that the GPU may hold")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--isas", nargs="+", default=list(TARGETS["h100"].isas))
    parser.add_argument("--checks", nargs="*", default=["f16", "q8", "q4"], help="formats of the model that is checked")
    parser.add_argument("--small", action="store_true", help="no kernels whose speed is measured")
    return parser.parse_args()


def _models(text: str, options: argparse.Namespace) -> list[dict[str, object]]:
    name, _, quant = text.partition(":")
    shape = find_shape(name)
    if shape.activation != "relu" or shape.config["model_type"] != "llama":
        sys.exit(f"{name}: only Llama's shapes with ReLU are measured")
    # Predictors of 6 % of the parameters at most, and ranks that are read in whole cache lines.
    rank = max(32, shape.hidden // 8 // 32 * 32)
    settings = ModelOptions(quant or "q4", options.budget, rank, options.context, options.sm, tuple(options.isas))
    entries = []
    for variant in options.variants:
        _say(f"{shape.name} {quant}: {variant}")
        entries.append(pack_model(shape, settings, variant, options.output))
    return entries


def _checks(options: argparse.Namespace) -> list[dict[str, object]]:
    """The model that is compared with eager PyTorch: split over both devices, and all on the GPU."""
    from picompile.synth.shapes import shape_from_config

    shape, entries = shape_from_config("check", CHECK_CONFIG), []
    for quant in options.checks:
        settings = ModelOptions(quant, CHECK_BUDGET, CHECK_RANK, CHECK_CONTEXT, options.sm, tuple(options.isas))
        for variant in ("hybrid", "gpu"):
            _say(f"check {quant}: {variant}")
            entries.append(pack_model(shape, settings, variant, options.output))
    return entries


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
