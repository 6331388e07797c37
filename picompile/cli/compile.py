"""`picompile compile`: from a Hugging Face folder to an artifact."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from picompile.choices import BUDGET_FORMATS, CANDIDATES, DEFAULT_QUANT, FOUR_BITS, STORED, is_budget, parse_bits
from picompile.cli.accuracy_show import reported, show_comparison
from picompile.cli.checks import (
    checkpoint_weights,
    require_context,
    require_output,
)
from picompile.cli.local_model import local_model
from picompile.cli.options import DebugOption, ModelArgument
from picompile.cli.progress import progress
from picompile.cli.skipping_show import skipping_text
from picompile.cli.weights_show import weights_text
from picompile.config import CompileOptions
from picompile.output import parents_of
from picompile.output.place import require_disk_space
from picompile.processes import uncollected
from picompile.quantities import format_bytes
from picompile_passes.formats import FORMATS


def compile_command(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="ARTIFACT", help="The folder to make.")],
    options: CompileOptions,
    debug: DebugOption = False,
) -> None:
    """Compile a checkpoint into an artifact.

    The model may be larger than the machine's memory: weights are read, packed
    and written one tensor at a time.

    \b
    Examples:
      picompile compile models/tiny-reglu -o build/tiny
      picompile compile models/tiny-reglu -o build/f16 --quant f16 --context 512
      picompile compile models/tiny-reglu -o build/learned --predictor learned --work build/work
      picompile compile models/tiny-reglu -o build/checked --checkpoint-bound 5%
      picompile compile models/tiny-reglu -o build/4090 --target 4090 --vram-budget 8GiB
    """
    require_output(output, overwrite=options.overwrite, marker="manifest.json")
    path = local_model(model)
    require_context(path, options.context)
    # Rows are padded, so an artifact is never smaller than this.
    needed_bytes = int(checkpoint_weights(path) * _least_bits(options.quant or DEFAULT_QUANT) / 8)
    require_disk_space(output, needed_bytes, "{output}: needs about {needed} on disk, {free} are free")

    with uncollected():
        from picompile.compile import compile_model

    with parents_of(output), progress() as shown:
        compile_model(path, output, options, shown)
    print(_summary(output))
    if (comparison := reported(output).get("checkpoint_accuracy")) is not None:
        show_comparison(comparison)


def _least_bits(quant: str) -> float:
    """Return how many bits a weight takes at least."""
    if quant in (STORED, FOUR_BITS):
        return min(FORMATS[name].bits for name in FORMATS if quant == STORED or name in CANDIDATES)
    return FORMATS[quant].bits if quant in FORMATS else parse_bits(quant) or FORMATS[BUDGET_FORMATS[0]].bits


def _summary(artifact: Path) -> str:
    from picompile_passes.predictors import predictor_kind

    manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    size = sum(record["bytes"] for record in manifest["files"].values())
    facts = f"{manifest['quant']}, {manifest['predictor']}, context {manifest['context']}"
    text = f"{artifact}: {manifest['model']['name']}, {facts}, {format_bytes(size)}"
    report = json.loads((artifact / "report.json").read_text(encoding="utf-8"))
    if skipping := report.get("skipping"):
        text += f"\nleft out: {skipping_text(skipping)}"
    if is_budget(manifest["quant"]) or report["rounding"]["method"] == "calibrated":
        text += f"\nmatrices: {weights_text(report['weight_formats'], report['rounding'])}"
    if accuracy := manifest.get("accuracy"):
        text += f"\nperplexity {_change_text(accuracy)} by its predictors, on {_text_of(accuracy)}"
    elif not all(predictor_kind(kind).lossless for kind in manifest["predictor"].split("+")):
        text += "\nwhat its predictors cost was not measured (--accuracy-bound off)"
    if (bf16 := manifest.get("bf16_accuracy")) and any("bf16" in entry["isa"] for entry in manifest["code"]):
        text += f"\nperplexity {_change_text(bf16)} by prompts in bfloat16, on {_text_of(bf16)}"
    return text


def _change_text(accuracy: dict[str, Any]) -> str:
    """Return a measured change of the perplexity, with its confidence interval where there is one."""
    interval = accuracy["interval"] or [None, None]
    within = "" if None in interval else f" ({interval[0]:+.3%} to {interval[1]:+.3%})"
    return f"{accuracy['relative_change']:+.3%}{within}"


def _text_of(accuracy: dict[str, Any]) -> str:
    return f"{accuracy['tokens']:,} tokens of {accuracy['text']}"
