"""`picompile compile`: from a Hugging Face folder to an artifact."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from picompile.choices import (
    BUDGET_FORMATS,
    DEFAULT_ROUNDING_TOKENS,
    DEFAULT_SKIP_TOKENS,
    DRAFT_TOKENS,
    FORMATS_HELP,
    LOSSLESS,
    check_quant,
    is_budget,
    parse_bits,
)
from picompile.cli.accuracy_show import reported_comparison, show_comparison
from picompile.cli.checks import (
    checkpoint_weights,
    format_bytes,
    require_context,
    require_model_folder,
    require_output,
    require_text_file,
)
from picompile.cli.options import (
    AccuracyOption,
    ActivationOption,
    Bf16,
    CalibrationOption,
    DebugOption,
    HostBandwidthOption,
    HostMemoryOption,
    HotDeviceOption,
    KvDtype,
    ModelArgument,
    PredictorQuantOption,
    Rounding,
    VramBudgetOption,
)
from picompile.cli.progress import progress
from picompile.cli.skipping_show import skipping_text
from picompile.cli.weights_show import weights_text
from picompile.errors import UsageError
from picompile.machine import gpu_of
from picompile.output import parents_of
from picompile.output.place import require_disk_space
from picompile.quantities import parse_accuracy, parse_checked_bound, parse_count, parse_share, shortened
from picompile_passes.formats import FORMATS


def compile_command(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="ARTIFACT", help="The folder to make.")],
    target: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            envvar="PICOMPILE_TARGET",
            help="The machine to compile for, or several separated by commas; see [bold]picompile targets[/]. "
            "native: this machine's processor and no other.",
        ),
    ] = "cpu",
    quant: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help=f"{FORMATS_HELP}. With 4 bits the output head and embeddings are in q6. Or a budget, as in 5.2bpw: "
            "bits a weight on average, spent where they keep most; auto: as few as keep the model's predictions.",
        ),
    ] = "q4",
    rounding: Annotated[
        Rounding | None,
        typer.Option(
            help="How weights are rounded. calibrated: so that errors on calibration text make up for each other. "
            "nearest: each by itself. Default: calibrated with --calibration or --work, for formats below 8 bits.",
            show_default=False,
        ),
    ] = None,
    rounding_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens that weights are rounded for, at most.")
    ] = DEFAULT_ROUNDING_TOKENS,
    activation: ActivationOption = None,
    predictor: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Method used to predict active neurons. exact: from the gating matrix, computed in full; lossless, "
            "ReLU family only. learned: a small trained predictor for each layer. sign: the signs of the weights. "
            "none: compute every neuron. Or a plug-in's kind. Default: exact where neurons can be silent, else none.",
            show_default=False,
        ),
    ] = None,
    predictor_quant: PredictorQuantOption = None,
    predictors: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Take the predictors that train or import-predictors made. Default: train them."
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Train predictors and plan with this profile. Default: make one."),
    ] = None,
    calibration: CalibrationOption = None,
    gate: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="Accuracy bound: how far predictors may raise the perplexity on held-out text. report: measure, and "
            "allow any. off: measure nothing.",
        ),
    ] = "0.1%",
    gate_tokens: Annotated[
        int, typer.Option(metavar="N", min=2, help="Tokens of held-out text that the accuracy check reads, at most.")
    ] = 4096,
    accuracy: AccuracyOption = None,
    skip: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Leave out neurons that contribute little, known from gate and output, as many as raise the "
            "perplexity by no more than this; for any activation, without training. Default: none.",
            show_default=False,
        ),
    ] = None,
    skip_at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLACE",
            help="Where to skip. gate: neurons, before up and down are read. output: neurons, before down is read. "
            "Repeatable. Default: gate and output.",
            show_default=False,
        ),
    ] = None,
    skip_tokens: Annotated[
        int, typer.Option(metavar="N", min=2, help="Tokens that perplexity is measured on for --skip, at most.")
    ] = DEFAULT_SKIP_TOKENS,
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the profile, the predictors and rounded weights here, and continue from what is there.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Longest sequence, in tokens. Default: the model's own limit, at most 4096."
        ),
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="Tokens of a prompt that are read together. Default: 128, or 512 with a GPU, to which the host's "
            "weights are copied once for each chunk.",
        ),
    ] = None,
    sequences: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=256, help="Sequences that the KV cache holds; they can be decoded together."
        ),
    ] = 1,
    draft_tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=255,
            help="Tokens of a draft that one step can check (run --draft); 0 for none, as with a GPU.",
        ),
    ] = DRAFT_TOKENS,
    bf16: Annotated[
        Bf16,
        typer.Option(
            help="Whether prompts are computed in bfloat16 where weights are f16 and the target has it (native, "
            "cpu-avx512-bf16). auto: where that keeps the perplexity within --gate, which is measured.",
        ),
    ] = Bf16.AUTO,
    kv_dtype: Annotated[
        KvDtype | None,
        typer.Option(help="Element type of the KV cache. Default: f16, but f32 for FATReLU models."),
    ] = None,
    passes: Annotated[
        list[str] | None,
        typer.Option(
            "--pass",
            metavar="NAME",
            help="Run one more pass, written name{option=value,…}@stage; options and stage are optional. Repeatable.",
        ),
    ] = None,
    hot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='Split feed-forward blocks by hand: a JSON file of hot neurons by layer, {"0": [5, 17], "1": [3]}.',
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Split feed-forward blocks by this plan of picompile plan. Default: with a GPU, make one.",
        ),
    ] = None,
    vram_budget: VramBudgetOption = None,
    host_memory: HostMemoryOption = None,
    host_bandwidth: HostBandwidthOption = None,
    hot_device: Annotated[
        HotDeviceOption | None,
        typer.Option(
            help="The accelerator of hot neurons and of what the plan puts beside them. cuda: the target's GPU. cpu: a "
            "second partition of the CPU, with the same schedule. Default: cuda if the target has a GPU; else hot "
            "and cold neurons run one after the other on the host.",
            show_default=False,
        ),
    ] = None,
    dump_ir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the graph after each pass to DIR/NNN_pass-name.txt.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Check the graph at every stage.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an artifact that is at this path.")] = False,
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
      picompile compile models/tiny-reglu -o build/checked --accuracy 5%
      picompile compile models/tiny-reglu -o build/4090 --target 4090 --vram-budget 8GiB
    """
    gpu_of(target)  # for its checks alone
    check_quant(quant)
    require_model_folder(model)
    require_context(model, context)
    require_output(output, overwrite=force, marker="manifest.json")
    # Rows are padded, so an artifact is never smaller than this.
    needed_bytes = int(checkpoint_weights(model) * _least_bits(quant) / 8)
    require_disk_space(output, needed_bytes, "{output}: needs about {needed} on disk, {free} are free")
    if plan is not None and hot is not None:
        raise UsageError("--plan and --hot both say which neurons are hot; give one of them")
    hot_neurons = None if hot is None else read_hot(hot)
    bound, accuracy_bound = parse_checked_bound(gate), None if accuracy is None else parse_accuracy(accuracy)

    from picompile.compile import compile_model
    from picompile.config import CompileOptions
    from picompile.placement.plan_file import read_plan

    options = CompileOptions(
        target=target,
        quant=quant,
        rounding=None if rounding is None else rounding.value,
        rounding_tokens=rounding_tokens,
        predictor=predictor,
        predictor_quant=predictor_quant,
        context=context,
        chunk=prefill_chunk,
        sequences=sequences,
        draft_tokens=draft_tokens,
        kv_dtype=kv_dtype.value if kv_dtype is not None else None,
        bf16=bf16.value,
        hot=hot_neurons,
        plan=None if plan is None else read_plan(plan),
        vram_budget=vram_budget,
        host_memory=host_memory,
        host_bandwidth=host_bandwidth,
        hot_device=None if hot_device is None else hot_device.value,
        passes=tuple(passes or ()),
        dump_ir=dump_ir,
        verify=verify,
        overwrite=force,
        predictors=predictors,
        profile=profile,
        calibration=tuple(calibration or ()),
        gate=bound,
        gate_tokens=gate_tokens,
        accuracy=accuracy_bound,
        work=work,
        activation=activation,
        skip=None if skip is None else parse_share(skip, "--skip"),
        skip_at=tuple(skip_at or ()),
        skip_tokens=skip_tokens,
    )
    with parents_of(output), progress() as shown:
        compile_model(model, output, options, shown)
    print(_summary(output))
    if (comparison := reported_comparison(output)) is not None:
        show_comparison(comparison)


def _least_bits(quant: str) -> float:
    """Return how many bits a weight takes at least."""
    return FORMATS[quant].bits if quant in FORMATS else parse_bits(quant) or FORMATS[BUDGET_FORMATS[0]].bits


def read_hot(path: Path) -> Mapping[int, Sequence[int]]:
    """Return what the file of `--hot` holds: neuron numbers by layer number. Raise `UsageError`."""
    try:
        content = json.loads(require_text_file(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: must be a JSON object from layer to a list of neurons")
    return {_layer(path, key): _neurons(path, key, value) for key, value in content.items()}


def _layer(path: Path, key: str) -> int:
    number = parse_count(key)
    if number is None:
        raise UsageError(f"{path}: {shortened(repr(key))} is not a layer number")
    return number


def _neurons(path: Path, layer: str, value: Any) -> tuple[int, ...]:
    numbers = isinstance(value, list) and all(type(neuron) is int and neuron >= 0 for neuron in value)
    if not numbers:
        raise UsageError(f"{path}: layer {layer} must be a list of neuron numbers, from 0 on")
    if len(set(value)) != len(value):
        raise UsageError(f"{path}: layer {layer} names a neuron twice")
    return tuple(sorted(value))


def _summary(artifact: Path) -> str:
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
    elif not set(manifest["predictor"].split("+")) <= set(LOSSLESS):
        text += "\nwhat its predictors cost was not measured (--gate off)"
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
